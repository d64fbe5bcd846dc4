"""The coordinator of a stream group: it runs the actions of the group's membership (core/stream/membership.py).

    request --> ask --> step --> Propose, Read   the control plane, a greenlet each
                         ^  |--> Claim           the partitions' leaders, one greenlet for all claims of a step
                         |  `--> Answer, Refuse  the caller
                         `---- results, as events

Everything runs on the event loop's thread. A step never blocks; greenlets run its actions. The results of many claims
are separate events, with pauses for other greenlets in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import gevent
from gevent.event import AsyncResult

from portalmq.broker.core.stream.events import (
    Action,
    Answered,
    AnswerMember,
    Claimed,
    ClaimFailed,
    ClaimPartition,
    ClaimRefused,
    Event,
    GroupMembers,
    Heartbeat,
    Join,
    Leave,
    Loaded,
    Member,
    Outcome,
    Partition,
    PartitionOwner,
    Propose,
    ReadState,
    RefuseMember,
    Resigned,
    SeekRequested,
    SubscribedTopic,
    TopicsChanged,
)
from portalmq.broker.core.stream.membership import GroupMembership
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.control_plane.plane import Conflict, NodeMissing, OutcomeUnknown, PlaneError
from portalmq.control_plane.state import GroupState, TopicState
from portalmq.control_plane.stream_groups import MemberState, RosterState, StreamGroups
from portalmq.control_plane.tree import Versioned
from portalmq.errors import IllegalGeneration, PortalMQError, Unavailable

log = logging.getLogger(__name__)

# The longest that a join takes: its claims, and a compare-and-set before and after.
ANSWER_WITHIN_S = 10.0
READ_AGAIN_S = 0.2
# The longest wait for the fencing of members that are gone.
FENCE_WITHIN_S = 0.5

Request = Join | Heartbeat | Leave | SeekRequested


class Claims(Protocol):
    """Brings claims to the leaders; returns the offset of each partition, or the error of its claim."""

    def __call__(
        self, group: GroupState, claims: Sequence[ClaimPartition]
    ) -> Mapping[Partition, int | PortalMQError]: ...


@dataclass(eq=False, repr=False)
class Coordinator:
    """One group that this broker coordinates, or is about to. `on_resigned` is called when it stops."""

    group: GroupState
    _me: tuple[int, int]
    _store: StreamGroups
    _claims: Claims
    _topics: Mapping[str, TopicState]
    _clock: Clock
    _on_resigned: Callable[[Coordinator], None]

    def __post_init__(self) -> None:
        self.membership = GroupMembership(self.group.name, self._me)
        # The topics that members read, or are about to; and their last state that the membership received.
        self._wanted: set[str] = set()
        self._subscribed: Mapping[str, SubscribedTopic] | None = None
        self._closed = False
        self._waiting: set[AsyncResult] = set()

    def begin(self, held: Versioned[RosterState] | None) -> None:
        """Start with the roster that the control plane holds."""
        membership = membership_of(held.value) if held else None
        self.tell(Loaded(membership, held.version if held else -1))
        self.topics_changed()

    def ask(self, event: Request, topics: Sequence[str] = ()) -> AnswerMember:
        """Return the membership's answer. Raises its refusal."""
        result = event.token
        assert isinstance(result, AsyncResult)
        if topics and not self._wanted.issuperset(topics):
            self._wanted.update(topics)
            self.topics_changed()
        answer: AnswerMember | PortalMQError | None = None
        self._waiting.add(result)
        try:
            self.tell(event)
            with gevent.Timeout(ANSWER_WITHIN_S, False):
                answer = _moved(self.group.name) if self._closed and not result.ready() else result.get()
        finally:
            self._waiting.discard(result)
        if answer is None:
            raise Unavailable(
                f"the membership of group {self.group.name!r} was not decided in time: repeat",
                outcome="unknown",
                retry_after_s=0.5,
            )
        if isinstance(answer, PortalMQError):
            raise answer
        assert isinstance(answer, AnswerMember)
        return answer

    def topics_changed(self) -> None:
        """Pass created, deleted and grown topics to the membership."""
        known = self.membership.known
        if known is not None:
            self._wanted.update(*(member.topics for member in known.members.values()))
        found = {
            name: SubscribedTopic(topic.topic_id, topic.partitions)
            for name in sorted(self._wanted)
            if (topic := self._topics.get(name)) is not None
        }
        if found != self._subscribed:
            self._subscribed = found
            self.tell(TopicsChanged(found))

    def tell(self, event: Event) -> None:
        if not self._closed:
            self._perform(self.membership.step(event, self._clock.now_ms()))

    def close(self) -> None:
        """Stop, and refuse waiting requests. The next coordinator starts from the control plane."""
        self._closed = True
        for result in tuple(self._waiting):
            result.set(_moved(self.group.name))

    # --- actions of the membership -----------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[Action]) -> None:
        claims: list[ClaimPartition] = []
        for action in actions:
            match action:
                case Propose():
                    gevent.spawn(self._propose, action)
                case ReadState():
                    gevent.spawn(self._read)
                case ClaimPartition():
                    claims.append(action)
                case AnswerMember():
                    action.token.set(action)  # type: ignore[attr-defined]
                case RefuseMember():
                    action.token.set(action.error)  # type: ignore[attr-defined]
                case Resigned():
                    self._closed = True
                    self._on_resigned(self)
        if claims:
            gevent.spawn(self._claim, claims)

    def _propose(self, action: Propose) -> None:
        known = self.membership.known
        roster = roster_of(action.membership)
        try:
            version = self._store.set_roster(self.group.name, self.group.group_id, roster, action.version)
        except NodeMissing:
            self.close()  # the group was deleted
            self._on_resigned(self)
            return
        except Conflict:
            answered = Answered(Outcome.CONFLICT)
        except OutcomeUnknown:
            answered = Answered(Outcome.UNKNOWN)
        except PlaneError as error:
            log.info("group %r: its membership will be written later: %s", self.group.name, error)
            gevent.sleep(READ_AGAIN_S)
            answered = Answered(Outcome.UNKNOWN)
        except ValueError as fault:  # too large for a node
            log.critical("group %r: its membership cannot be stored: %s", self.group.name, fault)
            self.close()
            self._on_resigned(self)
            return
        else:
            answered = Answered(Outcome.APPLIED, version)
            gone = claims_of_gone_members(known, action.membership) if known else []
            if gone:
                gevent.spawn(self._fence, gone).join(FENCE_WITHIN_S)
        self.tell(answered)

    def _read(self) -> None:
        while not self._closed:
            try:
                held = self._store.roster(self.group.group_id, sure=True)
            except PlaneError as error:
                log.info("group %r: its membership cannot be read now: %s", self.group.name, error)
                gevent.sleep(READ_AGAIN_S)
                continue
            self.tell(Loaded(membership_of(held.value) if held else None, held.version if held else -1))
            return

    def _fence(self, gone: Sequence[ClaimPartition]) -> None:
        try:
            self._claims(self.group, gone)
        except PortalMQError as error:  # the next owner's claim fences them
            log.info("group %r: members that are gone will be fenced later: %s", self.group.name, error)

    def _claim(self, claims: Sequence[ClaimPartition]) -> None:
        try:
            outcomes = self._claims(self.group, claims)
        except PortalMQError as error:
            outcomes = {claim.partition: error for claim in claims}
        for claim in in_short_turns(claims):
            outcome = outcomes[claim.partition]
            if not isinstance(outcome, PortalMQError):
                self.tell(Claimed(claim.partition, claim.member_id, claim.since, outcome))
            elif isinstance(outcome, IllegalGeneration) and isinstance(outcome.extra.get("generation"), int):
                self.tell(ClaimRefused(claim.partition, claim.since, outcome.extra["generation"]))
            else:
                log.info("group %r: %s will be claimed later: %s", self.group.name, claim.partition, outcome)
                self.tell(ClaimFailed(claim.partition, claim.since))


def _moved(group: str) -> Unavailable:
    return Unavailable(f"the coordinator of group {group!r} is changing", outcome="unknown", retry_after_s=0.2)


def claims_of_gone_members(before: GroupMembers, after: GroupMembers) -> list[ClaimPartition]:
    """Return claims without an owner for the partitions of members that are gone: they fence those members, also when
    no other member follows. Claims of `after` have a later generation, so they win in any order."""
    claims = []
    for partition, place in before.owners.items():
        holder = place.leaving or place.owner
        topic_id = before.topic_ids.get(partition[0])
        if holder not in after.members and after.topic_ids.get(partition[0], topic_id) == topic_id:
            claims.append(ClaimPartition(partition, "", place.since))
    return claims


def roster_of(membership: GroupMembers) -> RosterState:
    """Return the membership as the control plane stores it."""
    numbers = {member_id: number for number, member_id in enumerate(membership.members)}
    numbers[""] = -1
    places: dict[str, list[tuple[int, int, int, int]]] = {}
    for (topic, partition), place in membership.owners.items():
        places.setdefault(topic, []).append((partition, numbers[place.owner], place.since, numbers[place.leaving]))
    return RosterState(
        membership.generation,
        membership.coordinator,
        tuple(
            MemberState(member.member_id, member.topics, member.session_timeout_ms, member.since)
            for member in membership.members.values()
        ),
        dict(membership.topic_ids),
        {topic: tuple(held) for topic, held in places.items()},
    )


def membership_of(roster: RosterState) -> GroupMembers:
    """Return the membership of a stored roster."""
    ids = [member.id for member in roster.members]
    ids.append("")  # -1 is nobody
    return GroupMembers(
        roster.generation,
        roster.coordinator,
        {
            member.id: Member(member.id, member.topics, member.session_timeout_ms, member.since)
            for member in roster.members
        },
        {
            (topic, partition): PartitionOwner(ids[owner], since, ids[leaving])
            for topic, held in roster.places.items()
            for partition, owner, since, leaving in held
        },
        roster.topic_ids,
    )
