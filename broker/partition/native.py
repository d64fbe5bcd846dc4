"""Blocking work on native threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from gevent import get_hub
from gevent.hub import Waiter
from gevent.monkey import get_original

from portalmq.compression import content_size, values_of

P = ParamSpec("P")
T = TypeVar("T")

# Values of this size are decompressed in a quarter of a millisecond: a change to another thread and back takes as long.
LARGE_VALUES_BYTES = 256 * 1024


_start_thread: Any = get_original("_thread", "start_new_thread")
_Queue: Any = get_original("queue", "SimpleQueue")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class NativeThreads:
    """Up to `threads_max` native threads for blocking work of one event loop. Each is started when it is needed first.

    A call here and back takes two thirds of the processor time that it takes in gevent's ThreadPool, which makes a
    watcher for each call and counts its threads after each.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._threads = self._pending = 0
        self._work: SimpleQueue[tuple[Any, ...]] = _Queue()
        self._results: deque[tuple[Waiter[Any], bool, Any]] = deque()
        self._ready: Any = None

    def apply(self, work: Callable[..., T], arguments: tuple[Any, ...] = (), named: Mapping[str, Any] = _NOTHING) -> T:
        """Return the result of `work`, or raise its error. Other greenlets run until then."""
        hub = get_hub()
        if self._ready is None:
            self._ready = hub.loop.async_()
        if not self._pending:
            self._ready.start(self._deliver)  # only now: an idle watcher would keep the event loop from ending
        self._pending += 1
        if self._threads < min(self._pending, self._threads_max):
            self._threads += 1
            _start_thread(self._run, ())
        waiter: Waiter[Any] = Waiter(hub)
        self._work.put((work, arguments, named, waiter))
        has_result, result = waiter.get()
        if has_result:
            return result  # type: ignore[no-any-return]
        raise result

    def _run(self) -> None:
        while True:
            work, arguments, named, waiter = self._work.get()
            try:
                self._results.append((waiter, True, work(*arguments, **named)))
            except BaseException as fault:  # noqa: BLE001 - it is raised in the greenlet that waits
                self._results.append((waiter, False, fault))
            del work, arguments, named, waiter
            self._ready.send()

    def _deliver(self) -> None:
        while self._results:
            waiter, has_result, result = self._results.popleft()
            self._pending -= 1
            if not self._pending:
                self._ready.stop()
            waiter.switch((has_result, result))


def attempt(pool: NativeThreads, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T | Exception:
    """Return the result of `work` on a native thread, or its error."""
    try:
        return pool.apply(work, arguments, more)
    except Exception as error:  # noqa: BLE001
        return error


def decompressed(data: bytes, count: int, bytes_max: int | None = None) -> list[bytes]:
    """Call compression.values_of, on a native thread where it takes long."""
    if content_size(data) < LARGE_VALUES_BYTES:
        return values_of(data, count, bytes_max)
    found = get_hub().threadpool.apply(_values_or_fault, (data, count, bytes_max))
    if isinstance(found, Exception):
        raise found
    return found  # type: ignore[no-any-return]


def _values_or_fault(*arguments: Any) -> list[bytes] | Exception:
    """Return an error instead of raising it: gevent prints an error that leaves one of its threads."""
    try:
        return values_of(*arguments)
    except Exception as error:  # noqa: BLE001
        return error
