"""The fold over a partition's log: the state that all its records add up to, as plain numbers.

A STATE record in the log holds this fold encoded; `state.sqlite` holds it in tables. Both are snapshots: after loading
one, apply the records from `applied` on.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

# The rows of a fold that is larger are decoded one by one.
LARGE_BYTES = 256 * 1024
# `available_at_ms` of messages that wait for an earlier one of their key.
HELD_MS = 1 << 62


class ProducerFold(msgspec.Struct, array_like=True):
    """An idempotent producer: its highest epoch, and its last batches, oldest first."""

    producer_id: int
    epoch: int
    # (sequence, count, base_offset, appended_at_ms), contiguous in sequence
    batches: list[tuple[int, int, int, int]]


class SpanFold(msgspec.Struct, array_like=True, gc=False):
    """Messages [start, end) of a group that were delivered and are not finished, all in the same state.

    `available_at_ms` ends the lease, or the back-off after a nack, that began at `granted_at_ms`. HELD_MS means that
    the message waits for an earlier one of its key. `earlier` counts leases that no longer count as deliveries: those
    before a redrive, those given back unseen, and those lost with their grants. So a lease number is never used twice,
    and no older receipt counts. `holder` is the name of the lease's holder, if the receive gave one. `leader_epoch` is
    that of the last lease, or of the redrive after it; 0 if there was none, or an earlier version did not store it.

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
        """The number of the last lease, as in its receipts."""
        return self.earlier + self.deliveries

    @property
    def is_unleased_since(self) -> bool:
        """True if it has had no lease since a redrive, or since its only lease was given back unseen, as far as this
        log knows."""
        return not self.leased and self.deliveries == 0 and self.earlier > 0

    def is_later(self, leader_epoch: int, lease: int) -> bool:
        """True if the last lease is later than this one. Numbers start again where a fail-over lost a grant, so epochs
        count first."""
        if self.leader_epoch in (0, leader_epoch):
            return self.lease > lease
        return self.leader_epoch > leader_epoch


class DeadFold(msgspec.Struct, array_like=True, gc=False):
    """Messages [start, end) that a group gave up at `at_ms`, all after `deliveries` deliveries and for the same
    reason."""

    start: int
    end: int
    deliveries: int
    at_ms: int
    reason: str
    lane: int = 0
    earlier: int = 0


class PauseFold(msgspec.Struct, array_like=True, frozen=True):
    """The last change between paused and resumed of a group, since when, why, and who asked."""

    number: int = 0
    paused: bool = False
    since_ms: int = 0
    reason: str = ""
    by: str = ""


class GroupFold(msgspec.Struct, array_like=True):
    """A queue group on this partition.

    Offsets of lane 0 below `next` that are in no span are finished; from `next` on none was delivered. `spans` and
    `dead` are sorted and disjoint. `cursors` are the cursors of the other lanes, and `ahead` the messages finished
    before their lane's cursor reached them, both as (lane, due_ms, offset). `commits` are the last commits: (id, offset
    of the record). `attempt_leases` holds an attempt's leader epoch and the lease number of each of its ranges, where
    they are known. `pauses` holds one entry once the group was paused.
    """

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
    pauses: list[PauseFold] = []


class StreamFold(msgspec.Struct, array_like=True):
    """A stream group on this partition: the next offset to read, and the member that may commit. `commits` is as in
    GroupFold, and includes seeks that have an id."""

    group: str
    committed: int
    generation: int
    member: str
    last_active_ms: int
    commits: list[tuple[bytes, int]] = []


class PartitionFold(msgspec.Struct):
    """The fold of everything below `applied`.

    `epochs` are (leader epoch, its first offset), rising in both. `outbox` holds the offsets of Dead and Commit records
    whose output is not appended yet, with their group. `cancelled` holds ranges of cancelled scheduled messages.
    `compacted` is the offset that the last Compact record reached.
    """

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
    """Return the fold of a STATE record. Raise msgspec.MsgspecError. On a native thread no step of it holds the
    interpreter for long, however large the groups are."""
    if len(body) < LARGE_BYTES:
        return _decode(body)
    split = structs.asdict(_split(body))
    groups = [structs.asdict(group) for group in split.pop("groups")]
    for group in groups:
        group["spans"] = [_decode_span(row) for row in group["spans"]]
        group["dead"] = [_decode_dead(row) for row in group["dead"]]
    return PartitionFold(**split, groups=[GroupFold(**group) for group in groups])


def _retyped(kind: type[msgspec.Struct], **types: Any) -> type[Any]:
    """Return a Struct that decodes the same bytes with other types of some fields."""
    field: Any = msgspec.field
    fields = [
        (each.name, types.get(each.name, each.type), field(default=each.default, default_factory=each.default_factory))
        for each in structs.fields(kind)
    ]
    return msgspec.defstruct(f"_Split{kind.__name__}", fields, array_like=kind.__struct_config__.array_like)


_Rows = list[msgspec.Raw]
_SplitGroup = _retyped(GroupFold, spans=_Rows, dead=_Rows)
_split = msgspec.msgpack.Decoder(_retyped(PartitionFold, groups=list[_SplitGroup])).decode  # type: ignore[valid-type]
_decode = msgspec.msgpack.Decoder(PartitionFold).decode
_decode_span = msgspec.msgpack.Decoder(SpanFold).decode
_decode_dead = msgspec.msgpack.Decoder(DeadFold).decode
