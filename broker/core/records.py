"""The control records that change a group's state, as they stand in the log.

Each says the outcome, never the cause: a grant carries its deadline, a nack the moment from which the message is free
again. So whoever folds the log needs neither a clock nor the group's settings, and every replica arrives at the same
state. Ranges are [start, end) offsets.
"""

from __future__ import annotations

import msgspec

Range = tuple[int, int]


class GroupStart(msgspec.Struct, array_like=True, frozen=True):
    """The group begins on this partition at offset `start`; whatever an earlier group of the name knew is gone."""

    start: int
    at_ms: int


class GroupEnd(msgspec.Struct, array_like=True, frozen=True):
    """The group was deleted."""


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """Messages handed out under one lease. `ranges` are (start, end, delivery number); they hold messages only.

    Offsets below `next` that are neither granted here nor known before hold no messages and are done.
    """

    ranges: tuple[tuple[int, int, int], ...]
    next: int
    granted_at_ms: int
    deadline_ms: int
    consumer: str = ""
    attempt_id: str | None = None


class Ack(msgspec.Struct, array_like=True, frozen=True):
    """These messages are done, for good."""

    ranges: tuple[Range, ...]
    at_ms: int


class Nack(msgspec.Struct, array_like=True, frozen=True):
    """These messages came back and are free from `available_at_ms` on; ranges may differ in it."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str | None = None


class Extend(msgspec.Struct, array_like=True, frozen=True):
    """The lease of these messages ends at `deadline_ms` instead."""

    ranges: tuple[Range, ...]
    deadline_ms: int
    at_ms: int


class Purge(msgspec.Struct, array_like=True, frozen=True):
    """The log begins at `upto`: everything below is gone, for every group."""

    upto: int


GroupRecord = GroupStart | GroupEnd | Grant | Ack | Nack | Extend


def ranges_of(offsets: list[int]) -> tuple[Range, ...]:
    """Sorted, disjoint ranges that cover exactly `offsets`."""
    ranges: list[Range] = []
    start = end = -1
    for offset in sorted(set(offsets)):
        if offset == end:
            end += 1
            continue
        if end > start:
            ranges.append((start, end))
        start, end = offset, offset + 1
    if end > start:
        ranges.append((start, end))
    return tuple(ranges)
