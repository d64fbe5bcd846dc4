"""The write-ahead log of an existing file: what SQLite recovers from it is readable, but perhaps not on disk."""

from __future__ import annotations

import apsw

# A reader in another process can delay a write for a moment; inside the process nothing does.
BUSY_TIMEOUT_MS = 5_000
FOREIGN_READER_WAIT_MS = 200


def set_full_sync(connection: apsw.Connection) -> None:
    """Make SQLite sync past the drive's cache, where that takes another call than fsync (macOS)."""
    connection.execute("PRAGMA fullfsync = ON")


def make_durable(connection: apsw.Connection) -> None:
    """Make everything durable that `connection` can read. It has synchronous=FULL.

    A kill may have come between the write of a commit and its fsync. The checkpoint syncs both files; if a foreign
    reader blocks it, a commit syncs the log.
    """
    try:
        connection.set_busy_timeout(FOREIGN_READER_WAIT_MS)
        connection.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        sync_wal(connection)
    finally:
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)


def sync_wal(connection: apsw.Connection) -> None:
    """Make everything committed durable, by a `connection` with synchronous=FULL."""
    # Any commit does, if it changes a byte: SQLite does not write an unchanged page.
    connection.execute(f"PRAGMA user_version = {connection.execute('PRAGMA user_version').get + 1}")
