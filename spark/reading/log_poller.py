"""Polls the logs for a streaming query; Spark asks a hundred times a second while nothing is new.

A result is reused for four times the duration of its poll, at least 50 ms and at most 5 s, so that polling takes a
fifth of one core at any number of partitions. A poll that fails (a broker restarts, a file is locked, a directory is
being mounted) is repeated for `PATIENCE_S` before it ends the query.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable

from portalmq.errors import PortalMQError
from portalmq.spark.errors import BadOption, DataLoss, NothingThere, SourceError
from portalmq.spark.origin import PartitionLog

PATIENCE_S = 20.0
_REST_MIN_S, _REST_MAX_S = 0.05, 5.0
_RESTS_PER_LOOK = 4

# PASSING faults may resolve themselves. LASTING ones do not: the user must act, or the data is gone.
PASSING = (SourceError, PortalMQError, OSError, sqlite3.Error)
LASTING = (BadOption, DataLoss)


class FaultDuration:
    """The duration of a fault that persists without a break."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._since: float | None = None

    def ended(self, fault: BaseException, began: float) -> Exception | None:
        """Record a fault of an attempt that began then. Return the error to raise once it has lasted too long."""
        if self._since is None:
            self._since = began
        waited_s = self._clock() - self._since
        return None if waited_s < self._patience_s else SourceError(f"{fault}. It was tried for {waited_s:.0f} s")

    def restored(self) -> None:
        self._since = None


class LogPoller:
    def __init__(self, look: Callable[[], list[PartitionLog]], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._patience = FaultDuration(clock)
        self.last_seen: list[PartitionLog] | None = None
        self._has_seen = False
        self._rests_until_s = float("-inf")

    def logs(self, *, fresh: bool = False) -> list[PartitionLog] | None:
        """Return the logs now or as of a recent poll (`fresh`: now); None while they cannot be read.

        Raises SourceError after PATIENCE_S of failures, BadOption and DataLoss at once, and NothingThere in the first
        poll.
        """
        began = self._clock()
        if began < self._rests_until_s and not fresh:
            return self.last_seen
        try:
            self.last_seen = self._look()
        except LASTING:
            raise
        except PASSING as fault:
            if not self._has_seen and isinstance(fault, NothingThere):
                raise  # a wrong name is more likely than a topic about to be created
            self.last_seen = None
            final = self._patience.ended(fault, began)
            if final is not None:
                raise final from fault
        else:
            self._has_seen = True
            self._patience.restored()
        ended = self._clock()
        self._rests_until_s = ended + min(max(_RESTS_PER_LOOK * (ended - began), _REST_MIN_S), _REST_MAX_S)
        return self.last_seen
