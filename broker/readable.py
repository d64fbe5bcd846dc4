"""What a partition can be asked for: its messages, where they stand, and which of them are committed.

Nothing here changes anything. Only what is below the high watermark is readable; what was appended and is not committed
yet is known by its ids and its times alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from gevent.event import Event

from portalmq.broker.core.lanes import spot_of
from portalmq.broker.core.records import Spot
from portalmq.broker.core.replica import PartitionReplica
from portalmq.broker.hosting import PartitionHost
from portalmq.broker.reader import Piece, Reader
from portalmq.broker.storage.batch import Batch
from portalmq.broker.storage.log import Log
from portalmq.broker.uncommitted import Uncommitted
from portalmq.broker.writer import Pending
from portalmq.errors import OffsetOutOfRange, Unavailable


class ReadablePartition:
    """The asking half of a Partition. Messages below `readable_end` can be read."""

    host: PartitionHost
    log: Log
    replica: PartitionReplica
    dedup_window_ms: int
    serves: bool
    readable_end: int
    _cache_key: int
    _reader: Reader
    _uncommitted: Uncommitted
    _browsers: set[Event]

    # --- message ids -------------------------------------------------------------------------------------------------

    def place_of_id(self, message_id: bytes) -> tuple[int, bytes | None, int] | None:
        """(offset, body hash, timestamp) of the message that carries this id within the dedup window, if any."""
        unwritten = self._uncommitted.place_of(message_id)
        if unwritten is not None:
            return unwritten
        since_ms = max(self.replica.last_timestamp_ms, self.host.clock.wall_ms()) - self.dedup_window_ms
        return self.log.find_message_id(message_id, since_ms)

    def remember_ids(self, pending: Pending) -> None:
        """Ids of messages that are allotted and not yet written."""
        self._uncommitted.remember_ids(pending)

    def wait_committed(self, offset: int) -> None:
        """Return once `offset` is below the high watermark. Raises NotLeader when the leadership ends before."""
        if offset >= self.replica.high_watermark:
            self._uncommitted.wait_below(offset + 1)

    # --- reading -----------------------------------------------------------------------------------------------------

    def pieces(self, start: int, end: int, limit: int) -> Iterator[Piece]:
        """The messages in [start, end), at most `limit`, as pieces of batches. Raises Unavailable for a damaged one."""
        return self._reader.pieces(start, end, limit)

    def control_at(self, offset: int) -> Batch | None:
        """The control record at `offset`; None when it is gone. Raises Unavailable for a damaged one."""
        return self._reader.control_at(offset)

    def spots(self, start: int, end: int) -> Iterator[Spot]:
        """Where the messages in [start, end) stand in their lanes."""
        for piece in self.pieces(start, end, end - start):
            for offset, record in enumerate(piece.records(), piece.start):
                yield spot_of(offset, record.priority, record.deliver_at_ms, piece.batch.appended_at_ms)

    def readable_by_ms(self, wall_ms: int) -> int:
        """All messages that are due by that time are readable: one that is not yet is due after it was appended."""
        unread_ms = self._uncommitted.first_message_ms()
        return wall_ms if unread_ms is None else min(wall_ms, unread_ms)

    def forget_read(self) -> None:
        """What was read before is not in the files any more as it was."""
        self.host.cache.drop(self._cache_key)

    def check_offset(self, offset: int) -> None:
        """Raises OffsetOutOfRange, or Unavailable when the offset may yet be (KIP-207)."""
        if offset < self.log.log_start_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is gone: the partition begins at {self.log.log_start_offset}",
                log_start_offset=self.log.log_start_offset,
                high_watermark=self.high_watermark,
            )
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
        """Wait for a message at or above `offset`, for `event`, or for the time to pass."""
        if self.readable_end > offset:
            return
        self._browsers.add(event)
        try:
            event.wait(timeout_s)
        finally:
            self._browsers.discard(event)
