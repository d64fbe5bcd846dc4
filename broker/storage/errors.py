"""What the disk can do to us, in five classes, and the one that is nobody's fault.

    StorageError
    |-- StorageFault    an I/O error or a damaged file: the outcome is unknown; answer so, and end the process
    |   `-- DamagedFile     SQLite finds the file malformed: another replica may make it whole again
    |-- DiskFull        there was no room: rolled back, definitely not applied, the log goes on
    |-- CorruptBatch    a batch does not match its checksum: never serve it
    |-- OffsetPurged    the offset is below the log's start
    `-- WrongLog        the file belongs to another log, or has a schema that this version does not know

    Unavailable
    `-- LogClosed       the topic was deleted, or the broker ends, while somebody still had the log in hand

A fault is never retried: after a failed fsync Linux may call the next one a success although the data is lost, and a
COMMIT that raised may still be found on disk after a restart.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from portalmq.errors import Unavailable


class StorageError(Exception):
    """Base of the storage room's errors."""


class StorageFault(StorageError):
    """The disk or a file failed. What was being written may be there or not; the process should end and restart."""


class DamagedFile(StorageFault):
    """The file is not what SQLite wrote. Reading it was harmless; writing to it would not be."""


class DiskFull(StorageError):
    """No room. The transaction was rolled back and the log can be used on."""


class CorruptBatch(StorageError):
    """The batch at `offset` in `path` is not what was written."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        super().__init__(f"{path}: the batch at offset {offset} is damaged ({reason}); rebuild it from a clean replica")
        self.path = path
        self.offset = offset
        self.reason = reason


class OffsetPurged(StorageError):
    """`offset` is below the log's start: its messages are gone."""

    def __init__(self, offset: int, log_start_offset: int) -> None:
        super().__init__(f"offset {offset} is below the log start {log_start_offset}")
        self.offset = offset
        self.log_start_offset = log_start_offset


class WrongLog(StorageError):
    """The file on disk is not part of the log that was to be opened."""


class LogClosed(Unavailable):
    """The log was closed for good. A caller who repeats the request learns why."""

    def __init__(self) -> None:
        super().__init__("the partition was closed meanwhile: repeat the request", retry_after_s=0.5)


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Turns the errors of SQLite and of the operating system into StorageFault and DiskFull, naming `path`."""
    try:
        yield
    except apsw.FullError as error:
        raise DiskFull(f"{path}: {error}; free disk space or lower the retention") from error
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise DamagedFile(f"{path}: {type(error).__name__}: {error}") from error
    except apsw.Error as error:
        raise StorageFault(f"{path}: {type(error).__name__}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: {error}; free disk space or lower the retention") from error
        raise StorageFault(f"{path}: {error}") from error
