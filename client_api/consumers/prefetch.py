"""How many messages a consumer fetches at once: what it handles in a second, so that others get the rest.

The first fetch is a guess; each later one goes by how long the messages of the one before were handled. What a wrong
guess holds back while one message takes long, the keeper of the leases gives to others (see lease.py).
"""

from __future__ import annotations

from collections.abc import Callable

FIRST_MESSAGES = 10
AHEAD_S = 1.0


class Prefetch:
    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._next = min(FIRST_MESSAGES, most)
        self._count = 0
        self._received_at = 0.0

    def wanted(self) -> int:
        """How many to fetch now that those of the latest fetch are handled."""
        if self._count:
            took_s = self._clock() - self._received_at
            fit = self._most if took_s <= 0 else int(min(AHEAD_S * self._count / took_s, self._most))
            self._next, self._count = max(1, fit), 0
        return self._next

    def received(self, count: int) -> None:
        self._count, self._received_at = count, self._clock()
