"""Two clocks, so that a jump of the wall clock breaks nothing.

`now_ms` times leases, back-offs and waits: Unix time as it was when the broker started, carried on by CLOCK_BOOTTIME,
which neither jumps nor stops in a suspended machine. `wall_ms` is the time of day, and stamps messages (the core keeps
those stamps from falling). In a cluster the time of day is what the brokers agree on (timekeeping.py): where the
machine's leaves that, the agreed one is carried on, like the other clock.
"""

from __future__ import annotations

import time

# So far apart may two brokers be. What is due, old or a duplicate by the one is so by the other within that.
TOLERANCE_MS = 2_000


class Clock:
    def __init__(self) -> None:
        self._anchor_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        # How far the agreed time of day is ahead of `now_ms`; None while nothing is agreed on.
        self.agreed_ms: int | None = None

    def now_ms(self) -> int:
        return (self._anchor_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME)) // 1_000_000

    def machine_ms(self) -> int:
        """The machine's time of day, right or wrong."""
        return time.time_ns() // 1_000_000

    def wall_ms(self) -> int:
        machine_ms = self.machine_ms()
        if self.agreed_ms is None:
            return machine_ms
        agreed_ms = self.now_ms() + self.agreed_ms
        return machine_ms if -TOLERANCE_MS <= machine_ms - agreed_ms <= TOLERANCE_MS else agreed_ms
