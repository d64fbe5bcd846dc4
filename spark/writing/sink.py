"""The sink: writes rows of a DataFrame as messages, each once, though Spark may run a task twice or restart a batch.

There is no commit step: a row is a message as soon as its leader has it, whatever happens to the task. The row's
identity makes that exactly once (see identity.py). It travels as `idempotency_key`: the broker finds it in the
partition within the topic's dedup_window_ms, and returns the first message's position. So attempts of a task may run
side by side (speculation), and a driver may die between write and commit.

A streaming query is identified by its checkpoint, and its batches are numbered. A batch write is a query of its own;
the option `query` names it if it must be repeatable.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from portalmq.spark.errors import BadOption, SourceError
from portalmq.spark.http_api.brokers import transport_of
from portalmq.spark.options import WriteOptions
from portalmq.spark.writing.identity import Identities
from portalmq.spark.writing.rows import check_columns, routed_rows
from portalmq.spark.writing.sender import Sender, partitions_of

if TYPE_CHECKING:
    import pyarrow as pa

# Rows that exist as Python objects at one time, out of a larger Arrow batch.
ROWS_AT_ONCE = 1_000
BYTES_AT_ONCE = 8 * 1024 * 1024
# The driver checks once, before any task starts, that a broker answers.
PREFLIGHT_TIMEOUT_S = 15.0

QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"


class Written(WriterCommitMessage):
    """The number of rows that one task wrote."""

    def __init__(self, rows: int) -> None:
        self.rows = rows


class _TaskWriter:
    """The common part of both writers."""

    def __init__(self, writing: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOption(
                'a topic is only ever appended to: write with .mode("append"), or .outputMode("append") or "update" in'
                " a stream. To start over, purge the topic first"
            )
        check_columns(schema, writing.topic)
        transport_of(",".join(writing.bootstrap), writing.token, writing.tls, PREFLIGHT_TIMEOUT_S).close()
        self._writing = writing

    def _write(self, batches: Iterator[pa.RecordBatch], query: str, batch: str) -> Written:
        context = TaskContext.get()
        number = context.partitionId() if context is not None else 0
        return Written(write_rows(batches, self._writing, Identities(query, batch, number)))


def write_rows(batches: Iterator[pa.RecordBatch], writing: WriteOptions, identities: Identities) -> int:
    """Write the rows of one task. Return their number. Raises BadRow, NotWritten, Unreachable."""
    count = 0
    sender: Sender | None = None
    try:
        for batch in batches:
            if sender is None and batch.num_rows:  # many tasks of a shuffle have no rows
                sender = Sender(writing.bootstrap, writing.token, writing.tls)
            at_once = _rows_at_once(batch)
            for start in range(0, batch.num_rows, at_once):
                rows = list(routed_rows(batch.slice(start, at_once), writing.topic))
                nameless = [routed for routed in rows if not routed.row.idempotency_key]
                for routed, key in zip(
                    nameless, identities.keys_of([routed.content for routed in nameless]), strict=True
                ):
                    routed.row.idempotency_key = key
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
    """Return how many rows to convert at a time: few wide ones, since each exists as an object and encoded."""
    row_bytes: int = batch.nbytes // max(1, batch.num_rows) + 1
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // row_bytes))


class BatchWriter(_TaskWriter, DataSourceArrowWriter):
    """`df.write.format("portalmq")`."""

    def __init__(self, writing: WriteOptions, schema: StructType, overwrite: bool) -> None:
        super().__init__(writing, schema, overwrite)
        self._query = f"named {writing.query}" if writing.query else f"once {uuid.uuid4().hex}"
        transport = transport_of(",".join(writing.bootstrap), writing.token, writing.tls, PREFLIGHT_TIMEOUT_S)
        try:
            partitions_of(transport, writing.topic or "")
        finally:
            transport.close()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._write(iterator, self._query, "")


class StreamWriter(_TaskWriter, DataSourceStreamArrowWriter):
    """`df.writeStream.format("portalmq")`."""

    def __init__(self, writing: WriteOptions, schema: StructType, overwrite: bool) -> None:
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
