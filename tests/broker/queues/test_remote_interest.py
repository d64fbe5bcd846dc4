"""A group's messages at another broker: an interest stays there only while a waiter sleeps here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gevent
import pytest
from gevent.event import Event
from support.domain import FakePeer

from portalmq import wire
from portalmq.broker.cluster.peers import NotAnswered, NotReached
from portalmq.broker.cluster.rpc.queues import Interested, ReceiveResult
from portalmq.broker.partition.long_poll import LeasedMessage, LongPolls, ReceiveOptions, receive, take
from portalmq.broker.queues import remote_interest as interest
from portalmq.broker.queues.remote_interest import Ask, RemoteGroup
from portalmq.broker.storage.batch import Record
from portalmq.control_plane.state import GroupState
from portalmq.errors import PortalMQError, Unavailable

OPTIONS = ReceiveOptions(10, 30_000, "", None)


class Leader:
    """Another broker, which leads all partitions: `arrive` adds a message."""

    def __init__(self) -> None:
        self.messages: list[LeasedMessage] = []
        self.calls: list[str] = []
        self.parked = 0
        self.trouble: PortalMQError | None = None
        self.unbegun = False
        self.patient: list[bool] = []
        self._arrived = Event()

    def arrive(self, value: bytes) -> None:
        self.messages.append(LeasedMessage("t", 0, len(self.calls), 0, Record(value), "r", 1, 0))
        self._arrived.set()

    def call(self, broker_id: int, name: str, request: Any, kind: Any, *, timeout_s: float) -> Any:
        self.calls.append(name)
        gevent.sleep(0.001)
        if self.trouble is not None:
            raise self.trouble
        if name == "interest":
            self.parked += 1
            try:
                self._arrived.wait(request.wait_ms / 1000)
            finally:
                self.parked -= 1
            return Interested(bool(self.messages))
        if name == "replay":
            return ReceiveResult([], known=False)
        self.patient.append(request.patient)
        taken, self.messages = self.messages[: request.max_messages], self.messages[request.max_messages :]
        if not self.messages:
            self._arrived.clear()
        return ReceiveResult(taken, self.unbegun)


@pytest.fixture
def leader() -> Leader:
    return Leader()


def source_at(
    leader: Leader, on_unbegun: Callable[[], None] = lambda: None, ask: Ask = lambda call: call()
) -> RemoteGroup:
    group = GroupState("g", wire.GroupConfig(), "id")
    return RemoteGroup(leader, 2, group, ("t",), on_unbegun, ask)  # type: ignore[arg-type]


def asleep(source: RemoteGroup, peer: FakePeer | None = None, wait_s: float = 60.0, **options: Any) -> gevent.Greenlet:
    return gevent.spawn(receive, lambda: [source], ["t"], OPTIONS._replace(**options), wait_s, peer, LongPolls(100))


def until(condition: Callable[[], bool]) -> None:
    with gevent.Timeout(60):
        while not condition():
            gevent.sleep(0.002)


def texts(messages: list[LeasedMessage]) -> list[bytes]:
    return [message.record.value for message in messages]


def test_available_messages_are_fetched_at_once_without_a_wait(leader: Leader) -> None:
    leader.arrive(b"a")
    assert texts(asleep(source_at(leader)).get(timeout=50)) == [b"a"]
    assert leader.calls == ["receive"]


def test_a_broker_that_is_silent_and_leads_no_longer_is_left(leader: Leader) -> None:
    def left(call: Callable[[], ReceiveResult]) -> ReceiveResult:
        raise NotAnswered("another broker leads meanwhile")

    leader.arrive(b"a")
    with pytest.raises(NotAnswered):
        source_at(leader, ask=left).take(OPTIONS)


def test_a_sleeper_is_woken_by_the_interest_and_fetches_then(leader: Leader) -> None:
    sleeper = asleep(source_at(leader))
    until(lambda: leader.parked == 1)
    leader.arrive(b"a")
    assert texts(sleeper.get(timeout=50)) == [b"a"]
    assert leader.calls[:3] == ["receive", "interest", "receive"]


def test_all_sleepers_of_a_group_share_one_interest_and_each_message_wakes_one(leader: Leader) -> None:
    source = source_at(leader)
    sleepers = [asleep(source, max_messages=1) for _ in range(10)]
    until(lambda: leader.parked == 1 and leader.calls.count("receive") == 10)
    for number in range(3):
        leader.arrive(b"%d" % number)
    until(lambda: sum(sleeper.ready() for sleeper in sleepers) == 3)
    gevent.sleep(0.1)
    assert sum(sleeper.ready() for sleeper in sleepers) == 3
    assert sorted(texts([each for sleeper in sleepers if sleeper.ready() for each in sleeper.value])) == [
        b"0",
        b"1",
        b"2",
    ]
    until(lambda: leader.parked == 1)
    assert leader.calls.count("receive") < 20, "a message wakes one sleeper, not all"
    gevent.killall(sleepers)


def test_no_messages_are_fetched_for_a_disconnected_client(leader: Leader) -> None:
    source, client = source_at(leader), FakePeer()
    first = asleep(source, client)
    until(lambda: leader.parked == 1)
    second = asleep(source)
    until(lambda: leader.calls.count("receive") == 2)
    client.leave()
    leader.arrive(b"a")
    assert first.get(timeout=50) == []
    assert texts(second.get(timeout=50)) == [b"a"]


def test_the_interest_ends_after_the_last_waiter(leader: Leader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interest, "LINGER_S", 0.01)
    source = source_at(leader)
    assert asleep(source, wait_s=0.05).get(timeout=50) == []
    until(lambda: leader.parked == 0)
    assert source.is_idle


def test_a_leader_that_cannot_be_asked_is_asked_again_with_pauses(leader: Leader) -> None:
    leader.trouble = NotReached("away", refused=True)
    sleeper = asleep(source_at(leader))
    until(lambda: leader.calls.count("interest") >= 2)
    leader.trouble = None
    leader.arrive(b"a")
    assert texts(sleeper.get(timeout=50)) == [b"a"]
    assert leader.calls.count("interest") < 10


def test_without_a_wait_an_unreachable_leader_is_an_error(leader: Leader) -> None:
    leader.trouble = NotAnswered("cut")
    with pytest.raises(Unavailable) as caught:
        asleep(source_at(leader), wait_s=0).get(timeout=50)
    assert caught.value.outcome == "unknown", "it may have leased something"


def test_a_leader_reports_that_the_group_has_not_begun(leader: Leader) -> None:
    told: list[str] = []
    leader.unbegun = True
    assert asleep(source_at(leader, lambda: told.append("unbegun")), wait_s=0).get(timeout=50) == []
    assert told == ["unbegun"]


def test_a_leader_is_asked_to_wait_for_its_followers_only_while_nothing_is_in_hand(leader: Leader) -> None:
    sources = [source_at(leader) for _ in range(3)]
    leader.arrive(b"a")
    assert texts(take(sources, OPTIONS, ask=True)) == [b"a"]
    assert leader.patient == [True, False, False]


def test_one_leader_that_refuses_is_enough_to_wait_for(leader: Leader) -> None:
    def refused(call: Callable[[], ReceiveResult]) -> ReceiveResult:
        raise Unavailable("its followers do not vouch")

    leader.arrive(b"a")
    assert texts(take([source_at(leader, ask=refused), source_at(leader)], OPTIONS, ask=True)) == [b"a"]
    assert leader.patient == [False]
