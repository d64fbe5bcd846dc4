"""Maintenance of a partition's files: snapshots of the fold, purges, retention, the search for damage.

A snapshot is taken of the present fold, and saved once all of it is committed. So a partition that is never idle is
saved too, and a snapshot contains nothing that a truncation could remove. Leader and followers do this alike, each for
its own files. Only a leader writes STATE records, and no log start passes the newest committed one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

import gevent
import msgspec

from portalmq.broker.core.fold import PartitionFold, encode_fold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.records import Purge
from portalmq.broker.core.replica.age import Age, SavedAge
from portalmq.broker.core.replica.events import EpochNeeded
from portalmq.broker.partition.folding import GroupsFold
from portalmq.broker.partition.host import Replica
from portalmq.broker.partition.native import attempt
from portalmq.broker.partition.refusals import not_serving_yet
from portalmq.broker.partition.writer import Pending
from portalmq.broker.storage.batch import BatchKind
from portalmq.broker.storage.errors import OffsetPurged, Shortage, StorageError
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.reading import ReplicaStart
from portalmq.broker.storage.state import StateFile
from portalmq.errors import PortalMQError, Unavailable

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# How long a purge waits for what the outbox has still to read.
ORDERS_WITHIN_S = 5.0
ORDERS_POLL_S = 0.02
# How many batches of an unsealed segment are checked at a time; a sealed one is checked as a whole, by its SHA-256.
SCRUB_BYTES = 128 * 1024
STATE_REPLACED = "its state file was damaged, and is written again"


class RetainedReplica(Replica, Protocol):
    """A partition, as its snapshots, purges and retention see it."""

    changed: bool
    serves: bool
    readable_end: int
    start: ReplicaStart
    groups: GroupsFold
    delivery: dict[str, GroupDelivery]

    def snapshot(self) -> PartitionFold: ...
    def append_control(self, kind: BatchKind, body: bytes) -> Pending: ...
    def wait_settled(self, offset: int) -> None: ...


class Retention:
    """`unsaved` is a snapshot that is saved once all of it is committed, or None.

    Invariant: it is a fold that this replica's log contained when it was taken."""

    def __init__(self, partition: RetainedReplica) -> None:
        self._partition = partition
        self.unsaved: PartitionFold | None = None
        self._is_due = False
        # The next part to check, None before a round, which ends where the log ended when it began: a log may grow
        # faster than it is checked.
        self._scrub_at: int | None = None
        self._scrub_until = 0
        clock, saved = partition.host.clock, partition.state_file.age
        begin_ms = SavedAge(*saved).after_stop(clock.wall_ms()) if saved else partition.log.oldest_timestamp_ms
        self._age = Age(partition.log.last_timestamp_ms, clock.now_ms(), begin_ms)

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def save_state(self) -> None:
        """Bring state.sqlite up to the high watermark, when that has moved."""
        self._save()
        if self._partition.changed and self.unsaved is None:
            self._is_due = True
            self.take_snapshot_if_due()
            self._save()

    def save_last(self) -> None:
        """Save the state before the files are closed. A fold beyond the known high watermark is not saved; then only
        the high watermark is, so that readers of the files see all that was acknowledged."""
        self.save_state()
        partition = self._partition
        if partition.changed or self.unsaved is not None:
            known = partition.high_watermark, partition.log.messages_before
            partition.host.pool.apply(_save_high_watermark, (partition.state_file, *known))

    def take_snapshot_if_due(self) -> None:
        """Take a snapshot when one is due and the core's fold and the groups' fold agree. The core folds each event,
        the groups' fold what is written (on a leader: appended). They agree on a serving leader always, elsewhere
        between two transactions. A newly elected leader may still have records of the last one to write."""
        replica = self._partition.replica
        if self._is_due and (self._partition.serves or replica.durable_end == replica.next_offset):
            self._is_due = False
            self._partition.changed = False
            self.unsaved = self._partition.snapshot()

    def forget_snapshot(self) -> None:
        """Drop the snapshot: the log was truncated or begun again, and may not contain it."""
        self.unsaved = None
        self._partition.changed = True

    def _save(self) -> None:
        partition, fold = self._partition, self.unsaved
        if fold is None or fold.applied > partition.high_watermark:
            return
        self._age_ms()
        reached_ms = self._age.reached_ms  # 0 before the first append
        age = SavedAge(reached_ms, partition.host.clock.wall_ms()) if reached_ms else None
        known = (partition.high_watermark, partition.log.messages_before, age)
        saved = partition.host.pool.apply(_save, (partition.state_file, fold, *known))
        if self.unsaved is fold:
            self.unsaved = None
            partition.changed = partition.changed or not saved

    # --- the log start -----------------------------------------------------------------------------------------------

    def write_state(self) -> Pending:
        """Append the present fold to the log."""
        partition = self._partition
        partition.step(EpochNeeded())
        fold = partition.snapshot()
        pending = partition.append_control(BatchKind.STATE, encode_fold(fold))
        partition.groups.state_written(pending.base_offset, fold.log_start_offset)
        return pending

    def purge(self, upto: int | None) -> None:
        """Remove everything below `upto` (all that is readable, when None), durably on return."""
        partition = self._partition
        upto = partition.high_watermark if upto is None else min(upto, partition.high_watermark)
        if upto > partition.log.log_start_offset:
            order = self.open_order(upto, ORDERS_WITHIN_S)
            if order is not None:
                raise Unavailable(
                    f"nothing was purged: the outputs that the record at offset {order} has ordered are still to be"
                    " appended to their topics",
                    retry_after_s=1,
                )
            self._begin_at(upto)
        partition.wait_settled(upto - 1)

    def _begin_at(self, upto: int) -> None:
        """Let the log begin at `upto` on all replicas, which follow the records. Durable here on return. Raises
        Unavailable where this broker was elected again meanwhile: its fold may lack records of the leader before."""
        partition = self._partition
        if partition.replica.leading and not partition.serves:
            raise not_serving_yet()
        purge = partition.append_control(BatchKind.PURGE, msgspec.msgpack.encode(Purge(upto)))
        partition.groups.purge(purge.base_offset, upto)
        try:
            self.write_state().wait()
            failed = self._advance(upto)
            if failed is not None:
                raise failed
        except PortalMQError as error:
            error.outcome = "unknown"  # the purge is on its way, and the next leader would finish it
            raise

    def open_order(self, upto: int, within_s: float) -> int | None:
        """Return the first offset, below `upto`, that the outbox must still read after a wait; None without one."""
        deadline = time.monotonic() + within_s
        while (ordered_from := self._partition.groups.ordered_from()) is not None and ordered_from < upto:
            if time.monotonic() >= deadline:
                return ordered_from
            gevent.sleep(ORDERS_POLL_S)
        return None

    def has_order_below(self, end: int, within_s: float) -> bool:
        """Return whether the outbox still has an order below `end` after a wait."""
        deadline = time.monotonic() + within_s
        while self._partition.groups.first_order() < end:
            if time.monotonic() >= deadline or self._partition.closed:
                return True
            gevent.sleep(ORDERS_POLL_S)
        return False

    def finish_purges(self) -> None:
        """Finish purges of an earlier leader that ended before it wrote the STATE that lets the log start move. If this
        fails, the next purge or the next leader does it."""
        try:
            if self._partition.serves and self._partition.groups.purges:
                self.write_state()
        except PortalMQError as error:
            log.info("%s: its purges are delayed: %s", self._partition, error)

    def move_log_start(self, upto: int) -> None:
        """Move the log start: a purge is committed, and a STATE record after it."""
        if upto > self._partition.log.log_start_offset and not self._partition.closed:
            gevent.spawn(self._move_log_start, upto)

    def _move_log_start(self, upto: int) -> None:
        failed = self._advance(upto)
        if isinstance(failed, Shortage):
            self._partition.groups.moves.insert(0, (0, upto))  # again, when the high watermark moves next
        elif failed is not None and not isinstance(failed, Unavailable):
            self._partition.storage_failed(failed)

    def _advance(self, upto: int) -> Exception | None:
        partition = self._partition
        if partition.closed or upto <= partition.log.log_start_offset:
            return None
        moved = attempt(partition.host.pool, _advance, partition.log, upto)
        if not isinstance(moved, ReplicaStart):
            return moved
        self._moved(moved)
        partition.readable_end = max(partition.readable_end, upto)
        return None

    def _moved(self, start: ReplicaStart) -> None:
        """Send followers that ask for less to the new start."""
        self._partition.start = start
        self._partition.replica.log_start_offset = start.offset

    # --- retention ---------------------------------------------------------------------------------------------------

    def retain(self, retention_ms: int | None, retention_bytes: int | None, group_expiry_ms: int) -> None:
        """Seal rolled segments, and remove those below the log start. A leader moves the log start past segments that
        are too old or too much and that no active group still needs. Its followers follow, without using their own
        clocks."""
        partition = self._partition
        log_ms, now_ms = partition.replica.last_timestamp_ms, partition.host.clock.now_ms()
        if partition.log.sealed_upto < partition.log.active_base_offset:
            self._on_files(partition.log.seal, partition.high_watermark)
        age_ms = self._age_ms()
        partition.replica.producers.expire(min(age_ms, log_ms) - partition.dedup_window_ms)
        if partition.serves:
            upto = partition.log.retention_candidate(age_ms, retention_ms, retention_bytes)
            upto = self._unneeded_below(upto, min(age_ms, now_ms) - group_expiry_ms)
            if upto > partition.log.log_start_offset and self._would_drop(upto):
                self._begin_at(upto)
        start = partition.log.log_start_offset
        if self._would_drop(start):
            self._on_files(partition.log.drop_segments_below, start)
            self._moved(self._on_files(partition.log.replica_start))

    def _age_ms(self) -> int:
        """Return the time that ages are measured against."""
        partition = self._partition
        clock = partition.host.clock
        log_ms, oldest_ms = partition.replica.last_timestamp_ms, partition.log.oldest_timestamp_ms
        return self._age.time_ms(log_ms, clock.now_ms(), clock.wall_ms(), oldest_ms)

    def _on_files(self, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
        """Return the result of `work` on a native thread. Raises its error."""
        found = attempt(self._partition.host.pool, work, *arguments, **more)
        if isinstance(found, Exception):
            raise found
        return found

    def _unneeded_below(self, upto: int, active_since_ms: int) -> int:
        """Return the offset below which neither a group active since then nor the outbox needs anything. Groups note
        their activity on the steady clock, like their leases."""
        for delivery in self._partition.delivery.values():
            if delivery.last_active_ms > active_since_ms:
                upto = self._unfinished_from(delivery, upto)
        ordered_from = self._partition.groups.ordered_from()
        return upto if ordered_from is None else min(upto, ordered_from)

    def _unfinished_from(self, delivery: GroupDelivery, upto: int) -> int:
        """Return where the oldest segment below `upto` begins that contains something the group has not finished."""
        lanes, end = self._partition.log.lanes, self._partition.high_watermark
        upto = min(upto, delivery.floor())
        for lane in lanes.present:
            due_ms, offset = delivery.cursors.get(lane, (0, 0))
            if lane < DELAYED:
                offset = max(offset, delivery.start)
            found = lanes.first_segment_after(lane, due_ms, offset, min(upto, end), start=delivery.start)
            upto = upto if found is None else min(upto, found)
        return upto

    def _would_drop(self, upto: int) -> bool:
        sealed = self._partition.log.sealed_segments
        return bool(sealed) and sealed[0].end_offset <= upto

    # --- damage ------------------------------------------------------------------------------------------------------

    def scrub(self) -> bool:
        """Check the next part of the files: manifest and state file first, then the log. False after the last part;
        then the check begins again."""
        if self._scrub_at is None:
            self.repair()
            self._scrub_at, self._scrub_until = 0, self._partition.log.end_offset
        found = self.scrub_at(self._scrub_at)
        more = found is not None and self._scrub_at < found < self._scrub_until
        self._scrub_at = found if more else None
        return more

    @property
    def scrubs_sealed(self) -> bool:
        """Whether the next part is of a sealed segment."""
        files = self._partition.log
        return max(self._scrub_at or 0, files.base_offset) < files.sealed_upto

    def scrub_at(self, offset: int) -> int | None:
        """Check a part of the log as `Log.scrub` does. None if that was not possible; damage is reported."""
        partition = self._partition
        found = attempt(partition.host.pool, partition.log.scrub, offset, SCRUB_BYTES)
        if isinstance(found, int):
            return found
        self._failed(found)
        return None

    def repair(self) -> list[str]:
        """Replace the manifest and the state file if they are not what this process wrote: it knows their content.
        Return what was wrong."""
        partition = self._partition
        found = attempt(partition.host.pool, _repair, partition.log, partition.state_file)
        if not isinstance(found, list):
            self._failed(found)
            return []
        for fault in found:
            log.critical("%s: %s", partition, fault)
        if STATE_REPLACED in found:
            self.forget_snapshot()
            try:
                self.save_state()
            except (StorageError, PortalMQError) as error:
                self._failed(error)
        return found

    def _failed(self, found: Exception) -> None:
        if not isinstance(found, OffsetPurged | Shortage | Unavailable):  # dropped, begun again or closed in between
            self._partition.storage_failed(found)


# --- on native threads ------------------------------------------------------------------------------------------------


def _save(
    state_file: StateFile,
    fold: PartitionFold,
    high_watermark: int,
    messages_before: Callable[[int], int],
    age: SavedAge | None,
) -> bool:
    """Return whether there was room."""
    try:
        state_file.save(fold, high_watermark, messages_before, age=age)
    except Shortage:
        return False
    return True


def _repair(log: Log, state_file: StateFile) -> list[str]:
    found = ["its manifest was damaged, and is written again"] if log.repair_manifest() else []
    if state_file.repair_epoch():
        found.append("its epoch in epochs.sqlite was damaged, and the file is written again")
    return [*found, STATE_REPLACED] if state_file.repair() else found


def _save_high_watermark(state_file: StateFile, high_watermark: int, messages_before: Callable[[int], int]) -> None:
    with contextlib.suppress(Shortage):
        state_file.save_high_watermark(high_watermark, messages_before)


def _advance(log: Log, upto: int) -> ReplicaStart:
    log.advance_log_start(upto)
    return log.replica_start()
