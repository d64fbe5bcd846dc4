"""One SELECT over the segment files of a broker, in a process of its own.

    stdin    SqlOrder as JSON     the query, its limits, the partitions with what is readable of each
    stdout   SqlAnswer as JSON

A query of a user may take any time and memory, so it gets neither of the broker: the process has limits of both, and
whoever started it kills it. It also opens the files with locks of its own, as every other reader does.

`messages`, `batches` and `group_records` are virtual tables over all files. Conditions on topic, partition, offset and
time choose the files and the rows that are read; all else is SQLite's work on the rows.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw
import msgspec

from portalmq import sql
from portalmq.broker.storage.errors import SCHEMA_DIFFERS

MEMORY_BYTES = 256 * 1024 * 1024
# Python and SQLite need some address space beside what a query may use.
ADDRESS_SPACE_BYTES = 2 * 1024 * 1024 * 1024
ANSWER_BYTES_MAX = 16 * 1024 * 1024
QUERY_BYTES_MAX = 100_000
STEPS_A_CHECK = 20_000
# Of a file, and no fault of the query.
_UNREADABLE = (apsw.FullError, apsw.IOError, apsw.CantOpenError, apsw.BusyError, apsw.CorruptError, apsw.NotADBError)
_READING = (apsw.SQLITE_SELECT, apsw.SQLITE_READ, apsw.SQLITE_FUNCTION, apsw.SQLITE_RECURSIVE)


class PartitionFiles(msgspec.Struct, array_like=True):
    """A replica: its directory, and the offsets that are readable, up to and without `end`."""

    topic: str
    partition: int
    directory: str
    start: int
    end: int


class SqlOrder(msgspec.Struct):
    query: str
    limit: int
    timeout_ms: int
    partitions: list[PartitionFiles]


class SqlAnswer(msgspec.Struct, omit_defaults=True):
    """`refused` is why there is no result: `invalid`, `limit` for one that would be too expensive, or `unreadable` when
    a file cannot be read now."""

    columns: list[str] = []
    rows: list[list[Any]] = []
    truncated: bool = False
    refused: str = ""
    detail: str = ""


class OutOfTime(Exception):
    """The time of the query is over."""


class _Table:
    """A virtual table: its columns after topic and partition, and the SQL that reads them from one segment file."""

    def __init__(self, columns: dict[str, str], source: str, place: str, moment: str) -> None:
        self.columns = ("topic", "partition", *columns)
        self.expressions = tuple(columns.values())
        self.source = source
        self.place = place
        self.moment = moment
        self.schema = f"CREATE TABLE shown ({', '.join(self.columns)})"


_MESSAGES = {
    name: f"m.{name}"
    for name in ("offset", "key", "value", "headers", "timestamp_ms", "deliver_at_ms", "expires_at_ms", "priority")
}
_BATCHES = (
    *("base_offset", "count", "messages_before", "kind", "leader_epoch", "producer_id", "producer_epoch"),
    *("sequence", "appended_at_ms", "crc"),
)
TABLES = {
    "messages": _Table(
        {**_MESSAGES, "content_type": "(SELECT name FROM content_types WHERE id = m.content_type)"},
        "messages AS m",
        "m.offset",
        "m.timestamp_ms",
    ),
    "batches": _Table({name: name for name in _BATCHES}, "main.batches", "base_offset", "appended_at_ms"),
    "group_records": _Table(
        {
            "offset": "r.offset",
            "kind": "r.kind",
            "name": "portalmq_kind(r.kind)",
            "group_name": "r.group_name",
            "appended_at_ms": "(SELECT appended_at_ms FROM main.batches WHERE base_offset = r.offset)",
            "body": "portalmq_body(r.body)",
        },
        "main.records AS r",
        "r.offset",
        "(SELECT appended_at_ms FROM main.batches WHERE base_offset = r.offset)",
    ),
}
KINDS = {
    1: "epoch_start",
    2: "state",
    3: "purge",
    4: "cancelled",
    5: "compaction",
    **dict(enumerate(("group_start", "grant", "ack", "nack", "extend", "group_end", "dead", "redrive", "drop"), 10)),
    **dict(enumerate(("commit", "done", "claim", "commit_offset", "seek"), 19)),
}

_EQ, _GT, _LE = apsw.SQLITE_INDEX_CONSTRAINT_EQ, apsw.SQLITE_INDEX_CONSTRAINT_GT, apsw.SQLITE_INDEX_CONSTRAINT_LE
_LT, _GE = apsw.SQLITE_INDEX_CONSTRAINT_LT, apsw.SQLITE_INDEX_CONSTRAINT_GE
_OPERATORS = {_EQ: "=", _GT: ">", _GE: ">=", _LT: "<", _LE: "<="}


class SegmentFiles:
    """The module of the virtual tables, and the clock of the query."""

    def __init__(self, partitions: list[PartitionFiles], ends_at: float) -> None:
        self.partitions = partitions
        self.ends_at = ends_at

    def Connect(self, connection: Any, module: str, database: str, name: str, *arguments: str) -> tuple[str, Any]:
        table = TABLES[module]
        return table.schema, _VirtualTable(self, table)

    Create = Connect

    def check_time(self) -> None:
        if time.monotonic() > self.ends_at:
            raise OutOfTime("the query took too long")


class _VirtualTable:
    """A virtual table in a connection."""

    def __init__(self, files: SegmentFiles, table: _Table) -> None:
        self.files = files
        self.table = table

    def BestIndexObject(self, index: Any) -> bool:
        """Take the conditions that choose files and rows, and an order that the log of one partition has anyway."""
        table, cost = self.table, 1e9
        taken: list[tuple[int, int]] = []
        equal: set[str] = set()
        for number in range(index.nConstraint):
            column, operator = index.get_aConstraint_iColumn(number), index.get_aConstraint_op(number)
            if not index.get_aConstraint_usable(number) or operator not in _OPERATORS or column < 0:
                continue
            if index.get_aConstraint_collation(number) != "BINARY":
                continue
            name = table.columns[column]
            if name not in {"topic", "partition"} and table.expressions[column - 2] not in {table.place, table.moment}:
                continue
            if name in {"topic", "partition"} and operator != _EQ:
                continue
            index.set_aConstraintUsage_argvIndex(number, len(taken) + 1)
            taken.append((column, operator))
            cost /= 1000 if operator == _EQ else 10
            if operator == _EQ:
                equal.add(name)
        descends = False
        if index.nOrderBy == 1 and {"topic", "partition"} <= equal:
            column = index.get_aOrderBy_iColumn(0)
            if column >= 2 and table.expressions[column - 2] in {table.place, table.moment}:
                index.orderByConsumed = True
                descends = index.get_aOrderBy_desc(0)
        used = sorted(each for each in index.colUsed if each < len(table.columns))
        index.idxStr = msgspec.json.encode([taken, descends, used]).decode()
        index.estimatedCost = cost
        return True

    def Open(self) -> _Cursor:
        return _Cursor(self)

    def Disconnect(self) -> None:
        pass

    Destroy = Disconnect


class _Cursor:
    def __init__(self, rows: _VirtualTable) -> None:
        self._rows = rows
        self._found: Iterator[tuple[Any, ...]] = iter(())
        self._row: tuple[Any, ...] | None = None
        self._places: list[int] = []
        self._number = 0

    def Filter(self, number: int, plan: str, arguments: tuple[Any, ...]) -> None:
        taken, descends, used = msgspec.json.decode(plan)
        table = self._rows.table
        self._places = [-1] * len(table.columns)
        for at, column in enumerate(used):
            self._places[column] = at
        conditions = [
            (table.columns[column], operator, value) for (column, operator), value in zip(taken, arguments, strict=True)
        ]
        self._found = _rows_of(self._rows.files, table, conditions, used, descends=descends)
        self.Next()

    def Next(self) -> None:
        self._number += 1
        self._row = next(self._found, None)

    def Eof(self) -> bool:
        return self._row is None

    def Rowid(self) -> int:
        """Return the same number for a row in each scan: where conditions are joined by OR, SQLite scans for each, and
        leaves out the rows that it has seen."""
        return 0 if self._row is None else self._row[-1]

    def Column(self, column: int) -> Any:
        return None if column < 0 or self._row is None else self._row[self._places[column]]

    def Close(self) -> None:
        close = getattr(self._found, "close", None)
        if close is not None:
            close()


def _rows_of(
    files: SegmentFiles, table: _Table, conditions: list[tuple[str, int, Any]], used: list[int], *, descends: bool
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of all partitions that the conditions admit."""
    wanted = {name: value for name, operator, value in conditions if name in {"topic", "partition"}}
    tests = [
        (table.expressions[table.columns.index(name) - 2], operator, value)
        for name, operator, value in conditions
        if name not in {"topic", "partition"}
    ]
    for number, partition in enumerate(files.partitions):
        if wanted.get("topic", partition.topic) != partition.topic:
            continue
        if wanted.get("partition", partition.partition) != partition.partition:
            continue
        for row in _rows_in(files, table, partition, tests, used, descends=descends):
            yield *row[:-1], (number << 44) + row[-1]


def _rows_in(
    files: SegmentFiles,
    table: _Table,
    partition: PartitionFiles,
    tests: list[tuple[str, int, Any]],
    used: list[int],
    *,
    descends: bool,
) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of one partition, in the order of its log."""
    fixed = {0: "?1", 1: "?2"}
    shown = ", ".join(fixed.get(column) or table.expressions[column - 2] for column in used) or "NULL"
    shown += f", {table.place}"
    where = [f"{table.place} >= ?3", f"{table.place} < ?4", "?1 IS NOT NULL", "?2 IS NOT NULL"]
    where += [f"{expression} {_OPERATORS[operator]} ?{at}" for at, (expression, operator, _) in enumerate(tests, 5)]
    query = (
        f"SELECT {shown} FROM {table.source} WHERE {' AND '.join(where)}"
        f" ORDER BY {table.place}{' DESC' if descends else ''}"
    )
    values = (partition.topic, partition.partition, partition.start, partition.end, *(value for *_, value in tests))
    paths = sorted(Path(partition.directory).glob(f"{'[0-9]' * 20}.sqlite"))
    begins = [int(path.stem) for path in paths]
    ends = [*begins[1:], partition.end]
    for path, begin, end in sorted(zip(paths, begins, ends, strict=True), reverse=descends):
        files.check_time()
        if end <= partition.start or begin >= partition.end or not _may_match(table, tests, begin, end):
            continue
        with _reading(path) as connection:
            if connection is not None:
                try:
                    yield from connection.execute(query, values)
                except apsw.SQLError as error:
                    if str(error).startswith(SCHEMA_DIFFERS):
                        raise apsw.CorruptError(f"its schema is damaged: {error}") from error
                    raise


def _may_match(table: _Table, tests: list[tuple[str, int, Any]], begin: int, end: int) -> bool:
    """Return whether a file with offsets from `begin` up to `end` may have rows that pass."""
    for expression, operator, value in tests:
        if expression != table.place or not isinstance(value, int | float):
            continue
        if operator in {_EQ, _GT, _GE} and end <= value:
            return False
        if operator in {_EQ, _LT, _LE} and begin > value:
            return False
    return True


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    """Open a segment file for reading; None for one that retention has just removed."""
    uri = f"file:{path.as_posix().replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?mode=ro"
    try:
        connection = apsw.Connection(uri, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    except apsw.CantOpenError:
        if path.exists():
            raise
        yield None
        return
    try:
        connection.set_busy_timeout(200)
        connection.create_scalar_function("portalmq_kind", _kind_name, 1, deterministic=True)
        connection.create_scalar_function("portalmq_body", _shown_body, 1, deterministic=True)
        sql.register(_AsSqlite3(connection))  # type: ignore[arg-type]
        yield connection
    finally:
        connection.close()


class _AsSqlite3:
    """The two methods of sqlite3's connections that `sql.register` needs."""

    def __init__(self, connection: Any) -> None:
        self.execute = connection.execute
        self._create = connection.create_scalar_function

    def create_function(self, name: str, count: int, function: Callable[..., Any], *, deterministic: bool) -> None:
        self._create(name, function, count, deterministic=deterministic)


def _kind_name(*kind: Any) -> str | None:
    return KINDS.get(kind[0])


def _shown_body(*body: Any) -> str:
    try:
        return msgspec.json.encode(msgspec.msgpack.decode(body[0])).decode()
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, ValueError):
        return ""


# --- the query -------------------------------------------------------------------------------------------------------


def run(request: SqlOrder) -> SqlAnswer:
    """Return the result of the query, or why there is none."""
    files = SegmentFiles(request.partitions, time.monotonic() + request.timeout_ms / 1000)
    if len(request.query.encode()) > QUERY_BYTES_MAX:
        return SqlAnswer(refused="invalid", detail=f"the query is longer than {QUERY_BYTES_MAX} bytes")
    connection = apsw.Connection(":memory:")
    connection.execute("PRAGMA temp_store = MEMORY; PRAGMA trusted_schema = OFF")
    for name in TABLES:
        module: Any = files
        connection.create_module(name, module, use_bestindex_object=True, eponymous_only=True, read_only=True)
    _restrict(connection, files)
    try:
        return _answer(connection, request)
    except (OutOfTime, apsw.InterruptError, apsw.NoMemError, MemoryError, apsw.TooBigError) as fault:
        if isinstance(fault, OutOfTime | apsw.InterruptError):
            detail = f"the query took longer than {request.timeout_ms} ms"
        else:
            detail = f"the query needs more memory than {MEMORY_BYTES // 2**20} MiB, or a row is too large"
        return SqlAnswer(refused="limit", detail=f"{detail}: name a topic and a partition, and a range of offsets")
    except apsw.AuthError:
        return SqlAnswer(refused="invalid", detail="only one SELECT over messages, batches and group_records is run")
    except _UNREADABLE as fault:
        return SqlAnswer(refused="unreadable", detail=f"a file cannot be read now: {fault}")
    except (apsw.Error, ValueError, OverflowError) as fault:
        return SqlAnswer(refused="invalid", detail=str(fault).removeprefix("SQLError: "))


def _restrict(connection: Any, files: SegmentFiles) -> None:
    """Allow SELECT alone, and stop it when its time is over."""

    def authorize(action: int, first: str | None, second: str | None, database: str | None, cause: str | None) -> int:
        if action == apsw.SQLITE_FUNCTION and second in {"load_extension", "fts3_tokenizer"}:
            return apsw.SQLITE_DENY
        return apsw.SQLITE_OK if action in _READING else apsw.SQLITE_DENY

    connection.authorizer = authorize
    connection.set_progress_handler(lambda: time.monotonic() > files.ends_at, STEPS_A_CHECK)
    for limit, value in (
        (apsw.SQLITE_LIMIT_LENGTH, ANSWER_BYTES_MAX),
        (apsw.SQLITE_LIMIT_SQL_LENGTH, QUERY_BYTES_MAX),
        (apsw.SQLITE_LIMIT_COLUMN, 200),
        (apsw.SQLITE_LIMIT_EXPR_DEPTH, 200),
        (apsw.SQLITE_LIMIT_COMPOUND_SELECT, 50),
        (apsw.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 1_000),
        (apsw.SQLITE_LIMIT_ATTACHED, 0),
    ):
        connection.limit(limit, value)


def _answer(connection: Any, request: SqlOrder) -> SqlAnswer:
    statements: list[str] = []
    answer, size = SqlAnswer(), 0

    def begin(cursor: Any, query: str, bindings: Any) -> bool:
        statements.append(query)
        if len(statements) > 1 or cursor.is_explain:
            raise ValueError("one SELECT is run at a time, and nothing else")
        answer.columns = [name for name, *_ in cursor.get_description()]
        return True

    cursor = connection.cursor()
    cursor.exec_trace = begin
    for row in cursor.execute(request.query, can_cache=False):
        if len(answer.rows) == request.limit:
            answer.truncated = True
            break
        size += sum([len(value) if isinstance(value, str | bytes) else 8 for value in row])
        if size > ANSWER_BYTES_MAX // 2:
            if not answer.rows:
                raise MemoryError
            answer.truncated = True
            break
        answer.rows.append([{"base64": _base64(each)} if isinstance(each, bytes) else each for each in row])
    if not answer.columns:
        raise ValueError("there is no query")
    return answer


def _base64(value: bytes) -> str:
    encoded: str = msgspec.to_builtins(value)
    return encoded


# --- the process -----------------------------------------------------------------------------------------------------


def _confine(timeout_ms: int) -> None:
    """Give up what the process does not need: time, memory, files, and life after the broker's."""
    os.closerange(3, 4096)
    seconds = timeout_ms // 1000 + 3
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    apsw.hard_heap_limit(MEMORY_BYTES)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.alarm(seconds)
    os.nice(5)


def main() -> None:
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=SqlOrder)
    _confine(request.timeout_ms)
    encoded = msgspec.json.encode(run(request))
    if len(encoded) > ANSWER_BYTES_MAX:
        encoded = msgspec.json.encode(SqlAnswer(refused="limit", detail=f"the answer is over {ANSWER_BYTES_MAX} bytes"))
    data = memoryview(encoded)
    while data:
        data = data[os.write(1, data) :]


if __name__ == "__main__":
    main()
