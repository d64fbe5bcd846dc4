"""The tables of a segment file, compared with those that it was made with: no version has changed them.

SQLite parses a schema in which a bit has flipped, unless the text is no SQL any more. Such a file can be opened and
read in part, and an append to it fails at each start.
"""

from __future__ import annotations

from contextlib import closing
from functools import cache

import apsw

from portalmq.broker.storage.compressed_values import accept_compressed
from portalmq.broker.storage.schema import COMPRESSED_VERSION, SCHEMA_VERSION, SEGMENT_DDL

_ENTRIES = "SELECT name, sql FROM sqlite_schema WHERE sql IS NOT NULL"


def damaged_entries(connection: apsw.Connection, version: int = SCHEMA_VERSION) -> list[str]:
    """Return the names of the tables, indexes and views that a file of that version lacks, or has otherwise."""
    found = dict(connection.execute(_ENTRIES))
    return [name for name, sql in _expected(version).items() if found.get(name) != sql]


def is_of_a_segment(connection: apsw.Connection) -> bool:
    """Return whether the file has any table, index or view of a segment."""
    return len(damaged_entries(connection)) < len(_expected(SCHEMA_VERSION))


@cache
def _expected(version: int) -> dict[str, str]:
    with closing(apsw.Connection(":memory:")) as draft:
        draft.execute(SEGMENT_DDL)
        if version == COMPRESSED_VERSION:
            accept_compressed(draft)
        return dict(draft.execute(_ENTRIES))
