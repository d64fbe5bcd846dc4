"""Derives from Spark's filters the partitions and offsets that can hold matching rows.

    topic, partition           decided for each log, exactly as Spark would
    offset                     ranges of offsets
    timestamp, appended_at     ranges of ms, which the logs turn into ranges of offsets: append times never fall
    never null                 `is not null` is always true for these columns, and `is null` never

A filter on these columns is applied here in full: the plan has exactly the matching rows, so Spark need not check them.
It is returned to Spark when it is on another column, when a value has an unexpected type, and when it would cut the log
into more pieces than are worth a task each: then the plan covers the first piece to the last, and Spark filters the
rows.

SQL's logic has three values. A comparison with NULL is never true, nor is its negation; only `<=>` treats NULL as a
value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
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

RANGES_MAX: Final = 16
_BEGIN, _END = -(1 << 80), 1 << 80
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

# Columns without NULLs, in any message.
_NEVER_NULL = frozenset(
    {"topic", "partition", "offset", "value", "content_type", "timestamp", "appended_at", "priority", "leader_epoch"}
)
_TIMES = frozenset({"timestamp", "appended_at"})

# Disjoint ranges [low, high) of integers, ascending, none empty, no two adjacent.
Ranges = tuple[tuple[int, int], ...]
ALL: Final[Ranges] = ((_BEGIN, _END),)
NONE: Final[Ranges] = ()

_COMPARISONS: dict[type[Filter], Callable[[Any, Any], bool]] = {
    EqualTo: lambda own, value: own == value,
    EqualNullSafe: lambda own, value: own == value,
    GreaterThan: lambda own, value: own > value,
    GreaterThanOrEqual: lambda own, value: own >= value,
    LessThan: lambda own, value: own < value,
    LessThanOrEqual: lambda own, value: own <= value,
}
_TEXTS: dict[type[Filter], Callable[[str, str], bool]] = {
    StringStartsWith: str.startswith,
    StringEndsWith: str.endswith,
    StringContains: str.__contains__,
}


class _NotOurs(Exception):
    """Spark has to apply this filter."""


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if low >= high:
            continue
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def both(one: Ranges, other: Ranges) -> Ranges:
    return union((max(low, least), min(high, most)) for low, high in one for least, most in other)


def without(ranges: Ranges) -> Ranges:
    """Return the complement of the ranges."""
    borders = [_BEGIN, *(border for pair in ranges for border in pair), _END]
    return union(zip(borders[::2], borders[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of matching rows: in logs that pass `logs`, at these offsets, appended in these ms."""

    logs: tuple[Filter, ...] = ()
    offsets: Ranges = ALL
    times_ms: Ranges = ALL

    @property
    def nothing(self) -> bool:
        """True when no row of any log can match."""
        return not self.offsets or not self.times_ms

    def wants(self, log: PartitionLog) -> bool:
        return not self.nothing and all(
            _is_true(each, log.topic if _column(each) == "topic" else log.partition) for each in self.logs
        )

    def within(self, start: int, end: int, offset_at: Callable[[int], int]) -> Ranges:
        """Return the offsets of [start, end) that may match. `offset_at(ms)` is the first offset from then on."""
        found = both(self.offsets, ((start, end),) if start < end else ())
        if self.times_ms != ALL and found:
            found = both(
                found,
                union(
                    (start if low == _BEGIN else offset_at(low), end if high == _END else offset_at(high))
                    for low, high in self.times_ms
                ),
            )
        return found


def bounds_of(filters: Sequence[Filter]) -> tuple[Bounds, list[Filter]]:
    """Return the bounds of all filters together, and the filters that Spark has to apply itself."""
    bounds, left = Bounds(), []
    for each in filters:
        try:
            bounds, is_exact = _narrowed(bounds, each)
        except _NotOurs:
            is_exact = False
        if not is_exact:
            left.append(each)
    return bounds, left


def _narrowed(bounds: Bounds, each: Filter) -> tuple[Bounds, bool]:
    """Return the bounds with one more filter, and True if they match it exactly. Raises _NotOurs."""
    column = _column(each)
    plain, is_negated = (each.child, True) if isinstance(each, Not) else (each, False)
    if column in _NEVER_NULL and isinstance(plain, IsNull | IsNotNull):
        is_always = isinstance(plain, IsNotNull) != is_negated
        return (bounds if is_always else replace(bounds, offsets=NONE)), True
    if column in {"topic", "partition"}:
        _is_true(each, "" if column == "topic" else 0)  # raises _NotOurs for a filter that cannot be decided
        return replace(bounds, logs=(*bounds.logs, each)), True
    if column == "offset":
        offsets, is_exact = _cut(bounds.offsets, _ranges(each, 1, _whole))
        return replace(bounds, offsets=offsets), is_exact
    if column in _TIMES:
        times_ms, is_exact = _cut(bounds.times_ms, _ranges(each, 1000, _microseconds))
        return replace(bounds, times_ms=times_ms), is_exact
    raise _NotOurs


def _cut(ranges: Ranges, wanted: Ranges) -> tuple[Ranges, bool]:
    """Return the wanted part of the ranges, and True if it is exact. Each range is at least a task, so a few long ones
    are better than many short ones; ranges that were exact before remain so."""
    found = both(ranges, wanted)
    if len(found) <= RANGES_MAX:
        return found, True
    return both(ranges, ((wanted[0][0], wanted[-1][1]),)), False


def _column(each: Filter) -> str:
    plain = each.child if isinstance(each, Not) else each
    attribute: tuple[str, ...] = getattr(plain, "attribute", ())
    return attribute[0] if len(attribute) == 1 else ""


# --- columns with one value in a log ----------------------------------------------------------------------------------


def _is_true(each: Filter, own: str | int) -> bool:
    """True when the filter matches rows whose column is `own`. Raises _NotOurs."""
    if isinstance(each, Not):
        return _holds(each.child, own) is False
    return _holds(each, own) is True


def _holds(each: Filter, own: str | int) -> bool | None:
    """Return True, False, or None for SQL's unknown. `own` is never NULL."""
    if isinstance(each, In):
        equal = [_holds(EqualTo(each.attribute, value), own) for value in each.value]
        return True if True in equal else None if None in equal else False
    value = getattr(each, "value", None)
    if isinstance(each, EqualNullSafe) and value is None:
        return False
    compare: Callable[[Any, Any], bool] | None = _COMPARISONS.get(type(each))
    if compare is None and isinstance(own, str):
        compare = _TEXTS.get(type(each))
    if compare is None:
        raise _NotOurs
    if value is None:
        return None
    if type(value) is not type(own):
        raise _NotOurs
    return compare(own, value)


# --- columns that rise along a log ------------------------------------------------------------------------------------


def _ranges(each: Filter, unit: int, number_of: Callable[[Any], int]) -> Ranges:
    """Return the integers k that match, where the column is k * unit. Raises _NotOurs."""
    if isinstance(each, Not):
        return _ranges_not(each.child, unit, number_of)
    if isinstance(each, In):
        return union(pair for value in each.value for pair in _ranges(EqualTo((), value), unit, number_of))
    if type(each) not in _COMPARISONS:
        raise _NotOurs
    value = getattr(each, "value", None)
    if value is None:
        return NONE
    number = number_of(value)
    below: Ranges = ((_BEGIN, -(-number // unit)),)
    upto: Ranges = ((_BEGIN, number // unit + 1),)
    if isinstance(each, LessThan):
        return below
    if isinstance(each, LessThanOrEqual):
        return upto
    if isinstance(each, GreaterThan):
        return without(upto)
    if isinstance(each, GreaterThanOrEqual):
        return without(below)
    return both(upto, without(below))


def _ranges_not(child: Filter, unit: int, number_of: Callable[[Any], int]) -> Ranges:
    values = child.value if isinstance(child, In) else (getattr(child, "value", None),)
    if None in values and not isinstance(child, EqualNullSafe):
        return NONE
    return without(_ranges(child, unit, number_of))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise _NotOurs
    return value


def _microseconds(value: Any) -> int:
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise _NotOurs
    return (value - _EPOCH) // timedelta(microseconds=1)
