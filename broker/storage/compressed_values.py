"""The table `compressed_values` of a segment: the values of batches that producers compressed, as they came.

The rows of such a batch have NULL for their values. A file gets the table with its first compressed batch, and becomes
schema version 2, which earlier versions of PortalMQ refuse. A file without compressed values stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import apsw

from portalmq.broker.storage.batch import Batch
from portalmq.broker.storage.schema import COMPRESSED_VERSION
from portalmq.compression import ZSTD, BadValues, content_size, values_of
from portalmq.sql import is_text, known_values, text_or_blob

_DDL = """
CREATE TABLE compressed_values (
    base_offset INTEGER PRIMARY KEY,
    codec       TEXT NOT NULL,
    size        INTEGER NOT NULL,
    data        BLOB NOT NULL
);
"""


def accept_compressed(connection: apsw.Connection) -> None:
    """Make a file of version 1 one of version 2, within the running transaction. SQLite documents this way to remove a
    NOT NULL (https://sqlite.org/lang_altertable.html#otheralter)."""
    version: Any = connection.execute("PRAGMA schema_version").get
    connection.execute("PRAGMA writable_schema = ON")
    try:
        connection.execute(
            "UPDATE sqlite_schema SET sql = replace(sql, 'value         NOT NULL,', 'value,') WHERE name = 'messages'"
        )
        connection.execute(f"PRAGMA schema_version = {version + 1}")
    finally:
        connection.execute("PRAGMA writable_schema = RESET")  # and read the schema again
    connection.execute(_DDL)
    connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (COMPRESSED_VERSION,))


def insert_compressed(connection: apsw.Connection, batches: Sequence[Batch]) -> None:
    """Insert the compressed values of `batches`, within the running transaction."""
    connection.executemany(
        "INSERT INTO compressed_values VALUES (?, ?, ?, ?)",
        [(batch.base_offset, ZSTD, content_size(batch.compressed), batch.compressed) for batch in batches],
    )


def compressed_at(connection: apsw.Connection, base_offset: int) -> bytes:
    """Return the compressed values of a batch that has some. Raises BadValues."""
    row = connection.execute(
        "SELECT codec, data FROM compressed_values WHERE base_offset = ?", (base_offset,)
    ).fetchone()
    if row is None or row[0] != ZSTD or not isinstance(row[1], bytes):
        raise BadValues("its values are missing")
    return row[1]


def value_at(connection: apsw.Connection, base_offset: int, offset: int) -> bytes:
    """Return the value of one message of a compressed batch. Raises BadValues."""
    count: Any = connection.execute("SELECT count FROM batches WHERE base_offset = ?", (base_offset,)).get
    return known_values(compressed_at(connection, base_offset), count)[offset - base_offset]


def copy_compressed(connection: apsw.Connection, names: dict[int, str], start: int, end: int) -> None:
    """Copy the values of batches in [start, end) from a segment to its compacted replacement. A batch that loses
    messages gets plain values: compressed again, they and their checksums might differ from replica to replica."""
    rows: Any = connection.execute(
        "SELECT b.base_offset, b.count, EXISTS (SELECT 1 FROM keys.removed AS r WHERE r.offset >= b.base_offset"
        " AND r.offset < b.base_offset + b.count) FROM source.compressed_values AS c"
        " JOIN source.batches AS b ON b.base_offset = c.base_offset WHERE c.base_offset >= ? AND c.base_offset < ?",
        (start, end),
    )
    for base_offset, count, is_touched in rows.fetchall():
        where = "FROM source.compressed_values WHERE base_offset = ?"
        if not is_touched:
            connection.execute(f"INSERT INTO main.compressed_values SELECT * {where}", (base_offset,))
            continue
        values = values_of(connection.execute(f"SELECT data {where}", (base_offset,)).get, count)
        types: Any = connection.execute(
            "SELECT offset, content_type FROM main.messages WHERE offset >= ? AND offset < ?",
            (base_offset, base_offset + count),
        )
        connection.executemany(
            "UPDATE main.messages SET value = ? WHERE offset = ?",
            [
                (text_or_blob(value) if is_text(names[number]) else value, offset)
                for offset, number in types.fetchall()
                for value in (values[offset - base_offset],)
            ],
        )
