"""A worker: all handlers of an app on the threads of one process, from start to a graceful stop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from portalmq.worker.counts import ProcessState
from portalmq.worker.handler import CONCURRENCY, CONCURRENCY_MAX, Handler
from portalmq.worker.runner import Clients, HandlerRunner

log = logging.getLogger("portalmq.worker")

# How often late handlers are looked for.
LOOK_S = 0.1
# How long the last verdicts may take to reach the broker.
SETTLE_WITHIN_S = 10.0


class Program(Clients, Protocol):
    """What a worker needs of an App."""

    @property
    def handlers(self) -> Sequence[Handler]: ...
    def close_producer(self) -> None: ...


class Worker:
    """Handles messages from start() to stop()."""

    def __init__(self, app: Program, concurrency: int = CONCURRENCY, *, process: int = 0) -> None:
        """`concurrency` is that of handlers that name none; `process` is this process's number in metrics."""
        if not app.handlers:
            raise ValueError("the app has no handler: register one with @app.handler(…)")
        if not 1 <= concurrency <= CONCURRENCY_MAX:
            raise ValueError(f"concurrency must be 1 to {CONCURRENCY_MAX}")
        self._app = app
        self._process = process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._ended = threading.Event()
        self._hurried = threading.Event()
        self._is_stopping = False
        self.runners = [
            HandlerRunner(app, handler, handler.concurrency or concurrency, self._event_loop)
            for handler in app.handlers
        ]

    def start(self) -> None:
        threading.Thread(target=self._interrupt_late, name="portalmq-worker-timeouts", daemon=True).start()
        for runner in self.runners:
            runner.start()

    def stop(self, grace_s: float) -> bool:
        """Take no more, let handlers end within `grace_s`, and return the messages of the others to their groups,
        uncounted. Return whether all handlers ended, and the broker has every verdict. A second call has no effect."""
        if self._is_stopping:
            return True
        self._is_stopping = True
        deadline = time.monotonic() + grace_s
        for runner in self.runners:
            runner.take_no_more()
        log.info("stopping: handlers have %g s to end", grace_s)
        _at_once([runner.stop_receiving for runner in self.runners])
        ended = [self._wait_handled(runner, deadline) for runner in self.runners]
        given_back = sum(runner.give_back() for runner in self.runners)
        if given_back:
            log.warning("%d handlers still run: their messages go back to their groups, uncounted", given_back)
        settled = [runner.wait_settled(SETTLE_WITHIN_S) for runner in self.runners]
        self._ended.set()
        self._app.close_producer()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        return all(ended) and all(settled)

    def hurry(self) -> None:
        """End the grace of a stop in another thread."""
        self._hurried.set()

    def _wait_handled(self, runner: HandlerRunner, deadline: float) -> bool:
        while not runner.wait_handled(min(LOOK_S, max(0.0, deadline - time.monotonic()))):
            if self._hurried.is_set() or time.monotonic() >= deadline:
                return False
        return True

    def state(self) -> ProcessState:
        handlers = [runner.counter.now() for runner in self.runners]
        can_receive = [
            runner.is_receiving and each.stuck < each.concurrency
            for runner, each in zip(self.runners, handlers, strict=True)
        ]
        return ProcessState(self._process, all(can_receive) and not self._is_stopping, self._is_stopping, handlers)

    def _interrupt_late(self) -> None:
        while not self._ended.wait(LOOK_S):
            for runner in self.runners:
                runner.interrupt_late()

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop of the async handlers, which runs on a thread of its own."""
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="portalmq-worker-asyncio", daemon=True).start()
            return self._loop


def _at_once(calls: list[Callable[[], None]]) -> None:
    """Make the calls on threads, and return when all have returned."""
    threads = [threading.Thread(target=call, name="portalmq-worker-stop", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
