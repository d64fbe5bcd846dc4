"""Reading messages of one partition, from the cache or from the files, as slices of batches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar
from zlib import crc32

import msgspec

from portalmq.broker.partition.cache import BatchCache, payload_bytes
from portalmq.broker.partition.native import NativeThreads, attempt
from portalmq.broker.partition.refusals import refusal_of
from portalmq.broker.storage.batch import Batch, BatchKind, Record
from portalmq.broker.storage.errors import DAMAGE, OffsetPurged, Shortage, StorageError, StorageFault
from portalmq.broker.storage.log import Log
from portalmq.errors import Unavailable

# Read ahead this much: a reader of one message usually reads the next ones too.
READ_MESSAGES = 1_000
READ_BYTES = 1024 * 1024
# After so many control records in a row the next message is looked up in the file: one step in an index.
CONTROL_RECORDS_MAX = 32
# For how many messages, at most, the reader remembers the checksums of verified batches: 4 bytes each.
CHECKED_MAX = 2_000_000
CHECKED_BATCHES_MAX = 100_000

P = ParamSpec("P")
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode


class BatchSlice(msgspec.Struct, gc=False, frozen=True):
    """Messages [start, end) of one batch, without a hole between them."""

    batch: Batch
    start: int
    end: int

    def records(self) -> tuple[Record, ...]:
        base = self.batch.base_offset
        if self.start == base and self.end == self.batch.end_offset:
            return self.batch.records
        return self.batch.records[self.start - base : self.end - base]


class Reader:
    """`key` names the partition in the cache. `on_fault` is called for a disk that cannot be read, `on_damage` for a
    batch or a file that is damaged."""

    def __init__(
        self,
        log: Log,
        cache: BatchCache,
        key: int,
        on_fault: Callable[[BaseException], None],
        on_damage: Callable[[Exception], None],
    ) -> None:
        self._log = log
        self._cache = cache
        self._key = key
        self._on_fault = on_fault
        self._on_damage = on_damage
        self.used = False
        # The checksums of the messages in batches that were read as a whole, and so were verified; by base offset.
        self._checked: dict[int, array[int]] = {}
        self._checked_messages = 0
        # Where it was read ahead last: control records there are in no cache.
        self._read_ahead_at = -1
        self._forgotten = 0

    def pieces(self, start: int, end: int, limit: int) -> Iterator[BatchSlice]:
        """Yield the messages in [start, end), at most `limit`, by offset. Raises Unavailable for a damaged batch."""
        offset = max(start, self._log.log_start_offset)
        if end - start == 1 and offset == start and (piece := self._of_checked(offset)) is not None:
            yield piece
            return
        passed = 0
        while offset < end and limit > 0:
            batch = self._cache.find(self._key, offset) or self._read(offset, end)
            if batch is None:
                return
            if batch.kind == BatchKind.MESSAGES:
                passed = 0
                for first, last in batch.runs(offset, end):
                    piece = BatchSlice(batch, first, min(last, first + limit))
                    limit -= piece.end - piece.start
                    yield piece
                    if limit <= 0:
                        return
            else:
                passed += 1
            offset = batch.end_offset
            if passed >= CONTROL_RECORDS_MAX:
                offset, passed = self._next_message(offset, end), 0

    def find_ids(
        self, pool: NativeThreads, message_ids: Sequence[bytes], since_ms: int, below: int | None
    ) -> tuple[dict[bytes, tuple[int, bytes | None, int]], int | None]:
        """Call the log's find_message_ids on a native thread. Raises Unavailable for damage, StorageFull."""
        return self.on_native(pool, self._log.find_message_ids, message_ids, since_ms, below)

    def on_native(self, pool: NativeThreads, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Return the result of work that reads the log, on a native thread. Raises Unavailable for damage,
        StorageFull, OffsetPurged."""
        self.used = True
        found = attempt(pool, work, *arguments, **named)
        if isinstance(found, Unavailable):
            raise found
        if isinstance(found, DAMAGE):
            self._on_damage(found)
            raise Unavailable(f"a file is damaged on this broker: {found}", outcome="not_applied") from found
        if isinstance(found, Shortage):
            raise refusal_of(found) from found
        if isinstance(found, OffsetPurged):
            raise found
        if isinstance(found, StorageError):
            self._on_fault(found)
            raise Unavailable("the storage failed", outcome="not_applied") from found
        if isinstance(found, Exception):
            raise found
        return found

    def _of_checked(self, offset: int) -> BatchSlice | None:
        """Return the message at `offset` alone, when its batch was verified before and has left the cache, and it is
        still the same. Scattered reads would otherwise read a whole batch for each message, since the checksum covers
        the batch."""
        if self._cache.find(self._key, offset) is not None:
            return None
        base_offset, timestamp_ms, record = self._row(offset) or (-1, 0, None)
        known = self._checked.get(base_offset)
        if record is None or known is None or known[offset - base_offset] != _checksum(record, timestamp_ms):
            return None
        batch = Batch(offset, 1, 0, BatchKind.MESSAGES, 0, timestamp_ms, records=(record,))
        return BatchSlice(batch, offset, offset + 1)

    def _row(self, offset: int) -> tuple[int, int, Record] | None:
        with self._telling_faults():
            return self._log.lanes.message(offset)
        return None

    def control_at(self, offset: int) -> Batch | None:
        """Return the control record at `offset`; None when it is gone. Raises Unavailable for a damaged one."""
        found = self._cache.find(self._key, offset)
        if found is not None:
            return found
        with self._telling_faults():
            return next(iter(self._log.read(offset, below=offset + 1)), None)
        return None

    def _next_message(self, offset: int, end: int) -> int:
        """Return the offset of the first message in [offset, end), or `end`. Only what is on disk is searched."""
        with self._telling_faults():
            found = self._log.next_message(offset, end)
            return max(offset, min(end, self._log.end_offset)) if found is None else found
        return end

    def _read(self, offset: int, end: int) -> Batch | None:
        """Read the batch of the first message in [offset, end) from disk, with some that follow it."""
        batches: list[Batch] = []
        with self._telling_faults():
            found = self._log.next_message(offset, end)
            if found is None:
                return None
            held = self._cache.find(self._key, found)
            if held is not None:  # behind control records that are not
                return held
            batches = _read_batches(self._log, found, end)
        self._keep(batches)
        return batches[0] if batches else None

    def read_ahead(self, pool: NativeThreads, offset: int, end: int) -> None:
        """Have the first message in [offset, end) in the cache, read on a native thread where it is not. A fault is
        left to whoever reads the message."""
        if offset >= end or offset == self._read_ahead_at or self._cache.find(self._key, offset) is not None:
            return
        self.used = True
        self._read_ahead_at, forgotten = offset, self._forgotten
        batches = pool.apply(_read_if_whole, (self._log, offset, end))
        if self._forgotten == forgotten:  # else the files may have changed since
            self._keep(batches)

    def forget(self) -> None:
        """Forget what was read before: the files have changed."""
        self._forgotten += 1
        self._checked.clear()
        self._checked_messages = 0
        self._cache.drop(self._key)

    def _keep(self, batches: list[Batch]) -> None:
        for batch in batches:
            if batch.kind == BatchKind.MESSAGES and batch.base_offset not in self._checked:
                if len(self._checked) >= CHECKED_BATCHES_MAX or self._checked_messages >= CHECKED_MAX:
                    self._checked.clear()
                    self._checked_messages = 0
                at_ms = batch.appended_at_ms
                self._checked[batch.base_offset] = array("I", [_checksum(record, at_ms) for record in batch.records])
                self._checked_messages += batch.count
        for batch in reversed(batches):
            self._cache.put(self._key, batch, payload_bytes(batch))

    @contextmanager
    def _telling_faults(self) -> Iterator[None]:
        """Raise faults of the files as public errors. What was purged during the read is not there."""
        self.used = True
        try:
            with suppress(OffsetPurged):
                yield
        except DAMAGE as fault:
            self._on_damage(fault)
            raise Unavailable(f"a batch is damaged on this broker: {fault}", outcome="not_applied") from fault
        except Shortage as shortage:  # opening files that were closed takes some room
            raise refusal_of(shortage) from shortage
        except StorageFault as fault:
            self._on_fault(fault)
            raise Unavailable("the storage failed", outcome="not_applied") from fault


def _checksum(record: Record, timestamp_ms: int) -> int:
    return crc32(_encode((timestamp_ms, record)))


def _read_batches(log: Log, offset: int, end: int) -> list[Batch]:
    """The batch of the message at `offset`, with some that follow it."""
    return log.read(offset, max_messages=READ_MESSAGES, max_bytes=READ_BYTES, below=end)


def _read_if_whole(log: Log, offset: int, end: int) -> list[Batch]:
    try:
        found = log.next_message(offset, end)
        return [] if found is None else _read_batches(log, found, end)
    except (StorageError, Unavailable):
        return []
