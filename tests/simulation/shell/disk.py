"""Simulated disks: files in memory (tmpfs) that know what was written but not synced.

SQLite writes through a VFS, everything else through the functions of `os` and `open`, which `install` replaces for
paths below the disks' directory. Each life of a broker has a directory of its own; the next one gets an image of what
a crash left there:

    kill         all that was written: the page cache outlives a process. What was not synced stays unsynced
    power cut    what was synced, and of the rest a prefix or any subset, in sectors; names as well as contents

A name is durable when its directory was synced, as POSIX has it. After a failed fsync the data is never written later,
although it can be read until the power is cut.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import apsw

SECTOR = 512

# (offset, data) of a write; (size, None) of a truncation
Change = tuple[int, bytes | None]
# ("create" | "unlink" | "mkdir" | "rmdir", name, inode) or ("rename", name, new name)
Naming = tuple[str, str, Any]


class Inode:
    """A file's durable content, and the changes since, each with its place in the order of the whole disk. `lost` are
    all changes since the first one that a failed fsync dropped: readers see them, the disk has only the synced ones."""

    __slots__ = ("durable", "is_new", "lost", "pending", "size")

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[tuple[int, Change]] = []
        self.lost: list[Change] = []
        self.size = 0
        self.is_new = True

    def live(self) -> bytearray:
        content = bytearray(self.durable)
        for change in self.lost:
            _apply(content, change)
        for _, change in self.pending:
            _apply(content, change)
        return content

    def copy(self) -> Inode:
        copy = Inode()
        copy.durable, copy.pending, copy.lost = bytearray(self.durable), list(self.pending), list(self.lost)
        copy.size, copy.is_new = self.size, self.is_new
        return copy


def _apply(content: bytearray, change: Change) -> None:
    at, data = change
    if data is None:
        del content[at:]
        content.extend(bytes(at - len(content)))
        return
    if at > len(content):
        content.extend(bytes(at - len(content)))
    content[at : at + len(data)] = data


Names = dict[str, Inode | None]  # None for a directory


def _rename(names: Names, naming: Naming) -> None:
    kind, name, more = naming
    if kind in ("create", "mkdir"):
        names[name] = more
    elif kind == "rename":
        for each in [each for each in names if each == name or each.startswith(name + "/")]:
            names[more + each[len(name) :]] = names.pop(each)
    else:
        names.pop(name, None)


class SimDisk:
    """The disk of one life of a broker. `on_io(kind, name)` is called before each change or sync, and may raise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: Names = {}
        self.durable_names: Names = {}
        self.namings: list[tuple[int, Naming]] = []
        self.order = 0
        self.used = 0
        self.limit: int | None = None
        self.fsyncs_to_fail = 0
        self.is_dead = False
        self.ios = 0
        self.on_io: Callable[[str, str], None] = lambda kind, name: None
        root.mkdir(parents=True)
        _disks[root.name] = self

    # --- changes -----------------------------------------------------------------------------------------------------

    def inode(self, name: str) -> Inode | None:
        return self.names.get(name)

    def io(self, kind: str, name: str, grows: int = 0) -> None:
        if self.is_dead:
            return
        self.ios += 1
        self.on_io(kind, name)
        if grows > 0 and self.limit is not None and self.used + grows > self.limit:
            raise OSError(errno.ENOSPC, "simulated: no space left", name)

    def named(self, *naming: Any) -> None:
        if self.is_dead:
            return
        self.order += 1
        self.namings.append((self.order, naming))  # type: ignore[arg-type]
        if naming[0] == "unlink":
            gone = self.names.get(naming[1])
            self.used -= gone.size if gone is not None else 0
        _rename(self.names, naming)  # type: ignore[arg-type]

    def create(self, name: str) -> Inode:
        self.io("create", name, 1)
        inode = Inode()
        self.named("create", name, inode)
        return inode

    def changed(self, inode: Inode, change: Change) -> None:
        if self.is_dead:
            return
        self.order += 1
        inode.pending.append((self.order, change))
        at, data = change
        size = at if data is None else max(inode.size, at + len(data))
        self.used += size - inode.size
        inode.size = size

    def sync(self, inode: Inode, name: str) -> None:
        self.io("sync", name)
        if self.is_dead:
            return
        if self.fsyncs_to_fail:
            self.fsyncs_to_fail -= 1
            inode.lost += [change for _, change in inode.pending]
            inode.pending.clear()
            raise OSError(errno.EIO, "simulated: fsync failed", name)
        for _, change in inode.pending:
            _apply(inode.durable, change)
        if inode.lost:
            inode.lost += [change for _, change in inode.pending]
        inode.pending.clear()

    def sync_names(self, directory: str) -> None:
        self.io("syncdir", directory)
        if self.is_dead:
            return
        left = []
        for order, naming in self.namings:
            if directory in (_parent(naming[1]), _parent(naming[2]) if naming[0] == "rename" else None):
                _rename(self.durable_names, naming)
            else:
                left.append((order, naming))
        self.namings = left

    # --- what a crash leaves -----------------------------------------------------------------------------------------

    def image(self, root: Path, power: Random | None) -> SimDisk:
        """Return the disk as the next life finds it: after a kill, or after a power cut that `power` decides."""
        after = SimDisk(root)
        if power is None:
            copies: dict[int, Inode] = {}

            def copy(inode: Inode | None) -> Inode | None:
                return None if inode is None else copies.setdefault(id(inode), inode.copy())

            after.names = {name: copy(inode) for name, inode in self.names.items()}
            after.durable_names = {name: copy(inode) for name, inode in self.durable_names.items()}
            after.namings = [
                (order, (kind, name, copy(more) if kind == "create" else more))
                for order, (kind, name, more) in self.namings
            ]
            after.order = self.order
            contents = {id(inode): inode.live() for inode in after.names.values() if inode is not None}
        else:
            after.names, contents = self._cut(power)
            after.durable_names = dict(after.names)
        for name in sorted(after.names):
            inode = after.names[name]
            if inode is None:
                _os["mkdir"](root / name)
            elif not name.endswith("-shm"):
                with _open(root / name, "wb", buffering=0) as file:
                    file.write(contents[id(inode)])
                inode.size = len(contents[id(inode)])
                after.used += inode.size
        return after

    def _cut(self, random: Random) -> tuple[Names, dict[int, bytearray]]:
        """Choose what survived: nothing unsynced, a prefix of everything, or any subset of sectors and names."""
        kind = random.choice(("nothing", "prefix", "subset", "subset"))
        upto = random.randint(0, self.order) if kind == "prefix" else 0
        share = random.random()

        def survives(order: int) -> bool:
            return order <= upto if kind == "prefix" else kind == "subset" and random.random() < share

        durable: Names = dict(self.durable_names)
        for order, naming in self.namings:
            if survives(order):
                _rename(durable, naming)
        names: Names = {}
        contents: dict[int, bytearray] = {}
        made: dict[int, Inode] = {}
        for name in sorted(durable):
            parent = _parent(name)
            if parent and parent not in names:
                continue
            inode = durable[name]
            if inode is None:
                names[name] = None
                continue
            if id(inode) not in made:
                content = bytearray(inode.durable)
                for order, change in inode.pending:
                    if survives(order):
                        _apply(content, _torn(change, random) if kind == "subset" else change)
                made[id(inode)] = fresh = Inode()
                fresh.durable = content
                fresh.is_new = False
                contents[id(fresh)] = content
            names[name] = made[id(inode)]
        return names, contents


def _torn(change: Change, random: Random) -> Change:
    at, data = change
    if data is None or len(data) <= SECTOR or random.random() < 0.7:
        return change
    return at, data[: SECTOR * random.randint(1, len(data) // SECTOR)]


def _parent(name: str) -> str:
    return name.rpartition("/")[0]


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
            if self._syncs_name and self._inode.is_new:
                self._inode.is_new = False
                self._disk.sync_names(_parent(self._name))
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
                    disk.sync_names(_parent(name))
            except OSError as error:
                raise _as_sqlite(error) from None
        super().xDelete(path, syncs)

    def xRandomness(self, size: int) -> bytes:
        return bytes(range(256))[:size].ljust(size, b"s")


class SimConnection(apsw.Connection):
    """A connection that closes as with SQLite's own VFS: what its last checkpoint could not write is no error."""

    def close(self, force: bool = False) -> None:
        with contextlib.suppress(apsw.FullError, apsw.IOError):
            super().close(force)


# --- the operating system --------------------------------------------------------------------------------------------

_disks: dict[str, SimDisk] = {}
_home = "/nowhere"
_places: dict[int, tuple[SimDisk, str]] = {}  # by descriptor
_open = builtins.open
_os = {name: getattr(os, name) for name in ("open", "close", "fsync", "fdatasync", "rename", "replace", "unlink")}
_os |= {name: getattr(os, name) for name in ("mkdir", "rmdir", "statvfs", "ftruncate")}


def _place(path: Any) -> tuple[SimDisk, str] | None:
    """Return the disk and the name there of a path; None for a path elsewhere."""
    if not isinstance(path, str | os.PathLike):
        return None
    text = os.fspath(path)
    if not isinstance(text, str):
        return None
    root, _, name = text.removeprefix(_home).partition("/")
    disk = _disks.get(root)
    return None if disk is None else (disk, name)


def place_of(path: Any) -> tuple[SimDisk, str] | None:
    return _place(path)


class SimWriter(io.RawIOBase):
    """A file opened for writing by `open`."""

    def __init__(self, disk: SimDisk, name: str, path: Any) -> None:
        held = disk.inode(name)
        if held is None:
            held = disk.create(name)
        else:
            disk.io("truncate", name)
            disk.changed(held, (0, None))
        self._disk, self._name, self._inode = disk, name, held
        self._file = _open(path, "wb", buffering=0)
        self._at = 0
        _places[self._file.fileno()] = disk, name

    def write(self, data: Any) -> int:
        self._disk.io("write", self._name, self._at + len(data) - self._inode.size)
        self._disk.changed(self._inode, (self._at, bytes(data)))
        self._at += len(data)
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
        return _open(file, mode, *more, **named)
    assert mode == "wb", f"the simulated disk does not know the mode {mode!r}"
    return SimWriter(*found, file)


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
        assert there is not None and there[0] is found[0]
        displaced = found[0].names.get(there[1])
        found[0].used -= displaced.size if displaced is not None else 0
        found[0].named("rename", found[1], there[1])


class _Room:
    """What statvfs says of a disk with a limit."""

    f_frsize = 1

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
