"""Compaction of a log: below an offset only the last message of each key stays.

    Compact(upto, tombstones_before_ms, ids_before_ms), a record in the log at `at_ms`. Of the messages below `upto`

    stays    one without a key
             one that was not due at `at_ms` (it is no value of its key yet, and supersedes nothing)
             one with a message id, unless it is older than `ids_before_ms`: its id identifies repeats
             the last one of its key; a cancelled scheduled message is not the last of anything
    goes     any other
             a tombstone (a key and an empty value) that is older than `tombstones_before_ms`, even the last one
             the content of control records of groups (they become BLANK), if a STATE record after `upto` has it all

That is a function of the log and the record alone, so all replicas get the same result, whatever their files are. A
later record removes everything that an earlier one would, so only the newest counts, also for a replica that begins
late: see "Compaction is a record" in DESIGN.md for what the records must fulfil.

    keys.compacting           key -> its last offset, over what was not judged yet: SQLite spills it to disk when large
    <segment>.compacting      the replacement of a sealed segment, complete and on disk before it is renamed

Segments are replaced oldest first, so a tombstone goes only after all the values that it deletes. A kill leaves some
replaced and others not; the manifest records how far each one is compacted, and the next run does the rest. Readers
continue in the files that they have open.

The work is cut into steps of a few milliseconds. Nothing is locked between two of them, and the caller may wait as long
as it likes: it decides how much of the machine compaction takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw
import msgspec

from portalmq.broker.storage.batch import HOLE, Batch, BatchKind, Record, checksum
from portalmq.broker.storage.compressed_values import copy_compressed
from portalmq.broker.storage.errors import CorruptBatch, StorageFault, faults_of, integers
from portalmq.broker.storage.fair_lock import FairLock
from portalmq.broker.storage.files import sha256_of
from portalmq.broker.storage.holes import HOLES_DDL, insert_holes
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.manifest import SealedSegment
from portalmq.broker.storage.rows import BATCH_COLUMNS, MESSAGE_COLUMNS, batch_of, record_of
from portalmq.broker.storage.schema import PAGE_BYTES
from portalmq.broker.storage.segment import KEYS_NAME
from portalmq.system import sync

STEP_BYTES = 512 * 1024
STEP_OFFSETS_MIN, STEP_OFFSETS_MAX = 16, 5_000
# One large fsync at the end would delay those of the appends.
STEPS_A_SYNC = 16
KEYS_CACHE_KIB = 16 * 1024

_KEYS_DDL = """
CREATE TABLE keys.last (key BLOB PRIMARY KEY, offset INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE keys.cancelled (start_offset INTEGER PRIMARY KEY, end_offset INTEGER NOT NULL);
CREATE TABLE keys.removed (offset INTEGER PRIMARY KEY);
"""

_JUDGED = "m.offset >= :start AND m.offset < :end AND m.key IS NOT NULL AND coalesce(m.deliver_at_ms, 0) <= :at_ms"
_CANCELLED_UPTO = (
    "coalesce((SELECT c.end_offset FROM keys.cancelled AS c WHERE c.start_offset <= m.offset"
    " ORDER BY c.start_offset DESC LIMIT 1), 0)"
)
_LEARN = (
    "INSERT INTO keys.last SELECT CAST(m.key AS BLOB), m.offset FROM source.messages AS m"
    f" WHERE {_JUDGED} AND {_CANCELLED_UPTO} <= m.offset"
    " ON CONFLICT (key) DO UPDATE SET offset = max(offset, excluded.offset)"
)
_JUDGE = (
    "INSERT INTO keys.removed SELECT m.offset FROM source.messages AS m"
    " LEFT JOIN keys.last AS l ON l.key = CAST(m.key AS BLOB)"
    f" WHERE {_JUDGED} AND (m.message_id IS NULL OR m.timestamp_ms < max(:tombstones_before_ms, :ids_before_ms))"
    " AND (l.offset > m.offset OR (octet_length(m.value) = 0"
    " AND max(m.timestamp_ms, coalesce(m.deliver_at_ms, 0)) < :tombstones_before_ms))"
)

_FIRST_KEPT = (
    "SELECT timestamp_ms FROM messages WHERE offset < ? AND key IS NOT NULL"
    " AND (deliver_at_ms > ? OR (message_id IS NOT NULL AND timestamp_ms >= ?)) ORDER BY offset LIMIT 1"
)
NEVER_MS = 1 << 62

# Epochs stay, since they are compared one by one, and so do Compact records, for the age of tombstones.
_SUPERFLUOUS = (
    f"(kind IN ({BatchKind.STATE:d}, {BatchKind.PURGE:d}, {BatchKind.CANCEL:d}, {BatchKind.RESCHEDULE:d})"
    f" OR kind >= {BatchKind.GROUP_START:d})"
)


class CompactionOrder(msgspec.Struct, frozen=True):
    """A Compact record to carry out, with its own time and the cancelled messages. `blanks` says that a STATE record is
    between `upto` and the record. Invariant: every message below `upto` was due at `at_ms`, or was appended at
    `tombstones_before_ms` or later."""

    upto: int
    tombstones_before_ms: int
    at_ms: int
    cancelled: tuple[tuple[int, int], ...] = ()
    blanks: bool = False
    ids_before_ms: int = 0


class Compaction:
    """One compaction of one log whose segments below `order.upto` are sealed. Call `step` until it returns False,
    then `close`; on any threads, one at a time. `removed` counts messages, `freed_bytes` the bytes saved."""

    def __init__(self, log: Log, order: CompactionOrder) -> None:
        self.removed = 0
        self.freed_bytes = 0
        self._log = log
        self._order = order
        self._keys = log.directory / KEYS_NAME
        self._turn = FairLock()
        self._entries: list[SealedSegment] = []
        self._work = self._run()

    def step(self) -> bool:
        """Do one step; return whether there is more to do. Raise CorruptBatch, StorageFault, DiskFull or LogClosed.
        Without an error some work may be left if segments were dropped: ask `Log.is_compacted`."""
        with self._turn:
            try:
                with faults_of(self._log.directory):
                    return next(self._work, False)
            except (StorageFault, CorruptBatch):
                if all(self._log.has_sealed(entry) for entry in self._entries):
                    raise
                return False  # a file was dropped or truncated during the step: the caller asks again

    def close(self) -> None:
        """Abandon the rest, and remove temporary files."""
        with self._turn, contextlib.suppress(apsw.Error, OSError):
            self._work.close()

    # --- all steps ---------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[bool]:
        order, log = self._order, self._log
        entries = log.sealed_below(order.upto) or []
        todo = [entry for entry in entries if not entry.is_compacted(order.upto, order.tombstones_before_ms)]
        if not todo:
            return
        self._entries = entries
        judged = min(self._judged_upto(entry) for entry in todo)
        new = [entry for entry in entries if entry.end_offset > judged]
        self._entries = [entry for entry in entries if entry in new or entry in todo]
        for entry in self._entries:
            self._verify(entry)
            yield True
            if not entry.checked:
                yield from self._verify_batches(entry)
        try:
            self._begin_keys()
            for entry in new:
                yield from self._learn(entry, judged)
            untouched: list[SealedSegment] = []
            for entry in todo:
                yield from self._judge(entry)
                if self._is_touched(entry):
                    yield from self._rewrite(entry)
                else:
                    untouched.append(entry)
            log.mark_compacted(untouched, order.upto, order.tombstones_before_ms, order.at_ms)
        finally:
            self._keys.unlink(missing_ok=True)

    def _verify(self, entry: SealedSegment) -> None:
        """Verify a segment's checksum before new checksums are computed from its content."""
        path = self._log.directory / entry.file
        found = sha256_of(path)
        if found != entry.sha256:
            raise CorruptBatch(path, entry.base_offset, f"its SHA-256 is {found}, not {entry.sha256}")

    def _verify_batches(self, entry: SealedSegment) -> Iterator[bool]:
        """Verify the batches of a segment that may have been damaged before it was sealed."""
        at = entry.base_offset
        while at < entry.end_offset and self._log.has_sealed(entry):
            below = min(entry.end_offset, at + STEP_OFFSETS_MAX)
            found = self._log.read_to_copy(at, max_bytes=STEP_BYTES, below=below)
            if not found:  # truncated or begun again at this moment
                return
            at = found[-1].end_offset
            yield True

    # --- which messages go -------------------------------------------------------------------------------------------

    def _judged_upto(self, entry: SealedSegment) -> int:
        """Return the offset below which earlier compactions have judged the segment's keys. A segment starts again if
        it held messages that were not due then, or has some with an id, as these may have stayed for that alone."""
        if entry.compacted_upto <= entry.base_offset or entry.newest_ms > entry.compacted_at_ms:
            return entry.base_offset
        with contextlib.closing(_opened(self._log.directory / entry.file)) as connection:
            return entry.base_offset if _has_ids(connection) else entry.compacted_upto

    def _begin_keys(self) -> None:
        self._keys.unlink(missing_ok=True)
        with contextlib.closing(self._connect(":memory:")) as connection:
            connection.execute(_KEYS_DDL)
            connection.executemany("INSERT INTO keys.cancelled VALUES (?, ?)", self._order.cancelled)

    def _connect(self, main: str, source: SealedSegment | None = None) -> apsw.Connection:
        """Open a connection to `main`, with the keys and a segment's file attached."""
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
        connection = apsw.Connection(main, flags=flags)
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("ATTACH ? AS keys", (f"file:{quote(str(self._keys))}?mode=rwc",))
            for schema in ("main", "keys"):  # a kill leaves leftovers, which are deleted
                connection.execute(f"PRAGMA {schema}.journal_mode = OFF")
                connection.execute(f"PRAGMA {schema}.synchronous = OFF")
            connection.execute(f"PRAGMA keys.cache_size = -{KEYS_CACHE_KIB}")
            if source is not None:
                path = self._log.directory / source.file
                connection.execute("ATTACH ? AS source", (f"file:{quote(str(path))}?immutable=1",))
        except BaseException:
            connection.close(True)
            raise
        return connection

    def _learn(self, entry: SealedSegment, judged: int) -> Iterator[bool]:
        """Collect the last offset of each key in the part that was not judged yet."""
        with contextlib.closing(self._connect(":memory:", entry)) as connection:
            yield from self._in_steps(connection, _LEARN, entry, max(judged, entry.base_offset))

    def _judge(self, entry: SealedSegment) -> Iterator[bool]:
        """Collect the offsets of the segment that are removed."""
        with contextlib.closing(self._connect(":memory:", entry)) as connection:
            connection.execute("DELETE FROM keys.removed")
            yield from self._in_steps(connection, _JUDGE, entry, entry.base_offset)

    def _in_steps(
        self, connection: apsw.Connection, statement: str, entry: SealedSegment, start: int
    ) -> Iterator[bool]:
        order, end = self._order, min(entry.end_offset, self._order.upto)
        wanted, step = msgspec.structs.asdict(order), _step_of(entry)
        for at in range(start, end, step):
            connection.execute(statement, {**wanted, "start": at, "end": min(at + step, end)})
            yield True

    def _is_touched(self, entry: SealedSegment) -> bool:
        with contextlib.closing(self._connect(":memory:", entry)) as connection:
            blank = f"SELECT 1 FROM source.records WHERE offset < ? AND {_SUPERFLUOUS}"
            return bool(
                connection.execute(
                    f"SELECT EXISTS (SELECT 1 FROM keys.removed) OR EXISTS ({blank})", (self._blank_below,)
                ).get
            )

    @property
    def _blank_below(self) -> int:
        return self._order.upto if self._order.blanks else 0

    # --- rewriting a segment -----------------------------------------------------------------------------------------

    def _rewrite(self, entry: SealedSegment) -> Iterator[bool]:
        """Replace the segment's file by one without the removed messages."""
        draft = self._log.draft_path(entry)
        draft.unlink(missing_ok=True)
        try:
            yield from self._fill(draft, entry)
            os.chmod(draft, 0o444)
            new = self._entry_of(draft, entry)
            yield True
            if self._log.replace_sealed(entry, new):
                self.removed += new.removed - entry.removed
                self.freed_bytes += entry.bytes - new.bytes
        finally:
            draft.unlink(missing_ok=True)

    def _fill(self, draft: Path, entry: SealedSegment) -> Iterator[bool]:
        with contextlib.closing(self._connect(str(draft), entry)) as connection:
            connection.execute(f"PRAGMA main.page_size = {PAGE_BYTES}")
            for table, sql in _schema_of(connection, "table"):
                connection.execute(sql)
                if table not in ("messages", "batches", "records", "holes", "compressed_values"):
                    connection.execute(f'INSERT INTO main."{table}" SELECT * FROM source."{table}"')
            connection.execute(HOLES_DDL)  # files of an earlier release lack it
            descriptor = os.open(draft, os.O_RDONLY)
            try:
                for number, _ in enumerate(self._copy(connection, entry), 1):
                    if number % STEPS_A_SYNC == 0:
                        sync(descriptor)
                    yield True
                for kind in ("index", "view"):
                    for _, sql in _schema_of(connection, kind):
                        connection.execute(sql)
                        yield True
                connection.close()
                sync(descriptor)
            finally:
                os.close(descriptor)

    def _copy(self, connection: apsw.Connection, entry: SealedSegment) -> Iterator[None]:
        """Copy batches and the messages that stay, then compute new checksums for the batches that lost some."""
        names = dict(connection.execute("SELECT id, name FROM main.content_types"))
        has_compressed = ("compressed_values",) in connection.execute("SELECT name FROM main.sqlite_schema").fetchall()
        removed, step, start = 0, _step_of(entry), entry.base_offset
        while start < entry.end_offset:
            end: Any = connection.execute(
                "SELECT coalesce(min(base_offset), ?) FROM source.batches WHERE base_offset >= ?",
                (entry.end_offset, start + step),
            ).get
            connection.execute("BEGIN")
            connection.execute(
                "INSERT INTO main.batches SELECT * FROM source.batches WHERE base_offset >= ? AND base_offset < ?",
                (start, end),
            )
            connection.execute(
                "INSERT INTO main.records SELECT * FROM source.records WHERE offset >= ?1 AND offset < ?2"
                f" AND NOT (offset < ?3 AND {_SUPERFLUOUS})",
                (start, end, self._blank_below),
            )
            connection.executemany(
                "UPDATE main.batches SET kind = ?, crc = ? WHERE base_offset = ?",
                _blanked(connection, start, min(end, self._blank_below)),
            )
            connection.execute(
                "INSERT INTO main.messages SELECT * FROM source.messages AS m WHERE m.offset >= ? AND m.offset < ?"
                " AND NOT EXISTS (SELECT 1 FROM keys.removed AS r WHERE r.offset = m.offset)",
                (start, end),
            )
            if has_compressed:
                copy_compressed(connection, names, start, end)
            holed = _holed(connection, names, start, end)
            connection.executemany(
                "UPDATE main.batches SET crc = ? WHERE base_offset = ?",
                [(batch.crc, batch.base_offset) for batch in holed],
            )
            removed = insert_holes(connection, holed, removed)
            connection.execute("COMMIT")
            start = end
            yield

    def _entry_of(self, draft: Path, old: SealedSegment) -> SealedSegment:
        with contextlib.closing(_opened(draft)) as connection:
            delivered: Any = connection.execute("SELECT coalesce(max(deliver_at_ms), 0) FROM messages").get
            removed: Any = connection.execute("SELECT coalesce(sum(removed), 0) FROM holes").get
        return msgspec.structs.replace(
            old,
            newest_ms=max(old.last_timestamp_ms, delivered),
            bytes=draft.stat().st_size,
            sha256=sha256_of(draft),
            removed=removed,
            compacted_upto=self._order.upto,
            compacted_at_ms=self._order.at_ms,
            tombstones_before_ms=self._order.tombstones_before_ms,
            checked=True,
        )


def first_kept_ms(log: Log, upto: int, at_ms: int, ids_before_ms: int) -> int:
    """Return when the first message was appended that an order keeps although it may be superseded: it is not due, or
    its id counts. NEVER_MS without one; 0 if that is not known yet. Reads the files that may have one."""
    entries = log.sealed_below(upto)
    if entries is None:
        return 0
    for entry in entries:
        if entry.newest_ms <= at_ms and entry.last_timestamp_ms < ids_before_ms:
            continue
        try:
            with faults_of(log.directory), contextlib.closing(_opened(log.directory / entry.file)) as connection:
                ids_from = ids_before_ms if _has_ids(connection) else NEVER_MS
                found: Any = connection.execute(_FIRST_KEPT, (upto, at_ms, ids_from)).get
        except (StorageFault, CorruptBatch):
            if log.has_sealed(entry):
                raise
            found = None  # its file was dropped
        if found is not None:
            return integers(log.directory / entry.file, (found,))[0]
    return NEVER_MS


def _opened(path: Path) -> apsw.Connection:
    """Open a file that does not change, to read."""
    uri = f"file:{quote(str(path))}?immutable=1"
    return apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)


def _has_ids(connection: apsw.Connection) -> bool:
    return connection.execute("SELECT 1 FROM messages WHERE message_id IS NOT NULL LIMIT 1").get is not None


def _step_of(entry: SealedSegment) -> int:
    """Return how many offsets of the segment make one step."""
    offsets = entry.end_offset - entry.base_offset
    return max(STEP_OFFSETS_MIN, min(STEP_OFFSETS_MAX, STEP_BYTES * offsets // max(1, entry.bytes)))


def _schema_of(connection: apsw.Connection, kind: str) -> list[tuple[str, str]]:
    rows: Any = connection.execute(
        "SELECT name, sql FROM source.sqlite_schema WHERE type = ? AND sql IS NOT NULL AND name NOT LIKE 'sqlite_%'"
        " ORDER BY rowid",
        (kind,),
    )
    return list(rows)


def _blanked(connection: apsw.Connection, start: int, end: int) -> list[tuple[int, int, int]]:
    """Return (kind, checksum, offset) of the control records in [start, end) of the draft that lost their content."""
    rows: Any = connection.execute(
        f"SELECT {BATCH_COLUMNS} FROM main.batches AS b"
        f" WHERE b.base_offset >= ? AND b.base_offset < ? AND {_SUPERFLUOUS}",
        (start, end),
    )
    return [
        (BatchKind.BLANK, checksum(batch_of((*row[:3], int(BatchKind.BLANK), *row[4:9]), 0)), row[0])
        for row in rows.fetchall()
    ]


def _holed(connection: apsw.Connection, names: dict[int, str], start: int, end: int) -> list[Batch]:
    """Return the batches in [start, end) of the draft that miss messages, with their new checksums."""
    inside = "offset >= b.base_offset AND offset < b.base_offset + b.count"
    rows: list[Any] = connection.execute(
        f"SELECT {BATCH_COLUMNS}, crc, (SELECT count(*) FROM main.messages WHERE {inside}),"
        f" EXISTS (SELECT 1 FROM keys.removed WHERE {inside})"
        " FROM main.batches AS b WHERE b.base_offset >= ? AND b.base_offset < ? AND kind = 0 ORDER BY b.base_offset",
        (start, end),
    ).fetchall()
    holed: list[Batch] = []
    for row in rows:
        there, is_touched = row[10], row[11]
        base_offset, count = row[0], row[1]
        if there == count:
            continue
        if not is_touched:
            holed.append(batch_of(row[:9], row[9], holes=count - there))
            continue
        records: list[Record] = [HOLE] * count
        messages: Any = connection.execute(
            f"SELECT {MESSAGE_COLUMNS} FROM main.messages WHERE offset >= ? AND offset < ?",
            (base_offset, base_offset + count),
        )
        for message in messages:
            records[message[-1] - base_offset] = record_of(message, names)
        batch = batch_of(row[:9], 0, tuple(records), holes=count - there)
        holed.append(batch_of(row[:9], checksum(batch), holes=count - there))
    return holed
