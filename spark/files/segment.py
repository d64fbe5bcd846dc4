"""Reads one segment file into Arrow: from SQLite's rows by ADBC, without a Python object a message.

It reads a chunk of offsets at a time, each on a connection of its own that is closed before the rows are returned: a
broker that wants to checkpoint or seal the file waits for one chunk at most (tens of milliseconds), however slowly
Spark takes the rows. A chunk is read again when the file changed, before any row of it is returned. It takes two or
three queries:

    batches    the headers, which are contiguous, so that a missing row is detected
    messages   offset, value, and the columns that the previous chunk used; only rows that use no other column, and are
               small. These are nearly always all rows: the headers say how many to expect.
    look       otherwise: which columns the messages use, and their size. Then they are read again, or a smaller chunk.
    values     of batches that producers compressed, whose rows have NULL for them

How to open a file that a broker may have open, without writing a byte beside it:

    no -wal beside it   sealed, or not open anywhere: immutable=1, and checked again afterwards
    else                SQLite's own rules for readers of a live file
    always              mode=ro: otherwise a file that is removed at this moment would be created again, empty

Nothing else in this process may open the file at the same time: a close drops the locks of all its users (POSIX).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adbc_driver_sqlite.dbapi as adbc
import msgspec
import numpy as np
import pyarrow as pa

from portalmq.compression import values_of
from portalmq.spark.columns import MESSAGES_TABLE
from portalmq.spark.errors import DamagedFile, NotReadable, SourceError
from portalmq.spark.origin import PartitionLog

CHUNK_OFFSETS = 65_536
CHUNK_BYTES = 16 * 1024 * 1024
BUSY_TIMEOUT_MS = 5_000
# A broker rarely opens and closes an unused file: hardly twice while a chunk of it is read.
ATTEMPTS = 20

_OF_BATCHES = {
    "timestamp": "appended_at_ms",
    "appended_at": "appended_at_ms",
    "leader_epoch": "leader_epoch",
    "producer_id": "producer_id",
    "sequence": "sequence",
}
# Rarely used columns: the expression to read, and the condition of a row that does not use the column.
_RARE = {
    "key": ("CAST(key AS BLOB) AS key", "key IS NULL"),
    "headers": ("headers", "headers IS NULL"),
    "deliver_at": ("deliver_at_ms AS deliver_at", "deliver_at_ms IS NULL"),
    "expires_at": ("expires_at_ms AS expires_at", "expires_at_ms IS NULL"),
    "priority": ("priority", "priority = 0"),
}
_HEAVY = ("value", "key", "headers")
_MIXED = -1

# How a torn or foreign file shows: an error of SQLite, or a column with a wrong type.
_FAULTS = (adbc.Error, DamagedFile, pa.ArrowException, msgspec.MsgspecError, ValueError, TypeError)

_decode_header_lines = msgspec.json.Decoder(dict[str, str]).decode_lines


class _TooHeavy(Exception):
    """The chunk is larger than the limit of one read."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.size_bytes = size_bytes


def uri_of(path: Path, *, immutable: bool) -> str:
    return f"file:{quote(str(path))}?mode=ro{'&immutable=1' if immutable else ''}"


def is_at_rest(path: Path) -> bool:
    """True when no process can be writing to the file: it has no write-ahead log."""
    return not os.path.exists(f"{path}-wal")


def rest_state(path: Path) -> tuple[int, int, int] | None:
    """Return a fingerprint of the file at rest; None when it is live. Raises FileNotFoundError."""
    state = os.stat(path)
    return (state.st_ino, state.st_size, state.st_mtime_ns) if is_at_rest(path) else None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection for small queries. Raises FileNotFoundError, DamagedFile, NotReadable, and SourceError when
    another process keeps the file locked for seconds."""
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        connection = sqlite3.connect(uri_of(path, immutable=is_at_rest(path)), uri=True, timeout=BUSY_TIMEOUT_MS / 1000)
    except sqlite3.Error as error:
        raise sqlite_fault(path, error) from error
    with contextlib.closing(connection):
        try:
            yield connection
        except sqlite3.DatabaseError as error:
            raise sqlite_fault(path, error) from error


@contextlib.contextmanager
def arrow_cursor(path: Path, *, immutable: bool) -> Iterator[Any]:
    """Yield a cursor for large queries with Arrow results. Raises adbc.Error; `sqlite_fault` translates it."""
    with adbc.connect(uri_of(path, immutable=immutable)) as connection, connection.cursor() as cursor:
        if not immutable:
            cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        yield cursor


def sqlite_fault(path: Path, fault: Exception) -> Exception:
    """Return the error to raise for a fault of SQLite or of its data. Raises NotReadable."""
    if not path.is_file():
        return FileNotFoundError(path)
    check_readable(path)
    if "is locked" in str(fault) or "locking protocol" in str(fault):
        return SourceError(f"{path} was kept locked for {BUSY_TIMEOUT_MS} ms by another process: read it again later")
    return DamagedFile(path, f"is not a file of PortalMQ, or torn ({fault})")


def check_readable(path: Path) -> None:
    """Raise NotReadable. SQLite reports a missing permission like a torn file."""
    for each in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if each.exists() and not os.access(each, os.R_OK):
            raise NotReadable(each)


@dataclass(frozen=True, slots=True)
class _Shape:
    """The common properties of a chunk's messages, in the columns that are read."""

    used: frozenset[str] = frozenset()  # the columns of _RARE that a message may use
    content_type: int = 0  # the one that all have, or _MIXED
    heaviest_bytes: int = 0


class _Batches:
    """The batch headers that cover a chunk, [start, end)."""

    def __init__(self, table: pa.Table, start: int, end: int) -> None:
        self._columns = {name: table.column(name).to_numpy() for name in table.column_names}
        self._start, self._end = start, end
        self._base: Any = self._columns["base_offset"]
        self._count: Any = self._columns["count"]

    def fault(self) -> str | None:
        """Return the fault, if any: headers follow each other without a gap, and cover the chunk."""
        if not len(self._base):
            return f"holds no offset from {self._start} to {self._end - 1}"
        ends = self._base + self._count
        if self._base[0] > self._start or ends[-1] < self._end or (ends[:-1] != self._base[1:]).any():
            return f"lacks a part of the offsets {self._start} to {self._end - 1}"
        return None

    def per_batch(self) -> Any:
        """Return the number of messages of each batch in the chunk, before compaction."""
        low, high = np.maximum(self._base, self._start), np.minimum(self._base + self._count, self._end)
        return np.where(self._columns["kind"] == 0, high - low, 0)

    @property
    def first(self) -> int:
        return int(self._base[0])

    def columns(self, names: Sequence[str], offsets: Any) -> dict[str, pa.Array]:
        """Return the headers' columns, one value for each message."""
        per_batch = self.per_batch()
        if per_batch.sum() == len(offsets):
            spread = _repeated(per_batch)
        else:
            spread = _taken(np.searchsorted(self._base, offsets, side="right") - 1)
        found: dict[str, pa.Array] = {}
        times: pa.Array | None = None
        for name in names:
            values = self._columns[_OF_BATCHES[name]]
            if name in {"timestamp", "appended_at"}:  # the same today
                times = _times(spread(values * 1000)) if times is None else times
                found[name] = times
            elif name == "leader_epoch":
                found[name] = pa.array(spread(values))
            else:
                found[name] = self._of_producer(name, values, spread, offsets)
        return found

    def _of_producer(self, name: str, values: Any, spread: Any, offsets: Any) -> pa.Array:
        nothing = values < 0
        if nothing.all():
            return pa.nulls(len(offsets), pa.int64())
        of_messages = spread(values) if name == "producer_id" else spread(values - self._base) + offsets
        return pa.array(of_messages, mask=spread(nothing) if nothing.any() else None)


def _repeated(per_batch: Any) -> Any:
    return lambda values: np.repeat(values, per_batch)


def _taken(index: Any) -> Any:
    return lambda values: values[index]


def _times(microseconds: Any) -> pa.Array:
    return pa.array(microseconds).view(pa.timestamp("us", "UTC"))


class SegmentRows:
    """Reads rows of one file that belongs to `log`, with these columns in this order."""

    def __init__(self, path: Path, log: PartitionLog, columns: Sequence[str]) -> None:
        self._path = path
        self._log = log
        self._schema = MESSAGES_TABLE.arrow_schema(columns)
        self._columns = frozenset(columns)
        self._of_batches = [name for name in columns if name in _OF_BATCHES]
        self._weight = " + ".join(f"coalesce(octet_length({name}), 0)" for name in _HEAVY if name in self._columns)
        self._shape = _Shape()
        self._chunk_offsets = CHUNK_OFFSETS
        self._content_types: dict[int, str] = {}
        self._constants: dict[str, tuple[Any, pa.Array]] = {}

    def batches(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the offsets [start, end), all of which are in the file, in order. Raises FileNotFoundError,
        DamagedFile, and SourceError when other processes keep it from being read."""
        while start < end:
            upto = min(start + self._chunk_offsets, end)
            try:
                batch = self._chunk(start, upto)
            except _TooHeavy as chunk:
                length = upto - start
                self._chunk_offsets = max(1, min(length // 2, length * CHUNK_BYTES // chunk.size_bytes))
                continue
            start = upto
            if batch is not None:
                if batch.nbytes < CHUNK_BYTES // 2:
                    self._chunk_offsets = min(CHUNK_OFFSETS, self._chunk_offsets * 2)
                yield batch

    def _chunk(self, start: int, end: int) -> pa.RecordBatch | None:
        """Return the rows; None when there is no message among these offsets."""
        for _ in range(ATTEMPTS):
            rest = rest_state(self._path)
            try:
                batch = self._read(start, end, immutable=rest is not None)
            except _FAULTS as fault:
                if rest is not None and rest_state(self._path) != rest:
                    continue  # a broker has opened it, or compaction replaced it: discard the result
                if isinstance(fault, DamagedFile):
                    raise
                raise sqlite_fault(self._path, fault) from fault
            if rest is None or rest_state(self._path) == rest:
                return batch
        raise SourceError(f"{self._path} was opened and closed by a broker again and again: read it again later")

    def _read(self, start: int, end: int, *, immutable: bool) -> pa.RecordBatch | None:
        with arrow_cursor(self._path, immutable=immutable) as cursor:
            headers = _Batches(_table(cursor, _headers_sql(self._of_batches, start, end)), start, end)
            fault = headers.fault()
            if fault is not None:
                raise DamagedFile(self._path, fault)
            rows = self._messages(cursor, headers, start, end)
            if not rows.num_rows:
                return None
            if "value" in self._columns and rows.column("value").null_count:
                rows = self._with_values(cursor, rows, headers.first, end)
            return self._finished(cursor, rows, headers)

    def _messages(self, cursor: Any, headers: _Batches, start: int, end: int) -> pa.Table:
        expected = int(headers.per_batch().sum())
        light_bytes = CHUNK_BYTES // self._chunk_offsets
        rows = None
        if self._shape.heaviest_bytes <= light_bytes:
            rows = _table(cursor, self._query(start, end, light_bytes), expected)
            if rows.num_rows == expected:
                return rows
        shape, count, size_bytes = self._look(cursor, start, end)
        if count != expected:
            self._check_holes(cursor, headers, expected - count, start, end)
        if rows is None or rows.num_rows != count:
            if size_bytes > CHUNK_BYTES and end - start > 1:
                raise _TooHeavy(size_bytes)
            self._shape = shape
            rows = _table(cursor, self._query(start, end, None), count)
        return rows

    def _query(self, start: int, end: int, light_bytes: int | None) -> str:
        """Return the query; with `light_bytes` only for rows that fit the shape and are no larger."""
        wanted, as_expected = ["offset"], []
        if "value" in self._columns:
            wanted.append("CAST(value AS BLOB) AS value")
        for name, (expression, unused) in _RARE.items():
            if name not in self._columns:
                continue
            if name in self._shape.used:
                wanted.append(expression)
            else:
                as_expected.append(unused)
        if "content_type" in self._columns:
            if self._shape.content_type == _MIXED:
                wanted.append("content_type")
            else:
                as_expected.append(f"content_type = {self._shape.content_type}")
        if self._weight:
            as_expected.append(f"{self._weight} <= {light_bytes}")
        conditions = [f"offset >= {start}", f"offset < {end}", *(as_expected if light_bytes is not None else ())]
        return f"SELECT {', '.join(wanted)} FROM messages WHERE {' AND '.join(conditions)} ORDER BY offset"

    def _look(self, cursor: Any, start: int, end: int) -> tuple[_Shape, int, int]:
        """Return the shape of the messages, their number, and their size."""
        rare = [name for name in _RARE if name in self._columns]
        asked = [f"coalesce(max(NOT ({_RARE[name][1]})), 0)" for name in rare]
        cursor.execute(
            f"SELECT count(*), coalesce(sum({self._weight or 0}), 0), coalesce(max({self._weight or 0}), 0),"
            f" coalesce(min(content_type), 0), coalesce(max(content_type), 0)"
            f" {''.join(', ' + one for one in asked)} FROM messages WHERE offset >= {start} AND offset < {end}"
        )
        count, size_bytes, heaviest_bytes, type_min, type_max, *uses = cursor.fetchone()
        used = frozenset(name for name, is_used in zip(rare, uses, strict=True) if is_used)
        content_type = type_min if type_min == type_max else _MIXED
        return _Shape(used, content_type, heaviest_bytes), count, size_bytes

    def _check_holes(self, cursor: Any, headers: _Batches, missing: int, start: int, end: int) -> None:
        """Raise DamagedFile unless compaction can have removed the missing messages."""
        if missing > 0 and _asked(cursor, "SELECT count(*) FROM sqlite_master WHERE name = 'holes'"):
            removed = _asked(
                cursor,
                "SELECT coalesce(sum(removed), 0) FROM holes"
                f" WHERE base_offset >= {headers.first} AND base_offset < {end}",
            )
            if missing <= removed:
                return
        verb = "lacks" if missing > 0 else "has too many:"
        raise DamagedFile(self._path, f"{verb} {abs(missing)} of the messages from offset {start} to {end - 1}")

    def _with_values(self, cursor: Any, rows: pa.Table, first: int, end: int) -> pa.Table:
        """Return the rows with the values of compressed batches, whose base offsets are in [first, end)."""
        inside = f"FROM compressed_values WHERE base_offset >= {first} AND base_offset < {end}"
        cursor.execute(f"SELECT coalesce(sum(size), 0), count(*) {inside}")
        size_bytes, batches = cursor.fetchone()
        if size_bytes > CHUNK_BYTES and batches > 1:
            raise _TooHeavy(size_bytes)
        cursor.execute(
            "SELECT v.base_offset, b.count, v.data FROM compressed_values AS v JOIN batches AS b USING (base_offset)"
            f" WHERE v.base_offset >= {first} AND v.base_offset < {end} ORDER BY v.base_offset"
        )
        column, offsets = rows.column("value").combine_chunks(), rows.column("offset").to_numpy()
        parts: list[pa.Array] = []
        done = 0
        for base_offset, count, data in cursor.fetchall():
            low, high = (int(at) for at in np.searchsorted(offsets, [base_offset, base_offset + count]))
            if low == high:
                continue
            parts.append(_plain(column, done, low))
            skipped = int(offsets[low]) - base_offset  # no message of a compressed batch is missing
            parts.append(pa.array(values_of(data, count)[skipped : skipped + high - low], pa.binary()))
            done = high
        parts.append(_plain(column, done, len(offsets)))
        return rows.set_column(rows.schema.get_field_index("value"), "value", pa.concat_arrays(parts))

    def _finished(self, cursor: Any, rows: pa.Table, headers: _Batches) -> pa.RecordBatch:
        (batch,) = rows.to_batches()
        found = headers.columns(self._of_batches, batch.column("offset").to_numpy()) if self._of_batches else {}
        arrays = [
            found[field.name] if field.name in found else self._column(cursor, field, batch) for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, cursor: Any, field: pa.Field, batch: pa.RecordBatch) -> pa.Array:
        name, size = field.name, batch.num_rows
        if name == "topic":
            return self._constant(field, self._log.topic, size)
        if name == "partition":
            return self._constant(field, self._log.partition, size)
        if name == "content_type":
            if self._shape.content_type == _MIXED:
                return self._type_names(cursor, batch.column(name))
            return self._constant(field, self._type_name(cursor, self._shape.content_type), size)
        if name in _RARE and name not in self._shape.used:
            return self._constant(field, 0 if name == "priority" else None, size)
        column = batch.column(name)
        if column.null_count == size:
            return self._constant(field, None, size)
        if name == "headers":
            return _maps(column, field.type)
        if name in {"deliver_at", "expires_at"}:
            return column.cast(pa.timestamp("ms", "UTC")).cast(field.type)
        return column.cast(field.type)

    def _constant(self, field: pa.Field, value: Any, size: int) -> pa.Array:
        """Return a constant column. These rarely differ from batch to batch, so they are cached."""
        before, array = self._constants.get(field.name, (None, None))
        if array is None or before != value or len(array) < size:
            array = pa.repeat(pa.scalar(value, field.type), size)
            self._constants[field.name] = value, array
        return array.slice(0, size)

    def _type_name(self, cursor: Any, number: int) -> str:
        if number not in self._content_types:
            cursor.execute("SELECT id, name FROM content_types")
            self._content_types = dict(cursor.fetchall())
        try:
            return self._content_types[number]
        except KeyError:
            raise DamagedFile(self._path, f"content type {number} is not in it") from None

    def _type_names(self, cursor: Any, numbers: pa.Array) -> pa.Array:
        encoded = numbers.dictionary_encode()
        names = pa.array([self._type_name(cursor, number) for number in encoded.dictionary.to_pylist()], pa.string())
        return names.take(encoded.indices)


def _headers_sql(names: Sequence[str], start: int, end: int) -> str:
    needed = dict.fromkeys(_OF_BATCHES[name] for name in names)
    columns = "".join(
        f", coalesce({name}, -1) AS {name}" if name in {"producer_id", "sequence"} else f", {name}" for name in needed
    )
    return (
        f"SELECT base_offset, count, kind{columns} FROM batches WHERE base_offset >="
        f" coalesce((SELECT max(base_offset) FROM batches WHERE base_offset <= {start}), {start})"
        f" AND base_offset < {end} ORDER BY base_offset"
    )


def _asked(cursor: Any, query: str) -> int:
    cursor.execute(query)
    return int(cursor.fetchone()[0])


def _table(cursor: Any, query: str, rows: int = CHUNK_OFFSETS) -> pa.Table:
    """Fetch all rows in one batch: ADBC takes a column's type from its first batch, and NULLs alone have no type."""
    cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(rows + 1)})
    cursor.execute(query)
    return cursor.fetch_arrow_table()


def _plain(column: pa.Array, start: int, end: int) -> pa.Array:
    """Return the values [start, end), which are not compressed. Raises ValueError when one is missing."""
    part = column.slice(start, end - start)
    if part.null_count:
        raise ValueError("values are missing")
    return part.cast(pa.binary()) if len(part) else pa.array([], pa.binary())


def _maps(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert JSON objects to maps, all decoded at once: the broker writes no raw newline."""
    objects = _decode_header_lines("\n".join(texts.drop_null().to_pylist()))
    if len(objects) != len(texts) - texts.null_count:
        raise ValueError("headers are no JSON objects of one line each")
    sizes = np.zeros(len(texts) + 1, np.int32)
    there = texts.is_valid().to_numpy(zero_copy_only=False)
    sizes[1:][there] = [len(headers) for headers in objects]
    offsets = pa.array(np.cumsum(sizes, dtype=np.int32), mask=np.append(~there, False))
    keys = pa.array(list(chain.from_iterable(objects)), pa.string())
    values = pa.array(list(chain.from_iterable(headers.values() for headers in objects)), pa.string())
    return pa.MapArray.from_arrays(offsets, keys, values).cast(kind)
