"""Every broker answers every call: it brings the share of each partition to the partition's leader, in one hop.

    LeaderRouter.call(SETTLE, request, local)
        |-- led here         local(partitions)                           in this greenlet
        `-- led elsewhere    the request for those partitions            a greenlet for each of the brokers, at once

    peer_dispatch.py: LeaderRouter.serve(SETTLE, request, local)         at the leader; it forwards nothing

A share that was certainly not applied while the leadership moves (no leader yet, a broker that is gone, one that is not
the leader) is tried again for a moment, at the leader of that moment. A share whose outcome is unknown is tried again
only when the call is repeatable: applying it twice is the same as once. A leader that is silent while another one has
been elected is not waited for.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypedDict, TypeVar, Unpack

import gevent
from gevent.event import Event

from portalmq.broker.cluster.peers import NotAnswered
from portalmq.broker.cluster.rpc import Outcomes, PartitionCall, PartitionRequest, PeerCaller, TopicPartition
from portalmq.broker.partition.refusals import FaultyFiles
from portalmq.broker.partition.writer import NotCommittedYet
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.control_plane.state import TopicState
from portalmq.errors import NotLeader, PartitionNotFound, PortalMQError, Unavailable

PATIENCE_S = 3.0
# When nothing is to be forwarded: this broker was elected just now, and is opening the partition.
OWN_PATIENCE_S = 1.0
PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 0.2
# How long a broker that leads no longer may still take to answer, before its silence counts as its answer.
ABANDON_AFTER_S = 0.3

T = TypeVar("T")
P = TypeVar("P", bound=PartitionRequest)
# The work of a call at partitions that this broker leads. It has an outcome for each of them.
LocalWork = Callable[[Sequence[TopicPartition]], Outcomes[T]]


class NoSuchPartition(PartitionNotFound):
    """`topic` is as this broker knows it: it may have grown."""

    def __init__(self, topic: TopicState, number: int) -> None:
        super().__init__(f"topic {topic.name!r} has partitions 0 to {topic.partitions - 1}, there is no {number}")
        self.topic = topic


def place_of(topic: TopicState, number: int) -> TopicPartition:
    """Raises NoSuchPartition."""
    if not 0 <= number < topic.partitions:
        raise NoSuchPartition(topic, number)
    return TopicPartition(topic.name, topic.topic_id, number)


def one_by_one(do: Callable[[TopicPartition], T]) -> LocalWork[T]:
    """Return the work that does this at each partition."""

    def local(places: Sequence[TopicPartition]) -> Outcomes[T]:
        return {place: outcome_of(do, place) for place in in_short_turns(places)}

    return local


def together(begin: Callable[[TopicPartition], Callable[[], T]]) -> LocalWork[T]:
    """Return the work that begins this at all partitions, then waits for each: their records share a transaction."""

    def local(places: Sequence[TopicPartition]) -> Outcomes[T]:
        begun = {place: outcome_of(begin, place) for place in in_short_turns(places)}
        return {
            place: finish if isinstance(finish, PortalMQError) else outcome_of(finish)
            for place, finish in in_short_turns(begun.items())
        }

    return local


def outcome_of(do: Callable[..., T], *arguments: object) -> T | PortalMQError:
    """Return what the call returns, or the error that it raises."""
    try:
        return do(*arguments)
    except PortalMQError as error:
        return error


class Work(Protocol[T]):
    """A call with a share at each of several partitions. Both methods return an outcome for every partition."""

    def here(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, T | PortalMQError]:
        """Apply the shares of partitions that this broker leads."""
        ...

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> dict[TopicPartition, T | PortalMQError]:
        """Call another broker for the shares of partitions that it leads. May raise for all of them at once."""
        ...


@dataclass(slots=True)
class PartitionWork(Generic[T]):
    """The work of a PartitionCall. `request` returns the request for some of its partitions."""

    call: PartitionCall[Any, T]
    request: Callable[[Sequence[TopicPartition]], Any]
    here: LocalWork[T]
    peers: PeerCaller

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[T]:
        return self.call.outcomes(self.peers, broker_id, self.request(places), places)


class RoutingOptions(TypedDict, total=False):
    """`forward` False: a partition that another broker leads is refused with NotLeader. `repeatable`: see above.
    `patience_s`: how long to retry. `waiting`: the client of the call; once it has gone, nothing more is begun."""

    forward: bool
    repeatable: bool
    patience_s: float | None
    waiting: WaitingClient | None


class LeaderLookup(Protocol):
    """The leaders, as this broker knows them."""

    def leader_of(self, place: TopicPartition) -> int | None:
        """Return None without a leader. Raises TopicNotFound, PartitionNotFound."""
        ...

    def url_of(self, broker_id: int) -> str | None: ...

    def look_again(self, place: TopicPartition) -> None:
        """Have the partition's state read again: it may be outdated. Does not block."""
        ...


class WaitingClient(Protocol):
    """The client of a call; it may disconnect."""

    def gone(self) -> bool: ...
    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]: ...


@dataclass(slots=True)
class _Asked(Generic[T]):
    """A call to another broker, its partitions, and the greenlet that waits for the answer."""

    broker_id: int
    places: Sequence[TopicPartition]
    greenlet: gevent.Greenlet

    def unanswered(self, why: str) -> str:
        return f"broker {self.broker_id} gave no answer yet, and {why}"


class LeaderRouter:
    """Brings work to the leaders. Call `changed` when any leader has changed."""

    def __init__(
        self,
        broker_id: int,
        leads: LeaderLookup,
        peers: PeerCaller,
        *,
        chance: Callable[[], float] = random.random,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.broker_id = broker_id
        self._map = leads
        self._peers = peers
        self._chance = chance
        self._patience_s = patience_s
        self._wakeups: set[Event] = set()

    def changed(self) -> None:
        for wakeup in tuple(self._wakeups):
            wakeup.set()

    def leader_of(self, place: TopicPartition) -> int | None:
        return self._map.leader_of(place)

    def led_here(self, place: TopicPartition) -> bool:
        return self._map.leader_of(place) == self.broker_id

    def not_leader(self, place: TopicPartition, leader: int) -> NotLeader:
        """Return the error that names the leader to a client."""
        return NotLeader(
            f"broker {leader} leads partition {place.number} of topic {place.topic!r}",
            leader=leader,
            leader_url=self._map.url_of(leader),
        )

    def check_led_here(self, places: Iterable[TopicPartition]) -> None:
        """Raise NotLeader when another broker leads any: without forwarding, a call is applied as a whole or not."""
        for place in places:
            leader = self._map.leader_of(place)
            if leader is not None and leader != self.broker_id:
                raise self.not_leader(place, leader)

    def call(
        self, call: PartitionCall[P, T], request: P, local: LocalWork[T], **options: Unpack[RoutingOptions]
    ) -> Outcomes[T]:
        """Return the outcome at each partition of the request, a value or an error."""
        return self.run(request.places, self.work(call, request.only, local), **options)

    def call_one(
        self, call: PartitionCall[P, T], request: P, local: LocalWork[T], **options: Unpack[RoutingOptions]
    ) -> T:
        """Return the value at the request's only partition. Raises its error."""
        (place,) = request.places
        return self.one(place, self.work(call, request.only, local), **options)

    def one(self, place: TopicPartition, work: Work[T], **options: Unpack[RoutingOptions]) -> T:
        """Return the value at a partition. Raises its error."""
        outcome = self.run([place], work, **options)[place]
        if isinstance(outcome, PortalMQError):
            raise outcome
        return outcome

    def serve(
        self, call: PartitionCall[P, T], request: P, local: LocalWork[T], *, patience_s: float | None = None
    ) -> bytes:
        """Answer another broker as the leader of its request's partitions."""
        outcomes = self.call(call, request, local, forward=False, patience_s=patience_s)
        return call.encode(outcomes, request.places)

    def work(
        self,
        call: PartitionCall[P, T],
        request: Callable[[Sequence[TopicPartition]], P],
        local: LocalWork[T],
    ) -> PartitionWork[T]:
        """Return work for `run`, for a request that is built only where partitions are led elsewhere."""
        return PartitionWork(call, request, local, self._peers)

    def ask(self, broker_id: int, places: Sequence[TopicPartition], call: Callable[[], T]) -> T:
        """Return the answer of another broker that leads these partitions; stop waiting once others lead all of them.
        Raises what `call` raises, NotAnswered, and Unavailable without partitions."""
        if not places:
            raise Unavailable(f"broker {broker_id} leads nothing of this any more", retry_after_s=0.1)
        asked: _Asked[T] = _Asked(broker_id, places, gevent.spawn(outcome_of, call))
        try:
            why = self._why_left(asked, None)
            if why:
                raise NotAnswered(asked.unanswered(why))
        finally:
            asked.greenlet.kill(block=False)
        found: T | PortalMQError = asked.greenlet.get()
        if isinstance(found, PortalMQError):
            raise found
        return found

    def run(
        self,
        places: Sequence[TopicPartition],
        work: Work[T],
        *,
        forward: bool = True,
        repeatable: bool = False,
        patience_s: float | None = None,
        waiting: WaitingClient | None = None,
    ) -> Outcomes[T]:
        """Return the outcome at each partition, a value or an error. See RoutingOptions."""
        outcomes: Outcomes[T] = {}
        doubtful: set[TopicPartition] = set()
        pending = list(places)
        wakeup: Event | None = None
        deadline = pause_s = 0.0
        try:
            while True:
                if wakeup is not None:
                    wakeup.clear()
                found: Outcomes[T] = self._once(pending, work, forward, waiting)
                if wakeup is None and not any(isinstance(outcome, PortalMQError) for outcome in found.values()):
                    return found
                outcomes |= found
                doubtful |= {place for place in pending if _is_unknown(outcomes[place])}
                pending = [place for place in pending if self._may_mend(outcomes[place], forward, repeatable)]
                if not pending or (waiting is not None and waiting.gone()):
                    break
                if wakeup is None:  # patience counts from the first failure: some calls wait
                    wakeup = Event()
                    self._wakeups.add(wakeup)
                    if patience_s is None:
                        patience_s = self._patience_s if forward else min(self._patience_s, OWN_PATIENCE_S)
                    deadline, pause_s = time.monotonic() + patience_s, PAUSE_FIRST_S
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                for place in pending:
                    self._map.look_again(place)
                wakeup.wait(min(left_s, pause_s * (0.5 + 0.5 * self._chance())))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
        finally:
            if wakeup is not None:
                self._wakeups.discard(wakeup)
        for place in doubtful:
            outcome = outcomes[place]
            if isinstance(outcome, PortalMQError):  # the last try was refused, an earlier one may have been applied
                outcome.outcome = "unknown"
        if forward:
            outcomes |= {
                place: as_unavailable(error) for place, error in outcomes.items() if isinstance(error, NotLeader)
            }
        return outcomes

    def _may_mend(self, outcome: object, forward: bool, repeatable: bool) -> bool:
        if not isinstance(outcome, NotLeader | Unavailable) or not outcome.retryable:
            return False
        if isinstance(outcome, NotCommittedYet | FaultyFiles):
            return False
        if outcome.outcome != "not_applied" and not repeatable:
            return False
        return forward or not isinstance(outcome, NotLeader) or outcome.extra.get("leader") in {None, self.broker_id}

    def _once(
        self, places: Sequence[TopicPartition], work: Work[T], forward: bool, waiting: WaitingClient | None
    ) -> Outcomes[T]:
        outcomes: Outcomes[T] = {}
        here: list[TopicPartition] = []
        there: dict[int, list[TopicPartition]] = {}
        for place in places:
            try:
                leader = self._map.leader_of(place)
            except PortalMQError as error:
                outcomes[place] = error
                continue
            if leader == self.broker_id:
                here.append(place)
            elif leader is None:
                outcomes[place] = Unavailable(
                    f"partition {place.number} of topic {place.topic!r} has no leader just now", retry_after_s=0.1
                )
            elif forward:
                there.setdefault(leader, []).append(place)
            else:
                outcomes[place] = self.not_leader(place, leader)
        if not there:
            return outcomes | work.here(here) if here else outcomes
        asked: list[_Asked[T]] = [
            _Asked(broker_id, shares, gevent.spawn(_ask, work, broker_id, shares))
            for broker_id, shares in there.items()
        ]
        try:
            if here:
                outcomes |= work.here(here)
            for each in asked:
                found: Outcomes[T] = self._answer_of(each, waiting)
                outcomes |= found
        finally:
            gevent.killall([each.greenlet for each in asked], block=False)
        return outcomes

    def _answer_of(self, asked: _Asked[T], waiting: WaitingClient | None) -> Outcomes[T]:
        why = self._why_left(asked, waiting)
        if why:
            return {place: NotAnswered(asked.unanswered(why)) for place in asked.places}
        outcomes: Outcomes[T] = asked.greenlet.get()
        return outcomes

    def _why_left(self, asked: _Asked[T], waiting: WaitingClient | None) -> str:
        """Wait for the answer. Return why the wait was abandoned; an empty text when the answer is there."""
        wakeup = Event()
        self._wakeups.add(wakeup)
        asked.greenlet.link(lambda _: wakeup.set())
        unwatch = waiting.watch(wakeup.set) if waiting is not None else None
        abandon_at = 0.0
        try:
            while not asked.greenlet.ready():
                if abandon_at:
                    wakeup.wait(max(0.0, abandon_at - time.monotonic()))
                else:
                    wakeup.wait()
                wakeup.clear()
                if asked.greenlet.ready():
                    break
                if waiting is not None and waiting.gone():
                    return "the client has disconnected"
                if not abandon_at and self._has_moved(asked):
                    abandon_at = time.monotonic() + ABANDON_AFTER_S
                elif abandon_at and time.monotonic() >= abandon_at:
                    return "another broker leads now"
        finally:
            self._wakeups.discard(wakeup)
            if unwatch is not None:
                unwatch()
        return ""

    def _has_moved(self, asked: _Asked[T]) -> bool:
        """Return True when other brokers lead all partitions of this call now."""
        try:
            return all(self._map.leader_of(place) not in {None, asked.broker_id} for place in asked.places)
        except PortalMQError:
            return True


def _ask(work: Work[T], broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[T]:
    try:
        return work.there(broker_id, places)
    except PortalMQError as error:
        return {place: copy.copy(error) for place in places}


def as_unavailable(error: PortalMQError) -> PortalMQError:
    """Replace NotLeader: clients that do not track leaders cannot use it."""
    if not isinstance(error, NotLeader):
        return error
    return Unavailable(error.detail, outcome=error.outcome, retry_after_s=error.retry_after_s or 0.1)


def _is_unknown(outcome: object) -> bool:
    return isinstance(outcome, PortalMQError) and outcome.outcome == "unknown"
