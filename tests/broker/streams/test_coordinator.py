"""A coordinator over a control plane that loses answers, beside a rival, and with leaders that are away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path

import gevent
import pytest
from gevent.event import AsyncResult
from support.domain import HandClock

from portalmq.broker.core.stream.events import AnswerMember, ClaimPartition, Heartbeat, Join, Partition, Tick
from portalmq.broker.streams.coordinator import Coordinator
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import Op, OutcomeUnknown, PlaneUnavailable
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import GroupState, TopicState
from portalmq.control_plane.stream_groups import StreamGroups
from portalmq.errors import PortalMQError, Unavailable
from portalmq.wire import TopicConfig

TOPICS = {"t": TopicState("t", "id", 2, 2, 1, TopicConfig())}
FATES = ["applied", "unknown but applied", "unknown and not applied", "unavailable"]


class Flaky:
    """A plane whose commits meet the fates that a test names, one after another; later commits succeed."""

    def __init__(self, plane: Standalone) -> None:
        self._plane = plane
        self.fates: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._plane, name)

    def commit(self, *ops: Op) -> list[int]:
        fate = self.fates.pop(0) if self.fates else "applied"
        if fate == "unavailable":
            raise PlaneUnavailable("away")
        versions = self._plane.commit(*ops) if fate != "unknown and not applied" else []
        if fate != "applied":
            raise OutcomeUnknown("the answer was lost")
        return versions


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Flaky]:
    standalone = Standalone(tmp_path)
    standalone.start()
    yield Flaky(standalone)
    standalone.close()


@pytest.fixture
def group(plane: Flaky) -> GroupState:
    return Catalog(plane).put_group("g", {"mode": "stream"})[0]  # type: ignore[arg-type]


Claims = Callable[[GroupState, Sequence[ClaimPartition]], Mapping[Partition, int | PortalMQError]]


def claimed(group: GroupState, claims: Sequence[ClaimPartition]) -> Mapping[Partition, int | PortalMQError]:
    return {claim.partition: 7 for claim in claims}


def coordinator(plane: Flaky, group: GroupState, number: int = 1, claims: Claims = claimed) -> Coordinator:
    deposed: list[Coordinator] = []
    store = StreamGroups(plane)  # type: ignore[arg-type]
    clock = HandClock()
    made = Coordinator(group, (number, 1), store, claims, TOPICS, clock, deposed.append)  # type: ignore[arg-type]
    made.begin(store.roster(group.group_id))
    return made


def join(of: Coordinator, member_id: str = "a", session_timeout_ms: int = 10_000) -> AnswerMember:
    return of.ask(Join(AsyncResult(), member_id, ("t",), session_timeout_ms), ("t",))


@pytest.fixture
def between_claims(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Run a function before the coordinator handles each claim of a call."""

    def arrange(do: Callable[[], object]) -> None:
        seconds = count()
        monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: next(seconds))
        monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", do)

    return arrange


def test_other_greenlets_run_between_the_results_of_claims(
    plane: Flaky, group: GroupState, between_claims: Callable[[Callable[[], object]], None]
) -> None:
    at = coordinator(plane, group)
    left: list[int] = []
    between_claims(lambda: left.append(len(at.membership._unclaimed)))
    assert len(join(at).assignment) == 2
    assert left == [2, 1]


def test_a_coordinator_that_closes_between_two_claims_does_nothing_more(
    plane: Flaky, group: GroupState, between_claims: Callable[[Callable[[], object]], None]
) -> None:
    at = coordinator(plane, group)
    between_claims(lambda: at.close() if len(at.membership._unclaimed) == 1 else None)
    with pytest.raises(Unavailable, match="is changing"):
        join(at)
    assert len(at.membership._unclaimed) == 1


@pytest.mark.parametrize("first", FATES)
@pytest.mark.parametrize("second", FATES)
def test_a_join_outlives_lost_answers_of_the_control_plane(
    plane: Flaky, group: GroupState, first: str, second: str
) -> None:
    plane.fates = [first, second]
    answer = join(coordinator(plane, group))
    assert [(assigned.partition, assigned.offset) for assigned in answer.assignment] == [(("t", 0), 7), (("t", 1), 7)]
    held = StreamGroups(plane).roster(group.group_id)  # type: ignore[arg-type]
    assert held is not None
    assert held.value.generation == answer.generation
    assert [member.id for member in held.value.members] == ["a"]


def test_a_replaced_coordinator_answers_no_requests(plane: Flaky, group: GroupState) -> None:
    older = coordinator(plane, group, 1)
    answer = join(older)
    newer = coordinator(plane, group, 2)
    with gevent.Timeout(60):
        while not newer.membership.coordinates:
            gevent.sleep(0.01)
    with pytest.raises(Unavailable):
        join(older, "b")
    assert newer.ask(Heartbeat(AsyncResult(), "a", answer.generation)).assignment == answer.assignment


def test_a_closed_coordinator_ends_all_waits(plane: Flaky, group: GroupState) -> None:
    plane.fates = ["unavailable"] * 1_000
    waiting = gevent.spawn(join, closing := coordinator(plane, group))
    with gevent.Timeout(60):
        while len(plane.fates) == 1_000:
            gevent.sleep(0.01)
    closing.close()
    with pytest.raises(Unavailable):
        waiting.get(timeout=60)


def test_a_claim_at_an_unavailable_leader_is_made_when_it_returns(plane: Flaky, group: GroupState) -> None:
    away = [True]

    def claims(_: GroupState, asked: Sequence[ClaimPartition]) -> Mapping[Partition, int | PortalMQError]:
        return {each.partition: Unavailable("no leader") if away[0] and each.partition[1] else 7 for each in asked}

    made = coordinator(plane, group, claims=claims)
    clock: HandClock = made._clock  # type: ignore[assignment]
    joining = gevent.spawn(join, made, session_timeout_ms=3_600_000)
    with gevent.Timeout(60):
        while not joining.ready():
            gevent.sleep(0.01)
            clock.advance(250)
            made.tell(Tick())
    answer = joining.get()
    assert [assigned.partition for assigned in answer.assignment] == [("t", 0)]
    away[0] = False
    with gevent.Timeout(60):
        while len(answer.assignment) < 2:
            gevent.sleep(0.01)
            clock.advance(250)
            made.tell(Tick())
            answer = made.ask(Heartbeat(AsyncResult(), "a", answer.generation))
    assert [assigned.partition for assigned in answer.assignment] == [("t", 0), ("t", 1)]


def test_a_deleted_group_has_no_coordinator(plane: Flaky, group: GroupState) -> None:
    made = coordinator(plane, group)
    join(made)
    Catalog(plane).delete_group("g")  # type: ignore[arg-type]
    with pytest.raises(Unavailable):
        join(made, "b")
