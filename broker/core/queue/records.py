"""The control records that change a group's state, as they stand in the log.

Each says the outcome, never the cause: a grant carries its deadline, a nack the moment from which the message is free
again. So whoever folds the log needs neither a clock nor the group's settings, and every replica arrives at the same
state. Ranges are [start, end) offsets.

Messages of a partition stand in lanes (lanes.py): lane 0 holds the plain ones, in the order of the log. A place in a
lane is (due_ms, offset); where a lane is read in the order of the log, due_ms is 0.
"""

from __future__ import annotations

from typing import Any

import msgspec

Range = tuple[int, int]
# (lane, due_ms, offset)
LanePosition = tuple[int, int, int]


# --- queue groups ----------------------------------------------------------------------------------------------------


class GroupStart(msgspec.Struct, array_like=True, frozen=True):
    """The group begins on this partition at offset `start`; whatever an earlier group of the name knew is gone."""

    start: int
    at_ms: int


class GroupEnd(msgspec.Struct, array_like=True, frozen=True):
    """The group was deleted, be it a queue or a stream."""


class Grant(msgspec.Struct, array_like=True, frozen=True):
    """Messages handed out under one lease. `ranges` are (start, end, delivery number); they hold messages only.

    `lanes` has the lane of each range, or is empty when all are of lane 0. `next` is where lane 0 goes on, `cursors`
    where the other lanes do that moved: all places of a lane below its cursor that are neither granted here nor known
    before are done (they hold no message, or one that has expired). `gone` are messages that were handed out before and
    are done now: they have expired, or were compacted away. `held` are (start, end, lane) of messages that were passed
    over because an earlier one of their key is not done. The numbers of the leases are above `leases_above`: such were
    handed out in this epoch by grants that the disk has refused since.
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
        """Whose the messages are by name: what stands before the colon of the attempt's id, "" where there is none."""
        name, colon, _ = (self.attempt_id or "").partition(":")
        return name if colon else ""


class Ack(msgspec.Struct, array_like=True, frozen=True):
    """These messages are done, for good. `ahead` are those among them that this log never saw granted."""

    ranges: tuple[Range, ...]
    at_ms: int
    ahead: tuple[LanePosition, ...] = ()


class Nack(msgspec.Struct, array_like=True, frozen=True):
    """These messages came back and are free from `available_at_ms` on; ranges may differ in it. `unseen`: nobody has
    looked at them, so that they count as never delivered."""

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
    """These messages, (start, end, deliveries), are given up. Copies go to `topic`, unless that is empty: the record is
    the order to make them, and stands open until a Done."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str = ""
    topic: str = ""


class Redrive(msgspec.Struct, array_like=True, frozen=True):
    """These dead messages, (start, end, available_at_ms), are handed out again, their deliveries counted from zero."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int


class Drop(msgspec.Struct, array_like=True, frozen=True):
    """These dead messages are forgotten."""

    ranges: tuple[Range, ...]
    at_ms: int


class Output(msgspec.Struct, array_like=True, frozen=True):
    """A message to be appended elsewhere. `record` is a storage Record as it is encoded."""

    topic: str
    record: Any
    partition: int | None = None


class Commit(msgspec.Struct, array_like=True, frozen=True):
    """Input done and output ordered, in one record: the atomic act of consume, transform, produce.

    Of a queue group `ranges` and `ahead` are as in Ack; of a stream group `offset` is the next one to read, committed
    by `member` in `generation`. The outputs stand open until a Done. `commit_id` names what was shown: whoever shows
    the same again repeats this commit.
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
    """All that the Dead or Commit record at offset `record` ordered has been appended."""

    record: int


# --- stream groups ---------------------------------------------------------------------------------------------------


class Claim(msgspec.Struct, array_like=True, frozen=True):
    """`member` owns the partition from `generation` on. Where the group is new here, it begins at offset `start`."""

    member: str
    generation: int
    start: int
    at_ms: int


class CommitOffset(msgspec.Struct, array_like=True, frozen=True):
    """The group goes on at `offset`, the next one to read."""

    offset: int
    member: str
    generation: int
    at_ms: int


class Seek(msgspec.Struct, array_like=True, frozen=True):
    """The group is set to `offset`, forward or back. `generation` fences what was under way, as a Claim does. A call
    under `seek_id` is done once, however often it arrives."""

    offset: int
    generation: int
    at_ms: int
    seek_id: bytes = b""


# --- the partition as a whole ----------------------------------------------------------------------------------------


class Purge(msgspec.Struct, array_like=True, frozen=True):
    """The log begins at `upto`: everything below is gone, for every group."""

    upto: int


class Cancel(msgspec.Struct, array_like=True, frozen=True):
    """These scheduled messages are taken back: no group is given them."""

    ranges: tuple[Range, ...]


class Compact(msgspec.Struct, array_like=True, frozen=True):
    """Below `upto` only the last message of each key stays; tombstones older than `tombstones_before_ms` go too."""

    upto: int
    tombstones_before_ms: int


GroupRecord = GroupStart | GroupEnd | Grant | Ack | Nack | Extend | Dead | Redrive | Drop | Commit | Done
StreamRecord = Claim | CommitOffset | Seek


def ranges_of(offsets: list[int]) -> tuple[Range, ...]:
    """Sorted, disjoint ranges that cover exactly `offsets`."""
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
    """Keep the newest `at_most` commits."""
    commits[commit_id] = offset
    while len(commits) > at_most:
        del commits[next(iter(commits))]
