"""The time by which the messages of a log are old. No single clock decides that: what is dropped for its age is gone on
every replica.

The least of three times counts: the log's own (the stamp of its last append, carried on by a clock that cannot jump
while nothing is appended); the time of day; and a limit: within an hour of running no log ages by more than a day. So a
time of day that is wrong makes nothing old while the log does not follow it, and leaves hours to mend it when it does.
"""

from __future__ import annotations

DAYS_AN_HOUR = 24


class Age:
    """Invariant: between two calls `_time_ms` rises by at most DAYS_AN_HOUR times what the steady clock counted.

    The time of day bounds an answer and is not remembered: one look at a clock that is behind holds nothing up.
    """

    def __init__(self, log_ms: int, now_ms: int) -> None:
        self._log_ms = log_ms
        self._appended_ms = now_ms
        self._time_ms = log_ms
        self._asked_ms = now_ms

    def time_ms(self, log_ms: int, now_ms: int, wall_ms: int) -> int:
        """`log_ms`: the stamp of the last append, 0 without any; `now_ms` never jumps, `wall_ms` is the time of day."""
        if log_ms != self._log_ms:
            self._log_ms, self._appended_ms = log_ms, now_ms
        limit_ms = self._time_ms + DAYS_AN_HOUR * (now_ms - self._asked_ms) if self._time_ms else log_ms
        self._time_ms = min(log_ms + now_ms - self._appended_ms, limit_ms)
        self._asked_ms = now_ms
        return min(self._time_ms, wall_ms)
