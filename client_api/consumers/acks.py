"""The acks of a consumer that are not confirmed yet.

    add --> gathered --take--> in a receive --arrived--> confirmed
              |  ^                  |
              |  '------ keep_apart '      (a receive without an answer)
              '--flush--> confirmed

Acks travel with the next receive. After a failed one none do, until those that it carried are flushed: a receive would
have to wait for acks that a new leader may not answer yet. Acking twice does no harm.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from portalmq import wire
from portalmq.errors import StaleReceipt


class PendingAcks:
    """Thread-safe under `lock`, which is not held while acks are sent."""

    def __init__(self, lock: threading.RLock, send: Callable[[list[str]], object], clock: Callable[[], float]) -> None:
        self._lock = lock
        self._send = send
        self._clock = clock
        self._gathered: list[str] = []
        self._in_receive: list[str] = []
        self._are_apart = False
        # Held while acks are sent, so that flush() also waits for those that another thread sends.
        self.sending = threading.RLock()
        # When the oldest gathered ack was added, or sent in vain.
        self.since = 0.0

    def __len__(self) -> int:
        """The acks that wait to be sent."""
        return len(self._gathered)

    @property
    def are_in_receive(self) -> bool:
        return bool(self._in_receive)

    def add(self, receipts: Iterable[str]) -> bool:
        """Add acks. Return whether they are the first ones to wait."""
        with self._lock:
            is_first = not self._gathered
            if is_first:
                self.since = self._clock()
            self._gathered += receipts
            return is_first

    def take(self) -> list[str]:
        """Return the acks that travel with the next receive. Follow it by `arrived`, or by `keep_apart`."""
        with self._lock:
            assert not self._in_receive
            if self._are_apart:
                return []
            gathered, most = self._gathered, wire.RECEIVE_MESSAGES_MAX
            self._in_receive, self._gathered = gathered[:most], gathered[most:]
            return self._in_receive

    def arrived(self) -> None:
        """Confirm the acks that the answered receive carried."""
        self._in_receive = []

    def keep_apart(self) -> bool:
        """Gather the acks of a failed receive again, to be flushed. Return whether any wait to be sent."""
        with self._lock:
            self._are_apart = self._are_apart or bool(self._in_receive)
            self._gathered, self._in_receive = self._in_receive + self._gathered, []
            if self._gathered:
                self.since = self._clock()
            return bool(self._gathered)

    def gather_all(self) -> None:
        """Gather also the acks of a receive that may yet be answered."""
        with self._lock:
            self._gathered = self._in_receive + self._gathered

    def flush(self) -> list[str]:
        """Send the gathered acks, and return the stale ones: other consumers have their messages."""
        stale: list[str] = []
        with self.sending:
            with self._lock:
                gathered, self._gathered = self._gathered, []
            for start in range(0, len(gathered), wire.RECEIVE_MESSAGES_MAX):
                receipts = gathered[start : start + wire.RECEIVE_MESSAGES_MAX]
                try:
                    self._send(receipts)
                except StaleReceipt as error:
                    stale += stale_among(error, receipts)
            with self._lock:
                self._are_apart = False
        return stale


def stale_among(error: StaleReceipt, receipts: list[str]) -> set[str]:
    """Return the receipts that an answer refused; all of them if it does not say."""
    results = error.extra.get("results")
    if not isinstance(results, list):
        return set(receipts)
    return {str(result.get("receipt")) for result in results if result.get("status") != "ok"}
