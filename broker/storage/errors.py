"""What the disk can do to us, in six classes, and the one that is nobody's fault.

    StorageError
    |-- StorageFault    an I/O error or a damaged file: the outcome is unknown; answer so, and end the process
    |   `-- CorruptFile     SQLite finds the file malformed: another replica may make it whole again
    |-- Shortage        rolled back, definitely not applied, the log goes on
    |   |-- DiskFull          there was no room
    |   `-- TooManyOpenFiles  the process, or the machine, had no file descriptor left
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
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw

from portalmq.errors import Unavailable

# A process that has fewer descriptors left than this has run out of them; a disk with less room is full.
SPARE_DESCRIPTORS = 16
SPARE_BYTES = 64 * 1024
MAKE_ROOM = "free disk space or lower the retention"
RAISE_LIMIT = "raise the limit of open files (ulimit -n)"


class StorageError(Exception):
    """Base of the storage room's errors."""


class StorageFault(StorageError):
    """The disk or a file failed. What was being written may be there or not; the process should end and restart."""


class CorruptFile(StorageFault):
    """The file is not what SQLite wrote. Reading it was harmless; writing to it would not be."""


class Shortage(StorageError):
    """Something ran out that may be there again later. The transaction was rolled back and the log can be used on."""


class DiskFull(Shortage):
    """No room."""


class TooManyOpenFiles(Shortage):
    """No file descriptor was left."""


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


# Of a file that was whole when the log was opened: it is not any more, or another has taken its place.
DAMAGE = (CorruptBatch, CorruptFile, WrongLog)


class LogClosed(Unavailable):
    """The log was closed for good. A caller who repeats the request learns why."""

    def __init__(self) -> None:
        super().__init__("the partition was closed meanwhile: repeat the request", retry_after_s=0.5)


@contextmanager
def faults_of(path: Path) -> Iterator[None]:
    """Turns the errors of SQLite and of the operating system into StorageFault and Shortage, naming `path`."""
    try:
        yield
    except apsw.FullError as error:
        raise DiskFull(f"{path}: {error}; {MAKE_ROOM}") from error
    except (apsw.CorruptError, apsw.NotADBError) as error:
        raise CorruptFile(f"{path}: {type(error).__name__}: {error}") from error
    except apsw.Error as error:
        if isinstance(error, apsw.CantOpenError):  # SQLite does not say why
            if no_descriptor_is_left():
                raise TooManyOpenFiles(f"{path}: {error}; {RAISE_LIMIT}") from error
            if _no_room_is_left(path):
                raise DiskFull(f"{path}: {error}; {MAKE_ROOM}") from error
        raise StorageFault(f"{path}: {type(error).__name__}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{path}: {error}; {MAKE_ROOM}") from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise TooManyOpenFiles(f"{path}: {error}; {RAISE_LIMIT}") from error
        raise StorageFault(f"{path}: {error}") from error


@contextmanager
def opening_errors() -> Iterator[None]:
    """Tells a full disk by its name while a file is opened: SQLite reports shared memory that finds no room as an I/O
    error. Nothing was written yet, where the same error from a COMMIT leaves its outcome open."""
    try:
        yield
    except apsw.IOError as error:
        if getattr(error, "extendedresult", None) != apsw.SQLITE_IOERR_SHMSIZE:
            raise
        raise apsw.FullError(f"no room for the shared memory: {error}") from error


def no_descriptor_is_left() -> bool:
    """Return whether the process, or the machine, has run out of file descriptors, or nearly: another thread may have
    closed one since."""
    spare: list[int] = []
    try:
        for _ in range(SPARE_DESCRIPTORS):
            spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    finally:
        for descriptor in spare:
            os.close(descriptor)
    return False


def _no_room_is_left(path: Path) -> bool:
    """Return whether the disk under `path` has no room, or no inode, for another file."""
    with suppress(OSError):
        status = os.statvfs(path if path.is_dir() else path.parent)
        return status.f_bavail * status.f_frsize < SPARE_BYTES or (status.f_files > 0 and status.f_favail == 0)
    return False
