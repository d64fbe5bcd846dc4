"""Threads that run blocking calls for an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

from portalmq.network.forking import reset_in_children

T = TypeVar("T")

Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class LoopThreads:
    """Up to `most` threads of one object, for one event loop; started on demand.

    They are daemon threads, unlike those of concurrent.futures: a program that forgets close() must not hang in a
    receive when it ends.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._begin()
        reset_in_children(self)

    def _begin(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.unfinished = 0
        self.close = weakref.finalize(self, _stop_threads, self._jobs, self._threads)
        self.close.atexit = False

    def _reset_in_child(self) -> None:
        """Start afresh in the child of a fork: it has neither the threads nor the event loops that wait for them."""
        was_closed = self.close.detach() is None
        self._begin()
        if was_closed:
            self.close()

    def start(self, do: Callable[[], T]) -> asyncio.Future[T]:
        """Return the future result of `do`, which runs to its end even if the future is cancelled."""
        if not self.close.alive:
            raise RuntimeError("it is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.unfinished += 1
        future.add_done_callback(self._finished)
        self._jobs.put((loop, future, do))
        if len(self._threads) < min(self._most, self.unfinished):
            thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    async def run(self, do: Callable[[], T]) -> T:
        return await asyncio.shield(self.start(do))

    def _finished(self, ended: asyncio.Future[Any]) -> None:
        self.unfinished -= 1
        if not ended.cancelled():
            ended.exception()  # marks it as retrieved: a cancelled waiter never does


def _run_jobs(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        loop, future, do = job
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (do(), None)
        except BaseException as fault:  # noqa: BLE001 - the waiting coroutine raises it
            outcome = (None, fault)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(_set_outcome, future, *outcome)
        del job, future, do, outcome  # otherwise they would live until the next job


def _set_outcome(future: asyncio.Future[Any], result: Any, fault: BaseException | None) -> None:
    if future.done():
        return
    if fault is None:
        future.set_result(result)
    else:
        future.set_exception(fault)


def _stop_threads(jobs: SimpleQueue[Job | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)
