"""Durable changes of a directory: a name that was written, replaced or removed stays so after a power cut."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from itertools import chain, count, takewhile
from pathlib import Path

from portalmq.system import drop_cached, sync

# What SQLite may have put beside a file.
BESIDE = ("-wal", "-shm", "-journal")

_drafts = count()


@contextlib.contextmanager
def open_directory(directory: Path) -> Iterator[int]:
    """Yield a descriptor of `directory`, to sync it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_directory(directory: Path) -> None:
    with open_directory(directory) as descriptor:
        sync(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of `path` atomically, durably on return."""
    draft = path.with_name(f"{path.name}.{next(_drafts)}.new")  # two threads may write one file at the same time
    try:
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        os.replace(draft, path)
    except OSError:
        with contextlib.suppress(OSError):  # a full disk has no room for drafts
            os.unlink(draft)
        raise
    sync_directory(path.parent)


def replace_database(path: Path, content: bytes) -> None:
    """Replace an SQLite file and what is beside it, durably on return. After a power cut the old files are there, or
    the new one once it is completed."""
    write_atomically(_successor(path), content)
    complete_replacement(path)


def complete_replacement(path: Path) -> bool:
    """Complete what `replace_database` began, if anything; return whether there is a file."""
    successor = _successor(path)
    if not successor.exists():
        return path.exists()
    for suffix in BESIDE:  # a write-ahead log must not meet another file
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    sync_directory(path.parent)
    os.replace(successor, path)
    sync_directory(path.parent)
    return True


def _successor(path: Path) -> Path:
    return Path(f"{path}.mended")


def make_directory(path: Path) -> None:
    """Create `path` and its missing parents durably. An empty directory may be one that a kill left before its name was
    synced; nothing is put into one before."""
    for directory in reversed(list(takewhile(_has_no_entry, chain([path], path.parents)))):
        is_new = not directory.exists()
        directory.mkdir(mode=0o750, exist_ok=True)
        try:
            sync_directory(directory.parent)
        except PermissionError:  # another user made it
            if is_new:
                raise


def _has_no_entry(directory: Path) -> bool:
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True
    except PermissionError:
        return False


def unlink_database(path: Path) -> None:
    """Remove an SQLite file, then the files beside it."""
    for suffix in ("", *BESIDE):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def sha256_of(path: Path, *, from_disk: bool = False) -> str:
    """Return the SHA-256 of a file; with `from_disk` not of its copy in memory. No connection of this process may hold
    locks on it: closing it would drop them (POSIX)."""
    with open(path, "rb") as file:
        if from_disk:
            drop_cached(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
