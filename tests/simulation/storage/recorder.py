"""A directory whose changes are recorded, by SQLite (a VFS) and by Python (the calls of `os`), and can fail.

    with recorded(root, past) as disk:
        disk.fault = Fault("lost sync", at=7)      # the seventh fsync fails, and what it should have synced is lost
        ...                                        # the product at work under `root`
    disk.ops                                       # what it did, in order: image.py makes disks of it

    broken         an I/O error at one step, which changes nothing
    torn           an I/O error at one write, of which half is there
    no room        no space from that step on, until the fault is removed
    no room once   no space at that step only
    lost sync      an fsync fails; the system shows what was written, and will never write it to the disk
    killed         the process ends before that step: nothing more reaches the disk

Nothing is really fsynced. SQLite's shared memory (-shm) is not recorded: it is not meant to survive.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import apsw


class Op(NamedTuple):
    """One change. `kind` is create, write, truncate, chmod, sync, drop (a failed sync), rename, unlink, mkdir,
    sync directory or note. `path` is relative to the root."""

    kind: str
    path: str = ""
    inode: int = -1
    at: int = 0
    data: bytes = b""
    note: Any = None


KINDS = ("broken", "torn", "no room", "no room once", "lost sync", "killed")
SYNCS = ("sync", "sync directory")
NEEDS_ROOM = ("create", "write", "rename", "mkdir")
PAGE = 4096


def _is_step(kind: str, op: Op) -> bool:
    """Return whether a fault of this kind can come at `op`."""
    if kind == "lost sync":
        return op.kind in SYNCS
    if kind == "torn":
        return op.kind == "write" and len(op.data) > 1
    if kind.startswith("no room"):
        return op.kind in NEEDS_ROOM
    return True


@dataclass
class Fault:
    """One fault, at the `at`-th step of those at which it can come. `steps` counts them."""

    kind: str
    at: int
    steps: int = 0

    def comes(self, op: Op) -> bool:
        if not _is_step(self.kind, op):
            return False
        self.steps += 1
        return self.steps >= self.at if self.kind in ("no room", "killed") else self.steps == self.at


class Recorder:
    """The disk under `root`. `inodes` are the files that are there, by path; `sizes` their sizes as they are read.
    `room` is how many bytes it holds, in whole pages; None without a limit."""

    def __init__(self, root: Path, inodes: dict[str, int], sizes: dict[int, int]) -> None:
        self.root = root
        self.ops: list[Op] = []
        self.inodes = dict(inodes)
        self.sizes = dict(sizes)
        self.fault: Fault | None = None
        self.room: int | None = None
        # After a kill every call fails; after the block in `recorded` none does anything.
        self.is_dead = self.is_over = False
        self.failures = 0
        self._next_inode = max(sizes, default=0) + 1

    # --- all changes pass here -----------------------------------------------------------------------------------

    def perform(self, op: Op, do: Callable[[], Any]) -> Any:
        """Carry out and record one change, unless it fails."""
        if self.is_over:
            return None
        if self.is_dead:
            raise OSError(errno.EIO, "the process was killed")
        fault = self.fault
        if fault is not None and fault.comes(op):
            self._fail(fault, op)
        if self.room is not None and self._bytes_after(op) > self.room:
            self.failures += 1
            raise OSError(errno.ENOSPC, "the small disk is full")
        result = do()
        self.ops.append(op)
        if op.kind in ("write", "create", "truncate"):
            end = op.at + len(op.data)
            self.sizes[op.inode] = max(self.sizes[op.inode], end) if op.kind == "write" else op.at
        return result

    def _fail(self, fault: Fault, op: Op) -> None:
        self.failures += 1
        if fault.kind.startswith("no room"):
            raise OSError(errno.ENOSPC, "no room, says the test")
        if fault.kind == "killed":
            self.is_dead = True
        elif fault.kind == "lost sync" and op.kind == "sync":
            self.ops.append(op._replace(kind="drop"))
        elif fault.kind == "torn":
            half = op._replace(data=op.data[: len(op.data) // 2])
            self.perform(half, lambda: self._write_file(half))
        raise OSError(errno.EIO, f"{fault.kind}, says the test")

    def _write_file(self, op: Op) -> None:
        path = next(path for path, inode in self.inodes.items() if inode == op.inode)
        with _real_open(self.root / path, "r+b") as file:
            file.seek(op.at)
            file.write(op.data)

    def _bytes_after(self, op: Op) -> int:
        if op.kind not in NEEDS_ROOM:
            return 0
        sizes = {inode: self.sizes[inode] for inode in self.inodes.values()}
        if op.kind == "write":
            sizes[op.inode] = max(sizes.get(op.inode, 0), op.at + len(op.data))
            if sizes[op.inode] == self.sizes[op.inode]:
                return 0
        return self.used(sizes) + PAGE * (op.kind != "write")

    def used(self, sizes: dict[int, int] | None = None) -> int:
        """Return how many bytes the files take, in whole pages."""
        if sizes is None:
            sizes = {inode: self.sizes[inode] for inode in self.inodes.values()}
        return sum(-(-size // PAGE) * PAGE for size in sizes.values())

    def note(self, what: Any) -> None:
        """Put a mark between two changes."""
        if not self.is_dead:
            self.ops.append(Op("note", note=what))

    # --- names ---------------------------------------------------------------------------------------------------

    def relative(self, path: str | Path) -> str:
        """Return the path from the root on, which is "" itself."""
        short = os.path.relpath(os.path.abspath(path), self.root)
        return "" if short == "." else short

    def create(self, path: str, do: Callable[[], Any]) -> Any:
        inode = self._next_inode
        self._next_inode += 1
        result = self.perform(Op("create", path, inode), do)
        self.inodes[path] = inode
        return result

    def unlink(self, path: str, do: Callable[[], Any]) -> None:
        self.perform(Op("unlink", path), do)
        self.inodes.pop(path, None)

    def rename(self, old: str, new: str, do: Callable[[], Any]) -> None:
        self.perform(Op("rename", old, note=new), do)
        self.inodes[new] = self.inodes.pop(old)


# --- SQLite ---------------------------------------------------------------------------------------------------------

_disks: list[Recorder] = []


def _disk_of(path: Any) -> Recorder | None:
    """Return the disk that holds `path`."""
    text = os.path.abspath(os.fspath(path))
    return next((disk for disk in reversed(_disks) if f"{text}/".startswith(f"{disk.root}/")), None)


def _as_sqlite(code: int, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise apsw.FullError(str(error)) from error
        failed = apsw.IOError(str(error))
        failed.extendedresult = code
        raise failed from error


class _File(apsw.VFSFile):
    def __init__(self, disk: Recorder, path: str, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._disk, self._path, self._inode = disk, path, disk.inodes[path]
        # SQLite's own VFS syncs the directory with the first sync of a journal that it may have created.
        journals = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL | apsw.SQLITE_OPEN_WAL
        self._syncs_directory = bool(flags[0] & journals and flags[0] & apsw.SQLITE_OPEN_CREATE)

    def xWrite(self, data: bytes, offset: int) -> None:
        op = Op("write", inode=self._inode, at=offset, data=bytes(data))
        _as_sqlite(
            apsw.SQLITE_IOERR_WRITE, lambda: self._disk.perform(op, lambda: super(_File, self).xWrite(data, offset))
        )

    def xTruncate(self, size: int) -> None:
        op = Op("truncate", inode=self._inode, at=size)
        _as_sqlite(
            apsw.SQLITE_IOERR_TRUNCATE, lambda: self._disk.perform(op, lambda: super(_File, self).xTruncate(size))
        )

    def xSync(self, _flags: int) -> None:
        _as_sqlite(apsw.SQLITE_IOERR_FSYNC, self._sync)

    def _sync(self) -> None:
        self._disk.perform(Op("sync", inode=self._inode), _nothing)
        if self._syncs_directory:
            self._syncs_directory = False
            self._disk.perform(Op("sync directory", os.path.dirname(self._path)), _nothing)


class _Vfs(apsw.VFS):
    def __init__(self) -> None:
        super().__init__("recorded", "unix", makedefault=False)

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        disk = None if path is None else _disk_of(path)
        if disk is None:
            return apsw.VFSFile("unix", name, flags)
        short = disk.relative(path)
        if short in disk.inodes:
            return _File(disk, short, name, flags)
        if not flags[0] & apsw.SQLITE_OPEN_CREATE:
            return apsw.VFSFile("unix", name, flags)  # reports that it is missing
        _as_sqlite(apsw.SQLITE_CANTOPEN, lambda: disk.create(short, lambda: _real_open(path, "xb").close()))
        return _File(disk, short, name, flags)

    def xDelete(self, name: str, sync: bool) -> None:
        disk = _disk_of(name)
        if disk is None:
            super().xDelete(name, sync)
            return
        short = disk.relative(name)

        def delete() -> None:
            if os.path.exists(name):  # SQLite accepts a missing file here; apsw would raise
                disk.unlink(short, lambda: super(_Vfs, self).xDelete(name, False))
                if sync:
                    disk.perform(Op("sync directory", os.path.dirname(short)), _nothing)

        _as_sqlite(apsw.SQLITE_IOERR_DELETE, delete)


def _nothing(*_: Any) -> None:
    pass


_vfs = _Vfs()

# --- Python ---------------------------------------------------------------------------------------------------------

_real_open = io.open
_real = {name: getattr(os, name) for name in ("open", "write", "pwrite", "ftruncate", "lseek", "fstat", "close")}
# What each descriptor that was opened here means: (disk, path of a directory or number of a file, appends only).
_descriptors: dict[int, tuple[Recorder, str | int, bool]] = {}


def _open(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
    disk = _disk_of(path)
    if disk is None:
        descriptor = _real["open"](path, flags, mode, **more)
        _descriptors.pop(descriptor, None)
        return descriptor
    short = disk.relative(path)
    if flags & os.O_CREAT and short not in disk.inodes:
        descriptor = disk.create(short, lambda: _real["open"](path, flags, mode, **more))
    elif flags & os.O_TRUNC:
        op = Op("truncate", inode=disk.inodes[short])
        descriptor = disk.perform(op, lambda: _real["open"](path, flags, mode, **more))
    else:
        descriptor = _real["open"](path, flags, mode, **more)
    is_directory = stat.S_ISDIR(_real["fstat"](descriptor).st_mode)
    _descriptors[descriptor] = (disk, short if is_directory else disk.inodes[short], bool(flags & os.O_APPEND))
    return descriptor


def _write(descriptor: int, data: Any) -> int:
    disk, inode, appends = _descriptors.get(descriptor, (None, -1, False))
    if disk is None:
        return _real["write"](descriptor, data)
    at = disk.sizes[inode] if appends else _real["lseek"](descriptor, 0, os.SEEK_CUR)
    return disk.perform(Op("write", inode=inode, at=at, data=bytes(data)), lambda: _real["write"](descriptor, data))


def _pwrite(descriptor: int, data: Any, at: int) -> int:
    disk, inode, _ = _descriptors.get(descriptor, (None, -1, False))
    do = lambda: _real["pwrite"](descriptor, data, at)  # noqa: E731
    return do() if disk is None else disk.perform(Op("write", inode=inode, at=at, data=bytes(data)), do)


def _ftruncate(descriptor: int, size: int) -> None:
    disk, inode, _ = _descriptors.get(descriptor, (None, -1, False))
    do = lambda: _real["ftruncate"](descriptor, size)  # noqa: E731
    return do() if disk is None else disk.perform(Op("truncate", inode=inode, at=size), do)


def _fsync(descriptor: int) -> None:
    disk, target, _ = _descriptors.get(descriptor, (None, -1, False))
    if disk is not None:
        op = Op("sync directory", target) if isinstance(target, str) else Op("sync", inode=target)
        disk.perform(op, _nothing)


def _close(descriptor: int) -> None:
    _descriptors.pop(descriptor, None)
    _real["close"](descriptor)


def _by_name(name: str) -> Callable[..., Any]:
    original = getattr(os, name)

    def call(path: Any, *rest: Any, **more: Any) -> Any:
        disk = None if isinstance(path, int) else _disk_of(path)
        do = lambda: original(path, *rest, **more)  # noqa: E731
        if disk is None:
            return do()
        short = disk.relative(path)
        if name in ("rename", "replace"):
            return disk.rename(short, disk.relative(rest[0]), do)
        if name in ("unlink", "remove"):
            if short not in disk.inodes:  # shared memory, or missing
                return do()
            return disk.unlink(short, do)
        if name == "mkdir":
            return disk.perform(Op("mkdir", short), do)
        return disk.perform(Op("chmod", inode=disk.inodes[short], at=rest[0]), do)

    return call


class _RawFile(io.FileIO):
    def write(self, data: Any) -> int:
        return _write(self.fileno(), data)


def _open_file(file: Any, mode: str = "r", *rest: Any, opener: Any = None, **more: Any) -> Any:
    if mode not in ("wb", "r+b") or _disk_of(file) is None:
        return _real_open(file, mode, *rest, opener=opener, **more)
    raw = _RawFile(file, mode, opener=opener or (lambda name, flags: _open(name, flags, 0o666)))
    return io.BufferedWriter(raw) if mode == "wb" else io.BufferedRandom(raw)


_PATCHES = {
    **{name: _by_name(name) for name in ("rename", "replace", "unlink", "remove", "mkdir", "chmod")},
    "open": _open,
    "close": _close,
    "write": _write,
    "pwrite": _pwrite,
    "ftruncate": _ftruncate,
    "fsync": _fsync,
    "fdatasync": _fsync,
}


@contextmanager
def recorded(
    root: Path, inodes: dict[str, int] | None = None, sizes: dict[int, int] | None = None
) -> Iterator[Recorder]:
    """Record what the block changes under `root`. `inodes` and `sizes` are of the files that are there already."""
    disk = Recorder(root, inodes or {}, sizes or {})
    _disks.append(disk)
    # apsw shows errors that SQLite passes over to these.
    quiet = patch.multiple(sys, excepthook=_nothing, unraisablehook=_nothing)
    with patch.multiple(os, **_PATCHES), patch("builtins.open", _open_file), quiet:
        apsw.set_default_vfs("recorded")
        try:
            yield disk
        finally:
            apsw.set_default_vfs("unix")
            disk.is_over = True
            _disks.remove(disk)
