"""The number of messages that a consumer fetches at once: those it handles in a second, so that others get the rest.

The first fetch is a guess; later ones follow from how long the previous messages were handled. Messages that a wrong
guess holds back behind a slow one are returned to the group (see lease.py).
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_MESSAGES = 10
AHEAD_S = 1.0


class Prefetch:
    """Measures how fast a consumer handles messages. `most` bounds the answer."""

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._next = min(FIRST_MESSAGES, most)
        self._count = 0
        self._received_at = 0.0

    def wanted(self) -> int:
        """Return how many to fetch, now that the messages of the latest fetch are handled."""
        if self._count:
            took_s = self._clock() - self._received_at
            fit = self._most if took_s <= 0 else int(min(AHEAD_S * self._count / took_s, self._most))
            self._next, self._count = max(1, fit), 0
        return self._next

    def received(self, count: int) -> None:
        self._count, self._received_at = count, self._clock()
