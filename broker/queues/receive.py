"""Receive for a group: from the partitions led here, and from the brokers that lead the others.

Each call begins with another leader, this broker among them, so that no partition is always last. Receives of other
brokers take from the partitions led here, without waiting; their interests wait here like consumers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import gevent

from portalmq import wire
from portalmq.broker.cluster.routing import PATIENCE_S, PAUSE_FIRST_S, PAUSE_MAX_S, place_of
from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.queues import Interest, Interested, Receive, ReceiveResult
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.partition.long_poll import (
    Leaderships,
    LeasedMessage,
    Peer,
    Portion,
    ReceiveOptions,
    Source,
    Waiter,
    receive,
    replay,
    take,
)
from portalmq.broker.queues.group_partition import GroupPartition
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.later_acks import Acked, LaterAcks, PendingAck
from portalmq.broker.queues.remote_interest import RemoteGroup
from portalmq.broker.queues.settle import Settlement
from portalmq.control_plane.state import GroupState
from portalmq.errors import Backpressure, NotLeader, PortalMQError, Unavailable

# The time that a broker with an answered interest has to receive, before the next waiter is woken.
INTEREST_GRACE_S = 0.05
# The most groups whose last first leader is remembered.
TURNS_MAX = 10_000


class ReceiveHandler:
    """Receives of clients, and those that other brokers forward."""

    def __init__(
        self, groups: Groups, settlement: Settlement, peers: PeerCaller, *, patience_s: float = PATIENCE_S
    ) -> None:
        self._groups = groups
        self._settlement = settlement
        self._peers = peers
        self._patience_s = patience_s
        self._turn: dict[str, int] = {}
        self._later_acks = LaterAcks()
        # The sources at other brokers that have, or recently had, an interest there.
        self._remote: dict[tuple[int, str, tuple[str, ...]], RemoteGroup] = {}

    # --- for clients -------------------------------------------------------------------------------------------------

    def receive(
        self,
        name: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
        portion: Portion | None = None,
        leaderships: Leaderships | None = None,
        is_move: bool = False,
    ) -> list[LeasedMessage]:
        """Lease messages; wait for the first one up to the request's `wait_ms`.

        An empty answer without a wait means that every partition's leader has nothing; after a wait, that no partition
        whose leader answers has anything. Else raises Unavailable. Without `forward`, raises NotLeader when nothing
        is led here. To be checked again if the answer is not sent at once: `leaderships`.
        """
        leaderships = leaderships or Leaderships()
        group, topics, options = self._prepare(name, request, is_first, portion, leaderships)
        options = options._replace(is_move=is_move)
        if not forward:
            self._check_leads_some(topics)
        plan = partial(self._plan, group, [topic.name for topic in topics], forward)
        wait_s = request.wait_ms / 1000
        deadline = time.monotonic() + (wait_s or self._patience_s)
        pause_s = PAUSE_FIRST_S
        while True:
            topics = self._refreshed(topics)
            try:
                self._begin(group, topics, forward)
                messages = receive(plan, request.topics, options, wait_s, peer, self._groups.long_polls)
                leaderships.check()
                if messages or self._is_complete(self._refreshed(topics), forward, waited=wait_s > 0):
                    return messages
                raise Unavailable("a partition has no leader now, and the others are empty", retry_after_s=0.1)
            except (NotLeader, Unavailable) as error:
                left_s = deadline - time.monotonic()
                if (
                    error.outcome != "not_applied"
                    or not error.retryable
                    or left_s <= 0
                    or self._groups.long_polls.closed
                ):
                    raise
                wait_s = left_s if wait_s else 0.0
                gevent.sleep(min(pause_s, left_s))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def ack_and_receive(
        self,
        name: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
        portion: Portion | None = None,
        leaderships: Leaderships | None = None,
        may_ack_later: bool = False,
    ) -> tuple[list[LeasedMessage], Acked]:
        """Ack `request.ack`, then receive: both records go to the disk together. Also returns what became of the acks:
        with `may_ack_later`, those of this call may be told by a later one.

        After the acks are appended, no error is raised that would call them not applied: the receive is empty instead.
        """
        leaderships = leaderships or Leaderships()
        group, topics, options = self._prepare(name, request, is_first, portion, leaderships)
        if not forward:
            self._check_leads_some(topics)
        self._begin(group, topics, forward)
        # By key, the end of a message lets others be delivered: that is not put off.
        is_named = bool(request.attempt_id and request.consumer)
        is_soft = may_ack_later and is_named and not group.config.is_keyed
        begun = self._settlement.begin_acks(name, request.ack, forward=forward, is_soft=is_soft)
        plan = partial(self._plan, group, [topic.name for topic in topics], forward)
        messages: list[LeasedMessage] = []
        try:
            messages = receive(plan, request.topics, options, 0, peer, self._groups.long_polls)
        except PortalMQError as error:
            if error.outcome == "unknown":
                raise
        pending = PendingAck(request.attempt_id or "", request.ack, begun, time.monotonic())
        consumer = (group.group_id, request.consumer)
        if is_soft and len(messages) == request.max_messages:
            acked = self._later_acks.later(consumer, pending)
        else:
            acked = self._later_acks.now(consumer, pending)
        if not messages and request.wait_ms:
            try:
                messages = receive(plan, request.topics, options, request.wait_ms / 1000, peer, self._groups.long_polls)
            except (Backpressure, NotLeader, Unavailable):
                messages = []
            self._later_acks.tell(consumer, acked)
        leaderships.check()
        return messages, acked

    def sweep(self) -> None:
        """Forget acks that no receive has asked about for some time."""
        self._later_acks.sweep(time.monotonic())

    def _prepare(
        self,
        name: str,
        request: wire.ReceiveRequest,
        is_first: bool,
        portion: Portion | None,
        leaderships: Leaderships,
    ) -> tuple[GroupState, list[Topic], ReceiveOptions]:
        if self._groups.long_polls.closed:
            raise Unavailable("this broker is shutting down", retry_after_s=0.5)
        group = self._groups.ensure(name)
        topics = [self._groups.topics.get_or_create(topic) for topic in dict.fromkeys(request.topics)]
        self._groups.check_same(group)
        options = ReceiveOptions(
            request.max_messages,
            request.visibility_timeout_ms or group.config.visibility_timeout_ms,
            request.consumer,
            request.attempt_id,
            is_first,
            portion=portion,
            leaderships=leaderships,
        )
        return group, topics, options

    def _begin(self, group: GroupState, topics: Sequence[Topic], forward: bool) -> None:
        for topic in topics:
            self._groups.begin(group, topic, forward=forward)

    def _check_leads_some(self, topics: Sequence[Topic]) -> None:
        """Raise NotLeader, with the leader of the first partition that has one, when none is led here."""
        places = [place_of(topic.state, number) for topic in topics for number in range(topic.state.partitions)]
        leaders = {place: self._groups.leaders.leader_of(place) for place in places}
        if self._groups.leaders.broker_id in leaders.values():
            return
        for place, leader in leaders.items():
            if leader is not None:
                raise self._groups.leaders.not_leader(place, leader)

    def _is_complete(self, topics: Sequence[Topic], forward: bool, *, waited: bool) -> bool:
        """Return True when an empty answer is complete: all partitions have a leader; after a wait, one of them."""
        leaders = [topic.leader_of(number) for topic in topics for number in range(topic.state.partitions)]
        if waited or not forward:
            return any(leader is not None for leader in leaders)
        own = [topic for topic in topics if self._has_unopened(topic)]
        return None not in leaders and not own

    def _has_unopened(self, topic: Topic) -> bool:
        me = self._groups.leaders.broker_id
        open_here = {partition.number for partition in topic.led()}
        return any(
            topic.leader_of(number) == me and number not in open_here for number in range(topic.state.partitions)
        )

    # --- sources -----------------------------------------------------------------------------------------------------

    def _plan(self, group: GroupState, names: Sequence[str], forward: bool) -> list[Source]:
        """Return the sources to ask now, beginning with another leader each time."""
        self._groups.check_same(group)
        topics = [topic for name in names if (topic := self._find(name)) is not None]
        if not topics:
            raise Unavailable(f"topic {names[0]!r} was just deleted: repeat the request", retry_after_s=0.1)
        parts: list[Sequence[Source]] = []
        here, _ = self._local_sources(group, topics)
        turn = self._turn.get(group.name, -1) + 1
        if len(self._turn) >= TURNS_MAX:
            self._turn.clear()
        self._turn[group.name] = turn
        if here:
            first = turn % len(here)
            parts.append(here[first:] + here[:first])
        if forward:
            me = self._groups.leaders.broker_id
            wanted: dict[int, list[str]] = {}
            for topic in topics:
                for broker_id in {topic.leader_of(number) for number in range(topic.state.partitions)} - {None, me}:
                    assert broker_id is not None
                    wanted.setdefault(broker_id, []).append(topic.name)
            parts += [
                [self._remote_source(broker_id, group, tuple(sorted(of)))] for broker_id, of in sorted(wanted.items())
            ]
        if parts:
            first = turn % len(parts)
            parts = parts[first:] + parts[:first]
        return [source for part in parts for source in part]

    def _refreshed(self, topics: Sequence[Topic]) -> list[Topic]:
        """Return the current topics of these names: one may have been deleted and created again during a wait."""
        return [self._find(topic.name) or topic for topic in topics]

    def _find(self, name: str) -> Topic | None:
        return self._groups.topics.get(name)

    def _local_sources(self, group: GroupState, topics: Sequence[Topic]) -> tuple[list[GroupPartition], bool]:
        """Return the group on the partitions led here, and True if it has begun on all of them. A partition that
        refuses its begin is left out."""
        found: list[GroupPartition] = []
        has_begun = True
        for topic in topics:
            for partition in topic.led():
                place = place_of(topic.state, partition.number)
                if group.name in partition.delivery:
                    found.append(self._groups.attach(group, partition, place.topic_id))
                elif group.config.start != "earliest":
                    has_begun = False
                else:
                    with suppress(NotLeader, Unavailable):
                        found.append(self._groups.start_here(group, place, "earliest"))
        for source in found:
            if source.begun is not None:
                source.wait_begun_soon()
        return found, has_begun

    def _remote_source(self, broker_id: int, group: GroupState, topics: tuple[str, ...]) -> RemoteGroup:
        key = (broker_id, group.group_id, topics)
        source = self._remote.get(key)
        if source is None:
            self._remote = {known: each for known, each in self._remote.items() if not each.is_idle}
            on_unbegun = partial(self._groups.unbegun, group, topics)
            ask = partial(self._ask, broker_id, topics)
            source = self._remote[key] = RemoteGroup(self._peers, broker_id, group, topics, on_unbegun, ask)
        return source

    def _ask(self, broker_id: int, names: Sequence[str], call: Callable[[], ReceiveResult]) -> ReceiveResult:
        topics = [topic for name in names if (topic := self._find(name)) is not None]
        places = [
            place_of(topic.state, number)
            for topic in topics
            for number in range(topic.state.partitions)
            if topic.leader_of(number) == broker_id
        ]
        return self._groups.leaders.ask(broker_id, places, call)

    # --- for other brokers -------------------------------------------------------------------------------------------

    def lease(self, call: Receive, peer: Peer | None) -> ReceiveResult:
        options = ReceiveOptions(
            call.max_messages,
            call.visibility_timeout_ms,
            call.consumer,
            call.attempt_id,
            max_bytes=call.max_bytes,
            patient=call.patient,
            is_move=call.is_move,
            leaderships=(leaderships := Leaderships()),
        )
        sources, has_begun = self._sources_of(call)
        if peer is not None and peer.gone():
            return ReceiveResult([])
        messages = take(sources, options, insist=True)
        leaderships.check()
        return ReceiveResult(messages, not has_begun)

    def replay(self, call: Receive) -> ReceiveResult:
        assert call.attempt_id is not None
        sources, _ = self._sources_of(call)
        leaderships = Leaderships()
        messages = replay(sources, call.attempt_id, leaderships)
        leaderships.check()
        return ReceiveResult(messages or [], known=messages is not None)

    def await_messages(self, call: Interest, peer: Peer | None) -> Interested:
        """Wait until messages are available. Nothing is leased: the other broker may receive them then."""
        sources, has_begun = self._sources_of(call)
        if not has_begun or _any_ready(sources):
            return Interested(True)
        waiter = Waiter(call.topics, is_interest=True)
        long_polls = self._groups.long_polls
        long_polls.enter(waiter)
        unwatch = peer.watch(waiter.cancel) if peer is not None else lambda: None
        for source in sources:
            source.park(waiter)
        try:
            waiter.sleep(call.wait_ms / 1000)
        finally:
            unwatch()
            long_polls.leave(waiter)
            for source in sources:
                source.leave(waiter)
        is_ready = not waiter.cancelled and _any_ready(sources)
        if is_ready:
            gevent.spawn_later(INTEREST_GRACE_S, _notify, sources)
        else:
            _notify(sources)
        return Interested(is_ready)

    def _sources_of(self, call: Receive | Interest) -> tuple[list[GroupPartition], bool]:
        """Return the group on the topics' partitions led here. Raises NotLeader when there are none."""
        group = self._groups.find(call.group)
        if group is None or group.group_id != call.group_id or self._groups.is_ending(group):
            raise Unavailable(f"this broker does not know group {call.group!r} of this id (yet)", retry_after_s=0.1)
        topics = [topic for name in call.topics if (topic := self._find(name)) is not None]
        sources, has_begun = self._local_sources(group, topics)
        if not sources and has_begun:
            raise NotLeader(f"broker {self._groups.leaders.broker_id} leads nothing of {', '.join(call.topics)[:200]}")
        return sources, has_begun


def _any_ready(sources: Sequence[GroupPartition]) -> bool:
    return any(source.has_messages() and not source.is_beginning for source in sources)


def _notify(sources: Sequence[Source]) -> None:
    for source in sources:
        source.notify()
