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

    `available_at_ms` ends the lease, or the back-off after a nack, that began at `granted_at_ms`; HELD_MS says that
    the message waits for an earlier one of its key. `earlier` counts the leases that are no deliveries any more
    (before a redrive, given back unseen, or lost with their grants): the number of a lease never comes again, so no
    receipt from before counts.
    `holder` is who has the lease, where the receive gave his name. `leader_epoch` is that of the last lease, or of the
    redrive after it: 0 where there was none, or where a version before this one has not kept it.
    Invariant: start < end, deliveries >= 0; a holder has a lease.
    """

    start: int
    end: int
    deliveries: int
    expiries: int
    leased: bool
    granted_at_ms: int
    available_at_ms: int
    lane: int = 0
    earlier: int = 0
    holder: str = ""
    leader_epoch: int = 0

    @property
    def lease(self) -> int:
        """The number of the last lease, as its receipts have it."""
        return self.earlier + self.deliveries

    @property
    def is_unleased_since(self) -> bool:
        """Whether nobody has had it since it was redriven, or since its only lease was given back unseen, as far as
        this log knows."""
        return self.deliveries == 0 and self.earlier > 0

    def is_later(self, leader_epoch: int, lease: int) -> bool:
        """Whether the last lease is a later one than that. Numbers begin again where a fail-over has lost a grant."""
        if self.leader_epoch in (0, leader_epoch):
            return self.lease > lease
        return self.leader_epoch > leader_epoch


class DeadFold(msgspec.Struct, array_like=True, gc=False):
    """Messages [start, end) that a group gave up at `at_ms`, after so many deliveries, all for the same reason."""

    start: int
    end: int
    deliveries: int
    at_ms: int
    reason: str
    lane: int = 0
    earlier: int = 0


class GroupFold(msgspec.Struct, array_like=True):
    """A queue group on this partition. Offsets of lane 0 below `next` and in no span are done; from `next` on none was
    handed out. `spans` and `dead` are sorted and disjoint. `cursors` are those of the other lanes, and `ahead` messages
    that are done before their lane's cursor has reached them, both as (lane, due_ms, offset). `commits` are the last
    commits by their id: (id, offset of the record). `attempt_leases` has the leader epoch of an attempt and the number
    of the lease of each of its ranges, where they are known."""

    group: str
    start: int
    next: int
    spans: list[SpanFold]
    # attempt id -> (deadline_ms, [(start, end), ...])
    attempts: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    last_active_ms: int = 0
    cursors: list[tuple[int, int, int]] = []
    ahead: list[tuple[int, int, int]] = []
    dead: list[DeadFold] = []
    commits: list[tuple[bytes, int]] = []
    attempt_leases: dict[str, tuple[int, list[int]]] = {}


class StreamFold(msgspec.Struct, array_like=True):
    """A stream group on this partition: the next offset to read, and who may say so. `commits` as in GroupFold; seeks
    that have an id are among them."""

    group: str
    committed: int
    generation: int
    member: str
    last_active_ms: int
    commits: list[tuple[bytes, int]] = []


class PartitionFold(msgspec.Struct):
    """Everything below `applied` folded. `epochs` are (leader epoch, its first offset), rising in both. `outbox` are
    the offsets of Dead and Commit records whose output is still to be appended, with their group; `cancelled` ranges of
    scheduled messages that were taken back; `compacted` what a Compact record last reached."""

    applied: int = 0
    log_start_offset: int = 0
    epochs: list[tuple[int, int]] = []
    producers: list[ProducerFold] = []
    groups: list[GroupFold] = []
    streams: list[StreamFold] = []
    outbox: list[tuple[int, str]] = []
    cancelled: list[tuple[int, int]] = []
    compacted: int = 0


def encode_fold(fold: PartitionFold) -> bytes:
    return msgspec.msgpack.encode(fold)


def decode_fold(body: bytes) -> PartitionFold:
    return msgspec.msgpack.decode(body, type=PartitionFold)
