"""The coordinator's decisions: members, generations, and partitions that move between members."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portalmq.broker.core.stream.events import (
    Action,
    Answered,
    AnswerMember,
    Assigned,
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
    SeekDone,
    SeekRequested,
    SessionLost,
    SubscribedTopic,
    Tick,
    TopicsChanged,
)
from portalmq.broker.core.stream.membership import GroupMembership
from portalmq.broker.core.stream.rebalance import Draft
from portalmq.errors import Backpressure, Fenced, IllegalGeneration

SESSION_MS = 10_000


@dataclass
class Plane:
    """The group's node in the control plane."""

    held: GroupMembers | None = None
    version: int = -1

    def set(self, membership: GroupMembers, version: int) -> Outcome:
        if version != self.version:
            return Outcome.CONFLICT
        assert membership.generation > (self.held.generation if self.held else 0)
        self.held, self.version = membership, self.version + 1
        return Outcome.APPLIED


@dataclass
class Leaders:
    """The state folded by the partitions' leaders: (member, generation), and the committed offset."""

    claims: dict[Partition, tuple[str, int]] = field(default_factory=dict)
    committed: dict[Partition, int] = field(default_factory=dict)

    def claim(self, action: ClaimPartition) -> Event:
        member, generation = self.claims.get(action.partition, ("", 0))
        if generation > action.since or (generation == action.since and member not in ("", action.member_id)):
            return ClaimRefused(action.partition, action.since, generation)
        self.claims[action.partition] = (action.member_id, action.since)
        offset = self.committed.setdefault(action.partition, 0)
        return Claimed(action.partition, action.member_id, action.since, offset)

    def may_commit(self, partition: Partition, member: str, generation: int) -> bool:
        owner, since = self.claims.get(partition, ("", 0))
        return owner == member and generation >= since


class Coordinator:
    """A membership with a shell that performs its actions at once."""

    def __init__(self, plane: Plane, leaders: Leaders, number: int, topics: Mapping[str, int], now_ms: int = 0) -> None:
        self.plane, self.leaders = plane, leaders
        self.core = GroupMembership("g", (number, 1))
        self.answers: dict[object, AnswerMember | RefuseMember] = {}
        self.resigned = False
        self.tell(Loaded(plane.held, plane.version), now_ms)
        self.topics(topics, now_ms)

    def topics(self, topics: Mapping[str, int], now_ms: int = 0) -> None:
        self.tell(TopicsChanged({name: SubscribedTopic(f"id-{name}", count) for name, count in topics.items()}), now_ms)

    def tell(self, event: Event, now_ms: int) -> None:
        todo: list[Action] = self.core.step(event, now_ms)
        while todo:
            action = todo.pop(0)
            match action:
                case Propose():
                    outcome = self.plane.set(action.membership, action.version)
                    version = self.plane.version if outcome == Outcome.APPLIED else -1
                    todo += self.core.step(Answered(outcome, version), now_ms)
                case ReadState():
                    todo += self.core.step(Loaded(self.plane.held, self.plane.version), now_ms)
                case ClaimPartition():
                    todo += self.core.step(self.leaders.claim(action), now_ms)
                case AnswerMember() | RefuseMember():
                    assert action.token not in self.answers
                    self.answers[action.token] = action
                case Resigned():
                    self.resigned = True

    def ask(self, event: Event, now_ms: int = 0) -> AnswerMember:
        answer = self.answer(event, now_ms)
        if isinstance(answer, RefuseMember):
            raise answer.error
        return answer

    def answer(self, event: Event, now_ms: int = 0) -> AnswerMember | RefuseMember:
        self.tell(event, now_ms)
        return self.answers.pop(event.token)  # type: ignore[union-attr]

    def join(self, member: str, now_ms: int = 0, topics: tuple[str, ...] = ("t",)) -> AnswerMember:
        return self.ask(Join(object(), member, topics, SESSION_MS), now_ms)

    def beat(self, member: str, generation: int, now_ms: int = 0) -> AnswerMember:
        return self.ask(Heartbeat(object(), member, generation), now_ms)


def numbers(answer: AnswerMember) -> list[int]:
    return [assigned.partition[1] for assigned in answer.assignment]


@pytest.fixture
def group() -> Coordinator:
    return Coordinator(Plane(), Leaders(), 1, {"t": 4})


def test_the_first_member_has_all_partitions_as_soon_as_it_has_joined(group: Coordinator) -> None:
    answer = group.join("a")
    assert numbers(answer) == [0, 1, 2, 3]
    assert answer.generation == 2  # generation 1 made this broker the coordinator
    assert set(group.leaders.claims.values()) == {("a", 2)}


def test_a_new_member_gets_partitions_only_after_their_owner_released_them(group: Coordinator) -> None:
    group.join("a")
    newcomer = group.join("b")
    assert numbers(newcomer) == []
    told = group.beat("a", 2)
    assert numbers(told) == [0, 1]
    assert numbers(group.beat("b", newcomer.generation)) == []
    assert group.leaders.may_commit(("t", 3), "a", 2)
    group.beat("a", told.generation)
    assert numbers(group.beat("b", newcomer.generation)) == [2, 3]
    assert not group.leaders.may_commit(("t", 3), "a", 99)


def test_a_member_that_keeps_its_partitions_continues_in_its_generation(group: Coordinator) -> None:
    first = group.join("a")
    group.join("b")
    assert [assigned.since for assigned in group.beat("a", first.generation).assignment] == [first.generation] * 2
    assert group.leaders.may_commit(("t", 0), "a", first.generation)


def test_while_partitions_move_members_heartbeat_sooner(group: Coordinator) -> None:
    group.join("a")
    assert group.join("b").heartbeat_interval_ms == 200
    assert group.beat("a", 2).heartbeat_interval_ms == 200
    group.beat("a", 3)
    assert group.beat("a", 4).heartbeat_interval_ms == SESSION_MS // 5


def test_a_member_that_is_silent_for_its_session_loses_its_partitions_to_the_others(group: Coordinator) -> None:
    group.join("a")
    group.join("b")
    for now_ms in range(0, SESSION_MS + 1, 250):
        group.tell(Tick(), now_ms)
        answer = group.beat("b", 3, now_ms)
    assert numbers(answer) == [0, 1, 2, 3]
    with pytest.raises(IllegalGeneration, match="Join"):
        group.beat("a", 3, SESSION_MS)


def test_a_member_that_leaves_releases_its_partitions_at_once(group: Coordinator) -> None:
    group.join("a")
    group.join("b")
    group.ask(Leave(object(), "a"))
    assert numbers(group.beat("b", 3)) == [0, 1, 2, 3]


def test_leaving_without_being_a_member_changes_nothing(group: Coordinator) -> None:
    generation = group.join("a").generation
    assert group.ask(Leave(object(), "nobody")).generation == generation


def test_a_member_id_that_returns_in_time_keeps_its_partitions_and_disturbs_no_other(group: Coordinator) -> None:
    group.join("a")
    group.join("b")
    group.beat("a", 3)
    before = group.beat("b", 4)
    again = group.join("a", 5_000)
    assert numbers(again) == [0, 1]
    assert group.beat("b", before.generation, 5_000).assignment == before.assignment


def test_of_two_clients_with_one_member_id_the_older_is_fenced(group: Coordinator) -> None:
    older = group.join("a")
    newer = group.join("a")
    with pytest.raises(Fenced, match="member id of its own"):
        group.beat("a", older.generation)
    assert numbers(group.beat("a", newer.generation)) == [0, 1, 2, 3]
    assert not group.leaders.may_commit(("t", 0), "a", older.generation)
    assert group.leaders.may_commit(("t", 0), "a", newer.generation)


def test_new_partitions_of_a_topic_are_given_to_members(group: Coordinator) -> None:
    answer = group.join("a")
    group.topics({"t": 6})
    assert numbers(group.beat("a", answer.generation)) == [0, 1, 2, 3, 4, 5]


def test_a_recreated_topic_is_claimed_again(group: Coordinator) -> None:
    before = group.join("a")
    group.tell(TopicsChanged({"t": SubscribedTopic("another", 4)}), 0)
    after = group.beat("a", before.generation)
    assert {assigned.since for assigned in after.assignment} == {after.generation}
    assert after.generation > before.generation


def test_another_broker_takes_over_without_losing_members(group: Coordinator) -> None:
    before = group.join("a")
    other = Coordinator(group.plane, group.leaders, 2, {"t": 4}, 5_000)
    assert group.plane.held is not None
    assert group.plane.held.coordinator == (2, 1)
    after = other.beat("a", before.generation, 5_000 + SESSION_MS - 1)
    assert after.assignment == before.assignment
    assert after.generation == before.generation + 1


def test_a_member_keeps_its_partitions_while_a_new_coordinator_claims_them(group: Coordinator) -> None:
    before = group.join("a")
    core = GroupMembership("g", (2, 1))
    core.step(Loaded(group.plane.held, group.plane.version), 0)
    (took,) = core.step(TopicsChanged({"t": SubscribedTopic("id-t", 4)}), 0)
    assert isinstance(took, Propose)
    claims = core.step(Answered(Outcome.APPLIED, took.version + 1), 0)
    assert [type(claim) for claim in claims] == [ClaimPartition] * 4
    assert core.step(Heartbeat("beat", "a", before.generation), 0) == []
    for number in range(3):
        assert core.step(Claimed(("t", number), "a", before.generation, 0), 0) == []
    (answer,) = core.step(Claimed(("t", 3), "a", before.generation, 0), 0)
    assert isinstance(answer, AnswerMember)
    assert answer.assignment == before.assignment


def test_a_replaced_coordinator_changes_nothing_and_reports_it(group: Coordinator) -> None:
    group.join("a")
    Coordinator(group.plane, group.leaders, 2, {"t": 4})
    refused = group.answer(Join(object(), "b", ("t",), SESSION_MS))
    assert isinstance(refused, RefuseMember)
    assert refused.error.retryable
    assert group.resigned


def test_a_coordinator_that_lost_its_session_verifies_its_role(group: Coordinator) -> None:
    group.join("a")
    group.tell(SessionLost(), 0)
    assert not group.resigned
    Coordinator(group.plane, group.leaders, 2, {"t": 4})
    group.tell(SessionLost(), 0)
    assert group.resigned


def test_a_heartbeat_of_a_later_generation_makes_the_coordinator_verify_its_role(group: Coordinator) -> None:
    answer = group.join("a")
    with pytest.raises(IllegalGeneration):
        group.beat("a", answer.generation + 1)
    other = Coordinator(group.plane, group.leaders, 2, {"t": 4})
    generation = other.beat("a", answer.generation).generation
    assert isinstance(group.answer(Heartbeat(object(), "a", generation)), RefuseMember)
    assert group.resigned


def test_an_unknown_outcome_that_had_been_applied_is_recognised() -> None:
    core = GroupMembership("g", (1, 1))
    core.step(Loaded(None, -1), 0)
    (proposed,) = core.step(TopicsChanged({"t": SubscribedTopic("i", 1)}), 0)
    assert isinstance(proposed, Propose)
    assert core.step(Answered(Outcome.UNKNOWN), 0) == [ReadState()]
    assert core.step(Loaded(proposed.membership, 0), 0) == []
    assert core.coordinates


def test_an_unknown_outcome_that_is_applied_late_is_the_base_of_the_next_change() -> None:
    core = GroupMembership("g", (1, 1))
    core.step(Loaded(None, -1), 0)
    (first,) = core.step(TopicsChanged({"t": SubscribedTopic("i", 1)}), 0)
    assert isinstance(first, Propose)
    core.step(Answered(Outcome.UNKNOWN), 0)
    (again,) = core.step(Loaded(None, -1), 0)
    assert isinstance(again, Propose)
    core.step(Join("token", "a", ("t",), SESSION_MS), 0)
    assert core.step(Answered(Outcome.CONFLICT), 0) == [ReadState()]
    (third,) = core.step(Loaded(first.membership, 0), 0)
    assert isinstance(third, Propose)
    assert third.version == 0
    assert third.membership.generation == 2
    assert "a" in third.membership.members


def test_a_seek_fences_earlier_calls_and_members_continue_from_there(group: Coordinator) -> None:
    before = group.join("a")
    seek = group.ask(SeekRequested(object(), "t"))
    assert seek.generation == before.generation + 1
    assert group.beat("a", before.generation).assignment == ()
    for partition in group.leaders.claims:
        group.leaders.claims[partition] = ("a", seek.generation)
        group.leaders.committed[partition] = 7
    group.tell(SeekDone("t"), 0)
    after = group.beat("a", seek.generation)
    claimed = seek.generation + 1  # a copy of the seek that arrives after the claims is refused
    assert after.assignment == tuple(Assigned(("t", number), claimed, 7) for number in range(4))


def test_a_leader_that_has_seen_a_higher_generation_makes_the_group_pass_it(group: Coordinator) -> None:
    group.leaders.claims[("t", 0)] = ("old", 50)
    answer = group.join("a")
    for now_ms in range(0, 2_000, 250):
        group.tell(Tick(), now_ms)
    assert numbers(group.beat("a", answer.generation)) == [0, 1, 2, 3]
    assert group.leaders.claims[("t", 0)] == ("a", 51)


def test_a_failed_claim_is_retried_and_the_join_waits_a_bounded_time() -> None:
    core = GroupMembership("g", (1, 1))
    core.step(Loaded(None, -1), 0)
    core.step(TopicsChanged({"t": SubscribedTopic("i", 2)}), 0)
    core.step(Answered(Outcome.APPLIED, 0), 0)
    core.step(Join("token", "a", ("t",), SESSION_MS), 0)
    claims = core.step(Answered(Outcome.APPLIED, 1), 0)
    assert [type(claim) for claim in claims] == [ClaimPartition, ClaimPartition]
    core.step(Claimed(("t", 0), "a", 2, 5), 0)
    assert core.step(ClaimFailed(("t", 1), 2), 0) == []
    assert core.step(Tick(), 500) == [ClaimPartition(("t", 1), "a", 2)]
    for now_ms in range(750, SESSION_MS // 4, 250):
        assert not any(isinstance(action, AnswerMember) for action in core.step(Tick(), now_ms))
    (answer,) = core.step(Tick(), SESSION_MS // 4)
    assert isinstance(answer, AnswerMember)
    assert answer.assignment == (Assigned(("t", 0), 2, 5),)
    core.step(Claimed(("t", 1), "a", 2, 9), 3_000)
    (answer,) = core.step(Heartbeat("beat", "a", 2), 3_000)
    assert isinstance(answer, AnswerMember)
    assert numbers(answer) == [0, 1]


def test_the_number_of_members_is_bounded() -> None:
    group = Coordinator(Plane(), Leaders(), 1, {"t": 1})
    core = group.core
    core.step(SeekRequested("blocks the plane", "t"), 0)
    for number in range(1_000):
        assert not any(
            isinstance(action, RefuseMember) for action in core.step(Join(number, f"m{number}", ("t",), 100), 0)
        )
    (refused,) = core.step(Join("one more", "x", ("t",), 100), 0)
    assert isinstance(refused, RefuseMember)
    assert isinstance(refused.error, Backpressure)


def test_a_paused_coordinator_verifies_its_role(group: Coordinator) -> None:
    group.join("a")
    group.tell(Tick(), 0)
    Coordinator(group.plane, group.leaders, 2, {"t": 4})
    group.tell(Tick(), 5_000)
    assert group.resigned


def test_a_pause_of_this_process_extends_the_members_sessions(group: Coordinator) -> None:
    group.join("a")
    group.tell(Tick(), 0)
    group.tell(Tick(), 60_000)
    assert numbers(group.beat("a", 2, 60_000)) == [0, 1, 2, 3]


# --- random histories -------------------------------------------------------------------------------------------------


@dataclass
class Client:
    generation: int = 0
    holds: dict[Partition, int] = field(default_factory=dict)


class Town:
    """Several coordinators, a control plane that loses answers, and members that join, leave and fall silent."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ms = 0
        self.plane = Plane()
        self.leaders = Leaders()
        self.partitions = {"t": 3, "u": 2}
        self.clients: dict[str, Client] = {}
        self.cores: list[GroupMembership] = []
        self.pending: list[tuple[GroupMembership, Action]] = []
        self.owners: dict[tuple[Partition, int], str] = {}
        self.tokens: dict[object, tuple[str, Client]] = {}

    def tell(self, core: GroupMembership, event: Event) -> None:
        before = core.known.generation if core.known else 0
        for action in core.step(event, self.now_ms):
            if isinstance(action, AnswerMember) and action.token == "seek":
                self.tell(core, SeekDone("t"))
            elif isinstance(action, AnswerMember):
                self.heard(action)
            elif not isinstance(action, RefuseMember | Resigned):
                self.pending.append((core, action))
        assert (core.known.generation if core.known else 0) >= before
        if core.coordinates and self.plane.held is not None and core.known == self.plane.held:
            for partition, owner in core.known.owners.items():
                holder = owner.leaving or owner.owner
                assert self.owners.setdefault((partition, core.known.generation), holder) == holder

    def heard(self, answer: AnswerMember) -> None:
        member_id, client = self.tokens.pop(answer.token, ("", Client()))
        if not member_id or self.clients.get(member_id) is not client or answer.generation < client.generation:
            return
        client.generation = answer.generation
        client.holds = {assigned.partition: assigned.since for assigned in answer.assignment}
        for partition in client.holds:
            owner, since = self.leaders.claims[partition]
            stale = self.plane.held is not None and answer.generation < self.plane.held.generation
            assert stale or owner == member_id or since > client.holds[partition], (partition, owner, member_id)

    def perform(self, core: GroupMembership, action: Action, *, lossy: bool) -> None:
        match action:
            case Propose():
                fate = self.rng.random() if lossy else 1.0
                if fate < 0.1:
                    self.tell(core, Answered(Outcome.UNKNOWN))
                    return
                outcome = self.plane.set(action.membership, action.version)
                if fate < 0.2:
                    outcome = Outcome.UNKNOWN
                self.tell(core, Answered(outcome, self.plane.version))
            case ReadState():
                self.tell(core, Loaded(self.plane.held, self.plane.version))
            case ClaimPartition():
                fate = self.rng.random() if lossy else 1.0
                told = self.leaders.claim(action) if fate > 0.1 else None
                self.tell(core, told if told and fate > 0.2 else ClaimFailed(action.partition, action.since))

    def act(self, *, lossy: bool = True) -> None:
        core, action = self.pending.pop(self.rng.randrange(len(self.pending)))
        self.perform(core, action, lossy=lossy)

    def coordinator(self) -> GroupMembership:
        live = [core for core in self.cores if not core.resigned]
        return self.rng.choice(live) if live else self.elect()

    def elect(self) -> GroupMembership:
        core = GroupMembership("g", (len(self.cores) + 1, 1))
        self.cores.append(core)
        self.tell(core, Loaded(self.plane.held, self.plane.version))
        self.tell(core, TopicsChanged({name: SubscribedTopic(name, count) for name, count in self.partitions.items()}))
        return core

    def request(self, core: GroupMembership, member_id: str, event: str) -> None:
        client = self.clients.get(member_id)
        token = object()
        if event == "join":
            client = self.clients[member_id] = Client()
            self.tokens[token] = (member_id, client)
            self.tell(core, Join(token, member_id, self.rng.choice([("t",), ("t", "u")]), SESSION_MS))
        elif event == "leave":
            self.clients.pop(member_id, None)
            self.tell(core, Leave(token, member_id))
        elif client is not None:
            self.tokens[token] = (member_id, client)
            self.tell(core, Heartbeat(token, member_id, client.generation))

    def disturb(self) -> None:
        choice = self.rng.random()
        member_id = f"m{self.rng.randrange(4)}"
        if choice < 0.06:
            self.elect()
        elif choice < 0.12:
            self.tell(self.coordinator(), SessionLost())
        elif choice < 0.22:
            self.request(self.coordinator(), member_id, "join")
        elif choice < 0.28:
            self.request(self.coordinator(), member_id, "leave")
        elif choice < 0.31:
            self.partitions["t"] = min(8, self.partitions["t"] + 1)
            for core in self.cores:
                self.tell(core, TopicsChanged({name: SubscribedTopic(name, n) for name, n in self.partitions.items()}))
        elif choice < 0.34:
            self.tell(self.coordinator(), SeekRequested("seek", "t"))
        elif choice < 0.4:
            self.now_ms += self.rng.choice([100, 1_000, SESSION_MS])
        elif choice < 0.5:
            self.tell(self.coordinator(), Tick())
        else:
            self.request(self.coordinator(), member_id, "beat")

    def heal(self) -> GroupMembership:
        core = self.elect()
        for round_number in range(60):
            while self.pending:
                self.act(lossy=False)
            if core.resigned:  # an older coordinator took over first
                core = self.elect()
            self.now_ms += 250
            self.tell(core, Tick())
            for member_id in list(self.clients):
                known = core.known.members if core.known else {}
                self.request(core, member_id, "beat" if round_number and member_id in known else "join")
        while self.pending:
            self.act(lossy=False)
        return core


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_through_lost_answers_and_rival_coordinators_each_partition_has_one_owner(seed: int) -> None:
    town = Town(random.Random(seed))
    town.elect()
    for _ in range(150):
        if town.pending and town.rng.random() < 0.5:
            town.act()
        else:
            town.disturb()
    core = town.heal()
    assert core.known is not None
    held = [partition for client in town.clients.values() for partition in client.holds]
    assert len(held) == len(set(held))
    readable = {topic for member in core.known.members.values() for topic in member.topics}
    assert set(held) == {(topic, n) for topic in readable for n in range(town.partitions[topic])}
    for member_id, client in town.clients.items():
        for partition in client.holds:
            assert town.leaders.may_commit(partition, member_id, client.generation)


class Counted(dict[Partition, PartitionOwner]):
    """Owners that count how often they are iterated."""

    walks = 0

    def items(self):
        self.walks += 1
        return super().items()


def test_many_rejoining_members_are_found_in_one_pass_over_the_owners():
    members = {name: Member(name, ("t",), SESSION_MS, 1) for name in ("a", "b", "c", "d")}
    owners = {("t", number): PartitionOwner(name, 1) for number, name in enumerate(members)}
    draft = Draft(GroupMembers(1, (1, 1), members, owners, {"t": "id"}), 2, {"t": SubscribedTopic("id", 4)})
    draft._owners = counted = Counted(draft._owners)
    for name in ("a", "b", "c"):
        draft.join(Member(name, ("t",), SESSION_MS, 2))
    draft.release({})
    assert counted.walks == 1
    assert [owner.since for owner in counted.values()] == [2, 2, 2, 1]
