"""The columns that the sink takes, and the conversion of rows to messages.

    value              binary or string; the only required column, never null
    key, headers       binary or string; map<string,string>
    topic, partition   the destination; the option `topic` wins over the column
    content_type       default application/octet-stream, or text/plain for a string
    deliver_at         timestamp: not delivered before
    ttl_ms             whole number: not delivered later than this after it was due
    priority           0 to 31
    idempotency_key    the row's own identity, if it has one

Null in any column but value means that the column is absent. Names and types are checked before the job starts, values
when they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from portalmq import wire
from portalmq.errors import InvalidRequest
from portalmq.spark.errors import BadOption, BadRow

_TEXT = (StringType,)
_BYTES = (BinaryType, StringType)
_WHOLE = (ByteType, ShortType, IntegerType, LongType)
TAKEN: dict[str, tuple[type[DataType], ...]] = {
    "value": _BYTES,
    "key": _BYTES,
    "headers": (MapType,),
    "topic": _TEXT,
    "partition": _WHOLE,
    "content_type": _TEXT,
    "deliver_at": (TimestampType,),
    "ttl_ms": _WHOLE,
    "priority": _WHOLE,
    "idempotency_key": _TEXT,
}

_encode = msgspec.msgpack.Encoder(order="sorted").encode


class Row(msgspec.Struct, omit_defaults=True):
    """One message for the wire; encodes as a wire.PackMessage."""

    value: bytes
    idempotency_key: str = ""
    content_type: str | None = None
    key: bytes | None = None
    headers: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    ttl_ms: int | None = None
    priority: int = 0


class RoutedRow(msgspec.Struct):
    """A row with its destination, as far as the row gives it, and its content, for its identity."""

    row: Row
    topic: str
    partition: int | None
    content: bytes


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raise BadOption for unknown columns, and for missing or wrongly typed ones."""
    unknown = [name for name in schema.names if name not in TAKEN]
    if unknown:
        raise BadOption(
            f"the sink has no use for the columns {', '.join(unknown)}: drop them, or put them into value"
            f" (to_json(struct(*)) AS value). It takes {', '.join(TAKEN)}"
        )
    if len(set(schema.names)) != len(schema.names):
        raise BadOption(f"a column is there twice: {', '.join(schema.names)}")
    if "value" not in schema.names:
        raise BadOption(
            "there is no column value, the message itself: name one so, or put all into it"
            " (to_json(struct(*)) AS value)"
        )
    if topic is None and "topic" not in schema.names:
        raise BadOption('where to? Give .option("topic", "orders"), or a column topic')
    if topic is not None:
        checked_topic(topic, "the option topic")
    for field in schema.fields:
        kinds = TAKEN[field.name]
        is_taken = isinstance(field.dataType, kinds)
        if is_taken and isinstance(field.dataType, MapType):
            is_taken = isinstance(field.dataType.keyType, StringType) and isinstance(
                field.dataType.valueType, StringType
            )
        if not is_taken:
            wanted = " or ".join("map<string,string>" if kind is MapType else kind().simpleString() for kind in kinds)
            raise BadOption(
                f"the column {field.name} is {field.dataType.simpleString()}, and has to be {wanted}: cast it"
            )


def checked_topic(name: str, what: str) -> str:
    try:
        return wire.check_name(name, "topic")
    except InvalidRequest as error:
        raise BadOption(f"{what}: {error}") from None


def routed_rows(batch: pa.RecordBatch, topic: str | None) -> Iterator[RoutedRow]:
    """Yield the rows in order. Raises BadRow."""
    names = batch.schema.names
    given = {name: _values(name, batch.column(index)) for index, name in enumerate(names)}
    is_text = _is_text(batch.schema.field("value").type)
    count = batch.num_rows
    columns = [given.get(name) or [None] * count for name in _READ]
    if topic is not None:
        columns[0] = [topic] * count
    kind = wire.TEXT if is_text else None
    for at, (to, number, value, key, headers, content_type, deliver_at, ttl_ms, priority, own_key) in enumerate(
        zip(*columns, strict=True)
    ):
        if value is None:
            raise BadRow("value is null: a message is bytes or text. Filter such rows out, or coalesce them")
        if to is None:
            raise BadRow(f"topic is null (row {at} of its batch): say where it goes")
        if len(value) > wire.BODY_BYTES_MAX - _ROOM_BYTES:
            raise BadRow(f"a value has {len(value)} bytes, a request takes {wire.BODY_BYTES_MAX - _ROOM_BYTES}")
        row = Row(value, own_key or "", content_type or kind, key)
        if headers:
            row.headers = dict(headers)
            if None in row.headers.values():
                raise BadRow(f"a header is null: {row.headers}. Leave it out")
        if deliver_at is not None:
            row.deliver_at_ms = max(0, deliver_at // 1000)
        if ttl_ms is not None:
            row.ttl_ms = _within("ttl_ms", ttl_ms, 1, wire.INTEGER_MAX)
        if priority is not None:
            row.priority = _within("priority", priority, 0, wire.PRIORITY_MAX)
        if own_key is not None and not _is_key(own_key):
            raise BadRow(
                f"idempotency_key is {own_key[:100]!r}: it has to be 1 to {wire.IDEMPOTENCY_KEY_LENGTH_MAX} printable"
                " ASCII characters"
            )
        if number is not None:
            number = _within("partition", number, 0, wire.PARTITIONS_MAX)
        yield RoutedRow(row, to, number, _encode((row, to, number)))


# In the order of the loop in routed_rows.
_READ = (
    "topic",
    "partition",
    "value",
    "key",
    "headers",
    "content_type",
    "deliver_at",
    "ttl_ms",
    "priority",
    "idempotency_key",
)
# Reserved in a request's body for everything but the value: a key and headers of maximum size.
_ROOM_BYTES = 64 * 1024


def _values(name: str, column: pa.Array) -> Sequence[Any]:
    if name in {"value", "key"}:
        if _is_text(column.type):
            column = column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
    elif name == "deliver_at":
        column = pc.cast(column, pa.timestamp("us", column.type.tz)).cast(pa.int64())
    values: Sequence[Any] = column.to_pylist()
    return values


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _within(name: str, value: int, least: int, most: int) -> int:
    if not least <= value <= most:
        raise BadRow(f"{name} is {value}, and has to be {least} to {most}")
    return value


def _is_key(key: str) -> bool:
    return 1 <= len(key) <= wire.IDEMPOTENCY_KEY_LENGTH_MAX and key.isascii() and key.isprintable()
