"""When a schedule ticks, and which ticks are published now: decisions without a clock."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from portalmq.broker.schedules.timetable import (
    LATE_MS,
    TICKS_AT_ONCE,
    DueTicks,
    Interval,
    Timetable,
    cron_line,
    due_ticks,
    last_between,
    misses_any,
    moment_text,
)
from portalmq.errors import InvalidRequest

BERLIN = "Europe/Berlin"
LORD_HOWE = "Australia/Lord_Howe"  # its clocks change by half an hour
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
NOW = 1_700_000_000_000


def ms(text: str, zone: str = "UTC") -> int:
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo else moment.replace(tzinfo=ZoneInfo(zone))).timestamp() * 1_000)


def ticks(timetable: Timetable, after: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        tick = timetable.next_after(after)
        assert tick is not None
        assert tick > after
        found.append(tick)
        after = tick
    return found


def local(timetable: Timetable, zone: str, after: str, count: int) -> list[str]:
    """The next ticks, as the clocks of the zone show them."""
    found = ticks(timetable, ms(after, zone), count)
    return [datetime.fromtimestamp(tick / 1_000, ZoneInfo(zone)).strftime("%d %H:%M %z") for tick in found]


# --- cron lines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "after", "expected"),
    [
        ("* * * * *", "2026-05-04T10:00:00", "2026-05-04T10:01:00"),
        ("* * * * *", "2026-05-04T10:00:59.999", "2026-05-04T10:01:00"),
        ("*/5 * * * *", "2026-05-04T10:01:00", "2026-05-04T10:05:00"),
        ("*/5 * * * *", "2026-05-04T10:05:00", "2026-05-04T10:10:00"),
        ("0 6 * * 1-5", "2026-05-01T06:00:00", "2026-05-04T06:00:00"),
        ("0 6 * * MON-FRI", "2026-05-01T06:00:00", "2026-05-04T06:00:00"),
        ("0 0 1 1 *", "2026-05-04T10:00:00", "2027-01-01T00:00:00"),
        ("0 0 29 2 *", "2026-05-04T10:00:00", "2028-02-29T00:00:00"),
        ("0 0 L * *", "2026-02-04T10:00:00", "2026-02-28T00:00:00"),
        ("0 0 * * 7", "2026-05-04T10:00:00", "2026-05-10T00:00:00"),
        ("0 0 * * 0", "2026-05-04T10:00:00", "2026-05-10T00:00:00"),
        ("0 12 * * MON#1", "2026-05-04T12:00:00", "2026-06-01T12:00:00"),
        ("0 0 13 * 5", "2026-05-04T10:00:00", "2026-05-08T00:00:00"),
        ("23 0-20/2 * * *", "2026-05-04T20:23:00", "2026-05-05T00:23:00"),
        ("* * * * * *", "2026-05-04T10:00:00", "2026-05-04T10:00:01"),
        ("*/15 * * * * *", "2026-05-04T10:00:16", "2026-05-04T10:00:30"),
        ("59 59 23 31 12 *", "2026-05-04T10:00:00", "2026-12-31T23:59:59"),
        ("@hourly", "2026-05-04T10:00:00", "2026-05-04T11:00:00"),
        ("@daily", "2026-05-04T10:00:00", "2026-05-05T00:00:00"),
        ("@midnight", "2026-05-04T10:00:00", "2026-05-05T00:00:00"),
        ("@weekly", "2026-05-04T10:00:00", "2026-05-10T00:00:00"),
        ("@monthly", "2026-05-04T10:00:00", "2026-06-01T00:00:00"),
        ("@yearly", "2026-05-04T10:00:00", "2027-01-01T00:00:00"),
        ("@ANNUALLY", "2026-05-04T10:00:00", "2027-01-01T00:00:00"),
    ],
)
def test_a_cron_line_ticks_at_its_next_moment(line: str, after: str, expected: str) -> None:
    assert cron_line(line, "UTC").next_after(ms(after)) == ms(expected)


@pytest.mark.parametrize(
    "line",
    [
        *("", " ", "*", "* * * *", "* * * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * 32 * *"),
        *("* * * 13 *", "* * * 0 *", "* * * * 8", "*/0 * * * *", "5-1 * * * *", "a * * * *", "* * * * MOO"),
        *("-1 * * * *", "1.5 * * * *", "* * * * 1#6", "* * * * 1#0", ",5 * * * *", "5, * * * *", "/5 * * * *"),
        *("@reboot", "@never", "0 0 30 2 *", "0 0 31 4 *", "0 0 31 2,4,6,9,11 *", "² * * * *", "* * * * L"),
        *("1-2-3 * * * *", "*5 * * * *", "* * LX * *", "0 0 1 JANUARY *", "9" * 200 + " * * * *", "* * * * 1L/2"),
    ],
)
def test_what_is_no_cron_line_is_refused_with_its_text(line: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^cron is ") as refused:
        cron_line(line, "UTC")
    assert repr(line[:100]) in str(refused.value)


@given(some.text(alphabet="0123456789*/-,#LW MONTUE@é\n", max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_cron_line_or_is_refused(text: str) -> None:
    try:
        found = cron_line(text, BERLIN)
    except InvalidRequest:
        return
    first = found.next_after(NOW)
    assert first is None or first > NOW


@pytest.mark.parametrize(
    "zone",
    ["", "Nowhere/City", "europe/berlin", "Europe", "../etc/passwd", "/etc/localtime", "+02:00", "CET\0", "é", "posix"],
)
def test_an_unknown_zone_is_refused(zone: str) -> None:
    with pytest.raises(InvalidRequest, match="timezone"):
        cron_line("* * * * *", zone)


@pytest.mark.parametrize("zone", ["UTC", BERLIN, LORD_HOWE, "America/New_York", "Asia/Kathmandu", "Etc/GMT+5", "CET"])
def test_a_daily_line_follows_the_clocks_of_its_zone_over_years(zone: str) -> None:
    found = ticks(cron_line("15 9 * * *", zone), ms("2024-01-01T00:00:00"), 800)
    shown = {datetime.fromtimestamp(tick / 1_000, ZoneInfo(zone)).strftime("%H:%M") for tick in found}
    assert shown == {"09:15"}
    assert len({tick // DAY for tick in found}) >= 799


# --- changes of clocks -----------------------------------------------------------------------------------------------

FORWARD, BACK = "2026-03-29T00:00:00", "2026-10-25T00:00:00"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("30 2 * * *", ["29 03:00 +0200", "30 02:30 +0200"]),
        ("0 2 * * *", ["29 03:00 +0200", "30 02:00 +0200"]),
        ("0 3 * * *", ["29 03:00 +0200", "30 03:00 +0200"]),
        ("0,30 2 * * *", ["29 03:00 +0200", "30 02:00 +0200", "30 02:30 +0200"]),
        ("30 1-3 * * *", ["29 01:30 +0100", "29 03:00 +0200", "29 03:30 +0200"]),
        ("*/30 * * * *", ["29 00:30 +0100", "29 01:00 +0100", "29 01:30 +0100", "29 03:00 +0200", "29 03:30 +0200"]),
        ("30 * * * *", ["29 00:30 +0100", "29 01:30 +0100", "29 03:30 +0200"]),
        ("*/30 2 * * *", ["30 02:00 +0200", "30 02:30 +0200"]),
        ("0 30 2 * * *", ["30 02:30 +0200"]),
    ],
)
def test_in_spring_an_hour_is_missing(line: str, expected: list[str]) -> None:
    assert local(cron_line(line, BERLIN), BERLIN, FORWARD, len(expected)) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("30 2 * * *", ["25 02:30 +0200", "26 02:30 +0100"]),
        ("0 3 * * *", ["25 03:00 +0100", "26 03:00 +0100"]),
        ("30 1-3 * * *", ["25 01:30 +0200", "25 02:30 +0200", "25 03:30 +0100"]),
        ("30 * * * *", ["25 00:30 +0200", "25 01:30 +0200", "25 02:30 +0200", "25 02:30 +0100", "25 03:30 +0100"]),
        ("*/30 2 * * *", ["25 02:00 +0200", "25 02:30 +0200", "25 02:00 +0100", "25 02:30 +0100", "26 02:00 +0100"]),
        ("0 30 2 * * *", ["25 02:30 +0200", "25 02:30 +0100", "26 02:30 +0100"]),
    ],
)
def test_in_autumn_an_hour_comes_twice(line: str, expected: list[str]) -> None:
    assert local(cron_line(line, BERLIN), BERLIN, BACK, len(expected)) == expected


def test_a_change_by_half_an_hour_moves_no_tick_off_its_minute() -> None:
    found = ticks(cron_line("25 */5 * * *", LORD_HOWE), ms("2024-10-05T12:00:00", LORD_HOWE), 12)
    assert {datetime.fromtimestamp(tick / 1_000, ZoneInfo(LORD_HOWE)).minute for tick in found} == {25}


LINES = [
    *("30 2 * * *", "0,30 1-3 * * *", "*/10 * * * *", "15 * * * *", "*/20 1,2,3 * * *", "0 */2 * * *", "5 3 * * *"),
    *("*/30 */10 * * * *", "10 45 * * * *", "59 1 * * *", "0 0 * * *", "1-59/7 0-4 * * *"),
]
CHANGES = [
    (BERLIN, "2026-03-29T01:00:00Z"),
    (BERLIN, "2026-10-25T01:00:00Z"),
    (LORD_HOWE, "2024-10-05T15:30:00Z"),
    (LORD_HOWE, "2024-04-06T15:00:00Z"),
    ("America/St_Johns", "2006-10-29T02:31:00Z"),
    ("Antarctica/Troll", "2024-03-31T01:00:00Z"),
    ("Pacific/Apia", "2011-12-30T10:00:00Z"),
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize(("zone", "change"), CHANGES)
def test_the_ticks_are_the_same_wherever_a_search_begins(line: str, zone: str, change: str) -> None:
    timetable = cron_line(line, zone)
    low, high = ms(change) - 5 * HOUR, ms(change) + 6 * HOUR
    every: list[int] = []
    while (tick := timetable.next_after(every[-1] if every else low)) is not None and tick <= high:
        every.append(tick)
    for start in range(low + 137, high, 11 * MINUTE + 7_913):
        later = [tick for tick in every if tick > start]
        found = timetable.next_after(start)
        assert found == later[0] if later else found is None or found > high


# --- intervals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "expected"),
    [(-5_000, 1_100), (0, 1_100), (100, 1_100), (1_099, 1_100), (1_100, 2_100), (1_101, 2_100), (9_999, 10_100)],
)
def test_an_interval_counts_from_its_beginning(after: int, expected: int) -> None:
    assert Interval(100, 1_000).next_after(after) == expected


@given(some.integers(0, 10**6), some.integers(1_000, 10**7), some.integers(-(10**6), 10**9))
def test_an_interval_ticks_once_in_each_of_its_lengths(anchor: int, every: int, after: int) -> None:
    tick = Interval(anchor, every).next_after(after)
    assert tick > after
    assert (tick - anchor) % every == 0
    assert tick - after <= every or tick == anchor + every


# --- the last of many ------------------------------------------------------------------------------------------------


@given(some.integers(0, 5_000), some.integers(0, 300_000), some.sampled_from([1_000, 1_500, 7_777]))
def test_the_last_tick_of_a_stretch_is_found_by_bisection(after: int, length: int, every: int) -> None:
    timetable = Interval(0, every)
    inside = [tick for tick in range(every, after + length + 1, every) if after < tick <= after + length]
    assert last_between(timetable, after, after + length) == (inside[-1] if inside else None)


@pytest.mark.parametrize("line", ["* * * * * *", "*/7 * * * *", "30 2 * * *", "0 0 1 1 *", "0 0 29 2 *", "* * 1 1 *"])
def test_the_last_tick_of_ten_years_takes_few_searches(line: str) -> None:
    class Counted:
        searches = 0

        def next_after(self, after: int) -> int | None:
            self.searches += 1
            return timetable.next_after(after)

    timetable, counted = cron_line(line, BERLIN), Counted()
    upto = ms("2026-05-04T10:00:00")
    last = last_between(counted, ms("2016-05-04T10:00:00"), upto)
    assert last is not None
    following = timetable.next_after(last)
    assert following is not None
    assert last <= upto < following
    assert counted.searches < 60


# --- what is due -----------------------------------------------------------------------------------------------------

EACH_MINUTE = Interval(0, MINUTE)
START = 1_000 * DAY  # a tick


def due(
    after: int, now: int, up_since: int = 0, *, catch_up: bool = True, timetable: Timetable = EACH_MINUTE
) -> DueTicks:
    return due_ticks(timetable, START + after, START + now, up_since_ms=START + up_since, catch_up=catch_up)


def minutes(found: DueTicks) -> list[float]:
    return [(tick - START) / MINUTE for tick in found.ticks]


@pytest.mark.parametrize("catch_up", [True, False])
def test_a_tick_is_due_at_its_moment_and_not_before(catch_up: bool) -> None:
    assert minutes(due(0, MINUTE - 1, -DAY, catch_up=catch_up)) == []
    assert minutes(due(0, MINUTE, -DAY, catch_up=catch_up)) == [1]
    assert minutes(due(MINUTE, MINUTE, -DAY, catch_up=catch_up)) == []


@pytest.mark.parametrize("catch_up", [True, False])
@pytest.mark.parametrize("late", [1, 3, 9])
def test_while_some_broker_was_up_each_late_tick_is_published(late: int, catch_up: bool) -> None:
    found = due(0, late * MINUTE + 5, -DAY, catch_up=catch_up)
    assert minutes(found) == list(range(1, late + 1))
    assert found.upto_ms == START + late * MINUTE + 5


@pytest.mark.parametrize("down", [1, 2, 5, 9, 11, 60, 1_440, 1_440 * 3_650])
def test_of_the_ticks_missed_while_none_was_up_the_last_is_published(down: int) -> None:
    now = down * MINUTE + 30_000
    assert minutes(due(0, now, now)) == [down]
    assert minutes(due(0, now, now, catch_up=False)) == []


def test_no_tick_was_missed_so_none_is_caught_up() -> None:
    assert minutes(due(10 * MINUTE, 10 * MINUTE + 30_000, 10 * MINUTE + 20_000)) == []


@pytest.mark.parametrize("catch_up", [True, False])
def test_after_a_start_missed_ticks_are_one_and_later_ones_are_all(catch_up: bool) -> None:
    found = due(0, 8 * MINUTE, 5 * MINUTE + 1, catch_up=catch_up)
    assert minutes(found) == ([5, 6, 7, 8] if catch_up else [6, 7, 8])


@pytest.mark.parametrize(("up_since", "misses"), [(5 * MINUTE, False), (5 * MINUTE + 1, True)])
def test_some_tick_is_missed_when_none_was_up_at_the_next_one(up_since: int, misses: bool) -> None:
    assert misses_any(EACH_MINUTE, START + 4 * MINUTE, START + 8 * MINUTE, up_since_ms=START + up_since) is misses


@pytest.mark.parametrize("catch_up", [True, False])
def test_a_tick_at_the_very_start_is_not_missed(catch_up: bool) -> None:
    assert minutes(due(0, 5 * MINUTE, 5 * MINUTE, catch_up=catch_up)) == ([4, 5] if catch_up else [5])


def test_ticks_that_are_too_late_count_as_missed() -> None:
    now = 60 * MINUTE
    kept = LATE_MS // MINUTE
    assert minutes(due(0, now, -DAY)) == [60 - kept - 1, *range(60 - kept, 61)]
    assert minutes(due(0, now, -DAY, catch_up=False)) == list(range(60 - kept, 61))


def test_very_many_late_ticks_are_published_in_parts() -> None:
    each_second = Interval(0, SECOND)
    after, now, found = 0, 200 * SECOND, []
    while True:
        part = due(after, now, -DAY, timetable=each_second)
        assert len(part.ticks) <= TICKS_AT_ONCE
        found += part.ticks
        after = part.upto_ms - START
        if after == now:
            break
    assert found == [START + n * SECOND for n in range(1, 201)]


@pytest.mark.parametrize("back", [1, 3_600_000, DAY * 400])
def test_a_clock_that_is_put_back_publishes_nothing_twice(back: int) -> None:
    assert due(5 * MINUTE, 5 * MINUTE - back, -DAY) == DueTicks([], START + 5 * MINUTE)


def test_a_clock_that_is_put_forward_makes_the_ticks_between_late() -> None:
    forward = 3 * 365 * 1_440
    found = minutes(due(0, forward * MINUTE, forward * MINUTE - HOUR))
    assert found == [forward - 11, *range(forward - 10, forward + 1)]


@given(
    some.lists(some.tuples(some.integers(0, 400_000), some.booleans()), min_size=1, max_size=30),
    some.sampled_from([1_000, 7_000, 60_000]),
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_no_tick_comes_twice_or_out_of_order_whatever_stops_and_starts(
    steps: list[tuple[int, bool]], every: int
) -> None:
    """Each step lets time pass; at some all brokers had been down, and the last tick is known from the log alone."""
    timetable, published, handled, now, up_since = Interval(0, every), [], START, START, START - DAY
    for passed, was_down in steps:
        now += passed
        if was_down:
            up_since, handled = now, max(published, default=START)
        found = due_ticks(timetable, handled, now, up_since_ms=up_since, catch_up=True)
        published += found.ticks
        handled = found.upto_ms
    assert published == sorted(set(published))
    assert all(START < tick <= now for tick in published)


@given(some.lists(some.integers(0, 90_000), min_size=1, max_size=40), some.integers(1_000, 60_000))
def test_while_brokers_are_up_every_tick_is_published_once(passes: list[int], every: int) -> None:
    timetable, published, handled, now = Interval(START, every), [], START, START
    for passed in passes:
        now += passed
        while handled < now:
            found = due_ticks(timetable, handled, now, up_since_ms=START, catch_up=False)
            published += found.ticks
            handled = found.upto_ms
    assert published == list(range(START + every, now + 1, every))


@pytest.mark.parametrize(
    ("at_ms", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (1_700_000_000_000, "2023-11-14T22:13:20Z"),
        (1_700_000_000_001, "2023-11-14T22:13:20.001Z"),
        (1_700_000_000_999, "2023-11-14T22:13:20.999Z"),
    ],
)
def test_a_moment_is_written_as_rfc_3339_has_it(at_ms: int, text: str) -> None:
    assert moment_text(at_ms) == text
    assert datetime.fromisoformat(text) == datetime.fromtimestamp(at_ms / 1_000, UTC)
