"""What a group's coordinator ignores, refuses or waits for: each guard on its own, with what only it keeps out."""

from __future__ import annotations

import pytest

from portalmq.broker.core.stream.events import (
    Action,
    Answered,
    AnswerMember,
    Claimed,
    ClaimFailed,
    ClaimPartition,
    ClaimRefused,
    GroupMembers,
    Heartbeat,
    Join,
    Leave,
    Loaded,
    Member,
    Outcome,
    PartitionOwner,
    Propose,
    ReadState,
    RefuseMember,
    SeekDone,
    SeekRequested,
    SessionLost,
    SubscribedTopic,
    Tick,
    TopicsChanged,
)
from portalmq.broker.core.stream.membership import CLAIM_AGAIN_MS, GroupMembership
from portalmq.broker.core.stream.rebalance import Draft
from portalmq.errors import Fenced, IllegalGeneration

SESSION_MS = 10_000
ME = (1, 1)
TOPICS = {"t": SubscribedTopic("i", 2), "u": SubscribedTopic("j", 1)}


class Group:
    """A coordinator whose proposals are applied at once; its claims are left to the test."""

    def __init__(self) -> None:
        self.core = GroupMembership("g", ME)
        self.version = -1
        self.tell(Loaded(None, -1))
        self.tell(TopicsChanged(TOPICS))

    def tell(self, event: object, now_ms: int = 0) -> list[Action]:
        found: list[Action] = []
        todo = self.core.step(event, now_ms)  # type: ignore[arg-type]
        while todo:
            action = todo.pop(0)
            if isinstance(action, Propose):
                self.version = action.version + 1
                todo += self.core.step(Answered(Outcome.APPLIED, self.version), now_ms)
            else:
                found.append(action)
        return found

    @property
    def generation(self) -> int:
        assert self.core.known is not None
        return self.core.known.generation

    def claim(self, actions: list[Action], now_ms: int = 0) -> list[Action]:
        """Carry the claims out; return what follows, answers among the actions included."""
        found = [action for action in actions if not isinstance(action, ClaimPartition)]
        for action in actions:
            if isinstance(action, ClaimPartition):
                found += self.tell(Claimed(action.partition, action.member_id, action.since, 0), now_ms)
        return found

    def join(self, member_id: str, topics: tuple[str, ...] = ("t",), now_ms: int = 0) -> AnswerMember:
        (answer,) = self.claim(self.tell(Join("join", member_id, topics, SESSION_MS), now_ms), now_ms)
        assert isinstance(answer, AnswerMember)
        return answer


@pytest.fixture
def group() -> Group:
    return Group()


def refused(actions: list[Action]) -> Exception:
    (refusal,) = actions
    assert isinstance(refusal, RefuseMember)
    return refusal.error


def claims(actions: list[Action]) -> list[ClaimPartition]:
    return [action for action in actions if isinstance(action, ClaimPartition)]


# --- the state in the control plane ----------------------------------------------------------------------------------


def test_a_coordinator_that_has_resigned_coordinates_no_more(group: Group) -> None:
    group.join("a")
    assert group.core.coordinates
    group.tell(SessionLost())
    group.tell(Loaded(GroupMembers(9, (2, 1)), 9))
    assert group.core.resigned
    assert not group.core.coordinates
    assert not group.core.is_idle


def test_a_group_is_idle_without_members_and_without_waiting_calls(group: Group) -> None:
    assert group.core.is_idle
    group.tell(SeekRequested("seek", "t"))
    assert not group.core.is_idle, "a seek is under way"
    group.tell(SeekDone("t"))
    assert group.core.is_idle
    group.join("a")
    assert not group.core.is_idle
    assert not GroupMembership("g", ME).is_idle, "who coordinates is not known yet"
    other = Group()
    other.tell(SessionLost())
    other.tell(Loaded(GroupMembers(9, (2, 1)), 9))
    assert not other.core.is_idle, "another broker coordinates"


def test_an_answer_to_nothing_and_one_during_a_read_change_nothing() -> None:
    core = GroupMembership("g", ME)
    core.step(Loaded(None, -1), 0)
    assert core.step(Answered(Outcome.APPLIED, 0), 0) == []
    (proposed,) = core.step(TopicsChanged(TOPICS), 0)
    assert isinstance(proposed, Propose)
    assert core.step(Answered(Outcome.UNKNOWN), 0) == [ReadState()]
    assert core.step(Answered(Outcome.APPLIED, 0), 0) == [], "the read decides"
    assert not core.coordinates
    assert core.step(Loaded(proposed.membership, 0), 0) == []
    assert core.coordinates


def test_nothing_is_proposed_before_the_state_is_known_or_while_it_is_read(group: Group) -> None:
    core = GroupMembership("g", ME)
    assert core.step(TopicsChanged(TOPICS), 0) == []
    assert core.step(Join("join", "a", ("t",), SESSION_MS), 0) == []
    assert [type(action) for action in core.step(Loaded(None, -1), 0)] == [Propose]
    assert group.tell(SessionLost()) == [ReadState()]
    assert group.core.step(Join("join", "a", ("t",), SESSION_MS), 0) == []


# --- members ---------------------------------------------------------------------------------------------------------


def test_a_leave_of_another_than_the_joining_member_is_answered_at_once(group: Group) -> None:
    group.join("a")
    group.tell(SessionLost())
    assert group.core.step(Join("join", "b", ("t",), SESSION_MS), 0) == []
    (left,) = group.core.step(Leave("left", "c"), 0)
    assert left == AnswerMember("left", "c", group.generation)
    assert group.core.step(Leave("leave", "b"), 0) == [], "it is to leave after it has joined"


def test_a_member_in_generation_zero_is_an_older_client(group: Group) -> None:
    group.join("a")
    assert isinstance(refused(group.tell(Heartbeat("beat", "a", 0))), Fenced)


@pytest.mark.parametrize("generation", [-1, -7])
def test_no_member_knows_a_negative_generation(group: Group, generation: int) -> None:
    group.join("a")
    assert isinstance(refused(group.tell(Heartbeat("beat", "a", generation))), IllegalGeneration)


def test_an_older_heartbeat_takes_no_release_back(group: Group) -> None:
    """A copy of it comes late: what its member released since stays released."""
    first = group.join("a")
    group.join("b")
    moved = group.generation
    group.tell(Heartbeat("late", "a", first.generation))
    assert group.core.known is not None
    assert [owner.leaving for owner in group.core.known.owners.values()].count("a") == 1
    group.claim(group.tell(Heartbeat("beat", "a", moved)))
    group.tell(Heartbeat("later", "a", first.generation))
    assert group.core._heard["a"] == moved
    assert not any(owner.leaving for owner in group.core.known.owners.values())


def test_a_call_of_a_member_whose_partitions_are_claimed_waits_for_no_others() -> None:
    """A new coordinator has inherited the partitions of two members."""
    before = GroupMembers(
        5,
        (2, 1),
        {name: Member(name, ("t",), SESSION_MS, 3) for name in "ab"},
        {("t", 0): PartitionOwner("a", 3), ("t", 1): PartitionOwner("b", 3)},
        {"t": "i"},
    )
    core = GroupMembership("g", ME)
    core.step(Loaded(before, 7), 0)
    (took,) = core.step(TopicsChanged(TOPICS), 0)
    assert isinstance(took, Propose)
    assert len(claims(core.step(Answered(Outcome.APPLIED, 8), 0))) == 2
    assert core.step(Claimed(("t", 0), "a", 3, 0), 0) == []
    (answer,) = core.step(Heartbeat("beat", "a", 5), 0)
    assert isinstance(answer, AnswerMember)
    assert [each.partition for each in answer.assignment] == [("t", 0)]
    assert core.step(Heartbeat("beat", "b", 5), 0) == []


def inherited(topics: dict[str, SubscribedTopic] = TOPICS) -> tuple[GroupMembership, list[Action]]:
    """A new coordinator that has just begun, with two partitions of member a, and what it did at last."""
    before = GroupMembers(
        5,
        (2, 1),
        {"a": Member("a", ("t",), SESSION_MS, 3)},
        {("t", 0): PartitionOwner("a", 3), ("t", 1): PartitionOwner("a", 3)},
        {"t": "i"},
    )
    core = GroupMembership("g", ME)
    core.step(Loaded(before, 7), 0)
    core.step(TopicsChanged(topics), 0)
    return core, core.step(Answered(Outcome.APPLIED, 8), 0)


def answers(actions: list[Action]) -> list[AnswerMember]:
    return [action for action in actions if isinstance(action, AnswerMember)]


def test_a_heartbeat_waits_for_what_the_earlier_coordinator_had_assigned_and_for_nothing_new() -> None:
    core, begun = inherited({"t": SubscribedTopic("i", 3)})
    assert len(claims(begun)) == 3
    assert core.step(Heartbeat("beat", "a", 5), 0) == []
    assert core.step(Claimed(("t", 0), "a", 3, 0), 0) == []
    (answer,) = answers(core.step(Claimed(("t", 1), "a", 3, 0), 0))
    assert [each.partition for each in answer.assignment] == [("t", 0), ("t", 1)]


def test_a_heartbeat_does_not_wait_for_an_inherited_partition_that_moves_on() -> None:
    core, _ = inherited()
    assert core.step(Heartbeat("beat", "a", 5), 0) == []
    assert [type(action) for action in core.step(Join("join", "b", ("t",), SESSION_MS), 0)] == [Propose]
    assert [each.token for each in answers(core.step(Answered(Outcome.APPLIED, 9), 0))] == ["join"]
    told = answers(core.step(Claimed(("t", 0), "a", 3, 0), 0))
    assert [(each.token, [held.partition for held in each.assignment]) for each in told] == [("beat", [("t", 0)])]


def test_a_members_new_partitions_are_not_waited_for_by_its_heartbeat(group: Group) -> None:
    """Only what an earlier coordinator had assigned is: it would have to release that."""
    group.join("a")
    group.join("b")
    released = group.tell(Heartbeat("beat", "a", group.generation))
    assert len(claims(released)) == 1
    (answer,) = group.tell(Heartbeat("beat", "b", group.generation))
    assert isinstance(answer, AnswerMember)
    assert answer.assignment == ()


# --- claims ----------------------------------------------------------------------------------------------------------


def test_a_claim_of_an_earlier_generation_that_failed_late_does_not_end_the_current_one(group: Group) -> None:
    (claim, _) = claims(group.tell(Join("join", "a", ("t",), SESSION_MS)))
    for since in (claim.since - 1, claim.since + 1):
        assert group.tell(ClaimFailed(claim.partition, since)) == []
        assert group.tell(ClaimRefused(claim.partition, since, 50)) == []
    assert claims(group.tell(Tick(), 2 * CLAIM_AGAIN_MS)) == [], "it is under way still"
    group.tell(ClaimFailed(claim.partition, claim.since))
    assert claims(group.tell(Tick(), 3 * CLAIM_AGAIN_MS)) == [claim]


def test_a_claim_for_another_member_or_generation_does_not_count(group: Group) -> None:
    claim, other = claims(group.tell(Join("join", "a", ("t",), SESSION_MS)))
    assert group.tell(Claimed(claim.partition, "b", claim.since, 0)) == []
    assert group.tell(Claimed(claim.partition, "a", claim.since - 1, 0)) == []
    assert group.tell(Claimed(other.partition, "a", other.since, 0)) == []
    (answer,) = group.tell(Claimed(claim.partition, "a", claim.since, 0))
    assert isinstance(answer, AnswerMember)
    assert len(answer.assignment) == 2


def test_a_partition_that_is_claimed_is_not_claimed_again_when_others_move(group: Group) -> None:
    group.join("a")
    assert [claim.partition for claim in claims(group.tell(Join("join", "b", ("u",), SESSION_MS)))] == [("u", 0)]


def test_a_seek_claims_the_partitions_of_its_topic_alone(group: Group) -> None:
    group.join("a", ("t", "u"))
    assert claims(group.tell(SeekRequested("seek", "t"))) == []
    assert {claim.partition for claim in claims(group.tell(SeekDone("t")))} == {("t", 0), ("t", 1)}


def test_a_partition_whose_leader_knows_a_higher_generation_is_claimed_in_the_next_one(group: Group) -> None:
    claim, _ = claims(group.tell(Join("join", "a", ("t",), SESSION_MS)))
    again = claims(group.tell(ClaimRefused(claim.partition, claim.since, 50)))
    assert [(each.partition, each.since) for each in again] == [(claim.partition, 51)]
    assert claims(group.tell(Tick(), 10 * CLAIM_AGAIN_MS)) == []


def test_a_refused_partition_is_claimed_in_the_generation_after_that_of_the_refusal() -> None:
    """The refusal comes while another proposal is under way: what that brings may be no later than the refusal."""
    core, begun = inherited()
    claim = claims(begun)[0]
    core.step(TopicsChanged({"t": SubscribedTopic("i", 3)}), 0)
    core.step(ClaimRefused(claim.partition, claim.since, claim.since), 0)
    assert claims(core.step(Tick(), 10 * CLAIM_AGAIN_MS)) == [], "not in this generation"
    actions = core.step(Answered(Outcome.APPLIED, 9), 10 * CLAIM_AGAIN_MS)
    (again,) = (action for action in actions if isinstance(action, Propose))
    assert again.membership.owners[claim.partition].since == again.membership.generation > claim.since


def test_a_refused_partition_that_its_topic_has_no_longer_is_forgotten() -> None:
    core, begun = inherited()
    claim = next(claim for claim in claims(begun) if claim.partition == ("t", 1))
    core.step(TopicsChanged({"t": SubscribedTopic("i", 1)}), 0)
    core.step(ClaimRefused(claim.partition, claim.since, 50), 0)
    actions = core.step(Answered(Outcome.APPLIED, 9), 0)
    assert not any(isinstance(action, Propose) for action in actions)
    assert core.known is not None
    assert core.known.owners.keys() == {("t", 0)}


# --- the draft -------------------------------------------------------------------------------------------------------


def test_a_draft_keeps_no_partition_that_its_topic_no_longer_has() -> None:
    known = GroupMembers(
        3,
        ME,
        {"a": Member("a", ("t",), SESSION_MS, 1)},
        {("t", number): PartitionOwner("a", 1) for number in range(3)},
        {"t": "i"},
    )
    draft = Draft(known, 4, {"t": SubscribedTopic("i", 2)})
    assert draft.membership(ME).owners.keys() == {("t", 0), ("t", 1)}


def test_a_draft_with_other_members_and_the_same_partitions_is_a_change() -> None:
    known = GroupMembers(
        3, ME, {"a": Member("a", ("u",), SESSION_MS, 1)}, {("u", 0): PartitionOwner("a", 1)}, {"u": "j"}
    )
    draft = Draft(known, 4, TOPICS)
    assert draft.changed_nothing()
    draft.join(Member("b", ("none",), SESSION_MS, 4))
    draft.assign()
    assert not draft.changed_nothing()


def test_a_partition_of_a_member_that_joins_anew_moves_without_waiting_for_it() -> None:
    """The client that joins holds nothing, whatever an older client of its id held."""
    known = GroupMembers(
        3,
        ME,
        {"a": Member("a", ("t",), SESSION_MS, 1)},
        {("t", 0): PartitionOwner("a", 1), ("t", 1): PartitionOwner("a", 1)},
        {"t": "i"},
    )
    draft = Draft(known, 4, TOPICS)
    draft.join(Member("a", ("t",), SESSION_MS, 4))
    draft.join(Member("b", ("t",), SESSION_MS, 4))
    draft.release({})
    draft.assign()
    assert sorted((owner.owner, owner.since, owner.leaving) for owner in draft.membership(ME).owners.values()) == [
        ("a", 4, ""),
        ("b", 4, ""),
    ]


def test_of_two_partitions_that_may_move_the_one_that_is_moving_does() -> None:
    members = {name: Member(name, topics, SESSION_MS, 1) for name, topics in (("a", ("t",)), ("c", ("u",)))}
    owners = {("t", 0): PartitionOwner("a", 2, "c"), ("t", 1): PartitionOwner("a", 1), ("t", 2): PartitionOwner("a", 1)}
    draft = Draft(GroupMembers(3, ME, members, owners, {"t": "i"}), 4, {"t": SubscribedTopic("i", 3)})
    draft.join(Member("b", ("t",), SESSION_MS, 4))
    draft.assign()
    moved = [partition for partition, owner in draft.membership(ME).owners.items() if owner.owner == "b"]
    assert moved == [("t", 0)]
