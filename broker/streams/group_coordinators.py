"""Requests to stream groups at any broker: it finds the group's coordinator, or becomes it.

    join, heartbeat, leave, seek --> coordinated here?  --yes--> Coordinator.ask
                                          | no
                                          v
                     coordinator in the control plane? --alive--> that broker, one hop
                                          | none, or gone, or draining, or silent
                                          v
                            take over by compare-and-set (the first broker wins)

The coordinator's broker is cached until it denies to be the coordinator, or is gone. Offsets are committed without the
coordinator (offsets.py); it copies them into the control plane once a second (checkpoints.py).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import gevent
import msgspec
from gevent.event import AsyncResult, Event

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.cluster.peers import NotAnswered, NotReached, Peers
from portalmq.broker.cluster.rpc import BrokerCall, TopicPartition, first_error
from portalmq.broker.cluster.rpc.streams import COORDINATE, COORDINATE_SEEK, ClaimShare, Coordinate, Start
from portalmq.broker.core.stream import events as core
from portalmq.broker.core.stream.membership import TICK_MS
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.queues.groups import Groups
from portalmq.broker.streams.checkpoints import Checkpoints
from portalmq.broker.streams.coordinator import Coordinator, roster_of
from portalmq.broker.streams.stream_partitions import SOUGHT, StreamPartitions, check_mode, stream_group
from portalmq.control_plane.mirror import Changes, Mirror
from portalmq.control_plane.plane import PlaneUnavailable
from portalmq.control_plane.state import GroupState
from portalmq.control_plane.stream_groups import RosterState, StreamGroups, group_id_of
from portalmq.control_plane.tree import Versioned
from portalmq.errors import (
    IllegalGeneration,
    InvalidRequest,
    NotLeader,
    PortalMQError,
    Unavailable,
)

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
PAUSE_S = 0.05
# A coordinator that does not answer for longer is paused or overloaded.
HEARTBEAT_TIMEOUT_S = 4.0
CHECKPOINT_EVERY_S = 1.0
# A group without members has no coordinator after this time.
IDLE_S = 60.0
KEPT_MAX = 10_000

T = TypeVar("T")
_encode = msgspec.msgpack.Encoder().encode


@dataclass(eq=False, repr=False)
class GroupCoordinators:
    """Finds, becomes and resigns as the coordinator of groups. `me` is (broker id, incarnation)."""

    _me: tuple[int, int]
    _store: StreamGroups
    _groups: Groups
    _partitions: StreamPartitions
    _mirror: Mirror
    _peers: Peers
    _clock: Clock

    def __post_init__(self) -> None:
        self._own: dict[str, Coordinator] = {}
        self._busy_s: dict[str, float] = {}
        self._taking: set[str] = set()
        self._elsewhere: dict[str, tuple[int, int]] = {}
        self._in_doubt: set[str] = set()
        self._changed_rosters: set[str] = set()
        self._checkpoints = Checkpoints(self._store, self._partitions, self._mirror, self._clock)
        self._closing = Event()
        self._greenlets: list[gevent.Greenlet] = []

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._store.plane.watch(self._on_plane_event)
        self._greenlets = [gevent.spawn(self._tick), gevent.spawn(self._checkpoint)]

    def drain(self) -> None:
        """Stop coordinating: other brokers take over."""
        self._closing.set()
        own, self._own = self._own, {}
        for coordinator in own.values():
            coordinator.close()

    def close(self) -> None:
        self.drain()
        gevent.killall(self._greenlets, block=False)

    def sync(self, changes: Changes) -> None:
        """React to changes of groups and topics in the mirror."""
        for name in changes.groups:
            group = self._mirror.groups.get(name)
            for group_id, coordinator in tuple(self._own.items()):
                if coordinator.group.name == name and (group is None or group.group_id != group_id):
                    self._on_resigned(coordinator)
        if changes.topics:
            for coordinator in tuple(self._own.values()):
                coordinator.topics_changed()

    def session_lost(self) -> None:
        """Let all coordinators check the control plane: others may have taken over."""
        for coordinator in tuple(self._own.values()):
            coordinator.tell(core.SessionLost())

    def _on_plane_event(self, path: str | None) -> None:
        """Note a written roster: this broker wrote it, or another one that has taken over."""
        group_id = group_id_of(path) if path is not None else None
        if group_id in self._own:
            self._changed_rosters.add(group_id)

    def _tick(self) -> None:
        while not self._closing.wait(TICK_MS / 1000):
            changed, self._changed_rosters = self._changed_rosters, set()
            for group_id, coordinator in tuple(self._own.items()):
                try:
                    self._tick_one(group_id, coordinator, is_changed=group_id in changed)
                except Exception:  # the other groups still need their ticks
                    log.exception("group %r: its tick failed", coordinator.group.name)

    def _tick_one(self, group_id: str, coordinator: Coordinator, *, is_changed: bool) -> None:
        if is_changed:
            coordinator.tell(core.SessionLost())
        coordinator.tell(core.Tick())
        if not coordinator.membership.is_idle:
            self._busy_s[group_id] = time.monotonic()
        elif time.monotonic() > self._busy_s.setdefault(group_id, time.monotonic()) + IDLE_S:
            self._forget(coordinator)

    def _forget(self, coordinator: Coordinator) -> None:
        coordinator.close()
        group_id = coordinator.group.group_id
        if self._own.get(group_id) is coordinator:
            del self._own[group_id]
            self._busy_s.pop(group_id, None)
            self._checkpoints.forget(group_id)

    def roster_here(self, group_id: str) -> RosterState | None:
        """Return the roster of a group that this broker coordinates; None for others, and before it is loaded."""
        own = self._own.get(group_id)
        return roster_of(own.membership.known) if own is not None and own.membership.known is not None else None

    def _on_resigned(self, coordinator: Coordinator) -> None:
        self._elsewhere.pop(coordinator.group.group_id, None)
        self._forget(coordinator)

    # --- members -----------------------------------------------------------------------------------------------------

    def join(
        self, name: str, request: contract.JoinRequest, peer: Peer | None = None, *, forward: bool = True
    ) -> contract.MemberAnswer:
        """Join the group, which is created if it is missing; return the assignment. A request of a disconnected client
        is refused: in a paused broker it may be old, and would fence the member that has joined elsewhere since."""
        for topic in request.topics:
            wire.check_name(topic, "topic")
            self._groups.topics.get_or_create(topic)
        group = self._groups.ensure_stream(name)
        member_id = request.member_id if request.member_id is not None else f"member-{uuid.uuid4().hex}"
        if request.member_id is not None:
            wire.check_name(member_id, "member")
        topics = tuple(sorted(set(request.topics)))
        call = Coordinate(
            name, group.group_id, "join", member_id, topics, session_timeout_ms=request.session_timeout_ms
        )
        return self._coordinated(group, call, COORDINATE, forward, peer)

    def heartbeat(self, name: str, member_id: str, generation: int, *, forward: bool = True) -> contract.MemberAnswer:
        """Stay in the group; return the assignment. Raises IllegalGeneration for a client that is no member (any more),
        Fenced for an older client of the same member id."""
        group = stream_group(self._groups, name)
        call = Coordinate(name, group.group_id, "heartbeat", member_id, generation=generation)
        return self._coordinated(group, call, COORDINATE, forward)

    def leave(self, name: str, member_id: str, *, forward: bool = True) -> None:
        """Leave at once. Succeeds for a client that is no member."""
        group = stream_group(self._groups, name)
        self._coordinated(group, Coordinate(name, group.group_id, "leave", member_id), COORDINATE, forward)

    # --- finding the coordinator -------------------------------------------------------------------------------------

    def _coordinated(
        self,
        group: GroupState,
        call: Coordinate,
        kind: BrokerCall[Coordinate, T],
        forward: bool,
        peer: Peer | None = None,
    ) -> T:
        """Return the answer of the group's coordinator; look for it again while it changes. A coordinator that does not
        answer is asked once, and may have done what it was asked; then there is time for its successor."""
        check_mode(group)
        deadline = time.monotonic() + PATIENCE_S
        silent: set[tuple[int, int]] = set()
        is_unknown = was_silent = False
        try:
            while True:
                _check_connected(peer)
                try:
                    return self._try(group, call, kind, forward, silent)
                except (NotLeader, Unavailable) as error:
                    self._in_doubt.add(group.group_id)
                    if not forward and isinstance(error, NotLeader):
                        raise
                    if silent and not was_silent:
                        was_silent, deadline = True, time.monotonic() + PATIENCE_S
                    is_unknown = is_unknown or error.outcome == "unknown"
                    if time.monotonic() >= deadline or self._closing.is_set() or not error.retryable:
                        if isinstance(error, NotLeader):
                            error = Unavailable(error.detail, retry_after_s=0.2)
                        raise error
                gevent.sleep(PAUSE_S)
                self._groups.check_same(group)
        except PortalMQError as error:
            # Whatever a later turn is refused with, an earlier one may have been carried out.
            if is_unknown:
                error.outcome = "unknown"
            raise

    def _try(
        self,
        group: GroupState,
        call: Coordinate,
        kind: BrokerCall[Coordinate, T],
        forward: bool,
        silent: set[tuple[int, int]],
    ) -> T:
        own = self._own.get(group.group_id)
        if own is None:
            where = self._whereabouts(group)
            if where is not None and where != self._me and where not in silent and self._is_alive(where):
                self._remember(group, where)
                if not forward:
                    raise self._not_coordinator(group, where)
                timeout_s = HEARTBEAT_TIMEOUT_S if call.verb == "heartbeat" else None
                try:
                    return kind.ask(self._peers, where[0], call, timeout_s=timeout_s)
                except (NotReached, NotAnswered) as error:
                    # It may be alive: a take-over from a live coordinator is harmless.
                    log.warning("group %r: its coordinator will be replaced: %s", group.name, error)
                    silent.add(where)
                    raise
            own = self._take(group, where)
        return self._ask(own, call, kind)

    def _whereabouts(self, group: GroupState) -> tuple[int, int] | None:
        """Return the group's coordinator (broker id, incarnation): the cached one unless it is in doubt."""
        where = self._elsewhere.get(group.group_id)
        if where is not None and self._is_alive(where) and group.group_id not in self._in_doubt:
            return where
        try:
            where = self._look_up(group)
        except PlaneUnavailable:
            if where is None:
                raise
            return where  # an outage of the control plane changes no coordinator
        self._in_doubt.discard(group.group_id)
        return where

    def _is_alive(self, where: tuple[int, int]) -> bool:
        broker = self._mirror.brokers.get(where[0])
        return broker is not None and broker.incarnation == where[1] and not broker.draining

    def _remember(self, group: GroupState, where: tuple[int, int]) -> None:
        if len(self._elsewhere) >= KEPT_MAX:
            self._elsewhere.clear()
            self._in_doubt.clear()
        self._elsewhere[group.group_id] = where

    def _look_up(self, group: GroupState, *, sure: bool = False) -> tuple[int, int] | None:
        held = self._store.roster(group.group_id, sure=sure)
        return held.value.coordinator if held else None

    def _not_coordinator(self, group: GroupState, where: tuple[int, int]) -> NotLeader:
        return NotLeader(
            f"broker {where[0]} coordinates group {group.name!r}",
            leader=where[0],
            leader_url=self._mirror.url_of(where[0]),
        )

    def _take(self, group: GroupState, before: tuple[int, int] | None) -> Coordinator:
        """Become the group's coordinator after `before`. Raises NotLeader if another broker was faster: a call to a
        silent coordinator takes seconds."""
        if self._closing.is_set():
            raise Unavailable("this broker is shutting down", retry_after_s=0.5)
        self._groups.check_same(group)
        if group.group_id in self._taking:
            raise Unavailable(f"this broker is becoming the coordinator of group {group.name!r}", retry_after_s=PAUSE_S)
        self._taking.add(group.group_id)
        try:
            held: Versioned[RosterState] | None = self._store.roster(group.group_id, sure=True)
        finally:
            self._taking.discard(group.group_id)
        own = self._own.get(group.group_id)
        if own is None:
            now = held.value.coordinator if held else None
            if now is not None and now not in (before, self._me) and self._is_alive(now):
                raise self._not_coordinator(group, now)
            own = self._own[group.group_id] = Coordinator(
                group, self._me, self._store, self._claims, self._mirror.topics, self._clock, self._on_resigned
            )
            log.info("this broker coordinates group %r now", group.name)
            own.begin(held)
        return own

    def _ask(self, own: Coordinator, call: Coordinate, kind: BrokerCall[Coordinate, T]) -> T:
        answer = self._seek(own, call) if call.verb == "seek" else self._member_answer(own, call)
        assert isinstance(answer, kind.answer)
        return answer

    def _member_answer(self, own: Coordinator, call: Coordinate) -> contract.MemberAnswer:
        token: AsyncResult = AsyncResult()
        match call.verb:
            case "join":
                for topic in call.topics:
                    self._groups.topics.known(topic)
                event: core.Join | core.Heartbeat | core.Leave = core.Join(
                    token, call.member_id, call.topics, call.session_timeout_ms
                )
            case "heartbeat":
                event = core.Heartbeat(token, call.member_id, call.generation)
            case "leave":
                # Its topics may leave the roster with it: only the checkpoint names them then.
                self._checkpoints.save(own)
                event = core.Leave(token, call.member_id)
            case _:
                raise InvalidRequest(
                    f"unknown request {call.verb[:40]!r} to a coordinator: is a broker of another version?"
                )
        answer = own.ask(event, call.topics)
        return contract.MemberAnswer(
            answer.member_id,
            answer.generation,
            [
                contract.AssignedPartition(*assigned.partition, assigned.offset, assigned.since)
                for assigned in answer.assignment
            ],
            answer.heartbeat_interval_ms,
        )

    def answer(self, call: Coordinate, peer: Peer | None = None) -> Any:
        """Serve or refuse a request that another broker sends to this one as the coordinator."""
        if call.verb == "join":
            _check_connected(peer)
        group = self._groups.get_same(call.group, call.group_id)
        own = self._own.get(group.group_id)
        if own is None:
            where = self._look_up(group, sure=True)
            if where != self._me:
                raise Unavailable(f"broker {self._me[0]} does not coordinate group {group.name!r}", retry_after_s=0.1)
            own = self._take(group, where)
        return self._seek(own, call) if call.verb == "seek" else self._member_answer(own, call)

    def _claims(
        self, group: GroupState, claims: Sequence[core.ClaimPartition]
    ) -> Mapping[core.Partition, int | PortalMQError]:
        outcomes: dict[core.Partition, int | PortalMQError] = {}
        shares: list[ClaimShare] = []
        for claim in claims:
            topic = self._mirror.topics.get(claim.partition[0])
            if topic is None:
                outcomes[claim.partition] = Unavailable(f"no topic {claim.partition[0]!r} is known here")
            else:
                shares.append(ClaimShare(topic.name, topic.topic_id, claim.partition[1], claim.member_id, claim.since))
        for place, outcome in self._partitions.claim(group, shares).items():
            outcomes[place.topic, place.number] = outcome
        return outcomes

    # --- seeking -----------------------------------------------------------------------------------------------------

    def seek(
        self,
        name: str,
        topic: str,
        to: Start,
        *,
        partition: int | None,
        dry_run: bool,
        idempotency_key: str | None = None,
        forward: bool = True,
    ) -> contract.SeekAnswer:
        """Move the group to other offsets in a topic. With `dry_run` only return them. Calls with the same
        `idempotency_key` move each partition once. Raises OffsetOutOfRange."""
        group = stream_group(self._groups, name)
        known = self._groups.topics.known(wire.check_name(topic, "topic"))
        numbers = (partition,) if partition is not None else tuple(range(known.state.partitions))
        places = [known.place(number) for number in numbers]
        if isinstance(to, dict) and "offset" in to and len(places) > 1:
            raise InvalidRequest(
                f"topic {topic!r} has {len(places)} partitions: name the one of the offset in `partition`"
            )
        seek_id = b"" if idempotency_key is None or dry_run else _seek_id(idempotency_key, to)
        # A dry run first: a partition that refuses leaves the others unchanged.
        looked = self._outcomes(group, to, 0, places, seek_id)
        if dry_run:
            return contract.SeekAnswer(topic, _sought(looked), dry_run=True)
        if all(offset == SOUGHT for _, offset in looked.values()):
            # A repeat fences no member.
            roster = self._store.roster(group.group_id, sure=True)
            generation = roster.value.generation if roster is not None else 0
            return contract.SeekAnswer(topic, _sought(looked), dry_run=False, generation=generation)
        call = Coordinate(name, group.group_id, "seek", topics=(topic,), to=to, numbers=numbers, seek_id=seek_id)
        return self._coordinated(group, call, COORDINATE_SEEK, forward)

    def _seek(self, own: Coordinator, call: Coordinate) -> contract.SeekAnswer:
        (topic,) = call.topics
        known = self._groups.topics.known(topic)
        places = [known.place(number) for number in call.numbers]
        generation = own.ask(core.SeekRequested(AsyncResult(), topic)).generation
        try:
            sought = _sought(self._outcomes(own.group, call.to, generation, places, call.seek_id))
        except IllegalGeneration as behind:
            # Another coordinator was faster: the client has named no generation.
            raise Unavailable(
                f"the coordinator of group {call.group!r} is behind: repeat", outcome=behind.outcome, retry_after_s=0.2
            ) from behind
        finally:
            own.tell(core.SeekDone(topic))
        # The members continue in the generation after the seek's own.
        return contract.SeekAnswer(topic, sought, dry_run=False, generation=generation + 1)

    def _outcomes(
        self, group: GroupState, to: Start, generation: int, places: Sequence[TopicPartition], seek_id: bytes
    ) -> dict[TopicPartition, tuple[int, int]]:
        outcomes = self._partitions.seek(group, to, generation, places, seek_id)
        error = first_error(outcomes.values())
        if error is not None:
            if generation and any(not isinstance(outcome, PortalMQError) for outcome in outcomes.values()):
                error.outcome = "unknown"  # some partitions have moved
            raise error
        return {place: outcome for place, outcome in outcomes.items() if not isinstance(outcome, PortalMQError)}

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        while not self._closing.wait(CHECKPOINT_EVERY_S):
            for coordinator in tuple(self._own.values()):
                self._checkpoints.save(coordinator)


def _check_connected(peer: Peer | None) -> None:
    """Raise Unavailable when the client has disconnected: it may have joined at another broker."""
    if peer is not None and peer.gone():
        raise Unavailable("the client has disconnected")


def _seek_id(idempotency_key: str, to: Start) -> bytes:
    """Return the id of a seek: a hash of its key and its target."""
    return blake2b(_encode((idempotency_key, to)), digest_size=16, person=b"seek").digest()


def _sought(outcomes: Mapping[TopicPartition, tuple[int, int]]) -> list[contract.SeekResult]:
    """Return one result for each partition, in order. A partition that has this seek already keeps its offset."""
    return [
        contract.SeekResult(place.number, before, before if offset == SOUGHT else offset)
        for place, (before, offset) in sorted(outcomes.items())
    ]
