"""Acks after a failed receive: the receive is repeated without them, so that none waits for what a new leader may not
answer yet."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pytest
from support.blocking_leases import Leases
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, hold

from portalmq import Consumer, InvalidRequest, PortalMQError, Unavailable, wire
from portalmq.transport.request import Request

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


class Broker:
    """A transport for Leases: each ack gets the next of the errors, if any is left."""

    def __init__(self, *errors: BaseException | None) -> None:
        self.errors = list(errors)
        self.sent: list[list[str]] = []
        self.during: Callable[[], object] = lambda: None

    def call(self, request: Request, timeout_s: float | None = None) -> None:
        self.sent.append(msgspec.json.decode(request.body)["receipts"])
        self.during()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error

    def rest(self) -> None: ...


def finished(broker: Broker, count: int = 1) -> Leases:
    """Return leases whose messages are handled, and not acked yet. No keeper runs."""
    held = Leases(broker, "g", 30.0, lambda: 0.0)
    held._keeper = threading.current_thread()
    held.hold([wire.PackMessageOut(0, offset, b"", 0, receipt=f"r{offset}") for offset in range(count)])
    held.take(count)
    held.finish_handed()
    return held


@pytest.mark.parametrize("error", [Unavailable("gone"), KeyboardInterrupt()])
def test_acks_that_were_sent_in_vain_are_sent_by_the_next_commit(error: BaseException) -> None:
    broker = Broker(error)
    held = finished(broker)
    with pytest.raises(type(error)):
        held.commit()
    assert held._acks.due_at(1.0) == 1.0, "the keeper tries again, too"
    held.commit()
    held.commit()
    assert broker.sent == [["r0"], ["r0"]]


def test_a_commit_raises_what_the_keeper_could_not_send() -> None:
    broker = Broker(InvalidRequest("the topic was deleted"))
    held = finished(broker)
    held.flush()
    with pytest.raises(InvalidRequest):
        held.commit()
    held.commit()
    assert broker.sent == [["r0"]], "acks that are refused for good do not hold up the others"


def test_a_commit_that_waits_for_the_keeper_finds_its_failure() -> None:
    broker = Broker(InvalidRequest("the topic was deleted"))
    held = finished(broker)
    failed: list[PortalMQError] = []

    def commit() -> None:
        try:
            held.commit()
        except PortalMQError as error:
            failed.append(error)

    committing = threading.Thread(target=commit, daemon=True)
    broker.during = committing.start
    held.flush()
    committing.join(60)
    assert [type(error) for error in failed] == [InvalidRequest]


def test_acks_of_a_leader_that_does_not_answer_do_not_hold_up_those_of_others() -> None:
    most = wire.RECEIVE_MESSAGES_MAX
    states = [{"receipt": f"r{offset}", "status": "ok" if offset else "unknown"} for offset in range(most)]
    broker = Broker(Unavailable("no leader", outcome="unknown", results=states))
    held = finished(broker, most + 2)
    for _ in range(2):
        held.flush()
    assert [len(receipts) for receipts in broker.sent] == [most, 3]
    assert broker.sent[1] == [f"r{most}", f"r{most + 1}", "r0"]
