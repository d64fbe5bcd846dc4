"""Leases of messages that a framework handles in its own threads or coroutines: renewed until each is settled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from portalmq.errors import PortalMQError, StaleReceipt
from portalmq.message import Message

_log = logging.getLogger("portalmq.consumer")

HANDLING_S_MAX = 24 * 3600.0


class HeldMessages:
    """Thread-safe. `extend` renews the leases of messages; it is called in a thread of this object, at a third of
    `visibility_timeout_s`, for each message at most `max_handling_s` long."""

    def __init__(
        self,
        extend: Callable[[list[Message]], object],
        visibility_timeout_s: float,
        max_handling_s: float = HANDLING_S_MAX,
    ) -> None:
        self._extend = extend
        self._every_s = visibility_timeout_s / 3
        self._max_handling_s = max_handling_s
        self._lock = threading.Lock()
        self._held: dict[str | None, tuple[Message, float]] = {}
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._held)

    def add(self, messages: Iterable[Message]) -> None:
        until = time.monotonic() + self._max_handling_s
        with self._lock:
            self._held.update({message.receipt: (message, until) for message in messages})
            if self._thread is None and self._held:
                self._thread = threading.Thread(target=self._renew, name="portalmq-held", daemon=True)
                self._thread.start()

    def drop(self, messages: Iterable[Message]) -> None:
        """Renew these no more."""
        with self._lock:
            for message in messages:
                self._held.pop(message.receipt, None)

    def close(self) -> None:
        """Renew none any more: what is not settled comes again when its lease ends."""
        self._closed.set()

    def _renew(self) -> None:
        while not self._closed.wait(self._every_s):
            now = time.monotonic()
            with self._lock:
                held = [message for message, until in self._held.values() if until > now]
            try:
                if held:
                    self._extend(held)
            except StaleReceipt as error:
                _log.warning("a lease was lost while its message was handled: %s", error)
                self.drop(_stale_of(error, held))
            except PortalMQError as error:
                _log.warning("leases were not renewed: %s", error)


def _stale_of(error: StaleReceipt, messages: list[Message]) -> list[Message]:
    """Return the messages whose receipts were refused."""
    results = error.extra.get("results") or []
    stale = {result.get("receipt") for result in results if result.get("status") != "ok"}
    return [message for message in messages if message.receipt in stale]
