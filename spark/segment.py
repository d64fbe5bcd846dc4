"""One segment file, read into Arrow: straight from SQLite's rows by ADBC, no Python object a message.

A chunk of offsets at a time, on a connection of its own, so that a broker that wants to checkpoint or seal the file
waits for a chunk at most (tens of milliseconds). A chunk is three queries:

    shape      which of the rarely used columns are used here, and how big the messages are: the others are not read
    batches    the headers, which are contiguous, so that a missing row is noticed
    messages   offset, value and what else is used

How to open a file that a broker may have open, without writing a byte beside it:

    no -wal beside it   sealed, or not open anywhere: immutable=1, and looked at again afterwards
    else                mode=ro: SQLite's own rules for readers of a live file
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import adbc_driver_sqlite.dbapi as adbc
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from portalmq.spark.columns import arrow_schema
from portalmq.spark.errors import DamagedFile
from portalmq.spark.origin import Log

CHUNK_OFFSETS = 65_536
BATCH_BYTES = 16 * 1024 * 1024
_OF_BATCHES = frozenset({"timestamp", "appended_at", "leader_epoch", "producer_id", "sequence"})
_OPTIONAL = ("key", "headers", "deliver_at", "expires_at")

_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


class _Changed(Exception):
    """The file was opened for writing while it was read as one that does not change."""


def _uri(path: Path, *, immutable: bool) -> str:
    return f"file:{quote(str(path))}?{'immutable=1' if immutable else 'mode=ro'}"


def is_at_rest(path: Path) -> bool:
    """Whether nobody can be writing to it: there is no write-ahead log beside it."""
    return not os.path.exists(f"{path}-wal")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection for small questions. Raises FileNotFoundError, DamagedFile, and sqlite3.OperationalError when a
    broker kept the file locked for seconds."""
    if not path.is_file():
        raise FileNotFoundError(path)
    try:
        connection = sqlite3.connect(_uri(path, immutable=is_at_rest(path)), uri=True, timeout=5.0)
    except sqlite3.Error as error:
        raise DamagedFile(path, f"cannot be opened ({error})") from error
    with contextlib.closing(connection):
        try:
            yield connection
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "locked" in str(error):
                raise
            raise DamagedFile(path, f"is not a file of PortalMQ, or torn ({error})") from error


@dataclass(frozen=True, slots=True)
class _Shape:
    rows: int
    used: frozenset[str]
    priority_max: int
    content_types: tuple[int, int]
    bytes_max: int

    @property
    def batch_rows(self) -> int:
        return max(1, min(CHUNK_OFFSETS, BATCH_BYTES // max(1, self.bytes_max)))


class _Batches:
    """The batch headers that cover a chunk."""

    def __init__(self, table: pa.Table) -> None:
        self._columns = {name: table.column(name).to_numpy() for name in table.column_names}
        self.base = self._columns["base_offset"]
        self.count = self._columns["count"]

    def fault(self, start: int, end: int) -> str | None:
        """What is missing: headers follow each other without a gap, and cover the chunk."""
        if not len(self.base):
            return f"holds no offset from {start} to {end - 1}"
        ends = self.base + self.count
        if self.base[0] > start or ends[-1] < end or (ends[:-1] != self.base[1:]).any():
            return f"lacks a part of the offsets {start} to {end - 1}"
        return None

    def messages(self, start: int, end: int) -> int:
        """How many messages stand in the chunk, where compaction has removed none."""
        from_, to = np.maximum(self.base, start), np.minimum(self.base + self.count, end)
        return int(np.where(self._columns["kind"] == 0, to - from_, 0).sum())

    def of(self, offsets: Any) -> Any:
        """For each message the index of its batch."""
        return np.searchsorted(self.base, offsets, side="right") - 1

    def column(self, name: str, index: Any, offsets: Any) -> pa.Array:
        if name in {"timestamp", "appended_at"}:
            return pa.array(self._columns["appended_at_ms"][index] * 1000, pa.timestamp("us", "UTC"))
        values = self._columns[name][index]
        if name == "leader_epoch":
            return pa.array(values)
        nothing = values < 0
        if name == "sequence":
            values = values + (offsets - self.base[index])
        return pa.array(values, mask=nothing)


class SegmentRows:
    """Reads rows of one file: offsets [start, end) of `log`, all of which lie in it."""

    def __init__(self, path: Path, log: Log, columns: Sequence[str]) -> None:
        self._path = path
        self._log = log
        self._columns = tuple(columns)
        self._schema = arrow_schema(columns)
        self._content_types: dict[int, str] = {}

    def batches(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Raises FileNotFoundError, DamagedFile."""
        for low in range(start, end, CHUNK_OFFSETS):
            yield from self._chunk(low, min(low + CHUNK_OFFSETS, end))

    def _chunk(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        immutable = is_at_rest(self._path)
        done = start  # what was given away is not given again when the chunk has to be read anew
        try:
            for batch, upto in self._read(start, end, immutable=immutable):
                if immutable and not is_at_rest(self._path):
                    raise _Changed
                done = upto
                yield batch
        except (_Changed, adbc.Error, DamagedFile) as fault:
            if immutable and not is_at_rest(self._path):
                yield from self._chunk(done, end)  # the broker has opened it meanwhile: it is read as a live one now
                return
            if isinstance(fault, adbc.Error):
                raise DamagedFile(self._path, f"is not a file of PortalMQ, or torn ({fault})") from fault
            raise

    def _read(self, start: int, end: int, *, immutable: bool) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Batches, each with the offset behind it."""
        if not self._path.is_file():
            raise FileNotFoundError(self._path)
        with adbc.connect(_uri(self._path, immutable=immutable)) as connection, connection.cursor() as cursor:
            headers = _Batches(_table(cursor, _HEADERS_SQL.format(start=start, end=end)))
            fault = headers.fault(start, end)
            if fault is not None:
                raise DamagedFile(self._path, fault)
            shape = self._shape(cursor, start, end)
            if shape.rows != headers.messages(start, end) and not self._has_holes(cursor, headers):
                raise DamagedFile(
                    self._path,
                    f"holds {shape.rows} messages from offset {start} to {end - 1}, not {headers.messages(start, end)}",
                )
            if not shape.rows:
                return
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(shape.batch_rows)})
            cursor.execute(self._query(shape, start, end))
            for rows in cursor.fetch_record_batch():
                if rows.num_rows:
                    yield self._finished(rows, shape, headers), rows.column("offset")[-1].as_py() + 1

    def _shape(self, cursor: Any, start: int, end: int) -> _Shape:
        cursor.execute(_SHAPE_SQL.format(start=start, end=end))
        rows, *rest = cursor.fetchone()
        counts, (priority_max, type_min, type_max, bytes_max) = rest[:4], rest[4:]
        used = frozenset(name for name, count in zip(_OPTIONAL, counts, strict=True) if count)
        return _Shape(rows, used, priority_max or 0, (type_min or 0, type_max or 0), bytes_max or 0)

    def _has_holes(self, cursor: Any, headers: _Batches) -> bool:
        cursor.execute("SELECT count(*) FROM sqlite_master WHERE name = 'holes'")
        if not cursor.fetchone()[0]:
            return False
        low, high = int(headers.base[0]), int(headers.base[-1])
        cursor.execute(f"SELECT count(*) FROM holes WHERE base_offset BETWEEN {low} AND {high}")
        return bool(cursor.fetchone()[0])

    def _query(self, shape: _Shape, start: int, end: int) -> str:
        # ADBC settles a column's type by its first rows, so none may be NULL here and something there.
        wanted = ["offset"]
        if "value" in self._columns:
            wanted.append("CAST(value AS BLOB) AS value")
        if "key" in self._columns and "key" in shape.used:
            wanted += ["coalesce(CAST(key AS BLOB), x'') AS key", "key IS NULL AS no_key"]
        if "headers" in self._columns and "headers" in shape.used:
            wanted.append("coalesce(headers, '') AS headers")
        for name in ("deliver_at", "expires_at"):
            if name in self._columns and name in shape.used:
                wanted.append(f"coalesce({name}_ms, -1) AS {name}")
        if "priority" in self._columns and shape.priority_max:
            wanted.append("priority")
        if "content_type" in self._columns and shape.content_types[0] != shape.content_types[1]:
            wanted.append("content_type")
        return f"SELECT {', '.join(wanted)} FROM messages WHERE offset >= {start} AND offset < {end} ORDER BY offset"

    def _finished(self, rows: pa.RecordBatch, shape: _Shape, headers: _Batches) -> pa.RecordBatch:
        offsets = rows.column("offset").to_numpy()
        index = headers.of(offsets) if _OF_BATCHES.intersection(self._columns) else None
        arrays = []
        for field in self._schema:
            if field.name in _OF_BATCHES:
                arrays.append(headers.column(field.name, index, offsets))
            else:
                arrays.append(self._column(field, rows, shape))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _column(self, field: pa.Field, rows: pa.RecordBatch, shape: _Shape) -> pa.Array:
        name, size = field.name, rows.num_rows
        if name == "topic":
            return _constant(self._log.topic, size, field.type)
        if name == "partition":
            return _constant(self._log.partition, size, field.type)
        if name in {"offset", "value"}:
            return rows.column(name).cast(field.type)
        if name == "content_type":
            if shape.content_types[0] == shape.content_types[1]:
                return _constant(self._type_name(shape.content_types[0]), size, field.type)
            return self._type_names(rows.column(name))
        if name == "priority":
            return rows.column(name).cast(field.type) if shape.priority_max else _constant(0, size, field.type)
        if name not in shape.used:
            return pa.nulls(size, field.type)
        column = rows.column(name)
        if name == "key":
            return pc.if_else(pc.equal(rows.column("no_key"), 0), column.cast(field.type), None)
        if name == "headers":
            return pa.array(
                [list(_decode_headers(text).items()) if text else None for text in column.to_pylist()], field.type
            )
        times = column.to_numpy()
        return pa.array(times * 1000, field.type, mask=times < 0)

    def _type_name(self, number: int) -> str:
        if number not in self._content_types:
            with opened(self._path) as connection:
                self._content_types = dict(connection.execute("SELECT id, name FROM content_types"))
        try:
            return self._content_types[number]
        except KeyError:
            raise DamagedFile(self._path, f"content type {number} is not in it") from None

    def _type_names(self, numbers: pa.Array) -> pa.Array:
        encoded = numbers.dictionary_encode()
        names = pa.array([self._type_name(number) for number in encoded.dictionary.to_pylist()], pa.string())
        return names.take(encoded.indices)


_SHAPE_SQL = """
SELECT count(*), count(key), count(headers), count(deliver_at_ms), count(expires_at_ms), max(priority),
       min(content_type), max(content_type), max(octet_length(value))
FROM messages WHERE offset >= {start} AND offset < {end}"""

_HEADERS_SQL = """
SELECT base_offset, count, kind, leader_epoch, coalesce(producer_id, -1) AS producer_id,
       coalesce(sequence, -1) AS sequence, appended_at_ms
FROM batches
WHERE base_offset >= coalesce((SELECT max(base_offset) FROM batches WHERE base_offset <= {start}), {start})
      AND base_offset < {end}
ORDER BY base_offset"""


def _table(cursor: Any, query: str) -> pa.Table:
    cursor.execute(query)
    return cursor.fetch_arrow_table()


def _constant(value: Any, size: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), size)
