"""The fold over a partition's log: what its groups' records add up to, and how it is recovered at an open.

    log      ....STATE........................................ end
    saved    ..............[state.sqlite: applied]
    fold     = the newest snapshot that fits the log, then every record after it

The fold covers the whole log, ahead of the high watermark: on a leader from the moment a record is appended, on a
follower from the moment it is durable. Snapshots are saved only up to the high watermark, so a truncation finds one
that is older than what it removes.

A purge takes effect in two steps. Its record ends what the groups had below; the log start moves when a STATE record
after it is committed. So a replica that begins at a log start always finds a STATE there.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from portalmq.broker.core.fold import GroupFold, PartitionFold, ProducerFold, decode_fold
from portalmq.broker.core.queue.biography import MessageRecord
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.records import (
    Ack,
    Cancel,
    Claim,
    Commit,
    CommitOffset,
    Compact,
    Dead,
    Done,
    Drop,
    Extend,
    Grant,
    GroupEnd,
    GroupRecord,
    GroupStart,
    Nack,
    Pause,
    Purge,
    Redrive,
    Reschedule,
    Seek,
    StreamRecord,
    ranges_of,
)
from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.stream.offsets import StreamOffsets, new_stream
from portalmq.broker.storage.batch import Batch, BatchKind
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.reading import ReplicaStart
from portalmq.broker.storage.state import StateFile

_RECORD_TYPES: dict[int, type[GroupRecord | StreamRecord]] = {
    BatchKind.GROUP_START: GroupStart,
    BatchKind.GRANT: Grant,
    BatchKind.ACK: Ack,
    BatchKind.NACK: Nack,
    BatchKind.EXTEND: Extend,
    BatchKind.DEAD: Dead,
    BatchKind.REDRIVE: Redrive,
    BatchKind.DROP: Drop,
    BatchKind.COMMIT: Commit,
    BatchKind.DONE: Done,
    BatchKind.CLAIM: Claim,
    BatchKind.COMMIT_OFFSET: CommitOffset,
    BatchKind.SEEK: Seek,
    BatchKind.PAUSE: Pause,
}
KIND_OF = {record_type: BatchKind(kind) for kind, record_type in _RECORD_TYPES.items()}
_MESSAGE_RECORD_DECODERS: dict[int, Any] = {
    kind: msgspec.msgpack.Decoder(record_type).decode
    for kind, record_type in {
        **_RECORD_TYPES,
        BatchKind.PURGE: Purge,
        BatchKind.CANCEL: Cancel,
        BatchKind.RESCHEDULE: Reschedule,
    }.items()
}


def message_record_of(batch: Batch) -> MessageRecord | None:
    """Return the record of a batch that may be about messages, else None."""
    if batch.kind == BatchKind.GROUP_END:
        return GroupEnd()
    decode = _MESSAGE_RECORD_DECODERS.get(batch.kind)
    record: MessageRecord | None = None if decode is None else decode(batch.body)
    return record


class GroupsFold:
    """The groups of one partition, what they have ordered to be appended elsewhere, and the purges that have still to
    move the log start.

    `outbox` are the records (offset -> group) whose outputs are still to be appended. `cancelled` are offsets of
    cancelled scheduled messages, `compacted` is the newest Compact record.

    Invariant: both numbers of `purges` and of `moves` rise: (offset of the record, the log start it asks for).
    """

    def __init__(self, fold: PartitionFold | None = None) -> None:
        fold = fold or PartitionFold()
        self.delivery = {group.group: GroupDelivery(group) for group in fold.groups}
        for delivery in self.delivery.values():
            delivery.finished_at = fold.applied - 1  # the snapshot does not say which record, so assume the last one
        self.streams = {stream.group: StreamOffsets(stream) for stream in fold.streams}
        for stream in self.streams.values():
            stream.moved_at = fold.applied - 1
        self.outbox = dict(fold.outbox)
        # The first offset that each of them needs, if its record was read and not only a snapshot of the outbox.
        self._needs: dict[int, int] = {}
        self.cancelled = {offset for start, end in fold.cancelled for offset in range(start, end)}
        self.compacted = fold.compacted
        self.purges: list[tuple[int, int]] = []
        self.moves: list[tuple[int, int]] = []
        # Where the log begins after all purges.
        self.purged_upto = 0
        # The offset of the newest STATE record; -1 without one.
        self.state_offset = -1
        # Numbers of new leases are above this one; and the highest that was granted, whatever became of its group.
        self.leases_above = self._highest_lease = 0

    def take(self, batch: Batch, state: StateRecord | None = None) -> None:
        """Fold a control record that was replicated, or found in the log. `state` is the content of a STATE record that
        is loaded already."""
        if batch.kind == BatchKind.STATE:
            self.take_state(batch.base_offset, state or StateRecord(batch.body))
        elif batch.kind == BatchKind.PURGE:
            self.purge(batch.base_offset, msgspec.msgpack.decode(batch.body, type=Purge).upto)
        elif batch.kind == BatchKind.CANCEL:
            self.cancel(msgspec.msgpack.decode(batch.body, type=Cancel))
        elif batch.kind == BatchKind.RESCHEDULE:
            self.reschedule(batch.base_offset, msgspec.msgpack.decode(batch.body, type=Reschedule))
        elif batch.kind == BatchKind.COMPACT:
            self.compacted = max(self.compacted, msgspec.msgpack.decode(batch.body, type=Compact).upto)
        elif batch.kind == BatchKind.GROUP_END:
            self.end(batch.group)
        elif batch.kind in _RECORD_TYPES:
            record = msgspec.msgpack.decode(batch.body, type=_RECORD_TYPES[batch.kind])
            self.apply(batch.group, record, batch.base_offset, batch.leader_epoch)

    def take_state(self, offset: int, state: StateRecord) -> None:
        """Take a STATE record, the fold over its own prefix: a replica that began late has all of it from here. Callers
        hold references to the dicts, so they are changed in place."""
        self.delivery.clear()
        self.delivery.update(state.groups.delivery)
        self.streams.clear()
        self.streams.update(state.groups.streams)
        self.outbox.clear()
        self.outbox.update(state.groups.outbox)
        self.cancelled, self.compacted = state.groups.cancelled, state.groups.compacted
        self.state_written(offset, state.log_start_offset)

    def state_written(self, offset: int, log_start: int) -> None:
        """Note a STATE record at `offset`: the log may begin at `log_start` once that is committed."""
        self.state_offset = offset
        self.moves.append((offset, log_start))
        self.purged_upto = max(self.purged_upto, log_start)
        self.purges.clear()

    def apply(self, group: str, record: GroupRecord | StreamRecord, offset: int, leader_epoch: int = 0) -> None:
        """Fold a group's record at `offset`, in a batch of that epoch."""
        if isinstance(record, Done):
            self.outbox.pop(record.record, None)
            self._needs.pop(record.record, None)
            return
        if isinstance(record, Claim | CommitOffset | Seek):
            self._apply_stream(group, record, offset)
            return
        if isinstance(record, Dead | Commit) and (record.topic if isinstance(record, Dead) else record.outputs):
            self.outbox[offset] = group
            given_up = [start for start, _, _ in record.ranges] if isinstance(record, Dead) else []
            self._needs[offset] = min([offset, *given_up])
        if isinstance(record, Commit) and record.offset >= 0:
            self._apply_stream(group, record, offset)
            return
        if isinstance(record, GroupStart) and group not in self.delivery:
            self.delivery[group] = GroupDelivery(GroupFold(group, 0, 0, []))
        delivery = self.delivery.get(group)
        if delivery is not None:
            delivery.apply(record, offset, leader_epoch)
            self._highest_lease = max(self._highest_lease, delivery.highest_lease)

    def go_on_after(self, before: GroupsFold) -> None:
        """Continue the lease numbers of `before`, a fold of the same log before a truncation. Removed leases may be in
        consumers' hands, and the epoch the same: so no number of a lease is used twice."""
        self.leases_above = max(before.leases_above, before._highest_lease)

    def _apply_stream(self, group: str, record: StreamRecord | Commit, offset: int) -> None:
        stream = self.streams.get(group)
        if stream is not None:
            stream.apply(record, offset)
        elif isinstance(record, Claim):
            self.streams[group] = new_stream(group, record, offset)

    def end(self, group: str) -> None:
        """Delete a group. What it has ordered before is still to be appended."""
        self.delivery.pop(group, None)
        self.streams.pop(group, None)

    def reschedule(self, offset: int, record: Reschedule) -> None:
        """Apply a Reschedule at `offset`: it cancels messages, and orders their copies for no group."""
        self.cancel(Cancel(record.ranges))
        self.outbox[offset] = ""
        self._needs[offset] = min([offset, *[start for start, _ in record.ranges]])

    def cancel(self, record: Cancel) -> None:
        self.cancelled.update(offset for start, end in record.ranges for offset in range(start, end))

    def purge(self, offset: int, upto: int) -> None:
        """Apply a purge at `offset`: everything below `upto` is gone for every group."""
        self.forget_below(upto, offset)
        self.purges.append((offset, upto))
        self.purged_upto = max(self.purged_upto, upto)

    def forget_below(self, upto: int, record: int = -1) -> None:
        """Drop what is below `upto`, by the record at that offset; for good without a record."""
        for delivery in self.delivery.values():
            delivery.purge(upto, record)
        for stream in self.streams.values():
            stream.purge(upto)
        if self.cancelled:
            self.cancelled = {offset for offset in self.cancelled if offset >= upto}

    def due(self, high_watermark: int) -> int:
        """Return the log start that committed purges ask for; 0 for none."""
        upto = 0
        while self.moves and self.moves[0][0] < high_watermark:
            upto = max(upto, self.moves.pop(0)[1])
        return upto

    def first_order(self) -> float:
        """Return the offset of the first open order of the outbox; infinity without one."""
        return next(iter(self.outbox), math.inf)

    def ordered_from(self) -> int | None:
        """Return the first offset that an open order of the outbox may need: its record, or what it gives up; None
        without an order. A snapshot does not say what an order needs, so no record is removed before the order is
        carried out: its group may have been deleted since, and its dead letters dropped."""
        return min((self._needs.get(offset, 0) for offset in self.outbox), default=None)

    def snapshot_into(self, fold: PartitionFold) -> PartitionFold:
        """Return `fold` with all that is here."""
        fold.groups = [delivery.snapshot() for delivery in self.delivery.values()]
        fold.streams = [stream.snapshot() for stream in self.streams.values()]
        fold.outbox = list(self.outbox.items())
        fold.cancelled = list(ranges_of(list(self.cancelled)))
        fold.compacted = self.compacted
        return fold


class StateRecord:
    """The loaded content of a STATE record. Load a large one on a native thread. Raises msgspec.MsgspecError."""

    def __init__(self, body: bytes) -> None:
        fold = decode_fold(body)
        self.groups = GroupsFold(fold)
        self.producers = fold.producers
        self.log_start_offset = fold.log_start_offset


class Recovered(msgspec.Struct):
    """What a log and its state file add up to. `lost` says why the log cannot be all that this replica once had;
    `is_saved` that the state file has all of it."""

    groups: GroupsFold
    producers: Producers
    epochs: list[tuple[int, int]]
    high_watermark: int
    highest_epoch: int
    start: ReplicaStart
    readable_end: int
    recovered_end: int
    lost: str = ""
    is_saved: bool = False


def recover(log: Log, state_file: StateFile, known_high_watermark: int = 0) -> Recovered:
    """Fold the log from the newest snapshot on. The high watermark is at least the known one, if any.

    Reads files, so it runs on a native thread. Raises CorruptBatch, StorageFault.
    """
    newest = log.newest_state()
    fold, saved_upto, high_watermark, lost = _snapshot_to_start_from(log, state_file, newest)
    groups = GroupsFold(fold)
    if newest is not None:
        groups.state_written(newest.base_offset, decode_fold(newest.body).log_start_offset)
    epochs = list(fold.epochs)
    for batch in log.control_records(fold.applied):
        if batch.kind == BatchKind.EPOCH_START:
            epochs.append((batch.leader_epoch, batch.base_offset))
        else:
            groups.take(batch)
    groups.forget_below(log.log_start_offset)
    high_watermark = min(max(high_watermark, known_high_watermark), log.end_offset)
    readable_end = last_message_end(log, high_watermark)
    return Recovered(
        groups=groups,
        producers=producers_after(log, fold.producers, fold.applied),
        epochs=epochs,
        high_watermark=high_watermark,
        highest_epoch=max(state_file.highest_epoch(), epochs[-1][0] if epochs else 0),
        start=log.replica_start(),
        readable_end=readable_end,
        recovered_end=last_message_end(log, log.end_offset),
        lost=lost,
        is_saved=saved_upto == (log.log_start_offset, log.end_offset, high_watermark),
    )


def producers_after(log: Log, folds: list[ProducerFold], applied: int) -> Producers:
    """Return the fold over the batches of idempotent producers from `applied` on, beginning with `folds`."""
    producers = Producers(folds)
    for batch in log.producer_batches(applied):
        stamp = Stamp(batch.producer_id, batch.producer_epoch, batch.sequence)
        producers.add(stamp, batch.count, batch.base_offset, batch.appended_at_ms)
    return producers


def _snapshot_to_start_from(
    log: Log, state_file: StateFile, newest: Batch | None
) -> tuple[PartitionFold, tuple[int, int, int] | None, int, str]:
    """Return the saved fold or that of the `newest` STATE record, whichever is later; the log start, the end and the
    high watermark that are saved with the fold, if it is the saved one; the high watermark; and why the log is
    incomplete, if it is.

    A saved fold does not count when it is ahead of the log, when segments that it needs have been dropped, or when its
    log start is above the log's: then it was saved for a reset that did not happen. Without a saved high watermark only
    what is below the log start is known to be committed: a STATE record need not be.
    """
    saved = state_file.load()
    high_watermark, lost = log.log_start_offset, ""
    fold: PartitionFold | None = None
    saved_upto: tuple[int, int, int] | None = None
    if saved is not None and saved[0].log_start_offset <= log.log_start_offset:
        high_watermark = max(high_watermark, saved[1])
        if saved[1] > log.end_offset:
            lost = f"its log ends at {log.end_offset}, and it had committed records up to {saved[1]}"
        if log.base_offset <= saved[0].applied <= log.end_offset:
            fold = saved[0]
            saved_upto = fold.log_start_offset, fold.applied, saved[1]
    if newest is not None and (fold is None or newest.end_offset > fold.applied):
        fold = decode_fold(newest.body)
        fold.applied = newest.end_offset
        saved_upto = None
    if fold is None and log.base_offset > 0:
        lost = lost or f"its log begins at {log.base_offset}, and nothing says what was there before"
    return fold or PartitionFold(), saved_upto, high_watermark, lost


def last_message_end(log: Log, below: int) -> int:
    """Return the end of the last message below `below`; the log's start when there is none."""
    total = log.messages_before(below)
    low, high = log.log_start_offset, below
    if low >= high or log.messages_before(low) == total:
        return low
    while low < high:  # the least offset below which all messages are
        middle = (low + high) // 2
        if log.messages_before(middle) < total:
            low = middle + 1
        else:
            high = middle
    return low
