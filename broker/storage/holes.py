"""The table `holes` of a segment: the batches that lost messages to compaction, and how many.

It gives a reader the number of a batch's rows before it reads them, and the number of existing messages for lag without
reading the messages. A file that compaction has not touched has an empty table or, from an earlier version, none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apsw

from portalmq.broker.storage.batch import Batch
from portalmq.broker.storage.errors import integers

HOLES_DDL = """
CREATE TABLE IF NOT EXISTS holes (
    base_offset    INTEGER PRIMARY KEY,
    removed        INTEGER NOT NULL,
    removed_before INTEGER NOT NULL
);
"""


def removed_in(connection: apsw.Connection, path: Path) -> int:
    """Return how many messages are missing from the file. Raises CorruptFile."""
    if connection.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'holes'").get == 0:
        return 0
    found: Any = connection.execute("SELECT removed, removed_before FROM holes ORDER BY base_offset DESC LIMIT 1").get
    return 0 if found is None else integers(path, found)[0] + found[1]


def insert_holes(connection: apsw.Connection, batches: Iterable[Batch], removed_before: int) -> int:
    """Insert the holes of `batches`, which follow all those in the table, within the running transaction. Return how
    many messages are missing from the file then."""
    rows: list[tuple[int, int, int]] = []
    for batch in batches:
        if batch.holes:
            rows.append((batch.base_offset, batch.holes, removed_before))
            removed_before += batch.holes
    if rows:
        connection.execute(HOLES_DDL)
        connection.executemany("INSERT INTO holes VALUES (?, ?, ?)", rows)
    return removed_before


def removed_below(connection: apsw.Connection, offset: int, path: Path) -> int:
    """Return how many messages below `offset` are missing from the file, which has holes. Raises CorruptFile."""
    row: Any = connection.execute(
        "SELECT h.base_offset, b.count, h.removed, h.removed_before FROM holes AS h"
        " JOIN batches AS b ON b.base_offset = h.base_offset"
        " WHERE h.base_offset < ? ORDER BY h.base_offset DESC LIMIT 1",
        (offset,),
    ).fetchone()
    if row is None:
        return 0
    base_offset, count, removed, removed_before = integers(path, row)
    if offset >= base_offset + count:
        return removed_before + removed
    there: Any = connection.execute(
        "SELECT count(*) FROM messages WHERE offset >= ? AND offset < ?", (base_offset, offset)
    ).get
    return removed_before + offset - base_offset - int(there)
