"""Waiting for ZooKeeper during the start of a broker: one limit for all requests of the start.

Only failed attempts count, so that a slow machine does not look like an unavailable ZooKeeper. An attempt is repeated
as a whole: it must be safe to repeat after an unknown outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from portalmq.errors import Unavailable

T = TypeVar("T")

AGAIN_S = 0.5


def passes(fault: Exception) -> bool:
    """Return True for a fault that the next attempt may not meet: no answer, rather than a refusal."""
    return isinstance(fault, Unavailable) and fault.retryable


@dataclass(eq=False, repr=False)
class RetryBudget:
    """Repeats attempts while they fail with faults that pass, for `limit_s` in all. `tell` is called with the first
    fault and the seconds that are left."""

    left_s: float
    _passes: Callable[[Exception], bool] = passes
    tell: Callable[[Exception, float], None] = lambda fault, left_s: None
    again_s: float = AGAIN_S

    def __post_init__(self) -> None:
        self._has_notified = False

    def __call__(self, attempt: Callable[[], T]) -> T:
        """Return the value of the attempt. Raises its last fault at the limit, and any fault that does not pass."""
        while True:
            began = time.monotonic()
            try:
                return attempt()
            except Exception as fault:
                self.left_s -= time.monotonic() - began
                if not self._passes(fault) or self.left_s <= 0:
                    raise
                if not self._has_notified:
                    self.tell(fault, self.left_s)
                self._has_notified = True
            pause_s = min(self.again_s, self.left_s)
            time.sleep(pause_s)
            self.left_s -= pause_s


# Never waits.
AT_ONCE = RetryBudget(0.0)
