"""The control records that change a group's state, as stored in the log.

Each states the outcome, never the cause: a grant carries its deadline, a nack the time at which the message is free
again. So folding the log needs neither a clock nor the group's settings, and every replica computes the same state.
Ranges are [start, end) offsets.

Each message of a partition is in a lane (lanes.py); lane 0 holds the plain ones, in the order of the log. A position in
a lane is (due_ms, offset); due_ms is 0 in lanes that are read in the order of the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Range = tuple[int, int]
# (lane, due_ms, offset)
LanePosition = tuple[int, int, int]


# --- queue groups ----------------------------------------------------------------------------------------------------


class GroupStart(msgspec.Struct, array_like=True, frozen=True):
    """The group begins on this partition at offset `start`; the state of an earlier group of that name is dropped."""

    start: int
    at_ms: int


class GroupEnd(msgspec.Struct, array_like=True, frozen=True):
    """The group, queue or stream, was deleted."""


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """Messages delivered under one lease. `ranges` are (start, end, delivery number); they hold messages only. A lease
    that is no delivery repeats the number of the last one, 0 for none.

    `lanes` has the lane of each range, or is empty if all are in lane 0. `next` is the new cursor of lane 0, `cursors`
    those of other lanes that moved. Positions below a cursor that are neither granted here nor known before are
    finished (they hold no message, or an expired one). `gone` are messages that were delivered before and are finished
    now: they expired, or were compacted away. `held` are (start, end, lane) of messages that were passed over because
    an earlier one of their key is not finished. Lease numbers are above `leases_above`: lower ones were given out in
    this epoch by grants that the disk refused.
    """

    ranges: tuple[tuple[int, int, int], ...]
    next: int
    granted_at_ms: int
    deadline_ms: int
    consumer: str = ""
    attempt_id: str | None = None
    lanes: tuple[int, ...] = ()
    cursors: tuple[LanePosition, ...] = ()
    gone: tuple[Range, ...] = ()
    held: tuple[tuple[int, int, int], ...] = ()
    leases_above: int = 0

    @property
    def holder(self) -> str:
        """The holder's name: the attempt id up to its colon, "" without a colon."""
        name, colon, _ = (self.attempt_id or "").partition(":")
        return name if colon else ""


class Ack(msgspec.Struct, array_like=True, frozen=True):
    """These messages are finished for good. `ahead` are more of them, in none of the ranges: those whose grant is not
    in this log."""

    ranges: tuple[Range, ...]
    at_ms: int
    ahead: tuple[LanePosition, ...] = ()


class Nack(msgspec.Struct, array_like=True, frozen=True):
    """These messages are free again from `available_at_ms` on, which may differ between ranges. `unseen`: they were not
    processed, so the delivery does not count."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str | None = None
    unseen: bool = False


class Extend(msgspec.Struct, array_like=True, frozen=True):
    """The lease of these messages ends at `deadline_ms` instead."""

    ranges: tuple[Range, ...]
    deadline_ms: int
    at_ms: int


class Dead(msgspec.Struct, array_like=True, frozen=True):
    """These messages, (start, end, deliveries), are given up. Copies go to `topic`, unless it is empty: this record
    orders them, and is open until a Done."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str = ""
    topic: str = ""


class Redrive(msgspec.Struct, array_like=True, frozen=True):
    """These dead messages, (start, end, available_at_ms), are delivered again, with deliveries counted from zero."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int


class Drop(msgspec.Struct, array_like=True, frozen=True):
    """These dead messages are dropped."""

    ranges: tuple[Range, ...]
    at_ms: int


class Pause(msgspec.Struct, array_like=True, frozen=True):
    """The group is paused, or with `paused` False resumed. Each change of the group has a higher `number`; a record
    with a lower one than the group's changes nothing. `by` names who asked."""

    number: int
    at_ms: int
    paused: bool
    reason: str = ""
    by: str = ""


class Output(msgspec.Struct, array_like=True, frozen=True):
    """A message to append elsewhere. `record` is an encoded storage Record."""

    topic: str
    record: Any
    partition: int | None = None


class Commit(msgspec.Struct, array_like=True, frozen=True):
    """Finished input and ordered output in one record: the atomic act of consume, transform, produce.

    For a queue group, `ranges` and `ahead` are as in Ack. For a stream group, `offset` is the next one to read,
    committed by `member` in `generation`. The outputs are open until a Done. `commit_id` identifies the request:
    sending the same again repeats this commit.
    """

    commit_id: bytes
    at_ms: int
    outputs: tuple[Output, ...]
    ranges: tuple[Range, ...] = ()
    ahead: tuple[LanePosition, ...] = ()
    offset: int = -1
    member: str = ""
    generation: int = 0


class Done(msgspec.Struct, array_like=True, frozen=True):
    """All output ordered by the Dead or Commit record at offset `record` is appended."""

    record: int


# --- stream groups ---------------------------------------------------------------------------------------------------


class Claim(msgspec.Struct, array_like=True, frozen=True):
    """`member` owns the partition from `generation` on. A group that is new on this partition begins at offset
    `start`."""

    member: str
    generation: int
    start: int
    at_ms: int


class CommitOffset(msgspec.Struct, array_like=True, frozen=True):
    """The group continues at `offset`, the next one to read."""

    offset: int
    member: str
    generation: int
    at_ms: int


class Seek(msgspec.Struct, array_like=True, frozen=True):
    """The group's offset is set to `offset`, forward or back. `generation` fences earlier calls, as a Claim does. A
    call with a `seek_id` takes effect once, however often it arrives."""

    offset: int
    generation: int
    at_ms: int
    seek_id: bytes = b""


# --- the partition as a whole ----------------------------------------------------------------------------------------


class Purge(msgspec.Struct, array_like=True, frozen=True):
    """The log begins at `upto`: everything below is deleted, for every group."""

    upto: int


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """These scheduled messages are cancelled: no group receives them."""

    ranges: tuple[Range, ...]


class Reschedule(msgspec.Struct, array_like=True, frozen=True):
    """These scheduled messages are cancelled, as by Cancel, and copies of them ordered, to be delivered at
    `deliver_at_ms`, or at once where that is 0. The record is open until a Done."""

    ranges: tuple[Range, ...]
    at_ms: int
    deliver_at_ms: int = 0


class Compact(msgspec.Struct, array_like=True, frozen=True):
    """Below `upto` only the last message of each key stays; tombstones older than `tombstones_before_ms` are removed
    too. A message with an id stays unless it is older than one of the times: earlier versions write only the first."""

    upto: int
    tombstones_before_ms: int
    ids_before_ms: int = 0


GroupRecord = GroupStart | GroupEnd | Grant | Ack | Nack | Extend | Dead | Redrive | Drop | Pause | Commit | Done
StreamRecord = Claim | CommitOffset | Seek


def ranges_of(offsets: Sequence[int]) -> tuple[Range, ...]:
    """Return sorted, disjoint ranges that cover exactly `offsets`."""
    if isinstance(offsets, range) and offsets:
        return ((offsets[0], offsets[-1] + 1),)
    rising = sorted(set(offsets))
    if rising and rising[-1] - rising[0] < len(rising):
        return ((rising[0], rising[-1] + 1),)
    ranges: list[Range] = []
    start = end = -1
    for offset in rising:
        if offset == end:
            end += 1
            continue
        if end > start:
            ranges.append((start, end))
        start, end = offset, offset + 1
    if end > start:
        ranges.append((start, end))
    return tuple(ranges)


def remember_commit(commits: dict[bytes, int], commit_id: bytes, offset: int, at_most: int) -> None:
    """Add a commit and keep the newest `at_most`."""
    commits[commit_id] = offset
    while len(commits) > at_most:
        del commits[next(iter(commits))]
