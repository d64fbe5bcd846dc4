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

from collections.abc import Sequence

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

_TIME = pa.timestamp("us", "UTC")
_HEADERS = pa.map_(pa.string(), pa.string())

COLUMNS: dict[str, tuple[DataType, pa.DataType]] = {
    "topic": (StringType(), pa.string()),
    "partition": (IntegerType(), pa.int32()),
    "offset": (LongType(), pa.int64()),
    "key": (BinaryType(), pa.binary()),
    "value": (BinaryType(), pa.binary()),
    "content_type": (StringType(), pa.string()),
    "headers": (MapType(StringType(), StringType()), _HEADERS),
    "timestamp": (TimestampType(), _TIME),
    "deliver_at": (TimestampType(), _TIME),
    "expires_at": (TimestampType(), _TIME),
    "priority": (IntegerType(), pa.int32()),
    "appended_at": (TimestampType(), _TIME),
    "leader_epoch": (LongType(), pa.int64()),
    "producer_id": (LongType(), pa.int64()),
    "sequence": (LongType(), pa.int64()),
}


def schema_of(names: Sequence[str]) -> StructType:
    """Return the schema for Spark. Raises BadOption for an unknown column."""
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise BadOption(f"no column {', '.join(map(repr, unknown))}: the columns are {', '.join(COLUMNS)}")
    if len(set(names)) != len(names) or not names:
        raise BadOption("columns: name each column once, and at least one")
    return StructType([StructField(name, COLUMNS[name][0]) for name in names])


def columns_of(schema: StructType) -> tuple[str, ...]:
    """Return the columns of a schema. Raises BadOption when it differs from ours other than by leaving columns out."""
    ours = schema_of(schema.names)
    for asked, own in zip(schema.fields, ours.fields, strict=True):
        if asked.dataType != own.dataType:
            raise BadOption(
                f"column {asked.name!r} is {own.dataType.simpleString()}, not {asked.dataType.simpleString()}:"
                " read it as it is and cast it in the query"
            )
    return tuple(schema.names)


def arrow_schema(names: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, COLUMNS[name][1]) for name in names])
