"""The table `batches`: a row for each batch of messages in the log, and for each start of a leader epoch.

    topic, partition        the log
    base_offset             the batch's first offset
    kind                    messages | epoch
    messages, bytes, keyed  the number of messages now (compaction and purges may have removed some), the sum of their
                            values' lengths, and how many have a key; 0 in an epoch's row
    sizes                   value length -> number of messages with it
    leader_epoch            of the leader that appended it
    producer_id, producer_epoch, sequence    the idempotent producer's, null without one; the sequence of the first
    appended_at             the leader's clock, never falling along a log

The workers count lengths with SQLite and Arrow, without reading the payloads, so a table with a thousandth of the
messages' number describes their whole volume. Without `bytes`, `keyed` and `sizes` among the columns only the headers
are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import adbc_driver_sqlite.dbapi as adbc
import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import LongType, MapType

from portalmq.spark.columns import INT, LONG, TEXT, TIME, Table
from portalmq.spark.errors import DamagedFile
from portalmq.spark.files.segment import arrow_cursor, is_at_rest, sqlite_fault
from portalmq.spark.tables.table import CHUNK_OFFSETS, Piece, TableReader, Task, packed, pieces_of

MESSAGES, EPOCH_START = 0, 1
_SIZE_BITS = 40  # a value has fewer than 2**40 bytes

TABLE = Table(
    "batches",
    {
        "topic": TEXT,
        "partition": INT,
        "base_offset": LONG,
        "kind": TEXT,
        "messages": LONG,
        "bytes": LONG,
        "keyed": LONG,
        "sizes": (MapType(LongType(), LongType()), pa.map_(pa.int64(), pa.int64())),
        "leader_epoch": LONG,
        "producer_id": LONG,
        "producer_epoch": LONG,
        "sequence": LONG,
        "appended_at": TIME,
    },
)
_COUNTED = frozenset({"bytes", "keyed", "sizes"})


class BatchesReader(TableReader):
    table = TABLE

    def partitions(self) -> Sequence[InputPartition]:
        origin = self.origin()
        pieces = [piece for log in origin.logs() for piece in pieces_of(origin, log)]
        return [Task(group) for group in packed(pieces, self.reading.span_offsets)] or [Task(())]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, Task)
        for piece in partition.pieces:
            for chunk in piece.chunks():
                yield from self._batches(chunk)

    def _batches(self, chunk: Piece) -> list[pa.RecordBatch]:
        return chunk.read(lambda path, low, high: _Chunk(path, chunk, self.columns).rows(low, high))


READER = BatchesReader


class _Chunk:
    """Reads the batches of one file that begin in a range, and the one that spans the log's first offset."""

    def __init__(self, path: Path, piece: Piece, columns: Sequence[str]) -> None:
        self._path = path
        self._log = piece.log
        self._columns = columns

    def rows(self, low: int, high: int) -> list[pa.RecordBatch]:
        if not self._path.is_file():
            raise FileNotFoundError(self._path)
        try:
            with arrow_cursor(self._path, immutable=is_at_rest(self._path)) as cursor:
                return self._rows(cursor, low, high)
        except adbc.Error as error:
            raise sqlite_fault(self._path, error) from error

    def _rows(self, cursor: Any, low: int, high: int) -> list[pa.RecordBatch]:
        heads = _numbers(cursor, _HEADERS_SQL.format(low=low, high=high))
        base, count = heads["base_offset"], heads["count"]
        ends = base + count
        if not len(base) or base[0] > low or ends[-1] < high or (ends[:-1] != base[1:]).any():
            raise DamagedFile(self._path, f"lacks a part of the offsets {low} to {high - 1}")
        mine = base >= low
        mine |= (ends > low) & (low == self._log.start_offset)
        mine &= heads["kind"] <= EPOCH_START
        heads = {name: column[mine] for name, column in heads.items()}
        if not len(heads["base_offset"]):
            return []
        return [pa.RecordBatch.from_arrays(self._arrays(cursor, heads), schema=TABLE.arrow_schema(self._columns))]

    def _arrays(self, cursor: Any, heads: dict[str, Any]) -> list[pa.Array]:
        size = len(heads["base_offset"])
        counts = self._counts(cursor, heads)
        made: dict[str, pa.Array] = {}
        for name in self._columns:
            kind = TABLE.arrow_schema([name]).field(0).type
            if name in counts:
                made[name] = counts[name]
            elif name in {"topic", "partition"}:
                made[name] = pa.repeat(pa.scalar(getattr(self._log, name), kind), size)
            elif name == "kind":
                names = pa.array(["messages", "epoch"], kind)
                made[name] = names.take(pa.array(heads["kind"], pa.int64()))
            elif name == "appended_at":
                made[name] = pa.array(heads["appended_at_ms"] * 1000, kind)
            elif name in {"producer_id", "producer_epoch", "sequence"}:
                made[name] = pa.array(heads[name], kind, mask=heads["producer_id"] < 0)
            else:
                made[name] = pa.array(heads[name], kind)
        return list(made.values())

    def _counts(self, cursor: Any, heads: dict[str, Any]) -> dict[str, pa.Array]:
        """Return the columns that describe the messages."""
        base, count = heads["base_offset"], heads["count"]
        is_messages = heads["kind"] == MESSAGES
        first, last = np.maximum(base, self._log.start_offset), np.minimum(base + count, self._log.end_offset)
        expected = np.where(is_messages, last - first, 0)
        has_holes = self._has_holes(cursor, int(base[0]), int(base[-1]))
        if not has_holes and not _COUNTED.intersection(self._columns):
            return {"messages": pa.array(expected, pa.int64())}
        found = self._messages(cursor, int(first[0]), int(last[-1]))
        index = np.searchsorted(base, found["offset"], side="right") - 1
        messages = np.bincount(index, minlength=len(base))
        if not has_holes and (messages != expected).any():
            raise DamagedFile(
                self._path,
                f"holds {int(messages.sum())} messages from offset {first[0]} to {last[-1] - 1}, not"
                f" {int(expected.sum())}",
            )
        length = {"minlength": len(base)}
        return {
            "messages": pa.array(messages, pa.int64()),
            "bytes": pa.array(np.bincount(index, weights=found["size"], **length).astype(np.int64)),
            "keyed": pa.array(np.bincount(index, weights=found["keyed"], **length).astype(np.int64)),
            "sizes": _sizes(index, found["size"], len(base)) if "sizes" in self._columns else None,
        }

    @staticmethod
    def _messages(cursor: Any, low: int, high: int) -> dict[str, Any]:
        cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(CHUNK_OFFSETS)})
        return _numbers(cursor, _MESSAGES_SQL.format(low=low, high=high))

    @staticmethod
    def _has_holes(cursor: Any, low: int, high: int) -> bool:
        cursor.execute("SELECT count(*) FROM sqlite_master WHERE name = 'holes'")
        if not cursor.fetchone()[0]:
            return False
        cursor.execute(f"SELECT count(*) FROM holes WHERE base_offset BETWEEN {low} AND {high}")
        return bool(cursor.fetchone()[0])


def _sizes(index: Any, size: Any, batches: int) -> pa.MapArray:
    """Return for each batch a map of message lengths to their number."""
    pairs, counts = np.unique((index.astype(np.int64) << _SIZE_BITS) | size, return_counts=True)
    of_batch = pairs >> _SIZE_BITS
    starts = np.searchsorted(of_batch, np.arange(batches + 1), side="left")
    keys = pa.array(pairs & ((1 << _SIZE_BITS) - 1), pa.int64())
    return pa.MapArray.from_arrays(pa.array(starts, pa.int32()), keys, pa.array(counts, pa.int64()))


def _numbers(cursor: Any, query: str) -> dict[str, Any]:
    cursor.execute(query)
    table = cursor.fetch_arrow_table()
    return {name: table.column(name).to_numpy().astype(np.int64, copy=False) for name in table.column_names}


_HEADERS_SQL = """
SELECT base_offset, count, kind, leader_epoch, coalesce(producer_id, -1) AS producer_id,
       coalesce(producer_epoch, -1) AS producer_epoch, coalesce(sequence, -1) AS sequence, appended_at_ms
FROM batches
WHERE base_offset >= coalesce((SELECT max(base_offset) FROM batches WHERE base_offset <= {low}), {low})
      AND base_offset < {high}
ORDER BY base_offset"""

# octet_length() reads a row's header and not its value.
_MESSAGES_SQL = """
SELECT offset, octet_length(value) AS size, key IS NOT NULL AS keyed
FROM messages WHERE offset >= {low} AND offset < {high} ORDER BY offset"""
