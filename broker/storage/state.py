"""The fold of a partition's log, at rest and in plain tables: `state.sqlite` beside the segments.

It is a cache with one exception: lost or damaged, it is rebuilt from the newest STATE record and the log behind it, and
so an ordinary save does not wait for the disk. The exception is the highest leader epoch that this replica has seen,
which must never be forgotten: it is fsynced, and a damaged file is replaced by one that has it still. (And the save
before a reset of the log is: until the first STATE record behind it is replicated, it alone knows the leader epochs
that were begun below.)

    meta                        identity, schema_version, applied, log_start_offset, compacted, high_watermark,
                                high_watermark_messages_before, highest_leader_epoch, digest
    epochs                      leader_epoch, start_offset
    producers                   producer_id, epoch
    producer_batches            the last batches of each: sequence, count, base_offset, appended_at_ms
    groups                      start_offset, next_offset, next_messages_before, last_active_ms
    cursors                     where a group is in the lanes other than lane 0
    spans                       [start_offset, end_offset) handed out and not done
    ahead                       messages that are done before their lane's cursor has come
    dead_ranges                 messages that were given up
    attempts, attempt_ranges    receives that may be repeated, with what they were given
    commits, stream_commits     the last commit calls, by what was shown
    stream_offsets              where stream groups go on, and who may say so
    outbox                      records whose output is still to be appended elsewhere
    cancelled                   scheduled messages that were taken back
    ready, in_flight, scheduled, dead, lag, streams     views for people

What lies in the segments is not repeated here: messages that wait for their time and were never handed out stand in
the tables `messages` there, and the view `scheduled` has those that came back and wait.

`digest` is a hash of the whole fold: a file that was half written, or meddled with, does not match it and counts as
damaged. A file of an older version is emptied, but for the highest epoch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from portalmq.broker.core.fold import PartitionFold, encode_fold
from portalmq.broker.storage.errors import faults_of, opening_errors
from portalmq.broker.storage.fair_lock import FairLock
from portalmq.broker.storage.files import make_directory, sync_directory
from portalmq.broker.storage.fold_tables import STATE_DDL, FoldTables, hash_of_bytes, read_fold
from portalmq.broker.storage.open_files import OpenFiles, use_counter
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.wal import BUSY_TIMEOUT_MS, make_durable, set_full_sync

STATE_NAME = "state.sqlite"
STATE_SCHEMA_VERSION = 5
# What SQLite may have put beside the file.
BESIDE = ("-wal", "-shm", "-journal")


class _Damaged(Exception):
    """The file is not, or no longer, the state of this log."""


class StateFile:
    """Saves and loads the fold of one partition. Callers on several threads wait for each other."""

    # While it is open: the file, its write-ahead log, their shared memory.
    descriptors = 3

    def __init__(self, directory: Path, *, identity: LogIdentity, open_files: OpenFiles | None = None) -> None:
        self.last_used = 0
        self._open_files = open_files or OpenFiles()
        self.path = directory / STATE_NAME
        self.identity = identity
        self._connection: apsw.Connection | None = None
        self._turn = FairLock()
        self._closed = False
        self._tables = FoldTables()
        # What this process has read of the epoch, or saved, whatever becomes of the file.
        self._highest_epoch = -1
        self._is_durable = False

    # --- the two uses -------------------------------------------------------------------------------------------

    def save(
        self,
        fold: PartitionFold,
        high_watermark: int,
        messages_before: Callable[[int], int] | None = None,
        *,
        durable: bool = False,
    ) -> None:
        """Replaces what is saved. `messages_before` (Log.messages_before) makes the lag exact in the view `lag`.

        Atomic; fsynced only when `durable`: else an older save may be found after a power cut.
        """

        def write(connection: apsw.Connection) -> None:
            self._tables.save(connection, fold, messages_before)
            self._put_meta(
                connection,
                applied=fold.applied,
                log_start_offset=fold.log_start_offset,
                compacted=fold.compacted,
                high_watermark=high_watermark,
                high_watermark_messages_before=messages_before(high_watermark) if messages_before else None,
                digest=hash_of_bytes(encode_fold(fold)),
            )

        with self._turn:
            if not self._closed:  # the topic was deleted, or the broker ends, while this waited for a thread
                self._transaction(write, durable=durable)

    def save_high_watermark(self, high_watermark: int, messages_before: Callable[[int], int]) -> None:
        """Raise the high watermark of the fold that was saved last; nothing happens where there is none, or a higher
        one. That fold stays as it is: it goes up to an offset below in any case."""

        def write(connection: apsw.Connection) -> None:
            known = dict(connection.execute("SELECT key, value FROM meta WHERE key = 'high_watermark'"))
            if known and known["high_watermark"] < high_watermark:
                before = messages_before(high_watermark)
                self._put_meta(connection, high_watermark=high_watermark, high_watermark_messages_before=before)

        with self._turn:
            if not self._closed:
                self._transaction(write)

    def load(self) -> tuple[PartitionFold, int] | None:
        """The fold and the high watermark as last saved. None when there is none, or it is damaged or another log's.

        Check `applied` against the log's end: a log that was truncated, or replaced, makes an older fold of it wrong.
        """
        with self._turn, faults_of(self.path):
            if not self.path.exists():
                return None
            try:
                connection = self._open()
                meta = dict(connection.execute("SELECT key, value FROM meta"))
                if "applied" not in meta:
                    return None
                fold = read_fold(connection, meta)
                if hash_of_bytes(encode_fold(fold)) != meta["digest"]:
                    raise _Damaged
            except (_Damaged, apsw.CorruptError, apsw.NotADBError, apsw.SQLError, KeyError, TypeError, ValueError):
                self._close()
                return None
            self._tables.forget()
        return fold, meta["high_watermark"]

    def forget(self) -> None:
        """Drops the fold and the high watermark, durably: the log is about to be cut below them. The highest epoch
        stays."""

        def write(connection: apsw.Connection) -> None:
            connection.execute("DELETE FROM meta WHERE key IN ('applied', 'high_watermark', 'digest')")

        with self._turn:
            self._transaction(write, durable=True)

    def save_highest_epoch(self, leader_epoch: int) -> None:
        """Remembers that `leader_epoch` was seen; durable on return. It never falls."""

        def write(connection: apsw.Connection) -> None:
            highest = max(leader_epoch, _highest_epoch(connection), self._highest_epoch)
            self._put_meta(connection, highest_leader_epoch=highest)

        with self._turn:
            self._transaction(write, durable=True)
            self._highest_epoch = max(leader_epoch, self._highest_epoch)

    def highest_epoch(self) -> int:
        """The highest leader epoch that was saved, -1 when there is none."""
        with self._turn, faults_of(self.path):
            if self.path.exists():
                try:
                    self._highest_epoch = max(self._highest_epoch, _highest_epoch(self._open()))
                except (_Damaged, apsw.CorruptError, apsw.NotADBError, apsw.SQLError):
                    self._close()
            return self._highest_epoch

    def park(self) -> None:
        """Closes the file until it is used again."""
        with self._turn:
            self._close()

    def try_park(self) -> bool:
        """As `park`, unless somebody uses the file now; whether it rests."""
        if not self._turn.try_acquire():
            return False
        try:
            self._close()
        finally:
            self._turn.__exit__()
        return True

    def close(self) -> None:
        """Closes the file for good: a save that comes later does nothing."""
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
            except (_Damaged, apsw.CorruptError, apsw.NotADBError, apsw.SQLError):
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

    def _open(self) -> apsw.Connection:
        """The connection to a file of this log; raises _Damaged for any other."""
        self.last_used = next(use_counter)
        if self._connection is not None:
            return self._connection
        self._open_files.opening(self)
        make_directory(self.path.parent)
        connection = apsw.Connection(str(self.path))
        try:
            connection.set_busy_timeout(BUSY_TIMEOUT_MS)
            with opening_errors():
                connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA trusted_schema = OFF")
            set_full_sync(connection)
            if connection.execute("SELECT count(*) FROM sqlite_schema").get == 0:
                self._create_tables(connection)
            meta = dict(connection.execute("SELECT key, value FROM meta"))
            version = meta.get("schema_version")
            expected = self.identity.as_meta()
            if {key: meta.get(key) for key in expected} != expected or not isinstance(version, int):
                raise _Damaged
            if not self._is_durable:  # an epoch that is acted on may not be lost
                connection.execute("PRAGMA synchronous = FULL")
                make_durable(connection)
                self._is_durable = True
            if version != STATE_SCHEMA_VERSION:
                self._renew_tables(connection)
        except BaseException:
            connection.close(True)
            raise
        self._tables.forget()
        self._connection = connection
        return connection

    def _create_tables(self, connection: apsw.Connection) -> None:
        """In a file that is new, or was emptied behind our back."""
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(STATE_DDL)
        self._put_meta(connection, **self._meta_with(self._highest_epoch))
        connection.execute("COMMIT")

    def _meta_with(self, highest_epoch: int) -> dict[str, Any]:
        meta = {**self.identity.as_meta(), "schema_version": STATE_SCHEMA_VERSION}
        return {**meta, "highest_leader_epoch": highest_epoch} if highest_epoch >= 0 else meta

    def _renew_tables(self, connection: apsw.Connection) -> None:
        """The file is of another version: the fold is found again in the log, the highest epoch nowhere else."""
        highest = _highest_epoch(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("BEGIN IMMEDIATE")
        schema = "SELECT type, name FROM sqlite_schema WHERE name NOT LIKE 'sqlite_%' AND type IN ('table', 'view')"
        for kind, name in connection.execute(f"{schema} ORDER BY type DESC").fetchall():  # views before tables
            connection.execute(f'DROP {kind} "{name}"')
        connection.execute(STATE_DDL)
        self._put_meta(connection, **self._meta_with(highest))
        connection.execute("COMMIT")

    def _start_over(self) -> None:
        """Replace the file by one that holds the highest epoch alone, durably."""
        self._highest_epoch = max(self._highest_epoch, self._readable_epoch())
        self._close()
        fresh = f"{self.path}.new"
        _unlink(fresh, *(f"{fresh}{suffix}" for suffix in BESIDE))
        if self._highest_epoch >= 0:
            with contextlib.closing(apsw.Connection(fresh)) as connection:
                self._create_tables(connection)
        _unlink(*(f"{self.path}{suffix}" for suffix in BESIDE))  # a log must not meet another file
        if self._highest_epoch >= 0:
            os.replace(fresh, self.path)
        else:
            _unlink(self.path)
        sync_directory(self.path.parent)

    def _readable_epoch(self) -> int:
        """The highest epoch in a file that is damaged elsewhere; -1 when it cannot be read, or is another log's."""
        try:
            with contextlib.closing(apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READWRITE)) as connection:
                meta = dict(connection.execute("SELECT key, value FROM meta"))
                is_ours = self.identity.as_meta().items() <= meta.items()
                return _highest_epoch(connection) if is_ours else -1
        except (apsw.Error, TypeError, ValueError):
            return -1

    @staticmethod
    def _put_meta(connection: apsw.Connection, **values: Any) -> None:
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())


def _unlink(*paths: str | Path) -> None:
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _highest_epoch(connection: apsw.Connection) -> int:
    found = connection.execute("SELECT value FROM meta WHERE key = 'highest_leader_epoch'").get
    return -1 if found is None else int(found)
