"""SQL on a segment file whose values producers compressed: SQLite has no zstd.

    log = sqlite3.connect("file:00000000000000000000.sqlite?mode=ro", uri=True)
    register(log)
    log.execute("SELECT avg(json_extract(value, '$.celsius')) FROM messages")

Brokers decide here too which values are text in their files.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from portalmq.compression import HAS_ZSTD, NEEDS_ZSTD, values_of

if TYPE_CHECKING:
    import sqlite3  # programs bring their connection; brokers use another SQLite

# Messages are often read one by one, several of one batch.
known_values = lru_cache(maxsize=2)(values_of)

_VALUE = """
(SELECT portalmq_value(v.data, b.count, m.offset - v.base_offset, t.name)
 FROM main.compressed_values AS v JOIN main.batches AS b USING (base_offset)
 JOIN main.content_types AS t ON t.id = m.content_type
 WHERE v.base_offset <= m.offset ORDER BY v.base_offset DESC LIMIT 1)
"""


def is_text(content_type: str) -> bool:
    """Return whether a value of this content type is stored as TEXT if its bytes allow it."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence.startswith("text/") or essence == "application/json" or essence.endswith("+json")


def text_or_blob(value: bytes) -> str | bytes:
    """Return `value` in the form that reads best and comes back byte for byte."""
    if b"\0" in value:  # SQLite's shell and text functions stop at NUL
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def register(connection: sqlite3.Connection) -> None:
    """Have `messages` and `messages_with_type` show plain values on this connection to a segment file, by temporary
    views in their place. Raises RuntimeError for a file with compressed values where zstd is missing."""
    tables = dict(connection.execute("SELECT name, sql FROM main.sqlite_master"))
    if "compressed_values" not in tables:
        return
    if not HAS_ZSTD:
        raise RuntimeError(NEEDS_ZSTD)
    columns = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('messages', 'main')")]
    shown = ["coalesce(m.value, " + _VALUE + ") AS value" if name == "value" else f"m.{name}" for name in columns]
    connection.create_function("portalmq_value", 4, _value, deterministic=True)
    connection.execute(f"CREATE TEMP VIEW messages AS SELECT {', '.join(shown)} FROM main.messages AS m")
    connection.execute(tables["messages_with_type"].replace("CREATE VIEW", "CREATE TEMP VIEW", 1))


def _value(data: bytes, count: int, index: int, content_type: str) -> str | bytes:
    value = known_values(data, count)[index]
    return text_or_blob(value) if is_text(content_type) else value
