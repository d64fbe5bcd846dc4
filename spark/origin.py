"""Where rows come from: what the readers ask of data directories and of brokers alike.

    Origin.logs()          which partitions there are, and which offsets of each are committed
    Origin.offset_at()     where in a log a moment is
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

# A task reads so many offsets at most: enough to pay for its start, few enough to keep all cores busy.
SPAN_OFFSETS = 1_000_000
# Up to so many tasks each piece is one. Where there are more, a task takes several: to start one costs Spark as much as
# to read tens of thousands of messages. It then reads no more than so many offsets in all.
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
        """Names it for good: a topic that was made again has another id."""
        return f"{self.topic}@{self.topic_id}/{self.partition}"


class Span(InputPartition):
    """Offsets [start, end) of one log, read by one task. Travels to the worker by pickle."""

    def __init__(self, log: PartitionLog, start: int, end: int) -> None:
        super().__init__(None)
        self.log = log
        self.start = start
        self.end = end

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows, in order, with these columns in this order. Bounded: no batch holds more than a few tens of MB
        unless a single message does. Raises DamagedFile, DataLoss, SourceError."""
        raise NotImplementedError


class Packed(InputPartition):
    """Small spans, of any logs, that one task reads one after the other."""

    def __init__(self, spans: Sequence[Span]) -> None:
        super().__init__(None)
        self.spans = tuple(spans)


def packed(spans: Sequence[Span], span_offsets: int = SPAN_OFFSETS) -> list[InputPartition]:
    """The tasks for these spans, in their order. Thousands of small segments, or partitions, are some hundred tasks.
    None reads more than `span_offsets`, as none of the spans does."""
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
    return [task[0] if len(task) == 1 else Packed(task) for task in tasks]


def spans_of(task: InputPartition) -> tuple[Span, ...]:
    """What a task reads. Spark makes up a task of its own where none was planned: that one reads nothing."""
    if isinstance(task, Packed):
        return task.spans
    return (task,) if isinstance(task, Span) else ()


class Origin(Protocol):
    """Data directories, or brokers. Cheap to make. `logs` looks anew; the others may go by what it saw last."""

    def logs(self) -> list[PartitionLog]:
        """The partitions of the topics that were asked for, sorted. Raises NothingThere, SourceError."""
        ...

    def offset_at(self, log: PartitionLog, timestamp_ms: int) -> int:
        """The first offset appended at that time (Unix ms) or later; `log.end_offset` when there is none."""
        ...

    def spans(self, log: PartitionLog, start: int, end: int) -> list[Span]:
        """Pieces that cover [start, end) once. The range lies within the log's."""
        ...


def rows_of(span: Span, columns: Sequence[str], fails_on_data_loss: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a span; where they were removed meanwhile and the user does not mind, those that were left."""
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
