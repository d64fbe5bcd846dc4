"""One file of the log: creating it, its two connections, and the SQL on it.

A segment is live (WAL; one connection writes and checkpoints, another, mode=ro, reads) or settled (no WAL, mode 0444,
read with immutable=1, which takes no locks). It is created complete: built in memory, written under another name,
renamed. A Segment handles one file and knows no other; the Log decides what happens to which.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter

import apsw
import msgspec

from portalmq.broker.storage.batch import Batch, BatchKind, Record
from portalmq.broker.storage.compressed_values import accept_compressed, insert_compressed
from portalmq.broker.storage.errors import CorruptFile, StorageFault, WrongLog, integers, opening_errors
from portalmq.broker.storage.files import open_directory, unlink_database
from portalmq.broker.storage.holes import HOLES_DDL, insert_holes, removed_in
from portalmq.broker.storage.lane_indexes import LANES_DDL, lanes_of
from portalmq.broker.storage.rows import (
    ContentTypes,
    content_types_of,
    insert_batches,
    insert_messages,
    insert_single,
    is_single,
    preset_content_types,
)
from portalmq.broker.storage.schema import (
    COMPRESSED_VERSION,
    PAGE_BYTES,
    SCHEMA_VERSION,
    SEGMENT_DDL,
    LogIdentity,
    is_damage,
)
from portalmq.broker.storage.schema_check import damaged_entries, is_of_a_segment
from portalmq.broker.storage.segment_reading import ReadableSegment
from portalmq.broker.storage.wal import (
    BUSY_TIMEOUT_MS,
    connect_final,
    keep_log,
    make_durable,
    set_full_sync,
    sync_wal,
    uri_of,
    was_closed,
)
from portalmq.system import sync

SEGMENT_NAME = re.compile(r"\d{20}\.sqlite\Z")
CREATING = ".creating"
# A segment's replacement, and the keys that decide its content: see compaction.py.
COMPACTING = ".compacting"
KEYS_NAME = "keys.compacting"

CACHE_KIB = 4_096
# So many single messages or records are inserted one by one.
FEW_BATCHES = 4
REBUILD = "rebuild it from a clean replica"
WAL_WRITE_VERSION = 2


def _write_version(path: Path) -> int:
    """Return who may write the file, by its header: a SQLite that knows this version."""
    with path.open("rb") as file:
        return file.read(19)[18]


def _remove_again(creating: Path, path: Path, folder: int) -> None:
    """Remove a segment that the log will not use. If it stayed while the log continued in the old one, the log could
    not open again: so a failure is a fault."""
    try:
        creating.unlink(missing_ok=True)
        unlink_database(path)
        sync(folder)
    except OSError as error:
        raise StorageFault(f"{path} cannot be removed again: {error}") from error


class SegmentFacts(msgspec.Struct, frozen=True, array_like=True):
    """What a segment is known by without reading it, while it is closed and not sealed."""

    name: str
    end_offset: int
    messages_before: int
    messages_end: int
    last_timestamp_ms: int
    log_start_offset: int
    bytes: int
    removed: int
    schema_version: int
    lanes: int | None = None


class Segment(ReadableSegment):
    """One segment file, with the properties known without reading it. `bytes` is the size of the database, `removed`
    how many of its messages compaction has removed.

    Invariants: base_offset <= end_offset; messages_before <= messages_end.
    """

    def __init__(self, path: Path, identity: LogIdentity) -> None:
        super().__init__(path)
        self.identity = identity
        self.messages_end = 0
        self.last_timestamp_ms = 0
        self.log_start_offset = 0
        self.bytes = 0
        # Pages in the write-ahead log, and commits since the last checkpoint, if only of a part.
        self.wal_pages = self.commits = 0
        self.commit_s = 0.0
        self.settled = False
        self.schema_version: object = SCHEMA_VERSION
        # The lanes that occur in it (lanes.py), as bits: those found in the file, None before the first query, and
        # those appended since.
        self.lanes_found: int | None = None
        self.lanes_appended = 0
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._content_types: ContentTypes | None = None

    # --- opening and closing ------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        directory: Path,
        identity: LogIdentity,
        base_offset: int,
        messages_before: int,
        timestamp_before_ms: int,
        log_start_offset: int | None = None,
    ) -> Segment:
        """Create an empty segment, durable under its name on return. The log begins with it if `log_start_offset` is
        None. On an error there is none, unless the disk fails or the process ends before it is removed again: the next
        open finds an empty segment then."""
        meta = {
            **identity.as_meta(),
            "schema_version": SCHEMA_VERSION,
            "base_offset": base_offset,
            "messages_before": messages_before,
            "timestamp_before_ms": timestamp_before_ms,
            "log_start_offset": base_offset if log_start_offset is None else log_start_offset,
        }
        with contextlib.closing(apsw.Connection(":memory:")) as draft:
            draft.execute(f"PRAGMA page_size = {PAGE_BYTES}")
            draft.execute(SEGMENT_DDL)
            draft.execute(HOLES_DDL)
            draft.execute(LANES_DDL)
            preset_content_types(draft)
            draft.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            image = draft.serialize("main")
        path = directory / f"{base_offset:020d}.sqlite"
        creating = path.with_name(path.name + CREATING)
        with open_directory(directory) as folder:  # first: undoing the rest needs no other descriptor
            try:
                with open(creating, "wb", opener=lambda name, flags: os.open(name, flags, 0o640)) as file:
                    file.write(image)
                    file.flush()
                    sync(file.fileno())
                os.rename(creating, path)
                sync(folder)
                segment = cls(path, identity)
                segment.lanes_found = 0
                segment.open_live()
            except BaseException:
                _remove_again(creating, path, folder)
                raise
        return segment

    @property
    def lanes(self) -> int | None:
        """The lanes that occur in it; None before the first query of a file that was not created by this process."""
        return None if self.lanes_found is None else self.lanes_found | self.lanes_appended

    @lanes.setter
    def lanes(self, bits: int | None) -> None:
        self.lanes_found, self.lanes_appended = bits, 0

    @property
    def facts(self) -> SegmentFacts:
        return SegmentFacts(self.path.name, *[getattr(self, name) for name in SegmentFacts.__struct_fields__[1:]])

    def is_as(self, known: SegmentFacts) -> bool:
        """Return whether the file holds what was known; its lanes are not read for that. It may have grown: files of an
        earlier release get indexes when they are opened for writing."""
        return msgspec.structs.replace(self.facts, bytes=known.bytes, lanes=known.lanes) == known

    @classmethod
    def of(cls, directory: Path, identity: LogIdentity, facts: SegmentFacts) -> Segment:
        """Return a segment that is closed, and was known by these facts when it was open last."""
        segment = cls(directory / facts.name, identity)
        for name in SegmentFacts.__struct_fields__[1:]:
            setattr(segment, name, getattr(facts, name))
        return segment

    def open_closed(self) -> bool:
        """Take what a file that was closed says, and leave it open for reading alone, until open_live(). Return False
        where it was not closed: what is in it may not be on disk yet."""
        if not was_closed(self.path):
            return False
        reader = connect_final(self.path)
        try:
            with opening_errors():
                self._read_meta(reader)
                self._read_end(reader)
                self._content_type_names = content_types_of(reader)
        except BaseException:
            reader.close(True)
            raise
        self._reader = reader
        return True

    def open_live(self) -> None:
        """Open the file for writing and make everything in it durable before any of it is claimed (wal.py)."""
        self.close_reader()  # of open_closed(), which cannot see changes
        os.chmod(self.path, 0o640)  # a kill may have come while it was being settled
        writer = apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)
        keep_log(writer)
        try:
            self._set_up(writer)
        except BaseException:
            writer.close(True)
            raise
        self._writer = writer
        self.settled = False
        self.wal_pages = self.commits = 0

    def _set_up(self, writer: apsw.Connection) -> None:
        with opening_errors():
            writer.set_busy_timeout(BUSY_TIMEOUT_MS)
            mode = writer.execute("PRAGMA journal_mode = WAL").get
            writer.execute("PRAGMA synchronous = FULL")
            set_full_sync(writer)
            writer.execute("PRAGMA wal_autocheckpoint = 0")
            writer.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            writer.execute("PRAGMA trusted_schema = OFF")
            writer.execute("PRAGMA cell_size_check = ON")
            if (mode, writer.execute("PRAGMA synchronous").get) != ("wal", 2):
                raise StorageFault(f"{self.path}: SQLite refused WAL with synchronous=FULL (a network file system?)")
            if writer.readonly("main"):
                if _write_version(self.path) > WAL_WRITE_VERSION:
                    raise CorruptFile(f"{self.path}: its header says that a later SQLite wrote it; {REBUILD}")
                raise apsw.CantOpenError(f"{self.path} could be opened for reading alone")
            self._read_meta(writer)
            make_durable(writer)
            writer.execute(LANES_DDL)  # files of an earlier release lack them
            self._read_end(writer)
            writer.set_wal_hook(self._committed)
            self._content_types = ContentTypes(writer)

    def _committed(self, _connection: apsw.Connection, _database: str, pages: int) -> int:
        self.wal_pages = pages
        self.commits += 1
        return apsw.SQLITE_OK

    def _read_meta(self, connection: apsw.Connection) -> None:
        try:
            meta = dict(connection.execute("SELECT key, value FROM meta"))
        except apsw.SQLError as error:
            if is_of_a_segment(connection):
                raise CorruptFile(f"{self.path}: its schema is damaged: {error}; {REBUILD}") from error
            raise WrongLog(f"{self.path} is not a segment of a log: {error}") from error
        self.schema_version = meta.get("schema_version")
        if not isinstance(self.schema_version, int) or self.schema_version < SCHEMA_VERSION:
            raise CorruptFile(f"{self.path}: no version wrote this; {REBUILD}")
        if self.schema_version > COMPRESSED_VERSION:
            raise WrongLog(
                f"{self.path} has schema version {self.schema_version}, this broker reads up to {COMPRESSED_VERSION}:"
                " run the version that wrote it"
            )
        expected = {**self.identity.as_meta(), "base_offset": int(self.path.name[:20])}
        found = {key: meta.get(key) for key in expected}
        if found != expected:
            if is_damage(found, expected):
                raise CorruptFile(f"{self.path}: its table meta has {found}: {REBUILD}")
            raise WrongLog(f"{self.path} belongs to {found}, expected {expected}: move it back to its own directory")
        if damaged := damaged_entries(connection, self.schema_version):
            raise CorruptFile(f"{self.path}: its schema is damaged: {', '.join(damaged)}; {REBUILD}")
        for name in ("messages_before", "timestamp_before_ms", "log_start_offset"):
            if not isinstance(meta.get(name), int):
                raise CorruptFile(f"{self.path}: its table meta has no {name!r}: {REBUILD}")
        self.messages_before = self.messages_end = meta["messages_before"]
        self.last_timestamp_ms = meta["timestamp_before_ms"]
        self.log_start_offset = meta["log_start_offset"]

    def _read_end(self, connection: apsw.Connection) -> None:
        row = connection.execute(
            "SELECT base_offset, count, messages_before, kind, appended_at_ms FROM batches"
            " ORDER BY base_offset DESC LIMIT 1"
        ).fetchone()
        if row is None:
            self.end_offset, self.messages_end = self.base_offset, self.messages_before
        else:
            base_offset, count, messages_before, kind, self.last_timestamp_ms = integers(self.path, row)
            self.end_offset = base_offset + count
            self.messages_end = messages_before + (count if kind == BatchKind.MESSAGES else 0)
        self.removed = removed_in(connection, self.path)
        self.bytes = connection.execute("PRAGMA page_count").get * PAGE_BYTES

    @property
    def is_live(self) -> bool:
        return self._writer is not None

    @property
    def writer(self) -> apsw.Connection:
        assert not self.settled, "a settled file changes only after open_live()"
        if self._writer is None:
            self.open_live()
        assert self._writer is not None
        return self._writer

    @property
    def reader(self) -> apsw.Connection:
        if self._reader is None:
            if not self.settled:
                _ = self.writer  # recovers and creates the WAL, which a read-only connection does badly
            reader = self._connect_to_read()
            try:
                if self.settled:  # a live segment was checked by its writer
                    known = (self.messages_before, self.messages_end, self.last_timestamp_ms, self.log_start_offset)
                    self._read_meta(reader)
                    self.messages_before, self.messages_end, self.last_timestamp_ms, self.log_start_offset = known
                self._content_type_names = content_types_of(reader)
            except BaseException:
                reader.close(True)
                raise
            self._reader = reader
        return self._reader

    def _connect_to_read(self) -> apsw.Connection:
        mode = "immutable=1" if self.settled else "mode=ro"
        reader = apsw.Connection(f"{uri_of(self.path)}?{mode}", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        reader.set_busy_timeout(BUSY_TIMEOUT_MS)
        reader.execute("PRAGMA trusted_schema = OFF")
        return reader

    @property
    def content_types(self) -> int:
        """How many content types the file has, if it is open for writing; else 0."""
        return 0 if self._content_types is None else len(self._content_types)

    def close_reader(self) -> None:
        if self._reader is not None:
            self._reader.close(True)
            self._reader = None

    def close(self) -> None:
        """Close both connections; the writer last, because the last one to close checkpoints and removes the WAL."""
        self.close_reader()
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.set_wal_hook(None)
            writer.close(True)

    def abandon(self) -> None:
        """Close both connections and write nothing: what is in the write-ahead log stays there for the next open."""
        if self._writer is not None:
            self._writer.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        self.close()

    def settle(self) -> bool:
        """Make the file final: no WAL, mode 0444. Return False, with nothing changed, if another process reads it."""
        writer = self.writer
        self.close_reader()
        try:
            writer.set_busy_timeout(0)
            writer.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_TRUNCATE)
            mode = writer.execute("PRAGMA journal_mode = DELETE").get
        except (apsw.BusyError, apsw.LockedError):
            return False
        finally:
            writer.set_busy_timeout(BUSY_TIMEOUT_MS)
        if mode != "delete":
            return False
        self.bytes = writer.execute("PRAGMA page_count").get * PAGE_BYTES
        self.close()
        os.chmod(self.path, 0o444)
        self.settled = True
        return True

    def replace(self, draft: Path, removed: int, size_bytes: int) -> None:
        """Replace this settled file by `draft`, a complete file on disk. Readers that have the old file open continue
        in it."""
        assert self.settled, "only a settled file is replaced"
        self.close()
        os.rename(draft, self.path)
        self.removed = removed
        self.bytes = size_bytes
        self.lanes = None

    def remove(self) -> None:
        """Unlink the file, then the files beside it: a leftover -wal would corrupt a new file of the same name."""
        self.close()
        unlink_database(self.path)

    # --- writing ------------------------------------------------------------------------------------------------

    def append(self, batches: Sequence[Batch], *, waits: bool = True) -> bool:
        """Append all of `batches` in one transaction and one fsync. On any error none is applied, unless it is a
        fault. Without `waits`, return False if another process is writing, or if the file first needs a change of its
        schema."""
        compressed = [batch for batch in batches if batch.compressed]
        if not waits and compressed and self.schema_version == SCHEMA_VERSION:
            return False
        writer = self.writer
        assert self._content_types is not None
        self.lanes_appended |= lanes_of(batches)
        if not self._begin(writer, waits=waits):
            return False
        try:
            removed = self.removed
            if len(batches) <= FEW_BATCHES and all(map(is_single, batches)):
                for batch in batches:
                    insert_single(writer, self._content_types, batch)
            else:
                removed = self._insert(writer, self._content_types, batches, compressed)
            size = writer.execute("PRAGMA page_count").get * PAGE_BYTES
            begin = perf_counter()
            writer.execute("COMMIT")
            self.commit_s = perf_counter() - begin
        except BaseException:
            self._roll_back(writer)
            raise
        if compressed:
            self.schema_version = COMPRESSED_VERSION
        last = batches[-1]
        self.end_offset = last.end_offset
        self.removed = removed
        self.messages_end = last.messages_before + last.message_count
        self.last_timestamp_ms = last.appended_at_ms
        self.bytes = size
        return True

    def _insert(
        self, writer: apsw.Connection, content_types: ContentTypes, batches: Sequence[Batch], compressed: list[Batch]
    ) -> int:
        """Insert batches of any kind; return how many messages are missing from the file then."""
        insert_batches(writer, batches)
        removed = insert_holes(writer, batches, self.removed)
        if compressed:
            if self.schema_version == SCHEMA_VERSION:
                accept_compressed(writer)
            insert_compressed(writer, compressed)
        for offset, timestamp_ms, records, are_compressed in _joined(batches):
            insert_messages(writer, content_types, offset, timestamp_ms, records, are_compressed=are_compressed)
        return removed

    def _begin(self, writer: apsw.Connection, *, waits: bool) -> bool:
        if waits:
            writer.execute("BEGIN IMMEDIATE")
            return True
        writer.set_busy_timeout(0)
        try:
            writer.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            return False
        finally:
            writer.set_busy_timeout(BUSY_TIMEOUT_MS)
        return True

    def _roll_back(self, writer: apsw.Connection) -> None:
        if writer.in_transaction:  # SQLITE_FULL and I/O errors have rolled back already
            writer.execute("ROLLBACK")
        self._content_types = ContentTypes(writer)

    @contextlib.contextmanager
    def cut(self, to_offset: int) -> Iterator[Callable[[], None]]:
        """Delete everything from `to_offset` on, durably at the exit. The body calls the function that it gets once,
        while nothing reads. Until then readers see everything, and they wait neither for the work nor for the disk."""
        writer = self.writer

        def commit() -> None:
            writer.execute("COMMIT")
            self._read_meta(writer)
            self._read_end(writer)

        sync_wal(writer)  # a new write-ahead log's header is always synced: do that here, not in the commit
        writer.execute("PRAGMA synchronous = NORMAL")
        try:
            writer.execute("BEGIN IMMEDIATE")
            try:
                writer.execute("DELETE FROM messages WHERE offset >= ?", (to_offset,))
                writer.execute("DELETE FROM records WHERE offset >= ?", (to_offset,))
                writer.execute("DELETE FROM batches WHERE base_offset >= ?", (to_offset,))
                if self.removed:
                    writer.execute("DELETE FROM holes WHERE base_offset >= ?", (to_offset,))
                if self.schema_version == COMPRESSED_VERSION:
                    writer.execute("DELETE FROM compressed_values WHERE base_offset >= ?", (to_offset,))
                yield commit
            except BaseException:
                self._roll_back(writer)
                raise
        finally:
            writer.execute("PRAGMA synchronous = FULL")
        sync_wal(writer)

    def set_log_start(self, offset: int) -> None:
        self.writer.execute("UPDATE meta SET value = ? WHERE key = 'log_start_offset'", (offset,))
        self.log_start_offset = offset

    def checkpoint(self) -> None:
        """Move what it can from the WAL into the database, without waiting."""
        in_wal, moved = self.writer.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_PASSIVE)
        self.commits = 0
        if moved == in_wal:
            self.wal_pages = 0  # the next commit starts the WAL from its beginning

    def newest_ms(self) -> int:
        """Return the latest append or delivery time of a message in this settled segment. Reads the file."""
        with contextlib.closing(self._connect_to_read()) as connection:
            delivered = connection.execute("SELECT coalesce(max(deliver_at_ms), 0) FROM messages").get
        return max(self.last_timestamp_ms, *integers(self.path, (delivered,)))


def _joined(batches: Sequence[Batch]) -> Iterator[tuple[int, int, Sequence[Record], bool]]:
    """Yield adjacent message batches with the same time, joined: (offset, time, records, whether their values are
    compressed)."""
    offset, timestamp_ms, are_compressed = -1, -1, False
    records: list[Record] = []
    for batch in batches:
        if batch.kind != BatchKind.MESSAGES:
            continue
        if batch.holes:
            if records:
                yield offset, timestamp_ms, records, are_compressed
            offset, records = -1, []
            for start, end in batch.runs(batch.base_offset, batch.end_offset):
                held = batch.records[start - batch.base_offset : end - batch.base_offset]
                yield start, batch.appended_at_ms, held, False
            continue
        shared = (timestamp_ms, are_compressed)
        if batch.base_offset != offset + len(records) or (batch.appended_at_ms, bool(batch.compressed)) != shared:
            if records:
                yield offset, timestamp_ms, records, are_compressed
            offset, timestamp_ms, records = batch.base_offset, batch.appended_at_ms, []
            are_compressed = bool(batch.compressed)
        records.extend(batch.records)
    if records:
        yield offset, timestamp_ms, records, are_compressed
