"""The reachability of brokers for one client: whether any answers, how long none has, and when to report it.

    never heard --an answer--> heard --no broker answers--> silent --an answer--> heard

A client that has never had an answer gives up soon: its address is wrong, or no broker was started. One that had an
answer continues for as long as its caller allows: the broker may return, or another one may lead.
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
# How long an empty poll may hide that no broker answers: a change of leaders is over by then.
SILENT_S_MAX = 10.0


class Reachability:
    """Thread-safe enough: each step sets single values, and the latest one counts."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # A broker accepted a request, whatever became of it.
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
        """Record that a try at `address` has no answer (None: no broker was found). Silence is reported if no known
        broker answers."""
        now = self._clock()
        self.was_reached = self.was_reached or error.outcome == "unknown"  # it accepted the request
        if not self._silent:
            self._silent_since, self._warn_at = since, since + WARN_AFTER_S
        self._silent.add(address)
        if not self._silent.issuperset(known):
            return
        self.failure = error
        if now >= self._warn_at:
            self._warn_at = now + WARN_EVERY_S
            _log.warning("no broker has answered for %.0f s, still trying: %s", now - self._silent_since, error.detail)

    @property
    def silent_s(self) -> float:
        """The time since which no broker has answered, in seconds."""
        return 0.0 if self.failure is None else self._clock() - self._silent_since

    def limit(self, deadline: float, began: float) -> float:
        """Return when to stop retrying: the deadline, or sooner while no broker has ever answered."""
        return deadline if self.was_reached else min(deadline, began + FIRST_CONTACT_S)

    @property
    def is_refused(self) -> bool:
        """True if the latest request was refused a connection. (One that broke off may have met a leader that shuts
        down.)"""
        return self.failure is not None and self.failure.outcome == "not_applied"

    def may_report_empty(self) -> bool:
        """Return whether a poll may return nothing, and hide that no broker answers just now."""
        return self.failure is None or (self.was_reached and self.silent_s < SILENT_S_MAX)
