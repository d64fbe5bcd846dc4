"""Whether anybody answers a client, for how long nobody has, and when that is to be said.

    never heard --an answer--> heard --nobody answers--> silent --an answer--> heard

A client that never heard of a broker gives up soon: it was told a wrong place, or nothing was started there. One that
has was_reached of one goes on for as long as its caller lets it: that one may be back, or another may lead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from portalmq.errors import Unavailable
from portalmq.network.connection import Address

_log = logging.getLogger("portalmq.client")

FIRST_CONTACT_S = 8.0
WARN_AFTER_S = 2.0
WARN_EVERY_S = 30.0
# How long a poll that comes back empty may hide that nobody answers: a change of leaders is over by then.
SILENT_S_MAX = 10.0


class Reachability:
    """Thread-safe as far as it matters: each step sets single values, and the latest one counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A broker took a request. What became of that is another matter.
        self.was_reached = False
        self.failure: Unavailable | None = None
        self._silent: set[Address | None] = set()
        self._silent_since = 0.0
        self._warn_at = 0.0

    def answered(self) -> None:
        self.was_reached = True
        if self._silent:
            self._silent = set()
        if self.failure is not None:
            self.failure = None
            if self._warn_at > self._silent_since + WARN_AFTER_S:
                _log.warning("a broker answers again, after %.0f s", self._clock() - self._silent_since)

    def failed(self, address: Address | None, known: Iterable[Address], error: Unavailable, since: float) -> None:
        """A try at `address` has no answer; None: nobody told of a broker. That nobody answers is said when no broker
        that is known does."""
        now = self._clock()
        self.was_reached = self.was_reached or error.outcome == "unknown"  # it took the request
        if not self._silent:
            self._silent_since, self._warn_at = since, since + WARN_AFTER_S
        self._silent.add(address)
        if not self._silent.issuperset(known):
            return
        self.failure = error
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            _log.warning("waiting for a broker for %.0f s, and trying on: %s", now - self._silent_since, error.detail)

    @property
    def silent_s(self) -> float:
        """For how long nobody has answered."""
        return 0.0 if self.failure is None else self._clock() - self._silent_since

    def limit(self, deadline: float, began: float) -> float:
        """Until when what began then is tried: its deadline, or soon while nobody was ever was_reached of."""
        return deadline if self.was_reached else min(deadline, began + FIRST_CONTACT_S)

    @property
    def is_refused(self) -> bool:
        """Whether nobody was there to take the latest request. One that broke off may have met a leader that ends."""
        return self.failure is not None and self.failure.outcome == "not_applied"

    def may_report_empty(self) -> bool:
        """Whether a poll may come back empty, and say nothing of brokers that do not answer just now."""
        return self.failure is None or (self.was_reached and self.silent_s < SILENT_S_MAX)
