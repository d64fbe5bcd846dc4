"""The format "portalmq": what Spark asks for, answered by a reader or a writer of this room."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from portalmq.spark.columns import COLUMNS, columns_of, schema_of
from portalmq.spark.directories import Directories
from portalmq.spark.origin import Span


class PortalMQ(DataSource):
    @classmethod
    def name(cls) -> str:
        return "portalmq"

    def schema(self) -> StructType:
        return schema_of(list(COLUMNS))

    def reader(self, schema: StructType) -> DataSourceReader:
        return MessagesReader(self.options["path"].split(","), self.options.get("topic"), columns_of(schema))


class MessagesReader(DataSourceReader):
    def __init__(self, paths: list[str], topic: str | None, columns: tuple[str, ...]) -> None:
        self.origin = Directories(paths, [topic] if topic else None)
        self.columns = columns

    def partitions(self) -> list[InputPartition]:
        return [span for log in self.origin.logs() for span in self.origin.spans(log, log.start_offset, log.end_offset)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, Span):
            yield from partition.batches(self.columns)
