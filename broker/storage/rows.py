"""Conversion of records into rows and back, as fast as SQLite takes them.

The cost of an insert from Python is not SQLite's but the way to it: every step of a statement releases the interpreter
lock and waits to get it back. So many rows go into one step. A batch of plain messages (a value, and perhaps an
identity) is one `INSERT ... SELECT ... FROM carray`, which runs without Python; any other batch uses VALUES lists of
100 rows. Both omit the columns that no message of the batch uses. Checks and conversions work on whole columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import apsw
import msgspec

from portalmq.broker.storage.batch import Batch, BatchKind, Record
from portalmq.broker.storage.schema import PRESET_CONTENT_TYPES
from portalmq.sql import is_text, text_or_blob

# The row counts of the prepared VALUES lists. At 100 rows the longest statement is below the 16 KiB that apsw caches.
CHUNK_ROWS = (100, 10, 1)
CARRAY_ROWS_MIN = 8

MESSAGE_ID_BYTES = 16
BODY_HASH_BYTES = 8
IDENTITY_NAMES = ", message_id, body_hash"
IDENTITY_CUTS = (
    f", substr(?5, {MESSAGE_ID_BYTES} * (rowid - 1) + 1, {MESSAGE_ID_BYTES})"
    f", substr(?6, {BODY_HASH_BYTES} * (rowid - 1) + 1, {BODY_HASH_BYTES})"
)

AS_TEXT = "CAST(? AS TEXT)"
AS_IS = "?"
AS_HEADERS = "NULLIF(?, 'null')"

_encode_json = msgspec.json.Encoder().encode
_encode_lines = msgspec.json.Encoder().encode_lines
_decode_headers = msgspec.json.Decoder(dict[str, str]).decode


def _all_text(values: Iterable[bytes]) -> bool:
    # Joined by ASCII separators, the whole is valid UTF-8 exactly if every part is.
    joined = b"\n".join(values)
    if b"\0" in joined:
        return False
    if joined.isascii():
        return True
    try:
        joined.decode()
    except UnicodeDecodeError:
        return False
    return True


def content_types_of(connection: apsw.Connection) -> dict[int, str]:
    """Return the content types of a segment file by their ids. With a flipped bit in its schema they may have none."""
    found = dict(connection.execute("SELECT id, name FROM content_types"))
    if not all(isinstance(number, int) and isinstance(name, str) for number, name in found.items()):
        raise apsw.CorruptError("content types without ids")
    return found


class ContentTypes:
    """The content types of one segment file: name -> (id, whether it is text)."""

    def __init__(self, connection: apsw.Connection) -> None:
        self._known = {name: (number, is_text(name)) for number, name in content_types_of(connection).items()}

    def __len__(self) -> int:
        return len(self._known)

    def number(self, connection: apsw.Connection, name: str) -> tuple[int, bool]:
        """Return the id of `name` and whether it is text; add it to the file in the running transaction if it is
        new."""
        known = self._known.get(name)
        if known is None:
            known = (len(self._known), is_text(name))
            connection.execute("INSERT INTO content_types (id, name) VALUES (?, ?)", (known[0], name))
            self._known[name] = known
        return known


def preset_content_types(connection: apsw.Connection) -> None:
    connection.executemany("INSERT INTO content_types (id, name) VALUES (?, ?)", enumerate(PRESET_CONTENT_TYPES))


class _Column(NamedTuple):
    name: str
    expression: str
    values: Sequence[Any]


def insert_messages(
    connection: apsw.Connection,
    content_types: ContentTypes,
    offset: int,
    timestamp_ms: int,
    records: Sequence[Record],
    *,
    are_compressed: bool = False,
) -> None:
    """Insert `records` at consecutive offsets from `offset` on, within the running transaction; those whose values
    `are_compressed` get NULL in their place."""
    names = [record.content_type for record in records]
    values: Sequence[Any] = [None] * len(records) if are_compressed else [record.value for record in records]
    optional = _optional_columns(records)
    if names.count(names[0]) == len(names):
        number, textual = content_types.number(connection, names[0])
        value = _text_column("value", values) if textual and not are_compressed else _Column("value", AS_IS, values)
        identities = _joined_identities(optional) if len(records) >= CARRAY_ROWS_MIN else None
        if identities is not None and value.values is values:
            names_of, cuts = (IDENTITY_NAMES, IDENTITY_CUTS) if identities else ("", "")
            if are_compressed:  # as many zeros as there are rows
                value = _Column("value", "NULL", ())
                rows = apsw.carray(bytes(4 * len(records)), flags=apsw.SQLITE_CARRAY_INT32)
            else:
                rows = apsw.carray(tuple(values))
            connection.execute(
                f"INSERT INTO messages (offset, timestamp_ms, content_type, value{names_of})"
                f" SELECT ?1 + rowid - 1, ?2, ?3, {value.expression.replace('?', 'value')}{cuts} FROM carray(?4)",
                (offset, timestamp_ms, number, rows, *identities),
            )
            return
        constants: tuple[int, ...] = (timestamp_ms, number)
        columns = (value, *optional)
    else:
        numbers = [content_types.number(connection, name) for name in names]
        values = [
            text_or_blob(value) if textual and value is not None else value
            for value, (_, textual) in zip(values, numbers, strict=True)
        ]
        constants = (timestamp_ms,)
        columns = (
            _Column("content_type", AS_IS, [number for number, _ in numbers]),
            _Column("value", AS_IS, values),
            *optional,
        )
    shape = tuple((column.name, column.expression) for column in columns)
    _execute_in_chunks(
        connection,
        lambda rows: _message_insert(shape, len(constants), rows),
        [column.values for column in columns],
        lambda done: (offset + done, *constants),
    )


def _joined_identities(optional: Sequence[_Column]) -> tuple[bytes, ...] | None:
    """Return all ids and all body hashes joined, to be cut up by the statement; empty without any. None if there is
    another column, or an id or hash of another length."""
    if not optional:
        return ()
    if [column.name for column in optional] != ["message_id", "body_hash"]:
        return None
    for column, size in zip(optional, (MESSAGE_ID_BYTES, BODY_HASH_BYTES), strict=True):
        if any(value is None or len(value) != size for value in column.values):
            return None
    ids, hashes = optional
    return b"".join(ids.values), b"".join(hashes.values)


def _text_column(name: str, values: Sequence[bytes | None]) -> _Column:
    if _all_text(value for value in values if value is not None):
        return _Column(name, AS_TEXT, values)
    return _Column(name, AS_IS, [None if value is None else text_or_blob(value) for value in values])


def _optional_columns(records: Sequence[Record]) -> list[_Column]:
    """Return the columns, besides value and content type, that at least one record uses."""
    count = len(records)
    columns = []
    keys = [record.key for record in records]
    if keys.count(None) != count:
        columns.append(_text_column("key", keys))
    headers = [record.headers for record in records]
    if headers.count(None) != count:
        # One call for all: JSON has no raw newline, and a record without headers gives "null".
        columns.append(_Column("headers", AS_HEADERS, _encode_lines(headers).decode().split("\n")[:count]))
    for name, column in (
        ("deliver_at_ms", [record.deliver_at_ms for record in records]),
        ("expires_at_ms", [record.expires_at_ms for record in records]),
        ("message_id", [record.message_id for record in records]),
        ("body_hash", [record.body_hash for record in records]),
    ):
        if column.count(None) != count:
            columns.append(_Column(name, AS_IS, column))
    priorities = [record.priority for record in records]
    if priorities.count(0) != count:
        columns.append(_Column("priority", AS_IS, priorities))
    return columns


@lru_cache(maxsize=512)
def _message_insert(shape: tuple[tuple[str, str], ...], constants: int, rows: int) -> str:
    names = ", ".join(("offset", "timestamp_ms", "content_type")[: constants + 1] + tuple(name for name, _ in shape))
    fixed = "".join(f", ?{index + 2}" for index in range(constants))
    varying = ", ".join(expression for _, expression in shape)
    return f"INSERT INTO messages ({names}) VALUES " + ",".join(
        f"(?1 + {row}{fixed}, {varying})" for row in range(rows)
    )


@lru_cache(maxsize=16)
def _values_insert(table_and_columns: str, width: int, rows: int) -> str:
    row = "(" + ",".join("?" * width) + ")"
    return f"INSERT INTO {table_and_columns} VALUES " + ",".join([row] * rows)


def _execute_in_chunks(
    connection: apsw.Connection,
    statement: Callable[[int], str],
    columns: Sequence[Sequence[Any]],
    constants: Callable[[int], tuple[Any, ...]],
) -> None:
    """Run `statement(rows)` over all rows in few steps; `constants(done)` are bound before a chunk's values."""
    width, rows = len(columns), len(columns[0])
    flat = list(chain.from_iterable(zip(*columns, strict=True)))
    done = 0
    for size in CHUNK_ROWS:
        while rows - done >= size:
            values = flat[done * width : (done + size) * width]
            connection.execute(statement(size), (*constants(done), *values))
            done += size


def insert_batches(connection: apsw.Connection, batches: Sequence[Batch]) -> None:
    """Insert the headers of `batches`, and the bodies of the control records among them."""
    rows = [_batch_row(batch) for batch in batches]
    _execute_in_chunks(
        connection,
        lambda size: _values_insert(
            "batches (base_offset, count, messages_before, kind, leader_epoch, producer_id, producer_epoch, sequence,"
            " appended_at_ms, crc)",
            10,
            size,
        ),
        list(zip(*rows, strict=True)),
        lambda done: (),
    )
    controls = [
        (batch.base_offset, batch.kind, batch.group, batch.body)
        for batch in batches
        if batch.kind != BatchKind.MESSAGES
    ]
    if controls:
        _execute_in_chunks(
            connection,
            lambda size: _values_insert("records (offset, kind, group_name, body)", 4, size),
            list(zip(*controls, strict=True)),
            lambda done: (),
        )


def _batch_row(batch: Batch) -> tuple[int | None, ...]:
    idempotent = batch.producer_id >= 0
    return (
        batch.base_offset,
        batch.count,
        batch.messages_before,
        int(batch.kind),
        batch.leader_epoch,
        batch.producer_id if idempotent else None,
        batch.producer_epoch if idempotent else None,
        batch.sequence if idempotent else None,
        batch.appended_at_ms,
        batch.crc,
    )


_SINGLE_BATCH = (
    "INSERT INTO batches (base_offset, count, messages_before, kind, leader_epoch, producer_id, producer_epoch,"
    " sequence, appended_at_ms, crc) VALUES (?,?,?,?,?,?,?,?,?,?)"
)
_SINGLE_RECORD = "INSERT INTO records (offset, kind, group_name, body) VALUES (?,?,?,?)"
_SINGLE_MESSAGE = (
    "INSERT INTO messages (offset, timestamp_ms, content_type, value, key, headers, deliver_at_ms, expires_at_ms,"
    " priority, message_id, body_hash) VALUES (?,?,?,?,?,?,?,?,?,?,?)"
)


def is_single(batch: Batch) -> bool:
    """Return whether `insert_single` takes the batch: one message, or a control record."""
    return batch.count == 1 and not batch.holes and not batch.compressed


def insert_single(connection: apsw.Connection, content_types: ContentTypes, batch: Batch) -> None:
    """Insert one message or one control record, as insert_batches and insert_messages do: their way through columns
    takes several times as long for one row."""
    connection.execute(_SINGLE_BATCH, _batch_row(batch))
    if batch.kind != BatchKind.MESSAGES:
        connection.execute(_SINGLE_RECORD, (batch.base_offset, batch.kind, batch.group, batch.body))
        return
    record = batch.records[0]
    number, textual = content_types.number(connection, record.content_type)
    connection.execute(
        _SINGLE_MESSAGE,
        (
            batch.base_offset,
            batch.appended_at_ms,
            number,
            text_or_blob(record.value) if textual else record.value,
            None if record.key is None else text_or_blob(record.key),
            None if record.headers is None else _encode_json(record.headers).decode(),
            record.deliver_at_ms,
            record.expires_at_ms,
            record.priority,
            record.message_id,
            record.body_hash,
        ),
    )


BATCH_COLUMNS = (
    "b.base_offset, b.count, b.messages_before, b.kind, b.leader_epoch, b.appended_at_ms,"
    " coalesce(b.producer_id, -1), coalesce(b.producer_epoch, -1), coalesce(b.sequence, -1)"
)


def batch_of(
    row: Sequence[Any],
    crc: int,
    records: tuple[Record, ...] = (),
    group: str = "",
    body: bytes = b"",
    holes: int = 0,
    compressed: bytes = b"",
) -> Batch:
    """Return the batch whose BATCH_COLUMNS are `row`."""
    base_offset, count, messages_before, kind, leader_epoch, appended_at_ms, producer_id, producer_epoch, sequence = row
    return Batch(
        base_offset,
        count,
        messages_before,
        kind,
        leader_epoch,
        appended_at_ms,
        producer_id,
        producer_epoch,
        sequence,
        group,
        records,
        body,
        crc,
        holes,
        compressed,
    )


# The offset is last, for the check that no row is missing.
MESSAGE_COLUMNS = (
    "CAST(value AS BLOB), content_type, CAST(key AS BLOB), headers, deliver_at_ms, expires_at_ms, priority, message_id,"
    " body_hash, offset"
)


def record_of(row: Sequence[Any], content_types: dict[int, str]) -> Record:
    """Return the record whose MESSAGE_COLUMNS are `row`; with an empty value where it is compressed. Raise KeyError or
    ValueError for invalid rows."""
    value, content_type, key, headers, deliver_at_ms, expires_at_ms, priority, message_id, body_hash, _ = row
    return Record(
        b"" if value is None else value,
        content_types[content_type],
        key,
        None if headers is None else _decode_headers(headers),
        deliver_at_ms,
        expires_at_ms,
        priority,
        message_id,
        body_hash,
    )
