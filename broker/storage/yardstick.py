"""SQLite alone with our schema, against which the benchmark compares the broker.

One connection, one thread, no HTTP, no checks: `executemany` of ready tuples, with a transaction and an fsync for each
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import apsw

from portalmq.broker.storage.schema import SEGMENT_DDL

_COLUMNS = 11


class BareTable:
    """The `messages` table of a file, into which batches go durably."""

    def __init__(self, file: Path) -> None:
        self._connection = apsw.Connection(str(file))
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=0"):
            self._connection.execute(f"PRAGMA {pragma}")
        self._connection.execute(SEGMENT_DDL)

    def insert(self, rows: Sequence[tuple[object, ...]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(f"INSERT INTO messages VALUES ({','.join('?' * _COLUMNS)})", rows)
        self._connection.execute("COMMIT")

    def close(self) -> None:
        self._connection.close()


def row_of(value: bytes) -> tuple[object, ...]:
    """Return a row of all columns for a message with only a value; SQLite gives it the next offset."""
    return None, None, value, 0, None, 1_700_000_000_000, None, None, 0, None, None
