"""One partition on this broker: a core that decides, a log that keeps, and the waiters in between.

All methods run on the hub's thread (greenlets), so there are no locks; only the writer's transactions run on a native
thread. Appends that wait while a transaction runs go into the next one together, with one fsync for all (group
commit). The order of offsets is the order of requests, and everything is answered in that order.

    append -> core allots offsets -> queue -> [native thread: CRC, INSERT, COMMIT] -> core: Appended
           <- waiters answered, receivers and browsers woken <- core: HighWatermarkAdvanced
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

import msgspec
from gevent.event import Event

from portalmq.broker.cache import BatchCache
from portalmq.broker.clock import Clock
from portalmq.broker.core.delivery import GroupDelivery
from portalmq.broker.core.events import (
    Action,
    AnswerDuplicate,
    Append,
    Appended,
    AppendRequested,
    HighWatermarkAdvanced,
    PartitionStateChanged,
    Refuse,
    Stamp,
    StepDown,
)
from portalmq.broker.core.fold import GroupFold, PartitionFold, decode_fold, encode_fold
from portalmq.broker.core.producers import Producers
from portalmq.broker.core.records import Ack, Extend, Grant, GroupRecord, GroupStart, Nack, Purge
from portalmq.broker.core.replica import PartitionReplica
from portalmq.broker.reader import Piece, Reader
from portalmq.broker.storage.batch import Batch, Kind, Record
from portalmq.broker.storage.errors import DiskFull
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.state import StateFile
from portalmq.broker.writer import Pending, Writer, WriterHost
from portalmq.errors import (
    Backpressure,
    NotLeader,
    OffsetOutOfRange,
    PortalMQError,
    StorageFull,
    Unavailable,
)
from portalmq.wire import Acks

QUEUED_BYTES_MAX = 64 * 1024 * 1024

_encode = msgspec.msgpack.encode
_RECORD_TYPES: dict[int, type[GroupRecord]] = {
    Kind.GROUP_START: GroupStart,
    Kind.GRANT: Grant,
    Kind.ACK: Ack,
    Kind.NACK: Nack,
    Kind.EXTEND: Extend,
}
_KINDS = {record_type: Kind(kind) for kind, record_type in _RECORD_TYPES.items()}


class PartitionHost(WriterHost, Protocol):
    """What a partition needs of the broker it stands on."""

    broker_id: int
    clock: Clock
    cache: BatchCache

    def disk_is_full(self) -> bool: ...


_numbers = count()


class Partition:
    """A replica at work. `topic` and `number` name it; `delivery` holds the folds of its queue groups."""

    def __init__(
        self, host: PartitionHost, topic: str, number: int, log: Log, state_file: StateFile, *, dedup_window_ms: int
    ) -> None:
        self.host = host
        self.topic = topic
        self.number = number
        self.log = log
        self.dedup_window_ms = dedup_window_ms
        self.delivery: dict[str, GroupDelivery] = {}
        self.on_readable: list[Callable[[], None]] = []
        self.changed = False
        self._state_file = state_file
        self._cache_key = next(_numbers)
        self._writer = Writer(host, log, self._on_written, self._on_refused)
        self._reader = Reader(log, host.cache, self._cache_key, host.storage_failed)
        self._uncommitted: deque[Pending] = deque()
        self._duplicates: list[tuple[int, Pending]] = []
        self._unwritten_ids: dict[bytes, tuple[int, bytes | None, int]] = {}
        self._browsers: set[Event] = set()
        self._used = True
        self._closed = False
        self._load()

    # --- opening -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Fold the log, from the newest snapshot on."""
        fold, high_watermark = self._snapshot_to_start_from()
        producers = Producers(fold.producers)
        epochs = list(fold.epochs)
        self.delivery.clear()
        self.delivery.update({group.group: GroupDelivery(group) for group in fold.groups})
        for batch in self.log.control_records(fold.applied):
            if batch.kind == Kind.EPOCH_START:
                epochs.append((batch.leader_epoch, batch.base_offset))
            else:
                self._fold(batch.kind, batch.group, batch.body)
        for batch in self.log.producer_batches(fold.applied):
            stamp = Stamp(batch.producer_id, batch.producer_epoch, batch.sequence)
            producers.add(stamp, batch.count, batch.base_offset, batch.appended_at_ms)
        highest = max(self._state_file.highest_epoch(), epochs[-1][0] if epochs else 0)
        self.replica = PartitionReplica(
            self.host.broker_id,
            producers=producers,
            epochs=epochs,
            end_offset=self.log.end_offset,
            high_watermark=high_watermark,
            highest_epoch=highest,
            last_timestamp_ms=self.log.last_timestamp_ms,
        )
        self._messages_next = self.log.message_count_total
        self.readable_end = self._reader.last_message_end(self.replica.high_watermark)
        # Messages that were on disk at the start, above the high watermark that was saved last.
        self._recovered_end = self._reader.last_message_end(self.log.end_offset)

    def _snapshot_to_start_from(self) -> tuple[PartitionFold, int]:
        """The saved fold, unless it is ahead of the log, or so old that segments it needs have been dropped."""
        saved = self._state_file.load()
        if saved is not None and self.log.base_offset <= saved[0].applied <= self.log.end_offset:
            return saved
        newest = self.log.newest_state()
        if newest is None:
            return PartitionFold(), 0
        fold = decode_fold(newest.body)
        fold.applied = newest.end_offset
        return fold, newest.end_offset

    def lead(self, state: PartitionStateChanged) -> None:
        """Take the control plane's word; returns once a new epoch's start is committed."""
        if state.leader_epoch > self.replica.highest_epoch:
            self._state_file.save_highest_epoch(state.leader_epoch)
        self._perform(self.replica.step(state, self.host.clock.wall_ms()))
        self._writer.wait_idle()
        now_ms = self.host.clock.now_ms()
        for delivery in self.delivery.values():
            delivery.take_over(now_ms)

    # --- appending ---------------------------------------------------------------------------------------------------

    def append(
        self, records: tuple[Record, ...], size_bytes: int, *, stamp: Stamp | None = None, acks: Acks = "all"
    ) -> tuple[int, int]:
        """Append messages and wait as `acks` asks; (base offset, timestamp_ms), or (-1, 0) for acks "none".

        Raises what the core refuses with; Unavailable with outcome unknown when the wait ends first.
        """
        pending = self.submit(records, size_bytes, stamp=stamp, acks=acks)
        return self.outcome(pending)

    def submit(
        self, records: tuple[Record, ...], size_bytes: int, *, stamp: Stamp | None = None, acks: Acks = "all"
    ) -> Pending:
        """The first half of append: offsets are allotted on return."""
        if self.host.disk_is_full():
            raise StorageFull("the broker's disk is nearly full: free space or add disk, then repeat", retry_after_s=5)
        if self._writer.queued_bytes > QUEUED_BYTES_MAX:
            raise Backpressure(f"{self._writer.queued_bytes} bytes wait for the disk already", retry_after_s=0.5)
        batch = Batch(0, len(records), 0, Kind.MESSAGES, 0, 0, records=records)
        return self._submit(Pending(batch, size_bytes, stamp=stamp, acks=acks), len(records), is_control=False)

    def outcome(self, pending: Pending) -> tuple[int, int]:
        """The second half of append: wait until the batch is as safe as its acks ask."""
        if pending.acks == "none":
            return -1, 0
        pending.wait()
        return pending.base_offset, pending.appended_at_ms

    def append_control(self, kind: Kind, body: bytes, group: str = "", *, is_soft: bool = False) -> Pending:
        """Append a control record. A soft one is not hurried to the disk, as nobody is going to `settle` it."""
        pending = Pending(Batch(0, 1, 0, kind, 0, 0, group=group, body=body), len(body), is_soft=is_soft)
        return self._submit(pending, 1, is_control=True)

    def append_group_record(self, group: str, record: GroupRecord, *, is_soft: bool = False) -> Pending:
        """Fold a group's record and append it: from here on the group's state has it."""
        kind = _KINDS[type(record)]
        body = _encode(record)
        pending = self.append_control(kind, body, group, is_soft=is_soft)
        self._fold_record(kind, group, record)
        return pending

    def _submit(self, pending: Pending, size: int, *, is_control: bool) -> Pending:
        if self._closed:
            raise Unavailable("the partition is being closed", retry_after_s=0.5)
        request = AppendRequested(pending, size, pending.stamp, is_control)
        self._perform(self.replica.step(request, self.host.clock.wall_ms()))
        if pending.error is not None:
            raise pending.error
        return pending

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Append():
                    self._enqueue(action)
                case HighWatermarkAdvanced():
                    self._on_high_watermark(action.high_watermark)
                case AnswerDuplicate():
                    self._answer_duplicate(action)
                case Refuse():
                    pending: Any = action.token
                    pending.finish(action.error)
                case StepDown():
                    self._on_step_down(action)

    def _enqueue(self, action: Append) -> None:
        pending: Any = action.token
        if pending is None:
            pending = Pending(Batch(0, 1, 0, Kind.EPOCH_START, 0, 0))
        stamp = pending.stamp
        pending.base_offset, pending.appended_at_ms = action.base_offset, action.appended_at_ms
        pending.batch = batch = Batch(
            action.base_offset,
            pending.batch.count,
            self._messages_next,
            pending.batch.kind,
            action.leader_epoch,
            action.appended_at_ms,
            stamp.producer_id if stamp else -1,
            stamp.producer_epoch if stamp else -1,
            stamp.sequence if stamp else -1,
            pending.batch.group,
            pending.batch.records,
            pending.batch.body,
        )
        self._messages_next += batch.message_count
        self.changed = self._used = True
        self._writer.put(pending)

    # --- what the writer tells ---------------------------------------------------------------------------------------

    def _on_written(self, taken: list[Pending]) -> None:
        """These batches are on disk."""
        for pending in taken:
            self.host.cache.put(self._cache_key, pending.batch, pending.size_bytes)
        self._uncommitted += taken
        end_offset = taken[-1].batch.end_offset
        if self._unwritten_ids:
            self._unwritten_ids = {key: place for key, place in self._unwritten_ids.items() if place[0] >= end_offset}
        self._perform(self.replica.step(Appended(end_offset), self.host.clock.wall_ms()))
        for pending in taken:
            if pending.acks == "leader" and not pending.done.is_set():
                pending.finish()

    def _on_refused(self, taken: list[Pending]) -> None:
        """The disk refused a transaction: none of it, and nothing that was allotted after it, is in the log."""
        full = StorageFull("the broker's disk is full: free space or add disk, then repeat", retry_after_s=5)
        state = self.replica.state
        self._unwritten_ids.clear()
        self._load()
        if state is not None:
            self._perform(self.replica.step(state, self.host.clock.wall_ms()))
        for pending in taken:
            pending.finish(full)
        for _, pending in self._duplicates:  # what they repeat is not in the log, or they may simply ask again
            pending.finish(full)
        self._duplicates.clear()

    # --- what moves when the high watermark does ---------------------------------------------------------------------

    def _on_high_watermark(self, high_watermark: int) -> None:
        readable_end = self.readable_end
        if readable_end < self._recovered_end <= high_watermark:
            readable_end = self._recovered_end
        while self._uncommitted and self._uncommitted[0].batch.end_offset <= high_watermark:
            pending = self._uncommitted.popleft()
            if pending.batch.kind == Kind.MESSAGES:
                readable_end = pending.batch.end_offset
            pending.finish()
        if self._duplicates:
            self._release_duplicates(high_watermark)
        if readable_end > self.readable_end:
            self.readable_end = readable_end
            for wake in self.on_readable:
                wake()
            for event in self._browsers:
                event.set()

    def _answer_duplicate(self, action: AnswerDuplicate) -> None:
        pending: Any = action.token
        pending.base_offset, pending.appended_at_ms = action.base_offset, action.appended_at_ms
        end = action.base_offset + pending.batch.count
        if end <= self.replica.high_watermark:
            pending.finish()
        else:
            self._duplicates.append((end, pending))

    def _release_duplicates(self, high_watermark: int) -> None:
        for end, pending in self._duplicates:
            if end <= high_watermark:
                pending.finish()
        self._duplicates = [(end, pending) for end, pending in self._duplicates if end > high_watermark]

    def _on_step_down(self, action: StepDown) -> None:
        error = NotLeader("the leadership moved while this was on its way", leader=action.leader, outcome="unknown")
        for pending in self._uncommitted:
            pending.finish(error)
        for _, pending in self._duplicates:
            pending.finish(error)
        self._uncommitted.clear()
        self._duplicates.clear()

    # --- message ids -------------------------------------------------------------------------------------------------

    def place_of_id(self, message_id: bytes) -> tuple[int, bytes | None, int] | None:
        """(offset, body hash, timestamp) of the message that carries this id within the dedup window, if any."""
        unwritten = self._unwritten_ids.get(message_id)
        if unwritten is not None:
            return unwritten
        since_ms = max(self.replica.last_timestamp_ms, self.host.clock.wall_ms()) - self.dedup_window_ms
        return self.log.find_message_id(message_id, since_ms)

    def remember_ids(self, pending: Pending) -> None:
        """Ids of messages that are allotted and not yet written."""
        for offset, record in enumerate(pending.batch.records, pending.base_offset):
            if record.message_id is not None:
                self._unwritten_ids[record.message_id] = (offset, record.body_hash, pending.appended_at_ms)

    def wait_committed(self, offset: int) -> None:
        """Return once `offset` is below the high watermark."""
        if offset < self.replica.high_watermark:
            return
        pending = Pending(Batch(offset, 1, 0, Kind.MESSAGES, 0, 0))
        self._duplicates.append((offset + 1, pending))
        pending.wait()

    # --- the groups' fold --------------------------------------------------------------------------------------------

    def _fold(self, kind: int, group: str, body: bytes) -> None:
        if kind == Kind.PURGE:
            self._purge_groups(msgspec.msgpack.decode(body, type=Purge).upto)
        elif kind == Kind.GROUP_END:
            self.delivery.pop(group, None)
        elif kind in _RECORD_TYPES:
            self._fold_record(kind, group, msgspec.msgpack.decode(body, type=_RECORD_TYPES[kind]))

    def _fold_record(self, kind: int, group: str, record: GroupRecord) -> None:
        if kind == Kind.GROUP_START and group not in self.delivery:
            self.delivery[group] = GroupDelivery(GroupFold(group, 0, 0, []))
        delivery = self.delivery.get(group)
        if delivery is not None:
            delivery.apply(record)

    def _purge_groups(self, upto: int) -> None:
        for delivery in self.delivery.values():
            delivery.purge(upto)

    def end_group(self, group: str) -> Pending | None:
        """Forget a group; what to wait on until that is committed."""
        if self._closed or group not in self.delivery:
            return None
        pending = self.append_control(Kind.GROUP_END, b"", group)
        self.delivery.pop(group, None)
        return pending

    # --- reading -----------------------------------------------------------------------------------------------------

    def pieces(self, start: int, end: int, limit: int) -> Iterator[Piece]:
        """The messages in [start, end), at most `limit`, as pieces of batches. Raises Unavailable for a damaged one."""
        return self._reader.pieces(start, end, limit)

    def check_offset(self, offset: int) -> None:
        """Raises OffsetOutOfRange, or Unavailable when the offset may yet be (KIP-207)."""
        if offset < self.log.log_start_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is gone: the partition begins at {self.log.log_start_offset}",
                log_start_offset=self.log.log_start_offset,
                high_watermark=self.high_watermark,
            )
        if offset > self.replica.next_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is past the end: the next to be written is {self.replica.next_offset}",
                log_start_offset=self.log.log_start_offset,
                high_watermark=self.high_watermark,
            )
        if offset > self.high_watermark:
            raise Unavailable(f"offset {offset} is not committed yet", retry_after_s=0.1)

    @property
    def high_watermark(self) -> int:
        return self.replica.high_watermark

    def wait_readable(self, offset: int, event: Event, timeout_s: float) -> None:
        """Wait for a message at or above `offset`, for `event`, or for the time to pass."""
        if self.readable_end > offset:
            return
        self._browsers.add(event)
        try:
            event.wait(timeout_s)
        finally:
            self._browsers.discard(event)

    # --- upkeep ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> PartitionFold:
        """The fold over everything that was appended. It may enter the log as STATE: it commits with its prefix."""
        return PartitionFold(
            applied=self.replica.next_offset,
            log_start_offset=self.log.log_start_offset,
            epochs=list(self.replica.epochs),
            producers=self.replica.producers.snapshot(),
            groups=[delivery.snapshot() for delivery in self.delivery.values()],
        )

    def save_state(self) -> None:
        """Bring state.sqlite up to the log, when the log has moved.

        The fold is taken at once and saved when all it holds is committed: a partition that is never at rest is saved
        too, or a restart would have its whole log to fold.
        """
        if not self.changed or (self._writer.is_idle and self.replica.next_offset != self.high_watermark):
            return
        self.changed = False
        fold = self.snapshot()
        try:
            self.wait_committed(fold.applied - 1)
        except PortalMQError:
            self.changed = True
            return
        if not self.host.pool.apply(_save, (self._state_file, fold, self.high_watermark, self.log.messages_before)):
            self.changed = True

    def purge(self, upto: int | None) -> None:
        """Everything below `upto` (all that is readable, when None) is gone, durably on return."""
        upto = self.high_watermark if upto is None else min(upto, self.high_watermark)
        if upto <= self.log.log_start_offset:
            return
        pending = self.append_control(Kind.PURGE, _encode(Purge(upto)))
        self._purge_groups(upto)
        pending.wait()
        self.host.pool.apply(self.log.advance_log_start, (upto,))
        self.readable_end = max(self.readable_end, upto)

    def retain(self, retention_ms: int | None, retention_bytes: int | None, group_expiry_ms: int) -> None:
        """Seal what is rolled, and drop segments that are too old or too much and that no active group still needs."""
        self.replica.producers.expire(self.replica.last_timestamp_ms - self.dedup_window_ms)
        self.host.pool.apply(self.log.seal, (self.high_watermark,))
        wall_ms = self.host.clock.wall_ms()
        upto = self.log.retention_candidate(wall_ms, retention_ms, retention_bytes)
        for delivery in self.delivery.values():
            if wall_ms - delivery.last_active_ms < group_expiry_ms:
                upto = min(upto, delivery.floor())
        upto = max(upto, self.log.log_start_offset)
        sealed = self.log.sealed_segments
        if not sealed or sealed[0].end_offset > upto:
            return
        self.append_control(Kind.STATE, encode_fold(self.snapshot())).wait()
        self._purge_groups(upto)
        self.host.pool.apply(self.log.drop_segments_below, (upto,))

    def rest_if_idle(self) -> None:
        """Close the files when nothing was read or written since the last call; the next use opens them again."""
        used, self._used, self._reader.used = self._used or self._reader.used, False, False
        if not used and self._writer.is_idle and not self.changed:
            self.host.pool.apply(self.log.park)
            self._state_file.park()

    def close(self) -> None:
        """Refuse new work, write what waits, save the fold, close the files."""
        self._closed = True
        for event in self._browsers:
            event.set()
        self._writer.wait_idle()
        self.save_state()
        self.host.cache.drop(self._cache_key)
        self.host.pool.apply(self.log.close)  # it writes: a thousand partitions would hold the hub for seconds
        self._state_file.close()


def _save(
    state_file: StateFile, fold: PartitionFold, high_watermark: int, messages_before: Callable[[int], int]
) -> bool:
    """On a native thread: whether there was room. It is answered and not raised, as gevent would print it."""
    try:
        state_file.save(fold, high_watermark, messages_before)
    except DiskFull:
        return False
    return True
