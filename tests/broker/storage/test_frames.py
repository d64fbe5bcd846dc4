"""A batch in transit between brokers: only the checksummed bytes are accepted."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from support.log_files import Writer, everything, open_log

from portalmq.broker.storage.batch import (
    BadFrame,
    Batch,
    BatchFrame,
    BatchKind,
    Record,
    batch_of_frame,
    checksum,
    frame_of,
    verified_header,
)

RECORDS = [
    Record(b"plain"),
    Record(b"\xff\0", "image/png", key=b"k\xff"),
    Record("grüße".encode(), "text/plain", headers={"b": "2", "a": "1"}, priority=3, deliver_at_ms=5, expires_at_ms=9),
    Record(b"", message_id=b"i" * 16, body_hash=b"h" * 8),
]


def batches(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    built = [
        writer.messages_batch(RECORDS, stamp=(7, 1, 3)),
        writer.control_batch(BatchKind.GRANT, b"body", "group"),
        writer.control_batch(BatchKind.EPOCH_START),
    ]
    log.append(built)
    return log, built


def test_a_batch_comes_back_unchanged(tmp_path):
    log, built = batches(tmp_path)
    for batch in [*built, *everything(log)]:
        frame = frame_of(batch)
        assert frame.crc == batch.crc == checksum(batch)
        assert batch_of_frame(frame, verified_header(frame)) == batch


def test_a_batch_read_from_a_file_has_its_original_frame(tmp_path):
    log, built = batches(tmp_path)
    assert [frame_of(batch) for batch in everything(log)] == [frame_of(batch) for batch in built]


def test_a_frame_with_any_bit_flipped_is_refused(tmp_path):
    _, built = batches(tmp_path)
    frame = frame_of(built[0])
    for part in ("header", "body"):
        content = getattr(frame, part)
        for at in range(len(content) * 8):
            flipped = bytearray(content)
            flipped[at // 8] ^= 1 << at % 8
            with pytest.raises(BadFrame):
                verified_header(msgspec.structs.replace(frame, **{part: bytes(flipped)}))


@pytest.mark.parametrize(
    "header", [b"", b"\xc1", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode([0, 0, 0, 0, 1, -1, -1, -1, 0, ""])]
)
def test_a_frame_with_a_valid_checksum_and_an_unreadable_header_is_refused(header):
    with pytest.raises(BadFrame):
        verified_header(BatchFrame(header, zlib.crc32(b"", zlib.crc32(header)), b""))


def test_a_frame_with_another_number_of_records_than_its_header_is_refused():
    body = frame_of(_batch(1)).body
    frame = frame_of(_batch(2))
    wrong = BatchFrame(frame.header, zlib.crc32(body, zlib.crc32(frame.header)), body)
    with pytest.raises(BadFrame, match="1 records"):
        batch_of_frame(wrong, verified_header(wrong))
    garbage = BatchFrame(frame.header, zlib.crc32(b"\xc1", zlib.crc32(frame.header)), b"\xc1")
    with pytest.raises(BadFrame):
        batch_of_frame(garbage, verified_header(garbage))


def _batch(count: int):
    return Batch(0, count, 0, BatchKind.MESSAGES, 1, 1, records=tuple(Record(b"x") for _ in range(count)))
