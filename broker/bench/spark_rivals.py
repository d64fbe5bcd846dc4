"""Yardsticks for Spark's data source: a simple reader, and a scan of the files without Spark.

    Tuples       a Spark data source that yields a Python tuple per message, from the standard library's sqlite3
    plain_rows   ADBC's scan of the same columns, and a sum over it, without Spark

Both read segment files that are no longer written, without locks (immutable: otherwise the last process to close a file
locks it for a moment, and the other one is refused), and ignore the high watermark.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import adbc_driver_sqlite.dbapi as adbc
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from portalmq.spark.columns import COLUMNS, MESSAGES_TABLE

TWO = ("offset", "value")
ALL = tuple(COLUMNS)
SPAN_OFFSETS = 500_000
PLAIN_BATCH_ROWS = 65_536
_PLAIN = {
    TWO: "offset, CAST(value AS BLOB) AS value",
    ALL: "offset, CAST(key AS BLOB) AS key, CAST(value AS BLOB) AS value, content_type, headers, timestamp_ms,"
    " deliver_at_ms, expires_at_ms, priority",
}


class FilePiece(InputPartition):
    """Offsets [start, end) of a file."""

    def __init__(self, path: str, start: int, end: int) -> None:
        super().__init__(None)
        self.path, self.start, self.end = path, start, end


def pieces(directory: Path, offsets_max: int | None = None) -> list[FilePiece]:
    """Return all segment files below a data directory, in pieces; at most `offsets_max` offsets of each file."""
    found = []
    for path in sorted(directory.glob("partitions/*/*/0*.sqlite")):
        with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as connection:
            low, high = connection.execute("SELECT min(offset), max(offset) + 1 FROM messages").fetchone()
        if low is None:
            continue
        high = high if offsets_max is None else min(high, low + offsets_max)
        found += [
            FilePiece(str(path), start, min(start + SPAN_OFFSETS, high)) for start in range(low, high, SPAN_OFFSETS)
        ]
    return found


class Tuples(DataSource):
    """Options: path, columns (comma separated), offsets_max (of each file; all, if it is not given)."""

    @classmethod
    def name(cls) -> str:
        return "portalmq_tuples"

    def schema(self) -> StructType:
        return MESSAGES_TABLE.schema_of(self.options["columns"].split(","))

    def reader(self, schema: StructType) -> DataSourceReader:
        offsets_max = self.options.get("offsets_max")
        return _TuplesReader(Path(self.options["path"]), tuple(schema.names), int(offsets_max) if offsets_max else None)


class _TuplesReader(DataSourceReader):
    def __init__(self, directory: Path, columns: tuple[str, ...], offsets_max: int | None) -> None:
        self.directory, self.columns, self.offsets_max = directory, columns, offsets_max

    def partitions(self) -> list[InputPartition]:
        return list(pieces(self.directory, self.offsets_max))

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, FilePiece)
        with closing(sqlite3.connect(f"file:{partition.path}?mode=ro&immutable=1", uri=True)) as connection:
            where = (partition.start, partition.end)
            if self.columns == TWO:
                yield from connection.execute(
                    "SELECT offset, CAST(value AS BLOB) FROM messages WHERE offset >= ? AND offset < ?", where
                )
            else:
                yield from _whole(connection, *where)


def _whole(connection: sqlite3.Connection, start: int, end: int) -> Iterator[tuple[Any, ...]]:
    """Every column: the messages, merged with the headers of their batches."""
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    types = dict(connection.execute("SELECT id, name FROM content_types"))
    batches = connection.execute(
        "SELECT base_offset, base_offset + count, leader_epoch, producer_id, sequence, appended_at_ms FROM batches"
        " WHERE base_offset + count > ? AND base_offset < ? AND kind = 0 ORDER BY base_offset",
        (start, end),
    )
    base = below = 0
    epoch = producer = sequence = appended_at = None
    for row in connection.execute(
        "SELECT offset, CAST(key AS BLOB), CAST(value AS BLOB), content_type, headers, deliver_at_ms, expires_at_ms,"
        " priority FROM messages WHERE offset >= ? AND offset < ? ORDER BY offset",
        (start, end),
    ):
        offset, key, value, content_type, headers, deliver_at, expires_at, priority = row
        while offset >= below:
            base, below, epoch, producer, sequence, appended_ms = next(batches)
            appended_at = _moment(appended_ms)
        yield (
            meta["topic"],
            meta["partition"],
            offset,
            key,
            value,
            types[content_type],
            None if headers is None else json.loads(headers),
            appended_at,
            _moment(deliver_at),
            _moment(expires_at),
            priority,
            appended_at,
            epoch,
            producer,
            None if sequence is None else sequence + offset - base,
        )


def _moment(ms: int | None) -> datetime | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)


def plain_rows(found: list[tuple[str, int, int]], columns: tuple[str, ...]) -> tuple[int, int]:
    """Return the messages, and the bytes of their values, of pieces given as (path, start, end)."""
    rows = size = 0
    for path, start, end in found:
        with adbc.connect(f"file:{path}?mode=ro&immutable=1") as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(PLAIN_BATCH_ROWS)})
            cursor.execute(f"SELECT {_PLAIN[columns]} FROM messages WHERE offset >= {start} AND offset < {end}")
            for batch in cursor.fetch_record_batch():
                rows += batch.num_rows
                size += pc.sum(pc.binary_length(batch.column("value"))).as_py() or 0
    return rows, size
