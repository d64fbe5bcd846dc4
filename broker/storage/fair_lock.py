"""A native lock, invisible to gevent.

Under gevent's monkey patching a waiting `threading.Lock` switches greenlets, and would let other code run in the middle
of a read on the event loop. This lock blocks the whole thread instead, for the few milliseconds that it takes. It is
made of queues with one token: their C implementation is the one primitive that gevent does not patch.

A waiting thread holds the entry, so a thread that releases the lock and wants it back at once cannot overtake it. With
one token alone, an event loop busy with reads kept a writer waiting for minutes.
"""

from __future__ import annotations

from _queue import Empty, SimpleQueue


class FairLock:
    """A native, non-reentrant, fair lock: `with lock: ...`."""

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
        """Acquire the lock if it is free and no thread waits for it. After True, call `__exit__`."""
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
