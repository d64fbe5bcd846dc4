"""Fetched batches as Arrow: the same rows as from the files, in bounded pieces."""

from __future__ import annotations

import zlib
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from support.compressed import compressed_request, reading_records
from support.data_directory import DataDirectory, written

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition import compaction
from portalmq.broker.storage.batch import Record
from portalmq.spark.columns import COLUMNS, MESSAGES_TABLE
from portalmq.spark.files.directories import Directories
from portalmq.spark.http_api import frames as frames_module
from portalmq.spark.http_api.frames import batches_of
from portalmq.spark.origin import PartitionLog

LOG = PartitionLog("t", "id", 3, 0, 1_000_000)


def frame(base: int, *records: contract.FrameRecord | None, kind: int = 0, sequence: int = -1) -> contract.Frame:
    producer = (7, 0) if sequence >= 0 else (-1, -1)
    header = msgspec.msgpack.encode(contract.FrameHead(base, len(records), 0, kind, 4, *producer, sequence, 1_234, ""))
    body = msgspec.msgpack.encode(records)
    return contract.Frame(header, zlib.crc32(body, zlib.crc32(header)), body)


def text(value: str, **more: object) -> contract.FrameRecord:
    return contract.FrameRecord(value.encode(), "text/plain", **more)  # type: ignore[arg-type]


def rows(*frames: contract.Frame, start: int = 0, end: int = 1_000, columns: tuple[str, ...] = ("offset", "value")):
    batches = list(batches_of(frames, LOG, start, end, columns))
    return pa.Table.from_batches(batches, MESSAGES_TABLE.arrow_schema(columns)).to_pylist()


def test_offsets_outside_the_range_are_left_out() -> None:
    first, second = frame(10, text("a"), text("b"), text("c")), frame(13, text("d"), text("e"))
    assert [row["offset"] for row in rows(first, second, start=11, end=14)] == [11, 12, 13]
    assert [row["value"] for row in rows(first, second, start=11, end=14)] == [b"b", b"c", b"d"]
    assert rows(first, start=13) == []


def test_compacted_messages_are_no_rows_and_the_others_keep_their_offsets_and_sequences() -> None:
    holed = frame(10, text("a"), None, text("c"), None, sequence=100)
    columns = ("offset", "value", "sequence", "producer_id")
    assert rows(holed, columns=columns) == [
        {"offset": 10, "value": b"a", "sequence": 100, "producer_id": 7},
        {"offset": 12, "value": b"c", "sequence": 102, "producer_id": 7},
    ]
    assert rows(holed, start=11, columns=("offset",)) == [{"offset": 12}]
    assert rows(frame(10, None, None)) == []


def test_control_records_are_no_rows() -> None:
    assert rows(frame(0, text("x"), kind=2), frame(1, text("a"))) == [{"offset": 1, "value": b"a"}]


def test_columns_have_the_requested_order_and_their_types() -> None:
    (batch,) = batches_of([frame(0, text("a"))], LOG, 0, 1, ("value", "topic", "partition", "leader_epoch"))
    assert batch.schema == MESSAGES_TABLE.arrow_schema(("value", "topic", "partition", "leader_epoch"))
    assert batch.to_pylist() == [{"value": b"a", "topic": "t", "partition": 3, "leader_epoch": 4}]


def test_arrow_batches_are_bounded_by_rows_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [frame(10 * base, *[text("x" * 100)] * 10) for base in range(20)]

    def sizes() -> list[int]:
        return [batch.num_rows for batch in batches_of(frames, LOG, 0, 1_000, ("value",))]

    assert sizes() == [200]
    monkeypatch.setattr(frames_module, "BATCH_ROWS", 50)
    assert sizes() == [50, 50, 50, 50]
    monkeypatch.setattr(frames_module, "BATCH_BYTES", 1)
    assert sizes() == [10] * 20


def test_frames_and_files_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "DIRTY_BYTES_MIN", 1)
    monkeypatch.setattr(compaction, "DIRTY_A_CLEAN", 0)
    with written(tmp_path / "data") as data:
        broker = data.fixture.broker
        for topic, config in (("t", {}), ("compacted", {"cleanup": "compact"})):
            data.topic(topic, **config)
            _all_kinds_of_messages(data, topic)
        broker.maintenance.compact()
        fetched = {topic: _by_frames(data, topic) for topic in ("t", "compacted")}
        assert fetched == {topic: _by_frames(data, topic, knows_compressed=True) for topic in ("t", "compacted")}
    origin = Directories([str(tmp_path / "data")])
    for log in origin.logs():
        batches = [
            batch
            for span in origin.spans(log, log.start_offset, log.end_offset)
            for batch in span.batches(tuple(COLUMNS))
        ]
        assert fetched[log.topic] == pa.Table.from_batches(batches).to_pylist()
    assert len(fetched["t"]) == 167
    assert len(fetched["compacted"]) == 15  # the last of each key


def _all_kinds_of_messages(data: DataDirectory, topic: str) -> None:
    now = data.fixture.clock.wall_ms()
    if topic == "t":
        data.put(topic, b"no key")
    data.put(topic, Record(b"", "text/plain", b""), Record(b"\xff\x00", "image/png", b"k\x00"))
    data.put(topic, *[Record(b"%d" % number, "application/json", b"%d" % (number % 9)) for number in range(100)])
    data.fixture.broker.produce(topic, compressed_request(reading_records(30, key=b"1"), partition=0))
    data.later(1_500)
    data.put(
        topic,
        Record(b"h", "text/plain", b"h", {"b": "2", "a": "\N{GREEK SMALL LETTER ALPHA}"}),
        Record(b"later", "text/plain", b"l", deliver_at_ms=now + 50_000, priority=31),
        Record(b"short-lived", "text/plain", b"s", expires_at_ms=now + 1_000_000),
        Record(b"plain", "text/plain", b"p"),
    )
    data.roll(topic)
    identity = data.fixture.broker.new_producer(None)
    for sequence in (0, 10, 20):
        data.fixture.broker.produce(
            topic,
            ProduceRequest(
                [Record(b"%d" % number, "text/plain", b"%d" % (number % 4)) for number in range(10)],
                partition=0,
                producer=wire.ProducerStamp(identity.id, identity.epoch, sequence),
            ),
        )
    data.roll(topic)


def _by_frames(data: DataDirectory, topic: str, *, knows_compressed: bool = False) -> list[dict[str, object]]:
    log = PartitionLog(topic, "", 0, 0, data.partition(topic).high_watermark)
    found: list[pa.RecordBatch] = []
    position = 0
    while position < log.end_offset:
        request = contract.FetchRequest([contract.PartitionOffset(topic, 0, position)], max_bytes=500)
        (answer,) = data.fixture.broker.reader_fetch.fetch(request, None, knows_compressed=knows_compressed)
        fetched = msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=contract.FetchedPartition)
        assert fetched.error is None
        found += batches_of(fetched.frames, log, position, log.end_offset, tuple(COLUMNS))
        position = fetched.next_offset
    rows: list[dict[str, object]] = pa.Table.from_batches(found).to_pylist()
    return rows
