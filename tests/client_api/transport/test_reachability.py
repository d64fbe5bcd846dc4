"""A client whose brokers do not answer reports it in time, and in the log."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
from support.ports import kept_port, number_of
from support.scripted_broker import ScriptedBroker, hold, lose_answer, refuse

from portalmq import Admin, AsyncConsumer, AsyncProducer, Consumer, Lock, Producer, Unavailable
from portalmq.lock import REACH_TIMEOUT_S
from portalmq.network.connection import Address, HttpAnswer
from portalmq.transport.reachability import FIRST_CONTACT_S, SILENT_S_MAX, WARN_AFTER_S, WARN_EVERY_S, Reachability
from portalmq.transport.request import LONG_POLL_GRACE_S, Request
from portalmq.transport.transport import Transport

AN_HOUR_S = 3_600.0
ONE, TWO = Address("http", "one", 1), Address("http", "two", 1)
RECEIVE = "/v1/groups/g/receive"
ACK = "/v1/groups/g/ack"


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of a port without a listener."""
    with closing(kept_port()) as place:
        yield f"http://127.0.0.1:{number_of(place)}"


def nobody_instead_of(broker: ScriptedBroker) -> closing[socket.socket]:
    """Reserve the port, so that no other test's server gets it."""
    return closing(kept_port(int(broker.url.rpartition(":")[2])))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit that the caller does not give is an hour."""
    for name in (
        "transport.reachability.FIRST_CONTACT_S", "streams.member.FIRST_CONTACT_S", "consumers.receiver.CALL_TIMEOUT_S",
        "streams.member.CALL_TIMEOUT_S",
        "transport.transport.CALL_TIMEOUT_S", "lock.REACH_TIMEOUT_S",
    ):  # fmt: skip
        monkeypatch.setattr(f"portalmq.{name}", AN_HOUR_S)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first contact fails at once."""
    for name in ("transport.reachability.FIRST_CONTACT_S", "streams.member.FIRST_CONTACT_S"):
        monkeypatch.setattr(f"portalmq.{name}", 0.05)


# --- given time limits -----------------------------------------------------------------------------------------------


def poll(url: str, mode: str) -> object:
    with Consumer("t", group="g", bootstrap=url, mode=mode) as consumer:  # type: ignore[arg-type]
        return consumer.poll(0.05)


def iterate(url: str, mode: str) -> object:
    with Consumer("t", group="g", bootstrap=url, mode=mode, idle_timeout_s=0.05) as consumer:  # type: ignore[arg-type]
        return list(consumer)


def poll_async(url: str, mode: str) -> object:
    async def use() -> object:
        async with AsyncConsumer("t", group="g", bootstrap=url, mode=mode) as consumer:  # type: ignore[arg-type]
            return await consumer.poll(0.05)

    return asyncio.run(use())


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("use", [poll, iterate, poll_async])
@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_consumer_that_reaches_no_broker_raises_in_time(
    use: Callable[[str, str], object], mode: str, nobody: str
) -> None:
    told = None
    while told is None:  # a member's thread may make its first try after the end of a short poll
        try:
            assert use(nobody, mode) == []
        except Unavailable as error:
            told = str(error)
    assert "no broker answers at" in told


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("delivery", ["at_most_once", "exactly_once"])
def test_settling_the_group_first_counts_to_the_timeout(delivery: str, nobody: str) -> None:
    with Consumer("t", bootstrap=nobody, delivery=delivery) as consumer, pytest.raises(Unavailable):  # type: ignore[arg-type]
        consumer.poll(0.05)


def try_timeouts(monkeypatch: pytest.MonkeyPatch, transport: Transport) -> list[float]:
    """Record the time limits of the transport's requests from now on."""
    noted: list[float] = []
    attempt = transport.calls.attempt

    async def note(request: Request, deadline: float, **options: bool) -> HttpAnswer:
        noted.append(request.try_timeout_s)
        return await attempt(request, deadline, **options)

    monkeypatch.setattr(transport.calls, "attempt", note)
    return noted


def test_a_poll_that_does_not_wait_gives_a_silent_broker_no_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedBroker() as broker, Consumer("t", bootstrap=broker.url) as consumer:
        consumer.poll(0.01)
        noted = try_timeouts(monkeypatch, consumer._receiving)
        consumer.poll(0)
        assert round(noted[-1]) == LONG_POLL_GRACE_S


def test_a_lock_that_does_not_wait_leaves_time_to_ask_another_broker(
    monkeypatch: pytest.MonkeyPatch, nobody: str
) -> None:
    lock = Lock("a", nobody)
    noted = try_timeouts(monkeypatch, lock._transport)
    with pytest.raises(Unavailable):
        lock.acquire(0)
    assert round(noted[0]) == LONG_POLL_GRACE_S < REACH_TIMEOUT_S


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("timeout_s", [0, 0.05])
def test_a_lock_that_reaches_no_broker_raises_in_time(timeout_s: float, nobody: str) -> None:
    with closing(Lock("l", nobody)) as lock, pytest.raises(Unavailable, match="no broker answers at"):
        lock.acquire(timeout_s)


@pytest.mark.usefixtures("patient")
def test_an_admin_and_a_flush_keep_their_timeouts(nobody: str) -> None:
    with Admin(nobody, timeout_s=0.05) as admin, pytest.raises(Unavailable):
        admin.topics()
    with ScriptedBroker() as broker:
        producer = Producer([broker.url], delivery_timeout_s=AN_HOUR_S)
        producer.send("t", b"x").result(30)
    with nobody_instead_of(broker):
        producer.send("t", b"y")
        with pytest.raises(TimeoutError):
            producer.flush(0.05)
        producer.close(0.05)


@pytest.mark.usefixtures("patient")
def test_a_consumer_whose_broker_fails_later_raises_at_the_end_of_an_iteration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("portalmq.transport.reachability.SILENT_S_MAX", AN_HOUR_S)
    monkeypatch.setattr("portalmq.consumers.lease.ACK_DELAY_S_MAX", AN_HOUR_S)  # no thread retries, even after the test
    monkeypatch.setattr("portalmq.consumers.lease.RELEASE_TIMEOUT_S", 0.05)
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        consumer = Consumer("t", group="g", bootstrap=broker.url, idle_timeout_s=0.05)
        assert next(consumer).value == b"1"
    with nobody_instead_of(broker), consumer:
        with pytest.raises(Unavailable):
            next(consumer)
        assert consumer.poll(0.05) == [], "the program may poll again, and a restarting broker returns soon"


@pytest.mark.usefixtures("patient")
def test_a_poll_raises_when_no_broker_answers_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedBroker() as broker:
        consumer = Consumer("t", group="g", bootstrap=broker.url)
        assert consumer.poll(0) == []
    monkeypatch.setattr("portalmq.transport.reachability.SILENT_S_MAX", 0.01)
    has_said = False
    with nobody_instead_of(broker), consumer:
        while not has_said:
            try:
                assert consumer.poll(0.02) == []
            except Unavailable:
                has_said = True


def test_a_close_does_not_wait_for_acks_that_get_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread retries the acks for minutes, and close() has seconds."""
    monkeypatch.setattr("portalmq.consumers.lease.RELEASE_TIMEOUT_S", 0.05)
    answer = threading.Event()
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        broker.script("POST", ACK, [hold(answer)])
        consumer = Consumer("t", group="g", bootstrap=broker.url)
        next(consumer)
        acking = threading.Thread(target=consumer.commit)
        acking.start()
        broker.wait_for(lambda: broker.calls_of("POST", ACK))
        consumer.close()
        assert acking.is_alive()
        answer.set()
        acking.join(30)


def test_an_iteration_waits_while_a_broker_says_that_leaders_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.consumers.receiver.SILENT_S_MAX", AN_HOUR_S)
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        broker.script("POST", RECEIVE, [refuse(503, "unavailable")] * 3)
        with Consumer("t", group="g", bootstrap=broker.url, idle_timeout_s=0) as consumer:
            assert [message.value for message in consumer] == [b"1"]


# --- messages that an unanswered receive may have leased -------------------------------------------------------------


def test_the_next_poll_repeats_a_receive_without_an_answer() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with Consumer("t", group="g", bootstrap=broker.url) as consumer:
            assert consumer.poll(0, 1)[0].value == b"1"
            broker.fill("t", [b"2"])
            broker.script("POST", RECEIVE, [lose_answer, lose_answer])
            assert consumer.poll(0, 1) == []
            assert consumer.poll(0, 1)[0].value == b"2"
        attempts = [call.json()["attempt_id"] for call in broker.calls_of("POST", RECEIVE)]
        assert len(set(attempts)) == 2


# --- the first contact -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hasty")
def test_a_failed_first_contact_names_a_remedy(nobody: str) -> None:
    told = f"no broker answers at {nobody} .*portalmq dev.*PORTALMQ_URL"
    with Producer(nobody) as producer, pytest.raises(Unavailable, match=told):
        producer.send("t", b"x")
    with Admin(nobody) as admin, pytest.raises(Unavailable, match=told):
        admin.topics()
    with Consumer("t", bootstrap=nobody) as consumer, pytest.raises(Unavailable, match=told):
        next(consumer)
    with Consumer("t", bootstrap=nobody, mode="stream") as consumer, pytest.raises(Unavailable, match=told):
        next(consumer)

    async def use() -> None:
        async with AsyncProducer(nobody) as producer:
            await producer.send("t", b"x")

    with pytest.raises(Unavailable, match=told):
        asyncio.run(use())


def test_after_the_first_contact_a_send_is_tried_for_its_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.transport.reachability.FIRST_CONTACT_S", 0.0)
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", b"1").result(30)
        broker.script("POST", "/v1/topics/t/messages", [refuse(503, "unavailable")] * 3)
        producer.send("t", b"2").result(30)


# --- closed consumers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_closed_consumer_cannot_be_polled_and_its_iteration_is_over(mode: str, nobody: str) -> None:
    consumer = Consumer("t", bootstrap=nobody, mode=mode)  # type: ignore[arg-type]
    consumer.close()
    with pytest.raises(RuntimeError, match="closed"):
        consumer.poll(0)
    assert list(consumer) == []


def test_a_closed_asynchronous_consumer_cannot_be_polled(nobody: str) -> None:
    async def use() -> None:
        consumer = AsyncConsumer("t", bootstrap=nobody)
        await consumer.close()
        with pytest.raises(RuntimeError, match="closed"):
            await consumer.poll(0)

    asyncio.run(use())


# --- the log ---------------------------------------------------------------------------------------------------------


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def reach(time: Time) -> Reachability:
    return Reachability(time)


def refused() -> Unavailable:
    return Unavailable("refused")


def test_an_outage_is_logged_after_a_delay_and_then_rarely(
    reach: Reachability, time: Time, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "portalmq")

    def fail_until(until: float) -> int:
        while time.now < until:
            reach.failed(ONE, [ONE], refused(), time.now)
            time.now += 0.5
        return len(caplog.records)

    assert fail_until(WARN_AFTER_S) == 0
    assert fail_until(WARN_AFTER_S + 1) == 1
    assert "no broker has answered for 2 s" in caplog.text
    assert fail_until(WARN_AFTER_S + WARN_EVERY_S + 1) == 2
    reach.answered()
    assert "a broker answers again, after 33 s" in caplog.text
    assert reach.silent_s == 0


def test_one_broker_that_answers_is_enough(reach: Reachability, time: Time, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(100):
        reach.failed(ONE, [ONE, TWO], refused(), time.now)
        reach.answered()
        reach.failed(ONE, [ONE, TWO], refused(), time.now)
        time.now += 1
    assert (reach.failure, reach.silent_s, caplog.records) == (None, 0.0, [])


def test_an_unknown_cluster_fails_early_and_a_known_one_does_not(reach: Reachability, time: Time) -> None:
    assert reach.limit(100, 3) == 3 + FIRST_CONTACT_S
    reach.failed(ONE, [ONE], refused(), 0)
    assert not reach.may_report_empty()
    reach.failed(ONE, [ONE], Unavailable("no answer", outcome="unknown"), 0)
    assert reach.limit(100, 3) == 100, "a broker accepted the request"
    assert reach.may_report_empty()
    time.now = SILENT_S_MAX
    assert not reach.may_report_empty()
