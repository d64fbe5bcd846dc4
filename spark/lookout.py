"""Looks at the logs for a streaming query, which asks a hundred times a second while nothing is new.

A look is as old as four times what it cost, at least 50 ms and at most 5 s, so that looking takes a fifth of one core
whatever the number of partitions. A look that fails (a broker that is restarted, a file that is locked, a directory
that is mounted again) is repeated for `PATIENCE_S` before it ends the query.
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

# What may be over in a moment. What the user has to change, and what is gone for good, is not.
PASSING = (SourceError, PortalMQError, OSError, sqlite3.Error)
LASTING = (BadOption, DataLoss)


class FaultDuration:
    """How long something has been wrong without a break."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, patience_s: float = PATIENCE_S) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._since: float | None = None

    def ended(self, fault: BaseException, began: float) -> Exception | None:
        """Note one more fault, of a try that began then. What to raise once all have failed for so long."""
        if self._since is None:
            self._since = began
        waited_s = self._clock() - self._since
        return None if waited_s < self._patience_s else SourceError(f"{fault}. It was tried for {waited_s:.0f} s")

    def restored(self) -> None:
        self._since = None


class Lookout:
    def __init__(self, look: Callable[[], list[PartitionLog]], clock: Callable[[], float] = time.monotonic) -> None:
        self._look = look
        self._clock = clock
        self._patience = FaultDuration(clock)
        self._seen: list[PartitionLog] | None = None
        self._has_seen = False
        self._rests_until_s = float("-inf")

    def logs(self, *, fresh: bool = False) -> list[PartitionLog] | None:
        """As they stand now or stood a moment ago (`fresh`: now); None while they cannot be seen.

        Raises SourceError when they could not be seen for PATIENCE_S, BadOption and DataLoss at once, and at the first
        look NothingThere."""
        began = self._clock()
        if began < self._rests_until_s and not fresh:
            return self._seen
        try:
            self._seen = self._look()
        except LASTING:
            raise
        except PASSING as fault:
            if not self._has_seen and isinstance(fault, NothingThere):
                raise  # more likely the name is wrong than that it comes in a moment
            self._seen = None
            final = self._patience.ended(fault, began)
            if final is not None:
                raise final from fault
        else:
            self._has_seen = True
            self._patience.restored()
        ended = self._clock()
        self._rests_until_s = ended + min(max(_RESTS_PER_LOOK * (ended - began), _REST_MIN_S), _REST_MAX_S)
        return self._seen

    @property
    def last_seen(self) -> list[PartitionLog] | None:
        return self._seen
