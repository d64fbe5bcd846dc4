"""The fold over a partition's log at work: what its groups' records add up to, and how it is found again at an open.

    log      ....STATE........................................ end
    saved    ..............[state.sqlite: applied]
    fold     = the newest snapshot that fits the log, then every record after it

The fold runs over all that the log holds, ahead of the high watermark: on a leader from the moment a record is
appended, on a follower from the moment it is durable. Snapshots are saved only up to the high watermark, so a
truncation finds one that is older than what it cuts.

A purge takes effect in two steps. Its record ends what the groups had below; the log start moves when a STATE record
that stands behind it is committed, so that a replica which begins at a log start always finds a STATE there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from portalmq.broker.core.delivery import GroupDelivery
from portalmq.broker.core.events import Stamp
from portalmq.broker.core.fold import GroupFold, PartitionFold, ProducerFold, decode_fold
from portalmq.broker.core.producers import Producers
from portalmq.broker.core.records import Ack, Extend, Grant, GroupRecord, GroupStart, Nack, Purge
from portalmq.broker.storage.batch import Batch, Kind
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.reading import ReplicaStart
from portalmq.broker.storage.state import StateFile

_RECORD_TYPES: dict[int, type[GroupRecord]] = {
    Kind.GROUP_START: GroupStart,
    Kind.GRANT: Grant,
    Kind.ACK: Ack,
    Kind.NACK: Nack,
    Kind.EXTEND: Extend,
}
KIND_OF = {record_type: Kind(kind) for kind, record_type in _RECORD_TYPES.items()}


class GroupsFold:
    """The queue groups of one partition, and the purges that have still to move the log start.

    Invariant: both numbers of `purges` and of `moves` rise: (offset of the record, the log start it asks for).
    """

    def __init__(self, groups: Iterable[GroupFold] = ()) -> None:
        self.delivery = {group.group: GroupDelivery(group) for group in groups}
        self.purges: list[tuple[int, int]] = []
        self.moves: list[tuple[int, int]] = []
        # Where the newest STATE record stands; -1 without one.
        self.state_offset = -1

    def take(self, batch: Batch) -> None:
        """Fold a control record that came by replication, or that was found in the log."""
        if batch.kind == Kind.STATE:
            self.take_state(batch.base_offset, decode_fold(batch.body))
        elif batch.kind == Kind.PURGE:
            self.purge(batch.base_offset, msgspec.msgpack.decode(batch.body, type=Purge).upto)
        elif batch.kind == Kind.GROUP_END:
            self.delivery.pop(batch.group, None)
        elif batch.kind in _RECORD_TYPES:
            self.apply(batch.group, msgspec.msgpack.decode(batch.body, type=_RECORD_TYPES[batch.kind]))

    def take_state(self, offset: int, fold: PartitionFold) -> None:
        """A STATE record is the fold over its own prefix: a replica that began late has the whole of it from here."""
        self.delivery.clear()
        self.delivery.update({group.group: GroupDelivery(group) for group in fold.groups})
        self.state_written(offset, fold.log_start_offset)

    def state_written(self, offset: int, log_start: int) -> None:
        """A STATE record stands at `offset`: the log may begin at `log_start` once that is committed."""
        self.state_offset = offset
        self.moves.append((offset, log_start))
        self.purges.clear()

    def apply(self, group: str, record: GroupRecord) -> None:
        if isinstance(record, GroupStart) and group not in self.delivery:
            self.delivery[group] = GroupDelivery(GroupFold(group, 0, 0, []))
        delivery = self.delivery.get(group)
        if delivery is not None:
            delivery.apply(record)

    def purge(self, offset: int, upto: int) -> None:
        """A purge stands at `offset`: what lies below `upto` is gone for every group."""
        self.forget_below(upto)
        self.purges.append((offset, upto))

    def forget_below(self, upto: int) -> None:
        for delivery in self.delivery.values():
            delivery.purge(upto)

    def due(self, high_watermark: int) -> int:
        """The log start that committed purges ask for; 0 for none."""
        upto = 0
        while self.moves and self.moves[0][0] < high_watermark:
            upto = max(upto, self.moves.pop(0)[1])
        return upto

    @property
    def purged_upto(self) -> int:
        """Where the log would begin with all purges done."""
        return max([0, *(upto for _, upto in self.purges), *(upto for _, upto in self.moves)])

    def snapshot(self) -> list[GroupFold]:
        return [delivery.snapshot() for delivery in self.delivery.values()]


@dataclass(slots=True)
class Recovered:
    """What a log and its state file add up to. `lost` says why the log cannot be all that this replica once had."""

    groups: GroupsFold
    producers: Producers
    epochs: list[tuple[int, int]]
    high_watermark: int
    highest_epoch: int
    start: ReplicaStart
    readable_end: int
    recovered_end: int
    lost: str = field(default="")


def recover(log: Log, state_file: StateFile, known_high_watermark: int = 0) -> Recovered:
    """Fold the log, from the newest snapshot on; the high watermark is at least the one that is known, if any.

    Reads files: for a native thread. Raises CorruptBatch, StorageFault.
    """
    newest = log.newest_state()
    fold, high_watermark, lost = _snapshot_to_start_from(log, state_file, newest)
    groups = GroupsFold(fold.groups)
    if newest is not None:
        groups.state_written(newest.base_offset, decode_fold(newest.body).log_start_offset)
    epochs = list(fold.epochs)
    for batch in log.control_records(fold.applied):
        if batch.kind == Kind.EPOCH_START:
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
    )


def producers_after(log: Log, folds: list[ProducerFold], applied: int) -> Producers:
    """The fold over the batches of idempotent producers from `applied` on, beginning with `folds`."""
    producers = Producers(folds)
    for batch in log.producer_batches(applied):
        stamp = Stamp(batch.producer_id, batch.producer_epoch, batch.sequence)
        producers.add(stamp, batch.count, batch.base_offset, batch.appended_at_ms)
    return producers


def _snapshot_to_start_from(log: Log, state_file: StateFile, newest: Batch | None) -> tuple[PartitionFold, int, str]:
    """The saved fold or that of the `newest` STATE record, whichever stands later; the high watermark; and what speaks
    against this log.

    A saved fold does not count when it is ahead of the log, when segments that it needs have been dropped, or when its
    log start is above the log's: then it was saved for a reset that did not come to pass. Without a saved high
    watermark only what lies below the log start is known to be committed: a STATE record need not be.
    """
    saved = state_file.load()
    high_watermark, lost = log.log_start_offset, ""
    fold: PartitionFold | None = None
    if saved is not None and saved[0].log_start_offset <= log.log_start_offset:
        high_watermark = max(high_watermark, saved[1])
        if saved[1] > log.end_offset:
            lost = f"its log ends at {log.end_offset}, and it had committed records up to {saved[1]}"
        if log.base_offset <= saved[0].applied <= log.end_offset:
            fold = saved[0]
    if newest is not None and (fold is None or newest.end_offset > fold.applied):
        fold = decode_fold(newest.body)
        fold.applied = newest.end_offset
    if fold is None and log.base_offset > 0:
        lost = lost or f"its log begins at {log.base_offset}, and nothing says what was there before"
    return fold or PartitionFold(), high_watermark, lost


def last_message_end(log: Log, below: int) -> int:
    """The end of the last message below `below`; the log's start when there is none."""
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
