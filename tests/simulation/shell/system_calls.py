"""The system calls of a run: SQLite's VFS, `open` and the functions of `os`, replaced by those of simulated disks."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw
from simulation.shell.disk import REAL_OPEN, SimDisk, disks, parent_of

# --- SQLite ----------------------------------------------------------------------------------------------------------


def _as_sqlite(error: OSError) -> apsw.Error:
    """Return what SQLite's own VFS would report."""
    if error.errno == errno.ENOSPC:
        return apsw.FullError(str(error))
    fault = apsw.IOError(str(error))
    fault.extendedresult = apsw.SQLITE_IOERR_FSYNC if "fsync" in str(error) else apsw.SQLITE_IOERR_WRITE
    return fault


class SimFile(apsw.VFSFile):
    """A file of SQLite on a simulated disk. Reads, locks and shared memory are the operating system's."""

    def __init__(self, disk: SimDisk, name: str, path: Any, flags: list[int]) -> None:
        self._disk = disk
        self._name = name
        held = disk.inode(name)
        if held is None and flags[0] & apsw.SQLITE_OPEN_CREATE:
            try:
                held = disk.create(name)
                if flags[0] & apsw.SQLITE_OPEN_WAL:
                    REAL_OPEN(disk.root / name, "wb").close()  # it stays where there is no room for the memory
                    disk.share_memory(name)
            except OSError as error:
                raise apsw.CantOpenError(str(error)) from None
        self._inode = held
        self._syncs_name = bool(flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL))
        super().__init__("unix", path, flags)

    def xWrite(self, data: bytes, offset: int) -> None:
        inode = self._inode
        assert inode is not None
        try:
            self._disk.io("write", self._name, offset + len(data) - inode.size)
        except OSError as error:
            raise _as_sqlite(error) from None
        self._disk.changed(inode, (offset, bytes(data)))
        super().xWrite(data, offset)

    def xTruncate(self, size: int) -> None:
        assert self._inode is not None
        try:
            self._disk.io("truncate", self._name)
        except OSError as error:
            raise _as_sqlite(error) from None
        self._disk.changed(self._inode, (size, None))
        super().xTruncate(size)

    def xSync(self, flags: int) -> None:
        assert self._inode is not None
        try:
            self._disk.sync(self._inode, self._name)
            if self._syncs_name:  # once, also for a file that was there
                self._syncs_name = False
                self._disk.sync_names(parent_of(self._name))
        except OSError as error:
            raise _as_sqlite(error) from None


class SimVFS(apsw.VFS):
    """The default VFS of the process."""

    def __init__(self) -> None:
        super().__init__("simulated", "unix", makedefault=True)

    def xOpen(self, path: Any, flags: list[int]) -> Any:
        found = _place(path.filename() if isinstance(path, apsw.URIFilename) else path)
        if found is None:
            return apsw.VFSFile("unix", path, flags)
        return SimFile(*found, path, flags)

    def xDelete(self, path: str, syncs: bool) -> None:
        found = _place(path)
        if found is not None and found[1] in found[0].names:
            disk, name = found
            try:
                disk.io("unlink", name)
                disk.named("unlink", name, None)
                if syncs:
                    disk.sync_names(parent_of(name))
            except OSError as error:
                raise _as_sqlite(error) from None
        super().xDelete(path, syncs)

    def xSleep(self, microseconds: int) -> int:
        return microseconds  # nobody else can go on meanwhile

    def xRandomness(self, size: int) -> bytes:
        return bytes(range(256))[:size].ljust(size, b"s")


class SimConnection(apsw.Connection):
    """A connection that closes as with SQLite's own VFS: what its last checkpoint could not write is no error."""

    def close(self, force: bool = False) -> None:
        with contextlib.suppress(apsw.FullError, apsw.IOError):
            super().close(force)


# --- the operating system --------------------------------------------------------------------------------------------

_os = {name: getattr(os, name) for name in ("open", "close", "fsync", "fdatasync", "rename", "replace", "unlink")}
_os |= {name: getattr(os, name) for name in ("mkdir", "rmdir", "statvfs", "ftruncate")}
_home = "/nowhere"
_places: dict[int, tuple[SimDisk, str]] = {}  # by descriptor


def _place(path: Any) -> tuple[SimDisk, str] | None:
    """Return the disk and the name there of a path; None for a path elsewhere."""
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.fspath(path)
    if not isinstance(text, str):
        return None
    root, _, name = text.removeprefix(_home).partition("/")
    disk = disks.get(root)
    return None if disk is None else (disk, name)


class SimWriter(io.RawIOBase):
    """A file opened for writing by `open`, as a new one or to be changed."""

    def __init__(self, disk: SimDisk, name: str, path: Any, mode: str) -> None:
        held = disk.inode(name)
        if held is None:
            held = disk.create(name)
        elif mode == "wb":
            disk.io("truncate", name)
            disk.changed(held, (0, None))
        self._disk, self._name, self._inode = disk, name, held
        self._file = REAL_OPEN(path, mode, buffering=0)
        _places[self._file.fileno()] = disk, name

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size) or b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def write(self, data: Any) -> int:
        at = self._file.tell()
        self._disk.io("write", self._name, at + len(data) - self._inode.size)
        self._disk.changed(self._inode, (at, bytes(data)))
        self._file.write(data)
        return len(data)

    def fileno(self) -> int:
        return self._file.fileno()

    def flush(self) -> None: ...

    def close(self) -> None:
        if not self._file.closed:
            _places.pop(self._file.fileno(), None)
            self._file.close()


def _sim_open(file: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
    found = _place(file)
    if found is None or not set(mode) & set("wax+"):
        return REAL_OPEN(file, mode, *more, **named)
    assert mode in ("wb", "r+b"), f"the simulated disk does not know the mode {mode!r}"
    return SimWriter(*found, file, mode)


def _os_open(path: Any, flags: int, *more: Any, **named: Any) -> int:
    descriptor: int = _os["open"](path, flags, *more, **named)
    found = _place(path)
    if found is not None:
        assert not flags & (os.O_WRONLY | os.O_RDWR), "the simulated disk has no descriptors for writing"
        _places[descriptor] = found
    return descriptor


def _os_close(descriptor: int) -> None:
    _places.pop(descriptor, None)
    _os["close"](descriptor)


def _os_fsync(descriptor: int) -> None:
    found = _places.get(descriptor)
    if found is None:
        return _os["fsync"](descriptor)
    disk, name = found
    inode = disk.inode(name)
    if inode is None:
        disk.sync_names(name)
    else:
        disk.sync(inode, name)
    return None


def _naming(kind: str) -> Callable[..., None]:
    real = _os[{"create": "open"}.get(kind, kind)]

    def change(path: Any, *more: Any, **named: Any) -> None:
        found = _place(path)
        if found is not None and not found[0].is_dead:
            found[0].io(kind, found[1], 1 if kind == "mkdir" else 0)
        real(path, *more, **named)
        if found is not None and not found[0].is_dead:
            found[0].named(kind, found[1], None)

    return change


def _os_rename(source: Any, target: Any) -> None:
    found = _place(source)
    if found is not None and not found[0].is_dead:
        found[0].io("rename", found[1])
    _os["rename"](source, target)
    if found is not None and not found[0].is_dead:
        there = _place(target)
        assert there is not None
        assert there[0] is found[0]
        displaced = found[0].names.get(there[1])
        found[0].used -= displaced.size if displaced is not None else 0
        found[0].named("rename", found[1], there[1])


class _Room:
    """What statvfs says of a disk with a limit."""

    f_frsize = 1
    f_files = 1 << 20

    def __init__(self, disk: SimDisk) -> None:
        self.f_bavail = 1 << 40 if disk.limit is None else max(0, disk.limit - disk.used)
        self.f_favail = 1 << 20


def _os_statvfs(path: Any) -> Any:
    found = _place(path)
    return _os["statvfs"](path) if found is None else _Room(found[0])


def install(home: Path) -> None:
    """Simulate every disk below `home`, from now on. It is the working directory, so that paths are the same in each
    run: b1.1/partitions/..."""
    global _home
    _home = f"{home}/"
    home.mkdir(parents=True)
    os.chdir(home)
    _vfs.append(SimVFS())
    apsw.Connection = SimConnection  # type: ignore[misc]
    builtins.open = _sim_open  # type: ignore[assignment]
    io.open = _sim_open  # type: ignore[assignment]
    os.open = _os_open
    os.close = _os_close
    os.fsync = os.fdatasync = _os_fsync  # type: ignore[assignment]
    os.rename = os.replace = _os_rename  # type: ignore[assignment]
    os.unlink = os.remove = _naming("unlink")
    os.mkdir = _naming("mkdir")
    os.rmdir = _naming("rmdir")
    os.statvfs = _os_statvfs
    shutil._use_fd_functions = False  # type: ignore[attr-defined]


_vfs: list[SimVFS] = []
