"""The fold of a partition's log, at rest and in plain tables: `state.sqlite` beside the segments.

It is a cache with one exception: lost or damaged, it is rebuilt from the newest STATE record and the log behind it, and
so an ordinary save does not wait for the disk. The exception is the highest leader epoch that this replica has seen,
which must never be forgotten: it is fsynced. (And the save before a reset of the log is: until the first STATE record
behind it is replicated, it alone knows the leader epochs that were begun below.)

    meta                        identity, schema_version, applied, log_start_offset, high_watermark,
                                high_watermark_messages_before, highest_leader_epoch, digest
    epochs                      leader_epoch, start_offset
    producers                   producer_id, epoch
    producer_batches            the last batches of each: sequence, count, base_offset, appended_at_ms
    groups                      start_offset, next_offset, next_messages_before, last_active_ms
    spans                       [start_offset, end_offset) handed out and not done
    attempts, attempt_ranges    receives that may be repeated, with what they were given
    ready, in_flight, scheduled, dead, lag      views for people

`position` columns keep the order of the fold's lists. `digest` is a hash of the whole fold: a file that was half
written, or meddled with, does not match it and counts as damaged. Saves are incremental: only the groups and producers
that changed since the last one are written.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import apsw
import msgspec

from portalmq.broker.core.fold import GroupFold, PartitionFold, ProducerFold, SpanFold, encode_fold
from portalmq.broker.storage.errors import faults_of
from portalmq.broker.storage.files import make_directory
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.turn import Turn

STATE_NAME = "state.sqlite"
STATE_SCHEMA_VERSION = 1

_NOW_MS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

STATE_DDL = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;

CREATE TABLE epochs (leader_epoch INTEGER PRIMARY KEY, start_offset INTEGER NOT NULL);

CREATE TABLE producers (producer_id INTEGER PRIMARY KEY, position INTEGER NOT NULL, epoch INTEGER NOT NULL);

CREATE TABLE producer_batches (
    producer_id    INTEGER NOT NULL,
    position       INTEGER NOT NULL,
    sequence       INTEGER NOT NULL,
    count          INTEGER NOT NULL,
    base_offset    INTEGER NOT NULL,
    appended_at_ms INTEGER NOT NULL,
    PRIMARY KEY (producer_id, position)
) WITHOUT ROWID;

CREATE TABLE groups (
    group_name           TEXT PRIMARY KEY,
    position             INTEGER NOT NULL,
    start_offset         INTEGER NOT NULL,
    next_offset          INTEGER NOT NULL,
    next_messages_before INTEGER,
    last_active_ms       INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE spans (
    group_name      TEXT NOT NULL,
    start_offset    INTEGER NOT NULL,
    end_offset      INTEGER NOT NULL,
    deliveries      INTEGER NOT NULL,
    expiries        INTEGER NOT NULL,
    leased          INTEGER NOT NULL,
    granted_at_ms   INTEGER NOT NULL,
    available_at_ms INTEGER NOT NULL,
    PRIMARY KEY (group_name, start_offset)
) WITHOUT ROWID;

CREATE TABLE attempts (
    group_name  TEXT NOT NULL,
    position    INTEGER NOT NULL,
    attempt_id  TEXT NOT NULL,
    deadline_ms INTEGER NOT NULL,
    PRIMARY KEY (group_name, position)
) WITHOUT ROWID;

CREATE TABLE attempt_ranges (
    group_name   TEXT NOT NULL,
    attempt_id   TEXT NOT NULL,
    position     INTEGER NOT NULL,
    start_offset INTEGER NOT NULL,
    end_offset   INTEGER NOT NULL,
    PRIMARY KEY (group_name, attempt_id, position)
) WITHOUT ROWID;

CREATE VIEW ready AS
SELECT group_name, start_offset, end_offset, deliveries FROM spans WHERE available_at_ms <= {_NOW_MS}
UNION ALL
SELECT g.group_name, g.next_offset, h.value, 0
FROM groups AS g JOIN meta AS h ON h.key = 'high_watermark' WHERE g.next_offset < h.value;

CREATE VIEW in_flight AS
SELECT group_name, start_offset, end_offset, end_offset - start_offset AS messages, deliveries, granted_at_ms,
       available_at_ms AS lease_expires_at_ms
FROM spans WHERE leased AND available_at_ms > {_NOW_MS};

CREATE VIEW scheduled AS
SELECT group_name, start_offset, end_offset, deliveries, available_at_ms
FROM spans WHERE NOT leased AND available_at_ms > {_NOW_MS};

CREATE VIEW dead AS
SELECT NULL AS group_name, NULL AS offset, NULL AS deliveries, NULL AS reason, NULL AS dead_at_ms WHERE 0;

CREATE VIEW lag AS
SELECT g.group_name, g.next_offset, h.value AS high_watermark,
       m.value - g.next_messages_before AS never_delivered,
       coalesce((SELECT sum(s.end_offset - s.start_offset) FROM spans AS s WHERE s.group_name = g.group_name), 0)
           AS not_done,
       m.value - g.next_messages_before
           + coalesce((SELECT sum(s.end_offset - s.start_offset) FROM spans AS s WHERE s.group_name = g.group_name), 0)
           AS lag
FROM groups AS g
JOIN meta AS h ON h.key = 'high_watermark'
JOIN meta AS m ON m.key = 'high_watermark_messages_before';
"""

_TABLES_OF_A_GROUP = ("groups", "spans", "attempts", "attempt_ranges")


class _Damaged(Exception):
    """The file is not, or no longer, the state of this log."""


class StateFile:
    """Saves and loads the fold of one partition. Callers on several threads wait for each other."""

    def __init__(self, directory: Path, *, identity: LogIdentity) -> None:
        self.path = directory / STATE_NAME
        self.identity = identity
        self._connection: apsw.Connection | None = None
        self._turn = Turn()
        self._closed = False
        # What the file holds of each group and producer, as hashes of their encoding.
        self._saved_groups: dict[str, bytes] = {}
        self._saved_producers: dict[int, bytes] = {}

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
            self._save_epochs(connection, fold.epochs)
            self._save_producers(connection, fold.producers)
            self._save_groups(connection, fold.groups, messages_before)
            self._put_meta(
                connection,
                applied=fold.applied,
                log_start_offset=fold.log_start_offset,
                high_watermark=high_watermark,
                high_watermark_messages_before=messages_before(high_watermark) if messages_before else None,
                digest=_digest(encode_fold(fold)),
            )

        with self._turn:
            if not self._closed:  # the topic was deleted, or the broker ends, while this waited for a thread
                self._transaction(write, durable=durable)

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
                fold = _read_fold(connection, meta)
                if _digest(encode_fold(fold)) != meta["digest"]:
                    raise _Damaged
            except (_Damaged, apsw.CorruptError, apsw.NotADBError, apsw.SQLError, KeyError, TypeError, ValueError):
                self._close()
                return None
            self._saved_groups, self._saved_producers = {}, {}
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
            self._put_meta(connection, highest_leader_epoch=max(leader_epoch, _highest_epoch(connection)))

        with self._turn:
            self._transaction(write, durable=True)

    def highest_epoch(self) -> int:
        """The highest leader epoch that was saved, -1 when there is none."""
        with self._turn, faults_of(self.path):
            if not self.path.exists():
                return -1
            try:
                return _highest_epoch(self._open())
            except (_Damaged, apsw.CorruptError, apsw.NotADBError, apsw.SQLError):
                self._close()
                return -1

    def park(self) -> None:
        """Closes the file until it is used again."""
        with self._turn:
            self._close()

    def close(self) -> None:
        """Closes the file for good: a save that comes later does nothing."""
        with self._turn:
            self._closed = True
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
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
            self._saved_groups, self._saved_producers = {}, {}
            raise

    def _open(self) -> apsw.Connection:
        """The connection to a file of this log; raises _Damaged for any other."""
        if self._connection is not None:
            return self._connection
        make_directory(self.path.parent)
        connection = apsw.Connection(str(self.path))
        try:
            connection.set_busy_timeout(5_000)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA trusted_schema = OFF")
            if connection.execute("SELECT count(*) FROM sqlite_schema").get == 0:
                self._create_tables(connection)
            expected = {**self.identity.as_meta(), "schema_version": STATE_SCHEMA_VERSION}
            meta = dict(connection.execute("SELECT key, value FROM meta"))
            if {key: meta.get(key) for key in expected} != expected:
                raise _Damaged
        except BaseException:
            connection.close(True)
            raise
        self._saved_groups, self._saved_producers = {}, {}
        self._connection = connection
        return connection

    def _create_tables(self, connection: apsw.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(STATE_DDL)
        self._put_meta(connection, **self.identity.as_meta(), schema_version=STATE_SCHEMA_VERSION)
        connection.execute("COMMIT")

    def _start_over(self) -> None:
        self._close()
        for suffix in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{self.path}{suffix}")

    # --- the tables ---------------------------------------------------------------------------------------------

    @staticmethod
    def _put_meta(connection: apsw.Connection, **values: Any) -> None:
        connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    @staticmethod
    def _save_epochs(connection: apsw.Connection, epochs: list[tuple[int, int]]) -> None:
        saved = connection.execute("SELECT leader_epoch, start_offset FROM epochs ORDER BY leader_epoch").fetchall()
        if saved != epochs:
            connection.execute("DELETE FROM epochs")
            connection.executemany("INSERT INTO epochs VALUES (?, ?)", epochs)

    def _save_producers(self, connection: apsw.Connection, producers: list[ProducerFold]) -> None:
        if not self._saved_producers:
            connection.execute("DELETE FROM producers")
            connection.execute("DELETE FROM producer_batches")
        present: dict[int, bytes] = {}
        for position, producer in enumerate(producers):
            number = producer.producer_id
            present[number] = _digest(msgspec.msgpack.encode((position, producer)))
            if self._saved_producers.get(number) == present[number]:
                continue
            connection.execute("DELETE FROM producer_batches WHERE producer_id = ?", (number,))
            connection.execute("INSERT OR REPLACE INTO producers VALUES (?, ?, ?)", (number, position, producer.epoch))
            connection.executemany(
                "INSERT INTO producer_batches VALUES (?, ?, ?, ?, ?, ?)",
                ((number, index, *batch) for index, batch in enumerate(producer.batches)),
            )
        for number in self._saved_producers.keys() - present.keys():
            connection.execute("DELETE FROM producers WHERE producer_id = ?", (number,))
            connection.execute("DELETE FROM producer_batches WHERE producer_id = ?", (number,))
        self._saved_producers = present

    def _save_groups(
        self, connection: apsw.Connection, groups: list[GroupFold], messages_before: Callable[[int], int] | None
    ) -> None:
        if not self._saved_groups:
            for table in _TABLES_OF_A_GROUP:
                connection.execute(f"DELETE FROM {table}")
        present: dict[str, bytes] = {}
        for position, group in enumerate(groups):
            counted = messages_before is not None
            present[group.group] = _digest(msgspec.msgpack.encode((position, counted, group)))
            if self._saved_groups.get(group.group) != present[group.group]:
                _delete_group(connection, group.group)
                _insert_group(connection, position, group, messages_before(group.next) if messages_before else None)
        for name in self._saved_groups.keys() - present.keys():
            _delete_group(connection, name)
        self._saved_groups = present


def _delete_group(connection: apsw.Connection, name: str) -> None:
    for table in _TABLES_OF_A_GROUP:
        connection.execute(f"DELETE FROM {table} WHERE group_name = ?", (name,))


def _insert_group(
    connection: apsw.Connection, position: int, group: GroupFold, next_messages_before: int | None
) -> None:
    name = group.group
    connection.execute(
        "INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?)",
        (name, position, group.start, group.next, next_messages_before, group.last_active_ms),
    )
    connection.executemany(
        "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        ((name, *msgspec.structs.astuple(span)) for span in group.spans),
    )
    connection.executemany(
        "INSERT INTO attempts VALUES (?, ?, ?, ?)",
        ((name, index, attempt, deadline) for index, (attempt, (deadline, _)) in enumerate(group.attempts.items())),
    )
    connection.executemany(
        "INSERT INTO attempt_ranges VALUES (?, ?, ?, ?, ?)",
        (
            (name, attempt, index, start, end)
            for attempt, (_, ranges) in group.attempts.items()
            for index, (start, end) in enumerate(ranges)
        ),
    )


def _read_fold(connection: apsw.Connection, meta: dict[str, Any]) -> PartitionFold:
    producers = {
        number: ProducerFold(number, epoch, [])
        for number, epoch in connection.execute("SELECT producer_id, epoch FROM producers ORDER BY position")
    }
    for number, *batch in connection.execute(
        "SELECT producer_id, sequence, count, base_offset, appended_at_ms FROM producer_batches"
        " ORDER BY producer_id, position"
    ):
        producers[number].batches.append((batch[0], batch[1], batch[2], batch[3]))
    groups = {
        name: GroupFold(name, start, next_offset, [], {}, last_active_ms)
        for name, start, next_offset, last_active_ms in connection.execute(
            "SELECT group_name, start_offset, next_offset, last_active_ms FROM groups ORDER BY position"
        )
    }
    for name, start, end, deliveries, expiries, leased, granted_at_ms, available_at_ms in connection.execute(
        "SELECT * FROM spans ORDER BY group_name, start_offset"
    ):
        groups[name].spans.append(
            SpanFold(start, end, deliveries, expiries, bool(leased), granted_at_ms, available_at_ms)
        )
    for name, attempt, deadline_ms in connection.execute(
        "SELECT group_name, attempt_id, deadline_ms FROM attempts ORDER BY group_name, position"
    ):
        groups[name].attempts[attempt] = (deadline_ms, [])
    for name, attempt, start, end in connection.execute(
        "SELECT group_name, attempt_id, start_offset, end_offset FROM attempt_ranges"
        " ORDER BY group_name, attempt_id, position"
    ):
        groups[name].attempts[attempt][1].append((start, end))
    return PartitionFold(
        applied=meta["applied"],
        log_start_offset=meta["log_start_offset"],
        epochs=[
            (epoch, start)
            for epoch, start in connection.execute(
                "SELECT leader_epoch, start_offset FROM epochs ORDER BY leader_epoch"
            )
        ],
        producers=list(producers.values()),
        groups=list(groups.values()),
    )


def _highest_epoch(connection: apsw.Connection) -> int:
    found = connection.execute("SELECT value FROM meta WHERE key = 'highest_leader_epoch'").get
    return -1 if found is None else int(found)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
