"""The calls of brokers to each other: POST /internal/v1/<name>, a request and an answer in MessagePack.

Calls to the leaders of partitions. A request names partitions; the answer has a Result for each, in their order (marked
`one`: the request names one partition, and the answer stands alone):

    produce         Produce             AppendResult        messages.py
    first           FindFirst           list[int]
    browse          Browse              Browsed             one
    purge           PurgeCall           bool
    open_orders     TopicNumbers        bool
    scheduled       ListScheduled       Rows
    cancel          CancelScheduled     bool                one Result
    trace           TraceCall           TracedLife          one
    locate          LocateCall          list[int]
    match_scheduled ScheduledCall       ScheduledMatch
    move_scheduled  ScheduledCall       int
    partitions      Partitions          PartitionSize
    known           LookAt              bool                queues.py
    start           BeginGroup          bool
    settle          Settle              list[bool]
    finish          Finish              list[bool]
    unfinished      ListUnfinished      UnfinishedRows      one
    unfinished_at   ListUnfinishedAt    UnfinishedRows      one
    look            LookAt              QueueSize
    commit          CommitCall          CommitResult
    dead_letters    DeadCall            DeadPage
    match_dead      DeadCall            tuple
    redrive         DeadCall            int
    drop_dead       DeadCall            int
    turn            SharedOffsetCall    SharedOffsetResult  streams.py, one
    fronts          Fronts              SharedOffsetResult
    claim           ClaimCall           int
    commit_offsets  StreamCommitCall    bool
    seek            SeekCall            tuple
    offsets         GroupPositionsCall  GroupPosition
    change_schedule ChangeSchedule      ChangedSchedule     schedules.py, one Result
    last_ticks      LastTicks           list[int]

Calls to a broker:

    fence           Fence               FencingConfirmed    messages.py
    receive         Receive             ReceiveResult       queues.py
    replay          Receive             ReceiveResult
    interest        Interest            Interested
    groups          CountGroups         GroupCounts
    group_at        CountGroupAt        GroupCountsAt
    end_group       EndGroup            EndedGroup
    pause_group     PauseGroup          EndedGroup
    coordinate      Coordinate          MemberAnswer        streams.py; a seek answers SeekAnswer
    standing        LogEndRequest       ReplicaLogEnd       brokers.py
    standings       LogEndsRequest      ReplicaLogEnds
    digest          DigestRequest       ReplicaDigest
    suspect         Suspicion           SuspicionNoted
    reach           ReachRequest        Reached
    time            TimeRequest         TimeAnswer
    rates           RatesRequest        RatesAnswer

`fetch`, which replicas use, has a binary form of its own (replication/fetch_protocol.py).

A topic is named by its id as well: one that was deleted and created again is another topic. Brokers of two versions
serve side by side during an upgrade, so the names, the order of the fields and their types stay. A field that is added
comes last and has a default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from portalmq.errors import PortalMQError, error_from_problem

T = TypeVar("T")
A = TypeVar("A")
R = TypeVar("R", bound=msgspec.Struct)
P = TypeVar("P", bound="PartitionRequest")
S = TypeVar("S", bound="PartitionRequest")

_encode = msgspec.msgpack.Encoder().encode


class TopicPartition(NamedTuple):
    """A partition, whichever broker leads it."""

    topic: str
    topic_id: str
    number: int


# The outcome of a call at each partition.
Outcomes = dict[TopicPartition, T | PortalMQError]


class Refusal(msgspec.Struct, array_like=True):
    """The error of one partition, as its problem document."""

    problem: dict[str, Any]
    retry_after_s: float | None = None


class Result(msgspec.Struct, Generic[T], array_like=True):
    """The outcome at one partition: a value, or a refusal."""

    value: T | None
    refused: Refusal | None = None

    def outcome(self) -> T | PortalMQError:
        if self.refused is not None:
            return error_of(self.refused)
        assert self.value is not None
        return self.value


def result_of(outcome: T | PortalMQError) -> Result[T]:
    return Result(None, refusal(outcome)) if isinstance(outcome, PortalMQError) else Result(outcome)


def values_of(outcomes: Outcomes[T]) -> dict[TopicPartition, T]:
    """Return the values. Raises the error of the first partition that has one."""
    values: dict[TopicPartition, T] = {}
    for place, outcome in outcomes.items():
        if isinstance(outcome, PortalMQError):
            raise outcome
        values[place] = outcome
    return values


def first_error(outcomes: Iterable[object]) -> PortalMQError | None:
    """Return the error to raise: one with an unknown outcome if there is one; None without errors."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, PortalMQError)]
    return next((error for error in errors if error.outcome == "unknown"), errors[0] if errors else None)


def raise_if_all_failed(outcomes: Collection[object]) -> None:
    """Raise the first error when all outcomes are errors."""
    error = first_error(outcomes)
    if error is not None and all(isinstance(outcome, PortalMQError) for outcome in outcomes):
        raise error


def refusal(error: PortalMQError) -> Refusal:
    return Refusal(msgspec.to_builtins(error.problem()), error.retry_after_s)


def error_of(refused: Refusal) -> PortalMQError:
    return error_from_problem(refused.problem, retry_after_s=refused.retry_after_s)


# --- requests that name partitions -----------------------------------------------------------------------------------


class PartitionRequest(Protocol):
    """A request that names the partitions it is for. The classes below are its forms."""

    @property
    def places(self) -> list[TopicPartition]: ...

    def only(self: S, places: Sequence[TopicPartition]) -> S:
        """Return the request for these of its partitions."""
        ...


class ForNumbers:
    """A request for some partitions of one topic, by their numbers."""

    __slots__ = ()
    topic: str
    topic_id: str
    numbers: list[int]

    @property
    def places(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, self.topic_id, number) for number in self.numbers]

    def only(self: T, places: Sequence[TopicPartition]) -> T:
        return _replaced(self, numbers=[place.number for place in places])


class TopicNumbers(ForNumbers, msgspec.Struct, array_like=True):
    topic: str
    topic_id: str
    numbers: list[int]


class GroupNumbers(ForNumbers, msgspec.Struct, array_like=True):
    group: str
    group_id: str
    topic: str
    topic_id: str
    numbers: list[int]


class Placed(msgspec.Struct, array_like=True):
    """What is for one partition."""

    topic: str
    topic_id: str
    number: int

    @property
    def place(self) -> TopicPartition:
        return TopicPartition(self.topic, self.topic_id, self.number)


class ForOne:
    """A request for one partition."""

    __slots__ = ()
    topic: str
    topic_id: str
    number: int

    @property
    def places(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, self.topic_id, self.number)]

    def only(self: T, places: Sequence[TopicPartition]) -> T:
        return self


class ForShares:
    """A request with a share for each partition of one topic."""

    __slots__ = ()
    topic: str
    topic_id: str
    shares: list[Any]

    @property
    def places(self) -> list[TopicPartition]:
        return [TopicPartition(self.topic, self.topic_id, share.number) for share in self.shares]

    def only(self: T, places: Sequence[TopicPartition]) -> T:
        by_place = self.by_place()  # type: ignore[attr-defined]
        return _replaced(self, shares=[by_place[place] for place in places])

    def by_place(self) -> dict[TopicPartition, Any]:
        return dict(zip(self.places, self.shares, strict=True))


class ForPlacedShares(ForShares):
    """A request with a share for each of some partitions, of several topics. A share is Placed."""

    __slots__ = ()

    @property
    def places(self) -> list[TopicPartition]:
        return [share.place for share in self.shares]


def _replaced(request: T, **fields: object) -> T:
    return msgspec.structs.replace(request, **fields)  # type: ignore[type-var]


# --- calls -----------------------------------------------------------------------------------------------------------


class PeerCaller(Protocol):
    """What calls need of cluster/peers.py."""

    def call(self, broker_id: int, name: str, request: msgspec.Struct, kind: type[T], *, timeout_s: float) -> T: ...


class BrokerCall(Generic[R, A]):
    """A call to a broker. `timeout_s` comes on top of what the request itself waits for, its `wait_ms`."""

    def __init__(self, name: str, request: type[R], answer: type[A], timeout_s: float) -> None:
        self.name = name
        self.request = request
        self.answer = answer
        self.timeout_s = timeout_s
        self.decode = msgspec.msgpack.Decoder(request).decode

    def ask(self, peers: PeerCaller, broker_id: int, request: R, *, timeout_s: float | None = None) -> A:
        """Raises NotReached, NotAnswered, and the error that the broker answered."""
        return self._call(peers, broker_id, request, self.answer, timeout_s)

    def _call(self, peers: PeerCaller, broker_id: int, request: R, kind: type[T], timeout_s: float | None = None) -> T:
        if timeout_s is None:
            timeout_s = self.timeout_s + getattr(request, "wait_ms", 0) / 1_000
        return peers.call(broker_id, self.name, request, kind, timeout_s=timeout_s)


class PartitionCall(BrokerCall[Any, Any], Generic[P, T]):
    """A call to the leaders of partitions. The answer is a list: a Result for each partition of the request."""

    request: type[P]
    answer: type[T]

    def __init__(self, name: str, request: type[P], answer: type[T], timeout_s: float) -> None:
        super().__init__(name, request, answer, timeout_s)
        self._results = list[Result[answer]]  # type: ignore[valid-type]

    def outcomes(self, peers: PeerCaller, broker_id: int, request: P, places: Sequence[TopicPartition]) -> Outcomes[T]:
        """Ask the leader of these partitions."""
        results = self._call(peers, broker_id, request, self._results)
        return {place: result.outcome() for place, result in zip(places, results, strict=True)}

    def encode(self, outcomes: Mapping[TopicPartition, T | PortalMQError], places: Sequence[TopicPartition]) -> bytes:
        """Return the leader's answer. Raises the error of a partition where the answer has no room for it."""
        return _encode([result_of(outcomes[place]) for place in places])


class OnePartitionCall(PartitionCall[P, T]):
    """A call about one partition. The answer stands alone."""

    def outcomes(self, peers: PeerCaller, broker_id: int, request: P, places: Sequence[TopicPartition]) -> Outcomes[T]:
        (place,) = places
        return {place: self._call(peers, broker_id, request, self.answer)}

    def encode(self, outcomes: Mapping[TopicPartition, T | PortalMQError], places: Sequence[TopicPartition]) -> bytes:
        (outcome,) = (outcomes[place] for place in places)
        if isinstance(outcome, PortalMQError):
            raise outcome
        return _encode(outcome)


class OneResultCall(PartitionCall[P, T]):
    """A call about one partition. The answer is a Result."""

    def outcomes(self, peers: PeerCaller, broker_id: int, request: P, places: Sequence[TopicPartition]) -> Outcomes[T]:
        (place,) = places
        result: Result[T] = self._call(peers, broker_id, request, Result[self.answer])  # type: ignore[name-defined]
        return {place: result.outcome()}

    def encode(self, outcomes: Mapping[TopicPartition, T | PortalMQError], places: Sequence[TopicPartition]) -> bytes:
        (place,) = places
        return _encode(result_of(outcomes[place]))
