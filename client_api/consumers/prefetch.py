"""The receive that is under way while messages are handled: whether it is worth it, and who reads its answer.

    answer of a receive --> the next one is sent --> messages are handled --> its answer is read, usually at once

So the round trip, and the commits of the broker, overlap with the handling, without another thread. The answer is read
once, by the thread that needs it first: the consumer's, the keeper of the leases, or the one that closes the consumer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from portalmq import wire
from portalmq.network.either import Either

FIRST_MESSAGES = 10
# The longest time that messages may be expected to wait for the ones before them.
AHEAD_S = 1.0
# Receives that are not run ahead of after one that found nothing; doubled each time.
PASSED_OVER_MAX = 64


class Prefetch:
    """The number of messages that a consumer fetches at once, at most `most`: those it handles in a second, so that
    others get the rest.

    The first fetch is a guess; later ones follow from how long the previous messages were handled. Messages that a
    wrong guess holds back behind a slow one are returned to the group (see lease.py).
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._next = min(FIRST_MESSAGES, most)
        self._count = 0
        self._received_at = 0.0
        self._each_s = math.inf
        self._passed_over = self._to_pass_over = 0

    def wanted(self) -> int:
        """Return how many to fetch, now that the messages of the latest fetch are handled."""
        if self._count:
            took_s = self._clock() - self._received_at
            self._each_s = took_s / self._count
            fit = self._most if took_s <= 0 else int(min(AHEAD_S * self._count / took_s, self._most))
            self._next, self._count = max(1, fit), 0
        return self._next

    def received(self, count: int) -> None:
        self._count, self._received_at = count, self._clock()

    def runs_ahead(self, within_s: float) -> bool:
        """Return whether to fetch more while the messages just received are handled: if that takes at most
        `within_s`, by the time that the ones before took."""
        if not self._count or self._count * self._each_s > within_s:
            return False
        self._passed_over += 1
        return self._passed_over > self._to_pass_over

    def came_ahead(self, count: int) -> None:
        """Note how many messages a receive found that ran ahead. None are usual where messages are rare, or wait for
        earlier ones of their key: then it would be asked twice for each."""
        self._passed_over = 0
        self._to_pass_over = 0 if count else min(2 * self._to_pass_over or 1, PASSED_OVER_MAX)


class Ahead(NamedTuple):
    """A receive under way. `read` waits so many seconds for its answer (None: as for any call), and returns it. Raises
    PortalMQError."""

    read: Callable[[float | None], Either[wire.PackReceived]]
    sent_at: float
