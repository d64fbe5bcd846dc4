"""What a handler raises to say what becomes of its message. Returning acks it; any other exception nacks it."""

from __future__ import annotations

import math

from portalmq.wire import VISIBILITY_TIMEOUT_MS_MAX

DELAY_S_MAX = VISIBILITY_TIMEOUT_MS_MAX / 1000


class Reject(Exception):
    """Make a dead letter of the message at once: to handle it again would not help."""

    def __init__(self, reason: str = "rejected by the handler") -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Exception):
    """Deliver the message again after `delay_s` seconds (default: the group's back-off). It counts as a delivery: the
    last one makes a dead letter of it."""

    def __init__(self, delay_s: float | None = None, reason: str = "the handler asked for a retry") -> None:
        if delay_s is not None and not (0 <= delay_s <= DELAY_S_MAX and math.isfinite(delay_s)):
            raise ValueError(f"delay_s={delay_s!r}: a retry waits 0 to {DELAY_S_MAX:g} seconds")
        super().__init__(reason)
        self.delay_s = delay_s
        self.reason = reason


class HandlerTimeout(BaseException):
    """Raised in a handler that takes longer than its `timeout_s`. A BaseException, so that `except Exception` in the
    handler does not keep it; its message is nacked."""
