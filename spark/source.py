"""The format "portalmq": maps Spark's requests to the readers and writers of this package.

Each method imports what it needs: for each request Spark creates an instance of this class in a new process, and most
requests need little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from portalmq.spark import options

if TYPE_CHECKING:
    from portalmq.spark.options import ReadOptions


class PortalMQ(DataSource):
    @classmethod
    def name(cls) -> str:
        return "portalmq"

    def schema(self) -> StructType:
        from portalmq.spark.columns import MESSAGES_TABLE

        reading = options.schema_options(self.options)
        if reading.table != "messages":
            schema: StructType = _table(reading).TABLE.schema_of(reading.columns)
            return schema
        return MESSAGES_TABLE.schema_of(reading.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        from portalmq.spark.columns import MESSAGES_TABLE
        from portalmq.spark.reading.batch import FilteringReader, MessagesReader

        reading = options.batch_options(self.options)
        if reading.table != "messages":
            reader: DataSourceReader = _table(reading).READER(reading, schema)
            return reader
        return (FilteringReader if reading.pushes_down else MessagesReader)(reading, MESSAGES_TABLE.columns_of(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from portalmq.spark.columns import MESSAGES_TABLE
        from portalmq.spark.reading.stream import MessagesStream

        return MessagesStream(options.stream_options(self.options), MESSAGES_TABLE.columns_of(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from portalmq.spark.writing.sink import BatchWriter

        return BatchWriter(options.write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from portalmq.spark.writing.sink import StreamWriter

        return StreamWriter(options.write_options(self.options), schema, overwrite)


def _table(reading: ReadOptions) -> Any:
    """Return the module of a table other than `messages`, by the option `table`. It has

    TABLE    its columns, a columns.Table
    READER   its reader, a tables.table.TableReader
    """
    import importlib

    return importlib.import_module(f"portalmq.spark.tables.{reading.table}")
