"""The moments of a schedule, its ticks: when the next one is, and which ones are to be published now. Nothing here
reads a clock.

The ticks of a schedule follow from its definition alone, whatever moment the search begins at: two brokers never see
two different ticks between the same moments. All moments are Unix milliseconds.

    cron        5 fields, or 6 with seconds in front; in local time of the zone (cronsim, which does as Debian's cron)
    every_ms    anchor + n * every_ms, n >= 1; zones do not matter

When clocks are put forward, a cron line with fixed minutes and hours that falls into the gap ticks at the end of the
gap. When they are put back, it ticks once, in the first of the two hours. Lines whose minute or hour begins with `*`,
and those with seconds, follow the elapsed time: they tick in both hours, and not in the gap.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from portalmq.errors import InvalidRequest

if TYPE_CHECKING:  # loaded with the first cron line, as cronsim is: most brokers have none
    from zoneinfo import ZoneInfo

# Ticks that are later than this are missed ones, even if a broker was up all the time.
LATE_MS = 600_000
# The most ticks of one schedule that are published in one go.
TICKS_AT_ONCE = 50
# A search for a tick of fixed hours begins this much earlier where the clocks were changed: cronsim forgets in which of
# the two hours it begins.
_BACK_S = 4 * 3_600
_DAY_S = 86_400
# A search takes a few thousand steps at most.
_STEPS_MAX = 10_000
# A search that begins so near a change of clocks by a part of an hour may be off.
_ODD_S = 7_200
_MOMENT_MIN_MS = 86_400_000
_MOMENT_MAX_MS = 253_370_764_800_000  # the year 9999

_MACROS = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class Timetable(Protocol):
    def next_after(self, ms: int) -> int | None:
        """Return the first tick later than `ms`; None when there is none any more."""
        ...


@dataclass(frozen=True, slots=True)
class Interval:
    """A tick each `every_ms` after `anchor_ms`."""

    anchor_ms: int
    every_ms: int

    def next_after(self, ms: int) -> int | None:
        if ms < self.anchor_ms:
            return self.anchor_ms + self.every_ms
        return self.anchor_ms + ((ms - self.anchor_ms) // self.every_ms + 1) * self.every_ms


@dataclass(frozen=True, slots=True)
class CronLine:
    """A cron line in a time zone. Make one with `cron_line`, which checks both."""

    line: str
    zone: ZoneInfo

    def next_after(self, ms: int) -> int | None:
        if not _MOMENT_MIN_MS <= ms < _MOMENT_MAX_MS:
            return None
        start = ms // 1_000
        try:
            tick = self._search(start - _BACK_S if self._is_fixed and self._offset_differs(start) else start, start)
            if tick is None or self._is_fixed:
                return None if tick is None else tick * 1_000
            changed = self._odd_change(max(start - _ODD_S, tick - _DAY_S), tick)
            if changed is not None:
                upto = changed + _ODD_S
                tick = self._match(max(start, changed - 1), upto) or self._search(upto, upto)
        except LostSearch:
            upto = start + 2 * _DAY_S
            tick = self._match(start, upto)
            return self.next_after(upto * 1_000) if tick is None else tick * 1_000
        except (OverflowError, ValueError):
            return None
        return None if tick is None else tick * 1_000

    def _search(self, begin: int, after: int) -> int | None:
        for moment in _cron(self.line, datetime.fromtimestamp(begin, self.zone)):
            tick = int(moment.timestamp())
            if tick > after:
                return tick
        return None

    def _match(self, after: int, upto: int) -> int | None:
        """Return the first tick later than `after`, and at most at `upto`, by comparing each minute with the line."""
        fields = _cron(self.line, datetime.fromtimestamp(after, self.zone))
        for minute in range(after // 60 * 60, upto + 1, 60):
            local = datetime.fromtimestamp(minute, self.zone)
            if local.minute not in fields.minutes or local.hour not in fields.hours or local.month not in fields.months:
                continue
            seconds: list[int] = [minute + each for each in sorted(fields.seconds) if after < minute + each <= upto]
            if seconds and fields.match_day(local.date()):
                return seconds[0]
        return None

    @property
    def _is_fixed(self) -> bool:
        """Whether the line has fixed minutes and hours, which cronsim searches without the zone."""
        minute, hour, *rest = self.line.split()
        return len(rest) == 3 and not minute.startswith("*") and not hour.startswith("*")

    def _offset(self, second: int) -> float:
        offset = datetime.fromtimestamp(second, self.zone).utcoffset()
        return 0.0 if offset is None else offset.total_seconds()

    def _offset_differs(self, second: int) -> bool:
        return self._offset(second) != self._offset(second - _BACK_S)

    def _odd_change(self, low: int, high: int) -> int | None:
        """Return the first second after the clocks were changed by other than whole hours; None without such a change.
        cronsim steps by whole hours, and is a part of an hour off behind it."""
        before = self._offset(low)
        if (self._offset(high) - before) % 3_600 == 0:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._offset(middle) == before:
                low = middle
            else:
                high = middle
        return high


class LostSearch(Exception):
    """cronsim turns in a circle, as it does where clocks change beside the full hour."""


class BadCronLine(Exception):
    """The line is not one of cron's."""


def _cron(line: str, start: datetime) -> Any:
    """Return the moments of the line later than `start`."""
    from cronsim import CronSim, CronSimError

    try:
        search: Any = CronSim(line, start)
    except CronSimError as fault:
        raise BadCronLine(str(fault)) from None
    step, steps = search.tick, count()

    def bounded(seconds: int = 1) -> None:
        if next(steps) > _STEPS_MAX:
            raise LostSearch
        step(seconds)

    search.tick = bounded
    return search


@cache
def _zones() -> frozenset[str]:
    from zoneinfo import available_timezones

    return frozenset(available_timezones())


@lru_cache(maxsize=1_000)
def cron_line(line: str, timezone: str) -> CronLine:
    """Return the cron line. Raises InvalidRequest for one that is not valid or never ticks, and for an unknown zone."""
    from zoneinfo import ZoneInfo

    if timezone not in _zones():
        raise InvalidRequest(
            f"timezone is {timezone[:100]!r}, but must be a name of the IANA database, as Europe/Berlin"
        )
    found = CronLine(_MACROS.get(line.strip().lower(), line), ZoneInfo(timezone))
    try:
        ticks_ever = next(_cron(found.line, datetime(2024, 1, 1, tzinfo=UTC)), None)
    except (BadCronLine, ValueError, TypeError, AssertionError) as fault:
        raise InvalidRequest(
            f"cron is {line[:100]!r}, which is no cron line ({fault}): write minute, hour, day of month, month and day"
            " of week, as */5 * * * *, or six fields with the second first"
        ) from None
    if ticks_ever is None:
        raise InvalidRequest(f"cron is {line[:100]!r}, and there is no such day")
    return found


def last_between(timetable: Timetable, after_ms: int, upto_ms: int) -> int | None:
    """Return the last tick later than `after_ms`, and at most at `upto_ms`; None when there is none. It takes about 30
    searches, however many ticks there are."""
    last = timetable.next_after(after_ms)
    if last is None or last > upto_ms:
        return None
    low, high = last, upto_ms
    while low < high:  # `last` is the first tick after a moment below `low`, and none is known after `high`
        middle = (low + high) // 2
        found = timetable.next_after(middle)
        if found is None or found > upto_ms:
            high = middle
        else:
            low = last = found
    return last


@dataclass(frozen=True, slots=True)
class DueTicks:
    """The ticks to publish now, in order. Once they are published, nothing up to `upto_ms` is left to publish."""

    ticks: list[int]
    upto_ms: int


def _missed_upto_ms(now_ms: int, up_since_ms: int) -> int:
    return min(max(up_since_ms, now_ms - LATE_MS) - 1, now_ms)


def misses_any(timetable: Timetable, after_ms: int, now_ms: int, *, up_since_ms: int) -> bool:
    """Return whether there is a missed tick later than `after_ms`."""
    tick_ms = timetable.next_after(after_ms)
    return tick_ms is not None and tick_ms <= _missed_upto_ms(now_ms, up_since_ms)


def due_ticks(timetable: Timetable, after_ms: int, now_ms: int, *, up_since_ms: int, catch_up: bool) -> DueTicks:
    """Return the ticks to publish of those later than `after_ms`.

    Ticks since `up_since_ms`, from when on some broker was always up, are published each, unless they are over LATE_MS
    late. Of the others, the missed ones, the last is published, or none without `catch_up`.
    """
    if after_ms >= now_ms:
        return DueTicks([], after_ms)  # the clock was put back
    ticks: list[int] = []
    missed_upto_ms = _missed_upto_ms(now_ms, up_since_ms)
    if after_ms < missed_upto_ms:
        missed = last_between(timetable, after_ms, missed_upto_ms)
        if missed is not None and catch_up:
            ticks.append(missed)
        after_ms = missed_upto_ms
    while len(ticks) < TICKS_AT_ONCE:
        tick_ms = timetable.next_after(after_ms)
        if tick_ms is None or tick_ms > now_ms:
            return DueTicks(ticks, now_ms)
        ticks.append(tick_ms)
        after_ms = tick_ms
    return DueTicks(ticks, after_ms)


def moment_text(ms: int) -> str:
    """Return a moment as RFC 3339 has it, in UTC; with milliseconds where there are any."""
    moment = datetime.fromtimestamp(ms // 1_000, UTC).replace(microsecond=ms % 1_000 * 1_000, tzinfo=None)
    return moment.isoformat(timespec="milliseconds" if ms % 1_000 else "seconds") + "Z"
