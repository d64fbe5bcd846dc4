"""Idle senders: a sender that wakes for a message sends it, even while others sleep."""

from __future__ import annotations

import threading
import time

from support.scripted_broker import ScriptedBroker

from portalmq import Producer


def rest(producer: Producer) -> None:
    """Wait until every sender sleeps without a timeout."""
    deadline = time.monotonic() + 20
    nudge = threading.Event()
    while True:
        with producer._lock:
            if producer._has_watch and producer._sleeps_unbounded and producer._resting == len(producer._senders):
                return
        assert time.monotonic() < deadline, "the senders never came to rest"
        nudge.wait(0.005)


def test_a_message_after_an_idle_time_is_sent_without_reading_its_future() -> None:
    """Two senders: the one that keeps the time sleeps without a limit, and the other one wakes first."""
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=2) as producer:
        for topic in ("one", "two"):
            producer.send(topic, b"first").result(10)
        pair = [producer.send(topic, b"both at once") for topic in ("one", "two")]
        producer.flush(10)
        assert all(future.done() for future in pair)
        assert len(producer._senders) == 2
        for number in range(5):
            rest(producer)
            acknowledged = threading.Event()
            producer.send("one", b"%d" % number).add_done_callback(lambda _, event=acknowledged: event.set())
            assert acknowledged.wait(20), f"message {number} was never sent"
