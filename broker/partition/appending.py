"""Appending to a partition: messages, control records, and batches from a leader.

    append -> core allots offsets -> queue -> [writer: CRC, INSERT, COMMIT] -> core: Appended
           <- calls answered (uncommitted.py) <- core: HighWatermarkAdvanced

Offsets follow the order of requests, and all are answered in that order. What waits in between is bounded: by bytes on
the way to the disk and to the followers, and by records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import msgspec

from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.records import Grant, GroupRecord, StreamRecord
from portalmq.broker.core.replica import events as core
from portalmq.broker.core.replica.events import AnswerDuplicate, Append, Appended, AppendRequested, Stamp
from portalmq.broker.core.stream.offsets import StreamOffsets
from portalmq.broker.partition.action_queue import ActionQueue
from portalmq.broker.partition.folding import KIND_OF, GroupsFold
from portalmq.broker.partition.readable import ReadablePartition
from portalmq.broker.partition.refusals import closing, leadership_changing, not_serving_yet
from portalmq.broker.partition.retention import Retention
from portalmq.broker.partition.serving import LeaderReplication
from portalmq.broker.partition.writer import Entry, Pending, ReplicatedBatches, Writer
from portalmq.broker.storage.batch import Batch, BatchKind, Record, frame_of
from portalmq.errors import Backpressure, Fenced, NotLeader, OutOfOrderSequence, PortalMQError, StorageFull
from portalmq.wire import Acks

QUEUED_BYTES_MAX = 64 * 1024 * 1024
UNCOMMITTED_BYTES_MAX = 128 * 1024 * 1024
# Batches and control records. Above this groups stop too, while messages have limits of their own.
UNCOMMITTED_RECORDS_MAX = 200_000
# Larger batches are encoded on a native thread, and sent to followers once they are durable here.
SENT_AHEAD_BYTES_MAX = 64 * 1024

_encode = msgspec.msgpack.encode


class AppendingPartition(ReadablePartition, ABC):
    """The appending half of a Partition. `changed`: the saved fold is older than this log. `sends_ahead`: followers
    get small batches while this replica writes them."""

    action_queue: ActionQueue
    groups: GroupsFold
    delivery: dict[str, GroupDelivery]
    streams: dict[str, StreamOffsets]
    serving: LeaderReplication
    retention: Retention
    messages_next: int
    changed: bool
    closed: bool
    sends_ahead: bool
    _used: bool
    _writer: Writer

    @abstractmethod
    def step(self, event: core.Event) -> None:
        """Pass an event to the core, and perform the resulting actions."""

    # --- requests -----------------------------------------------------------------------------------------------------

    def append(
        self,
        records: tuple[Record, ...],
        size_bytes: int,
        *,
        stamp: Stamp | None = None,
        acks: Acks = "all",
        compressed: bytes = b"",
    ) -> tuple[int, int]:
        """Append messages and wait as `acks` says. Return (base offset, timestamp_ms), or (-1, 0) for acks "none".

        Raises the error that the core refuses with; Unavailable with an unknown outcome when the wait times out.
        """
        pending = self.submit(records, size_bytes, stamp=stamp, acks=acks, compressed=compressed)
        return self.outcome(pending)

    def submit(
        self,
        records: tuple[Record, ...],
        size_bytes: int,
        *,
        stamp: Stamp | None = None,
        acks: Acks = "all",
        compressed: bytes = b"",
    ) -> Pending:
        """Begin an append: offsets are allotted on return. `compressed` are the values of all `records`, if they came
        compressed; they are stored so if all in-sync replicas can."""
        try:
            self.check_room()
        except (StorageFull, Backpressure):  # a repeat takes none, and its first copy may yet be committed
            if stamp is None or self.replica.producers.repeated_by(stamp, len(records)) is None:
                raise
        if compressed and not self.serving.may_compress():
            compressed = b""
        batch = Batch(0, len(records), 0, BatchKind.MESSAGES, 0, 0, records=records, compressed=compressed)
        return self._submit(Pending(batch, size_bytes, stamp=stamp, acks=acks), len(records), is_control=False)

    def check_room(self) -> None:
        """Raise StorageFull or Backpressure when no more payload fits now."""
        if self.host.disk_is_full():
            raise StorageFull("the broker's disk is nearly full: free space or add disk, then repeat", retry_after_s=5)
        if self._writer.queued_bytes > QUEUED_BYTES_MAX:
            raise Backpressure(f"{self._writer.queued_bytes} bytes wait for the disk already", retry_after_s=0.5)
        if self.uncommitted.bytes > UNCOMMITTED_BYTES_MAX:
            raise Backpressure(f"{self.uncommitted.bytes} bytes wait for the followers already", retry_after_s=0.5)

    def outcome(self, pending: Pending) -> tuple[int, int]:
        """Finish an append: wait until the batch is as safe as its acks ask."""
        if pending.acks == "none":
            return -1, 0
        if not pending.done.is_set():
            self._writer.write_here()
        pending.wait()
        return pending.base_offset, pending.appended_at_ms

    def append_control(
        self,
        kind: BatchKind,
        body: bytes,
        group: str = "",
        *,
        is_soft: bool = False,
        not_before_ms: int = 0,
        delivers: bool = False,
    ) -> Pending:
        """Append a control record. A soft one may reach the disk a little later, since no call waits for it. Raises
        Backpressure while too many records are uncommitted: leases come and go even without followers."""
        if self.uncommitted.records >= UNCOMMITTED_RECORDS_MAX:
            raise Backpressure(f"{self.uncommitted.records} records wait for the followers already", retry_after_s=0.5)
        pending = Pending(Batch(0, 1, 0, kind, 0, 0, group=group, body=body), len(body), is_soft=is_soft)
        return self._submit(pending, 1, is_control=True, not_before_ms=not_before_ms, delivers=delivers)

    def append_group_record(
        self, group: str, record: GroupRecord | StreamRecord, *, is_soft: bool = False, not_before_ms: int = 0
    ) -> Pending:
        """Fold a group's record and append it: the group's state includes it from now on. Later records in the log have
        a time of at least `not_before_ms`."""
        delivers = isinstance(record, Grant) and bool(record.ranges)
        pending = self.append_control(
            KIND_OF[type(record)],
            _encode(record),
            group,
            is_soft=is_soft,
            not_before_ms=not_before_ms,
            delivers=delivers,
        )
        self.groups.apply(group, record, pending.base_offset, pending.batch.leader_epoch)
        return pending

    def hurry(self) -> None:
        """Let soft records go to the disk and to the followers now: a call waits for one of them."""
        self._writer.hurry()
        self.serving.wake()

    def end_group(self, group: str) -> Pending | None:
        """Delete a group. Return what to wait on until that is committed."""
        if self.closed or (group not in self.delivery and group not in self.streams):
            return None
        pending = self.append_control(BatchKind.GROUP_END, b"", group)
        self.groups.end(group)
        return pending

    def _submit(
        self, pending: Pending, size: int, *, is_control: bool, not_before_ms: int = 0, delivers: bool = False
    ) -> Pending:
        if self.closed:
            raise closing()
        if self.action_queue.remembering is not None:
            raise leadership_changing()
        self.step(AppendRequested(pending, size, pending.stamp, is_control, not_before_ms, delivers))
        if pending.error is not None:
            if isinstance(pending.error, OutOfOrderSequence | Fenced):
                self.wait_final()
            raise self.located(pending.error)
        return pending

    def located(self, error: PortalMQError) -> PortalMQError:
        """Add the leader's URL to NotLeader. A leader that has not begun to serve yet returns Unavailable instead."""
        if not isinstance(error, NotLeader):
            return error
        leader = error.extra.get("leader")
        if leader == self.host.broker_id and error.outcome == "not_applied":
            return not_serving_yet()
        if leader is not None:
            error.extra["leader_url"] = self.host.membership.mirror.url_of(leader)
        return error

    # --- actions of the core ------------------------------------------------------------------------------------------

    def _enqueue(self, action: Append) -> None:
        pending: Any = action.token
        if pending is None:
            body = _encode((self.host.broker_id,))  # earlier versions wrote none
            pending = Pending(Batch(0, 1, 0, BatchKind.EPOCH_START, 0, 0, body=body), len(body))
        if self.closed:
            pending.finish(closing())
            return
        stamp = pending.stamp
        pending.base_offset, pending.appended_at_ms = action.base_offset, action.appended_at_ms
        pending.batch = batch = Batch(
            action.base_offset,
            pending.batch.count,
            self.messages_next,
            pending.batch.kind,
            action.leader_epoch,
            action.appended_at_ms,
            stamp.producer_id if stamp else -1,
            stamp.producer_epoch if stamp else -1,
            stamp.sequence if stamp else -1,
            pending.batch.group,
            pending.batch.records,
            pending.batch.body,
            compressed=pending.batch.compressed,
        )
        self.messages_next += batch.message_count
        self.changed = self._used = True
        self.uncommitted.add(pending)
        if self.sends_ahead and pending.size_bytes <= SENT_AHEAD_BYTES_MAX:
            pending.frame = frame_of(batch)
        if pending.frame is not None:  # before the writer may start: its commit would delay the answers to followers
            self.serving.send_ahead(batch.base_offset, batch.end_offset, pending.frame, wakes=not pending.is_soft)
        self._writer.put(pending)

    def _enqueue_replicated(self, entry: ReplicatedBatches) -> None:
        if self.closed:
            return
        for head in entry.heads:
            if head.kind == BatchKind.MESSAGES:
                self.messages_next += head.count
                self.uncommitted.add_end(head.end_offset, head.appended_at_ms)
        self.changed = self._used = True
        self._writer.put(entry)

    def _answer_duplicate(self, action: AnswerDuplicate) -> None:
        pending: Any = action.token
        pending.base_offset, pending.appended_at_ms = action.base_offset, action.appended_at_ms
        end = action.base_offset + pending.batch.count
        if end <= self.replica.high_watermark:
            pending.finish()
        else:
            self.uncommitted.add_repeat(end, pending)

    # --- results of the writer ----------------------------------------------------------------------------------------

    def _on_written(self, taken: list[Entry]) -> None:
        """Continue with batches that are on disk."""
        end_offset = 0
        for entry in taken:
            if isinstance(entry, ReplicatedBatches):
                end_offset = entry.end_offset
                for batch in entry.batches:
                    if batch.kind != BatchKind.MESSAGES:
                        self.groups.take(batch, entry.states.get(batch.base_offset))
                continue
            end_offset = entry.batch.end_offset
            self.host.cache.put(self._cache_key, entry.batch, entry.size_bytes)
            if entry.frame is not None:
                self.host.cache.put_frame(self._cache_key, entry.base_offset, end_offset, entry.frame)
                entry.frame = None
        self.uncommitted.written(end_offset)
        self.step(Appended(end_offset))
        self.serving.wake()
        self.retention.take_snapshot_if_due()
        leads = self.replica.leading
        for entry in taken:
            if isinstance(entry, Pending) and entry.acks == "leader" and leads:
                entry.finish()
