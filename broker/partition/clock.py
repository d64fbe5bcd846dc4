"""Two clocks, so that a jump of the wall clock breaks nothing.

`now_ms` times leases, back-offs and waits: Unix time as it was when the broker started, carried on by a clock
that does not jump, nor stop in a suspended machine (system.py). `wall_ms` is the time of day, and stamps messages (the
core keeps those stamps from falling). In a cluster the time of day is what the brokers agree on
(cluster/timekeeping.py): where the machine's leaves that, the agreed one is carried on, like the other clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from portalmq.system import steady_clock

# So far apart may two brokers be. What is due, old or a duplicate by the one is so by the other within that.
TOLERANCE_MS = 2_000

_steady_ns = partial(time.clock_gettime_ns, steady_clock())


class Clock:
    """Each time is asked for several times a request, so it is worked out in one step from its sources."""

    def __init__(self, steady_ns: Callable[[], int] = _steady_ns, time_ns: Callable[[], int] = time.time_ns) -> None:
        self._steady_ns = steady_ns
        self._time_ns = time_ns
        self._anchor_ns = time_ns() - steady_ns()
        # How far the agreed time of day is ahead of `now_ms`; None while nothing is agreed on.
        self.agreed_ms: int | None = None

    def now_ms(self) -> int:
        return (self._anchor_ns + self._steady_ns()) // 1_000_000

    def machine_ms(self) -> int:
        """The machine's time of day, right or wrong."""
        return self._time_ns() // 1_000_000

    def wall_ms(self) -> int:
        machine_ms = self._time_ns() // 1_000_000
        if self.agreed_ms is None:
            return machine_ms
        agreed_ms = (self._anchor_ns + self._steady_ns()) // 1_000_000 + self.agreed_ms
        return machine_ms if -TOLERANCE_MS <= machine_ms - agreed_ms <= TOLERANCE_MS else agreed_ms
