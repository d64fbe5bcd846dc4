"""A disk that fails at one step: every call that changes files is counted, in SQLite and in Python.

with unsynced_disk(monkeypatch) as disk:
    with disk.failing(at=7, kind="full"):     # the seventh step finds no space, and no step after it
        change(log)
    disk.steps                                # the number of steps

    full     no space from that step on
    broken   an I/O error at that step

Nothing is really fsynced: the tests check the order of the steps, and the reaction to an error.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apsw
import pytest

KINDS = ("full", "broken")
# Calls of Python, and whether they can fail on a full disk.
CALLS = {"rename": True, "replace": True, "mkdir": True, "unlink": False, "chmod": False}


class FailingDisk:
    """Invariant: no step fails before the `at`-th."""

    def __init__(self) -> None:
        self.at, self.kind, self.steps = 0, "", 0
        self._is_counting = False

    @contextmanager
    def failing(self, at: int, kind: str) -> Iterator[None]:
        self.at, self.kind, self.steps = at, kind, 0
        self._is_counting = True
        try:
            yield
        finally:
            self._is_counting = False

    def fails(self, *, takes_room: bool = True) -> bool:
        if not self._is_counting or (self.kind == "full" and not takes_room):
            return False
        self.steps += 1
        return self.steps >= self.at if self.kind == "full" else self.steps == self.at

    def step(self, *, takes_room: bool = True) -> None:
        if self.fails(takes_room=takes_room):
            code = errno.EIO if self.kind == "broken" else errno.ENOSPC
            raise OSError(code, os.strerror(code))

    def sqlite_step(self, broken: int, *, takes_room: bool = True) -> None:
        if self.fails(takes_room=takes_room):
            if self.kind == "full":
                raise apsw.FullError("no room, says the test")
            error = apsw.IOError("broken, says the test")
            error.extendedresult = broken
            raise error


# A log closes nothing after a fault: its files are closed when they are garbage-collected, by their VFS.
_used: list[apsw.VFS] = []


class _File(apsw.VFSFile):
    def __init__(self, disk: FailingDisk, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._disk = disk

    def xWrite(self, data: bytes, offset: int) -> None:
        self._disk.sqlite_step(apsw.SQLITE_IOERR_WRITE)
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        self._disk.sqlite_step(apsw.SQLITE_IOERR_TRUNCATE, takes_room=False)
        super().xTruncate(size)

    def xSync(self, _flags: int) -> None:
        self._disk.sqlite_step(apsw.SQLITE_IOERR_FSYNC, takes_room=False)


class _Vfs(apsw.VFS):
    def __init__(self, disk: FailingDisk) -> None:
        super().__init__("failing", "unix", makedefault=True)
        self._disk = disk

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        return _File(self._disk, name, flags)

    def xDelete(self, name: str, _sync: bool) -> None:
        self._disk.sqlite_step(apsw.SQLITE_IOERR_DELETE, takes_room=False)
        if os.path.exists(name):  # SQLite accepts a missing file here; apsw would raise
            super().xDelete(name, False)


@contextmanager
def unsynced_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingDisk]:
    """Put all files that SQLite opens in the block on this disk."""
    disk = FailingDisk()
    _used.append(_Vfs(disk))
    opened = io.open

    def call(name: str, takes_room: bool) -> Any:
        original = getattr(os, name)

        def stepping(*arguments: Any, **more: Any) -> Any:
            disk.step(takes_room=takes_room)
            return original(*arguments, **more)

        return stepping

    def fsync(descriptor: int) -> None:
        disk.step(takes_room=stat.S_ISREG(os.fstat(descriptor).st_mode))

    def open_(file: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
        if "w" in mode:
            disk.step()
        return opened(file, mode, *arguments, **more)

    with monkeypatch.context() as patch:
        for name, takes_room in CALLS.items():
            patch.setattr(os, name, call(name, takes_room))
        patch.setattr(os, "fsync", fsync)
        patch.setattr("builtins.open", open_)
        try:
            yield disk
        finally:
            apsw.set_default_vfs("unix")
