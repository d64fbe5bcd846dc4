"""The time by which messages of a log expire or fall to retention. No single clock decides, since a message dropped for
its age is gone on every replica.

The least of three times counts: the log's own time (the stamp of its last append, advanced by a monotonic clock while
nothing is appended), the time of day, and a limit: within an hour of running no log ages by more than a day. So a wrong
time of day makes nothing old while the log does not follow it, and leaves hours to correct it when the log does.
A restart goes on from the time that was saved, advanced by at most a day of the time of day that has passed since, so
that a broker which runs for minutes a day keeps up; where none was saved, from the oldest messages. The stamp of the
last append may be wrong.
"""

from __future__ import annotations

from typing import NamedTuple

DAYS_AN_HOUR = 24
STOPPED_MS_MAX = 24 * 3_600_000


class SavedAge(NamedTuple):
    """The time that ages are measured by, as it was at a save, and the time of day then."""

    time_ms: int
    wall_ms: int

    def after_stop(self, wall_ms: int) -> int:
        """Return the time to begin with at this time of day."""
        return self.time_ms + min(max(0, wall_ms - self.wall_ms), STOPPED_MS_MAX)


class Age:
    """The age clock of one log.

    Invariant: between two calls `_time_ms` rises by at most DAYS_AN_HOUR times what the monotonic clock counted. The
    time of day bounds an answer and is not remembered, so one reading of a slow clock delays nothing.
    """

    def __init__(self, log_ms: int, now_ms: int, begin_ms: int) -> None:
        """`begin_ms` is the time to begin with. It counts up to `log_ms`, the last append's stamp."""
        self._log_ms = log_ms
        self._appended_ms = now_ms
        self._time_ms = min(begin_ms, log_ms)
        self._asked_ms = now_ms

    def time_ms(self, log_ms: int, now_ms: int, wall_ms: int, oldest_ms: int = 0) -> int:
        """Return the time that ages are measured against. `log_ms` is the stamp of the last append (0 without any),
        `now_ms` a clock that never jumps, `wall_ms` the time of day. A log that was empty before ages from `oldest_ms`
        on, a stamp near its beginning: the time of day may have jumped since."""
        if log_ms != self._log_ms:
            self._log_ms, self._appended_ms = log_ms, now_ms
        before_ms = self._time_ms or oldest_ms or log_ms
        limit_ms = before_ms + DAYS_AN_HOUR * (now_ms - self._asked_ms) if before_ms else 0
        self._time_ms = min(log_ms + now_ms - self._appended_ms, limit_ms)
        self._asked_ms = now_ms
        return min(self._time_ms, wall_ms)

    @property
    def reached_ms(self) -> int:
        """The time that the last call reached, to be saved."""
        return self._time_ms
