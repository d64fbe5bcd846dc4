"""One thread at a time, for threads that gevent knows nothing of.

Under gevent's monkey patching a `threading.Lock` switches greenlets when it waits, and so would let other code run in
the middle of a read on the event loop. A Turn blocks the whole thread instead, for the few milliseconds that it takes.
It is a queue with one token: the C implementation is the one primitive that gevent leaves alone.
"""

from __future__ import annotations

from _queue import SimpleQueue


class Turn:
    """A native, non-reentrant lock: `with turn: ...`."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token: SimpleQueue[None] = SimpleQueue()
        self._token.put(None)

    def __enter__(self) -> None:
        self._token.get()

    def __exit__(self, *exc_info: object) -> None:
        self._token.put(None)
