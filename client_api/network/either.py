"""One text for two ways to wait: coroutines whose I/O blocks the thread, or suspends them in an event loop.

What clients decide (where a call goes, when it is repeated, which leases are extended) is written once, as coroutines.
The synchronous classes give them I/O that blocks, and run them with `finish`; the asyncio classes await them.

    Consumer --finish--> Receiver.next_messages() <--await-- AsyncConsumer
                              | await settled(transport.call(…))
                 Transport (blocks)   or   LoopTransport (suspends)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any, Protocol, TypeAlias, TypeVar, cast

T = TypeVar("T")

Either: TypeAlias = T | Coroutine[Any, Any, T]
Work = Callable[[], Coroutine[Any, Any, None]]


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine whose I/O blocks to its end, in this thread, and return its result."""
    try:
        work.send(None)
    except StopIteration as ended:
        return cast(T, ended.value)
    work.close()
    raise RuntimeError("this would wait in an event loop, and none runs it")


async def settled(given: Either[T]) -> T:
    """Return a value, or that of a coroutine."""
    return cast(T, await given if type(given) is CoroutineType else given)


class Condition(Protocol):
    """A wait, under a lock that the caller holds once, for what it guards to change."""

    def notify_all(self) -> None: ...
    async def wait(self, timeout_s: float | None) -> None: ...
    async def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool: ...


class Mutex(Protocol):
    """A lock that is held while calls are made. Not re-entrant."""

    async def acquire(self, timeout_s: float | None = None) -> bool: ...
    def release(self) -> None: ...
    async def __aenter__(self) -> object: ...
    async def __aexit__(self, *fault: Any) -> None: ...


class Waits(Protocol):
    """How one client waits, and what runs beside it."""

    def condition(self, lock: threading.RLock) -> Condition: ...
    def mutex(self) -> Mutex: ...
    def spawn(self, name: str, work: Work) -> Any:
        """Run it beside the caller: a daemon thread, or a task."""


class ThreadCondition:
    def __init__(self, lock: threading.RLock) -> None:
        self._condition = threading.Condition(lock)
        self.notify_all = self._condition.notify_all

    async def wait(self, timeout_s: float | None) -> None:
        self._condition.wait(timeout_s)

    async def wait_for(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        return self._condition.wait_for(is_so, timeout_s)


class ThreadMutex:
    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close a client during a call
        self.release = self._lock.release

    async def acquire(self, timeout_s: float | None = None) -> bool:
        return self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s)

    async def __aenter__(self) -> ThreadMutex:
        self._lock.acquire()
        return self

    async def __aexit__(self, *fault: Any) -> None:
        self._lock.release()


class ThreadWaits:
    """Waits that block the thread."""

    def condition(self, lock: threading.RLock) -> Condition:
        return ThreadCondition(lock)

    def mutex(self) -> Mutex:
        return ThreadMutex()

    def spawn(self, name: str, work: Work) -> threading.Thread:
        thread = threading.Thread(target=lambda: finish(work()), name=name, daemon=True)
        thread.start()
        return thread


THREADS = ThreadWaits()
