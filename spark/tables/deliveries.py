"""The table `deliveries`: the history of messages in their groups, from the log's records.

    topic, partition, group, mode    mode: queue | stream
    event            queue   started | granted | acked | nacked | returned | extended | expired | dead | redriven
                             dropped
                     stream  claimed | committed | sought
                     both    ended
    at               the append time of the record: the leader's clock, as for messages
    record_offset    the record's own offset: the order of events
    first_offset, messages    the messages: this many from this offset on; for `started`, `claimed` and `sought` the
                     offset where the group continues, and 0 messages
    delivery         granted: the delivery count; dead: the number of deliveries; committed: 1, or 2 for messages
                     committed before and again after a seek; acked: 0 when the delivery is not in the log, because its
                     leader died before it replicated the record
    available_at     granted, committed: the time from which these messages could be delivered (append time or
                     deliver_at); null when their file is gone
    consumer         the consumer that received or committed them
    reason           of nacked and dead

A row is one run of messages with one time: a delivery from several batches is several rows. `returned` messages were
given back unseen, so their next delivery has the same count.

A commit of input and output (exactly once) is `acked` in a queue group, `committed` in a stream group. Records that the
log no longer holds (retention, and compaction, which also empties older records of groups) are not in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from portalmq.spark.columns import INT, LONG, TEXT, TIME, Table
from portalmq.spark.errors import DamagedFile
from portalmq.spark.files.segment import opened
from portalmq.spark.origin import PartitionLog
from portalmq.spark.tables import bodies
from portalmq.spark.tables.availability import Availability
from portalmq.spark.tables.table import Piece, TableReader, Task, packed, pieces_of

TABLE = Table(
    "deliveries",
    {
        "topic": TEXT,
        "partition": INT,
        "group": TEXT,
        "mode": TEXT,
        "event": TEXT,
        "at": TIME,
        "record_offset": LONG,
        "first_offset": LONG,
        "messages": LONG,
        "delivery": INT,
        "available_at": TIME,
        "consumer": TEXT,
        "reason": TEXT,
    },
)
ROWS_IN_A_BATCH = 16_384
# Records of this many offsets are decoded at a time: one may hold a thousand ranges.
CHUNK_OFFSETS = 8_192
_BLANK = 6


class DeliveriesTask(Task):
    """One task: the queue groups' records in `pieces`, and the stream groups' in each log of `streams`. The rows of a
    stream group's commit depend on those before it, so one task reads a log from its start."""

    def __init__(self, pieces: tuple[Piece, ...], streams: tuple[tuple[Piece, ...], ...]) -> None:
        super().__init__(pieces)
        self.streams = streams


class DeliveriesReader(TableReader):
    table = TABLE

    def partitions(self) -> Sequence[InputPartition]:
        origin = self.origin()
        of_logs = [pieces_of(origin, log) for log in origin.logs()]
        alone = {pieces[0] for pieces in of_logs if len(pieces) == 1}
        tasks = [
            DeliveriesTask(group, tuple((piece,) for piece in group if piece in alone))
            for group in packed([piece for pieces in of_logs for piece in pieces], self.reading.span_offsets)
        ]
        return [*tasks, *(DeliveriesTask((), (tuple(pieces),)) for pieces in of_logs if len(pieces) > 1)] or [
            DeliveriesTask((), ())
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, DeliveriesTask)
        yield from self._batched(self._rows(partition))

    def _rows(self, task: DeliveriesTask) -> Iterator[_Row]:
        availability: Availability | None = None
        log: PartitionLog | None = None
        for piece in task.pieces:
            if availability is None or piece.log != log:
                availability, log = Availability([piece.path.parent, *piece.elsewhere]), piece.log
            for chunk in piece.chunks(CHUNK_OFFSETS):
                for record in _records(chunk, _QUEUE_SQL):
                    for row in _queue_rows(piece.log, record, availability):
                        if row.messages or isinstance(record.body, bodies.GroupStartBody | bodies.GroupEndBody):
                            yield row
        for pieces in task.streams:
            yield from _stream_rows(pieces)

    def _batched(self, rows: Iterator[_Row]) -> Iterator[pa.RecordBatch]:
        schema = TABLE.arrow_schema(self.columns)
        kept: list[_Row] = []
        for row in rows:
            kept.append(row)
            if len(kept) == ROWS_IN_A_BATCH:
                yield _batch(kept, self.columns, schema)
                kept = []
        if kept:
            yield _batch(kept, self.columns, schema)


READER = DeliveriesReader


class _Record(NamedTuple):
    offset: int
    group: str
    at_ms: int
    body: bodies.Body


class _Row(NamedTuple):
    """A row of the table, with times as Unix ms."""

    topic: str
    partition: int
    group: str
    mode: str | None
    event: str
    at: int
    record_offset: int
    first_offset: int | None
    messages: int
    delivery: int | None = None
    available_at: int | None = None
    consumer: str | None = None
    reason: str | None = None


def _batch(rows: list[_Row], columns: Sequence[str], schema: pa.Schema) -> pa.RecordBatch:
    arrays = []
    for name in columns:
        values: Sequence[Any] = [getattr(row, name) for row in rows]
        if name in {"at", "available_at"}:
            values = [None if value is None else value * 1000 for value in values]
        arrays.append(pa.array(values, schema.field(name).type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _records(chunk: Piece, query: str) -> list[_Record]:
    def read(path: Path, low: int, high: int) -> list[_Record]:
        found = []
        with opened(path) as connection:
            for offset, kind, group, at_ms, content in connection.execute(query, (low, high)):
                try:
                    body = bodies.decoded(kind, content)
                except msgspec.MsgspecError as error:
                    raise DamagedFile(path, f"the record at offset {offset} cannot be read ({error})") from error
                if body is not None:
                    found.append(_Record(offset, group, at_ms, body))
        return found

    return chunk.read(read)


# --- queue groups ----------------------------------------------------------------------------------------------------


def _queue_rows(log: PartitionLog, record: _Record, availability: Availability) -> Iterator[_Row]:
    body = record.body

    def row(event: str, start: int | None, end: int, mode: str | None = "queue", **more: Any) -> _Row:
        if start is not None and start < end:  # messages below the log's start are gone
            start = min(max(start, log.start_offset), end)
        where = (log.topic, log.partition, record.group, mode, event, record.at_ms, record.offset)
        return _Row(*where, start, 0 if start is None else end - start, **more)

    match body:
        case bodies.GroupStartBody():
            yield row("started", body.start, body.start)
        case bodies.GroupEndBody():
            yield row("ended", None, 0, None)
        case bodies.GrantBody():
            for index, (start, end, delivery) in enumerate(body.ranges):
                lane = body.lanes[index] if body.lanes else 0
                for run in availability.granted(start, end, lane):
                    yield row(
                        "granted",
                        run.first,
                        run.first + run.messages,
                        delivery=delivery,
                        available_at=run.available_ms,
                        consumer=body.consumer,
                    )
            for start, end in body.gone:
                yield row("expired", start, end)
        case bodies.AckBody() | bodies.CommitBody():
            yield from (row("acked", start, end) for start, end in body.ranges)
            yield from (row("acked", offset, offset + 1, delivery=0) for *_, offset in body.ahead)
        case bodies.NackBody():
            event = "returned" if body.unseen else "nacked"
            yield from (row(event, start, end, reason=body.reason) for start, end, _ in body.ranges)
        case bodies.ExtendBody():
            yield from (row("extended", start, end) for start, end in body.ranges)
        case bodies.DeadBody():
            for start, end, deliveries in body.ranges:
                yield row("dead", start, end, delivery=deliveries, reason=body.reason)
        case bodies.RedriveBody():
            yield from (row("redriven", start, end) for start, end, _ in body.ranges)
        case bodies.DropBody():
            yield from (row("dropped", start, end) for start, end in body.ranges)


# --- stream groups ---------------------------------------------------------------------------------------------------


class _StreamProgress:
    """The progress of a stream group: `position` is the next offset to read, None while unknown, and `done` has the
    ranges ever committed, sorted and disjoint. Seeks create several of them: offsets that a seek skips were not read,
    and are new to the group when a later seek goes back."""

    def __init__(self, position: int | None) -> None:
        self.position = position
        self.done: list[tuple[int, int]] = []

    def seek(self, offset: int) -> None:
        if self.position is None:
            self.done = [(0, offset)]  # as far as known
        self.position = offset

    def commit(self, offset: int) -> list[tuple[int, int, int]]:
        """Return the ranges that the commit adds, (start, end, 1 or 2)."""
        position = self.position
        self.position = max(position or 0, offset)
        if position is None:
            self.done = [(0, offset)]
        if position is None or position >= offset:
            return []
        parts: list[tuple[int, int, int]] = []
        at = position
        for start, end in self.done:
            if end <= at or start >= offset:
                continue
            if at < start:
                parts.append((at, start, 1))
            parts.append((max(at, start), min(end, offset), 2))
            at = end
        if at < offset:
            parts.append((at, offset, 1))
        apart = [each for each in self.done if each[1] < position or each[0] > offset]
        touched = [each for each in self.done if each not in apart]
        joined = (min([position, *(start for start, _ in touched)]), max([offset, *(end for _, end in touched)]))
        self.done = sorted([*apart, joined])
        return parts


def _stream_rows(pieces: Sequence[Piece]) -> Iterator[_Row]:
    log = pieces[0].log
    availability = Availability([pieces[0].path.parent, *pieces[0].elsewhere])
    readers: dict[str, _StreamProgress] = {}
    is_compacted = False
    for piece in pieces:
        for chunk in piece.chunks(CHUNK_OFFSETS):
            is_compacted = is_compacted or bool(chunk.read(_blanks))
            for record in _records(chunk, _STREAM_SQL):
                yield from _one_stream(log, record, readers, availability, is_compacted)


def _blanks(path: Path, low: int, high: int) -> list[int]:
    with opened(path) as connection:
        query = "SELECT base_offset FROM batches WHERE base_offset >= ? AND base_offset < ? AND kind = ? LIMIT 1"
        return [row[0] for row in connection.execute(query, (low, high, _BLANK))]


def _one_stream(
    log: PartitionLog,
    record: _Record,
    readers: dict[str, _StreamProgress],
    availability: Availability,
    is_compacted: bool,
) -> Iterator[_Row]:
    where = (log.topic, log.partition, record.group, "stream")
    when = (record.at_ms, record.offset)
    body = record.body
    if isinstance(body, bodies.GroupEndBody):
        readers.pop(record.group, None)
        return
    if record.group not in readers and not (isinstance(body, bodies.CommitBody) and body.offset < 0):
        # A claim has the group's position. Before any other record some are missing: those removed by retention were
        # about earlier messages, which are gone too; those emptied by compaction may have been about any.
        begins = max(log.start_offset, body.start) if isinstance(body, bodies.ClaimBody) else log.start_offset
        is_known = isinstance(body, bodies.ClaimBody) or not is_compacted
        readers[record.group] = _StreamProgress(begins if is_known else None)
    match body:
        case bodies.ClaimBody():
            yield _Row(*where, "claimed", *when, body.start, 0, consumer=body.member)
        case bodies.SeekBody():
            readers[record.group].seek(body.offset)
            yield _Row(*where, "sought", *when, body.offset, 0)
        case bodies.CommitOffsetBody() | bodies.CommitBody() if body.offset >= 0:
            for start, end, delivery in readers[record.group].commit(body.offset):
                for run in availability.committed(max(start, log.start_offset), end):
                    yield _Row(
                        *where,
                        "committed",
                        *when,
                        first_offset=run.first,
                        messages=run.messages,
                        delivery=delivery,
                        available_at=run.available_ms,
                        consumer=body.member,
                    )


def _select(kinds: str) -> str:
    return f"""
SELECT r.offset, r.kind, r.group_name, b.appended_at_ms, r.body
FROM records AS r JOIN batches AS b ON b.base_offset = r.offset
WHERE r.offset >= ? AND r.offset < ? AND {kinds} ORDER BY r.offset"""


_STREAM_SQL = _select(f"r.kind IN {bodies.STREAM_KINDS}")
_QUEUE_SQL = _select("r.kind BETWEEN 10 AND 19")
