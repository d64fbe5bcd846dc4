"""Filters as ranges: they pass the same rows as SQL, by examples and by evaluation row by row."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringEndsWith,
    StringStartsWith,
)

from portalmq.spark.origin import PartitionLog
from portalmq.spark.reading.filters import ALL, NONE, RANGES_MAX, Bounds, both, bounds_of, union, without

OFFSET, TIME, TOPIC, PARTITION = ("offset",), ("timestamp",), ("topic",), ("partition",)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)


def offsets_of(*filters, start=0, end=100):
    bounds, left = bounds_of(filters)
    assert left == []
    return bounds.within(start, end, lambda ms: pytest.fail("no time was asked for"))


@pytest.mark.parametrize(
    ("asked", "ranges"),
    [
        (GreaterThan(OFFSET, 5), ((6, 100),)),
        (GreaterThanOrEqual(OFFSET, 5), ((5, 100),)),
        (LessThan(OFFSET, 5), ((0, 5),)),
        (LessThanOrEqual(OFFSET, 5), ((0, 6),)),
        (EqualTo(OFFSET, 5), ((5, 6),)),
        (EqualTo(OFFSET, 100), ()),
        (EqualNullSafe(OFFSET, 5), ((5, 6),)),
        (EqualNullSafe(OFFSET, None), ()),
        (EqualTo(OFFSET, None), ()),
        (In(OFFSET, [7, 5, 6, 9, None]), ((5, 8), (9, 10))),
        (In(OFFSET, []), ()),
        (Not(EqualTo(OFFSET, 5)), ((0, 5), (6, 100))),
        (Not(EqualTo(OFFSET, None)), ()),
        (Not(EqualNullSafe(OFFSET, None)), ((0, 100),)),
        (Not(In(OFFSET, [5, None])), ()),
        (Not(In(OFFSET, [5, 7])), ((0, 5), (6, 7), (8, 100))),
        (Not(LessThan(OFFSET, 5)), ((5, 100),)),
        (IsNull(OFFSET), ()),
        (IsNotNull(OFFSET), ((0, 100),)),
        (Not(IsNull(OFFSET)), ((0, 100),)),
        (Not(IsNotNull(OFFSET)), ()),
    ],
)
def test_comparisons_with_an_offset_are_ranges(asked, ranges):
    assert offsets_of(asked) == ranges


def test_filters_that_contradict_each_other_leave_nothing():
    bounds, _ = bounds_of([GreaterThan(OFFSET, 5), LessThan(OFFSET, 3)])
    assert bounds.nothing
    assert not bounds.wants(PartitionLog("t", "id", 0, 0, 10))


@pytest.mark.parametrize(
    ("asked", "times"),
    [
        (GreaterThanOrEqual(TIME, at(5_000)), (5, None)),
        (GreaterThanOrEqual(TIME, at(5_001)), (6, None)),
        (GreaterThan(TIME, at(5_000)), (6, None)),
        (GreaterThan(TIME, at(4_999)), (5, None)),
        (LessThan(TIME, at(5_000)), (None, 5)),
        (LessThan(TIME, at(5_001)), (None, 6)),
        (LessThanOrEqual(TIME, at(5_000)), (None, 6)),
        (LessThanOrEqual(TIME, at(4_999)), (None, 5)),
        (EqualTo(TIME, at(5_000)), (5, 6)),
        (EqualTo(TIME, at(5_000).astimezone(ZoneInfo("America/New_York"))), (5, 6)),
    ],
)
def test_comparisons_with_a_time_are_ranges_of_whole_ms(asked, times):
    bounds, left = bounds_of([asked])
    assert left == []
    # Append times are 0, 2, 4 ... ms: the first offset at ms or later is its half, rounded up.
    low, high = times
    expected = (0 if low is None else -(-low // 2), 100 if high is None else -(-high // 2))
    assert bounds.within(0, 100, lambda ms: -(-ms // 2)) == union([expected])


def test_a_time_between_two_ms_equals_none():
    assert bounds_of([EqualTo(TIME, at(5_001))])[0].nothing
    assert not bounds_of([Not(EqualTo(TIME, at(5_001)))])[0].nothing


def test_both_time_columns_are_equivalent():
    bounds, _ = bounds_of([GreaterThanOrEqual(TIME, at(4_000)), LessThan(("appended_at",), at(8_000))])
    assert bounds.within(0, 100, lambda ms: ms) == ((4, 8),)


@pytest.mark.parametrize(
    ("asked", "topics"),
    [
        (EqualTo(TOPIC, "b"), "b"),
        (Not(EqualTo(TOPIC, "b")), "a c bc"),
        (In(TOPIC, ["a", "c"]), "a c"),
        (In(TOPIC, ["a", None]), "a"),
        (Not(In(TOPIC, ["a", None])), ""),
        (GreaterThan(TOPIC, "b"), "c bc"),
        (LessThanOrEqual(TOPIC, "b"), "a b"),
        (StringStartsWith(TOPIC, "b"), "b bc"),
        (Not(StringStartsWith(TOPIC, "b")), "a c"),
        (StringEndsWith(TOPIC, "c"), "c bc"),
        (StringContains(TOPIC, ""), "a b c bc"),
        (EqualTo(TOPIC, None), ""),
        (Not(EqualTo(TOPIC, None)), ""),
        (EqualNullSafe(TOPIC, None), ""),
        (Not(EqualNullSafe(TOPIC, None)), "a b c bc"),
        (IsNull(TOPIC), ""),
    ],
)
def test_a_topic_is_decided_for_each_log(asked, topics):
    bounds, left = bounds_of([asked])
    assert left == []
    assert [name for name in ("a", "b", "c", "bc") if bounds.wants(PartitionLog(name, "id", 0, 0, 9))] == topics.split()


def test_a_partition_is_decided_for_each_log():
    bounds, left = bounds_of([In(PARTITION, [1, 2]), Not(EqualTo(PARTITION, 2)), IsNotNull(PARTITION)])
    assert left == []
    assert [number for number in range(4) if bounds.wants(PartitionLog("t", "id", number, 0, 9))] == [1]


@pytest.mark.parametrize(
    "foreign",
    [
        GreaterThan(("value",), b"x"),
        EqualTo(("headers", "a"), "b"),
        IsNotNull(("key",)),
        IsNull(("producer_id",)),
        GreaterThan(OFFSET, 1.5),
        GreaterThan(OFFSET, True),
        GreaterThan(TIME, datetime(2025, 1, 1)),
        EqualTo(TOPIC, 5),
        EqualTo(PARTITION, "1"),
        StringContains(OFFSET, "1"),
        Not(StringContains(PARTITION, "1")),
    ],
)
def test_unsupported_filters_go_back_to_spark(foreign):
    own = GreaterThan(OFFSET, 5)
    bounds, left = bounds_of([foreign, own])
    assert len(left) == 1
    assert left[0] is foreign
    assert bounds == bounds_of([own])[0]


def test_many_ranges_become_one_and_spark_filters_its_rows():
    exact, scattered = Not(EqualTo(OFFSET, 50)), In(OFFSET, list(range(10, 90, 2)))
    assert len(scattered.value) > RANGES_MAX
    bounds, left = bounds_of([exact, scattered])
    assert left == [scattered]
    assert bounds.within(0, 100, lambda ms: 0) == ((10, 50), (51, 89))


# --- against SQL, row by row ------------------------------------------------------------------------------------------


def sql(asked, row):
    """Return SQL's result of a filter: True, False, or None."""
    if isinstance(asked, Not):
        value = sql(asked.child, row)
        return None if value is None else not value
    own = row[asked.attribute[0]]
    if isinstance(asked, IsNull | IsNotNull):
        return (own is None) == isinstance(asked, IsNull)
    if isinstance(asked, EqualNullSafe):
        return own == asked.value
    if isinstance(asked, In):
        return True if own in asked.value else None if None in asked.value else False
    if asked.value is None:
        return None
    return {
        EqualTo: own == asked.value,
        GreaterThan: own > asked.value,
        GreaterThanOrEqual: own >= asked.value,
        LessThan: own < asked.value,
        LessThanOrEqual: own <= asked.value,
    }[type(asked)]


NUMBERS = st.integers(-3, 25)
MOMENTS = st.integers(-3_000, 14_000).map(at)
KINDS = [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual]


def comparisons(column, values):
    maybe = values | st.none()
    one = st.builds(lambda kind, value: kind(column, value), st.sampled_from(KINDS), maybe)
    several = st.builds(lambda found: In(column, found), st.lists(maybe, max_size=25))
    plain = one | several | st.sampled_from([IsNull(column), IsNotNull(column)])
    return plain | plain.map(Not)


FILTERS = st.lists(
    comparisons(OFFSET, NUMBERS)
    | comparisons(TIME, MOMENTS)
    | comparisons(("appended_at",), MOMENTS)
    | comparisons(PARTITION, st.integers(0, 3))
    | comparisons(TOPIC, st.sampled_from(["", "a", "b", "z"])),
    max_size=4,
)


@settings(max_examples=600, deadline=None)
@given(FILTERS, st.integers(0, 5), st.lists(st.sampled_from([0, 0, 1, 3]), min_size=18, max_size=18))
def test_ranges_and_remaining_filters_pass_the_same_rows_as_sql(filters, start, steps):
    end = start + len(steps)
    times_ms = [sum(steps[: index + 1]) for index in range(len(steps))]
    bounds, left = bounds_of(filters)

    def offset_at(ms):
        return next((start + index for index, own in enumerate(times_ms) if own >= ms), end)

    for log in (PartitionLog("a", "id", 0, start, end), PartitionLog("b", "id", 2, start, end)):
        rows = [
            {"topic": log.topic, "partition": log.partition, "offset": offset}
            | dict.fromkeys(("timestamp", "appended_at"), at(1000 * times_ms[offset - start]))
            for offset in range(start, end)
        ]
        planned = bounds.within(start, end, offset_at) if bounds.wants(log) else ()
        assert len(planned) <= 2 * RANGES_MAX
        read = [row for row in rows if any(low <= row["offset"] < high for low, high in planned)]
        assert [row for row in read if all(sql(each, row) is True for each in left)] == [
            row for row in rows if all(sql(each, row) is True for each in filters)
        ]


PAIRS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6)


@given(PAIRS, PAIRS)
def test_ranges_are_sets(one, other):
    def members(ranges):
        return {number for number in range(25) for low, high in ranges if low <= number < high}

    left, right = union(one), union(other)
    assert members(both(left, right)) == members(left) & members(right)
    assert members(without(left)) == set(range(25)) - members(left)
    assert both(left, without(left)) == NONE
    assert without(NONE) == ALL
    assert Bounds().within(3, 9, lambda ms: 0) == ((3, 9),)
