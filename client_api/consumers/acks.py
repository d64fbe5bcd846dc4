"""The acks of a consumer that are not confirmed yet.

    add --> gathered --take--> in a receive --arrived--> confirmed
              |  ^                  |
              |  '------ keep_apart '      (a receive without an answer)
              '--flush--> confirmed        '--arrived--> untold (the broker names them in a later answer)

Acks travel with the next receive. Its answer need not wait for their commit: then they are untold until an answer names
its attempt. After a failed receive none travel, until those that it carried are flushed: a receive would have to wait
for acks that a new leader may not answer yet. Acking twice does no harm.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from portalmq import wire
from portalmq.errors import PortalMQError, StaleReceipt
from portalmq.network.either import Mutex
from portalmq.transport.retries import may_repeat

# Acks that no answer has named after this time are sent again.
UNTOLD_S_MAX = 2.0


class PendingAcks:
    """Thread-safe under `lock`, which is not held while acks are sent."""

    def __init__(
        self,
        lock: threading.RLock,
        sending: Mutex,
        send: Callable[[list[str]], Coroutine[Any, Any, object]],
        clock: Callable[[], float],
    ) -> None:
        self._lock = lock
        self._send = send
        self._clock = clock
        self._gathered: list[str] = []
        self._in_receive: list[str] = []
        self._attempt_id = ""
        # Acks, and when they were answered, by attempt.
        self._untold: dict[str, tuple[list[str], float]] = {}
        self._are_apart = False
        # The caller of flush() holds it, so that it also waits for those that another one sends.
        self.sending = sending
        # When the oldest gathered ack was added, or sent in vain.
        self.since = 0.0

    def due_at(self, delay_s: float) -> float:
        """When to flush, if no receive takes gathered acks along within `delay_s`, or tells of the untold ones."""
        gathered_at = self.since + delay_s if self._gathered else math.inf
        if not self._untold:
            return gathered_at
        return min(gathered_at, next(iter(self._untold.values()))[1] + UNTOLD_S_MAX)

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

    def take(self, attempt_id: str) -> list[str]:
        """Return the acks that travel with the next receive. Follow it by `arrived`, or by `keep_apart`."""
        with self._lock:
            assert not self._in_receive
            if self._are_apart:
                return []
            self._attempt_id = attempt_id
            gathered, most = self._gathered, wire.RECEIVE_MESSAGES_MAX
            self._in_receive, self._gathered = gathered[:most], gathered[most:]
            return self._in_receive

    def arrived(self, received: wire.PackReceived) -> None:
        """Confirm the acks that an answer says are committed: those that its receive carried, unless they are untold,
        and those of the attempts that it names."""
        with self._lock:
            if received.acks_later and self._in_receive:
                self._untold[self._attempt_id] = self._in_receive, self._clock()
            self._in_receive = []
            for attempt_id in received.acked_attempts:
                self._untold.pop(attempt_id, None)

    def keep_apart(self) -> bool:
        """Gather the acks of a failed receive again, to be flushed. Return whether any wait to be sent."""
        with self._lock:
            self._are_apart = self._are_apart or bool(self._in_receive)
            self.gather_all()
            self._in_receive = []
            if self._gathered:
                self.since = self._clock()
            return bool(self._gathered)

    def gather_all(self) -> None:
        """Gather also the untold acks, and those of a receive that may yet be answered."""
        with self._lock:
            self._gathered = self._take_untold() + self._in_receive + self._gathered

    def _take_untold(self) -> list[str]:
        untold, self._untold = self._untold, {}
        return [receipt for acks, _ in untold.values() for receipt in acks]

    async def flush(self) -> list[str]:
        """Send the gathered and untold acks, and return the stale ones: other consumers have their messages. The caller
        holds `sending`. After an error those that may yet be confirmed are gathered again; acks that were refused for
        good are dropped."""
        stale: list[str] = []
        left: list[str] = []
        try:
            with self._lock:
                left, self._gathered = self._take_untold() + self._gathered, []
            while left:
                receipts = left[: wire.RECEIVE_MESSAGES_MAX]
                try:
                    await self._send(receipts)
                except StaleReceipt as error:
                    stale += stale_among(error, receipts)
                except PortalMQError as error:
                    # Behind the others, which another leader may answer.
                    left += stale_among(error, receipts) if may_repeat(error, repeatable=True) else []
                    del left[: len(receipts)]
                    raise
                del left[: len(receipts)]
        finally:
            with self._lock:
                self._gathered = left + self._gathered
                self._are_apart = bool(left)
                if left:
                    self.since = self._clock()
        return stale


def stale_among(error: PortalMQError, receipts: list[str]) -> set[str]:
    """Return the receipts that an answer refused or did not settle; all of them if it does not say."""
    results = error.extra.get("results")
    if not isinstance(results, list):
        return set(receipts)
    return {str(result.get("receipt")) for result in results if result.get("status") != "ok"}
