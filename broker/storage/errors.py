"""The errors of storage: what the disk can do, in six classes, and a log that is closed.

    StorageError
    |-- StorageFault    an I/O error or a damaged file: the outcome is unknown; answer so, and end the process
    |   `-- CorruptFile     SQLite finds the file malformed: another replica may repair it
    |-- Shortage        rolled back, definitely not applied, the log continues
    |   |-- DiskFull          no space left
    |   `-- TooManyOpenFiles  the process, or the machine, has no file descriptor left
    |-- CorruptBatch    a batch does not match its checksum: never serve it
    |-- OffsetPurged    the offset is below the log's start
    `-- WrongLog        the file belongs to another log, or has a schema that this version does not know

    Unavailable
    `-- LogClosed       the topic was deleted, or the broker ends, while the log was in use

A fault is never retried: after a failed fsync Linux may report the next one as a success although the data is lost, and
a COMMIT that raised may still be found on disk after a restart.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import apsw

from portalmq.errors import Unavailable

# A process with fewer free descriptors has run out of them; a disk with less room is full.
SPARE_DESCRIPTORS = 16
SPARE_BYTES = 64 * 1024
MAKE_ROOM = "free disk space or lower the retention"
RAISE_LIMIT = "raise the limit of open files (ulimit -n)"
# What SQLite says when a statement of ours meets a schema in which a name is another one, or of another format: a bit
# of it has flipped.
SCHEMA_DIFFERS = ("no such column: ", "no such table: ", "table ", "unsupported file format")


class StorageError(Exception):
    """Base of the storage room's errors."""


class StorageFault(StorageError):
    """The disk or a file failed. The last write may be there or not; the process should end and restart."""


class CorruptFile(StorageFault):
    """SQLite finds the file malformed, or without the columns that it was made with. Reading it was harmless; writing
    to it would not be. `path` is the file or its directory."""

    path: Path | None = None


class Shortage(StorageError):
    """A resource ran out that may be available later. The transaction was rolled back; the log can be used on."""


class DiskFull(Shortage):
    """No space left on the disk."""


class TooManyOpenFiles(Shortage):
    """No file descriptor left."""


class CorruptBatch(StorageError):
    """The batch at `offset` in `path` does not match its checksum."""

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
    """The file is not part of the log that is being opened. `path` is its directory."""

    path: Path | None = None


def integers(path: Path, row: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the row of `path`. Raise CorruptFile where a column has no integer: a bit of the row's header has flipped.
    For rows that are read without their batch, whose checksum would tell."""
    for value in row:
        if type(value) is not int:
            raise CorruptFile(f"{path}: a row is damaged: {value!r} is no integer")
    return row


# Errors of a file that was intact when the log was opened, and is damaged or replaced.
DAMAGE = (CorruptBatch, CorruptFile, WrongLog)


class LogClosed(Unavailable):
    """The log was closed for good. A repeated request gets the reason."""

    def __init__(self) -> None:
        super().__init__("the partition was closed during the request: repeat it", retry_after_s=0.5)


class _Faults:
    """A context manager; a generator would cost more than the checks around it."""

    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            found = _fault_of(self._path, error)
            damaged = error if found is None else found
            if isinstance(damaged, CorruptFile | WrongLog):
                damaged.path = damaged.path or self._path
            if found is not None:
                raise found from error


def faults_of(path: Path) -> _Faults:
    """Turn errors of SQLite and the operating system into StorageFault and Shortage, naming `path`."""
    return _Faults(path)


def _fault_of(path: Path, error: BaseException) -> StorageError | None:
    match error:
        case apsw.FullError():
            return DiskFull(f"{path}: {error}; {MAKE_ROOM}")
        case apsw.CorruptError() | apsw.NotADBError() | UnicodeDecodeError() | apsw.ConstraintError():
            return CorruptFile(f"{path}: {type(error).__name__}: {error}")
        case apsw.SQLError() if str(error).startswith(SCHEMA_DIFFERS):
            return CorruptFile(f"{path}: its schema is damaged: {error}")
        case apsw.CantOpenError() if no_descriptor_is_left():  # SQLite does not say why
            return TooManyOpenFiles(f"{path}: {error}; {RAISE_LIMIT}")
        case apsw.CantOpenError() if _no_room_is_left(path):
            return DiskFull(f"{path}: {error}; {MAKE_ROOM}")
        case apsw.Error():
            return StorageFault(f"{path}: {type(error).__name__}: {error}")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return DiskFull(f"{path}: {error}; {MAKE_ROOM}")
        case OSError(errno=errno.EMFILE | errno.ENFILE):
            return TooManyOpenFiles(f"{path}: {error}; {RAISE_LIMIT}")
        case OSError():
            return StorageFault(f"{path}: {error}")
    return None


@contextmanager
def opening_errors() -> Iterator[None]:
    """Report a full disk as such while a file is opened: SQLite reports shared memory without room as an I/O error.
    Nothing is written yet, so it is no fault; the same error from a COMMIT leaves its outcome unknown."""
    try:
        yield
    except apsw.IOError as error:
        if getattr(error, "extendedresult", None) != apsw.SQLITE_IOERR_SHMSIZE:
            raise
        raise apsw.FullError(f"no room for the shared memory: {error}") from error


def no_descriptor_is_left() -> bool:
    """Return whether the process, or the machine, has no file descriptors left, or nearly none: another thread may have
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
