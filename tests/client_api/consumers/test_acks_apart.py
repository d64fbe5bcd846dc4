"""Acks after a failed receive: the receive is repeated without them, so that none waits for what a new leader may not
answer yet."""

from __future__ import annotations

import threading

import msgspec
import pytest
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, hold

from portalmq import Consumer, wire

RECEIVE, ACK = "/v1/groups/g/receive", "/v1/groups/g/ack"


def received(broker: ScriptedBroker) -> list[wire.ReceiveRequest]:
    return [msgspec.json.decode(call.body, type=wire.ReceiveRequest) for call in broker.calls_of("POST", RECEIVE)]


def test_a_receive_after_a_failure_does_not_wait_for_its_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    may_ack = threading.Event()
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3", b"4"])
        with Consumer("t", group="g", bootstrap=broker.url, max_messages=1) as consumer:
            assert [message.value for message in consumer.poll(60)] == [b"1"]
            broker.script("POST", RECEIVE, [hang_up, hang_up])
            broker.script("POST", ACK, [hold(may_ack)])
            assert [message.value for message in consumer.poll(60)] == [b"2"]
            first, *failed, repeated = received(broker)
            assert (first.ack, len({each.attempt_id for each in [*failed, repeated]})) == ([], 1)
            assert all(each.ack == ["t.0.0.1"] for each in failed)
            assert repeated.ack == []
            broker.wait_for(lambda: broker.calls_of("POST", ACK))
            assert [message.value for message in consumer.poll(60)] == [b"3"]
            assert received(broker)[-1].ack == [], "those before are not answered yet"
            may_ack.set()
            consumer.commit_finished()
            monkeypatch.setattr("portalmq.consumers.lease.ACK_DELAY_S_MAX", 3_600.0)
            assert [message.value for message in consumer.poll(60)] == [b"4"]
            assert received(broker)[-1].ack == ["t.0.2.1"]
    acked = [receipt for call in broker.calls_of("POST", ACK) for receipt in call.json()["receipts"]]
    assert acked[:2] == ["t.0.0.1", "t.0.1.1"]


def test_a_poll_whose_time_is_over_leaves_the_repeat_to_the_next_one() -> None:
    def lose(broker: ScriptedBroker, call: Call) -> Reply:
        ended.wait(60)
        return hang_up(broker, call)

    ended = threading.Event()
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with Consumer("t", group="g", bootstrap=broker.url, max_messages=1) as consumer:
            assert [message.value for message in consumer.poll(60)] == [b"1"]
            broker.script("POST", RECEIVE, [lose, lose])
            threading.Timer(0.05, ended.set).start()
            assert consumer.poll(0.0) == []
            assert [message.value for message in consumer.poll(60)] == [b"2"]
            assert received(broker)[-1].ack == []
