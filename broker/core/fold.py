"""The fold over a partition's log: everything that the log's records add up to, as plain numbers.

A STATE record in the log is this, encoded; `state.sqlite` is this, in tables. Both are snapshots: whoever loads one
goes on by applying the records from `applied` on.
"""

from __future__ import annotations

import msgspec


class ProducerFold(msgspec.Struct, array_like=True):
    """An idempotent producer: the highest epoch seen, and its last batches, oldest first."""

    producer_id: int
    epoch: int
    # (sequence, count, base_offset, appended_at_ms), contiguous in sequence
    batches: list[tuple[int, int, int, int]]


class SpanFold(msgspec.Struct, array_like=True, gc=False):
    """Messages [start, end) of a group that were handed out and are not done, all in the same state.

    `available_at_ms` ends the lease, or the back-off after a nack. Invariant: start < end, deliveries >= 0.
    """

    start: int
    end: int
    deliveries: int
    expiries: int
    leased: bool
    granted_at_ms: int
    available_at_ms: int


class GroupFold(msgspec.Struct, array_like=True):
    """A queue group on this partition. Offsets below `next` and in no span are done; from `next` on none was handed
    out. `spans` are sorted and disjoint, all below `next`."""

    group: str
    start: int
    next: int
    spans: list[SpanFold]
    # attempt id -> (deadline_ms, [(start, end), ...])
    attempts: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    last_active_ms: int = 0


class PartitionFold(msgspec.Struct):
    """Everything below `applied` folded. `epochs` are (leader epoch, its first offset), rising in both."""

    applied: int = 0
    log_start_offset: int = 0
    epochs: list[tuple[int, int]] = []
    producers: list[ProducerFold] = []
    groups: list[GroupFold] = []


def encode_fold(fold: PartitionFold) -> bytes:
    return msgspec.msgpack.encode(fold)


def decode_fold(body: bytes) -> PartitionFold:
    return msgspec.msgpack.decode(body, type=PartitionFold)
