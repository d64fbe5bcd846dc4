"""The members of a stream group and their partitions: the decisions of the group's coordinator.

The coordinator is a broker. Its decisions are stored in the control plane, one state a group, changed by
compare-and-set only. Every change raises the *generation*. So a replaced coordinator can write no more, and each
generation has one state. The coordinator then applies that state at the leaders: a partition is claimed there for its
member, durably, before the member learns of it.

    events                                     actions
    Loaded, Answered      the control plane    Propose, ReadState
    Join, Heartbeat, Leave     members         AnswerMember, RefuseMember
    Claimed, ClaimRefused, ClaimFailed         ClaimPartition        at the leaders
    SeekRequested, SeekDone    an operator     AnswerMember, RefuseMember
    TopicsChanged, SessionLost, Tick           Resigned              another broker coordinates now

The ownership of a partition moves like this (after KIP-429 and KIP-848):

    (owner A) --A has more than its share--> (owner B, leaving A) --A heartbeats at that generation--> (owner B)
                                                                  --A leaves or times out-----------^

A member that heartbeats at a generation has released everything that the generation's assignment does not name. Only
then is the partition claimed for the next member; no other member pauses. A member whose partitions did not change may
continue in the generation that it knows: a leader compares it with that of the claim.

A join always raises the generation, and is recorded as the member's `since`. So of two clients with one member id the
older is fenced: it knows no generation as high. A member id that returns within its session timeout keeps its
partitions (static membership, KIP-345): they are claimed again, in the new generation, and nothing else changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from portalmq.broker.core.stream import events
from portalmq.broker.core.stream.events import GroupMembers, Member, Partition, PartitionOwner, SubscribedTopic
from portalmq.broker.core.stream.rebalance import Draft
from portalmq.errors import Backpressure, Fenced, IllegalGeneration, PortalMQError, Unavailable

MEMBERS_MAX = 1_000
TICK_MS = 250
# A join is answered when its partitions are claimed, or after this time with those that are. It waits a quarter of the
# member's session at most, so that the member does not give up.
JOIN_WAIT_MS = 3_000
HEARTBEATS_PER_SESSION = 5
# The heartbeat interval while partitions move to or from a member.
HEARTBEAT_SOON_MS = 200
CLAIM_AGAIN_MS = 500


class _WaitingCall(msgspec.Struct):
    """A call that waits for claims: a join, or a heartbeat of a member whose partitions this broker inherited and has
    not claimed yet. An answer that does not name them would make the member release them."""

    token: object
    member_id: str
    until_ms: int
    is_join: bool


class GroupMembership:
    """One group, as coordinated by the broker `me` (id, incarnation). It begins with Loaded and TopicsChanged.

    Invariants: at most one Propose is unanswered; answers come only from a state that the control plane is known to
    hold, with this broker as its coordinator; a partition is named to a member only when it is claimed for it.
    """

    def __init__(self, group: str, me: tuple[int, int]) -> None:
        self.group = group
        self.me = me
        self.known: GroupMembers | None = None
        self.version = -1
        self.resigned = False
        self._loaded = False
        self._topics: Mapping[str, SubscribedTopic] | None = None
        self._proposed: GroupMembers | None = None
        self._reading = False
        self._intents: list[events.Intent] = []
        # How many of them, from the first on, are in the proposal.
        self._included = 0
        self._waiting: list[_WaitingCall] = []
        self._unverified: list[events.Heartbeat] = []
        self._deadlines: dict[str, int] = {}
        self._heard: dict[str, int] = {}
        self._claimed: dict[Partition, tuple[str, int, int]] = {}
        self._claiming: dict[Partition, tuple[str, int]] = {}
        self._claim_again_ms: dict[Partition, int] = {}
        self._seeking: dict[str, int] = {}
        # The generation that a partition's leader has seen, if higher than ours.
        self._refused: dict[Partition, int] = {}
        self._ticked_ms: int | None = None
        # True if the next state may differ: computing it reads everything.
        self._is_dirty = False
        # Derived from `known`: the partitions of each member, the members that give some up, the partitions that are
        # not claimed yet, and how many of those each member waits for.
        self._partitions_of: dict[str, list[tuple[Partition, PartitionOwner]]] = {}
        self._leaving: set[str] = set()
        self._unclaimed: dict[Partition, PartitionOwner] = {}
        # The unclaimed partitions that an earlier coordinator had assigned.
        self._inherited: dict[Partition, PartitionOwner] = {}
        self._waited_for: Counter[str] = Counter()
        # True if something may be claimed now.
        self._claims_due = False
        self._actions: list[events.Action] = []

    @property
    def coordinates(self) -> bool:
        """True if this broker is known to be the coordinator."""
        return not self.resigned and self.known is not None and self.known.coordinator == self.me

    @property
    def is_idle(self) -> bool:
        """True if the group has no members and no waiting calls."""
        waits = self._intents or self._waiting or self._unverified or self._seeking or self._proposed is not None
        return self.coordinates and self.known is not None and not self.known.members and not waits

    def step(self, event: events.Event, now_ms: int) -> list[events.Action]:
        """Take one event and return the actions to perform."""
        if not self.resigned:
            self._take(event, now_ms)
        elif isinstance(event, events.Join | events.Heartbeat | events.Leave | events.SeekRequested):
            self._actions.append(events.RefuseMember(event.token, _coordinator_changed(self.group)))
        if not self.resigned:
            self._propose(now_ms)
            self._claim(now_ms)
            self._answer_waiting(now_ms)
        actions, self._actions = self._actions, []
        return actions

    def _take(self, event: events.Event, now_ms: int) -> None:
        match event:
            case events.Loaded():
                self._on_loaded(event, now_ms)
            case events.Answered():
                self._on_answered(event, now_ms)
            case events.Join():
                self._on_join(event)
            case events.Heartbeat():
                self._on_heartbeat(event, now_ms)
            case events.Leave():
                self._on_leave(event)
            case events.SeekRequested():
                self._intents.append(event)
            case events.TopicsChanged():
                self._topics = dict(event.topics)
                self._is_dirty = True
            case events.Claimed():
                self._on_claimed(event)
            case events.ClaimRefused() | events.ClaimFailed():
                self._on_claim_failed(event, now_ms)
            case events.SeekDone():
                self._seeking[event.topic] = self._seeking.get(event.topic, 1) - 1
                if self._seeking[event.topic] <= 0:
                    del self._seeking[event.topic]
                    self._claims_due = True
            case events.SessionLost():
                self._reread()
            case events.Tick():
                self._on_tick(now_ms)

    # --- the state in the control plane ------------------------------------------------------------------------------

    def _on_loaded(self, event: events.Loaded, now_ms: int) -> None:
        self._reading = False
        proposed, self._proposed = self._proposed, None
        found = event.membership
        if not self._loaded:
            self._loaded = True
            self._adopt(found, event.version)
        elif event.version == self.version:
            self._included = 0  # not applied, or not yet: propose again
            self._is_dirty = True
        elif found is None or found.coordinator != self.me:
            self._resign(found.coordinator if found else None)
            return
        elif found == proposed:
            self._confirm(found, event.version, now_ms)
        else:
            # An older proposal of ours was applied late. Propose the rest on top of it.
            self._included = 0
            self._adopt(found, event.version)
            self._begin_sessions(now_ms)
        self._retry_unverified(now_ms)

    def _on_answered(self, event: events.Answered, now_ms: int) -> None:
        if self._proposed is None or self._reading:
            return
        if event.outcome == events.Outcome.APPLIED:
            proposed, self._proposed = self._proposed, None
            self._confirm(proposed, event.version, now_ms)
            self._retry_unverified(now_ms)
        else:
            self._read()

    def _reread(self) -> None:
        """Read the state again, in case another broker wrote it. The answer to a proposal shows that too."""
        if self._loaded and self._proposed is None:
            self._read()

    def _read(self) -> None:
        if not self._reading:
            self._reading = True
            self._actions.append(events.ReadState())

    def _retry_unverified(self, now_ms: int) -> None:
        """Take the heartbeats that waited for a verified state."""
        if self.coordinates:
            unverified, self._unverified = self._unverified, []
            for heartbeat in unverified:
                self._on_heartbeat(heartbeat, now_ms, is_sure=True)

    def _resign(self, coordinator: tuple[int, int] | None) -> None:
        self.resigned = True
        moved = _coordinator_changed(self.group)
        waiting = [*self._intents, *self._waiting, *self._unverified]
        self._actions += [events.RefuseMember(waiter.token, moved) for waiter in waiting]
        self._actions.append(events.Resigned(coordinator))
        self._intents, self._waiting, self._unverified = [], [], []

    def _confirm(self, membership: GroupMembers, version: int, now_ms: int) -> None:
        """Take that the control plane holds `membership` as proposed."""
        before = self.known
        began = before is None or before.coordinator != self.me
        self._adopt(membership, version)
        if began and before is not None:
            self._inherited = {
                partition: ownership
                for partition, ownership in self._unclaimed.items()
                if before.owners.get(partition) == ownership
            }
        if began:
            self._begin_sessions(now_ms)
        included, self._intents = self._intents[: self._included], self._intents[self._included :]
        self._included = 0
        for intent in included:
            match intent:
                case events.Join():
                    if intent.member_id in membership.members:
                        self._deadlines[intent.member_id] = now_ms + intent.session_timeout_ms
                        self._heard[intent.member_id] = membership.generation
                    until_ms = now_ms + _wait_max_ms(intent.session_timeout_ms)
                    self._waiting.append(_WaitingCall(intent.token, intent.member_id, until_ms, is_join=True))
                case events.Leave():
                    self._actions.append(events.AnswerMember(intent.token, intent.member_id, membership.generation))
                case events.SeekRequested():
                    self._seeking[intent.topic] = self._seeking.get(intent.topic, 0) + 1
                    # Claims after the seek have a generation of their own: a copy of the seek that arrives after them
                    # is refused.
                    self._actions.append(events.AnswerMember(intent.token, "", membership.generation - 1))
        for known in (self._deadlines, self._heard):
            for member_id in [member_id for member_id in known if member_id not in membership.members]:
                del known[member_id]
        for claims in (self._claimed, self._claiming, self._claim_again_ms):
            for partition in [partition for partition in claims if partition not in membership.owners]:
                del claims[partition]
        self._refused = {
            partition: generation
            for partition, generation in self._refused.items()
            if partition in membership.owners and membership.owners[partition].since <= generation
        }

    def _adopt(self, membership: GroupMembers | None, version: int) -> None:
        """Set the state known to be in the control plane, and what is derived from it."""
        self.known, self.version, self._is_dirty = membership, version, True
        self._partitions_of, self._leaving, self._unclaimed, self._claims_due = {}, set(), {}, True
        for partition, ownership in membership.owners.items() if membership else ():
            self._partitions_of.setdefault(ownership.owner, []).append((partition, ownership))
            if ownership.leaving:
                self._leaving.add(ownership.leaving)
                self._partitions_of.setdefault(ownership.leaving, []).append((partition, ownership))
            elif self._claimed.get(partition, ("", 0, 0))[:2] != (ownership.owner, ownership.since):
                self._unclaimed[partition] = ownership
        self._waited_for = Counter(ownership.owner for ownership in self._unclaimed.values())
        self._inherited = {
            partition: ownership
            for partition, ownership in self._inherited.items()
            if self._unclaimed.get(partition) == ownership
        }

    def _begin_sessions(self, now_ms: int) -> None:
        """Begin the sessions of all members: a new coordinator does not know when they came last, so each gets a whole
        one."""
        assert self.known is not None
        for member in self.known.members.values():
            self._deadlines.setdefault(member.member_id, now_ms + member.session_timeout_ms)

    # --- members -----------------------------------------------------------------------------------------------------

    def _on_join(self, join: events.Join) -> None:
        coming = {intent.member_id for intent in self._intents if isinstance(intent, events.Join)}
        there = self.known.members.keys() if self.known else ()
        if join.member_id not in there and len(coming | set(there) | {join.member_id}) > MEMBERS_MAX:
            full = f"group {self.group!r} has {MEMBERS_MAX} members, the most a group can have: let one leave first"
            self._actions.append(events.RefuseMember(join.token, Backpressure(full, retry_after_s=5)))
            return
        self._intents.append(join)

    def _on_leave(self, leave: events.Leave) -> None:
        joins = any(isinstance(intent, events.Join) and intent.member_id == leave.member_id for intent in self._intents)
        if self.coordinates and not joins and self.known is not None and leave.member_id not in self.known.members:
            self._actions.append(events.AnswerMember(leave.token, leave.member_id, self.known.generation))
        else:
            self._intents.append(leave)

    def _on_heartbeat(self, heartbeat: events.Heartbeat, now_ms: int, *, is_sure: bool = False) -> None:
        if not self.coordinates:
            self._unverified.append(heartbeat)
            return
        assert self.known is not None
        member = self.known.members.get(heartbeat.member_id)
        if heartbeat.generation > self.known.generation and not is_sure:
            # Another broker may be the coordinator by now, and have answered it.
            self._unverified.append(heartbeat)
            if self._proposed is None:
                self._read()
        elif member is None or heartbeat.generation > self.known.generation or heartbeat.generation < 0:
            error: PortalMQError = IllegalGeneration(
                f"group {self.group!r} is in generation {self.known.generation} and does not know member "
                f"{heartbeat.member_id!r} of generation {heartbeat.generation}: its session timed out, or it left. Join"
            )
            self._actions.append(events.RefuseMember(heartbeat.token, error))
        elif heartbeat.generation < member.since:
            error = Fenced(
                f"another consumer joined group {self.group!r} as {heartbeat.member_id!r}, in generation {member.since}"
                f"; this one knows {heartbeat.generation}. Give each consumer a member id of its own"
            )
            self._actions.append(events.RefuseMember(heartbeat.token, error))
        else:
            self._deadlines[member.member_id] = now_ms + member.session_timeout_ms
            if heartbeat.generation > self._heard.get(member.member_id, 0):
                self._heard[member.member_id] = heartbeat.generation
                self._is_dirty = self._is_dirty or member.member_id in self._leaving
            until_ms = now_ms + _wait_max_ms(member.session_timeout_ms)
            self._waiting.append(_WaitingCall(heartbeat.token, member.member_id, until_ms, is_join=False))

    def _assignment(self, token: object, member: Member) -> events.AnswerMember:
        assert self.known is not None
        held: list[events.Assigned] = []
        is_moving = False
        for partition, ownership in self._partitions_of.get(member.member_id, ()):
            if ownership.leaving or partition in self._unclaimed:
                is_moving = True
            else:
                held.append(events.Assigned(partition, ownership.since, self._claimed[partition][2]))
        interval_ms = min(events.HEARTBEAT_MS_MAX, member.session_timeout_ms // HEARTBEATS_PER_SESSION)
        if is_moving:
            interval_ms = min(interval_ms, HEARTBEAT_SOON_MS)
        held.sort(key=lambda assigned: assigned.partition)
        return events.AnswerMember(token, member.member_id, self.known.generation, tuple(held), interval_ms)

    def _answer_waiting(self, now_ms: int) -> None:
        if not self._waiting or not self.coordinates:
            return
        assert self.known is not None
        still: list[_WaitingCall] = []
        for waiting in self._waiting:
            member = self.known.members.get(waiting.member_id)
            if member is None:
                gone = f"member {waiting.member_id!r} left group {self.group!r} while its call waited"
                self._actions.append(events.RefuseMember(waiting.token, IllegalGeneration(gone)))
            elif now_ms >= waiting.until_ms or not self._waits(waiting):
                self._actions.append(self._assignment(waiting.token, member))
            else:
                still.append(waiting)
        self._waiting = still

    def _waits(self, waiting: _WaitingCall) -> bool:
        if waiting.is_join:
            return self._waited_for[waiting.member_id] > 0
        if not self._inherited:
            return False
        return any(partition in self._inherited for partition, _ in self._partitions_of.get(waiting.member_id, ()))

    def _on_tick(self, now_ms: int) -> None:
        """Take a tick. After a pause of this process, extend the sessions by it, as no heartbeat could arrive, and
        verify that this broker still coordinates."""
        if self._ticked_ms is not None:
            paused_ms = now_ms - self._ticked_ms - 4 * TICK_MS
            if paused_ms > 0:
                for member_id in self._deadlines:
                    self._deadlines[member_id] += paused_ms
                self._reread()
        self._ticked_ms = now_ms
        self._claims_due = self._claims_due or bool(self._unclaimed)
        self._is_dirty = self._is_dirty or any(deadline <= now_ms for deadline in self._deadlines.values())

    # --- proposals ---------------------------------------------------------------------------------------------------

    def _propose(self, now_ms: int) -> None:
        if not self._loaded or self._proposed is not None or self._reading or self._topics is None:
            return
        if not (self._is_dirty or self._intents or self._refused):
            return
        wanted = self._wanted(now_ms)
        self._is_dirty = False
        if wanted is not None:
            self._included = len(self._intents)
            self._proposed = wanted
            self._actions.append(events.Propose(wanted, self.version))

    def _wanted(self, now_ms: int) -> GroupMembers | None:
        """Return the state to propose, in the next generation; None if nothing changes."""
        known = self.known or GroupMembers(0, (-1, -1))
        steps = 2 if any(isinstance(intent, events.SeekRequested) for intent in self._intents) else 1
        draft = Draft(known, max(known.generation, *self._refused.values(), 0) + steps, self._topics or {})
        if self.coordinates:
            draft.drop([member_id for member_id in known.members if self._deadlines[member_id] <= now_ms])
        for intent in self._intents:
            match intent:
                case events.Join():
                    draft.join(Member(intent.member_id, intent.topics, intent.session_timeout_ms, draft.generation))
                case events.Leave():
                    draft.drop([intent.member_id])
                case events.SeekRequested():
                    draft.renew(partition for partition in known.owners if partition[0] == intent.topic)
        draft.renew(self._refused)
        draft.release(self._heard)
        draft.assign()
        if not self._intents and self.coordinates and draft.changed_nothing():
            return None
        return draft.membership(self.me)

    # --- claims ------------------------------------------------------------------------------------------------------

    def _claim(self, now_ms: int) -> None:
        if not self.coordinates or not self._claims_due:
            return
        self._claims_due = False
        for partition, ownership in self._unclaimed.items():
            wanted = (ownership.owner, ownership.since)
            if partition[0] in self._seeking or partition in self._refused or self._claiming.get(partition) == wanted:
                continue
            if now_ms >= self._claim_again_ms.get(partition, 0):
                self._claiming[partition] = wanted
                self._actions.append(events.ClaimPartition(partition, ownership.owner, ownership.since))

    def _on_claim_failed(self, event: events.ClaimRefused | events.ClaimFailed, now_ms: int) -> None:
        wanted = self._claiming.get(event.partition)
        if wanted is None or wanted[1] != event.since:
            return
        del self._claiming[event.partition]
        if isinstance(event, events.ClaimRefused):
            self._refused[event.partition] = max(event.generation, event.since)
        else:
            self._claim_again_ms[event.partition] = now_ms + CLAIM_AGAIN_MS

    def _on_claimed(self, event: events.Claimed) -> None:
        if self._claiming.get(event.partition) == (event.member_id, event.since):
            del self._claiming[event.partition]
        ownership = self._unclaimed.get(event.partition)
        if ownership is not None and (ownership.owner, ownership.since) == (event.member_id, event.since):
            del self._unclaimed[event.partition]
            self._inherited.pop(event.partition, None)
            self._waited_for[event.member_id] -= 1
            self._claimed[event.partition] = (event.member_id, event.since, event.offset)
            self._claim_again_ms.pop(event.partition, None)


def _wait_max_ms(session_timeout_ms: int) -> int:
    return min(JOIN_WAIT_MS, session_timeout_ms // 4)


def _coordinator_changed(group: str) -> PortalMQError:
    return Unavailable(f"the coordinator of group {group!r} is changing", outcome="unknown", retry_after_s=0.2)
