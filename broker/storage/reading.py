"""The reading half of a log: queries over its segments, in offset order.

Readers hold no snapshot across calls: what is below the end is final until a truncation, which waits for the read lock.
Of the sealed segments only the few that were read last are kept open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, suppress
from typing import NamedTuple

import apsw

from portalmq.broker.storage.batch import Batch, BatchKind, opened
from portalmq.broker.storage.errors import CorruptBatch, OffsetPurged, Shortage, faults_of
from portalmq.broker.storage.files import sha256_of
from portalmq.broker.storage.lanes import Lanes
from portalmq.broker.storage.manifest import Manifest, SealedSegment
from portalmq.broker.storage.segment import Segment
from portalmq.compression import BadValues, content_size

SEALED_READERS_MAX = 4
SCAN_BATCHES = 512
# Offsets of one scan for a group's records, for which other reads wait.
SCAN_OFFSETS = 1_024
# How many offsets a scrub reads at once: other reads wait, and small batches take longer than their bytes.
SCRUB_OFFSETS = 1_250


class _Tail(NamedTuple):
    """The end of the log, replaced as a whole so that no reader sees half of an append."""

    end_offset: int
    messages: int
    last_timestamp_ms: int


class ReplicaStart(NamedTuple):
    """The start of a replica that begins from nothing: the border of a batch, with the totals of the batches below."""

    offset: int
    messages_before: int
    timestamp_before_ms: int


class ReadableLog(ABC):
    """The queries on a log. Times are Unix ms."""

    def __init__(self, segments: Sequence[Segment], manifest: Manifest) -> None:
        self._begin_with(segments, manifest)
        self._open_sealed: OrderedDict[int, Segment] = OrderedDict()
        self.lanes = Lanes(self)

    def _begin_with(self, segments: Sequence[Segment], manifest: Manifest) -> None:
        self._segments = tuple(segments)
        self._manifest = manifest
        self._log_start_offset = max(self._active.log_start_offset, self.base_offset)
        # The sealed segment whose batches are being checked, from its first one on.
        self._scrubbing: SealedSegment | None = None
        self._tail = self._tail_of_active()

    @abstractmethod
    def _read(self) -> AbstractContextManager[None]:
        """Hold the read lock, with the files open."""

    # --- known without reading -----------------------------------------------------------------------------------

    @property
    def log_start_offset(self) -> int:
        """Messages below are deleted, although their file may still exist."""
        return self._log_start_offset

    @property
    def end_offset(self) -> int:
        """The next offset to be written; everything below is durable."""
        return self._tail.end_offset

    @property
    def message_count_total(self) -> int:
        """The number of messages ever appended to this partition, including removed and purged ones."""
        return self._tail.messages

    @property
    def last_timestamp_ms(self) -> int:
        """The time of the last batch, 0 in a new log. The next one may not be earlier."""
        return self._tail.last_timestamp_ms

    @property
    def size_bytes(self) -> int:
        """The size of the databases, without the write-ahead log."""
        return sum(segment.bytes for segment in self._segments)

    def bytes_from(self, offset: int) -> int:
        """Return the approximate size of what is at `offset` and above."""
        size = 0
        for segment in self._segments:
            if segment.end_offset > max(offset, segment.base_offset):
                share = segment.end_offset - max(offset, segment.base_offset)
                size += segment.bytes * share // (segment.end_offset - segment.base_offset)
        return size

    @property
    def base_offset(self) -> int:
        """The start of the oldest file: at or below the log start."""
        return self._segments[0].base_offset

    @property
    def active_base_offset(self) -> int:
        """The start of the active file."""
        return self._active.base_offset

    @property
    def _active(self) -> Segment:
        return self._segments[-1]

    def _tail_of_active(self) -> _Tail:
        active = self._active
        return _Tail(active.end_offset, active.messages_end, active.last_timestamp_ms)

    # --- sealed segments ----------------------------------------------------------------------------------------

    @property
    def sealed_segments(self) -> list[SealedSegment]:
        """The manifest, oldest first."""
        return self._manifest.entries

    @property
    def oldest_timestamp_ms(self) -> int:
        """The stamp of the last batch in the oldest segment, or before it where that is empty; 0 without any."""
        return self._segments[0].last_timestamp_ms

    @property
    def sealed_upto(self) -> int:
        """The offset below which all segments are sealed."""
        upto = self.base_offset
        for segment in self._segments:
            if segment.base_offset not in self._manifest:
                break
            upto = segment.end_offset
        return upto

    def sealed_below(self, upto: int) -> list[SealedSegment] | None:
        """Return the manifest entries of the segments that begin below `upto`, oldest first; None while one is not
        sealed."""
        bases = [segment.base_offset for segment in self._segments if segment.base_offset < upto]
        entries = [entry for base in bases if (entry := self._manifest.get(base)) is not None]
        return entries if len(entries) == len(bases) else None

    def is_compacted(self, upto: int, tombstones_before_ms: int) -> bool:
        """Return whether everything below `upto` is compacted up to there."""
        sealed = self.sealed_below(upto)
        return sealed is not None and all(entry.is_compacted(upto, tombstones_before_ms) for entry in sealed)

    def has_sealed(self, entry: SealedSegment) -> bool:
        """Return whether that very file is still part of the log."""
        return self._manifest.has(entry) and entry.base_offset >= self.base_offset

    def retention_candidate(self, now_ms: int, retention_ms: int | None, retention_bytes: int | None) -> int:
        """Return the offset below which whole sealed segments are too old, or exceed the size. None means no such
        limit. A segment is as old as the newest append or delivery time in it."""
        size = self.size_bytes
        offset = self._segments[0].base_offset
        for segment in self._segments[:-1]:
            entry = self._manifest.get(segment.base_offset)
            if entry is None or entry.newest_ms > max(now_ms, entry.last_timestamp_ms):
                break  # not sealed, or something in it is not yet due
            old = retention_ms is not None and entry.newest_ms < now_ms - retention_ms
            if not old and (retention_bytes is None or size <= retention_bytes):
                break
            size -= entry.bytes
            offset = entry.end_offset
        return offset

    # --- reading ------------------------------------------------------------------------------------------------

    def _position(self, offset: int) -> int:
        """Return the index of the segment that holds `offset`, or would: the last one whose base is not above it."""
        return max(0, bisect_right(self._segments, offset, key=lambda segment: segment.base_offset) - 1)

    def _used(self, segment: Segment) -> Segment:
        """Return `segment`, and close the least recently read sealed one if too many are open."""
        if segment.settled:
            self._open_sealed[segment.base_offset] = segment
            self._open_sealed.move_to_end(segment.base_offset)
            if len(self._open_sealed) > SEALED_READERS_MAX:
                _, coldest = self._open_sealed.popitem(last=False)
                coldest.close_reader()
        return segment

    def _still(self, segment: Segment) -> Segment:
        """Do the same for a segment that was chosen before. Raise OffsetPurged if it was removed since."""
        if segment not in self._segments:
            raise OffsetPurged(segment.base_offset, self.base_offset)
        return self._used(segment)

    def _close_reader(self, segment: Segment) -> None:
        self._open_sealed.pop(segment.base_offset, None)
        segment.close_reader()

    def read(
        self, offset: int, *, max_messages: int | None = None, max_bytes: int | None = None, below: int | None = None
    ) -> list[Batch]:
        """Return whole, verified batches from the one that contains `offset` on, control records included, with their
        values.

        Stops after the batch that reaches a limit (bytes of keys, values and bodies), so at least one is returned if
        there is any; and before the first batch that starts at or above `below`. Raise OffsetPurged or CorruptBatch.
        """
        found = self._read_batches(offset, max_messages, max_bytes, below, is_copy=False)
        return [self._opened(batch) if batch.compressed else batch for batch in found]

    def read_to_copy(self, offset: int, *, max_bytes: int, below: int) -> list[Batch]:
        """Do the same as `read` for a replica: from `replica_start` on, which may be below the log start, and with
        compressed values as they are."""
        return self._read_batches(offset, None, max_bytes, below, is_copy=True)

    def _opened(self, batch: Batch) -> Batch:
        try:
            return opened(batch)
        except BadValues as error:
            path = self._segments[self._position(batch.base_offset)].path
            raise CorruptBatch(path, batch.base_offset, str(error)) from error

    def _read_batches(
        self, offset: int, max_messages: int | None, max_bytes: int | None, below: int | None, *, is_copy: bool
    ) -> list[Batch]:
        found: list[Batch] = []
        messages = size = 0
        with self._read():
            below = self.end_offset if below is None else min(below, self.end_offset)  # it may just have been truncated
            start = self.base_offset if is_copy else self._log_start_offset
            if offset < start:
                raise OffsetPurged(offset, start)
            if offset >= below:
                return []
            for segment in self._segments[self._position(offset) :]:
                if segment.base_offset >= below:
                    break
                with closing(self._used(segment).batches(offset, below)) as batches:
                    for batch in batches:
                        found.append(batch)
                        # A batch without messages left has a cost too.
                        messages += max(batch.message_count - batch.holes, batch.holes > 0)
                        size += _payload_bytes(batch, is_copy=is_copy)
                        if max_messages is not None and messages >= max_messages:
                            return found
                        if max_bytes is not None and size >= max_bytes:
                            return found
        return found

    def next_message(self, start: int, end: int) -> int | None:
        """Return the offset of the first message in [start, end); None without any. What is passed over is checked: a
        message whose row is lost would be delivered to nobody. Raises CorruptBatch."""
        found: int | None = None
        with self._read():
            start, end = max(start, self._log_start_offset), min(end, self.end_offset)
            for segment in self._segments[self._position(start) :]:
                if found is not None or segment.base_offset >= end or start >= end:
                    break
                found = self._used(segment).next_message(start, end)
            upto = end if found is None else found
            if start < upto and self._messages_before(start) != self._messages_before(upto):
                path = self._segments[self._position(start)].path
                raise CorruptBatch(path, start, f"messages below {upto} are missing")
        return found

    def replica_start(self, offset: int | None = None) -> ReplicaStart:
        """Return the start of the batch that holds `offset` (the log start, if None): a batch is copied as a whole. It
        is at `offset` if no batch holds that."""
        with self._read():
            offset = self._log_start_offset if offset is None else offset
            return ReplicaStart(*self._used(self._segments[self._position(offset)]).batch_start(offset))

    @property
    def removed(self) -> int:
        """How many messages compaction has removed from the files."""
        return sum([segment.removed for segment in self._segments])

    def messages_before(self, offset: int) -> int:
        """Return how many messages this partition holds, or held, below `offset` (any offset), without those that
        compaction removed. The difference between two offsets is exact, for lag."""
        end_offset, messages, _ = self._tail
        if offset >= end_offset:
            return messages - self.removed
        with self._read():
            return self._messages_before(min(offset, self.end_offset))

    def _messages_before(self, offset: int) -> int:
        """Do the same with the read lock held, and not above the end."""
        position = self._position(offset)
        segment = self._used(self._segments[position])
        removed = sum([each.removed for each in self._segments[:position]]) + segment.removed_below(offset)
        return segment.messages_below(offset) - removed

    def find_message_id(self, message_id: bytes, since_ms: int) -> tuple[int, bytes | None, int] | None:
        """Return (offset, body hash, append time) of the newest message with this id appended at or after
        `since_ms`."""
        with self._read():
            for segment in reversed(self._segments):
                if segment.last_timestamp_ms < since_ms:
                    return None
                found = self._used(segment).message_of_id(message_id, since_ms)
                if found is not None:
                    return found
        return None

    def find_message_ids(
        self, message_ids: Sequence[bytes], since_ms: int, below: int | None = None
    ) -> tuple[dict[bytes, tuple[int, bytes | None, int]], int | None]:
        """Do the same as find_message_id for many ids, in the newest segment that begins below `below`.

        Return its messages, and the next `below`; None if no older segment can have any. One segment at a time, as
        other reads wait.
        """
        with self._read():
            for segment in reversed(self._segments):
                if below is not None and segment.base_offset >= below:
                    continue
                if segment.last_timestamp_ms < since_ms:
                    break
                return self._used(segment).messages_of_ids(message_ids, since_ms), segment.base_offset
        return {}, None

    def offset_for_time(self, timestamp_ms: int) -> int:
        """Return the first offset of the first batch appended at or after `timestamp_ms`; the end if there is none."""
        with self._read():
            for segment in self._segments:
                if segment.end_offset > segment.base_offset and segment.last_timestamp_ms >= timestamp_ms:
                    return max(self._log_start_offset, self._used(segment).offset_for_time(timestamp_ms))
        return self.end_offset

    def control_records(self, from_offset: int = 0) -> Iterator[Batch]:
        """Yield the verified control records from `from_offset` on; below the log start too, while their file
        exists."""
        return self._scan(from_offset, lambda segment, offset: segment.control_batches(offset, SCAN_BATCHES))

    def group_records(self, group: str, start: int, end: int) -> Iterator[Batch]:
        """Yield the verified control records in [start, end) of one group, and those that belong to no group."""
        while start < end:
            upto = min(end, start + SCAN_OFFSETS)
            yield from self._scan_part(group, start, upto)
            start = upto

    def _scan_part(self, group: str, start: int, end: int) -> list[Batch]:
        found: list[Batch] = []
        with self._read():
            for segment in self._segments[self._position(start) :]:
                if segment.base_offset >= end:
                    break
                found += self._used(segment).group_batches(group, start, end)
        return found

    def has_blank(self, start: int, end: int) -> bool:
        """Return whether compaction has emptied a control record in [start, end)."""
        with self._read():
            for segment in self._segments[self._position(start) :]:
                if segment.base_offset < end and self._used(segment).has_blank(start, end):
                    return True
        return False

    def producer_batches(self, from_offset: int = 0) -> Iterator[Batch]:
        """Yield the headers of idempotent producers' batches from `from_offset` on, without records, so not
        verified."""
        return self._scan(from_offset, lambda segment, offset: segment.producer_headers(offset, SCAN_BATCHES))

    def _scan(self, offset: int, fetch: Callable[[Segment, int], list[Batch]]) -> Iterator[Batch]:
        end_offset = self.end_offset
        while offset < end_offset:
            with self._read():
                if offset >= self.end_offset:  # truncated meanwhile
                    return
                position = self._position(offset)
                segment = self._segments[position]
                batches = fetch(self._used(segment), offset)
                end_of_segment = segment.end_offset
            yield from batches
            offset = batches[-1].end_offset if len(batches) == SCAN_BATCHES else max(end_of_segment, offset + 1)

    def newest_state(self, below: int | None = None) -> Batch | None:
        """Return the newest STATE record (below `below`), verified."""
        return self.newest_control(BatchKind.STATE, below)

    def newest_control(self, kind: BatchKind, below: int | None = None) -> Batch | None:
        """Return the newest control record of that kind (below `below`), verified."""
        with self._read():
            below = self.end_offset if below is None else min(below, self.end_offset)
            for segment in reversed(self._segments):
                if segment.base_offset < below:
                    found = self._used(segment).newest_control(kind, below)
                    if found is not None:
                        return found
        return None

    # --- scrubbing ----------------------------------------------------------------------------------------------

    def scrub(self, offset: int, max_bytes: int) -> int:
        """Check a part of the log from `offset` on: some batches, or a sealed segment as a whole if its batches were
        checked before. Return where to continue; the base offset again after the end. Raise CorruptBatch, or
        OffsetPurged if the part is removed meanwhile. Slow: not on the event loop."""
        offset = max(offset, self.base_offset)
        segment = self._segments[self._position(offset)]
        entry = self._manifest.get(segment.base_offset)
        if entry is not None and offset == segment.base_offset:
            self._check_file(segment, entry)
            if entry.checked:
                return entry.end_offset
            self._scrubbing = entry
        below = self.end_offset if entry is None else entry.end_offset
        batches = self._scrub_batches(segment, offset, max_bytes, below)
        if not batches:
            return self.base_offset
        following = batches[-1].end_offset
        if entry is not None and following == entry.end_offset and self._scrubbing is entry:
            with suppress(Shortage):  # then the next round does it
                self.mark_checked(entry)
        return following

    def check_file(self, offset: int) -> int:
        """Check the file that holds `offset` as a whole: a sealed one by its SHA-256, another by its pages and indexes.
        Return where the next one begins. Raise CorruptBatch, or OffsetPurged if it is removed meanwhile. Slow: not on
        the event loop."""
        segment = self._segments[self._position(max(offset, self.base_offset))]
        entry = self._manifest.get(segment.base_offset)
        if entry is not None:
            self._check_file(segment, entry)
            return entry.end_offset
        self._check_structure(segment)
        return segment.end_offset

    def _check_structure(self, segment: Segment) -> None:
        with self._read():
            _ = self._still(segment).reader  # recovers a file that was not closed
        with faults_of(segment.path), suppress(apsw.CantOpenError):  # closed or removed at this moment
            segment.check_structure()

    def _check_file(self, segment: Segment, entry: SealedSegment) -> None:
        with faults_of(segment.path):
            try:
                found = sha256_of(segment.path, from_disk=True)
            except FileNotFoundError:
                found = ""
        if found != entry.sha256 and self.has_sealed(entry):
            raise CorruptBatch(segment.path, segment.base_offset, f"its SHA-256 is {found}, not {entry.sha256}")

    def _scrub_batches(self, segment: Segment, offset: int, max_bytes: int, below: int) -> list[Batch]:
        """Read verified batches from `offset` on, of this segment alone, and check the columns beside them."""
        below = min(below, segment.end_offset)
        with self._read():
            self._still(segment).forget_pages()
        if offset == segment.base_offset:
            self._check_structure(segment)
        batches = self.read_to_copy(offset, max_bytes=max_bytes, below=min(below, offset + SCRUB_OFFSETS))
        if batches:
            with self._read():
                if segment in self._segments:
                    self._used(segment).check_columns(batches[0].base_offset, batches[-1].end_offset)
        return batches

    @abstractmethod
    def mark_checked(self, entry: SealedSegment) -> None:
        """Note that all batches of a sealed segment matched their checksums."""


def _payload_bytes(batch: Batch, *, is_copy: bool) -> int:
    values = len(batch.compressed) if is_copy or not batch.compressed else content_size(batch.compressed)
    return len(batch.body) + values + sum([len(record.value) + len(record.key or b"") for record in batch.records])
