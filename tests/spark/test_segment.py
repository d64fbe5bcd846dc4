"""One file as Arrow: the same rows that the broker reads, each once, in little memory."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compressed import reading_records, readings, with_compressed_values
from support.data_directory import locked_by_another
from support.log_files import IDENTITY, Writer, everything, numbered, open_log

from portalmq.broker.storage.batch import HOLE, BatchKind, Record
from portalmq.broker.storage.compaction import Compaction, CompactionOrder
from portalmq.broker.storage.log import Log as BrokerLog
from portalmq.spark.columns import COLUMNS, MESSAGES_TABLE
from portalmq.spark.errors import DamagedFile, SourceError
from portalmq.spark.files import segment
from portalmq.spark.files.segment import SegmentRows
from portalmq.spark.origin import PartitionLog

NOTHING = st.none()
MOMENTS = st.integers(0, 2**53 - 1)
RECORDS = st.builds(
    Record,
    value=st.binary(max_size=40) | st.text(max_size=10).map(str.encode) | st.just(b'{"t": 20.5}'),
    content_type=st.sampled_from(["application/octet-stream", "application/json", "text/plain", "image/png"]),
    key=NOTHING | st.binary(max_size=5) | st.text(max_size=5).map(str.encode),
    headers=NOTHING | st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    deliver_at_ms=NOTHING | MOMENTS,
    expires_at_ms=NOTHING | MOMENTS,
    priority=st.sampled_from([0, 0, 0, 1, 31]),
)
PLAIN = st.builds(Record, value=st.binary(max_size=20))
KEYED = st.builds(Record, value=st.just(b"v"), key=st.sampled_from([b"a", b"b", b"c"]))
BATCHES = st.tuples(
    st.lists(PLAIN, min_size=1, max_size=12)
    | st.lists(KEYED, min_size=1, max_size=8)
    | st.lists(RECORDS, min_size=1, max_size=6),
    st.sampled_from([(-1, -1, -1), (7, 0, 100), (2**40, 3, 0)]),
    st.booleans(),
)
STEPS = st.lists(BATCHES | st.just("control") | st.just("roll"), min_size=1, max_size=12)


def log_of(log: BrokerLog) -> PartitionLog:
    return PartitionLog(IDENTITY.topic, IDENTITY.topic_id, IDENTITY.partition, log.log_start_offset, log.end_offset)


def moment(ms: int | None) -> int | None:
    return None if ms is None else ms * 1000


def as_broker_reads(log: BrokerLog) -> list[dict[str, Any]]:
    """Return the broker's rows with times in microseconds: a datetime cannot hold distant times."""
    rows = []
    for batch in everything(log):
        for index, record in enumerate(batch.records):
            if record is HOLE:
                continue
            idempotent = batch.producer_id >= 0
            rows.append(
                {
                    "topic": IDENTITY.topic,
                    "partition": IDENTITY.partition,
                    "offset": batch.base_offset + index,
                    "key": record.key,
                    "value": record.value,
                    "content_type": record.content_type,
                    "headers": None if record.headers is None else list(record.headers.items()),
                    "timestamp": moment(batch.appended_at_ms),
                    "deliver_at": moment(record.deliver_at_ms),
                    "expires_at": moment(record.expires_at_ms),
                    "priority": record.priority,
                    "appended_at": moment(batch.appended_at_ms),
                    "leader_epoch": batch.leader_epoch,
                    "producer_id": batch.producer_id if idempotent else None,
                    "sequence": batch.sequence + index if idempotent else None,
                }
            )
    return rows


def rows_of(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    rows = []
    for batch in batches:
        for index, field in enumerate(batch.schema):
            if pa.types.is_timestamp(field.type):
                batch = batch.set_column(index, field.name, batch.column(index).cast(pa.int64()))
        rows += batch.to_pylist()
    return rows


def read_back(directory: Path, log: PartitionLog, columns: list[str], start: int, end: int) -> list[dict[str, Any]]:
    """Return the rows of every file in the directory that holds a part of [start, end)."""
    paths = sorted(directory.glob("0*.sqlite"))
    bases = [int(path.name[:20]) for path in paths]
    rows = []
    for path, base, following in zip(paths, bases, [*bases[1:], log.end_offset], strict=True):
        low, high = max(start, base), min(end, following)
        if low < high:
            batches = list(SegmentRows(path, log, columns).batches(low, high))
            assert all(batch.schema == MESSAGES_TABLE.arrow_schema(columns) for batch in batches)
            rows += rows_of(batches)
    return rows


@settings(max_examples=150, deadline=None)
@given(
    steps=STEPS,
    compacted=st.booleans(),
    columns=st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True) | st.just(list(COLUMNS)),
    range_=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    chunk=st.sampled_from([(1, 1 << 24), (3, 1 << 24), (7, 64), (65_536, 16), (65_536, 200), (65_536, 1 << 24)]),
)
def test_any_columns_of_any_range_agree_with_the_broker(steps, compacted, columns, range_, chunk):
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment, "CHUNK_OFFSETS", chunk[0])
        patch.setattr(segment, "CHUNK_BYTES", chunk[1])
        directory = Path(name)
        log = open_log(directory)
        writer = Writer(log)
        for step in steps:
            writer.at_ms += 3
            if step == "control":
                writer.put_control(BatchKind.ACK, b"body", "g")
            elif step == "roll":
                log.roll()
            else:
                records, stamp, are_compressed = step
                batch = writer.messages_batch(records, stamp=stamp)
                if are_compressed and all(record.value for record in records):
                    batch = with_compressed_values(batch)
                log.append([batch])
        if compacted:
            log.roll()
            log.seal(log.end_offset)
            work = Compaction(log, CompactionOrder(log.end_offset, 0, 1_000_000, ()))
            while work.step():
                pass
            work.close()
        expected, readable = as_broker_reads(log), log_of(log)
        log.close()
        start, end = sorted(round(part * readable.end_offset) for part in range_)
        assert read_back(directory, readable, columns, start, end) == [
            {name: row[name] for name in columns} for row in expected if start <= row["offset"] < end
        ]


def one_file(directory: Path, *batches: list[Record | bytes], seal: bool = False) -> tuple[Path, PartitionLog]:
    log = open_log(directory)
    writer = Writer(log)
    for records in batches:
        writer.put(*records)
    if seal:
        log.roll()
        log.seal(log.end_offset)
    log.close()
    return directory / f"{0:020d}.sqlite", log_of(log)


def values(path: Path, log: PartitionLog) -> list[bytes]:
    return [
        value.as_py()
        for batch in SegmentRows(path, log, ["offset", "value"]).batches(log.start_offset, log.end_offset)
        for value in batch.column("value")
    ]


@pytest.mark.parametrize("chunk", [7, 65_536])
def test_compressed_values_are_read_as_they_were_sent(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(segment, "CHUNK_OFFSETS", chunk)
    log = open_log(tmp_path)
    writer = Writer(log)
    for number in range(3):
        log.append([with_compressed_values(writer.messages_batch(reading_records(20, 100 * number)))])
        writer.put(b"plain")
    log.close()
    expected = [value for number in range(3) for value in [*readings(20, 100 * number), b"plain"]]
    assert values(tmp_path / f"{0:020d}.sqlite", log_of(log)) == expected


def test_a_chunk_is_bounded_by_what_its_compressed_values_take(tmp_path, monkeypatch):
    monkeypatch.setattr(segment, "CHUNK_BYTES", 10_000)
    log = open_log(tmp_path)
    writer = Writer(log)
    for number in range(20):
        log.append([with_compressed_values(writer.messages_batch(reading_records(100, 100 * number)))])
    log.close()
    read = list(SegmentRows(tmp_path / f"{0:020d}.sqlite", log_of(log), ["value"]).batches(0, log.end_offset))
    assert sum(batch.num_rows for batch in read) == 2_000
    assert max(batch.nbytes for batch in read) < 10_000 + 100 * 60


def test_missing_compressed_values_are_damage(tmp_path):
    log = open_log(tmp_path)
    log.append([with_compressed_values(Writer(log).messages_batch(reading_records(20)))])
    log.close()
    path = tmp_path / f"{0:020d}.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM compressed_values")
    connection.close()
    with pytest.raises(DamagedFile):
        values(path, log_of(log))


# --- memory and shape -------------------------------------------------------------------------------------------------


def test_no_batch_is_larger_than_a_chunk_unless_one_message_is(tmp_path):
    light, heavy = b"x" * 100, b"y" * (1 << 20)
    path, log = one_file(
        tmp_path, *([light] * 300 + [heavy] * 5 for _ in range(10)), [b"z" * 20_000_000], [light] * 300
    )
    read = list(SegmentRows(path, log, tuple(COLUMNS)).batches(0, log.end_offset))
    assert sum(batch.num_rows for batch in read) == log.end_offset
    too_heavy = [batch for batch in read if batch.column("value").nbytes > segment.CHUNK_BYTES]
    assert [batch.num_rows for batch in too_heavy] == [1]
    assert len(read) < 30  # and light messages beside heavy ones still share batches


def test_light_messages_share_a_batch(tmp_path):
    path, log = one_file(tmp_path, *([b"x" * 100] * 10_000 for _ in range(14)))
    sizes = [batch.num_rows for batch in SegmentRows(path, log, tuple(COLUMNS)).batches(0, log.end_offset)]
    assert sizes == [65_536, 65_536, 140_000 - 2 * 65_536]


def test_a_chunk_without_messages_is_no_batch(tmp_path):
    log = open_log(tmp_path)
    for _ in range(10):
        Writer(log).put_control(BatchKind.ACK, b"body", "g")
    log.close()
    path = tmp_path / f"{0:020d}.sqlite"
    assert list(SegmentRows(path, log_of(log), ["offset"]).batches(0, 10)) == []


# --- missing, torn or foreign files -----------------------------------------------------------------------------------


def alter(path: Path, *statements: str) -> None:
    path.chmod(0o644)
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


BEYOND = """
INSERT INTO messages (offset, key, value, content_type, headers, timestamp_ms, deliver_at_ms, expires_at_ms, priority)
SELECT 25, key, value, content_type, headers, timestamp_ms, deliver_at_ms, expires_at_ms, priority FROM messages LIMIT 1
"""


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM messages WHERE offset = 7", "lacks 1 of the messages from offset 0 to 19"),
        ("DELETE FROM batches WHERE base_offset = 10", "lacks a part of the offsets 0 to 19"),
        ("UPDATE batches SET count = 9 WHERE base_offset = 10", "lacks a part of the offsets 0 to 19"),
        ("DELETE FROM batches", "holds no offset from 0 to 19"),
        (BEYOND, None),
        ("UPDATE messages SET content_type = 99 WHERE offset = 3", "content type 99 is not in it"),
        ("UPDATE messages SET headers = 'no JSON' WHERE offset = 3", "not a file of PortalMQ, or torn .JSON"),
        ("UPDATE messages SET headers = '{}' || char(10) || '{}' WHERE offset = 3", "not a file of PortalMQ, or torn"),
        ("UPDATE messages SET headers = x'ff' WHERE offset = 3", "not a file of PortalMQ, or torn"),
        ("UPDATE messages SET deliver_at_ms = 'soon' WHERE offset = 3", "not a file of PortalMQ, or torn"),
        ("UPDATE batches SET appended_at_ms = 'now'", "not a file of PortalMQ, or torn"),
        ("DROP TABLE messages", "not a file of PortalMQ"),
    ],
)
def test_a_file_with_missing_rows_is_reported(tmp_path, statement, said):
    path, log = one_file(tmp_path, numbered(10), numbered(10))
    alter(path, statement)
    read = SegmentRows(path, log, tuple(COLUMNS)).batches(0, 20)
    if said is None:  # later rows do not matter
        assert sum(batch.num_rows for batch in read) == 20
        return
    with pytest.raises(DamagedFile, match=said):
        list(read)


def test_only_compacted_messages_may_be_missing(tmp_path):
    path, log = one_file(tmp_path, numbered(10), numbered(10))
    alter(path, "INSERT INTO holes VALUES (10, 2, 0)", "DELETE FROM messages WHERE offset IN (11, 12)")
    assert len(values(path, log)) == 18
    alter(path, "DELETE FROM messages WHERE offset = 13")
    with pytest.raises(DamagedFile, match="lacks 3 of the messages"):
        values(path, log)


@pytest.mark.parametrize("size", [0, 100, 4096, 10_000])
def test_a_torn_file_is_reported(tmp_path, size):
    path, log = one_file(tmp_path, *(numbered(100) for _ in range(10)), seal=True)
    path.chmod(0o644)
    os.truncate(path, size)
    with pytest.raises(DamagedFile, match=path.name):
        values(path, log)


def test_a_foreign_file_is_reported(tmp_path):
    path = tmp_path / "00000000000000000000.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(DamagedFile, match="not a file of PortalMQ"):
        values(path, PartitionLog("t", "id", 0, 0, 10))


def test_a_removed_file_is_not_reported_as_damaged(tmp_path):
    path, log = one_file(tmp_path, numbered(10))
    path.unlink()
    with pytest.raises(FileNotFoundError):
        values(path, log)


@pytest.mark.parametrize("is_live", [False, True])
def test_a_file_removed_just_before_its_opening_is_not_created_again(tmp_path, monkeypatch, is_live):
    """On its next start the broker would read an empty file in its place as a foreign segment."""
    path, log = one_file(tmp_path / "log", numbered(10))
    if is_live:
        Path(f"{path}-wal").touch()
    real = segment.is_at_rest

    def is_at_rest(seen: Path) -> bool:
        found = real(seen)
        for each in (path, Path(f"{path}-wal")):
            each.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(segment, "is_at_rest", is_at_rest)
    with pytest.raises(FileNotFoundError):
        values(path, log)
    assert not path.exists()
    shutil.copy(one_file(tmp_path / "other", numbered(10))[0], path)
    with pytest.raises(FileNotFoundError), segment.opened(path) as connection:
        connection.execute("SELECT * FROM meta").fetchall()
    assert not path.exists()


# --- a file that changes while it is read -----------------------------------------------------------------------------


class _Once:
    """Call an action before or after the real `_read` reads the first chunk."""

    def __init__(self, patch: pytest.MonkeyPatch, act: Any, *, after: bool) -> None:
        self.calls: list[bool] = []
        real = SegmentRows._read

        def read(rows: SegmentRows, start: int, end: int, *, immutable: bool) -> pa.RecordBatch | None:
            first = not self.calls
            self.calls.append(immutable)
            if first and not after:
                act()
            try:
                return real(rows, start, end, immutable=immutable)
            finally:
                if first and after:
                    act()

        patch.setattr(SegmentRows, "_read", read)


@pytest.mark.parametrize("after", [False, True], ids=["before it is read", "when it was read"])
def test_a_chunk_of_a_file_that_is_opened_during_the_read_is_read_again_as_a_live_one(tmp_path, monkeypatch, after):
    path, log = one_file(tmp_path, numbered(100))
    monkeypatch.setattr(segment, "CHUNK_OFFSETS", 40)
    reopened = []

    def append_more() -> None:
        again = open_log(tmp_path)
        Writer(again).put(*numbered(50, start=100))
        reopened.append(again)

    once = _Once(monkeypatch, append_more, after=after)
    assert values(path, log) == numbered(100)
    assert once.calls == [True, False, False, False]
    reopened[0].close()


@pytest.mark.parametrize("after", [False, True], ids=["before it is read", "when it was read"])
def test_a_file_that_was_written_and_closed_during_the_read_is_noticed_without_its_log(tmp_path, monkeypatch, after):
    """The file has no write-ahead log before and after the change; its modification time shows the change."""
    path, log = one_file(tmp_path, numbered(100))
    os.utime(path, (1, 1))

    def append_more() -> None:
        again = open_log(tmp_path)
        Writer(again).put(*numbered(50, start=100))
        again.close()

    once = _Once(monkeypatch, append_more, after=after)
    assert values(path, log) == numbered(100)
    assert once.calls == [True, True]


def test_a_fault_seen_while_the_file_changed_does_not_count(tmp_path, monkeypatch):
    path, log = one_file(tmp_path, numbered(100))
    whole = tmp_path / "whole"
    shutil.copy(path, whole)
    path.write_bytes(b"torn" * 1000)
    once = _Once(monkeypatch, lambda: os.replace(whole, path), after=True)
    assert values(path, log) == numbered(100)
    assert len(once.calls) == 2


def test_a_file_that_changes_all_the_time_is_reported(tmp_path, monkeypatch):
    path, log = one_file(tmp_path, numbered(10))
    real, calls = SegmentRows._read, []

    def read(rows: SegmentRows, start: int, end: int, *, immutable: bool) -> pa.RecordBatch | None:
        calls.append(immutable)
        os.utime(path, (len(calls), len(calls)))
        return real(rows, start, end, immutable=immutable)

    monkeypatch.setattr(SegmentRows, "_read", read)
    with pytest.raises(SourceError, match="again and again"):
        values(path, log)
    assert len(calls) == segment.ATTEMPTS


def test_a_locked_file_is_waited_for_and_not_called_damaged(tmp_path, monkeypatch):
    """Another process may lock the file for a moment; here it holds the lock for ever."""
    path, log = one_file(tmp_path, numbered(10))
    monkeypatch.setattr(segment, "BUSY_TIMEOUT_MS", 300)
    with locked_by_another(path):
        began = time.monotonic()
        with pytest.raises(SourceError, match="was kept locked for 300 ms"):
            values(path, log)
        assert time.monotonic() - began >= 0.3
    assert values(path, log) == numbered(10)


def test_nothing_is_written_beside_a_file_at_rest(tmp_path):
    path, log = one_file(tmp_path / "log", numbered(100), seal=True)
    before = sorted(os.listdir(path.parent))
    values(path, log)
    assert sorted(os.listdir(path.parent)) == before
