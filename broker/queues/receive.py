"""Receiving for a group: from the partitions led here, and from the brokers that lead the others.

The broker that is asked begins with another leader each time, itself among them, so that no partition is always last.
What other brokers ask for is taken from what is led here, without waiting; their interest waits here like a consumer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import gevent
import msgspec

from portalmq import wire
from portalmq.broker.cluster.peers import Peers
from portalmq.broker.cluster.routing import PATIENCE_S, PAUSE_FIRST_S, PAUSE_MAX_S, place_of
from portalmq.broker.cluster.rpc.queues import Interest, Interested, Receive, ReceiveResult
from portalmq.broker.cluster.topics import Topic
from portalmq.broker.partition.long_poll import (
    LeasedMessage,
    Peer,
    Portion,
    ReceiveOptions,
    Source,
    Waiter,
    receive,
    take,
)
from portalmq.broker.queues.group_delivery import GroupPartition
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.remote_interest import RemoteGroup
from portalmq.broker.queues.settle import Settlement, Verdict
from portalmq.control_plane.state import GroupState
from portalmq.errors import Backpressure, NotLeader, PortalMQError, Unavailable

# How long whoever was told that something is there has to come for it, before the next one is told.
COMING_S = 0.05
# Of so many groups it is known who was asked first the last time.
TURNS_MAX = 10_000

_decode_receive = msgspec.msgpack.Decoder(Receive).decode
_decode_interest = msgspec.msgpack.Decoder(Interest).decode
_encode = msgspec.msgpack.Encoder().encode


class ReceiveHandler:
    """Receives of clients, and those that other brokers ask for."""

    def __init__(self, groups: Groups, settlement: Settlement, peers: Peers, *, patience_s: float = PATIENCE_S) -> None:
        self._groups = groups
        self._settlement = settlement
        self._peers = peers
        self._patience_s = patience_s
        self._turn: dict[str, int] = {}
        # Of the interests that are, or were lately, left at other brokers.
        self._remote: dict[tuple[int, str, tuple[str, ...]], RemoteGroup] = {}

    # --- for clients -------------------------------------------------------------------------------------------------

    def receive(
        self,
        name: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool,
        is_first: bool = False,
        portion: Portion | None = None,
    ) -> list[LeasedMessage]:
        """Lease messages, waiting for the first one up to the request's `wait_ms`.

        An empty answer to a request that does not wait is one that every partition's leader gave; so is one at the end
        of a wait, but for partitions without a leader. Raises Unavailable else, NotLeader when it is not to be
        forwarded and nothing is led here.
        """
        group, topics, options = self._prepared(name, request, is_first, portion)
        if not forward:
            self._check_leads_some(topics)
        plan = partial(self._plan, group, [topic.name for topic in topics], forward)
        wait_s = request.wait_ms / 1000
        deadline = time.monotonic() + (wait_s or self._patience_s)
        pause_s = PAUSE_FIRST_S
        while True:
            topics = self._as_they_are(topics)
            try:
                self._begin(group, topics, forward)
                messages = receive(plan, request.topics, options, wait_s, peer, self._groups.long_polls)
                if messages or self._answered(self._as_they_are(topics), forward, waited=wait_s > 0):
                    return messages
                raise Unavailable("a partition has no leader just now, and the others are empty", retry_after_s=0.1)
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
        forward: bool,
        is_first: bool = False,
        portion: Portion | None = None,
    ) -> tuple[list[LeasedMessage], list[Verdict]]:
        """Ack `request.ack`, then receive: both records go to the disk together. Returns the receipts' verdicts too.

        Once the acks are on their way nothing raises that would call them not applied: with nothing to be had, or no
        room to wait in, the receive is simply empty.
        """
        group, topics, options = self._prepared(name, request, is_first, portion)
        if not forward:
            self._check_leads_some(topics)
        self._begin(group, topics, forward)
        finish = self._settlement.begin_acks(name, request.ack, forward=forward)
        plan = partial(self._plan, group, [topic.name for topic in topics], forward)
        messages: list[LeasedMessage] = []
        try:
            messages = receive(plan, request.topics, options, 0, peer, self._groups.long_polls)
        except PortalMQError as error:
            if error.outcome == "unknown":
                raise
        verdicts = finish()
        if not messages and request.wait_ms:
            try:
                messages = receive(plan, request.topics, options, request.wait_ms / 1000, peer, self._groups.long_polls)
            except (Backpressure, NotLeader, Unavailable):
                messages = []
        return messages, verdicts

    def _prepared(
        self, name: str, request: wire.ReceiveRequest, is_first: bool, portion: Portion | None
    ) -> tuple[GroupState, list[Topic], ReceiveOptions]:
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
        )
        return group, topics, options

    def _begin(self, group: GroupState, topics: Sequence[Topic], forward: bool) -> None:
        for topic in topics:
            self._groups.begin(group, topic, forward=forward)

    def _check_leads_some(self, topics: Sequence[Topic]) -> None:
        """Raises NotLeader, with the leader of the first partition that has one, when none is led here."""
        places = [place_of(topic.state, number) for topic in topics for number in range(topic.state.partitions)]
        leaders = {place: self._groups.leaders.leader_of(place) for place in places}
        if self._groups.leaders.broker_id in leaders.values():
            return
        for place, leader in leaders.items():
            if leader is not None:
                raise self._groups.leaders.not_leader(place, leader)

    def _answered(self, topics: Sequence[Topic], forward: bool, *, waited: bool) -> bool:
        """Whether an empty answer says something: all leaders were there to be asked, or after a wait, one was."""
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
        """Whom to ask, as things stand now, beginning with another leader each time."""
        self._groups.check_same(group)
        topics = [topic for name in names if (topic := self._find(name)) is not None]
        if not topics:
            raise Unavailable(f"topic {names[0]!r} was just deleted: repeat the request", retry_after_s=0.1)
        parts: list[Sequence[Source]] = []
        here, _ = self._here(group, topics)
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
            parts += [[self._there(broker_id, group, tuple(sorted(of)))] for broker_id, of in sorted(wanted.items())]
        if parts:
            first = turn % len(parts)
            parts = parts[first:] + parts[:first]
        return [source for part in parts for source in part]

    def _as_they_are(self, topics: Sequence[Topic]) -> list[Topic]:
        """The topics of these names: one may have been deleted and made anew during a wait."""
        return [self._find(topic.name) or topic for topic in topics]

    def _find(self, name: str) -> Topic | None:
        return self._groups.topics.get(name)

    def _here(self, group: GroupState, topics: Sequence[Topic]) -> tuple[list[GroupPartition], bool]:
        """The group on what is led here, and whether it has begun on all of that. A partition that refuses to let it
        begin is left out: its leadership is moving."""
        found: list[GroupPartition] = []
        has_begun = True
        for topic in topics:
            for partition in topic.led():
                place = place_of(topic.state, partition.number)
                if group.name not in partition.delivery:
                    if group.config.start != "earliest":
                        has_begun = False
                        continue
                    try:
                        self._groups.begin_here(group, place, "earliest")
                    except (NotLeader, Unavailable):
                        continue
                found.append(self._groups.attach(group, partition, place.topic_id))
        return found, has_begun

    def _there(self, broker_id: int, group: GroupState, topics: tuple[str, ...]) -> RemoteGroup:
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

    def serve_receive(self, body: bytes, peer: Peer | None) -> bytes:
        call = _decode_receive(body)
        options = ReceiveOptions(
            call.max_messages,
            call.visibility_timeout_ms,
            call.consumer,
            call.attempt_id,
            max_bytes=call.max_bytes,
            patient=call.patient,
        )
        sources, has_begun = self._asked(call)
        if peer is not None and peer.gone():
            return _encode(ReceiveResult([]))
        return _encode(ReceiveResult(take(sources, options, insist=True), not has_begun))

    def serve_replay(self, body: bytes) -> bytes:
        call = _decode_receive(body)
        assert call.attempt_id is not None
        sources, _ = self._asked(call)
        found = [source.replay(call.attempt_id) for source in sources]
        known = [messages for messages in found if messages is not None]
        return _encode(ReceiveResult([message for messages in known for message in messages], known=bool(known)))

    def serve_interest(self, body: bytes, peer: Peer | None) -> bytes:
        """Wait until something is there. It is not leased: whoever asked comes for it, or does not."""
        call = _decode_interest(body)
        sources, has_begun = self._asked(call)
        if not has_begun or any(source.has_messages() for source in sources):
            return _encode(Interested(True))
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
        is_ready = not waiter.cancelled and any(source.has_messages() for source in sources)
        if is_ready:
            gevent.spawn_later(COMING_S, _notify, sources)
        else:
            _notify(sources)
        return _encode(Interested(is_ready))

    def _asked(self, call: Receive | Interest) -> tuple[list[GroupPartition], bool]:
        """The group on what is led here of the topics. Raises NotLeader when that is nothing."""
        group = self._groups.find(call.group)
        if group is None or group.group_id != call.group_id or self._groups.is_ending(group):
            raise Unavailable(
                f"this broker does not know this group {call.group!r} yet, or any more", retry_after_s=0.1
            )
        topics = [topic for name in call.topics if (topic := self._find(name)) is not None]
        sources, has_begun = self._here(group, topics)
        if not sources and has_begun:
            raise NotLeader(f"broker {self._groups.leaders.broker_id} leads nothing of {', '.join(call.topics)[:200]}")
        return sources, has_begun


def _notify(sources: Sequence[Source]) -> None:
    for source in sources:
        source.notify()
