"""Messages that the keeper returns are in flight for a while: a receive before their arrival finds nothing."""

from __future__ import annotations

import threading

import msgspec
import pytest
from support.blocking_leases import Leases
from support.scripted_broker import ScriptedBroker, lose_answer

from portalmq import Consumer, StaleReceipt, Unavailable, wire
from portalmq.consumers.lease import HOLD_BACK_S_MAX
from portalmq.network.http_answer import Fields, HttpAnswer
from portalmq.transport.request import Request


class Transport:
    """Records for each request whether returned messages are still in flight."""

    def __init__(self, fail: Exception | None) -> None:
        self.fail = fail
        self.leases: Leases | None = None
        self.on_its_way: list[bool] = []
        self.asked = 0

    def call(self, request: Request, timeout_s: float | None = None) -> HttpAnswer | None:
        if request.method == "GET":
            self.asked += 1
            if self.fail is not None:
                raise self.fail
            group = wire.GroupDescription("g", "queue", [], 0, 0, 0, 0, 0, 0, wire.GroupConfig())
            return HttpAnswer(200, Fields(), msgspec.json.encode(group))
        assert request.path.endswith("/nack")
        assert self.leases is not None
        self.on_its_way.append(not self.leases.wait_given_back(0.0))
        if self.fail is not None:
            raise self.fail
        return None


@pytest.mark.parametrize("fail", [None, Unavailable("gone")])
def test_messages_that_the_keeper_returns_are_pending_until_the_broker_answers(fail: Exception | None) -> None:
    transport = Transport(fail)
    held = transport.leases = Leases(transport, "g", 30.0, lambda: 0.0)
    held._keeper = threading.current_thread()
    held._calls.group_leases = True
    held.hold([wire.PackMessageOut(0, offset, b"", 0, receipt=f"r{offset}") for offset in range(3)])
    assert held.wait_given_back(0.0)
    held._release_waiting()
    assert transport.on_its_way == [True]
    assert held.wait_given_back(0.0)


def test_waiting_messages_go_back_later_if_the_group_could_not_be_asked() -> None:
    now = [0.0]
    transport = Transport(Unavailable("gone"))
    held = transport.leases = Leases(transport, "g", 30.0, lambda: now[0])
    held._keeper = threading.current_thread()
    held.hold([wire.PackMessageOut(0, offset, b"", 0, receipt=f"r{offset}") for offset in range(3)])
    assert held.take()
    for tries in (1, 2, 3):
        now[0] = held._release_waiting_at()
        held._release_waiting()
        assert (transport.asked, transport.on_its_way) == (tries, [])
        assert held._release_waiting_at() == now[0] + HOLD_BACK_S_MAX, "it retries after a pause"
    transport.fail = None
    held._release_waiting()
    assert (transport.on_its_way, held.take()) == ([True], [])


def test_an_iteration_ends_only_when_returned_messages_have_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedBroker() as broker, Consumer("t", bootstrap=broker.url, idle_timeout_s=0) as messages:
        waited: list[float] = []

        async def arrive(within_s: float) -> bool:
            if not waited:
                broker.fill("t", [b"given back"])
            waited.append(within_s)
            return True

        monkeypatch.setattr(messages._leases, "wait_given_back", arrive)
        assert next(messages).value == b"given back"
        assert waited == [messages._subscription.visibility_timeout_s], "for as long as it might be leased"
        with pytest.raises(StopIteration):
            next(messages)


def test_a_nack_that_is_carried_out_without_an_answer_is_unknown() -> None:
    """The kept connection breaks: the request is repeated at once, and its receipt is stale by then."""
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        broker.script("POST", "/v1/groups/g/nack", [lose_answer])
        with Consumer("t", group="g", bootstrap=broker.url, idle_timeout_s=0, manual_ack=True) as messages:
            message = next(messages)
            with pytest.raises(StaleReceipt) as refused:
                message.nack()
    assert refused.value.outcome == "unknown"
    assert len(broker.calls_of("POST", "/v1/groups/g/nack")) == 2
