"""The interface through which readers get rows, from data directories and from brokers.

    Origin.logs()          the partitions, and the committed offsets of each
    Origin.offset_at()     the offset for a point in time
    Origin.spans()         a range of offsets, cut into pieces that one task each can read
    Span.batches()         the rows of one piece, as Arrow batches; runs in a Spark worker

Append times never fall along a log, so a range of times is a range of offsets.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from portalmq.spark.errors import DataLoss

# The most offsets that one task reads: enough to pay for its start, few enough to keep all cores busy.
SPAN_OFFSETS = 1_000_000
# Up to this many tasks each span is a task. Beyond it a task takes several spans: to start a task costs Spark as much
# as to read tens of thousands of messages. Such a task reads at most PACKED_OFFSETS in all.
TASKS_FEW = 128
PACKED_OFFSETS = 65_536


@dataclass(frozen=True, slots=True)
class PartitionLog:
    """One partition of one topic. Readable offsets are [start_offset, end_offset)."""

    topic: str
    topic_id: str
    partition: int
    start_offset: int
    end_offset: int

    @property
    def name(self) -> str:
        """A permanent name: a topic that was deleted and created again has another id."""
        return f"{self.topic}@{self.topic_id}/{self.partition}"


class Span(InputPartition):
    """Offsets [start, end) of one log, read by one task. Pickled for the worker."""

    def __init__(self, log: PartitionLog, start: int, end: int) -> None:
        super().__init__(None)
        self.log = log
        self.start = start
        self.end = end

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows in order, with these columns in this order. Bounded: no batch exceeds a few tens of MB unless
        a single message does. Raises DamagedFile, DataLoss, SourceError."""
        raise NotImplementedError


class SpanGroup(InputPartition):
    """Small spans, of any logs, that one task reads one after another."""

    def __init__(self, spans: Sequence[Span]) -> None:
        super().__init__(None)
        self.spans = tuple(spans)


def packed(spans: Sequence[Span], span_offsets: int = SPAN_OFFSETS) -> list[InputPartition]:
    """Return tasks for these spans, in order. Thousands of small segments or partitions become some hundred tasks. No
    task reads more than `span_offsets`; no span is longer."""
    most = -(-len(spans) // TASKS_FEW)
    tasks: list[list[Span]] = []
    offsets = 0
    for span in spans:
        size = span.end - span.start
        if not tasks or len(tasks[-1]) >= most or offsets + size > min(PACKED_OFFSETS, span_offsets):
            tasks.append([])
            offsets = 0
        tasks[-1].append(span)
        offsets += size
    return [task[0] if len(task) == 1 else SpanGroup(task) for task in tasks]


def spans_of(task: InputPartition) -> tuple[Span, ...]:
    """Return the spans of a task. Spark adds an empty task of its own to an empty plan; it has none."""
    if isinstance(task, SpanGroup):
        return task.spans
    return (task,) if isinstance(task, Span) else ()


class Origin(Protocol):
    """Data directories, or brokers. Cheap to create. `logs` reads afresh; the others may use what it saw last."""

    def logs(self) -> list[PartitionLog]:
        """Return the partitions of the selected topics, sorted. Raises NothingThere, SourceError."""
        ...

    def offset_at(self, log: PartitionLog, timestamp_ms: int) -> int:
        """Return the first offset appended at that time (Unix ms) or later; `log.end_offset` when there is none."""
        ...

    def spans(self, log: PartitionLog, start: int, end: int) -> list[Span]:
        """Return pieces that cover [start, end) once. The range lies within the log's."""
        ...


def rows_of(span: Span, columns: Sequence[str], fails_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a span. With `fails_on_data_loss` False it skips rows that were removed in the meantime."""
    while True:
        try:
            yield from span.batches(columns)
            return
        except DataLoss as loss:
            if fails_on_data_loss:
                raise
            if loss.resume_at is None or not span.start < loss.resume_at < span.end:
                return
            span.start = loss.resume_at
