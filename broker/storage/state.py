"""The saved fold of a partition's log in plain tables: `state.sqlite` beside the segments. SCHEMA.md describes them.

It is a cache. If it is lost or damaged, it is rebuilt from the newest STATE record and the log after it, so an ordinary
save does not wait for the disk. Two things are more than that. The highest leader epoch that this replica has seen must
never be lost: epochs.py has it for all replicas of a broker, and each save copies it. A file of an earlier version, or
without a broker, may have the only copy: there it is fsynced, and a damaged file is replaced by one that still has it.
And the save before a reset of the log is fsynced: until the first STATE record after it is replicated, it alone has the
leader epochs below.

What the segments hold is not repeated here: scheduled messages that were never delivered are in their `messages`
tables, and the view `scheduled` shows those that were returned and wait.

`digest` is a hash of the whole fold: a file that was half written or edited does not match it and counts as damaged, as
does one whose high watermark does not match its checksum. A file of an older version is emptied, except for the highest
epoch.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec

from portalmq.broker.core.fold import PartitionFold, encode_fold
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import faults_of, opening_errors
from portalmq.broker.storage.fair_lock import FairLock
from portalmq.broker.storage.files import complete_replacement, make_directory, replace_database
from portalmq.broker.storage.fold_tables import STATE_DDL, FoldTables, hash_of_bytes, read_bare_fold, read_fold
from portalmq.broker.storage.open_files import OpenFiles, use_counter
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.wal import (
    BUSY_TIMEOUT_MS,
    connect_beside,
    connect_final,
    keep_log,
    make_durable,
    set_full_sync,
    was_closed,
)

STATE_NAME = "state.sqlite"
STATE_SCHEMA_VERSION = 6

# The time that ages of messages are measured by, and the time of day then (core/replica/age.py).
Age = tuple[int, int]


class _Damaged(Exception):
    """The file is not, or no longer, the state of this log."""


# What SQLite says of a file with a damaged page, header, row or schema.
_BROKEN = (_Damaged, apsw.CorruptError, apsw.NotADBError, apsw.SQLError, apsw.ReadOnlyError, apsw.ConstraintError)
_UNREADABLE = (*_BROKEN, KeyError, TypeError, ValueError)


class SavedState(msgspec.Struct, frozen=True, array_like=True):
    """What a closed state file is known by without reading it: the fold in it reaches `applied`. `epoch` is the highest
    leader epoch in the file, -1 without one; `age` as in StateFile."""

    applied: int
    high_watermark: int
    digest: bytes
    epoch: int
    age: Age | None = None


class StateFile:
    """The saved fold of one partition. Callers on several threads wait for each other. `epochs` are those of the broker
    that has the replica; without a broker, the file has its own."""

    # While it is open: the file, its write-ahead log, their shared memory.
    descriptors = 3

    def __init__(
        self,
        directory: Path,
        *,
        identity: LogIdentity,
        open_files: OpenFiles | None = None,
        epochs: EpochFile | None = None,
    ) -> None:
        self.last_used = 0
        self._epochs = epochs
        self._open_files = open_files or OpenFiles()
        self.path = directory / STATE_NAME
        self.identity = identity
        self._connection: apsw.Connection | None = None
        self._turn = FairLock()
        self._closed = False
        self._tables = FoldTables()
        # The highest epoch that this process has read here or saved here, even if the file is lost.
        self._highest_epoch = -1
        self._knows_epoch = False
        self._is_durable = False
        # What else of the table `meta` this process has read or saved.
        self._saved: dict[str, Any] = {}
        # As of the last save that has it; None without one.
        self.age: Age | None = None

    # --- saving and loading -------------------------------------------------------------------------------------

    def save(
        self,
        fold: PartitionFold,
        high_watermark: int,
        messages_before: Callable[[int], int] | None = None,
        *,
        durable: bool = False,
        age: Age | None = None,
    ) -> None:
        """Replace what is saved. `messages_before` (Log.messages_before) makes the lag in the view `lag` exact. The age
        is kept where `age` is None. Atomic; fsynced only if `durable`: otherwise an older save may be found after a
        power cut."""
        epoch = -1
        meta = {
            "applied": fold.applied,
            "log_start_offset": fold.log_start_offset,
            "compacted": fold.compacted,
            "high_watermark": high_watermark,
            "high_watermark_crc": _crc_of(high_watermark),
            "digest": hash_of_bytes(encode_fold(fold)),
        }
        if age is not None:
            meta |= {"age_ms": age[0], "age_wall_ms": age[1], "age_crc": _crc_of(*age)}

        def write(connection: apsw.Connection) -> None:
            nonlocal epoch
            self._tables.save(connection, fold, messages_before)
            before = messages_before(high_watermark) if messages_before else None
            self._put_meta(connection, **meta, high_watermark_messages_before=before)
            epoch = max(epoch, _highest_epoch(connection))
            if epoch >= 0:
                self._put_meta(connection, highest_leader_epoch=epoch)

        with self._turn:
            if not self._closed:  # the topic was deleted, or the broker ends
                epoch = max(self._highest_epoch, self._epoch_of_broker())
                self._transaction(write, durable=durable)
                self._saved = meta
                self._highest_epoch = epoch
                self.age = age or self.age

    def save_high_watermark(self, high_watermark: int, messages_before: Callable[[int], int]) -> None:
        """Raise the high watermark of the saved fold. Do nothing if there is none, or its high watermark is higher.
        The fold itself stays: it reaches an offset below in any case."""

        def write(connection: apsw.Connection) -> None:
            if any(known < high_watermark for known in _integers_in_meta(connection, "high_watermark")):
                before = messages_before(high_watermark)
                self._put_meta(
                    connection,
                    high_watermark=high_watermark,
                    high_watermark_crc=_crc_of(high_watermark),
                    high_watermark_messages_before=before,
                )
                for key in ("high_watermark", "high_watermark_crc"):  # until this is committed, either may be there
                    self._saved.pop(key, None)

        with self._turn:
            if not self._closed:
                self._transaction(write)

    def load(self) -> tuple[PartitionFold, int] | None:
        """Return the fold and the high watermark as last saved. None if there is none, or it is damaged or another
        log's.

        Compare `applied` with the log's end: after a truncation or replacement of the log an older fold is wrong.
        """
        with self._turn, faults_of(self.path):
            if not complete_replacement(self.path):
                return None
            try:
                with self._to_read() as connection:
                    meta = dict(connection.execute("SELECT key, value FROM meta"))
                    self._note_epoch(meta.get("highest_leader_epoch", -1))
                    self.age = _age_of(meta)
                    if "applied" not in meta:
                        return None
                    fold = read_bare_fold(connection, meta)
                    if not _is_intact(fold, meta):  # it has groups, producers or the like
                        fold = read_fold(connection, meta)
                if not _is_intact(fold, meta):
                    raise _Damaged
            except _UNREADABLE:
                self._close()
                return None
            self._tables.forget()
            self._saved = {key: meta[key] for key in ("applied", "high_watermark", "digest")}
        return fold, meta["high_watermark"]

    @property
    def saved(self) -> SavedState | None:
        """What `resume` needs; None while the file is open, or while it is not known what it has."""
        known = self._saved
        if self.is_open or not self._knows_epoch or not {"applied", "high_watermark", "digest"} <= known.keys():
            return None
        fold = known["applied"], known["high_watermark"], known["digest"]
        return SavedState(*fold, self._highest_epoch, self.age)

    def resume(self, saved: SavedState) -> None:
        """Take that the file, closed and as it was, has this."""
        self._note_epoch(saved.epoch)
        self.age = saved.age
        self._saved = {"applied": saved.applied, "high_watermark": saved.high_watermark, "digest": saved.digest}

    def repair(self) -> bool:
        """Replace the file if it is not what this process has read or saved, by one that has only the highest epoch.
        Return whether it was replaced: the fold is to be saved again. Reads the whole file, as it is on disk."""
        with self._turn, faults_of(self.path):
            if self._closed or not (self._knows_epoch or self._saved) or self._is_as_saved():
                return False
            self._start_over()
            return True

    def is_sound(self) -> bool:
        """Return whether the file, if there is one, is well-formed, and its fold matches its digest. One that is empty,
        or of an earlier version, is begun again when it is used."""
        with self._turn, faults_of(self.path):
            return not complete_replacement(self.path) or self._is_to_begin() or self._is_as_saved()

    def _is_to_begin(self) -> bool:
        try:
            with contextlib.closing(connect_beside(self.path)) as connection:
                if connection.execute("SELECT count(*) FROM sqlite_schema").get == 0:
                    return True
                meta = dict(connection.execute("SELECT key, value FROM meta"))
                return self.identity.as_meta().items() <= meta.items() and meta["schema_version"] < STATE_SCHEMA_VERSION
        except _UNREADABLE:
            return False

    def _is_as_saved(self) -> bool:
        if not self.path.exists():
            return False
        try:
            with contextlib.closing(connect_beside(self.path)) as connection:  # without the pages in its memory
                meta = dict(connection.execute("SELECT key, value FROM meta"))
                epoch = meta.get("highest_leader_epoch", -1)
                expected = {**self.identity.as_meta(), **self._saved}
                if not expected.items() <= meta.items() or (self._knows_epoch and epoch != self._highest_epoch):
                    return False
                if connection.execute("PRAGMA integrity_check(1)").get != "ok":
                    return False
                if "applied" not in meta:
                    return True
                return _is_intact(read_fold(connection, meta), meta)
        except _UNREADABLE:
            return False

    def forget(self) -> None:
        """Delete the fold and the high watermark, durably, before the log is truncated below them. The highest epoch
        stays."""

        def write(connection: apsw.Connection) -> None:
            connection.execute("DELETE FROM meta WHERE key IN ('applied', 'high_watermark', 'digest')")

        with self._turn:
            self._saved = {}
            self._transaction(write, durable=True)

    def save_highest_epoch(self, leader_epoch: int) -> None:
        """Save that `leader_epoch` was seen; durable on return. It never falls."""
        if self._epochs is not None:
            self._epochs.save({self.identity.key: leader_epoch})
            return

        def write(connection: apsw.Connection) -> None:
            highest = max(leader_epoch, _highest_epoch(connection), self._highest_epoch)
            self._put_meta(connection, highest_leader_epoch=highest)

        with self._turn:
            self._transaction(write, durable=True)
            self._highest_epoch = max(leader_epoch, self._highest_epoch)

    def highest_epoch(self) -> int:
        """Return the highest leader epoch that was saved, -1 if there is none."""
        with self._turn, faults_of(self.path):
            if not self._knows_epoch and complete_replacement(self.path):
                try:
                    self._note_epoch(_highest_epoch(self._open()))
                except _UNREADABLE:
                    self._close()
                    self._highest_epoch = max(self._highest_epoch, self._readable_epoch())
            return max(self._highest_epoch, self._epoch_of_broker())

    def repair_epoch(self) -> bool:
        """Write the broker's epochs again if its file does not have this replica's; return whether it was written."""
        return self._epochs is not None and self._epochs.repair(self.identity.key)

    def _epoch_of_broker(self) -> int:
        return -1 if self._epochs is None else self._epochs.highest(self.identity.key)

    def _note_epoch(self, found: object) -> None:
        """Note the highest epoch of the file, where all that was read is on disk. Raise _Damaged if it is no number."""
        if not isinstance(found, int):
            raise _Damaged
        self._highest_epoch = max(self._highest_epoch, found)
        self._knows_epoch = True

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def park(self) -> None:
        """Close the file until it is used again."""
        with self._turn:
            self._close()

    def try_park(self) -> bool:
        """Park unless the file is in use; return whether it is parked."""
        if not self._turn.try_acquire():
            return False
        try:
            self._close()
        finally:
            self._turn.__exit__()
        return True

    def close(self) -> None:
        """Close the file for good: a later save does nothing."""
        with self._turn:
            self._closed = True
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._open_files.closed(self)
            with contextlib.suppress(apsw.Error):  # a cache: what a close could not flush is rebuilt
                connection.close(True)

    # --- the file -----------------------------------------------------------------------------------------------

    def _transaction(self, write: Callable[[apsw.Connection], None], *, durable: bool = False) -> None:
        with faults_of(self.path):
            try:
                self._write(self._open(), write, durable)
            except (*_BROKEN, UnicodeDecodeError):
                self._start_over()
                self._write(self._open(), write, durable)

    def _write(self, connection: apsw.Connection, write: Callable[[apsw.Connection], None], durable: bool) -> None:
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        try:
            write(connection)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            self._tables.forget()
            raise

    @contextlib.contextmanager
    def _to_read(self) -> Iterator[apsw.Connection]:
        """Yield a connection to a file of this log. One that was closed is opened for as long as it is read, in a fifth
        of the time, and leaves nothing behind. Raise _Damaged for any other file."""
        if self._connection is not None or not was_closed(self.path):
            yield self._open()
            return
        with contextlib.closing(connect_final(self.path)) as connection:
            meta = dict(connection.execute("SELECT key, value FROM meta"))
            expected = {**self.identity.as_meta(), "schema_version": STATE_SCHEMA_VERSION}
            if is_current := {key: meta.get(key) for key in expected} == expected:
                yield connection
        if not is_current:
            yield self._open()

    def _open(self) -> apsw.Connection:
        """Return the connection to a file of this log. Raise _Damaged for any other."""
        self.last_used = next(use_counter)
        if self._connection is not None:
            return self._connection
        self._open_files.opening(self)
        if not complete_replacement(self.path):
            make_directory(self.path.parent)
        connection = apsw.Connection(str(self.path))
        if not self._is_durable:
            keep_log(connection)
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            with opening_errors():
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA trusted_schema = OFF")
            set_full_sync(connection)
            if connection.execute("SELECT count(*) FROM sqlite_schema").get == 0:
                self._create_tables(connection, self._highest_epoch)
            meta = dict(connection.execute("SELECT key, value FROM meta"))
            version = meta.get("schema_version")
            expected = self.identity.as_meta()
            if {key: meta.get(key) for key in expected} != expected or not isinstance(version, int):
                raise _Damaged
            if not self._is_durable:  # an epoch that was acted on must not be lost
                connection.execute("PRAGMA synchronous = FULL")
                make_durable(connection)
                self._is_durable = True
            if version != STATE_SCHEMA_VERSION:
                self._create_tables(connection, _highest_epoch(connection))
        except BaseException:
            connection.close(True)
            raise
        self._tables.forget()
        self._connection = connection
        return connection

    def _create_tables(self, connection: apsw.Connection, highest_epoch: int) -> None:
        """Create the tables, in place of those of another version. The log has the fold; only the file has the highest
        epoch."""
        meta = {**self.identity.as_meta(), "schema_version": STATE_SCHEMA_VERSION}
        if highest_epoch >= 0:
            meta["highest_leader_epoch"] = highest_epoch
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        schema = "SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' AND type IN ('table', 'view')"
        for kind, name in connection.execute(f"{schema} ORDER BY type DESC").fetchall():  # views before tables
            connection.execute(f'DROP {kind} "{name}"')
        connection.execute(STATE_DDL)
        self._put_meta(connection, **meta)
        connection.execute("COMMIT")

    def _start_over(self) -> None:
        """Replace the file by one that has only the highest epoch, durably."""
        if not self._knows_epoch:
            self._highest_epoch = max(self._highest_epoch, self._readable_epoch())
        self._saved = {}
        self._close()
        with contextlib.closing(apsw.Connection(":memory:")) as draft:
            self._create_tables(draft, self._highest_epoch)
            image = draft.serialize("main")
        replace_database(self.path, image)

    def _readable_epoch(self) -> int:
        """Return the highest epoch in a file that is damaged elsewhere; -1 if it is unreadable, or another log's."""
        try:
            with contextlib.closing(apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
                keep_log(connection)
                meta = dict(connection.execute("SELECT key, value FROM meta"))
                is_ours = self.identity.as_meta().items() <= meta.items()
                return _highest_epoch(connection) if is_ours else -1
        except (_Damaged, apsw.Error, TypeError, ValueError):
            return -1

    @staticmethod
    def _put_meta(connection: apsw.Connection, **values: Any) -> None:
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())


def _is_intact(fold: PartitionFold, meta: dict[str, Any]) -> bool:
    """Return whether the digest is that of the fold, and the checksum that of the high watermark. Earlier versions
    wrote no checksum."""
    is_right = meta.get("high_watermark_crc") in (None, _crc_of(meta["high_watermark"]))
    return is_right and bool(hash_of_bytes(encode_fold(fold)) == meta["digest"])


def _age_of(meta: dict[str, Any]) -> Age | None:
    """Return the saved age, None without one. One that does not match its checksum counts as lost."""
    age = (meta.get("age_ms", 0), meta.get("age_wall_ms", 0))
    is_whole = all(isinstance(each, int) for each in age) and meta.get("age_crc") == _crc_of(*age)
    return age if is_whole else None


def _crc_of(*numbers: int) -> int:
    return zlib.crc32(b" ".join([b"%d" % number for number in numbers]))


def _highest_epoch(connection: apsw.Connection) -> int:
    return max([-1, *_integers_in_meta(connection, "highest_leader_epoch")])


def _integers_in_meta(connection: apsw.Connection, key: str) -> list[int]:
    """Return the value of a key, in a list; an empty one without it. Raise _Damaged for what is no integer."""
    found = [value for (value,) in connection.execute("SELECT value FROM meta WHERE key = ?", (key,))]
    if not all(type(value) is int for value in found):
        raise _Damaged
    return found
