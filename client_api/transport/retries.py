"""Retries: which errors allow one, and how long to pause before it."""

from __future__ import annotations

from collections.abc import Callable

from portalmq.errors import PortalMQError, Unavailable
from portalmq.transport import system_random

RETRY_AFTER_S_MAX = 30.0


class Backoff:
    """Exponential pauses with jitter: 20 ms, doubled up to 100 ms for the first tries (a new leader is elected soon),
    and up to 1 s after those, each reduced by up to a half (so that clients that failed together do not return
    together). A Retry-After is honoured up to RETRY_AFTER_S_MAX."""

    FIRST_S = 0.02
    SOON_S = 0.1
    SOON_TRIES = 30
    MAX_S = 1.0

    def __init__(self, chance: Callable[[], float] = system_random.fraction) -> None:
        self._chance = chance
        self._full_s = self.FIRST_S
        self._tries = 0

    def next_s(self, retry_after_s: float | None = None) -> float:
        pause = self._full_s * (0.5 + 0.5 * self._chance())
        self._tries += 1
        self._full_s = min(self._full_s * 2, self.SOON_S if self._tries < self.SOON_TRIES else self.MAX_S)
        return max(pause, min(retry_after_s or 0.0, RETRY_AFTER_S_MAX))


class DeadlinePassed(Unavailable):
    """No time was left for a try. It says nothing about earlier tries."""


def may_repeat(error: PortalMQError, repeatable: bool) -> bool:
    """Return True if a retry may help and cannot have the effect twice."""
    return error.retryable and (repeatable or error.outcome == "not_applied")
