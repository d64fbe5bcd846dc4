"""A batch read: the offsets between two bounds, as the logs were at planning time, that can pass its filters.

Spark plans by `pushFilters` and then `partitions`, in a process of its own; `read` runs in its workers. Spark keeps the
plan beside the DataFrame that `load` returned, for all queries built on it. Up to Spark 4.3 at least, a query without a
filter to push down therefore gets the plan of an earlier query with its filters, and so do both sides of a union or
join of two filters on one DataFrame: silently the wrong rows. So filters are only pushed down on request
(`FilteringReader`). The bounds in the options belong to the DataFrame, and are always safe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from portalmq.spark.errors import BadOption, DataLoss, NothingThere
from portalmq.spark.options import EARLIEST, LATEST, Bound, ReadOptions
from portalmq.spark.origin import Origin, PartitionLog, packed, rows_of, spans_of
from portalmq.spark.reading.filters import Bounds, bounds_of


class MessagesReader(DataSourceReader):
    def __init__(self, reading: ReadOptions, columns: Sequence[str]) -> None:
        self.reading = reading
        self.columns = tuple(columns)
        self.bounds = Bounds()

    def partitions(self) -> list[InputPartition]:
        """Plan the tasks. Raises SourceError."""
        origin = self.reading.origin()
        spans = [span for log, start, end in self.ranges(origin) for span in origin.spans(log, start, end)]
        return packed(spans, self.reading.span_offsets)

    def ranges(self, origin: Origin) -> Iterator[tuple[PartitionLog, int, int]]:
        """Yield the ranges of offsets to read."""
        logs = origin.logs()
        check_named("startingOffsets", self.reading.starting, logs)
        check_named("endingOffsets", self.reading.ending, logs)
        for log in logs:
            if not self.bounds.wants(log):
                continue

            def offset_at(timestamp_ms: int, log: PartitionLog = log) -> int:
                return origin.offset_at(log, timestamp_ms)

            start, end = range_of(self.reading, log, offset_at)
            for low, high in self.bounds.within(start, end, offset_at):
                yield log, low, high

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for span in spans_of(partition):
            yield from rows_of(span, self.columns, self.reading.fails_on_data_loss)


class FilteringReader(MessagesReader):
    """A reader with option pushdown=true: it plans only what the filters can pass."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self.bounds, left = bounds_of(filters)
        return left


def check_named(option: str, bound: Bound, logs: Sequence[PartitionLog]) -> None:
    """Raise NothingThere for a partition that the option names and that is not read."""
    read = {(log.topic, log.partition) for log in logs}
    for topic, partitions in bound.offsets.items():
        for number in partitions:
            if (topic, number) not in read:
                known = sorted(partition for name, partition in read if name == topic)
                has = f"it has {known[0]} to {known[-1]}" if known else "it is not among the topics that are read"
                raise NothingThere(f"{option} names partition {number} of {topic!r}: {has}")


def range_of(reading: ReadOptions, log: PartitionLog, offset_at: Callable[[int], int]) -> tuple[int, int]:
    """Return the offsets [start, end) that a batch read selects; start == end when there are none. Raises BadOption for
    offsets beyond the log's end, DataLoss for removed ones."""
    start, end = _start(reading, log, offset_at), _end(reading, log, offset_at)
    asked = min(start, end)
    if asked < log.start_offset:
        if reading.fails_on_data_loss:
            raise DataLoss(
                f"{log.topic!r}, partition {log.partition}, begins at offset {log.start_offset} now: {asked} is gone"
                " (retention, or a purge)"
            )
        start, end = max(start, log.start_offset), max(end, log.start_offset)
    elif start > end and reading.starting.timestamp_ms is None and reading.ending.timestamp_ms is None:
        raise BadOption(
            f"{log.topic!r}, partition {log.partition}, is to be read from offset {start} up to {end}: the start is"
            " behind the end"
        )
    return min(start, end), end


def _start(reading: ReadOptions, log: PartitionLog, offset_at: Callable[[int], int]) -> int:
    bound = reading.starting
    if bound.timestamp_ms is not None:
        return offset_at(bound.timestamp_ms)
    asked = bound.of(log)
    if asked == EARLIEST:
        return log.start_offset
    return log.end_offset if asked == LATEST else _checked("startingOffsets", asked, log)


def _end(reading: ReadOptions, log: PartitionLog, offset_at: Callable[[int], int]) -> int:
    bound = reading.ending
    if bound.timestamp_ms is not None:
        return offset_at(bound.timestamp_ms)
    asked = bound.of(log)
    return log.end_offset if asked == LATEST else _checked("endingOffsets", asked, log)


def _checked(option: str, asked: int, log: PartitionLog) -> int:
    """Return the offset if it is not beyond the log's end."""
    if asked > log.end_offset:
        raise BadOption(
            f"{option}: {asked} for {log.topic!r}, partition {log.partition}, which is committed up to"
            f" {log.end_offset} only, as far as is known here (the files of a live broker tell it a second late): name"
            f" an offset up to that, or {LATEST} for the end"
        )
    return asked
