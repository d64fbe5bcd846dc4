"""What brokers ask each other, and what they answer: one Struct for each body of /internal/v1/<name>.

    produce     Produce    -> [Result[Appended]]          receive     Receive     -> Received
    browse      Browse     -> Browsed                     replay      Receive     -> Received
    partitions  Partitions -> [Result[PartitionSize]]     interest    Interest    -> Interested
    purge       Purge      -> [Result[bool]]              settle      Settle      -> [Result[list[bool]]]
    known       Known      -> [Result[bool]]              groups      CountGroups -> GroupCounts
    start       Start      -> [Result[bool]]              end_group   EndGroup    -> EndedGroup
    finish      Finish     -> [Result[list[bool]]]        turn        Turn        -> SharedOffsetResult
    sizes       SizeOf     -> [Result[QueueSize]]         (its Structs are in queues/queue_sizes.py)

Results come in the order of the shares, or numbers, that were asked for. A topic goes by its id as well as its name:
one that was deleted and made again is another topic. All are arrays in MessagePack; a field that is added comes last
and has a default.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from portalmq.broker.partition.answer_size import ANSWER_BYTES_MAX
from portalmq.broker.partition.long_poll import LeasedMessage
from portalmq.broker.storage.batch import Record
from portalmq.errors import PortalMQError, error_from_problem
from portalmq.wire import Acks, GroupStart, ProducerStamp

T = TypeVar("T")
Verb = Literal["ack", "nack", "extend", "release"]


class TopicPartition(NamedTuple):
    """A partition, wherever it is led."""

    topic: str
    topic_id: str
    number: int


class Refusal(msgspec.Struct, array_like=True):
    """An error that a share of a call met, as its problem document."""

    problem: dict[str, Any]
    retry_after_s: float | None = None


class Result(msgspec.Struct, Generic[T], array_like=True):
    """What became of one share of a call: a value, or a refusal."""

    value: T | None
    refused: Refusal | None = None

    def outcome(self) -> T | PortalMQError:
        if self.refused is not None:
            return error_of(self.refused)
        assert self.value is not None
        return self.value


def result_of(outcome: T | PortalMQError) -> Result[T]:
    return Result(None, refusal(outcome)) if isinstance(outcome, PortalMQError) else Result(outcome)


def refusal(error: PortalMQError) -> Refusal:
    return Refusal(msgspec.to_builtins(error.problem()), error.retry_after_s)


def error_of(refused: Refusal) -> PortalMQError:
    return error_from_problem(refused.problem, retry_after_s=refused.retry_after_s)


# --- messages --------------------------------------------------------------------------------------------------------


class Share(msgspec.Struct, array_like=True):
    """What one partition gets of a produce call."""

    number: int
    records: list[Record]


class Produce(msgspec.Struct, array_like=True):
    topic: str
    topic_id: str
    acks: Acks
    stamp: ProducerStamp | None
    shares: list[Share]
    is_copies: bool = False


class AppendResult(msgspec.Struct, array_like=True):
    """Where a share stands: one after another from `base_offset`, or each in its own of `places` (offset, timestamp)
    when some were in the log already."""

    base_offset: int
    timestamp_ms: int
    places: list[tuple[int, int]] | None = None


class Browse(msgspec.Struct, array_like=True):
    topic: str
    topic_id: str
    number: int
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


class PurgeCall(msgspec.Struct, array_like=True):
    topic: str
    topic_id: str
    numbers: list[int]
    before_offset: int | None


class Partitions(msgspec.Struct, array_like=True):
    topic: str
    topic_id: str
    numbers: list[int]


class PartitionSize(msgspec.Struct, array_like=True, frozen=True):
    """What only the leader of a partition knows of it."""

    log_start_offset: int
    high_watermark: int
    size_bytes: int


# --- groups ----------------------------------------------------------------------------------------------------------


class SettleShare(msgspec.Struct, array_like=True):
    """Receipts of one partition whose signatures were checked: (delivery number, leader epoch, offsets) a lease."""

    topic: str
    topic_id: str
    number: int
    shown: list[tuple[int, int, list[int]]]


class Settle(msgspec.Struct, array_like=True):
    """`time_ms` is the delay of a nack or a release, or the visibility timeout of an extension."""

    verb: Verb
    group: str
    group_id: str
    shares: list[SettleShare]
    time_ms: int | None = None
    reason: str | None = None


class FinishShare(msgspec.Struct, array_like=True):
    topic: str
    topic_id: str
    number: int
    offsets: list[int]


class Finish(msgspec.Struct, array_like=True):
    """Messages are done, by their places. `holder`: only those that were handed out to it."""

    group: str
    group_id: str
    shares: list[FinishShare]
    holder: str | None = None


class SharedOffsetCall(msgspec.Struct, array_like=True):
    """Whose turn is it in a queue with one shared offset? With `done`, an offset, that message's is over, if it was."""

    group: str
    group_id: str
    topic: str
    topic_id: str
    number: int
    done: int | None = None


class SharedOffsetResult(msgspec.Struct, array_like=True):
    """`advanced`: the offset has moved. `message` is (offset, timestamp_ms, record) of the one whose turn it is, None
    when there is none, and when it was not asked for; `offset` is where the queue goes on."""

    advanced: bool
    message: tuple[int, int, Record] | None = None
    offset: int = -1


class Receive(msgspec.Struct, array_like=True):
    """Lease what is there, on all partitions of the topics that the broker asked leads, without waiting for messages.
    `patient` as in ReceiveOptions."""

    group: str
    group_id: str
    topics: list[str]
    max_messages: int
    visibility_timeout_ms: int
    consumer: str
    attempt_id: str | None
    max_bytes: int = ANSWER_BYTES_MAX
    patient: bool = True


class ReceiveResult(msgspec.Struct, array_like=True):
    """`unbegun`: there is a partition where the group has not begun, and where it begins is for the asking broker to
    say. `known`: of a replay, whether the attempt is known here."""

    messages: list[LeasedMessage]
    unbegun: bool = False
    known: bool = False


class Interest(msgspec.Struct, array_like=True):
    """Answer when there is something for the group, within `wait_ms`; nothing is leased."""

    group: str
    group_id: str
    topics: list[str]
    wait_ms: int


class Interested(msgspec.Struct, array_like=True):
    ready: bool


class Start(msgspec.Struct, array_like=True):
    """Let the group begin on these partitions; where it has begun it goes on."""

    group: str
    group_id: str
    topic: str
    topic_id: str
    numbers: list[int]
    start: GroupStart


class GroupBegunCall(msgspec.Struct, array_like=True):
    """Has the group begun on these partitions?"""

    group: str
    topic: str
    topic_id: str
    numbers: list[int]


class CountGroups(msgspec.Struct, array_like=True):
    """What these groups have on the partitions that the broker asked leads; of all groups when there is no name."""

    groups: list[str]


class GroupCount(msgspec.Struct, array_like=True):
    """One group on one partition; counts are messages."""

    group: str
    topic: str
    number: int
    ready: int
    in_flight: int
    scheduled: int
    lag: int
    oldest_unacked_ms: int
    dead: int = 0


class GroupCounts(msgspec.Struct, array_like=True):
    """`led` are all partitions that the broker leads, as (topic, number): elsewhere it cannot speak of any group."""

    counts: list[GroupCount]
    led: list[tuple[str, int]]


class EndGroup(msgspec.Struct, array_like=True):
    """End the group on all partitions that the broker asked leads, durably."""

    group: str
    group_id: str


class EndedGroup(msgspec.Struct, array_like=True):
    """Where it ended, and what is led here, as in GroupCounts."""

    ended: list[tuple[str, int]]
    led: list[tuple[str, int]]
