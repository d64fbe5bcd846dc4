"""The effect of a message and the record that it was handled, in one database transaction.

A message may be delivered twice. If its effect is a row in a database, the same transaction can record that the message
was handled: a second delivery finds the record, and does nothing.

    with TransactionalSink(connection, group="billing") as sink:
        for message in consumer:
            with sink.handle(message) as cursor:
                if cursor is not None:
                    cursor.execute("INSERT INTO bills …", …)

Works with any DB-API 2.0 connection (PEP 249) whose paramstyle is qmark, format, pyformat, numeric or named, and whose
database supports ON CONFLICT (SQLite 3.24, PostgreSQL 9.5) and opens a transaction implicitly until commit().

    portalmq_handled   a row for each message that a queue group has handled: (consumer_group, topic, partition,
                       message_offset, timestamp_ms), and when
    portalmq_places    of a stream group: (consumer_group, topic, partition) -> next_offset; all below is handled

The newest 200,000 rows of handled messages are kept for each partition, in the order of handling: an unacked message
comes again before so many others are handled.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self

from portalmq.message import Message

HANDLED_KEPT = 200_000
# Old rows are deleted once in so many messages.
PRUNED_EVERY = 1_000
PARAMETERS_MAX = 9

ParamStyle = Literal["qmark", "format", "pyformat", "numeric", "named"]
# The mark of a parameter (PEP 249), from its number and the one after.
_MARKS = {"qmark": "?", "format": "%s", "pyformat": "%(p{0})s", "numeric": ":{1}", "named": ":p{0}"}

_TABLES = (
    """CREATE TABLE IF NOT EXISTS portalmq_handled (
        consumer_group VARCHAR(190) NOT NULL, topic VARCHAR(190) NOT NULL, partition INTEGER NOT NULL,
        message_offset BIGINT NOT NULL, timestamp_ms BIGINT NOT NULL, handled_us BIGINT NOT NULL,
        PRIMARY KEY (consumer_group, topic, partition, message_offset, timestamp_ms))""",
    """CREATE INDEX IF NOT EXISTS portalmq_handled_in_order
        ON portalmq_handled (consumer_group, topic, partition, handled_us)""",
    """CREATE TABLE IF NOT EXISTS portalmq_places (
        consumer_group VARCHAR(190) NOT NULL, topic VARCHAR(190) NOT NULL, partition INTEGER NOT NULL,
        next_offset BIGINT NOT NULL, PRIMARY KEY (consumer_group, topic, partition))""",
)
# The timestamp is part of the key: a topic that is deleted and created again repeats its offsets. Each row is
# later than those before it: the clocks of the clients may differ, and the oldest rows are deleted.
_CLAIM = (
    "INSERT INTO portalmq_handled (consumer_group, topic, partition, message_offset, timestamp_ms, handled_us)"
    " VALUES ({0}, {1}, {2}, {3}, {4}, (SELECT MAX(at_us) FROM (SELECT {5} AS at_us"
    " UNION ALL SELECT MAX(handled_us) + 1 FROM portalmq_handled"
    " WHERE consumer_group = {6} AND topic = {7} AND partition = {8}) AS moments)) ON CONFLICT DO NOTHING"
)
_OLDEST_KEPT = (
    "SELECT handled_us FROM portalmq_handled WHERE consumer_group = {0} AND topic = {1} AND partition = {2}"
    " ORDER BY handled_us DESC LIMIT 1 OFFSET {3}"
)
_PRUNE = (
    "DELETE FROM portalmq_handled WHERE consumer_group = {0} AND topic = {1} AND partition = {2} AND handled_us <= {3}"
)
_FORGET_HANDLED = "DELETE FROM portalmq_handled WHERE consumer_group = {0} AND topic = {1}"
_FORGET_PLACES = "DELETE FROM portalmq_places WHERE consumer_group = {0} AND topic = {1}"
# Only forward: a member that lags behind, perhaps one that lost its partition, changes no row.
_ADVANCE = (
    "INSERT INTO portalmq_places (consumer_group, topic, partition, next_offset) VALUES ({0}, {1}, {2}, {3})"
    " ON CONFLICT (consumer_group, topic, partition) DO UPDATE SET next_offset = excluded.next_offset"
    " WHERE portalmq_places.next_offset < excluded.next_offset"
)
_PLACE = "SELECT next_offset FROM portalmq_places WHERE consumer_group = {0} AND topic = {1} AND partition = {2}"


class Cursor(Protocol):
    """The used part of a DB-API cursor; `rowcount` is the number of rows that the last statement changed."""

    @property
    def rowcount(self) -> int: ...
    def execute(self, statement: str, parameters: Any = ..., /) -> Any: ...
    def fetchone(self) -> Any: ...
    def close(self) -> Any: ...


class DatabaseConnection(Protocol):
    def cursor(self) -> Any: ...
    def commit(self) -> Any: ...
    def rollback(self) -> Any: ...


class TransactionalSink:
    """Runs the effect of each message once, in one transaction with the record that it ran. For one thread at a time,
    on a connection without other open transactions."""

    def __init__(
        self,
        connection: DatabaseConnection,
        *,
        group: str = "default",
        mode: Literal["queue", "stream"] = "queue",
        paramstyle: ParamStyle | None = None,
        handled_kept: int = HANDLED_KEPT,
    ) -> None:
        """`mode` is that of the group: for a stream group, which reads each partition in order, one offset a partition
        is stored; for a queue group each message. `paramstyle` defaults to that of the connection's module."""
        if handled_kept < 1:
            raise ValueError(f"handled_kept={handled_kept} must be at least 1")
        self.group = group
        self._connection = connection
        self._mode = mode
        style = paramstyle or _paramstyle_of(connection)
        if style not in _MARKS:
            raise ValueError(f"paramstyle={style!r}: use one of {', '.join(_MARKS)}")
        self._marks = [_MARKS[style].format(number, number + 1) for number in range(PARAMETERS_MAX)]
        self._by_name = style in {"pyformat", "named"}
        self._kept = handled_kept
        self._since_pruned: dict[tuple[str, int], int] = {}
        cursor = connection.cursor()
        for table in _TABLES:
            cursor.execute(table)
        cursor.close()
        connection.commit()

    @contextmanager
    def handle(self, message: Message) -> Iterator[Any]:
        """Yield a cursor for the effect of `message`, or None if it was handled before. Its writes are committed with
        the record at the end; both are rolled back if the body raises.

        Ack the message (or commit its offset) after this block: then a crash in between costs a second delivery, which
        does nothing.
        """
        cursor: Cursor = self._connection.cursor()
        try:
            is_new = self._note(cursor, message)
            yield cursor if is_new else None
            self._connection.commit()
        except BaseException:
            self._connection.rollback()
            raise
        finally:
            cursor.close()

    def next_offset(self, topic: str, partition: int) -> int | None:
        """Return the next offset of a stream group, or None if nothing was handled yet."""
        cursor: Cursor = self._connection.cursor()
        try:
            self._execute(cursor, _PLACE, self.group, topic, partition)
            row = cursor.fetchone()
            return None if row is None else int(row[0])
        finally:
            cursor.close()
            self._connection.rollback()

    def forget(self, topic: str) -> None:
        """Delete the records of a topic: it was deleted, or is to be handled again from its beginning."""
        cursor: Cursor = self._connection.cursor()
        for statement in (_FORGET_HANDLED, _FORGET_PLACES):
            self._execute(cursor, statement, self.group, topic)
        cursor.close()
        self._connection.commit()

    def _note(self, cursor: Cursor, message: Message) -> bool:
        """Record that the message is handled; return False if it was before. The row stays locked, so that of two
        transactions that handle one message the second waits, and finds it handled."""
        place = (self.group, message.topic, message.partition)
        if self._mode == "stream":
            self._execute(cursor, _ADVANCE, *place, message.offset + 1)
            return cursor.rowcount == 1
        self._execute(cursor, _CLAIM, *place, message.offset, message.timestamp_ms, time.time_ns() // 1000, *place)
        is_new = cursor.rowcount == 1
        since = self._since_pruned.get(place[1:], 0) + 1
        if since >= PRUNED_EVERY:
            since = 0
            self._execute(cursor, _OLDEST_KEPT, *place, self._kept)
            if (row := cursor.fetchone()) is not None:
                self._execute(cursor, _PRUNE, *place, row[0])
        self._since_pruned[place[1:]] = since
        return is_new

    def _execute(self, cursor: Cursor, statement: str, *values: str | int) -> None:
        parameters = {f"p{number}": value for number, value in enumerate(values)} if self._by_name else values
        cursor.execute(statement.format(*self._marks), parameters)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        """The connection stays open: it is the caller's."""


def _paramstyle_of(connection: DatabaseConnection) -> ParamStyle:
    """Return the paramstyle of the connection's driver."""
    module = type(connection).__module__
    while module:
        style = getattr(sys.modules.get(module), "paramstyle", None)
        if isinstance(style, str):
            return style  # type: ignore[return-value]
        module = module.rpartition(".")[0]
    raise ValueError(
        f"{type(connection).__module__} does not say its paramstyle: give paramstyle='qmark', for instance"
    )
