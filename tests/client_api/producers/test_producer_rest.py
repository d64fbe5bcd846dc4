"""Idle senders: one keeps the time, and a message that nobody awaits is sent in time, even while others rest."""

from __future__ import annotations

import threading

import pytest
from support.cluster import wait_until
from support.scripted_broker import ScriptedBroker

from portalmq import Producer
from portalmq.producers.alarm import Alarm, PlainAlarm

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
        producer.close()
        wait_until(lambda: not any(sender.is_alive() for sender in producer._senders.threads), "the senders have ended")
