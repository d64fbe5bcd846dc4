"""Batches, of which the log consists: batches of messages, and control records between them.

A message batch of `count` records takes `count` consecutive offsets from `base_offset`. A control record (a group's
grant or ack, the start of a leader's epoch, a snapshot) is a batch of count 1 with a `body` instead of records, and
takes one offset. So the log is dense, while the offsets of messages have gaps.

    crc32( msgpack([base_offset, count, messages_before, kind, leader_epoch, producer_id, producer_epoch, sequence,
                    appended_at_ms, group]) + body )
    body = msgpack(list of records as arrays)   for messages
         = the control record's own bytes       else

The values of a batch may be compressed together. The batch has them in `compressed`, as the producer sent them; an
eleventh field of the header says "zstd", and the body is a stream_wire.CompressedBody. A version that does not know it
refuses such a body, since it is no list of records. Frames and files are read without decompressing anything: records
have empty values then, until `opened`. Such a batch has no hole, and no empty value.

A message that compaction removed leaves a hole: its offset and the count stay, so the log stays dense. `records` has
HOLE in its place, the encoded list nil. The checksum is that of the batch with its holes, so all replicas that removed
the same messages have the same batch.

Between brokers a batch is sent as a frame: these bytes, header and body apart, with the checksum. It is encoded once,
when it is checksummed. The receiver verifies the checksum of the received bytes, and only then decodes them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum
from itertools import repeat
from typing import Any

import msgspec

from portalmq.compression import ZSTD, content_size, values_of
from portalmq.stream_wire import CompressedBody, Frame, FrameHead, FrameRecord


class BatchKind(IntEnum):
    """The kind of a batch. The numbers are in the files: never change one, only add. BLANK is a control record that
    compaction emptied because a later STATE record supersedes it."""

    MESSAGES = 0
    EPOCH_START = 1
    STATE = 2
    PURGE = 3
    CANCEL = 4
    COMPACT = 5
    BLANK = 6
    RESCHEDULE = 7
    GROUP_START = 10
    GRANT = 11
    ACK = 12
    NACK = 13
    EXTEND = 14
    GROUP_END = 15
    DEAD = 16
    REDRIVE = 17
    DROP = 18
    COMMIT = 19
    DONE = 20
    CLAIM = 21
    COMMIT_OFFSET = 22
    SEEK = 23
    PAUSE = 24


class Record(FrameRecord, gc=False, frozen=True):
    """One message as it is stored. The content type is the sender's claim; the value is never re-encoded."""

    content_type: str = "application/octet-stream"


# Stands in `Batch.records` for a removed message. Compare by identity.
HOLE = Record(b"", "")


class Batch(msgspec.Struct, gc=False, frozen=True):
    """A batch in the log. `messages_before` counts the messages ever appended below `base_offset`.

    Compaction removed `holes` of its messages; `count` and `message_count` still include them. producer_id,
    producer_epoch and sequence are -1 without an idempotent producer; the sequence is the first record's. `group` is
    the group of a group record, else "".
    """

    base_offset: int
    count: int
    messages_before: int
    kind: int
    leader_epoch: int
    appended_at_ms: int
    producer_id: int = -1
    producer_epoch: int = -1
    sequence: int = -1
    group: str = ""
    records: tuple[Record, ...] = ()
    body: bytes = b""
    crc: int = 0
    holes: int = 0
    compressed: bytes = b""

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    def runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of messages in [start, end) that exist in this batch of messages."""
        start, end = max(start, self.base_offset), min(end, self.end_offset)
        if not self.holes:
            return [(start, end)] if start < end else []
        runs: list[tuple[int, int]] = []
        for offset in range(start, end):
            if self.records[offset - self.base_offset] is HOLE:
                continue
            if runs and runs[-1][1] == offset:
                runs[-1] = (runs[-1][0], offset + 1)
            else:
                runs.append((offset, offset + 1))
        return runs

    @property
    def message_count(self) -> int:
        return self.count if self.kind == BatchKind.MESSAGES else 0


class BatchFrame(Frame, gc=False, frozen=True):
    """A batch as it is sent between brokers: the bytes that its checksum covers, and the checksum."""

    @property
    def size_bytes(self) -> int:
        return len(self.header) + len(self.body)


class FrameHeader(FrameHead, gc=False, frozen=True):
    """A decoded frame header: the fields of the batch in the order in which the checksum covers them."""

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def message_count(self) -> int:
        return self.count if self.kind == BatchKind.MESSAGES else 0


class BadFrame(ValueError):
    """A frame is damaged."""


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(FrameHeader).decode
_decode_records = msgspec.msgpack.Decoder(tuple[Record, ...]).decode
_decode_records_with_holes = msgspec.msgpack.Decoder(tuple[Record | None, ...]).decode
_decode_compressed = msgspec.msgpack.Decoder(CompressedBody).decode


def frame_of(batch: Batch) -> BatchFrame:
    """Return the batch as a frame, with its checksum."""
    header = _encode(
        (
            batch.base_offset,
            batch.count,
            batch.messages_before,
            batch.kind,
            batch.leader_epoch,
            batch.producer_id,
            batch.producer_epoch,
            batch.sequence,
            batch.appended_at_ms,
            batch.group,
            *((ZSTD,) if batch.compressed else ()),
        )
    )
    body = batch.body
    if batch.compressed:
        body = compressed_body(batch.compressed, batch.records)
    elif batch.kind == BatchKind.MESSAGES:
        records = [None if record is HOLE else record for record in batch.records] if batch.holes else batch.records
        body = _encode(records)
    return BatchFrame(header, zlib.crc32(body, zlib.crc32(header)), body)


def verified_header(frame: BatchFrame) -> FrameHeader:
    """Return the header of a frame after verifying its checksum. Raise BadFrame if it does not match."""
    found = zlib.crc32(frame.body, zlib.crc32(frame.header))
    if found != frame.crc:
        raise BadFrame(f"the checksum is {found}, not {frame.crc}")
    try:
        head = _decode_head(frame.header)
    except msgspec.MsgspecError as error:
        raise BadFrame(f"unreadable header: {error}") from error
    if head.count < 1 or (head.kind != BatchKind.MESSAGES and head.count != 1):
        raise BadFrame(f"a batch of kind {head.kind} with {head.count} records")
    return head


def is_all_holes(frame: BatchFrame, head: FrameHeader) -> bool:
    """Return whether compaction removed every message of a batch. An encoded list takes at most 5 bytes, and one for
    each nil; a message takes more, unless its value is compressed."""
    return head.kind == BatchKind.MESSAGES and not head.codec and len(frame.body) <= head.count + 5


def batch_of_frame(frame: BatchFrame, head: FrameHeader) -> Batch:
    """Return the batch of a verified frame. Raise BadFrame."""
    records: tuple[Record, ...] = ()
    holes = 0
    compressed = b""
    if head.kind == BatchKind.MESSAGES:
        if head.codec not in ("", ZSTD):
            raise BadFrame(f"its values are compressed with {head.codec[:40]!r}, which this version does not know")
        try:
            if head.codec:
                compressed, records = records_of_compressed(frame.body, head.count)
            else:
                records, holes = _records_of(frame.body)
        except (msgspec.MsgspecError, ValueError) as error:
            raise BadFrame(f"unreadable records: {error}") from error
        if len(records) != head.count:
            raise BadFrame(f"{len(records)} records, the header says {head.count}")
    return Batch(
        head.base_offset,
        head.count,
        head.messages_before,
        head.kind,
        head.leader_epoch,
        head.appended_at_ms,
        head.producer_id,
        head.producer_epoch,
        head.sequence,
        head.group,
        records,
        frame.body if head.kind != BatchKind.MESSAGES else b"",
        frame.crc,
        holes,
        compressed,
    )


def compressed_body(values: bytes, records: Sequence[Record]) -> bytes:
    """Return the body of a batch whose values are compressed."""
    _, *columns = zip(*map(msgspec.structs.astuple, records), strict=True)
    return _encode(CompressedBody(values, *map(_column, columns)))


def _column(entries: tuple[Any, ...]) -> Any:
    return entries[0] if entries.count(entries[0]) == len(entries) else entries


def records_of_compressed(body: bytes, count: int) -> tuple[bytes, tuple[Record, ...]]:
    """Return the compressed values, and the records without them. Raises msgspec's errors and ValueError."""
    found = _decode_compressed(body)
    content_size(found.values)
    return found.values, tuple(map(Record, repeat(b"", count), *found.columns(count)))


def opened(batch: Batch) -> Batch:
    """Return the batch with its values. Raises BadValues."""
    if not batch.compressed:
        return batch
    values = values_of(batch.compressed, batch.count)
    return msgspec.structs.replace(batch, records=with_values(values, batch.records))


def plain_frame(frame: BatchFrame) -> BatchFrame:
    """Return the frame of a compressed batch with plain values. Raises BadFrame, BadValues."""
    batch = opened(batch_of_frame(frame, _decode_head(frame.header)))
    return frame_of(msgspec.structs.replace(batch, compressed=b""))


def with_values(values: Sequence[bytes], records: Sequence[Record]) -> tuple[Record, ...]:
    replace = msgspec.structs.replace
    return tuple([replace(record, value=value) for value, record in zip(values, records, strict=True)])


def _records_of(body: bytes) -> tuple[tuple[Record, ...], int]:
    """Return the records and the number of holes. Holes are rare, so decode as if there were none first."""
    try:
        return _decode_records(body), 0
    except msgspec.ValidationError:
        found = _decode_records_with_holes(body)
        return tuple([HOLE if record is None else record for record in found]), found.count(None)


def checksum(batch: Batch) -> int:
    """Return the CRC-32 (zlib's) of the batch without its checksum."""
    return frame_of(batch).crc
