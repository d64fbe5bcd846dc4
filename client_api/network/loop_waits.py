"""The waits of either.py in an asyncio event loop: they suspend the coroutine, and tasks take the place of threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from portalmq.network.either import Condition, Mutex, Work


class LoopCondition:
    """All waits are in one event loop. The caller holds the lock once, and it is free during the wait."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiters: set[asyncio.Future[None]] = set()

    def notify_all(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            _wake(waiter)

    async def wait(self, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(max(0.0, timeout_s), _wake, waiter)
        self._waiters.add(waiter)
        self._lock.release()
        try:
            await waiter
        finally:
            self._lock.acquire()
            self._waiters.discard(waiter)
            if timer is not None:
                timer.cancel()

    async def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while not (holds := is_so()):
            left_s = None if deadline is None else deadline - loop.time()
            if left_s is not None and left_s <= 0:
                break
            await self.wait(left_s)
        return holds


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


async def waited(work: Coroutine[Any, Any, object], within_s: float | None) -> bool:
    """Wait for `work`; return False, and cancel it, after `within_s`."""
    try:
        async with asyncio.timeout(within_s):
            await work
    except TimeoutError:
        return False
    return True


class LoopMutex(asyncio.Lock):
    """A lock of tasks."""

    async def acquire(self, timeout_s: float | None = None) -> bool:  # type: ignore[override]
        return await waited(super().acquire(), timeout_s)


class LoopWaits:
    """Waits that suspend the coroutine."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()  # an event loop refers to its tasks weakly

    def condition(self, lock: threading.RLock) -> Condition:
        return LoopCondition(lock)

    def mutex(self) -> Mutex:
        return LoopMutex()

    def spawn(self, name: str, work: Work) -> Any:
        task = asyncio.get_running_loop().create_task(work(), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
