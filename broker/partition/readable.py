"""The reading side of a partition: its messages, where they are in the log, and which of them are committed.

Nothing here changes state. Only messages below the high watermark are readable. Of those appended and not yet
committed, only the ids and times are known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import gevent
from gevent.event import Event

from portalmq.broker.core.queue.lanes import lane_position
from portalmq.broker.core.queue.records import LanePosition
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.partition.host import PartitionHost
from portalmq.broker.partition.reader import Reader
from portalmq.broker.partition.refusals import leadership_changing, not_serving_yet
from portalmq.broker.partition.uncommitted import Uncommitted
from portalmq.broker.partition.writer import Pending
from portalmq.broker.storage.batch import Batch, BatchKind
from portalmq.broker.storage.log import Log
from portalmq.errors import OffsetOutOfRange, Unavailable

# Looking up so many ids takes a few milliseconds in each segment, during which nothing else reads that segment.
IDS_SOUGHT_AT_ONCE = 1_000
# Followers confirm their leader at least twice a second; one that takes longer is slow or gone.
VOUCHED_WITHIN_MS = 1_000
VOUCHED_EVERY_S = 0.05


class ReadablePartition:
    """The reading half of a Partition. `reader` reads messages, of which those below `readable_end` can be read.
    `uncommitted` knows the ids of messages that have offsets and are not yet written."""

    host: PartitionHost
    log: Log
    replica: PartitionReplica
    dedup_window_ms: int
    serves: bool
    readable_end: int
    _cache_key: int
    reader: Reader
    uncommitted: Uncommitted
    _browsers: set[Event]

    # --- message ids -------------------------------------------------------------------------------------------------

    def place_of_id(self, message_id: bytes) -> tuple[int, bytes | None, int] | None:
        """Return (offset, body hash, timestamp) of the message with this id within the dedup window, if any. Raises
        Unavailable while that is unknown."""
        unwritten = self.uncommitted.place_of(message_id)
        if unwritten is not None:
            return unwritten
        self._check_files_tell_ids()
        since_ms = max(self.replica.last_timestamp_ms, self.host.clock.wall_ms()) - self.dedup_window_ms
        return self.log.find_message_id(message_id, since_ms)

    @contextmanager
    def seeking(self, message_ids: Sequence[bytes]) -> Iterator[dict[bytes, tuple[int, bytes | None, int]]]:
        """Yield which of these ids are in the log, in the terms of place_of_id. Native threads look them up; until the
        end of the block no other call looks for one of them to append it. Raises Unavailable unless this broker led all
        the time: another leader may have appended some of them, and its records may have arrived here since."""
        epoch = self.replica.leader_epoch if self.replica.leading else -1
        self._check_files_tell_ids()
        self.uncommitted.seek(message_ids)
        try:
            found = self._find_ids(message_ids)
            if not self.replica.leading or self.replica.leader_epoch != epoch:
                raise leadership_changing()
            yield found
        finally:
            self.uncommitted.sought(message_ids)

    def _check_files_tell_ids(self) -> None:
        """Raise unless the files show all ids. Batches of earlier leaders that are on their way to this disk count as
        held, and are written as frames, whose ids are not read."""
        isr_tracker = self.replica.in_sync
        if isr_tracker is not None and self.log.end_offset < isr_tracker.epoch_start:
            raise not_serving_yet()

    def _find_ids(self, message_ids: Sequence[bytes]) -> dict[bytes, tuple[int, bytes | None, int]]:
        since_ms = max(self.replica.last_timestamp_ms, self.host.clock.wall_ms()) - self.dedup_window_ms
        found: dict[bytes, tuple[int, bytes | None, int]] = {}
        message_ids = sorted(message_ids)  # neighbours are side by side in the index
        for start in range(0, len(message_ids), IDS_SOUGHT_AT_ONCE):
            left = message_ids[start : start + IDS_SOUGHT_AT_ONCE]
            below: int | None = None
            while left:  # one call on the pool for each segment, so that the writers run in between
                here, below = self.reader.find_ids(self.host.pool, left, since_ms, below)
                found |= here
                if below is None:
                    break
                left = [message_id for message_id in left if message_id not in here] if here else left
        return found

    def wait_committed(self, offset: int) -> None:
        """Return once `offset` is below the high watermark. Raises NotLeader when the leadership ends first."""
        if offset >= self.replica.high_watermark:
            self.uncommitted.below(offset + 1).wait()

    def wait_allotted(self, offsets: Sequence[int]) -> None:
        """Like wait_committed, for those of the offsets that are allotted."""
        if max(offsets, default=-1) >= self.replica.high_watermark:
            next_offset = self.replica.next_offset
            self.wait_committed(max([offset for offset in offsets if offset < next_offset], default=-1))

    def wait_settled(self, offset: int) -> None:
        """Like wait_committed, for records that take messages from consumers: also wait until no earlier leader can
        hand those messages out."""
        self.settled(offset).wait()

    def settled(self, offset: int) -> Pending:
        """Return what wait_settled waits for. Its outcome is that of what is in the log now: later, another record may
        have this offset."""
        if offset >= self.replica.high_watermark:
            return self.uncommitted.below(offset + 1, BatchKind.ACK)
        pending = Pending(Batch(offset, 1, 0, BatchKind.ACK, 0, 0))
        if self.replica.may_settle(self.host.clock.now_ms()):
            pending.finish()
        else:
            self.uncommitted.unsettled.append(pending)
        return pending

    def wait_vouched(self, *, patient: bool = True) -> None:
        """Return when messages may be handed out. Raises Unavailable when that takes too long; if not `patient`, at
        once."""
        now_ms = self.host.clock.now_ms
        self._wait_vouched(lambda: self.replica.may_deliver(now_ms()), VOUCHED_WITHIN_MS if patient else 0)

    def wait_led(self, within_ms: int = VOUCHED_WITHIN_MS) -> None:
        """Return when it is certain that no other leader had been elected at the time of the call: then this broker may
        deny what it does not know. Raises Unavailable when that takes too long."""
        asked_ms = self.host.clock.now_ms()
        self._wait_vouched(lambda: self.replica.led_at(asked_ms), within_ms)

    def wait_final(self) -> None:
        """Return when a refusal of this moment is final: what it rests on is committed, and no other leader can have
        carried out an earlier try. Raises StorageFull, NotLeader or Unavailable, with an unknown outcome."""
        self.wait_committed(self.replica.next_offset - 1)
        self.wait_led()

    def _wait_vouched(self, is_sure: Callable[[], bool], within_ms: int) -> None:
        now_ms = self.host.clock.now_ms
        until_ms = now_ms() + within_ms
        while not is_sure():
            if not self.replica.leading or now_ms() >= until_ms:
                raise Unavailable("its followers do not vouch for the partition's leader just now", retry_after_s=0.2)
            gevent.sleep(VOUCHED_EVERY_S)

    # --- reading -----------------------------------------------------------------------------------------------------

    def read_ahead(self, offset: int) -> None:
        """Have the first readable message at or above `offset` in memory. The caller may have to wait."""
        self.reader.read_ahead(self.host.pool, offset, self.readable_end)

    def lane_positions(self, start: int, end: int) -> Iterator[LanePosition]:
        """Yield where the messages in [start, end) are in their lanes."""
        for piece in self.reader.pieces(start, end, end - start):
            for offset, record in enumerate(piece.records(), piece.start):
                yield lane_position(offset, record.priority, record.deliver_at_ms, piece.batch.appended_at_ms)

    def readable_by_ms(self, wall_ms: int) -> int:
        """Return up to when all due messages are readable: one that is not readable yet is due after its append."""
        unread_ms = self.uncommitted.first_message_ms()
        return wall_ms if unread_ms is None else min(wall_ms, unread_ms)

    def check_offset(self, offset: int, within_ms: int = VOUCHED_WITHIN_MS) -> None:
        """Raise OffsetOutOfRange; or Unavailable when the offset may yet exist (KIP-207), or may exist at a successor
        that this leader does not know of. Takes up to `within_ms` to find out."""
        if offset < self.log.log_start_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is gone: the partition begins at {self.log.log_start_offset}",
                log_start_offset=self.log.log_start_offset,
                high_watermark=self.high_watermark,
            )
        if offset > self.replica.next_offset and self.serves:
            self.wait_led(within_ms)
        if offset > self.replica.next_offset and self.serves:
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
        """Wait for a message at or above `offset`, for `event`, or for the timeout."""
        if self.readable_end > offset:
            return
        self._browsers.add(event)
        try:
            event.wait(timeout_s)
        finally:
            self._browsers.discard(event)
