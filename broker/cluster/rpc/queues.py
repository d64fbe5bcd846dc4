"""Calls about queue groups: receiving, settling, committing, counting, dead letters, and the end of a group."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from portalmq.broker.cluster.rpc import (
    BrokerCall,
    ForNumbers,
    ForOne,
    ForPlacedShares,
    ForShares,
    GroupNumbers,
    OnePartitionCall,
    PartitionCall,
    Placed,
    Refusal,
)
from portalmq.broker.core.fold import PauseFold
from portalmq.broker.core.queue.records import Output, Range
from portalmq.broker.partition.answer_size import ANSWER_BYTES_MAX
from portalmq.broker.partition.long_poll import LeasedMessage
from portalmq.broker.storage.batch import Record
from portalmq.contract.history import PastCount
from portalmq.wire import GroupStart

Verb = Literal["ack", "nack", "extend", "release", "reject"]
# Receipts of one lease whose signatures were checked: (delivery number, leader epoch, offsets).
LeaseOffsets = tuple[int, int, list[int]]


class BeginGroup(GroupNumbers):
    """Let the group begin on these partitions. Where it has begun, nothing changes."""

    start: GroupStart


# --- receiving -------------------------------------------------------------------------------------------------------


class Receive(msgspec.Struct, array_like=True):
    """Lease messages of all partitions of the topics that the broker leads, without waiting for any. `patient` and
    `is_move` as in ReceiveOptions."""

    group: str
    group_id: str
    topics: list[str]
    max_messages: int
    visibility_timeout_ms: int
    consumer: str
    attempt_id: str | None
    max_bytes: int = ANSWER_BYTES_MAX
    patient: bool = True
    is_move: bool = False


class ReceiveResult(msgspec.Struct, array_like=True):
    """`unbegun`: the group has not begun on some partition, and the asking broker decides where it begins. `known`: of
    a replay, whether the attempt is known here."""

    messages: list[LeasedMessage]
    unbegun: bool = False
    known: bool = False


class Interest(msgspec.Struct, array_like=True):
    """Answer when there is a message for the group, within `wait_ms`. Nothing is leased."""

    group: str
    group_id: str
    topics: list[str]
    wait_ms: int


class Interested(msgspec.Struct, array_like=True):
    ready: bool


# --- settling and committing -----------------------------------------------------------------------------------------


class SettleShare(Placed):
    shown: list[LeaseOffsets]


class Settle(ForPlacedShares, msgspec.Struct, array_like=True):
    """`time_ms` is the delay of a nack or a release, or the visibility timeout of an extension."""

    verb: Verb
    group: str
    group_id: str
    shares: list[SettleShare]
    time_ms: int | None = None
    reason: str | None = None


class FinishShare(Placed):
    offsets: list[int]


class Finish(ForPlacedShares, msgspec.Struct, array_like=True):
    """End messages by their offsets. With `holder`, only those that were leased to it."""

    group: str
    group_id: str
    shares: list[FinishShare]
    holder: str | None = None


class MemberOffset(msgspec.Struct, array_like=True, frozen=True):
    """The next offset to read, committed by `member` in `generation`. `committed` is where the input begins: the
    group's committed offset, as the member knows it. Older clients and brokers do not send it."""

    member: str
    generation: int
    offset: int
    committed: int | None = None


class CommitCall(ForOne, msgspec.Struct, array_like=True):
    """A commit whose receipts and outputs were checked. A queue group's has `shown`, a stream group's `stream`."""

    group: str
    group_id: str
    topic: str
    topic_id: str
    number: int
    outputs: list[Output]
    shown: list[LeaseOffsets] = []
    stream: MemberOffset | None = None


class CommitResult(msgspec.Struct, array_like=True):
    """How many receipts were acked, and outputs ordered, by the record at `offset`."""

    acked: int
    published: int
    offset: int


# --- counting and listing --------------------------------------------------------------------------------------------

MessageState = Literal["ready", "in_flight", "scheduled"]
# (offset, timestamp_ms, record, state, deliveries, available_at_ms or 0)
UnfinishedRow = tuple[int, int, Record, MessageState, int, int]


class ListUnfinished(ForOne, msgspec.Struct, array_like=True):
    group: str
    topic: str
    topic_id: str
    number: int
    offset: int
    limit: int


class UnfinishedRows(msgspec.Struct, array_like=True):
    """`next_offset` is where the next page begins, None at the end."""

    rows: list[UnfinishedRow]
    next_offset: int | None


class LookAt(ForNumbers, msgspec.Struct, array_like=True):
    """Count the group's messages on these partitions, or ask whether it has begun there. It begins nowhere."""

    group: str
    topic: str
    topic_id: str
    numbers: list[int]


class QueueSize(msgspec.Struct, array_like=True, frozen=True):
    """Messages that are not done: `size` is the sum of the first three. The group has given up the dead ones."""

    ready: int
    in_flight: int
    scheduled: int
    dead: int = 0
    oldest_unacked_ms: int = 0

    @property
    def size(self) -> int:
        return self.ready + self.in_flight + self.scheduled


class CountGroups(msgspec.Struct, array_like=True):
    """Count these groups, or without a name all of them, on the partitions that the broker leads."""

    groups: list[str]


class GroupCount(msgspec.Struct, array_like=True):
    """One group on one partition. Counts are messages; `pause` is what the log says of that."""

    group: str
    topic: str
    number: int
    ready: int
    in_flight: int
    scheduled: int
    lag: int
    oldest_unacked_ms: int
    dead: int = 0
    pause: PauseFold = PauseFold()


class GroupCounts(msgspec.Struct, array_like=True):
    """`led` are all partitions that the broker leads, as (topic, number): of others it cannot tell."""

    counts: list[GroupCount]
    led: list[tuple[str, int]]


class CountGroupAt(msgspec.Struct, array_like=True):
    """Count the group as it was at `at_ms`, on the partitions that the broker leads and where the group has begun."""

    group: str
    at_ms: int


class GroupCountsAt(msgspec.Struct, array_like=True):
    """`refused` is the error of a partition whose past is not known; `led` as in GroupCounts."""

    counts: list[PastCount]
    led: list[tuple[str, int]]
    refused: Refusal | None = None


class ListUnfinishedAt(ForOne, msgspec.Struct, array_like=True):
    """List as ListUnfinished does, as it was at `at_ms`."""

    group: str
    topic: str
    topic_id: str
    number: int
    offset: int
    limit: int
    at_ms: int


class EndGroup(msgspec.Struct, array_like=True):
    """End the group, durably, on all partitions that the broker leads."""

    group: str
    group_id: str


class PauseGroup(msgspec.Struct, array_like=True):
    """Pause the group, or resume it, durably, on all partitions that the broker leads; the answer is an EndedGroup."""

    group: str
    group_id: str
    number: int
    at_ms: int
    paused: bool
    reason: str
    by: str


class EndedGroup(msgspec.Struct, array_like=True):
    """Where the group has ended, or the change is durable; `led` as in GroupCounts."""

    ended: list[tuple[str, int]]
    led: list[tuple[str, int]]


# --- dead letters ----------------------------------------------------------------------------------------------------


class DeadShare(msgspec.Struct, array_like=True, frozen=True):
    """The part of one partition. `after` is for a list; `offsets` name single messages; `ranges` are redriven or
    dropped, in a redrive one message each `step_ms` from `first_ms` on (counted from now)."""

    number: int
    after: int = -1
    offsets: tuple[int, ...] | None = None
    ranges: tuple[Range, ...] = ()
    first_ms: float = 0.0
    step_ms: float = 0.0


class DeadCall(ForShares, msgspec.Struct, array_like=True, frozen=True):
    """`limit` is for a list, `where` for a search."""

    group: str
    group_id: str
    topic: str
    topic_id: str
    shares: list[DeadShare]
    limit: int = 0
    where: Any = None


class DeadPage(msgspec.Struct, array_like=True):
    """Messages as (offset, timestamp_ms, record). `complete`: the partition has no more."""

    messages: list[tuple[int, int, Record]]
    complete: bool


KNOWN = PartitionCall("known", LookAt, bool, timeout_s=10.0)
START = PartitionCall("start", BeginGroup, bool, timeout_s=10.0)
# Beyond the wait of an interest, for the way there and back.
RECEIVE = BrokerCall("receive", Receive, ReceiveResult, timeout_s=5.0)
REPLAY = BrokerCall("replay", Receive, ReceiveResult, timeout_s=5.0)
INTEREST = BrokerCall("interest", Interest, Interested, timeout_s=5.0)
SETTLE = PartitionCall("settle", Settle, list[bool], timeout_s=15.0)
FINISH = PartitionCall("finish", Finish, list[bool], timeout_s=15.0)
COMMIT = PartitionCall("commit", CommitCall, CommitResult, timeout_s=20.0)
UNFINISHED = OnePartitionCall("unfinished", ListUnfinished, UnfinishedRows, timeout_s=15.0)
LOOK = PartitionCall("look", LookAt, QueueSize, timeout_s=5.0)
GROUPS = BrokerCall("groups", CountGroups, GroupCounts, timeout_s=2.0)
GROUP_AT = BrokerCall("group_at", CountGroupAt, GroupCountsAt, timeout_s=15.0)
UNFINISHED_AT = OnePartitionCall("unfinished_at", ListUnfinishedAt, UnfinishedRows, timeout_s=15.0)
END_GROUP = BrokerCall("end_group", EndGroup, EndedGroup, timeout_s=15.0)
PAUSE_GROUP = BrokerCall("pause_group", PauseGroup, EndedGroup, timeout_s=15.0)
DEAD_LETTERS = PartitionCall("dead_letters", DeadCall, DeadPage, timeout_s=15.0)
MATCH_DEAD = PartitionCall("match_dead", DeadCall, tuple[Range, ...], timeout_s=15.0)
REDRIVE = PartitionCall("redrive", DeadCall, int, timeout_s=15.0)
DROP_DEAD = PartitionCall("drop_dead", DeadCall, int, timeout_s=15.0)
