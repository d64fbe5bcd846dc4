"""Idle senders: one keeps the time, and a message that nobody awaits is sent in time, even while others rest."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from support.cluster import wait_until
from support.forked import in_child
from support.scripted_broker import ScriptedBroker

from portalmq import Producer
from portalmq.producers.alarm import Alarm, PlainAlarm
from portalmq.producers.senders import SENDERS_MAX, SenderThreads

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it needs Linux")
ALARMS = [pytest.param(alarm, id=alarm.__name__) for alarm in (Alarm, PlainAlarm)]


def rest(producer: Producer) -> None:
    """Wait until every sender is idle."""

    def is_idle() -> bool:
        with producer._lock:
            return producer._senders.keeps_time and producer._senders.resting == len(producer._senders.threads) - 1

    wait_until(is_idle, "all senders are idle")


@pytest.mark.parametrize("linger_ms", [0, 2])
@pytest.mark.parametrize("alarm", ALARMS)
def test_a_message_after_an_idle_time_is_sent_without_reading_its_future(
    alarm: type[Alarm | PlainAlarm], linger_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two senders, of which one rests; the message before was awaited, or not."""
    monkeypatch.setattr("portalmq.producers.senders.new_alarm", alarm)
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=linger_ms) as producer:
        for topic in ("one", "two"):
            producer.send(topic, b"first").result(10)
        pair = [producer.send(topic, b"both at once") for topic in ("one", "two")]
        producer.flush(10)
        assert all(future.done() for future in pair)
        for number in range(6):
            rest(producer)
            if number % 2:
                producer.send("two", b"awaited").result(20)
            acknowledged = threading.Event()
            producer.send("one", b"%d" % number).add_done_callback(lambda _, event=acknowledged: event.set())
            assert acknowledged.wait(20), f"message {number} was never sent"


@pytest.mark.parametrize("alarm", ALARMS)
def test_messages_of_many_partitions_that_nobody_awaits_are_all_sent(
    alarm: type[Alarm | PlainAlarm], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portalmq.producers.senders.new_alarm", alarm)
    with ScriptedBroker(12) as broker, Producer(broker.url, linger_ms=1) as producer:
        for number in range(300):
            producer.send("t", b"%d" % number, partition=number * 7 % 12)
            if number % 50 == 0:
                producer.send("t", b"awaited", partition=number % 12).result(20)
        broker.wait_for(lambda: sum(map(len, broker.topics["t"])) == 306)


@pytest.mark.parametrize("alarm", ALARMS)
def test_a_closed_producer_leaves_no_threads(alarm: type[Alarm | PlainAlarm], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.producers.senders.new_alarm", alarm)
    with ScriptedBroker(4) as broker:
        producer = Producer(broker.url, linger_ms=0)
        for number in range(40):
            producer.send("t", b"", partition=number % 4)
        senders = list(producer._senders.threads)
        assert senders
        producer.close()
        wait_until(lambda: not any(sender.is_alive() for sender in senders), "the senders have ended")
        assert producer._senders.threads == []


def descriptors(producer: Producer) -> list[str]:
    alarm = producer._senders.alarm
    assert isinstance(alarm, Alarm)
    return [f"/proc/self/fd/{each}" for each in (alarm._timer, alarm._event)]


@needs_linux
def test_a_producer_has_descriptors_of_an_alarm_only_while_it_sends() -> None:
    with ScriptedBroker() as broker:
        producer = Producer(broker.url)
        assert isinstance(producer._senders.alarm, PlainAlarm)
        producer.send("t", b"").result(30)
        mine = descriptors(producer)
        assert all(map(os.path.exists, mine))

        def child() -> list[bool]:
            left = any(map(os.path.exists, mine))
            producer.send("t", b"").result(30)
            its = descriptors(producer)
            had = all(map(os.path.exists, its))
            producer.close()
            return [left, had, any(map(os.path.exists, its))]

        assert in_child(child) == [False, True, False]
        producer.send("t", b"").result(30)
        assert descriptors(producer) == mine
        producer.close()
        assert not any(map(os.path.exists, mine))


@needs_linux
@pytest.mark.parametrize("linger_ms", [0, 5])
def test_a_producer_whose_alarm_was_closed_under_it_goes_on_without(linger_ms: float) -> None:
    """As in a program that closes all descriptors when it becomes a daemon."""
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=linger_ms) as producer:
        producer.send("t", b"").result(30)
        rest(producer)
        alarm = producer._senders.alarm
        assert isinstance(alarm, Alarm)
        bell = os.dup(alarm._event)
        null = os.open(os.devnull, os.O_RDONLY)
        with producer._lock:
            for each in (alarm._timer, alarm._event):
                os.dup2(null, each)  # closed, and used again: by nobody who is disturbed
            producer._awaited_at = None
        for _ in range(3):
            producer.send("t", b"")
        broker.wait_for(lambda: len(broker.topics["t"][0]) == 4)
        assert isinstance(producer._senders.alarm, PlainAlarm)
        os.eventfd_write(bell, 1)
        os.close(bell)
        os.close(null)
        rest(producer)  # also the thread that waited for the old one


@pytest.mark.parametrize("fails", ["set", "wait"])
def test_a_sender_whose_alarm_fails_rests_with_another(fails: str) -> None:
    def fail(*arguments: float) -> None:
        raise OSError("closed")

    lock = threading.RLock()
    senders = SenderThreads(lock, lambda: None)
    setattr(senders.alarm, fails, fail)
    failing = senders.alarm
    with lock:
        senders.rest(1_000.0)
        assert senders.alarm is not failing
        assert not senders.keeps_time


def test_a_sender_that_has_ended_is_replaced() -> None:
    lock, ran = threading.RLock(), []
    senders = SenderThreads(lock, lambda: ran.append(None))
    for number in range(1, SENDERS_MAX + 2):
        with lock:
            senders.wake()
        wait_until(lambda number=number: len(ran) == number and not senders.threads, "it has ended")  # type: ignore[misc]
    senders.alarm.close()
