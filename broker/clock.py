"""Two clocks, so that a jump of the wall clock breaks nothing.

`now_ms` times leases, back-offs and waits: Unix time as it was when the broker started, carried on by CLOCK_BOOTTIME,
which neither jumps nor stops in a suspended machine. `wall_ms` is the time of day, and stamps messages (the core keeps
those stamps from falling).
"""

from __future__ import annotations

import time


class Clock:
    def __init__(self) -> None:
        self._anchor_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def now_ms(self) -> int:
        return (self._anchor_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME)) // 1_000_000

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000
