"""Waiting for ZooKeeper while a broker starts: one limit for everything that the start asks of it.

Only the time that fails counts, so that a slow machine is not taken for a ZooKeeper that is away. An attempt is
repeated as a whole: it must be harmless to repeat after an unknown outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from portalmq.errors import Unavailable

T = TypeVar("T")

AGAIN_S = 0.5


def passes(fault: Exception) -> bool:
    """Whether a fault may be over at the next attempt: what does not answer may, what refuses does not."""
    return isinstance(fault, Unavailable) and fault.retryable


class RetryBudget:
    """Repeats attempts while they fail with faults that pass, for `limit_s` in all. `tell` hears of the first one, and
    of the seconds that are left."""

    def __init__(
        self,
        limit_s: float,
        passes: Callable[[Exception], bool] = passes,
        *,
        tell: Callable[[Exception, float], None] = lambda fault, left_s: None,
        again_s: float = AGAIN_S,
    ) -> None:
        self.left_s = limit_s
        self._passes = passes
        self._tell = tell
        self._told = False
        self._again_s = again_s

    def __call__(self, attempt: Callable[[], T]) -> T:
        """The outcome of the attempt. Raises its last fault when the limit is reached, and any that does not pass."""
        while True:
            began = time.monotonic()
            try:
                return attempt()
            except Exception as fault:
                self.left_s -= time.monotonic() - began
                if not self._passes(fault) or self.left_s <= 0:
                    raise
                if not self._told:
                    self._tell(fault, self.left_s)
                self._told = True
            pause_s = min(self._again_s, self.left_s)
            time.sleep(pause_s)
            self.left_s -= pause_s


# Never waits.
AT_ONCE = RetryBudget(0.0)
