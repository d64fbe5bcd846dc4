"""The tables of `state.sqlite`: a partition's fold laid out for people, and read back unchanged.

`position` columns keep the order of the fold's lists. Saves are incremental: the common part of a list and its saved
rows stays, so one commit a second does not rewrite fifty thousand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import takewhile, zip_longest
from typing import Any

import apsw
import msgspec

from portalmq.broker.core.fold import (
    HELD_MS,
    DeadFold,
    GroupFold,
    PartitionFold,
    PauseFold,
    ProducerFold,
    SpanFold,
    StreamFold,
)

_NOW_MS = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"

# The tables that hold lists: their columns after the owner and the position. The owner is a group's name, or "" for the
# partition.
_LISTS = {
    "cursors": ("lane INTEGER", "due_ms INTEGER", "offset INTEGER"),
    "ahead": ("lane INTEGER", "due_ms INTEGER", "offset INTEGER"),
    "dead_ranges": ("start_offset INTEGER", "end_offset INTEGER", "deliveries INTEGER", "dead_at_ms INTEGER")
    + ("reason TEXT", "lane INTEGER", "earlier INTEGER"),
    "commits": ("commit_id BLOB", "record_offset INTEGER"),
    "pauses": ("number INTEGER", "paused INTEGER", "since_ms INTEGER", "reason TEXT", "paused_by TEXT"),
    "stream_commits": ("commit_id BLOB", "record_offset INTEGER"),
    "outbox": ("record_offset INTEGER", "group_name TEXT"),
    "cancelled": ("start_offset INTEGER", "end_offset INTEGER"),
}
_OWNER = dict.fromkeys(_LISTS, "group_name") | {"outbox": "scope", "cancelled": "scope"}


def _list_table(table: str) -> str:
    columns = (f"{_OWNER[table]} TEXT", "position INTEGER", *_LISTS[table])
    lines = [*(f"{column} NOT NULL" for column in columns), f"PRIMARY KEY ({_OWNER[table]}, position)"]
    return f"CREATE TABLE {table} (\n    " + ",\n    ".join(lines) + "\n) WITHOUT ROWID;\n"


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
    lane            INTEGER NOT NULL,
    earlier         INTEGER NOT NULL,
    holder          TEXT NOT NULL,
    leader_epoch    INTEGER NOT NULL,
    PRIMARY KEY (group_name, start_offset)
) WITHOUT ROWID;

CREATE TABLE attempts (
    group_name   TEXT NOT NULL,
    position     INTEGER NOT NULL,
    attempt_id   TEXT NOT NULL,
    deadline_ms  INTEGER NOT NULL,
    leader_epoch INTEGER,
    PRIMARY KEY (group_name, position)
) WITHOUT ROWID;

CREATE TABLE attempt_ranges (
    group_name   TEXT NOT NULL,
    attempt_id   TEXT NOT NULL,
    position     INTEGER NOT NULL,
    start_offset INTEGER NOT NULL,
    end_offset   INTEGER NOT NULL,
    lease        INTEGER,
    PRIMARY KEY (group_name, attempt_id, position)
) WITHOUT ROWID;

CREATE TABLE stream_offsets (
    group_name                TEXT PRIMARY KEY,
    position                  INTEGER NOT NULL,
    committed_offset          INTEGER NOT NULL,
    committed_messages_before INTEGER,
    generation                INTEGER NOT NULL,
    member                    TEXT NOT NULL,
    last_active_ms            INTEGER NOT NULL
) WITHOUT ROWID;

{"".join(map(_list_table, _LISTS))}
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
FROM spans WHERE NOT leased AND available_at_ms > {_NOW_MS} AND available_at_ms < {HELD_MS};

CREATE VIEW dead AS
SELECT group_name, start_offset, end_offset, end_offset - start_offset AS messages, deliveries, reason, dead_at_ms
FROM dead_ranges;

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

CREATE VIEW streams AS
SELECT s.group_name, s.committed_offset, s.generation, s.member, h.value AS high_watermark,
       max(0, m.value - s.committed_messages_before) AS lag
FROM stream_offsets AS s
JOIN meta AS h ON h.key = 'high_watermark'
JOIN meta AS m ON m.key = 'high_watermark_messages_before';
"""

_LISTS_OF_A_GROUP = ("cursors", "ahead", "dead_ranges", "commits", "pauses")
_TABLES_OF_A_GROUP = ("groups", "spans", "attempts", "attempt_ranges")

CountBelow = Callable[[int], int]


class FoldTables:
    """A writer of folds into one file's tables, which remembers the content of the file."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget the content of the file: the next save replaces all of it."""
        # Hashes of the encoded groups, streams and producers in the file.
        self._groups: dict[str, bytes] = {}
        self._streams: dict[str, bytes] = {}
        self._producers: dict[int, bytes] = {}
        # (table, owner) -> (position of the first row, the rows)
        self._lists: dict[tuple[str, str], tuple[int, Sequence[Any]]] = {}
        self._is_known = False

    def save(self, connection: apsw.Connection, fold: PartitionFold, messages_before: CountBelow | None) -> None:
        """Replace the content of the tables by `fold`, within the running transaction. Call `forget` if that fails."""
        if not self._is_known:
            for table in (*_TABLES_OF_A_GROUP, "producers", "producer_batches", "stream_offsets", *_LISTS):
                connection.execute(f"DELETE FROM {table}")
        self._is_known = True
        self._save_epochs(connection, fold.epochs)
        self._save_producers(connection, fold.producers)
        self._save_groups(connection, fold.groups, messages_before)
        self._save_streams(connection, fold.streams, messages_before)
        self._save_list(connection, "outbox", "", fold.outbox)
        self._save_list(connection, "cancelled", "", fold.cancelled)

    @staticmethod
    def _save_epochs(connection: apsw.Connection, epochs: list[tuple[int, int]]) -> None:
        saved = connection.execute("SELECT leader_epoch, start_offset FROM epochs ORDER BY leader_epoch").fetchall()
        if saved != epochs:
            connection.execute("DELETE FROM epochs")
            connection.executemany("INSERT INTO epochs VALUES (?, ?)", epochs)

    def _save_producers(self, connection: apsw.Connection, producers: list[ProducerFold]) -> None:
        present: dict[int, bytes] = {}
        for position, producer in enumerate(producers):
            number = producer.producer_id
            present[number] = _hash_of((position, producer))
            if self._producers.get(number) == present[number]:
                continue
            connection.execute("DELETE FROM producer_batches WHERE producer_id = ?", (number,))
            connection.execute("INSERT OR REPLACE INTO producers VALUES (?, ?, ?)", (number, position, producer.epoch))
            connection.executemany(
                "INSERT INTO producer_batches VALUES (?, ?, ?, ?, ?, ?)",
                ((number, index, *batch) for index, batch in enumerate(producer.batches)),
            )
        for number in self._producers.keys() - present.keys():
            connection.execute("DELETE FROM producers WHERE producer_id = ?", (number,))
            connection.execute("DELETE FROM producer_batches WHERE producer_id = ?", (number,))
        self._producers = present

    def _save_groups(
        self, connection: apsw.Connection, groups: list[GroupFold], messages_before: CountBelow | None
    ) -> None:
        present: dict[str, bytes] = {}
        for position, group in enumerate(groups):
            name, counted = group.group, messages_before is not None
            present[name] = _hash_of(
                (position, counted, group.start, group.next, group.last_active_ms, group.spans, group.attempts)
            )
            if self._groups.get(name) != present[name]:
                _delete_group(connection, name)
                _insert_group(connection, position, group, messages_before(group.next) if messages_before else None)
            rows: tuple[Sequence[Any], ...] = (group.cursors, group.ahead, group.dead, group.commits, group.pauses)
            for table, wanted in zip(_LISTS_OF_A_GROUP, rows, strict=True):
                self._save_list(connection, table, name, wanted)
        for name in self._groups.keys() - present.keys():
            _delete_group(connection, name)
            for table in _LISTS_OF_A_GROUP:
                self._save_list(connection, table, name, ())
        self._groups = present

    def _save_streams(
        self, connection: apsw.Connection, streams: list[StreamFold], messages_before: CountBelow | None
    ) -> None:
        present: dict[str, bytes] = {}
        for position, stream in enumerate(streams):
            name, committed = stream.group, stream.committed
            before = messages_before(committed) if messages_before else None
            row = (name, position, committed, before, stream.generation, stream.member, stream.last_active_ms)
            present[name] = _hash_of(row)
            if self._streams.get(name) != present[name]:
                connection.execute("INSERT OR REPLACE INTO stream_offsets VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._save_list(connection, "stream_commits", name, stream.commits)
        for name in self._streams.keys() - present.keys():
            connection.execute("DELETE FROM stream_offsets WHERE group_name = ?", (name,))
            self._save_list(connection, "stream_commits", name, ())
        self._streams = present

    def _save_list(self, connection: apsw.Connection, table: str, owner: str, rows: Sequence[Any]) -> None:
        """Update a list's rows. Lists lose rows in front and gain some at the end; the rows between stay in the
        file."""
        first, saved = self._lists.get((table, owner), (0, ()))
        if not rows and not saved:
            return
        dropped = saved.index(rows[0]) if rows and rows[0] in saved else len(saved)
        kept = sum(1 for _ in takewhile(bool, map(_equal, saved[dropped:], rows)))
        where = f"DELETE FROM {table} WHERE {_OWNER[table]} = ? AND position"
        if dropped:
            connection.execute(f"{where} < ?", (owner, first + dropped))
        first += dropped
        if len(saved) > dropped + kept:
            connection.execute(f"{where} >= ?", (owner, first + kept))
        if len(rows) > kept:
            connection.executemany(
                f"INSERT INTO {table} VALUES (?, ?{', ?' * len(_LISTS[table])})",
                ((owner, first + at, *_values(rows[at])) for at in range(kept, len(rows))),
            )
        if rows:
            self._lists[table, owner] = (first, tuple(rows))
        else:
            self._lists.pop((table, owner), None)


def _equal(left: Any, right: Any) -> bool:
    return bool(left == right)


def _values(row: Any) -> tuple[Any, ...]:
    return msgspec.structs.astuple(row) if isinstance(row, msgspec.Struct) else row


def _hash_of(value: Any) -> bytes:
    return hash_of_bytes(msgspec.msgpack.encode(value))


def hash_of_bytes(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


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
        "INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        ((name, *msgspec.structs.astuple(span)) for span in group.spans),
    )
    connection.executemany(
        "INSERT INTO attempts VALUES (?, ?, ?, ?, ?)",
        (
            (name, index, attempt, deadline, group.attempt_leases.get(attempt, (None,))[0])
            for index, (attempt, (deadline, _)) in enumerate(group.attempts.items())
        ),
    )
    connection.executemany(
        "INSERT INTO attempt_ranges VALUES (?, ?, ?, ?, ?, ?)",
        (
            (name, attempt, index, start, end, lease)
            for attempt, (_, ranges) in group.attempts.items()
            for index, ((start, end), lease) in enumerate(
                zip_longest(ranges, group.attempt_leases.get(attempt, (0, ()))[1])
            )
        ),
    )


# --- reading ---------------------------------------------------------------------------------------------------------


def read_bare_fold(connection: apsw.Connection, meta: dict[str, Any]) -> PartitionFold:
    """Return the fold of a log without groups and producers: in a tenth of the time."""
    return PartitionFold(
        applied=meta["applied"],
        log_start_offset=meta["log_start_offset"],
        epochs=[
            (epoch, start)
            for epoch, start in connection.execute(
                "SELECT leader_epoch, start_offset FROM epochs ORDER BY leader_epoch"
            )
        ],
        compacted=meta["compacted"],
    )


def read_fold(connection: apsw.Connection, meta: dict[str, Any]) -> PartitionFold:
    """Return the fold in the tables. Raise KeyError, TypeError or ValueError if they do not fit together."""
    fold = read_bare_fold(connection, meta)
    fold.producers = _read_producers(connection)
    fold.groups = _read_groups(connection)
    fold.streams = _read_streams(connection)
    fold.outbox = [(offset, group) for _, _, offset, group in _rows(connection, "outbox")]
    fold.cancelled = [(start, end) for _, _, start, end in _rows(connection, "cancelled")]
    return fold


def _rows(connection: apsw.Connection, table: str) -> Iterable[tuple[Any, ...]]:
    """Return the rows (owner, position, columns ...) of one of the list tables, in order."""
    return connection.execute(f"SELECT * FROM {table} ORDER BY {_OWNER[table]}, position")


def _read_producers(connection: apsw.Connection) -> list[ProducerFold]:
    producers = {
        number: ProducerFold(number, epoch, [])
        for number, epoch in connection.execute("SELECT producer_id, epoch FROM producers ORDER BY position")
    }
    for number, *batch in connection.execute(
        "SELECT producer_id, sequence, count, base_offset, appended_at_ms FROM producer_batches"
        " ORDER BY producer_id, position"
    ):
        producers[number].batches.append((batch[0], batch[1], batch[2], batch[3]))
    return list(producers.values())


def _read_groups(connection: apsw.Connection) -> list[GroupFold]:
    groups = {
        name: GroupFold(name, start, next_offset, [], {}, last_active_ms, attempt_leases={})
        for name, start, next_offset, last_active_ms in connection.execute(
            "SELECT group_name, start_offset, next_offset, last_active_ms FROM groups ORDER BY position"
        )
    }
    for name, start, end, deliveries, expiries, leased, *rest in connection.execute(
        "SELECT * FROM spans ORDER BY group_name, start_offset"
    ):
        groups[name].spans.append(SpanFold(start, end, deliveries, expiries, bool(leased), *rest))
    for name, attempt, deadline_ms, leader_epoch in connection.execute(
        "SELECT group_name, attempt_id, deadline_ms, leader_epoch FROM attempts ORDER BY group_name, position"
    ):
        groups[name].attempts[attempt] = (deadline_ms, [])
        if leader_epoch is not None:
            groups[name].attempt_leases[attempt] = (leader_epoch, [])
    for name, attempt, start, end, lease in connection.execute(
        "SELECT group_name, attempt_id, start_offset, end_offset, lease FROM attempt_ranges"
        " ORDER BY group_name, attempt_id, position"
    ):
        groups[name].attempts[attempt][1].append((start, end))
        if lease is not None:
            groups[name].attempt_leases[attempt][1].append(lease)
    for name, _, lane, due_ms, offset in _rows(connection, "cursors"):
        groups[name].cursors.append((lane, due_ms, offset))
    for name, _, lane, due_ms, offset in _rows(connection, "ahead"):
        groups[name].ahead.append((lane, due_ms, offset))
    for name, _, *row in _rows(connection, "dead_ranges"):
        groups[name].dead.append(DeadFold(*row))
    for name, _, commit_id, record in _rows(connection, "commits"):
        groups[name].commits.append((commit_id, record))
    for name, _, number, paused, *rest in _rows(connection, "pauses"):
        groups[name].pauses.append(PauseFold(number, bool(paused), *rest))
    return list(groups.values())


def _read_streams(connection: apsw.Connection) -> list[StreamFold]:
    streams = {
        name: StreamFold(name, committed, generation, member, last_active_ms)
        for name, committed, generation, member, last_active_ms in connection.execute(
            "SELECT group_name, committed_offset, generation, member, last_active_ms FROM stream_offsets"
            " ORDER BY position"
        )
    }
    for name, _, commit_id, record in _rows(connection, "stream_commits"):
        streams[name].commits.append((commit_id, record))
    return list(streams.values())
