"""Short pieces of work on greenlets that are used again.

gevent.spawn costs about 14 microseconds: it keeps a stack trace of the caller, and CPython maps and unmaps memory for
the frames of each new greenlet. A greenlet that was kept costs 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gevent import GreenletExit, get_hub, spawn
from gevent.hub import Waiter

IDLE_MAX = 16

Work = Callable[[], object]
# Work that begins in the next turn: the callback that starts it, and the idle greenlet that it is for.
Start = tuple[Any, "Waiter[Work]"]


class KeptGreenlets:
    """Greenlets of one event loop, of which up to IDLE_MAX are kept when their work is done."""

    def __init__(self) -> None:
        self._idle: list[Waiter[Work]] = []
        self._is_closed = False

    def close(self) -> None:
        """End the idle greenlets; the others end with their work."""
        self._is_closed = True
        while self._idle:
            get_hub().loop.run_callback(self._idle.pop().throw, GreenletExit)

    def run(self, work: Work) -> Start | None:
        """Start the work in the next turn of the event loop. Its errors end its greenlet, and are logged by gevent.
        Return what `cancel` takes; None if it cannot be cancelled."""
        if not self._idle:
            spawn(self._run, [work])
            return None
        waiter = self._idle.pop()
        return get_hub().loop.run_callback(waiter.switch, work), waiter

    def cancel(self, start: Start) -> bool:
        """Cancel work; return False if it has begun."""
        callback, waiter = start
        if not callback.pending:
            return False
        callback.stop()
        self._idle.append(waiter)
        return True

    def _run(self, first: list[Work]) -> None:
        work = first.pop()  # gevent keeps what a greenlet is spawned with as long as the greenlet
        while True:
            work()
            if self._is_closed or len(self._idle) >= IDLE_MAX:
                return
            waiter: Waiter[Work] = Waiter()
            self._idle.append(waiter)
            del work
            work = waiter.get()
