"""The thread that sends a batch: the one that waits for it, where that is enough."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from types import FrameType
from typing import Any

import pytest
from support.cluster import wait_until
from support.scripted_broker import ScriptedBroker

from portalmq import Producer


def senders_of(producer: Producer) -> list[str]:
    """Return the names of the threads that send batches from now on."""
    names: list[str] = []
    send_batch = producer._batch_sender.send_batch

    def noted(*arguments: Any) -> float | None:
        names.append(threading.current_thread().name)
        return send_batch(*arguments)

    producer._batch_sender.send_batch = noted  # type: ignore[method-assign]
    return names


def test_a_flush_sends_a_single_batch_itself() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=3_600_000) as producer:
        names = senders_of(producer)
        futures = [producer.send("t", b"1") for _ in range(3)]
        producer.flush()
        assert all(future.done() for future in futures)
        assert names == [threading.current_thread().name]


def test_a_flush_leaves_several_batches_to_the_senders() -> None:
    with ScriptedBroker(partitions=3) as broker, Producer(broker.url, linger_ms=3_600_000) as producer:
        names = senders_of(producer)
        futures = [producer.send("t", b"1", partition=partition) for partition in range(3)]
        producer.flush()
        assert all(future.done() for future in futures)
        assert names == ["portalmq-sender"] * 3


@pytest.mark.parametrize("linger_ms", [0, 5, 1000])
def test_awaited_messages_are_sent_by_the_threads_that_await_them(linger_ms: float) -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=linger_ms) as producer:
        producer.send("t", b"0").result(60)
        wait_until(lambda: producer._senders.keeps_time, "the sender is idle")
        producer._awaited_at = time.monotonic()
        names = senders_of(producer)
        rings: list[None] = []
        producer._senders.alarm.ring = lambda: rings.append(None)  # type: ignore[method-assign]
        producer._senders.alarm.set = lambda at: None  # type: ignore[method-assign]
        for _ in range(200):
            assert producer.send("t", b"1").result(60).offset > 0
        del producer._senders.alarm.ring, producer._senders.alarm.set
        assert names == [threading.current_thread().name] * 200
        assert rings == [], "no other thread is woken"


class Interrupted(Exception):
    """Raised by a signal handler of the program."""


def test_a_flush_that_is_interrupted_leaves_its_batch_to_a_sender() -> None:
    """The request may have been applied, so it is repeated under the same stamp."""
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=3_600_000) as producer:
        producer.send("t", b"0")
        producer.flush()
        post, stamps = producer._batch_sender._post, []

        async def interrupted(lane: Any, batch: Any, deadline: float) -> Any:
            produced = await post(lane, batch, deadline)
            stamps.append((threading.current_thread().name, lane.identity, lane.next_sequence))
            if len(stamps) == 1:
                raise Interrupted
            return produced

        producer._batch_sender._post = interrupted  # type: ignore[method-assign]
        future = producer.send("t", b"1")
        with pytest.raises(Interrupted):
            producer.flush()
        assert future.result(60).offset >= 0
        (first, *mine), (second, *its) = stamps
        assert (first, second) == (threading.current_thread().name, "portalmq-sender")
        assert mine == its


class _Interrupts:
    """Raises Interrupted in this thread at the `nth` place in the producer's code where a signal handler may run, after
    a batch was about to be sent. CPython runs handlers when a function begins, and after calls of built-in ones."""

    def __init__(self, nth: int) -> None:
        self.left = nth
        self._begun = False

    def __enter__(self) -> None:
        sys.setprofile(self._at)

    def __exit__(self, *fault: object) -> None:
        sys.setprofile(None)

    def _at(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.endswith(SENDING_FILES):
            return
        self._begun = self._begun or code.co_name == "_hurry"
        if self._begun and code.co_name != "__del__":
            self.left -= 1
            if self.left == 0:
                sys.setprofile(None)
                raise Interrupted


SENDING_FILES = ("producer.py", "batch_sender.py", "batching.py", "senders.py", "partitions.py")


def test_a_flush_that_is_interrupted_anywhere_neither_loses_nor_repeats_a_message() -> None:
    for nth in itertools.count(1):
        interrupts = _Interrupts(nth)
        with ScriptedBroker() as broker, Producer(broker.url, linger_ms=3_600_000) as producer:
            producer.send("t", b"first").result(60)
            future = producer.send("t", b"interrupted")
            heard: list[Any] = []
            future.add_done_callback(heard.append)
            with contextlib.suppress(Interrupted), interrupts:
                producer.flush()
            producer.send("t", b"last")
            producer.flush(60)
            assert future.result(60).offset == 1, f"interrupted at place {nth}"
            assert heard == [future]
            assert broker.values("t") == [b"first", b"interrupted", b"last"], f"interrupted at place {nth}"
            assert producer._buffered_messages == producer._buffered_bytes == 0
        if interrupts.left > 0:
            break
    assert nth > 20, "some places were found"
