"""One thread at a time, for threads that gevent knows nothing of.

Under gevent's monkey patching a `threading.Lock` switches greenlets when it waits, and so would let other code run in
the middle of a read on the event loop. A Turn blocks the whole thread instead, for the few milliseconds that it takes.
It is made of queues with one token: their C implementation is the one primitive that gevent leaves alone.

Who waits for the turn stands in the door, so that a thread that gives the turn up and wants it back at once cannot
pass by: with one token alone, an event loop busy with reads kept a writer waiting for minutes.
"""

from __future__ import annotations

from _queue import Empty, SimpleQueue


class FairLock:
    """A native, non-reentrant, fair lock: `with turn: ...`."""

    __slots__ = ("_entry", "_token")

    def __init__(self) -> None:
        self._entry: SimpleQueue[None] = SimpleQueue()
        self._token: SimpleQueue[None] = SimpleQueue()
        self._entry.put(None)
        self._token.put(None)

    def __enter__(self) -> None:
        self._entry.get()
        try:
            self._token.get()
        finally:
            self._entry.put(None)

    def try_acquire(self) -> bool:
        """Take the turn if nobody has it, or waits for it. Who was answered True calls `__exit__`."""
        try:
            self._entry.get_nowait()
        except Empty:
            return False
        try:
            self._token.get_nowait()
        except Empty:
            return False
        finally:
            self._entry.put(None)
        return True

    def __exit__(self, *exc_info: object) -> None:
        self._token.put(None)
