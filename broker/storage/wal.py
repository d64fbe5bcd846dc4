"""The write-ahead log of a file that was found: what SQLite recovers from it is readable, but perhaps not on disk."""

from __future__ import annotations

import apsw

# Another process that reads can hold up a write for a moment; inside the process nothing does.
BUSY_TIMEOUT_MS = 5_000
FOREIGN_READER_WAIT_MS = 200


def set_full_sync(connection: apsw.Connection) -> None:
    """Let SQLite sync past the cache of the drive, where that takes another call than fsync (macOS)."""
    connection.execute("PRAGMA fullfsync = ON")


def make_durable(connection: apsw.Connection) -> None:
    """Put everything on disk that can be read by `connection`, which has synchronous=FULL.

    A kill may have come between the write of a commit and its fsync. The checkpoint syncs both files; with a foreign
    reader in its way, a commit syncs the log.
    """
    try:
        connection.set_busy_timeout(FOREIGN_READER_WAIT_MS)
        connection.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        sync_wal(connection)
    finally:
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)


def sync_wal(connection: apsw.Connection) -> None:
    """Put what was committed on disk, by a `connection` that has synchronous=FULL."""
    # Any commit will do, as long as it changes a byte: SQLite does not write a page that stays the same.
    connection.execute(f"PRAGMA user_version = {connection.execute('PRAGMA user_version').get + 1}")
