"""The age of messages: three clocks have to agree, and no single clock makes a log old at once."""

from __future__ import annotations

from portalmq.broker.core.replica.age import DAYS_AN_HOUR, Age, SavedAge

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
START_MS = 1_700_000_000_000


def test_a_log_without_appends_ages_with_time():
    age = Age(START_MS, START_MS, START_MS)
    assert age.time_ms(START_MS, START_MS + HOUR_MS, START_MS + HOUR_MS) == START_MS + HOUR_MS
    assert age.time_ms(START_MS, START_MS + 3 * DAY_MS, START_MS + 3 * DAY_MS) == START_MS + 3 * DAY_MS


def test_a_time_of_day_that_jumps_ahead_makes_nothing_old():
    age = Age(START_MS, START_MS, START_MS)
    assert age.time_ms(START_MS, START_MS + 10, START_MS + 8 * DAY_MS) == START_MS + 10


def test_a_time_of_day_that_falls_behind_makes_nothing_old():
    age = Age(START_MS, START_MS, START_MS)
    assert age.time_ms(START_MS, START_MS + HOUR_MS, START_MS - 5) == START_MS - 5


def test_a_log_that_follows_a_wrong_clock_ages_by_a_day_an_hour():
    age, wrong_ms = Age(START_MS, START_MS, START_MS), START_MS + 80 * DAY_MS
    for hours in range(1, 5):
        assert age.time_ms(wrong_ms, START_MS + hours * HOUR_MS, wrong_ms) == START_MS + hours * DAYS_AN_HOUR * HOUR_MS
    mended_ms = START_MS + 5 * HOUR_MS
    assert age.time_ms(wrong_ms, mended_ms, mended_ms) == mended_ms


def test_after_a_long_stop_messages_are_old_within_hours():
    age, now_ms = Age(START_MS, 0, START_MS), START_MS + 3 * DAY_MS
    assert age.time_ms(now_ms, 3 * HOUR_MS, now_ms) == now_ms


def test_an_empty_log_begins_with_its_first_append():
    age = Age(0, 7, 0)
    assert age.time_ms(0, 17, START_MS) == 0
    assert age.time_ms(START_MS, 27, START_MS) == START_MS


def test_a_new_log_whose_later_part_follows_a_wrong_clock_ages_from_its_first_part():
    """Found by `make simulate-shell SEED=2017`: a clock that jumped before the first round of retention."""
    age, wrong_ms = Age(0, START_MS, 0), START_MS + 8 * DAY_MS
    assert age.time_ms(wrong_ms, START_MS + 10, wrong_ms, START_MS) == START_MS + 10 * DAYS_AN_HOUR
    assert age.time_ms(wrong_ms, START_MS + HOUR_MS, wrong_ms, START_MS) == START_MS + DAY_MS


def test_a_restart_goes_on_from_the_saved_time():
    """Found by `make simulate-shell SEED=43944`."""
    age, wrong_ms = Age(START_MS, START_MS, START_MS), START_MS + 8 * DAY_MS
    assert age.time_ms(wrong_ms, START_MS + 1_000, wrong_ms) == age.reached_ms == START_MS + 24_000
    after = Age(wrong_ms, START_MS + 2_000, age.reached_ms)
    assert after.time_ms(wrong_ms, START_MS + 3_000, wrong_ms) == START_MS + 48_000


def test_a_stop_counts_for_a_day_at_most_and_a_jump_of_the_clock_once():
    saved = SavedAge(START_MS, START_MS + HOUR_MS)
    assert saved.after_stop(START_MS + 3 * HOUR_MS) == START_MS + 2 * HOUR_MS
    assert saved.after_stop(START_MS + 80 * DAY_MS) == START_MS + DAY_MS
    assert saved.after_stop(START_MS - DAY_MS) == START_MS
    jumped = SavedAge(START_MS + DAY_MS, START_MS + 80 * DAY_MS)
    assert jumped.after_stop(START_MS + 80 * DAY_MS + 5) == START_MS + DAY_MS + 5


def test_a_saved_time_beyond_the_last_append_does_not_count():
    assert Age(START_MS, START_MS, START_MS + DAY_MS).time_ms(START_MS, START_MS, START_MS + DAY_MS) == START_MS
