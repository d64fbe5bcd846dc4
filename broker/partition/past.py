"""A group on one partition as it was: the fold over the records up to a moment.

The log at a moment is what was appended by then, and is committed now. The fold begins at the newest STATE record
before that moment, or at the start of the log, and takes the records of this group alone. It is read on native threads.
One call reads for a limited time; what it has folded by then is kept, so the next call continues there.

What was removed from the log since then is not known: the past is told only if it needs nothing of that.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import NamedTuple, Protocol

from portalmq.broker.core.fold import PartitionFold, decode_fold
from portalmq.broker.partition.folding import GroupsFold
from portalmq.broker.partition.history import THREAD_WITHIN_S, known_end
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.reader import Reader
from portalmq.broker.storage.batch import BatchKind
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.reading import SCAN_OFFSETS
from portalmq.errors import OffsetOutOfRange, Unavailable

# How long one call folds; how many folds are kept, and the ranges of messages in them.
FOLD_WITHIN_S = 3.0
KEPT_MAX = 512
KEPT_RANGES_MAX = 500_000


class GroupView(Protocol):
    """A partition, as counts and lists of a group's messages see it: now, or in the past."""

    @property
    def log(self) -> Log: ...
    @property
    def reader(self) -> Reader: ...
    @property
    def groups(self) -> GroupsFold: ...
    @property
    def high_watermark(self) -> int: ...


class BothClocks(Protocol):
    """The clocks of a broker."""

    def now_ms(self) -> int: ...
    def wall_ms(self) -> int: ...


class Moment(NamedTuple):
    """Both clocks of a broker, at a moment."""

    at_ms: int

    def now_ms(self) -> int:
        return self.at_ms

    def wall_ms(self) -> int:
        return self.at_ms


class PastView(NamedTuple):
    """A partition as it was when its log ended at `high_watermark`. `groups` has one group only."""

    log: Log
    reader: Reader
    groups: GroupsFold
    high_watermark: int


class _Kept(NamedTuple):
    """The fold of everything below `end`, of a group in the log that `source` is the present fold of."""

    source: GroupsFold
    group: str
    end: int
    fold: PartitionFold

    @property
    def ranges(self) -> int:
        return sum([len(group.spans) + len(group.dead) + len(group.attempts) for group in self.fold.groups])


class PastGroups:
    """Folds the past of groups, and keeps the last folds."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, str, int], _Kept] = OrderedDict()
        self._ranges = 0

    def view(self, partition: Partition, group: str, at_ms: int, *, until: float | None = None) -> PastView:
        """Return the partition with the group as it was. Raises OffsetOutOfRange where the log no longer says that;
        Unavailable when reading takes longer: a repeat continues."""
        log, source = partition.log, partition.groups
        end = known_end(partition)
        _check_known(partition, end, at_ms)
        end = min(end, log.offset_for_time(at_ms + 1))
        if at_ms < log.replica_start(end).timestamp_before_ms:  # the log ended below its present start
            raise _out_of_reach(partition)
        until = time.monotonic() + FOLD_WITHIN_S if until is None else until
        begin, fold = self._begin(partition, group, end)
        groups = GroupsFold(fold)
        groups.purged_upto = fold.log_start_offset
        start = begin
        while start < end:
            start = partition.reader.on_native(partition.host.pool, _fold_some, log, groups, group, start, end)
            if time.monotonic() >= until:
                break
        if not _is_whole(partition, begin, start):  # records were removed while others were read
            raise _out_of_reach(partition)
        self._keep(source, group, start, groups)
        if start < end:
            raise Unavailable(f"{partition} is still being read up to that time: repeat", retry_after_s=0.1)
        view = PastView(log, partition.reader, groups, end)
        _check_reach(partition, view, group, at_ms)
        return view

    def _begin(self, partition: Partition, group: str, end: int) -> tuple[int, PartitionFold]:
        """Return from where to fold, and the fold of what is before. Raises OffsetOutOfRange."""
        source, log = partition.groups, partition.log
        kept = [each for each in self._kept.values() if each.source is source and each.group == group]
        nearest = max((each for each in kept if each.end <= end), key=lambda each: each.end, default=None)
        if nearest is not None and _is_whole(partition, nearest.end, end):
            return nearest.end, nearest.fold
        fold = partition.reader.on_native(partition.host.pool, _state_before, log, group, end)
        start = fold.applied if fold is not None else 0
        if not _is_whole(partition, start, end):
            raise _out_of_reach(partition)
        return start, fold or PartitionFold()

    def _keep(self, source: GroupsFold, group: str, end: int, groups: GroupsFold) -> None:
        key = (id(source), group, end)
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        kept = _Kept(source, group, end, groups.snapshot_into(PartitionFold(end, groups.purged_upto)))
        self._kept[key] = kept
        self._ranges += kept.ranges
        while len(self._kept) > KEPT_MAX or (len(self._kept) > 1 and self._ranges > KEPT_RANGES_MAX):
            self._ranges -= self._kept.popitem(last=False)[1].ranges


def _check_known(partition: Partition, end: int, at_ms: int) -> None:
    """Raise Unavailable unless this replica has every record that was committed by then. What comes later has no
    earlier time, but another leader may have been elected since."""
    newest_ms = partition.log.replica_start(end).timestamp_before_ms
    if partition.serves and at_ms >= newest_ms:
        partition.wait_led()
    elif at_ms > newest_ms:
        raise Unavailable(f"{partition} is known here up to an earlier time only", retry_after_s=0.1)


def _is_whole(partition: Partition, start: int, end: int) -> bool:
    """Return whether the log still has every record of [start, end)."""
    log, compacted = partition.log, partition.groups.compacted
    if start >= end:
        return True
    if log.base_offset > start:
        return False
    return compacted <= start or not partition.reader.on_native(
        partition.host.pool, log.has_blank, start, min(end, compacted)
    )


def _state_before(log: Log, group: str, end: int) -> PartitionFold | None:
    """Return the newest STATE record below `end`, with this group alone; None without one."""
    state = log.newest_state(end)
    if state is None:
        return None
    fold = decode_fold(state.body)
    fold.applied = state.end_offset
    fold.producers, fold.epochs, fold.outbox = [], [], []
    fold.groups = [each for each in fold.groups if each.group == group]
    fold.streams = [each for each in fold.streams if each.group == group]
    return fold


def _fold_some(log: Log, groups: GroupsFold, group: str, start: int, end: int) -> int:
    """Fold records of the group in [start, end) for a moment. Return where to continue."""
    until = time.monotonic() + THREAD_WITHIN_S
    while start < end:
        upto = min(end, start + SCAN_OFFSETS)
        for batch in log.group_records(group, start, upto):
            if batch.kind not in (BatchKind.STATE, BatchKind.EPOCH_START):  # the fold has what a STATE record has
                groups.take(batch)
        start = upto
        if time.monotonic() >= until:
            break
    return start


def _check_reach(partition: Partition, view: PastView, group: str, at_ms: int) -> None:
    """Raise OffsetOutOfRange if the group had messages unfinished then that may have been removed since."""
    log, now, past = partition.log, partition.groups, view.groups
    gone_upto = log.log_start_offset
    if now.compacted > past.compacted:
        gone_upto = max(gone_upto, now.compacted)
    if gone_upto <= past.purged_upto:
        return
    stream, delivery = past.streams.get(group), past.delivery.get(group)
    if stream is not None and stream.committed < gone_upto:
        raise _out_of_reach(partition)
    if delivery is None:
        return
    # A finished lane 0 says nothing of messages with a priority or a delay.
    present = now.delivery.get(group)
    has_lanes = bool(log.lanes.present or delivery.cursors or (present is not None and present.cursors))
    if delivery.floor() < gone_upto or delivery.has_ahead or has_lanes:
        raise _out_of_reach(partition)


def _out_of_reach(partition: Partition) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"the log of {partition} no longer reaches back to that time",
        log_start_offset=partition.log.log_start_offset,
        high_watermark=partition.high_watermark,
    )
