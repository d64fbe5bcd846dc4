"""The write-ahead log of an existing file: what SQLite recovers from it is readable, but perhaps not on disk."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from urllib.parse import quote

import apsw

from portalmq.broker.storage.files import BESIDE
from portalmq.system import sync

# A reader in another process can delay a write for a moment; inside the process nothing does.
BUSY_TIMEOUT_MS = 5_000
# What SQLite does not take as it is in a URI. To quote each of ten thousand paths takes a second.
_QUOTED = re.compile(r"[%?#]|//|[^ -~]")
FOREIGN_READER_WAIT_MS = 200
COPIED_BYTES = 1024 * 1024


def set_full_sync(connection: apsw.Connection) -> None:
    """Make SQLite sync past the drive's cache, where that takes another call than fsync (macOS)."""
    connection.execute("PRAGMA fullfsync = ON")


def keep_log(connection: apsw.Connection) -> None:
    """Let SQLite not copy the log into the file when `connection` is closed before `make_durable` has written the log
    again: a power cut would bring back an earlier log, with pages that do not belong to those in the file."""
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)


def make_durable(connection: apsw.Connection) -> None:
    """Make everything durable that `connection` can read. It has synchronous=FULL, and was opened with `keep_log`.

    A kill may have come between the write of a commit and its fsync. The log is first written over itself and synced: a
    sync alone writes nothing of what an earlier one failed to write, and a power cut in the middle of the checkpoint
    needs the log. The checkpoint, which a foreign reader may block, syncs the file and empties the log. That is not
    synced: a power cut brings back the log that the file already contains, since SQLite syncs the header of the next
    one before its frames.
    """
    _write_again(Path(f"{connection.filename}-wal"))
    connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 0)
    try:
        connection.set_busy_timeout(FOREIGN_READER_WAIT_MS)
        connection.wal_checkpoint("main", apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.BusyError:
        pass
    finally:
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)


def _write_again(log: Path) -> None:
    with contextlib.suppress(FileNotFoundError), open(log, "r+b") as file:  # there is none
        while part := file.read(COPIED_BYTES):
            file.seek(-len(part), os.SEEK_CUR)
            file.write(part)
        file.flush()
        sync(file.fileno())


def sync_wal(connection: apsw.Connection) -> None:
    """Make everything committed durable, by a `connection` with synchronous=FULL."""
    # Any commit does, if it changes a byte: SQLite does not write an unchanged page.
    connection.execute(f"PRAGMA user_version = {connection.execute('PRAGMA user_version').get + 1}")


def uri_of(path: Path) -> str:
    """Return the URI by which SQLite opens a file."""
    return f"file:{path}" if not _QUOTED.search(str(path)) else f"file:{quote(str(path))}"


def connect_final(path: Path) -> apsw.Connection:
    """Return a connection that reads a file which nothing changes while it is open: without locks, and without files
    beside it."""
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(f"{uri_of(path)}?immutable=1", flags=flags)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def connect_beside(path: Path) -> apsw.Connection:
    """Return a connection that reads a file, beside those that may write it, with no page of theirs in memory."""
    return connect_final(path) if was_closed(path) else connect_locking(path)


def connect_locking(path: Path) -> apsw.Connection:
    """Return a connection that reads a file by SQLite's locks, and may create the files beside it."""
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    connection = apsw.Connection(f"{uri_of(path)}?mode=ro", flags=flags)
    connection.set_busy_timeout(BUSY_TIMEOUT_MS)
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def was_closed(path: Path) -> bool:
    """Return whether the last connection to an SQLite file closed it: then all of it is in the file, and on disk, since
    a checkpoint syncs the file before the write-ahead log is removed."""
    return not any(os.path.exists(f"{path}{suffix}") for suffix in BESIDE)
