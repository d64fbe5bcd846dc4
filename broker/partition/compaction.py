"""Compaction of topics that keep the last message of each key (`cleanup: compact`): when, how far, and how fast.

    leader      enough is new -> roll, seal -> STATE, Compact in the log
    replicas    that record is committed -> seal the segments below -> storage.compaction, a step at a time

A leader orders a compaction when the log has grown since the last one by as much as that one left. So all rewriting
stays in proportion to what was sent, and no setting is needed. What an open order of the outbox still has to read is
above `upto`. The STATE record in front of the order contains all that the group records below add up to, so these are
removed too. Otherwise the acks of a topic that keeps a few keys for ever would grow without limit.

A tombstone stays for a day after the first compaction that removed all that it deletes, and a message with an id for as
long as its id counts. So a reader from the start, a consumer or a late replica, that takes less than a day learns of
every removal of what it has seen: no deleted message comes back (Kafka's delete.retention.ms, KIP-534). A compaction
keeps delayed messages until they are due, and messages with an id. The leader looks for the first one that the
compaction a day ago had to keep, and no tombstone behind that goes.

One partition at a time is compacted, on native threads, with pauses three times as long as the work, or as long as the
work while more arrives than is compacted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import gevent
import msgspec

from portalmq.broker.core.queue.records import Compact, ranges_of
from portalmq.broker.partition.host import PartitionHost
from portalmq.broker.partition.native import attempt
from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.batch import BatchKind
from portalmq.broker.storage.compaction import Compaction, CompactionOrder, first_kept_ms
from portalmq.broker.storage.errors import OffsetPurged, Shortage
from portalmq.broker.storage.log import Log
from portalmq.errors import Unavailable

log = logging.getLogger(__name__)

TOMBSTONES_KEPT_MS = 24 * 3600 * 1000
# A log that grows slowly is still compacted once a day.
COMPACT_WITHIN_MS = 24 * 3600 * 1000
# The new part must have so many bytes, and so many times those of the old part.
DIRTY_BYTES_MIN = 8 * 1024 * 1024
DIRTY_A_CLEAN = 1.0
PAUSES_A_STEP = 3
PAUSES_A_STEP_BEHIND = 1
PAUSE_S_MIN = 0.001

T = TypeVar("T")
_decode = msgspec.msgpack.Decoder(Compact).decode


class _First(NamedTuple):
    """When the first message from `since` on was appended; None when there was none, of `appended` in all."""

    since: int
    appended: int
    at_ms: int | None


class Compactor:
    """`on_removed` is called with how many messages were removed from this broker's files."""

    def __init__(self, host: PartitionHost, on_removed: Callable[[int], None] = lambda messages: None) -> None:
        self._host = host
        self._on_removed = on_removed
        self._pauses = PAUSES_A_STEP
        self._first: WeakKeyDictionary[Partition, _First] = WeakKeyDictionary()
        # The newest order of each partition that is known to be committed.
        self._orders: WeakKeyDictionary[Partition, CompactionOrder] = WeakKeyDictionary()

    def compact_if_due(self, partition: Partition, *, keeps_last: bool) -> None:
        """Order a compaction where the partition `keeps_last` messages, is led here and needs one; then carry out the
        committed order. Blocks until done. Raises PortalMQError when this must be tried again later."""
        if partition.closed or partition.rebuild_reason or partition.replica.quarantined or self._host.disk_is_full():
            return
        if keeps_last and partition.serves:
            is_old = self._is_old(partition)
            if is_old or self._is_enough(partition, partition.log.end_offset):
                self._order(partition, is_old=is_old)
        self._carry_out(partition)

    # --- deciding ----------------------------------------------------------------------------------------------------

    def _is_enough(self, partition: Partition, upto: int) -> bool:
        """Whether the log has grown enough below `upto` since the last compaction."""
        files, since = partition.log, partition.groups.compacted
        dirty = files.bytes_from(since) - files.bytes_from(max(since, upto))
        clean = files.size_bytes - files.bytes_from(since)
        if not dirty or dirty < max(clean * DIRTY_A_CLEAN, min(DIRTY_BYTES_MIN, files.segment_bytes)):
            return False
        return files.messages_before(upto) > files.messages_before(since)

    def _is_old(self, partition: Partition) -> bool:
        """Whether the first message since the last compaction has waited long enough. The file is read once for that:
        files of an idle partition stay closed."""
        files = partition.log
        since, appended = max(partition.groups.compacted, files.log_start_offset), files.message_count_total
        known = self._first.get(partition)
        if known is None or known.since != since or (known.at_ms is None and known.appended != appended):
            at_ms = self._done(partition, _first_message_ms, files, since)
            known = self._first[partition] = _First(since, appended, at_ms if isinstance(at_ms, int) else None)
        return known.at_ms is not None and known.at_ms < self._host.clock.wall_ms() - COMPACT_WITHIN_MS

    def _order(self, partition: Partition, *, is_old: bool = False) -> None:
        upto = self._reach(partition)
        if upto <= partition.groups.compacted or not (is_old or self._is_enough(partition, upto)):
            return
        kept_ms = max(TOMBSTONES_KEPT_MS, partition.dedup_window_ms)
        compact = self._done(partition, _next_compact, partition.log, upto, kept_ms)
        if not isinstance(compact, Compact) or not partition.serves:
            return
        partition.retention.write_state()
        pending = partition.append_control(BatchKind.COMPACT, msgspec.msgpack.encode(compact))
        partition.groups.compacted = max(partition.groups.compacted, upto)
        pending.wait()

    def _reach(self, partition: Partition) -> int:
        """Return how far a compaction can go. Roll the active segment for it, unless a reader's files or an order of
        the outbox stand in the way below that."""
        files = partition.log
        self._done(partition, files.seal, partition.high_watermark)
        needed_from = partition.groups.ordered_from()
        active = files.active_base_offset
        if files.sealed_upto == active and (needed_from is None or needed_from > active):
            end = files.end_offset
            self._done(partition, files.roll)
            if end > active:
                partition.wait_committed(end - 1)
            self._done(partition, files.seal, partition.high_watermark)
            needed_from = partition.groups.ordered_from()
        return files.sealed_upto if needed_from is None else min(files.sealed_upto, needed_from)

    # --- compacting --------------------------------------------------------------------------------------------------

    def _carry_out(self, partition: Partition) -> None:
        order = self._newest_order(partition)
        if order is None or partition.log.is_compacted(order.upto, order.tombstones_before_ms):
            return
        if not self._done(partition, _prepare, partition.log, order.upto, partition.high_watermark):
            return
        work = Compaction(partition.log, order)
        began = time.monotonic()
        while not partition.closed and self._step(partition, work):
            is_behind = 2 * partition.log.bytes_from(order.upto) > partition.log.size_bytes
            self._pauses = PAUSES_A_STEP_BEHIND if is_behind else PAUSES_A_STEP
        work.close()
        self._on_removed(work.removed)
        partition.reader.forget()
        if partition.log.is_compacted(order.upto, order.tombstones_before_ms):
            log.info(
                "%s is compacted up to offset %d: %d messages and %d bytes less, in %.1f s",
                partition, order.upto, work.removed, work.freed_bytes, time.monotonic() - began,
            )  # fmt: skip

    def _step(self, partition: Partition, work: Compaction) -> bool:
        """Do a step, and pause after it. Return whether there is more to do. If this greenlet is killed the thread ends
        its step, and the rest of the work is dropped."""
        began = time.monotonic()
        more = self._done(partition, _stepped, work)
        gevent.sleep(max(PAUSE_S_MIN, self._pauses * (time.monotonic() - began)))
        return bool(more)

    def _newest_order(self, partition: Partition) -> CompactionOrder | None:
        """Return the newest committed order."""
        upto = partition.groups.compacted
        known = self._orders.get(partition)
        if not upto or (known is not None and known.upto == upto):
            return known if upto else None
        taken_back = ranges_of([offset for offset in partition.groups.cancelled if offset < upto])
        found = self._done(partition, _newest_order, partition.log, partition.high_watermark, taken_back)
        if not isinstance(found, CompactionOrder):
            return None
        self._orders[partition] = found
        return found

    def _done(self, partition: Partition, work: Callable[..., T], *arguments: object) -> T | None:
        """Return the result of `work` on a native thread; None where it failed. A damaged file is reported."""
        found = attempt(self._host.pool, work, *arguments)
        if not isinstance(found, Exception):
            return found
        if isinstance(found, Shortage):
            log.warning("%s cannot be compacted: %s", partition, found)
        elif not isinstance(found, OffsetPurged | Unavailable):  # purged or closed in between
            partition.storage_failed(found)
        return None


# --- on native threads ------------------------------------------------------------------------------------------------


def _stepped(work: Compaction) -> bool:
    try:
        return work.step()
    except BaseException:
        work.close()
        raise


def _prepare(files: Log, upto: int, high_watermark: int) -> bool:
    """Seal all segments that begin below `upto`. Return whether they are sealed."""
    files.roll_below(upto)
    files.seal(high_watermark)
    return files.sealed_below(upto) is not None


def _first_message_ms(files: Log, offset: int) -> int | None:
    """Return when the first message from `offset` on was appended."""
    found = files.next_message(offset, files.end_offset)
    return None if found is None else files.read(found, max_messages=1)[0].appended_at_ms


def _newest_order(files: Log, high_watermark: int, taken_back: tuple[tuple[int, int], ...]) -> CompactionOrder | None:
    record = files.newest_control(BatchKind.COMPACT, high_watermark)
    if record is None:
        return None
    compact = _decode(record.body)
    state = files.newest_control(BatchKind.STATE, record.base_offset)
    blanks = state is not None and state.base_offset >= compact.upto
    before_ms, ids_before_ms = compact.tombstones_before_ms, compact.ids_before_ms
    return CompactionOrder(compact.upto, before_ms, record.appended_at_ms, taken_back, blanks, ids_before_ms)


def _next_compact(files: Log, upto: int, kept_ms: int) -> Compact:
    """Return the next order. By age it removes what a compaction ordered at least `kept_ms` ago has seen: messages
    with an id, and tombstones before which that compaction kept nothing that they delete."""
    newest = files.newest_control(BatchKind.COMPACT)
    if newest is None:
        return Compact(upto, 0)
    last = _decode(newest.body)
    tombstones_before_ms, ids_before_ms = last.tombstones_before_ms, _ids_before_ms(last)
    record = files.newest_control(BatchKind.COMPACT, files.offset_for_time(files.last_timestamp_ms - kept_ms + 1))
    if record is not None:
        seen = _decode(record.body)
        before_ms = files.replica_start(max(seen.upto, files.log_start_offset)).timestamp_before_ms
        ids_before_ms = max(ids_before_ms, before_ms)
        kept_from_ms = first_kept_ms(files, seen.upto, record.appended_at_ms, _ids_before_ms(seen))
        tombstones_before_ms = max(tombstones_before_ms, min(before_ms, kept_from_ms))
    return Compact(upto, tombstones_before_ms, ids_before_ms)


def _ids_before_ms(compact: Compact) -> int:
    return max(compact.tombstones_before_ms, compact.ids_before_ms)
