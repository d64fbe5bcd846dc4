"""A batch read: the offsets between two bounds, as the logs stood when the query was planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from portalmq.spark.options import Reading
from portalmq.spark.origin import Span, origin_of, rows_of


class MessagesReader(DataSourceReader):
    def __init__(self, reading: Reading, columns: Sequence[str]) -> None:
        self.reading = reading
        self.columns = tuple(columns)

    def partitions(self) -> list[InputPartition]:
        origin = origin_of(self.reading)
        return [span for log in origin.logs() for span in origin.spans(log, log.start_offset, log.end_offset)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, Span):
            yield from rows_of(partition, self.columns, self.reading.fails_on_data_loss)
