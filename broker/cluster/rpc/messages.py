"""Calls about messages: appending, browsing, tracing, purging, schedules, and the epochs of producers."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from portalmq.broker.cluster.rpc import (
    BrokerCall,
    ForOne,
    ForShares,
    OnePartitionCall,
    OneResultCall,
    PartitionCall,
    Placed,
    TopicNumbers,
)
from portalmq.broker.storage.batch import Record
from portalmq.contract.history import AsOf, TraceEvent, TraceReplicas
from portalmq.wire import Acks, ProducerStamp


class Share(msgspec.Struct, array_like=True):
    """The records of a produce call for one partition: a list, or the body of a batch of `count` records whose values
    are compressed. A broker of a version that does not know such bodies refuses the call."""

    number: int
    records: list[Record] | bytes
    count: int = 0


class Produce(ForShares, msgspec.Struct, array_like=True):
    topic: str
    topic_id: str
    acks: Acks
    stamp: ProducerStamp | None
    shares: list[Share]
    is_copies: bool = False


class AppendResult(msgspec.Struct, array_like=True):
    """Where the records of a share are: one after another from `base_offset`, or, when some were in the log already,
    each at its own (offset, timestamp_ms) of `places`."""

    base_offset: int
    timestamp_ms: int
    places: list[tuple[int, int]] | None = None


class FindFirst(TopicNumbers):
    """Find the message of this id in these partitions: (offset, timestamp_ms), or nothing. Refused where it has another
    hash, and where it is not yet as safe as `acks` asks."""

    message_id: bytes
    body_hash: bytes
    acks: Acks


class Browse(ForOne, Placed):
    offset: int | None
    position: str | None
    at_ms: int | None
    limit: int
    wait_ms: int


class Browsed(msgspec.Struct, array_like=True):
    """Messages as (offset, timestamp_ms, record)."""

    messages: list[tuple[int, int, Record]]
    next_offset: int
    log_start_offset: int
    high_watermark: int


class PurgeCall(TopicNumbers):
    before_offset: int | None


class SchedulePosition(NamedTuple):
    """A position among the scheduled messages of a topic. They are listed in this order."""

    due_ms: int
    number: int
    offset: int

    def __str__(self) -> str:
        return f"{self.due_ms}-{self.number}-{self.offset}"


class ListScheduled(TopicNumbers):
    """List the first `limit` scheduled messages behind `after`, of all these partitions together."""

    after: SchedulePosition
    limit: int


class Rows(msgspec.Struct, array_like=True):
    """The scheduled messages of a partition, as (due_ms, offset, timestamp_ms, record). With `cut_at` the leader gave
    nothing behind that position, since the answer was large enough: the rest is for the next page."""

    rows: list[tuple[int, int, int, Record]]
    cut_at: SchedulePosition | None = None


class CancelScheduled(ForOne, Placed):
    offset: int


class TraceCall(ForOne, Placed):
    """Tell the life of a message: `limit` events at most, without the first `after`."""

    offset: int
    after: int
    limit: int


class TracedLife(msgspec.Struct, array_like=True):
    """`record` is None for a purged message. `next` is the `after` of the next page, if there is more. `copies` are
    events that say that a dead letter was copied: (index in `events`, message id of the copy)."""

    timestamp_ms: int
    record: Record | None
    events: list[TraceEvent]
    replicas: TraceReplicas
    as_of: AsOf
    next: int | None
    incomplete_below: int | None
    copies: list[tuple[int, bytes]]


class LocateCall(TopicNumbers):
    """Find the committed message of this id, however old: (offset, timestamp_ms), or nothing."""

    message_id: bytes


class ScheduledShare(msgspec.Struct, array_like=True, frozen=True):
    """The part of one partition: these messages, or in a search all where it is None."""

    number: int
    offsets: tuple[int, ...] | None = None


class ScheduledCall(ForShares, msgspec.Struct, array_like=True, frozen=True):
    """Search for scheduled messages, by `where`; or move those of the shares to `deliver_at_ms` (0: now), and with
    `cancels` cancel them. The answer to a search has at most `limit` of them."""

    topic: str
    topic_id: str
    shares: list[ScheduledShare]
    where: Any = None
    limit: int = 0
    deliver_at_ms: int = 0
    cancels: bool = False


class ScheduledMatch(msgspec.Struct, array_like=True):
    """How many messages match, and the first ones by due time, as (due_ms, offset)."""

    count: int
    first: list[tuple[int, int]]


class Partitions(TopicNumbers):
    """Ask for the sizes of these partitions."""


class PartitionSize(msgspec.Struct, array_like=True, frozen=True):
    """Figures that only the leader of a partition has."""

    log_start_offset: int
    high_watermark: int
    size_bytes: int


class Fence(msgspec.Struct, array_like=True, frozen=True):
    """The named producer of this id has this epoch now."""

    producer_id: int
    epoch: int


class FencingConfirmed(msgspec.Struct, array_like=True, frozen=True):
    """The broker accepts no older epoch any more."""


# Longer than a client waits for one attempt: its own time-out comes first.
PRODUCE = PartitionCall("produce", Produce, AppendResult, timeout_s=20.0)
FIRST = PartitionCall("first", FindFirst, list[int], timeout_s=10.0)
BROWSE = OnePartitionCall("browse", Browse, Browsed, timeout_s=10.0)
PURGE = PartitionCall("purge", PurgeCall, bool, timeout_s=30.0)
OPEN_ORDERS = PartitionCall("open_orders", TopicNumbers, bool, timeout_s=10.0)
SCHEDULED = PartitionCall("scheduled", ListScheduled, Rows, timeout_s=10.0)
CANCEL = OneResultCall("cancel", CancelScheduled, bool, timeout_s=30.0)
TRACE = OnePartitionCall("trace", TraceCall, TracedLife, timeout_s=15.0)
LOCATE = PartitionCall("locate", LocateCall, list[int], timeout_s=5.0)
MATCH_SCHEDULED = PartitionCall("match_scheduled", ScheduledCall, ScheduledMatch, timeout_s=15.0)
MOVE_SCHEDULED = PartitionCall("move_scheduled", ScheduledCall, int, timeout_s=30.0)
PARTITIONS = PartitionCall("partitions", Partitions, PartitionSize, timeout_s=1.0)
FENCE = BrokerCall("fence", Fence, FencingConfirmed, timeout_s=2.0)
