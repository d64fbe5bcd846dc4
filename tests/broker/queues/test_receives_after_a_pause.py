"""Messages that were leased before a pause of the process are not answered after it, unless the broker still leads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.domain import Fixture, records, running
from support.replicas import eventually, replicas

from portalmq import wire
from portalmq.broker.cluster.rpc.queues import Receive, ReceiveResult
from portalmq.broker.core.replica.events import SessionLost
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.long_poll import Leaderships
from portalmq.broker.partition.partition import PAUSED_MS, Partition
from portalmq.errors import Unavailable


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        it.broker.produce("t", ProduceRequest(records("a", "b", "c")))
        yield it


def partition_of(fixture: Fixture) -> Partition:
    return fixture.broker.topics.get("t").local[0]


def received(fixture: Fixture, *, attempt_id: str = "x", ack: tuple[str, ...] = (), **more: Any) -> list[str]:
    request = wire.ReceiveRequest(["t"], 1, attempt_id=attempt_id, ack=list(ack))
    if ack:
        messages, _ = fixture.broker.receive_handler.ack_and_receive("g", request, None, **more)
    else:
        messages = fixture.broker.receive_handler.receive("g", request, None, **more)
    return [message.record.value.decode() for message in messages]


def first_receipt(fixture: Fixture) -> str:
    (first,) = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], 1), None)
    return first.receipt


def call_of_another(fixture: Fixture, attempt_id: str) -> Receive:
    group = fixture.broker.groups.ensure("g")
    return Receive("g", group.group_id, ["t"], 1, 30_000, "c", attempt_id)


def values(result: ReceiveResult) -> list[str]:
    return [message.record.value.decode() for message in result.messages]


def before_the_answer(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    original = Leaderships.check

    def check(leaderships: Leaderships) -> None:
        happens()
        original(leaderships)

    monkeypatch.setattr(Leaderships, "check", check)


def test_a_receive_whose_leadership_ended_is_answered_to_its_repeat(fixture, monkeypatch):
    with monkeypatch.context() as patch:
        before_the_answer(patch, lambda: partition_of(fixture).step(SessionLost()))
        with pytest.raises(Unavailable) as refused:
            received(fixture)
    assert refused.value.outcome == "unknown"
    eventually(lambda: partition_of(fixture).serves)
    assert received(fixture) == ["a"]


def test_a_receive_that_followers_do_not_vouch_for_any_more_is_answered_to_its_repeat(fixture, monkeypatch):
    with monkeypatch.context() as patch:
        before_the_answer(patch, lambda: patch.setattr(PartitionReplica, "may_deliver", lambda replica, now_ms: False))
        with pytest.raises(Unavailable) as refused:
            received(fixture)
    assert refused.value.outcome == "unknown"
    assert received(fixture) == ["a"]


@pytest.mark.parametrize("later", [True, False])
def test_a_receive_with_acks_hands_nothing_out_after_its_leadership_ended(fixture, monkeypatch, later):
    receipt = first_receipt(fixture)
    with monkeypatch.context() as patch:
        before_the_answer(patch, lambda: partition_of(fixture).step(SessionLost()))
        with pytest.raises(Unavailable) as refused:
            received(fixture, ack=(receipt,), may_ack_later=later)
    assert refused.value.outcome == "unknown"
    eventually(lambda: partition_of(fixture).serves)
    assert received(fixture) == ["b"]


def test_another_broker_gets_nothing_after_the_leadership_ended(fixture, monkeypatch):
    handler = fixture.broker.receive_handler
    first_receipt(fixture)
    call = call_of_another(fixture, "x")
    for ask in (lambda: handler.lease(call, None), lambda: handler.replay(call)):
        with monkeypatch.context() as patch:
            before_the_answer(patch, lambda: partition_of(fixture).step(SessionLost()))
            with pytest.raises(Unavailable) as refused:
                ask()
        assert refused.value.outcome == "unknown"
        eventually(lambda: partition_of(fixture).serves)
    assert values(handler.replay(call)) == ["b"]


def test_an_empty_answer_needs_no_leadership(fixture, monkeypatch):
    for number in range(3):
        received(fixture, attempt_id=str(number))
    before_the_answer(monkeypatch, lambda: monkeypatch.setattr(PartitionReplica, "may_deliver", lambda *_: False))
    assert received(fixture) == []


def test_a_leader_that_stood_still_hands_nothing_out_that_it_took_before(tmp_path):
    with replicas(tmp_path, 3) as group:
        eventually(lambda: group.leader.serves)
        leader = group.leader
        eventually(lambda: leader.replica.may_deliver(group.clock.now_ms()))
        may_hand_out = leader.leadership()
        assert may_hand_out()
        group.clock._lived_s += 2 * PAUSED_MS / 1000
        assert not may_hand_out()
        assert not leader.replica.leading, "the pause counts although no event came since"
        eventually(lambda: leader.serves and leader.replica.may_deliver(group.clock.now_ms()))
        assert leader.leadership()()
        assert not may_hand_out(), "another broker may have led in between"
