"""The insert rate of SQLite alone with our schema, against which the benchmark compares the broker.

One connection, one thread, no HTTP, no checks: `executemany` of ready tuples, with a transaction and an fsync for each
batch.
"""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

import apsw

from portalmq.broker.storage.schema import SEGMENT_DDL

_COLUMNS = 11


def executemany_rate(directory: Path, *, batches: int, batch_messages: int, value: bytes) -> float:
    """Return the rows a second that go durably into the `messages` table of a new file in `directory`."""
    connection = apsw.Connection(str(directory / "bare.sqlite"))
    try:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=0"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute(SEGMENT_DDL)
        insert = f"INSERT INTO messages VALUES ({','.join('?' * _COLUMNS)})"
        ready = [_rows(number * batch_messages, batch_messages, value) for number in range(batches)]
        begin = perf_counter()
        for rows in ready:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(insert, rows)
            connection.execute("COMMIT")
        return batches * batch_messages / (perf_counter() - begin)
    finally:
        connection.close()


def _rows(first: int, count: int, value: bytes) -> list[tuple[object, ...]]:
    """Return rows of all columns, in order, for messages with only a value."""
    return [(first + n, None, value, 0, None, 1_700_000_000_000, None, None, 0, None, None) for n in range(count)]
