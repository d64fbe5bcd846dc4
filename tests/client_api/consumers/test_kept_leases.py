"""Leases of messages that a consumer holds and has not handed out: renewed, or given back before they end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec
import pytest
from support.blocking_leases import Leases
from support.scripted_broker import Call, HangUp, Reply, ScriptedBroker

from portalmq import AsyncConsumer, Consumer, StaleReceipt, wire
from portalmq.transport.request import Request

RECEIVE, EXTEND, NACK = (f"/v1/groups/g/{verb}" for verb in ("receive", "extend", "nack"))
AN_HOUR_S = 3_600.0


class Broker:
    """A transport for Leases that records the receipts of each call."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.stale: set[str] = set()
        self.during: Callable[[], object] = lambda: None

    def call(self, request: Request, timeout_s: float | None = None) -> None:
        receipts = msgspec.json.decode(request.body)["receipts"]
        assert 0 < len(receipts) <= wire.RECEIVE_MESSAGES_MAX, "a broker refuses it"
        self.sent.append((request.path.rpartition("/")[2], receipts))
        self.during()
        if self.stale.intersection(receipts):
            status = {receipt: "stale_receipt" if receipt in self.stale else "ok" for receipt in receipts}
            raise StaleReceipt("stale", results=[{"receipt": each, "status": status[each]} for each in receipts])


def messages(*numbers: int) -> list[wire.PackMessageOut]:
    return [wire.PackMessageOut(0, number, b"", 0, receipt=f"r{number}") for number in numbers]


def leases(broker: Broker, now: list[float]) -> Leases:
    """Return leases of 30 s, without a keeper thread."""
    held = Leases(broker, "g", 30.0, lambda: now[0], 300.0)
    held._keeper = threading.current_thread()
    held._calls.group_leases = True
    return held


def test_when_all_is_given_back_there_is_nothing_to_extend() -> None:
    """Both are due at the same time if a lease lasts 10 s."""
    broker = Broker()
    held = leases(broker, [0.0])
    held.hold(messages(1, 2))
    held._release_waiting()
    held._keep_waiting(5.0)
    assert broker.sent == [("nack", ["r1", "r2"])]


def test_more_leases_than_one_call_takes_are_extended_by_several() -> None:
    broker, now = Broker(), [0.0]
    held = leases(broker, now)
    most = wire.RECEIVE_MESSAGES_MAX
    held.hold(messages(*range(most)))
    held.take(most)
    held._add(messages(*range(most, 2 * most)), 0.0)  # those of a receive that ran ahead
    broker.stale = {"r7", f"r{most + 7}"}
    held._keep_waiting(15.0)
    assert [(verb, len(receipts)) for verb, receipts in broker.sent] == [("extend", most)] * 2
    now[0] = 44.0
    assert len(held.take(most)) == most - 1


def test_a_message_that_came_during_an_extension_is_not_taken_for_extended() -> None:
    broker, now = Broker(), [0.0]
    held = leases(broker, now)
    held.hold(messages(1))
    held.take()

    def arrive() -> None:
        held.finish_handed()
        held.hold(messages(2), 1.0)

    broker.during = arrive
    now[0] = 16.0
    held._keep_waiting(now[0])
    now[0] = 31.0
    assert held.take() == [], "it was leased at 1"


def late(broker: ScriptedBroker, call: Call) -> Reply:
    """The messages are leased, and the answer is lost."""
    broker.work(call)
    raise HangUp


def lost_meanwhile(broker: ScriptedBroker, call: Call) -> Reply:
    """So are their leases."""
    broker.work(call)
    broker.leased.pop("t.0.0.1")
    raise HangUp


@pytest.mark.parametrize("given", [{}, {"manual_ack": True}])
def test_leases_of_an_answer_that_was_repeated_begin_anew(given: dict[str, bool]) -> None:
    """They may be as old as the first try."""
    with ScriptedBroker() as broker:
        broker.shows_groups = True
        broker.fill("t", [b"1", b"2"])
        broker.script("POST", RECEIVE, [late])
        with Consumer("t", group="g", bootstrap=broker.url, **given) as consumer:  # type: ignore[arg-type]
            assert [message.value for message in consumer.poll(30, 10)] == [b"1", b"2"]
            assert [call.json()["receipts"] for call in broker.calls_of("POST", EXTEND)] == [["t.0.0.1", "t.0.1.1"]]


def test_a_lease_that_ended_before_the_repeated_answer_is_not_handed_out() -> None:
    with ScriptedBroker() as broker:
        broker.shows_groups = True
        broker.fill("t", [b"1", b"2"])
        broker.script("POST", RECEIVE, [lost_meanwhile])
        with Consumer("t", group="g", bootstrap=broker.url) as consumer:
            assert [message.value for message in consumer.poll(30, 10)] == [b"2"]


def test_an_answer_at_the_first_try_costs_no_extension() -> None:
    with ScriptedBroker() as broker:
        broker.shows_groups = True
        broker.fill("t", [b"1"])
        with Consumer("t", group="g", bootstrap=broker.url) as consumer:
            assert [message.value for message in consumer.poll(30)] == [b"1"]
        assert broker.calls_of("POST", EXTEND) == []


# --- asyncio: the messages of a receive whose caller was cancelled ---------------------------------------------------


async def cancelled_receive(consumer: AsyncConsumer, broker: ScriptedBroker) -> None:
    """Have a receive bring messages that nobody waits for."""
    broker.fill("t", [])
    receiving = asyncio.create_task(consumer.poll(30))
    await until(lambda: broker.calls_of("POST", RECEIVE))
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    broker.fill("t", [b"1", b"2"])
    await until(lambda: len(broker.leased) == 2)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - the broker's thread makes it true
            await asyncio.sleep(0.005)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> ScriptedBroker:
    broker = ScriptedBroker()
    broker.shows_groups = True
    return broker


@pytest.mark.parametrize("manual_ack", [False, True])
def test_messages_of_a_cancelled_receive_are_renewed(broker: ScriptedBroker, manual_ack: bool) -> None:
    async def test() -> None:
        async with AsyncConsumer(
            "t", group="g", bootstrap=broker.url, manual_ack=manual_ack, visibility_timeout_s=0.5
        ) as consumer:
            await cancelled_receive(consumer, broker)
            await until(lambda: broker.calls_of("POST", EXTEND))
            assert broker.calls_of("POST", EXTEND)[0].json()["receipts"] == ["t.0.0.1", "t.0.1.1"]

    with broker:
        asyncio.run(test())


@pytest.mark.parametrize("manual_ack", [False, True])
def test_messages_of_a_cancelled_receive_go_back_uncounted(
    broker: ScriptedBroker, manual_ack: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portalmq.consumers.lease.HOLD_BACK_S_MAX", 0.05)

    async def test() -> None:
        async with AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=manual_ack) as consumer:
            await cancelled_receive(consumer, broker)
            await until(lambda: broker.calls_of("POST", NACK))
            given_back = broker.calls_of("POST", NACK)[0].json()
            assert (given_back["receipts"], given_back["unseen"]) == (["t.0.0.1", "t.0.1.1"], True)
            [first] = await consumer.poll(30, 1)
            assert (first.value, first.delivery_count) == (b"1", 2)

    with broker:
        asyncio.run(test())


def test_messages_of_a_cancelled_receive_go_back_uncounted_at_close(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portalmq.consumers.lease.HOLD_BACK_S_MAX", AN_HOUR_S)

    async def test() -> None:
        async with AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=True) as consumer:
            await cancelled_receive(consumer, broker)

    with broker:
        asyncio.run(test())
        assert [call.json()["unseen"] for call in broker.calls_of("POST", NACK)] == [True]
