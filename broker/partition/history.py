"""The life of a message, read from the log of its partition: on the leader, or on a follower as far as it knows what is
committed.

Only records below the high watermark count. They are read in blocks, on native threads. What each block is about is
remembered, so a block is read again only for the messages that its records name. One call reads for a limited time;
what it has told by then is kept, so the next call about that message continues there.
"""

from __future__ import annotations

import time
from itertools import takewhile
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from portalmq.broker.core.queue.biography import Biography, BlockSummary, RecordOrigin, summary_of
from portalmq.broker.partition.folding import GroupsFold, message_record_of
from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.batch import HOLE, Batch, BatchKind, Record
from portalmq.broker.storage.errors import OffsetPurged
from portalmq.broker.storage.log import Log
from portalmq.contract.history import AsOf, TraceReplicas
from portalmq.errors import MessageNotFound, OffsetOutOfRange, Unavailable

# Offsets of one block; some of them are messages, some records.
BLOCK_OFFSETS = 4_096
# Blocks of a partition that are remembered; a quarter of a kilobyte each. A trace over more of them would not end.
BLOCKS_MAX = 250_000
# Lives of a partition's messages that are kept to be continued.
UNFINISHED_MAX = 16
# How long one call reads, and how long it keeps a native thread, which writers wait for.
READ_WITHIN_S = 2.0
THREAD_WITHIN_S = 0.03
# How long a leader waits until what it has appended is committed.
COMMITTED_WITHIN_S = 0.5


class BlockSummaries:
    """What the blocks of a log are about, by their numbers. A block that reaches above the high watermark is not in
    here."""

    def __init__(self) -> None:
        self._known: dict[int, BlockSummary] = {}
        # By the offset of the message: its life so far, and where to continue.
        self._unfinished: dict[int, tuple[Biography, int]] = {}

    def resume(self, offset: int) -> tuple[Biography, int] | None:
        """Return the life of a message that an earlier call has begun, for this call alone; and where to continue."""
        return self._unfinished.pop(offset, None)

    def keep(self, biography: Biography, start: int) -> None:
        """Keep a life that has only the records below `start`, for `resume`."""
        while len(self._unfinished) >= UNFINISHED_MAX:
            del self._unfinished[next(iter(self._unfinished))]
        self._unfinished[biography.offset] = biography, start

    def tell(self, biography: Biography, log: Log, start: int, end: int, within_s: float) -> int:
        """Let the biography take the records in [start, end). Return where to continue, `end` if it has taken all.
        Reads files, so it runs on a native thread. Raises CorruptBatch, OffsetPurged."""
        until = time.monotonic() + within_s
        while start < end:
            number = start // BLOCK_OFFSETS
            upto = (number + 1) * BLOCK_OFFSETS
            known = self._known.get(number)
            if known is None or biography.concerns(known):
                self._read(biography, log, number, start, min(upto, end))
                if time.monotonic() >= until:
                    return min(upto, end)
            start = upto
        return end

    def _read(self, biography: Biography, log: Log, number: int, start: int, end: int) -> None:
        first = number * BLOCK_OFFSETS
        batches = takewhile(lambda each: each.base_offset < end, log.control_records(first))
        found = [(batch, record) for batch in batches if (record := message_record_of(batch)) is not None]
        block = summary_of([(batch.group, record) for batch, record in found])
        if biography.concerns(block):
            for batch, record in found:
                if batch.base_offset >= start:
                    origin = RecordOrigin(batch.base_offset, batch.leader_epoch, batch.appended_at_ms, batch.group)
                    biography.take(record, origin)
        if end == first + BLOCK_OFFSETS:
            if len(self._known) >= BLOCKS_MAX:
                self._known.clear()
            self._known[number] = block


# A fold is replaced when a log is truncated or begun again: then its blocks may have other records.
_summaries_of: WeakKeyDictionary[GroupsFold, BlockSummaries] = WeakKeyDictionary()


class TracedMessage(NamedTuple):
    """A message and its life. `record` is None for a purged one. `is_whole`: the biography has all that is known up to
    `as_of`. Records of groups below `incomplete_below` were compacted away."""

    timestamp_ms: int
    record: Record | None
    biography: Biography
    is_whole: bool
    as_of: AsOf
    replicas: TraceReplicas
    incomplete_below: int | None


def trace(partition: Partition, offset: int) -> TracedMessage:
    """Return the life of the message at `offset`. Raises MessageNotFound, Unavailable."""
    end = known_end(partition)
    known_upto_ms = _known_upto_ms(partition, end)
    batch, record = _message(partition, offset, end)
    summaries = _summaries_of.get(partition.groups)
    if summaries is None:
        summaries = _summaries_of[partition.groups] = BlockSummaries()
    described = record or batch.records[offset - batch.base_offset]
    origin = RecordOrigin(offset, batch.leader_epoch, batch.appended_at_ms, "")
    begun = summaries.resume(offset)
    biography, start = begun or (
        Biography(offset, origin, described.deliver_at_ms, described.expires_at_ms),
        offset + 1,
    )
    until = time.monotonic() + READ_WITHIN_S
    while start < end:
        start = partition.reader.on_native(
            partition.host.pool, summaries.tell, biography, partition.log, start, end, THREAD_WITHIN_S
        )
        if time.monotonic() >= until:
            break
    is_whole = start >= end
    if is_whole:
        biography.finish(known_upto_ms)
    _name_brokers(partition, biography)
    as_of = AsOf(partition.host.broker_id, partition.serves, start, known_upto_ms)
    compacted = partition.groups.compacted
    incomplete_below = compacted if compacted > offset else None
    replicas = _replicas(partition, offset)
    if not is_whole:
        summaries.keep(biography, start)
    return TracedMessage(batch.appended_at_ms, record, biography, is_whole, as_of, replicas, incomplete_below)


def known_end(partition: Partition) -> int:
    """Return the high watermark. A leader first waits a moment for what it has appended: so a call tells of the
    deliveries and acks that were answered before it."""
    end = partition.replica.next_offset
    if partition.serves and end > partition.high_watermark:
        partition.hurry()
        partition.uncommitted.below(end).done.wait(COMMITTED_WITHIN_S)
    return partition.high_watermark


def _message(partition: Partition, offset: int, end: int) -> tuple[Batch, Record | None]:
    """Return the batch of the message, and the message unless it is purged. Raises MessageNotFound, Unavailable."""
    log = partition.log
    if offset >= end:
        _deny(partition, offset)
    try:
        found = partition.reader.on_native(
            partition.host.pool, log.read_to_copy, offset, max_bytes=1, below=min(offset + 1, end)
        )
    except OffsetPurged:
        raise MessageNotFound(f"message {offset} is gone: the log begins at {log.base_offset}") from None
    batch = found[0] if found else None
    if batch is None or batch.kind != BatchKind.MESSAGES or batch.records[offset - batch.base_offset] is HOLE:
        raise MessageNotFound(f"there is no message at offset {offset}: it is a record, or was compacted away")
    if offset < log.log_start_offset:
        return batch, None
    if not batch.compressed:
        return batch, batch.records[offset - batch.base_offset]
    piece = next(partition.reader.pieces(offset, offset + 1, 1), None)
    return batch, piece.records()[0] if piece is not None else None


def _deny(partition: Partition, offset: int) -> None:
    """Raise MessageNotFound for an offset at or above the high watermark; Unavailable where it may exist."""
    if not partition.serves:
        raise Unavailable(f"offset {offset} is not committed, as far as this follower knows", retry_after_s=0.1)
    try:
        partition.check_offset(offset + 1)
    except OffsetOutOfRange:
        end = partition.replica.next_offset
        raise MessageNotFound(f"there is no message at offset {offset}: the log ends at {end}") from None
    raise Unavailable(f"offset {offset} is not committed yet", retry_after_s=0.1)


def _known_upto_ms(partition: Partition, end: int) -> int:
    """Return up to when every committed record is below `end`. A leader knows it now, unless one is on its way, or
    another leader may have been elected."""
    replica, now_ms = partition.replica, partition.host.clock.now_ms()
    if partition.serves and replica.next_offset == end and replica.may_deliver(now_ms):
        return now_ms
    return partition.log.replica_start(end).timestamp_before_ms


def _name_brokers(partition: Partition, biography: Biography) -> None:
    """Name the leaders that wrote the records, where the log says who began their epoch."""
    brokers: dict[int, int | None] = {}
    starts = dict(partition.replica.epochs)
    for event in biography.events:
        epoch = event.leader_epoch
        if epoch is None:
            continue
        if epoch not in brokers:
            brokers[epoch] = _leader_of(partition, starts.get(epoch))
        event.broker = brokers[epoch]


def _leader_of(partition: Partition, epoch_start: int | None) -> int | None:
    """Return the broker that wrote the EPOCH_START at that offset. Earlier versions wrote no broker."""
    if epoch_start is None or epoch_start < partition.log.log_start_offset:
        return None
    batch = partition.reader.control_at(epoch_start)
    if batch is None or batch.kind != BatchKind.EPOCH_START or not batch.body:
        return None
    return int(msgspec.msgpack.decode(batch.body, type=list[int])[0])


def _replicas(partition: Partition, offset: int) -> TraceReplicas:
    state, isr_tracker = partition.replica.state, partition.replica.in_sync
    own = {partition.host.broker_id}
    if state is None:
        return TraceReplicas(None, partition.replica.leader_epoch, [], [], sorted(own))
    holders = own
    if isr_tracker is not None:  # what its leader has committed is on every member of the ISR
        holders = own | state.isr | isr_tracker.holders(offset)
    return TraceReplicas(state.leader, state.leader_epoch, sorted(state.replicas), sorted(state.isr), sorted(holders))
