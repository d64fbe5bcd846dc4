"""A partition at rest: all of its log is committed and in its saved fold, and its files are closed. What is known of it
then is enough to begin again without opening them (storage/closed_replicas.py)."""

from __future__ import annotations

import zlib

from portalmq.broker.core.fold import decode_fold, encode_fold
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.partition.folding import GroupsFold, Recovered
from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.closed_replicas import ClosedReplica

# A replica with more than this open or to note is opened at the start: that costs little beside its content.
OUTSTANDING_MAX = 1_000
FOLD_BYTES_MAX = 16 * 1024


def uses_of(partition: Partition) -> tuple[int, int]:
    """Return what changes whenever the files are used."""
    return partition.log.last_used, partition.state_file.last_used


def closed_replica_of(partition: Partition, description: bytes) -> ClosedReplica | None:
    """Return what is known of a partition at rest, whose topic has this description; None for any other."""
    segment, saved = partition.log.facts, partition.state_file.saved
    if segment is None or saved is None or partition.fault or partition.rebuild_reason or partition.lost:
        return None
    replica, groups, end = partition.replica, partition.groups, partition.log.end_offset
    is_settled = replica.next_offset == replica.durable_end == replica.high_watermark == end
    if not is_settled or (saved.applied, saved.high_watermark) != (end, end) or replica.quarantined:
        return None
    if groups.purges or groups.moves or groups.state_offset >= 0:  # the log start depends on records in the log
        return None
    if sum([delivery.outstanding for delivery in partition.delivery.values()]) > OUTSTANDING_MAX:
        return None
    fold = encode_fold(partition.snapshot())
    if len(fold) > FOLD_BYTES_MAX:
        return None
    return ClosedReplica(
        partition.log.identity,
        partition.store_uuid,
        segment,
        saved,
        fold,
        partition.start,
        partition.readable_end,
        zlib.crc32(description),
    )


def recovered_from(closed: ClosedReplica, highest_epoch: int) -> Recovered:
    """Return what opening the replica would find. `highest_epoch` is the highest that the broker's file has."""
    fold = decode_fold(closed.fold)
    groups = GroupsFold(fold)
    groups.forget_below(closed.start.offset)
    last_epoch = fold.epochs[-1][0] if fold.epochs else 0
    return Recovered(
        groups=groups,
        producers=Producers(fold.producers),
        epochs=list(fold.epochs),
        high_watermark=closed.saved.high_watermark,
        highest_epoch=max(highest_epoch, closed.saved.epoch, last_epoch),
        start=closed.start,
        readable_end=closed.readable_end,
        recovered_end=closed.readable_end,
        is_saved=True,
    )
