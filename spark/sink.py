"""The sink: rows of a DataFrame become messages, each once, though Spark runs a task twice or begins a batch again.

There is nothing to commit: a row is a message as soon as its leader has it, whatever becomes of the task. What makes
that once is the row's identity (see identity.py), which travels with it as `idempotency_key`: the broker finds it in
the partition within the topic's dedup_window_ms, and answers with the first message's place. So the attempts of a task
may run side by side (speculation), and a driver may die between write and commit.

The query of a stream is named by its checkpoint, and keeps that name as long as the checkpoint is kept; its batches are
numbered. A batch write is a query of its own, named by the option `query` if it is to be repeatable.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from portalmq.spark.errors import BadOption, SourceError
from portalmq.spark.identity import Identities
from portalmq.spark.options import Writing
from portalmq.spark.rows import check_columns, placed_rows
from portalmq.spark.sending import Sender, partitions_of, transport_of

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that are Python objects at one time, of the many in an Arrow batch.
ROWS_AT_ONCE = 1_000
BYTES_AT_ONCE = 8 * 1024 * 1024
# The driver looks once, before any task starts, whether there is a broker.
PREFLIGHT_TIMEOUT_S = 15.0

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"


class Written(WriterCommitMessage):
    """What one task wrote."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class _RowWriter:
    """What both writers do in a task."""

    def __init__(self, writing: Writing, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOption(
                'a topic is only ever appended to: write with .mode("append"), or .outputMode("append") or "update" in'
                " a stream. To begin anew, purge the topic first"
            )
        check_columns(schema, writing.topic)
        transport_of(writing.bootstrap, writing.token, writing.tls, PREFLIGHT_TIMEOUT_S).close()
        self._writing = writing

    def _write(self, batches: Iterator[pa.RecordBatch], query: str, batch: str) -> Written:
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        return Written(write_rows(batches, self._writing, Identities(query, batch, number)))


def write_rows(batches: Iterator[pa.RecordBatch], writing: Writing, identities: Identities) -> int:
    """Write the rows of one task; how many they were. Raises BadRow, NotWritten, Unreachable."""
    count = 0
    sender: Sender | None = None
    try:
        for batch in batches:
            if sender is None and batch.num_rows:  # many tasks of a shuffle have no rows
                sender = Sender(writing.bootstrap, writing.token, writing.tls)
            at_once = _rows_at_once(batch)
            for start in range(0, batch.num_rows, at_once):
                rows = list(placed_rows(batch.slice(start, at_once), writing.topic))
                nameless = [placed for placed in rows if not placed.row.idempotency_key]
                for placed, key in zip(
                    nameless, identities.keys_of([placed.content for placed in nameless]), strict=True
                ):
                    placed.row.idempotency_key = key
                assert sender is not None
                sender.put_all(rows)
            count += batch.num_rows
        if sender is not None:
            sender.flush()
    finally:
        if sender is not None:
            sender.close()
    return count


def _rows_at_once(batch: pa.RecordBatch) -> int:
    """How many rows are made messages at a time: wide ones few, since each is there as an object and encoded, too."""
    row_bytes: int = batch.nbytes // max(1, batch.num_rows) + 1
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // row_bytes))


class BatchWriter(_RowWriter, DataSourceArrowWriter):
    """`df.write.format("portalmq")`."""

    def __init__(self, writing: Writing, schema: StructType, overwrite: bool) -> None:
        super().__init__(writing, schema, overwrite)
        self._query = f"named {writing.query}" if writing.query else f"once {uuid.uuid4().hex}"
        transport = transport_of(writing.bootstrap, writing.token, writing.tls, PREFLIGHT_TIMEOUT_S)
        try:
            partitions_of(transport, writing.topic or "")
        finally:
            transport.close()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write(iterator, self._query, "")


class StreamWriter(_RowWriter, DataSourceStreamArrowWriter):
    """`df.writeStream.format("portalmq")`."""

    def __init__(self, writing: Writing, schema: StructType, overwrite: bool) -> None:
        super().__init__(writing, schema, overwrite)
        if writing.query is not None:
            raise BadOption(
                "query is for a batch write: a stream is named by its checkpoint, which also numbers its batches"
            )

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = context.getLocalProperty(QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(BATCH_ID) if context is not None else None
        if query is None or batch is None:
            raise SourceError(
                f"Spark does not tell this task which query it works for ({QUERY_ID}, {BATCH_ID}): without that its"
                " rows cannot be told from a repeat's. Write from foreachBatch with the option query instead"
            )
        return self._write(iterator, f"stream {query}", batch)
