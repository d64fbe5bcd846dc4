"""The log of one partition: a directory of segment files, dense in offsets, one of them active.

    0000...0000.sqlite  sealed   final: 0444, in the manifest, read with immutable=1
    0000...4711.sqlite  rolled   complete, not yet sealed
    0000...9000.sqlite  active   the only one that is appended to

Every change goes through states that `open` understands, so a kill at any moment leaves a valid log. A new segment is
renamed into place when it is complete. Segments are removed from the end that keeps the rest contiguous (the newest
first when truncating, the oldest first when dropping). The manifest is written last when sealing and first when undoing
it. Unexplained leftovers (of creating a segment, a -wal without its database) are deleted at the next open. A change
that a full disk interrupts leaves such a state too: the log reads its files again and continues.

While compaction replaces a segment's file, the segment does not count as sealed, so the manifest never describes a file
other than the one that is there.

A reset is a truncation to the border of a segment, then a segment that begins at its own log start: segments before it,
across a hole, were being dropped. In between there may be no segment at all, which is a new and empty log.

Threads: changes exclude each other, and reads exclude each other, by native locks; an append and a read run side by
side, on the two connections of the segment. The event loop reads. So a change takes the read lock only where readers
must not see half of it, and removes, cuts and syncs files without it. No method switches greenlets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
from msgspec.structs import replace

from portalmq.broker.storage.batch import Batch, BatchKind
from portalmq.broker.storage.errors import CorruptFile, LogClosed, Shortage, StorageError, StorageFault, faults_of
from portalmq.broker.storage.fair_lock import FairLock
from portalmq.broker.storage.files import make_directory, sync_directory
from portalmq.broker.storage.manifest import Manifest, SealedSegment, entry_of
from portalmq.broker.storage.open_files import OpenFiles, use_counter
from portalmq.broker.storage.reading import ReadableLog
from portalmq.broker.storage.recovery import open_log_files
from portalmq.broker.storage.schema import PAGE_BYTES, LogIdentity
from portalmq.broker.storage.segment import COMPACTING, Segment, SegmentFacts

SEGMENT_BYTES = 256 * 1024 * 1024
# A segment with this many content types is followed by a new one without any: their names are kept in memory.
CONTENT_TYPES_MAX = 10_000
# From the first size on, or after so many commits, a checkpoint is due when no append waits; at the second size, append
# performs it itself. After a checkpoint, commits overwrite the write-ahead log from its beginning (DESIGN.md).
COMMITS_DUE = 256
WAL_BYTES_DUE = 16 * 1024 * 1024
WAL_BYTES_MAX = 64 * 1024 * 1024


class Log(ReadableLog):
    """The log of one partition: append, read, shorten. Open it with `Log.open`; times are arguments, Unix ms.
    Invariants: log_start_offset <= end_offset; everything below end_offset is durable."""

    def __init__(
        self,
        directory: Path,
        identity: LogIdentity,
        segments: Sequence[Segment],
        manifest: Manifest,
        segment_bytes: int,
        open_files: OpenFiles,
    ) -> None:
        super().__init__(segments, manifest)
        self.last_used = 0
        # The seconds that the COMMIT of the last append took: the disk's part.
        self.commit_s = 0.0
        self._open_files = open_files
        self.directory = directory
        self.identity = identity
        self.segment_bytes = segment_bytes
        self._fault: StorageFault | None = None
        # Parked: files are opened at the next use, only the active one, or all of them after an interrupted change.
        # Unchanged: parked, but the active file is open for reading alone, until the first change.
        self._parked = self._unchanged = not self._active.is_live
        self._interrupted = False
        self._closed = False
        # What is to be compared with the file at its first use, and whom to tell if it differs.
        self._resumed: tuple[SegmentFacts, Callable[[], None]] | None = None
        # Acquired in this order.
        self._sealing, self._writing, self._reading = FairLock(), FairLock(), FairLock()

    # --- opening ------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: Path,
        *,
        identity: LogIdentity,
        segment_bytes: int = SEGMENT_BYTES,
        open_files: OpenFiles | None = None,
    ) -> Log:
        """Open the log in `directory`: create it if missing, recover it after a kill. Everything found is fsynced
        before it is claimed. Raise WrongLog, StorageFault or Shortage."""
        with faults_of(directory):
            make_directory(directory)
            segments, manifest = open_log_files(directory, identity)
        log = cls(directory, identity, segments, manifest, segment_bytes, open_files or OpenFiles())
        log._open_files.opening(log)
        return log

    @classmethod
    def resume(
        cls,
        directory: Path,
        facts: SegmentFacts,
        *,
        identity: LogIdentity,
        segment_bytes: int,
        open_files: OpenFiles,
        on_contradiction: Callable[[], None],
    ) -> Log:
        """Return a log of one segment with all files closed, which is known by these facts. Its first use opens the
        file, and raises StorageFault, after a call of `on_contradiction`, if that tells anything else."""
        segment = Segment.of(directory, identity, facts)
        log = cls(
            directory, identity, [segment], Manifest(directory, identity, exists=False), segment_bytes, open_files
        )
        log._unchanged = False
        log._resumed = facts, on_contradiction
        return log

    @property
    def facts(self) -> SegmentFacts | None:
        """What `resume` needs; None for a log that has more than one segment, or open files."""
        alone = len(self._segments) == 1 and not self._manifest.entries and not self._interrupted
        return self._active.facts if alone and self._fault is None and not self.is_open else None

    @property
    def checkpoint_due(self) -> bool:
        """True if `checkpoint` should be called once no append waits."""
        active = self._active
        return active.commits >= COMMITS_DUE or active.wal_pages * PAGE_BYTES >= WAL_BYTES_DUE

    # --- changes ------------------------------------------------------------------------------------------------

    @contextmanager
    def _change(self, *, in_steps: bool = False) -> Iterator[None]:
        """Hold the lock for a change of the log. After a fault no change is allowed: the next fsync could lie about the
        last.

        `in_steps`: a shortage may interrupt the change between two steps. The files are a valid log then, as after a
        kill, and are read again before the next use.
        """
        self.last_used = next(use_counter)
        with self._writing, self._locked_change(in_steps=in_steps):
            yield

    @contextmanager
    def _locked_change(self, *, in_steps: bool = False) -> Iterator[None]:
        self._check_usable()
        if self._parked:
            self._unpark()
        try:
            with faults_of(self.directory):
                yield
        except StorageFault as fault:
            self._fault = fault
            raise
        except Shortage:
            self._parked = self._interrupted = in_steps
            raise

    def _check_usable(self) -> None:
        if self._closed:
            raise LogClosed
        if self._fault is not None:
            kind = CorruptFile if isinstance(self._fault, CorruptFile) else StorageFault
            raise kind(f"{self.directory} had a fault before: {self._fault}; restart the broker")

    def append(self, batches: Sequence[Batch]) -> None:
        """Append all of `batches` or none, in one transaction; durable on return.

        They continue at end_offset without a hole, with messages_before, times and checksums filled in; else
        ValueError. Shortage: not applied. StorageFault: unknown.
        """
        if batches:
            with self._change():
                self._append(batches)

    def append_at_once(self, batches: Sequence[Batch]) -> bool:
        """Append if nothing but the commit itself can take long. Return False, with nothing done, if more is due:
        another change of the log or by another process, opening files, a new segment, a checkpoint."""
        self.last_used = next(use_counter)
        if not self._writing.try_acquire():
            return False
        try:
            if self._parked or self._roll_due or self.checkpoint_due:
                return False
            self._check_usable()
            with faults_of(self.directory):
                return self._append(batches, waits=False)
        except StorageFault as fault:
            self._fault = self._fault or fault
            raise
        finally:
            self._writing.__exit__()

    @property
    def _roll_due(self) -> bool:
        return self._active.bytes >= self.segment_bytes or self._active.content_types >= CONTENT_TYPES_MAX

    def _append(self, batches: Sequence[Batch], *, waits: bool = True) -> bool:
        self._check_continues(batches)
        if waits and self._roll_due:
            self._roll()
        active = self._active
        if not active.append(batches, waits=waits):
            return False
        self.commit_s = active.commit_s
        self._tail = self._tail_of_active()
        if active.wal_pages * PAGE_BYTES >= WAL_BYTES_MAX:
            with suppress(Shortage), faults_of(self.directory):  # the batches are committed, even if this fails
                active.checkpoint()
        return True

    def _check_continues(self, batches: Sequence[Batch]) -> None:
        end_offset, messages, timestamp_ms = self._tail
        for batch in batches:
            if batch.base_offset != end_offset or batch.messages_before != messages:
                raise ValueError(
                    f"the log continues at offset {end_offset} after {messages} messages, the batch is at"
                    f" {batch.base_offset} after {batch.messages_before}"
                )
            if batch.count != (len(batch.records) if batch.kind == BatchKind.MESSAGES else 1) or batch.count < 1:
                raise ValueError(f"the batch at {batch.base_offset} does not have {batch.count} records")
            if batch.appended_at_ms < timestamp_ms:
                raise ValueError(
                    f"the batch at {batch.base_offset} has the time {batch.appended_at_ms} ms, before {timestamp_ms} ms"
                )
            end_offset += batch.count
            messages += batch.message_count
            timestamp_ms = batch.appended_at_ms

    def checkpoint(self) -> None:
        """Move the write-ahead log into the database, as far as readers allow."""
        with self._change():
            self._active.checkpoint()

    def roll(self) -> None:
        """Start a new segment, unless the active one is empty."""
        with self._change():
            self._roll()

    def _roll(self) -> None:
        active = self._active
        if active.end_offset == active.base_offset:
            return
        fresh = Segment.create(
            self.directory,
            self.identity,
            active.end_offset,
            active.messages_end,
            active.last_timestamp_ms,
            self._log_start_offset,
        )
        self._segments = (*self._segments, fresh)

    def seal(self, below: int) -> int:
        """Seal the rolled segments that end at or below `below`, oldest first; return how many were sealed.

        A segment that another process is reading waits for the next call. Hashing takes about a second for each GiB,
        without blocking appends and reads.
        """
        count = 0
        with self._sealing:
            for segment in self._segments[:-1]:
                if segment.end_offset > below:
                    break
                if segment.base_offset in self._manifest:
                    continue
                if not segment.settled and not self._settle(segment):
                    break
                with faults_of(segment.path):
                    entry = entry_of(segment)
                with self._change(in_steps=True):
                    if segment in self._segments and segment.base_offset not in self._manifest:
                        self._manifest.put([entry])
                        count += 1
        return count

    def _settle(self, segment: Segment) -> bool:
        with self._change(in_steps=True):
            if segment not in self._segments:
                return False
            with self._reading:
                _ = segment.writer
            segment.checkpoint()  # most of the work, beside reads
            with self._reading:
                return segment.settle()

    def truncate(self, to_offset: int) -> None:
        """Remove everything from `to_offset` on, durably. Raise ValueError if it is not a border between batches."""
        if not self._log_start_offset <= to_offset <= self.end_offset:
            raise ValueError(f"cannot truncate [{self._log_start_offset}, {self.end_offset}) to {to_offset}")
        if to_offset == self.end_offset:
            return
        with self._sealing, self._change(in_steps=True):
            with self._reading:
                position = self._position(to_offset)
                last, later = self._segments[position], self._segments[position + 1 :]
                if not last.is_batch_boundary(to_offset):
                    raise ValueError(f"offset {to_offset} is inside a batch; batches are not split")
            self._manifest.remove(segment.base_offset for segment in (last, *later))
            self._uncompact(to_offset)
            with self._reading:
                if last.settled:
                    self._close_reader(last)
                    last.open_live()
                _ = last.writer
            last.set_log_start(self._log_start_offset)
            self._remove_last(len(later))
            with last.cut(to_offset) as commit, self._reading:
                commit()
                self._tail = self._tail_of_active()

    def reset(self, base_offset: int, messages_before: int, timestamp_before_ms: int) -> None:
        """Remove everything, durably. The log is empty then and begins at `base_offset`, below which the partition has
        had `messages_before` messages, the last batch of them at `timestamp_before_ms`."""
        begin = (self.directory, self.identity, base_offset, messages_before, timestamp_before_ms)
        with self._sealing, self._change(in_steps=True):
            later = [segment for segment in self._segments if segment.base_offset >= base_offset]
            earlier = self._segments[: len(self._segments) - len(later)]
            self._manifest.remove(segment.base_offset for segment in (*earlier[-1:], *later))
            self._remove_last(len(later) if earlier else len(later) - 1)
            fresh = Segment.create(*begin) if earlier else None
            with self._reading:
                for segment in self._segments:
                    self._close_reader(segment)
                if fresh is None:  # it is the only one, and may have the same name
                    later[0].remove()
                    sync_directory(self.directory)
                    fresh = Segment.create(*begin)
                self._segments = (fresh,)
                self._log_start_offset = base_offset
                self._tail = self._tail_of_active()
            for segment in earlier:
                segment.remove()
            sync_directory(self.directory)
            self._manifest.remove([entry.base_offset for entry in self._manifest.entries])

    def _remove_last(self, count: int) -> None:
        """Remove that many segments, the newest first: the rest is a valid log at every moment, and reads continue."""
        kept, gone = self._segments[: len(self._segments) - count], self._segments[len(self._segments) - count :]
        with self._reading:
            self._segments = kept
            self._tail = self._tail_of_active()
            for segment in gone:
                self._close_reader(segment)
        for segment in reversed(gone):
            segment.remove()
            sync_directory(self.directory)

    # --- compaction (see compaction.py) -----------------------------------------------------------------------------

    def roll_below(self, upto: int) -> None:
        """Start a new segment if the active one begins below `upto`, so that it can be sealed."""
        with self._change():
            if self._active.base_offset < upto:
                self._roll()

    def draft_path(self, entry: SealedSegment) -> Path:
        """Return the path of a segment's replacement while it is written."""
        return self.directory / f"{entry.file}{COMPACTING}"

    def replace_sealed(self, old: SealedSegment, new: SealedSegment) -> bool:
        """Replace the file of `old` by its draft, which `new` describes. Return False if that segment is gone or no
        longer sealed."""
        with self._sealing, self._change(in_steps=True):  # nothing must hash the old file for the new entry
            segment = self._segments[self._position(old.base_offset)]
            if not self._manifest.has(old) or segment.base_offset != old.base_offset:
                return False
            self._manifest.remove([old.base_offset])
            with self._reading:
                self._close_reader(segment)
                segment.replace(self.draft_path(old), new.removed, new.bytes)
            sync_directory(self.directory)
            self._manifest.put([new])
            return True

    def mark_compacted(
        self, entries: Sequence[SealedSegment], upto: int, tombstones_before_ms: int, at_ms: int
    ) -> None:
        """Record that a compaction up to `upto` had nothing to remove in these segments."""
        with self._change(in_steps=True):
            self._manifest.put(
                [
                    replace(
                        entry, compacted_upto=upto, tombstones_before_ms=tombstones_before_ms, compacted_at_ms=at_ms
                    )
                    for entry in entries
                    if self._manifest.has(entry)
                ]
            )

    def mark_checked(self, entry: SealedSegment) -> None:
        with self._change():
            if self._manifest.has(entry):
                self._manifest.put([replace(entry, checked=True)])

    def repair_manifest(self) -> bool:
        """Write the manifest again if its file is damaged; return whether it was."""
        with self._change():
            return self._manifest.repair()

    def _uncompact(self, to_offset: int) -> None:
        """Lower the compaction marks beyond `to_offset`, before the log is truncated there: new records there are not
        compacted."""
        beyond = [entry for entry in self._manifest.entries if entry.compacted_upto > to_offset]
        self._manifest.put([replace(entry, compacted_upto=to_offset) for entry in beyond])

    # --- the log start ----------------------------------------------------------------------------------------------

    def advance_log_start(self, offset: int) -> None:
        """Delete messages below `offset`, durably. The log start never falls; the files stay until they are dropped."""
        if offset > self.end_offset:
            raise ValueError(f"the log start cannot pass the log's end {self.end_offset}: {offset}")
        with self._change():
            self._advance_log_start(offset)

    def _advance_log_start(self, offset: int) -> None:
        if offset > self._log_start_offset:
            self._active.set_log_start(offset)
            self._log_start_offset = offset

    def drop_segments_below(self, offset: int) -> int:
        """Unlink the leading sealed segments that end at or below `offset`; return how many. The log start moves
        along."""
        with self._change(in_steps=True):
            victims = []
            for segment in self._segments[:-1]:
                if segment.end_offset > offset or segment.base_offset not in self._manifest:
                    break
                victims.append(segment)
            if not victims:
                return 0
            self._advance_log_start(victims[-1].end_offset)
            with self._reading:
                self._segments = self._segments[len(victims) :]
                for segment in victims:
                    self._close_reader(segment)
            for segment in victims:
                segment.remove()
            sync_directory(self.directory)
            self._manifest.remove(segment.base_offset for segment in victims)
            return len(victims)

    # --- closing ------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether it holds files open, for appends or for reading alone."""
        return self._is_readable and not self._closed

    def park(self) -> None:
        """Close every file until the log is used again."""
        with self._writing, self._reading:
            self._park()

    def _park(self) -> None:
        if not self._closed and self._fault is None:
            self._close_files()
            self._parked, self._unchanged = True, False
            self._open_files.closed(self)

    @property
    def descriptors(self) -> int:
        """The number of descriptors while it is open: the active segment's writer and reader, and the sealed ones'
        readers."""
        return 5 + len(self._open_sealed)

    def _used(self, segment: Segment) -> Segment:
        before = len(self._open_sealed)
        super()._used(segment)
        if len(self._open_sealed) > before:  # its reader is about to open
            self._open_files.opening(self)
        return segment

    def try_park(self) -> bool:
        """Park unless the log is in use; return whether it is parked. A fault shows at the next use."""
        if not self._writing.try_acquire():
            return False
        try:
            if not self._reading.try_acquire():
                return False
            try:
                self._park()
            finally:
                self._reading.__exit__()
        except StorageError:
            return False
        finally:
            self._writing.__exit__()
        return self._parked

    def _unpark(self) -> None:
        self._open_files.opening(self)
        try:
            with faults_of(self.directory), self._reading:
                self._unchanged = False
                if self._interrupted:
                    self._reopen()
                if not self._active.is_live:
                    self._open_active()
                self._parked = self._interrupted = False
        except StorageFault as fault:
            self._fault = fault
            raise

    def _open_active(self) -> None:
        try:
            self._active.open_live()
            if self._resumed is not None and not self._active.is_as(self._resumed[0]):
                raise StorageFault(f"{self._active.path} is not as it was when it was closed")
        except (StorageError, apsw.Error):
            if self._resumed is not None:
                self._resumed[1]()
            raise
        self._resumed = None

    def _reopen(self) -> None:
        for segment in self._segments:
            segment.close()
        self._open_sealed.clear()
        self._begin_with(*open_log_files(self.directory, self.identity))

    def close(self, *, is_damaged: bool = False) -> None:
        """Close the log for good. After a fault or damage nothing is flushed: the next open reads what is there."""
        with self._sealing, self._writing, self._reading:
            if not self._closed:
                self._closed = True
                if is_damaged or isinstance(self._fault, CorruptFile):  # the broker goes on, after any other it ends
                    for segment in self._segments:
                        with suppress(apsw.Error):  # it finds no more than is known
                            segment.abandon()
                elif self._fault is None:
                    self._close_files()
                self._open_files.closed(self)

    def _close_files(self) -> None:
        self._open_sealed.clear()
        try:
            with faults_of(self.directory):
                for segment in self._segments:
                    segment.close()
        except StorageFault as fault:
            self._fault = fault
            raise

    @property
    def _is_readable(self) -> bool:
        return self._unchanged or not self._parked

    @contextmanager
    def _read(self) -> Iterator[None]:
        """Hold the read lock, with the files open."""
        self.last_used = next(use_counter)
        while True:
            if self._closed:
                raise LogClosed
            if not self._is_readable:
                with self._writing:
                    if not self._is_readable:
                        self._unpark()
            with self._reading:
                if self._is_readable and not self._closed:
                    with faults_of(self.directory):
                        yield
                    return
