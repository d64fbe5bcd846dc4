"""What the log is made of: batches of message records, and control records between them.

A message batch of `count` records takes `count` consecutive offsets from `base_offset`. A control record (a group's
grant or ack, the start of a leader's epoch, a snapshot) is a batch of count 1 with a `body` instead of records, and
takes one offset: so the log is dense, while the offsets of messages have gaps.

    crc32( msgpack([base_offset, count, messages_before, kind, leader_epoch, producer_id, producer_epoch, sequence,
                    appended_at_ms, group]) + body )
    body = msgpack(list of records as arrays)   for messages
         = the control record's own bytes       for the rest
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
    GROUP_START = 10
    GRANT = 11
    ACK = 12
    NACK = 13
    EXTEND = 14
    GROUP_END = 15


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


_encode = msgspec.msgpack.Encoder().encode


def checksum(batch: Batch) -> int:
    """CRC-32 (zlib's) over everything in the batch but the checksum itself."""
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
    return zlib.crc32(body, zlib.crc32(header))


def sealed_batch(batch: Batch) -> Batch:
    """The batch with its checksum."""
    return msgspec.structs.replace(batch, crc=checksum(batch))
