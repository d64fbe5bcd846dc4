"""Simulated disks: files in memory (tmpfs) that know what was written but not synced.

SQLite writes through a VFS, everything else through the functions of `os` and `open` (system_calls.py). Each life of a
broker has a directory of its own; the next one gets an image of what a crash left there:

    kill         all that was written: the page cache outlives a process. What was not synced stays unsynced
    power cut    what was synced, and of the rest a prefix or any subset, in sectors; names as well as contents

A name is durable when its directory was synced, as POSIX has it. After a failed fsync the data is never written later,
although it can be read until the power is cut.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from portalmq.broker.storage.schema import PAGE_BYTES
from portalmq.broker.storage.segment import CREATING

SECTOR = 512
SHARED_BYTES = 32 * 1024
# The calls of the machine, which system_calls.py replaces.
REAL_OPEN = builtins.open
REAL_MKDIR = os.mkdir

# (offset, data) of a write; (size, None) of a truncation
Change = tuple[int, bytes | None]
# ("create" | "unlink" | "mkdir" | "rmdir", name, inode) or ("rename", name, new name)
Naming = tuple[str, str, Any]


disks: dict[str, SimDisk] = {}  # by the name of their directory


class Inode:
    """A file's durable content, and the changes since, each with its place in the order of the whole disk. `lost` are
    all changes since the first one that a failed fsync dropped: readers see them, the disk has only the synced ones."""

    __slots__ = ("durable", "lost", "pending", "size")

    def __init__(self) -> None:
        self.durable = bytearray()
        self.pending: list[tuple[int, Change]] = []
        self.lost: list[Change] = []
        self.size = 0

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
        copy.size = self.size
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
        self.changes_to_full: int | None = None  # after so many calls there is no room
        self.fsyncs_to_fail = 0
        self.is_dead = False
        self.shared: set[str] = set()
        self.ios = 0
        self.on_io: Callable[[str, str], None] = lambda kind, name: None
        # Called once, when a log goes on in a new segment, after some others.
        self.on_segment: Callable[[str], None] | None = None
        self.segments_to_go = 0
        root.mkdir(parents=True)
        disks[root.name] = self

    # --- changes -----------------------------------------------------------------------------------------------------

    def inode(self, name: str) -> Inode | None:
        return self.names.get(name)

    def io(self, kind: str, name: str, grows: int = 0) -> None:
        if self.is_dead:
            return
        self.ios += 1
        self.on_io(kind, name)
        if self.changes_to_full is not None:
            self.changes_to_full -= 1
            if self.changes_to_full < 0:
                self.changes_to_full, self.limit = None, self.used
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
            if naming[1] in self.shared:
                self.shared.discard(naming[1])
                self.used -= SHARED_BYTES
        _rename(self.names, naming)  # type: ignore[arg-type]

    def create(self, name: str) -> Inode:
        is_rolled = name.endswith(f".sqlite{CREATING}") and not name.endswith(f"/{0:020}.sqlite{CREATING}")
        if self.on_segment is not None and is_rolled and not self.is_dead:
            self.segments_to_go -= 1
            if self.segments_to_go < 0:
                begins, self.on_segment = self.on_segment, None
                begins(name)
        self.io("create", name, 1)
        inode = Inode()
        self.named("create", name, inode)
        return inode

    def share_memory(self, log: str) -> None:
        """Take the room that SQLite's shared memory takes beside a write-ahead log, until that is removed."""
        self.io("create", f"{log}: shared memory", SHARED_BYTES)
        self.shared.add(log)
        self.used += SHARED_BYTES

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
            if directory in (parent_of(naming[1]), parent_of(naming[2]) if naming[0] == "rename" else None):
                _rename(self.durable_names, naming)
            else:
                left.append((order, naming))
        self.namings = left

    def flip(self, name: str, random: Random, *, below: int | None = None, spoils_page: bool = False) -> bool:
        """Flip a bit, on the disk and in the page cache, among the first bytes with `below`; or spoil the page that has
        it, unless that is the first. Return False for an empty file, and one with unsynced writes."""
        inode = self.names.get(name)
        if inode is None or inode.pending or inode.lost or not inode.durable:
            return False
        at = random.randrange(len(inode.durable) if below is None else below)
        while not inode.durable[at] and random.random() < 0.95:  # most of a file is empty
            at = random.randrange(len(inode.durable) if below is None else below)
        begin = at - at % PAGE_BYTES
        if spoils_page and 0 < begin <= len(inode.durable) - PAGE_BYTES:
            after = random.choice((bytes(PAGE_BYTES), random.randbytes(PAGE_BYTES)))
        else:
            begin, after = at, bytes([inode.durable[at] ^ 1 << random.randrange(8)])
        inode.durable[begin : begin + len(after)] = after
        path = self.root / name
        mode = path.stat().st_mode
        path.chmod(0o600)
        with REAL_OPEN(path, "r+b", buffering=0) as file:
            file.seek(begin)
            file.write(after)
        path.chmod(mode)
        return True

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
                REAL_MKDIR(root / name)
            elif not name.endswith("-shm"):
                with REAL_OPEN(root / name, "wb", buffering=0) as file:
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
            parent = parent_of(name)
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
                contents[id(fresh)] = content
            names[name] = made[id(inode)]
        return names, contents


def _torn(change: Change, random: Random) -> Change:
    at, data = change
    if data is None or len(data) <= SECTOR or random.random() < 0.7:
        return change
    return at, data[: SECTOR * random.randint(1, len(data) // SECTOR)]


def parent_of(name: str) -> str:
    return name.rpartition("/")[0]
