"""The columns of a message, in Spark's types and in Arrow's. INTERFACE: names and their order are final.

topic, partition, offset     the position; offsets rise, with gaps
key, value                   the bytes as they were sent
content_type, headers        headers are null when there are none
timestamp, appended_at       the append time (both the same today: the broker's clock, never falling in a log)
deliver_at, expires_at       null when not set
priority                     0 by default
leader_epoch                 of the leader that appended it
producer_id, sequence        of the idempotent producer, for this message; null without one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from portalmq.spark.errors import BadOption

TEXT = (StringType(), pa.string())
BINARY = (BinaryType(), pa.binary())
INT = (IntegerType(), pa.int32())
LONG = (LongType(), pa.int64())
TIME = (TimestampType(), pa.timestamp("us", "UTC"))

COLUMNS: dict[str, tuple[DataType, pa.DataType]] = {
    "topic": TEXT,
    "partition": INT,
    "offset": LONG,
    "key": BINARY,
    "value": BINARY,
    "content_type": TEXT,
    "headers": (MapType(StringType(), StringType()), pa.map_(pa.string(), pa.string())),
    "timestamp": TIME,
    "deliver_at": TIME,
    "expires_at": TIME,
    "priority": INT,
    "appended_at": TIME,
    "leader_epoch": LONG,
    "producer_id": LONG,
    "sequence": LONG,
}


class Table:
    """A table's columns: names, and their types in Spark and in Arrow."""

    def __init__(self, name: str, columns: Mapping[str, tuple[DataType, pa.DataType]]) -> None:
        self.name = name
        self._columns = columns

    def schema_of(self, names: Sequence[str] | None) -> StructType:
        """Return the schema of these columns, or of all. Raises BadOption for unknown, repeated and no columns."""
        wanted = tuple(self._columns if names is None else names)
        unknown = [name for name in wanted if name not in self._columns]
        if unknown:
            raise BadOption(
                f"no column {', '.join(map(repr, unknown))} in table {self.name}: its columns are"
                f" {', '.join(self._columns)}"
            )
        if len(set(wanted)) != len(wanted) or not wanted:
            raise BadOption("columns: name each column once, and at least one")
        return StructType([StructField(name, self._columns[name][0]) for name in wanted])

    def columns_of(self, schema: StructType) -> tuple[str, ...]:
        """Return the schema's columns. Raises BadOption when it differs from the table's other than by omissions."""
        own = self.schema_of(schema.names)
        for asked, ours in zip(schema.fields, own.fields, strict=True):
            if asked.dataType != ours.dataType:
                raise BadOption(
                    f"column {asked.name!r} is {ours.dataType.simpleString()}, not {asked.dataType.simpleString()}:"
                    " read it as it is and cast it in the query"
                )
        return tuple(schema.names)

    def arrow_schema(self, names: Sequence[str]) -> pa.Schema:
        return pa.schema([(name, self._columns[name][1]) for name in names])


MESSAGES_TABLE = Table("messages", COLUMNS)
