"""The leader's half of replication on one partition: it answers followers' fetches.

A fetch whose log matches waits for records, a high watermark that moves, or the end of this leadership. Followers get
small batches while the leader writes them itself (rule 1 in core/DESIGN.md), larger ones once they are durable here.
Batches are sent as they were encoded for their checksum: from memory while they are there, otherwise read
and encoded once for all followers, on a native thread.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from portalmq.broker.core.replica.events import Fetch, FetchReceived, Poll, Rejected, Reply, ReplyFetch
from portalmq.broker.partition.host import Replica
from portalmq.broker.storage.batch import BatchFrame, frame_of
from portalmq.broker.storage.errors import OffsetPurged, Shortage, StorageError
from portalmq.broker.storage.log import Log
from portalmq.errors import Unavailable

# How much of one partition a follower gets at a time: as much as one transaction takes.
REPLY_OFFSETS_MAX = 50_000
COLD_READ_BYTES = 512 * 1024


class WaitingFetch(Protocol):
    """A follower's fetch that waits for its answer."""

    @property
    def fetch(self) -> Fetch: ...

    @property
    def poll(self) -> Poll:
        """The last request of its broker."""
        ...

    @property
    def knows_compressed(self) -> bool:
        """Whether the follower's version can store batches whose values are compressed."""
        ...

    @property
    def is_waiting(self) -> bool:
        """False once it is answered, replaced or withdrawn."""
        ...

    def reply(self, reply: Reply) -> None:
        """Answer the fetch."""
        ...

    def has_records(self) -> None:
        """Note that there are records for the fetch."""
        ...

    def high_watermark_moved(self) -> None: ...


class LeaderReplication:
    """`parked` are the matching fetches that wait, by broker: at most one for each follower. `sent_end` is the end of
    the records that followers were sent. `_knows_compressed` tells by broker what their
    versions know."""

    def __init__(self, partition: Replica, cache_key: int) -> None:
        self._partition = partition
        self._cache_key = cache_key
        self.parked: dict[int, WaitingFetch] = {}
        self.sent_end = 0
        self._knows_compressed: dict[int, bool] = {}
        # The frames of all batches from the durable end to here are in the cache.
        self._ahead_end = 0

    @property
    def _sendable_end(self) -> int:
        replica = self._partition.replica
        return max(replica.durable_end, min(self._ahead_end, replica.sendable_end))

    def on_fetch(self, pending: WaitingFetch) -> None:
        """Handle a follower's fetch."""
        self._knows_compressed[pending.fetch.broker_id] = pending.knows_compressed
        self._partition.step(FetchReceived(pending, pending.fetch, pending.poll.sent_after_ms, pending.poll))

    def may_compress(self) -> bool:
        """Return whether the followers can store compressed batches. While brokers of an earlier version are replaced
        one by one, a batch that one of them refuses would end its replication. A follower that never fetched counts if
        it is in sync."""
        state, knows = self._partition.replica.state, self._knows_compressed
        return state is not None and all(
            knows.get(each, each not in state.isr) for each in state.replicas if each != state.leader
        )

    def on_withdrawn(self, pending: WaitingFetch) -> None:
        self._partition.replica.fetch_ended(pending.fetch.broker_id, pending.poll)
        if self.parked.get(pending.fetch.broker_id) is pending:
            del self.parked[pending.fetch.broker_id]

    def answer(self, action: ReplyFetch) -> None:
        pending: WaitingFetch = action.token  # type: ignore[assignment]
        if not pending.is_waiting:
            return
        if action.reply is not None:
            self.on_withdrawn(pending)
            pending.reply(action.reply)
            return
        self.parked[pending.fetch.broker_id] = pending
        if self._sendable_end > action.offset:
            pending.has_records()
        else:
            pending.high_watermark_moved()

    def send_ahead(self, base_offset: int, end_offset: int, frame: BatchFrame, *, wakes: bool) -> None:
        """Offer a batch to followers that is on its way to the disk here. Without `wakes` it goes with the next one."""
        self._partition.host.cache.put_frame(self._cache_key, base_offset, end_offset, frame)
        if base_offset <= max(self._ahead_end, self._partition.replica.durable_end):
            self._ahead_end = end_offset
            if wakes:
                self.wake()

    def wake(self) -> None:
        """Answer the fetches for which there are records."""
        end = self._sendable_end
        for pending in self.parked.values():
            if pending.fetch.fetch_offset < end:
                pending.has_records()

    def high_watermark_moved(self) -> None:
        for pending in self.parked.values():
            pending.high_watermark_moved()

    def end(self) -> None:
        """End the leadership: none of these fetches is answered, since they belong to its epoch."""
        self._ahead_end = 0
        parked, self.parked = self.parked, {}
        for pending in parked.values():
            pending.reply(Rejected(self._partition.replica.highest_epoch))

    def frames(
        self, offset: int, bytes_max: int, *, end: int | None = None, turn: AbstractContextManager[object] | None = None
    ) -> list[BatchFrame] | None:
        """Return the batches from `offset` to below `end`: at least one if there is any, about `bytes_max`. Without
        `end` it is for a follower, and includes those that are sent ahead; else all are durable.

        May wait for the disk, and before that for the `turn` to read from it. Return None when this log cannot provide
        them: then the fetch is checked again.
        """
        durable_end, is_followers = self._partition.replica.durable_end, end is None
        end = min(self._sendable_end if end is None else min(end, durable_end), offset + REPLY_OFFSETS_MAX)
        found: list[BatchFrame] = []
        size = 0
        cached = self._partition.host.cache.frames
        while offset < end and (size < bytes_max or not found):
            hit = cached.find(self._cache_key, offset) or self._encoded(offset)
            if hit is None:
                break
            frame, offset = hit
            found.append(frame)
            size += frame.size_bytes
        if found and is_followers:
            self.sent_end = max(self.sent_end, offset)
        if found or offset >= min(end, durable_end):
            return found
        with turn or nullcontext():
            return self._read(offset, end, min(bytes_max, COLD_READ_BYTES))

    def _encoded(self, offset: int) -> tuple[BatchFrame, int] | None:
        """Return the frame of a batch that is in memory as messages only. The frame is encoded now, and kept."""
        cache = self._partition.host.cache
        batch = cache.find(self._cache_key, offset)
        if batch is None:
            return None
        frame = frame_of(batch)
        cache.put_frame(self._cache_key, batch.base_offset, batch.end_offset, frame)
        return frame, batch.end_offset

    def _read(self, offset: int, end: int, bytes_max: int) -> list[BatchFrame] | None:
        partition = self._partition
        epoch = partition.replica.highest_epoch
        read = partition.host.pool.apply(_read_frames, (partition.log, offset, end, bytes_max))
        if isinstance(read, OffsetPurged | Shortage | Unavailable):
            return None
        if partition.replica.highest_epoch != epoch:
            return None  # the log may have been truncated since: nothing that was read may enter the cache
        if isinstance(read, Exception):
            partition.storage_failed(read)
            return None
        for base_offset, end_offset, frame in read:
            partition.host.cache.put_frame(self._cache_key, base_offset, end_offset, frame)
            self.sent_end = max(self.sent_end, end_offset)
        return [frame for _, _, frame in read]


def _read_frames(
    log: Log, offset: int, end: int, bytes_max: int
) -> list[tuple[int, int, BatchFrame]] | StorageError | Unavailable:
    """Run on a native thread. Return errors instead of raising them."""
    try:
        batches = log.read_to_copy(offset, max_bytes=bytes_max, below=end)
    except (StorageError, Unavailable) as error:
        return error
    return [(batch.base_offset, batch.end_offset, frame_of(batch)) for batch in batches]
