"""Compressed values: stored and copied as they came, decompressed for whoever reads messages."""

from __future__ import annotations

import sqlite3
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import pytest
from support.compressed import readings
from support.log_files import Writer, crash_image, numbered, open_log

from portalmq.broker.storage.batch import (
    HOLE,
    BadFrame,
    BatchFrame,
    BatchKind,
    Record,
    batch_of_frame,
    checksum,
    frame_of,
    is_all_holes,
    opened,
    verified_header,
)
from portalmq.broker.storage.compaction import Compaction, CompactionOrder
from portalmq.broker.storage.errors import CorruptBatch
from portalmq.compression import compressed

NOW_MS = 1_000_000


def records_of(values, *, keys=None):
    return [Record(value, "application/json", keys[at] if keys else None) for at, value in enumerate(values)]


def batch_of(writer, records):
    """A batch as a leader has it: with its values, and with what the producer sent."""
    plain = writer.messages_batch(records)
    batch = msgspec.structs.replace(plain, compressed=compressed([record.value for record in records]))
    assert batch.compressed
    return msgspec.structs.replace(batch, crc=checksum(batch))


def put(log, records, *, at_ms=1_000):
    batch = batch_of(Writer(log, at_ms=at_ms), records)
    log.append([batch])
    return batch


def query(path, sql):
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()


MIXED = [
    Record(b"plain " * 20),
    Record(b"\xff\0" * 50, "image/png", key=b"k\xff"),
    Record(b"text " * 30, "text/plain", headers={"b": "2", "a": "1"}, priority=3, deliver_at_ms=5, expires_at_ms=9),
    Record(b"x" * 300, message_id=b"i" * 16, body_hash=b"h" * 8),
]


@pytest.mark.parametrize(
    "records",
    [
        MIXED,
        records_of(readings(50)),
        records_of(readings(50), keys=[b"key %d" % number for number in range(50)]),
        [Record(value, message_id=b"%16d" % at, body_hash=b"%8d" % at) for at, value in enumerate(readings(50))],
        [Record(b"one " * 1_000)],
    ],
    ids=["mixed", "alike", "keys", "ids", "one"],
)
def test_a_compressed_batch_comes_back_from_the_file_and_from_its_frame(tmp_path, records):
    log = open_log(tmp_path)
    sent = put(log, records)
    frame = frame_of(sent)
    assert frame.crc == sent.crc
    assert opened(batch_of_frame(frame, verified_header(frame))) == sent
    assert log.read(0) == [sent]
    log.close()
    log = open_log(tmp_path)
    assert log.read(0) == [sent]
    assert [log.lanes.message(offset)[2] for offset in range(len(records))] == records
    (copied,) = log.read_to_copy(0, max_bytes=1 << 20, below=log.end_offset)
    assert {record.value for record in copied.records} == {b""}
    assert frame_of(copied) == frame


def test_the_frame_is_hardly_larger_than_the_compressed_values(tmp_path):
    log = open_log(tmp_path)
    sent = put(log, records_of(readings(1_000)))
    assert frame_of(sent).size_bytes < len(sent.compressed) + 100


def test_plain_and_compressed_batches_share_a_transaction(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    batches = [
        writer.messages_batch(numbered(3)),
        batch_of(writer, records_of(readings(20))),
        writer.control_batch(BatchKind.GRANT, b"body", "group"),
        batch_of(writer, records_of(readings(20, 100))),
        writer.messages_batch(numbered(3)),
    ]
    log.append(batches)
    assert log.read(0) == batches


def test_a_file_without_compressed_values_stays_as_it_was(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(*numbered(3))
    path = log._segments[-1].path
    assert query(path, "SELECT value FROM meta WHERE key = 'schema_version'") == [(1,)]
    assert query(path, "SELECT count(*) FROM sqlite_schema WHERE name = 'compressed_values'") == [(0,)]


def test_a_file_of_an_earlier_version_takes_compressed_values(tmp_path):
    log = open_log(tmp_path)
    plain = Writer(log).put(*numbered(3))
    path = log._segments[-1].path
    log.read(0)  # the reader has seen the schema
    packed = put(log, records_of(readings(20)))
    assert log.read(0) == [plain, packed]
    assert query(path, "SELECT value FROM meta WHERE key = 'schema_version'") == [(2,)]
    assert query(path, "SELECT count(*), count(value) FROM messages") == [(23, 3)]
    log.close()
    log = open_log(tmp_path)
    again = put(log, records_of(readings(20)))
    assert log.read(0) == [plain, packed, again]
    assert log._segments[-1].writer.execute("PRAGMA integrity_check").get == "ok"


def test_a_failed_append_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    Writer(log).put(*numbered(3))
    batch = batch_of(Writer(log), records_of(readings(20)))
    with monkeypatch.context() as patched:
        patched.setattr("portalmq.broker.storage.segment.insert_messages", _fail)
        with pytest.raises(RuntimeError):
            log.append([batch])
    path = log._segments[-1].path
    assert query(path, "SELECT value FROM meta WHERE key = 'schema_version'") == [(1,)]
    log.append([batch])
    assert log.read(3) == [batch]


def _fail(*arguments, **more):
    raise RuntimeError


def test_compressed_values_survive_a_kill_and_sealing(tmp_path):
    log = open_log(tmp_path / "log")
    sent = [put(log, records_of(readings(20, 100 * number))) for number in range(3)]
    image = open_log(crash_image(tmp_path / "log", tmp_path / "image"))
    assert image.read(0) == sent
    image.roll()
    assert image.seal(image.end_offset) == 1
    assert image.read(0) == sent


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_truncation_removes_the_values_of_the_batches_it_removes(tmp_path, kept):
    log = open_log(tmp_path)
    sent = [put(log, records_of(readings(20, 100 * number))) for number in range(3)]
    log.truncate(20 * kept)
    assert log.read(0) == sent[:kept]
    path = log._segments[-1].path
    assert query(path, "SELECT count(*) FROM compressed_values") == [(kept,)]
    sent[kept:] = [put(log, records_of(readings(20, 7_000)))]
    assert log.read(0) == sent
    assert log.lanes.message(20 * kept)[2].value == readings(1, 7_000)[0]


def test_reading_stops_at_the_size_of_the_values_and_copying_at_that_of_the_frame(tmp_path):
    log = open_log(tmp_path)
    for number in range(10):
        put(log, records_of(readings(100, 1_000 * number)))
    assert len(log.read(0, max_bytes=8_000)) == 2
    assert len(log.read_to_copy(0, max_bytes=8_000, below=log.end_offset)) > 4


def test_messages_below_the_log_start_are_purged_in_the_middle_of_a_batch(tmp_path):
    log = open_log(tmp_path)
    sent = put(log, records_of(readings(20)))
    log.advance_log_start(7)
    assert log.read(7) == [sent]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM compressed_values",
        "UPDATE compressed_values SET data = x'00'",
        "UPDATE compressed_values SET codec = 'lz9'",
        "UPDATE messages SET value = 'x'",
        "UPDATE messages SET content_type = 0 WHERE offset = 3",
    ],
)
def test_damaged_values_are_never_served(tmp_path, damage):
    log = open_log(tmp_path)
    put(log, records_of(readings(20)))
    log._segments[-1].writer.execute(damage)
    with pytest.raises(CorruptBatch):
        log.read(0)


# --- frames -----------------------------------------------------------------------------------------------------------


def frame_with(frame, *, body=None, codec="zstd"):
    header = msgspec.msgpack.decode(frame.header)
    header[10] = codec
    encoded, body = msgspec.msgpack.encode(header), frame.body if body is None else body
    return BatchFrame(encoded, zlib.crc32(body, zlib.crc32(encoded)), body)


def test_a_frame_with_another_codec_is_refused_by_its_name(tmp_path):
    frame = frame_with(frame_of(put(open_log(tmp_path), records_of(readings(20)))), codec="lz9")
    with pytest.raises(BadFrame, match="lz9"):
        batch_of_frame(frame, verified_header(frame))


@pytest.mark.parametrize("field", range(9))
def test_a_frame_with_a_damaged_body_is_refused(tmp_path, field):
    frame = frame_of(put(open_log(tmp_path), records_of(readings(20))))
    body = msgspec.msgpack.decode(frame.body)
    body[field] = [1.5]
    bad = frame_with(frame, body=msgspec.msgpack.encode(body))
    with pytest.raises(BadFrame):
        batch_of_frame(bad, verified_header(bad))


def test_a_frame_with_a_column_of_another_length_is_refused(tmp_path):
    frame = frame_of(put(open_log(tmp_path), records_of(readings(20))))
    body = msgspec.msgpack.decode(frame.body)
    body[2] = [b"key"] * 19
    bad = frame_with(frame, body=msgspec.msgpack.encode(body))
    with pytest.raises(BadFrame, match="19 entries of key"):
        batch_of_frame(bad, verified_header(bad))


def test_a_version_without_compression_refuses_the_frame(tmp_path):
    frame = frame_of(put(open_log(tmp_path), records_of(readings(20))))
    for kind in (tuple[Record, ...], tuple[Record | None, ...]):
        with pytest.raises(msgspec.ValidationError, match="Expected `array"):
            msgspec.msgpack.decode(frame.body, type=kind)


def test_a_small_body_of_many_messages_is_not_taken_for_holes(tmp_path):
    frame = frame_of(put(open_log(tmp_path), [Record(b"same", "text/plain")] * 5_000))
    head = verified_header(frame)
    assert len(frame.body) < head.count
    assert not is_all_holes(frame, head)


# --- compaction -------------------------------------------------------------------------------------------------------


def compact(log, upto, *, tombstones_before_ms=0):
    log.seal(log.end_offset)
    work = Compaction(log, CompactionOrder(upto, tombstones_before_ms, NOW_MS))
    while work.step():
        pass
    work.close()


def test_a_batch_that_loses_messages_to_compaction_gets_plain_values(tmp_path):
    log = open_log(tmp_path)
    keys = [b"key %d" % number for number in range(20)]
    first = put(log, records_of(readings(20), keys=keys))
    whole = put(log, records_of(readings(20, 100), keys=[b"other %d" % number for number in range(20)]))
    put(log, records_of(readings(10, 200) + [b"-" * 400], keys=[*keys[:10], b"-"]))
    end = log.end_offset
    log.roll()
    compact(log, end)
    rest, same, last = log.read(0)
    assert [record for record in rest.records if record is not HOLE] == list(first.records[10:])
    assert (rest.holes, rest.compressed) == (10, b"")
    assert same == whole
    assert [record.value for record in last.records] == [*readings(10, 200), b"-" * 400]
    path = log._segments[0].path
    assert query(path, "SELECT base_offset FROM compressed_values ORDER BY 1") == [(20,), (40,)]
    assert query(path, "SELECT count(*) FROM messages WHERE value IS NULL") == [(31,)]
    assert query(path, "SELECT typeof(value) FROM messages WHERE offset = 15") == [("text",)]


def test_two_replicas_that_compact_have_the_same_batches(tmp_path):
    logs = [open_log(tmp_path / name) for name in ("one", "two")]
    keys = [b"key %d" % (number % 7) for number in range(20)]
    for log in logs:
        sent = put(log, records_of(readings(20), keys=keys))
        if log is logs[1]:  # the follower got the same values in a frame of its own making
            log.truncate(0)
            frame = frame_of(sent)
            log.append([batch_of_frame(frame, verified_header(frame))])
        log.roll()
        compact(log, 20)
    one, two = (log.read(0) for log in logs)
    assert one == two
    assert one[0].holes == 13


def test_reads_and_appends_run_side_by_side(tmp_path):
    log = open_log(tmp_path)
    sent = [put(log, records_of(readings(20)))]
    with ThreadPoolExecutor(1) as pool:
        for number in range(20):
            appended = pool.submit(put, log, records_of(readings(20, 100 * number)))
            assert log.read(0)[: len(sent)] == sent
            sent.append(appended.result())
    assert log.read(0) == sent
