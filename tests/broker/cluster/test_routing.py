"""Routing of calls to leaders: which failures are retried, and which outcome the caller learns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import gevent
import pytest
from support.domain import FakePeer

from portalmq.broker.cluster.peers import NotAnswered, NotReached
from portalmq.broker.cluster.routing import LeaderRouter
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.partition.writer import NotCommittedYet
from portalmq.errors import NotEnoughReplicas, NotLeader, PortalMQError, TopicNotFound, Unavailable

A, B, C = (TopicPartition("t", "id", number) for number in range(3))
ME = 1


class Map:
    """The leaders that a test sets; `on_look` is called when a call looks them up again."""

    def __init__(self, leaders: dict[TopicPartition, int | None]) -> None:
        self.leaders = leaders
        self.doubted: list[TopicPartition] = []
        self.on_look: Callable[[], None] = lambda: None

    def leader_of(self, place: TopicPartition) -> int | None:
        if place not in self.leaders:
            raise TopicNotFound("gone")
        return self.leaders[place]

    def url_of(self, broker_id: int) -> str | None:
        return f"http://{broker_id}"

    def look_again(self, place: TopicPartition) -> None:
        self.doubted.append(place)
        self.on_look()


class Ask:
    """Work that records which broker did it; `answers` has the outcomes by broker (the last one repeats)."""

    def __init__(self, **answers: list[PortalMQError | str]) -> None:
        self.answers = {int(name[1:]): list(script) for name, script in answers.items()}
        self.asked: list[tuple[int, list[TopicPartition]]] = []
        self.hangs: set[int] = set()

    def here(self, places: Sequence[TopicPartition]) -> dict[TopicPartition, str | PortalMQError]:
        return self.there(ME, places)

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> dict[TopicPartition, str | PortalMQError]:
        self.asked.append((broker_id, list(places)))
        if broker_id in self.hangs:
            gevent.sleep(3_600)
        script = self.answers.get(broker_id, [f"by {broker_id}"])
        answer = script.pop(0) if len(script) > 1 else script[0]
        if isinstance(answer, PortalMQError) and broker_id != ME:
            raise answer
        return dict.fromkeys(places, answer)


class NoPeers:
    """No RPC client: the work of these tests reaches other brokers by itself."""

    def call(self, broker_id: int, name: str, request: object, kind: object, *, timeout_s: float) -> NoReturn:
        raise AssertionError(name)


def leaders(leads: Map, patience_s: float = 60.0) -> LeaderRouter:
    return LeaderRouter(ME, leads, NoPeers(), chance=lambda: 0.0, patience_s=patience_s)


def test_each_leader_gets_its_partitions_in_one_call() -> None:
    work = Ask()
    outcomes = leaders(Map({A: ME, B: 2, C: 2})).run([A, B, C], work)
    assert outcomes == {A: "by 1", B: "by 2", C: "by 2"}
    assert sorted(work.asked) == [(1, [A]), (2, [B, C])]


def test_remote_leaders_are_called_concurrently() -> None:
    leads = Map({A: 2, B: 3})

    class Meeting(Ask):
        """Each broker answers once both have been called."""

        def there(self, broker_id: int, places: Sequence[TopicPartition]) -> dict[TopicPartition, str | PortalMQError]:
            self.asked.append((broker_id, list(places)))
            with gevent.Timeout(60):
                while len(self.asked) < 2:
                    gevent.sleep(0.001)
            return dict.fromkeys(places, "met")

    assert leaders(leads).run([A, B], Meeting()) == {A: "met", B: "met"}


def test_a_call_follows_the_leadership_to_the_new_leader() -> None:
    leads = Map({A: 2})
    leads.on_look = lambda: leads.leaders.update({A: 3})
    work = Ask(_2=[NotLeader("not me", leader=3)])
    assert leaders(leads).one(A, work) == "by 3"
    assert leads.doubted == [A]


@pytest.mark.parametrize("error", [NotReached("away", refused=True), Unavailable("draining")])
def test_a_call_to_a_dead_leader_waits_until_another_leads(error: PortalMQError) -> None:
    leads = Map({A: 2})
    work = Ask(_2=[error])
    there = leaders(leads)
    gevent.spawn_later(0.05, lambda: (leads.leaders.update({A: 3}), there.changed()))
    assert there.one(A, work) == "by 3"


def test_a_call_waits_for_a_leader_and_is_then_refused_as_not_applied() -> None:
    with pytest.raises(Unavailable, match="no leader") as refused:
        leaders(Map({A: None}), patience_s=0.3).one(A, Ask())
    assert (refused.value.outcome, refused.value.retryable) == ("not_applied", True)


def test_an_unknown_outcome_is_not_retried() -> None:
    work = Ask(_2=[NotAnswered("cut"), "by 2"])
    with pytest.raises(NotAnswered):
        leaders(Map({A: 2})).one(A, work)
    assert len(work.asked) == 1


def test_an_unknown_outcome_of_a_repeatable_call_is_retried() -> None:
    assert leaders(Map({A: 2})).one(A, Ask(_2=[NotAnswered("cut"), "by 2"]), repeatable=True) == "by 2"


def test_a_call_does_not_wait_for_its_commit_twice() -> None:
    work = Ask(_1=[NotCommittedYet("the followers are gone"), "by 1"])
    with pytest.raises(NotCommittedYet) as waited:
        leaders(Map({A: ME})).one(A, work, repeatable=True)
    assert (waited.value.outcome, waited.value.retryable) == ("unknown", True)
    assert len(work.asked) == 1


def test_a_refusal_after_an_unknown_try_leaves_the_outcome_unknown() -> None:
    work = Ask(_2=[NotAnswered("cut"), NotEnoughReplicas("one is not enough")])
    with pytest.raises(NotEnoughReplicas) as refused:
        leaders(Map({A: 2})).one(A, work, repeatable=True)
    assert refused.value.outcome == "unknown"


def test_too_few_replicas_is_a_final_answer() -> None:
    work = Ask(_2=[NotEnoughReplicas("one is not enough")])
    with pytest.raises(NotEnoughReplicas):
        leaders(Map({A: 2})).one(A, work)
    assert len(work.asked) == 1


def test_without_forwarding_the_error_names_the_leader_and_no_broker_is_called() -> None:
    work = Ask()
    outcomes = leaders(Map({A: ME, B: 2})).run([A, B], work, forward=False)
    assert outcomes[A] == "by 1"
    refused = outcomes[B]
    assert isinstance(refused, NotLeader)
    assert refused.extra == {"leader": 2, "leader_url": "http://2"}
    assert work.asked == [(1, [A])]


def test_without_forwarding_a_call_waits_until_the_elected_broker_opens_the_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("portalmq.broker.cluster.routing.OWN_PATIENCE_S", 60.0)
    work = Ask(_1=[NotLeader("opening", leader=ME), Unavailable("opening"), "open"])
    assert leaders(Map({A: ME})).one(A, work, forward=False) == "open"


def test_a_call_to_a_silent_leader_ends_when_another_is_elected() -> None:
    leads = Map({A: 2})
    work = Ask()
    work.hangs = {2}
    there = leaders(leads)
    gevent.spawn_later(0.05, lambda: (leads.leaders.update({A: 3}), there.changed()))
    with gevent.Timeout(50), pytest.raises(NotAnswered) as lost:
        there.one(A, work)
    assert lost.value.outcome == "unknown"
    with gevent.Timeout(50):
        leads.leaders[A] = 2
        gevent.spawn_later(0.05, lambda: (leads.leaders.update({A: 3}), there.changed()))
        assert there.one(A, work, repeatable=True) == "by 3"


def test_a_call_to_a_named_broker_ends_when_it_leads_none_of_the_partitions() -> None:
    leads = Map({A: 2, B: 2})
    there = leaders(leads)
    gevent.spawn_later(0.02, lambda: (leads.leaders.update({A: 3}), there.changed()))
    gevent.spawn_later(0.05, lambda: (leads.leaders.update({B: ME}), there.changed()))
    with gevent.Timeout(50), pytest.raises(NotAnswered, match="broker 2"):
        there.ask(2, [A, B], lambda: gevent.sleep(3_600))


def test_a_call_to_a_named_broker_returns_or_raises_its_outcome() -> None:
    there = leaders(Map({A: 2, B: 3}))
    assert there.ask(2, [A], lambda: "by 2") == "by 2"

    def refuse() -> None:
        raise NotReached("away", refused=True)

    with pytest.raises(NotReached):
        there.ask(2, [A], refuse)
    asked: list[int] = []
    with pytest.raises(Unavailable) as refused:
        there.ask(2, [], lambda: asked.append(2))
    assert (asked, refused.value.outcome) == ([], "not_applied")


def test_no_call_begins_for_a_client_that_has_gone() -> None:
    leads = Map({A: 2})
    work = Ask()
    work.hangs = {2}
    client = FakePeer()
    gevent.spawn_later(0.05, client.leave)
    with gevent.Timeout(50), pytest.raises(NotAnswered):
        leaders(leads).one(A, work, repeatable=True, waiting=client)
    assert len(work.asked) == 1


def test_a_deleted_topic_is_reported_at_once() -> None:
    with pytest.raises(TopicNotFound):
        leaders(Map({})).one(A, Ask())


def test_a_programming_error_is_not_swallowed() -> None:
    class Broken(Ask):
        def there(self, broker_id: int, places: Sequence[TopicPartition]) -> dict[TopicPartition, str | PortalMQError]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leaders(Map({A: 2})).one(A, Broken())
