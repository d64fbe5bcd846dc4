"""Messages that have arrived on a connection and wait for kombu to deliver them.

Readers put them in from their threads. A worker with an event loop learns of them from a pipe, any other program waits
in `drain_events`.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

# A call that delivers one message, and returns False if the message is gone.
Entry = Callable[[], bool]


class Inbox:
    """Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._entries: deque[Entry] = deque()
        self._failure: Exception | None = None
        self._pipe: tuple[int, int] | None = None
        self._is_signalled = False

    def put(self, entries: Sequence[Entry]) -> None:
        """Add entries, all of which the next delivery sees."""
        with self._changed:
            self._entries.extend(entries)
            self._signal()

    def put_first(self, entry: Entry) -> None:
        with self._changed:
            self._entries.appendleft(entry)
            self._signal()

    def withdraw(self, is_withdrawn: Callable[[Entry], bool]) -> list[Entry]:
        """Remove the entries for which this is true, and return them."""
        with self._changed:
            withdrawn: list[Entry] = []
            kept: deque[Entry] = deque()
            for entry in self._entries:
                (withdrawn if is_withdrawn(entry) else kept).append(entry)
            self._entries = kept
            return withdrawn

    def fail(self, error: Exception) -> None:
        """Have the next delivery raise `error`."""
        with self._changed:
            self._failure = error
            self._signal()

    def fileno(self) -> int:
        """Return a descriptor that is readable while something waits."""
        with self._changed:
            if self._pipe is None:
                self._pipe = os.pipe()
                for end in self._pipe:
                    os.set_blocking(end, False)
                if self._entries or self._failure is not None:
                    self._signal()
            return self._pipe[0]

    def _signal(self) -> None:
        self._changed.notify_all()
        if self._pipe is not None and not self._is_signalled:
            self._is_signalled = True
            os.write(self._pipe[1], b"!")

    def deliver(self) -> int:
        """Deliver what waits now, and return how many messages that were. Raises the failure of a reader, if nothing
        waits."""
        with self._changed:
            if self._is_signalled and self._pipe is not None:
                os.read(self._pipe[0], 16)
                self._is_signalled = False
            waiting = len(self._entries)
            if not waiting and self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
        delivered = 0
        try:
            for _ in range(waiting):
                with self._changed:
                    if not self._entries:
                        break
                    entry = self._entries.popleft()
                delivered += entry()
        finally:
            with self._changed:
                if self._entries or self._failure is not None:
                    self._signal()
        return delivered

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something is there. Return False if nothing came in time."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._entries and self._failure is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return False
                self._changed.wait(left)
            return True

    def close(self) -> None:
        with self._changed:
            self._entries.clear()
            pipe, self._pipe = self._pipe, None
            self._is_signalled = False
        for end in pipe or ():
            os.close(end)
