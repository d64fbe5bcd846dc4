"""Two clocks, so that a jump of the wall clock breaks nothing.

`now_ms` times leases, back-offs and waits: Unix time at the start of the broker, continued by a clock that neither
jumps nor stops in a suspended machine (system.py). `wall_ms` is the time of day, and stamps messages (the core never
lets these stamps fall). In a cluster the brokers agree on the time of day (cluster/clock_agreement.py). Where the
machine's clock differs from that, the agreed time is continued like the other clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from portalmq.system import steady_clock

# The greatest difference between two brokers: what is due, old or a duplicate by one clock is so by the other after it.
TOLERANCE_MS = 2_000

_steady_ns = partial(time.clock_gettime_ns, steady_clock())


class Clock:
    """Each time is read several times a request, so it is computed in one step from its sources."""

    def __init__(self, steady_ns: Callable[[], int] = _steady_ns, time_ns: Callable[[], int] = time.time_ns) -> None:
        self._steady_ns = steady_ns
        self._time_ns = time_ns
        self._anchor_ns = time_ns() - steady_ns()
        # How far the agreed time of day is ahead of `now_ms`; None while there is no agreement.
        self.agreed_ms: int | None = None

    def now_ms(self) -> int:
        return (self._anchor_ns + self._steady_ns()) // 1_000_000

    def machine_ms(self) -> int:
        """Return the machine's time of day, right or wrong."""
        return self._time_ns() // 1_000_000

    def wall_ms(self) -> int:
        machine_ms = self._time_ns() // 1_000_000
        if self.agreed_ms is None:
            return machine_ms
        agreed_ms = (self._anchor_ns + self._steady_ns()) // 1_000_000 + self.agreed_ms
        return machine_ms if -TOLERANCE_MS <= machine_ms - agreed_ms <= TOLERANCE_MS else agreed_ms
