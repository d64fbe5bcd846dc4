"""What the log is made of: batches of message records, and control records between them.

A message batch of `count` records takes `count` consecutive offsets from `base_offset`. A control record (a group's
grant or ack, the start of a leader's epoch, a snapshot) is a batch of count 1 with a `body` instead of records, and
takes one offset: so the log is dense, while the offsets of messages have gaps.

    crc32( msgpack([base_offset, count, messages_before, kind, leader_epoch, producer_id, producer_epoch, sequence,
                    appended_at_ms, group]) + body )
    body = msgpack(list of records as arrays)   for messages
         = the control record's own bytes       for the rest

Between brokers a batch travels as a Frame: those very bytes, header and body apart, with the checksum. It is encoded
once, when it is checksummed; who receives it verifies the checksum over what came, and only then decodes.
"""

from __future__ import annotations

import zlib
from enum import IntEnum

import msgspec


class Kind(IntEnum):
    """What a batch is. The numbers stand in the files: never change one, only add."""

    MESSAGES = 0
    EPOCH_START = 1
    STATE = 2
    PURGE = 3
    CANCEL = 4
    COMPACT = 5
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


class Record(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One message as it is stored. The content type is the sender's word; the value is never re-encoded."""

    value: bytes
    content_type: str = "application/octet-stream"
    key: bytes | None = None
    headers: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    expires_at_ms: int | None = None
    priority: int = 0
    message_id: bytes | None = None
    body_hash: bytes | None = None


class Batch(msgspec.Struct, gc=False, frozen=True):
    """A batch in the log. `messages_before` counts the messages of the partition below `base_offset`, for exact lag.

    producer_id, producer_epoch and sequence are -1 without an idempotent producer; the sequence is the first record's.
    `group` names the group that a group record belongs to, "" else.
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

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def message_count(self) -> int:
        return self.count if self.kind == Kind.MESSAGES else 0


class Frame(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A batch as it travels between brokers: the bytes that its checksum covers, and the checksum."""

    header: bytes
    crc: int
    body: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.header) + len(self.body)


class Head(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A frame's header, decoded: the fields of the batch, in the order in which the checksum covers them."""

    base_offset: int
    count: int
    messages_before: int
    kind: int
    leader_epoch: int
    producer_id: int
    producer_epoch: int
    sequence: int
    appended_at_ms: int
    group: str

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count

    @property
    def message_count(self) -> int:
        return self.count if self.kind == Kind.MESSAGES else 0


class BadFrame(ValueError):
    """A frame is not what was sent."""


_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_records = msgspec.msgpack.Decoder(tuple[Record, ...]).decode


def frame_of(batch: Batch) -> Frame:
    """The batch as it travels, with its checksum."""
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
        )
    )
    body = _encode(batch.records) if batch.kind == Kind.MESSAGES else batch.body
    return Frame(header, zlib.crc32(body, zlib.crc32(header)), body)


def head_of(frame: Frame) -> Head:
    """The header of a frame whose checksum fits. Raises BadFrame for any other."""
    found = zlib.crc32(frame.body, zlib.crc32(frame.header))
    if found != frame.crc:
        raise BadFrame(f"the checksum is {found}, not {frame.crc}")
    try:
        head = _decode_head(frame.header)
    except msgspec.MsgspecError as error:
        raise BadFrame(f"unreadable header: {error}") from error
    if head.count < 1 or (head.kind != Kind.MESSAGES and head.count != 1):
        raise BadFrame(f"a batch of kind {head.kind} with {head.count} records")
    return head


def batch_of_frame(frame: Frame, head: Head) -> Batch:
    """The batch of a frame that was checked. Raises BadFrame."""
    records: tuple[Record, ...] = ()
    if head.kind == Kind.MESSAGES:
        try:
            records = _decode_records(frame.body)
        except msgspec.MsgspecError as error:
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
        frame.body if head.kind != Kind.MESSAGES else b"",
        frame.crc,
    )


def checksum(batch: Batch) -> int:
    """CRC-32 (zlib's) over everything in the batch but the checksum itself."""
    return frame_of(batch).crc
