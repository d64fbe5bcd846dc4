"""What a disk may hold after a power cut, from the changes that recorder.py recorded.

What was synced is there: a file's content after its fsync, names after the fsync of their directory. Of the rest

    content   any sectors of the writes since, of 512 bytes or 4 KiB; where a file grew, zeros, or it did not grow.
              A truncation is ordered: nothing that was written before it comes back behind it
    names     any of the changes since (of one directory, most often the first ones: journals keep their order); a
              rename is there or not. The content of a new name may not be there
    mode      any since

A sync that failed drops what it should have written: it is never on disk, unless its page is written again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from simulation.storage.recorder import PAGE, Op

SECTORS = (512, 4096)
WAYS = ("synced", "written", "first", "names", "contents", "any", "any")
STALE_SHM = bytes(range(256)) * 128

Choose = Callable[[int], bool]


@dataclass
class _File:
    """`seen` is what the system shows, `kept` what is on disk for sure; `pending` are the writes and truncations
    since, with their numbers."""

    seen: bytearray = field(default_factory=bytearray)
    kept: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, Op]] = field(default_factory=list)
    mode: int = 0o640
    seen_mode: int = 0o640

    def write(self, number: int, op: Op) -> None:
        _put(self.seen, op)
        self.pending.append((number, op))

    def sync(self) -> None:
        for _, op in self.pending:
            del self.kept[len(self.kept) if op.kind == "write" else op.at :]
        self.kept.extend(bytes(max(0, len(self.seen) - len(self.kept))))
        del self.kept[len(self.seen) :]
        for page in {page for _, op in self.pending for page in _pages(op)}:
            self.kept[page : page + PAGE] = self.seen[page : page + PAGE]
        self.pending.clear()
        self.mode = self.seen_mode


def _put(content: bytearray, op: Op) -> None:
    if op.kind == "truncate":
        del content[op.at :]
        content.extend(bytes(op.at - len(content)))
    else:
        content.extend(bytes(max(0, op.at - len(content))))
        content[op.at : op.at + len(op.data)] = op.data


def _pages(op: Op) -> range:
    return range(op.at // PAGE * PAGE, op.at + len(op.data), PAGE)


class Disk:
    """A disk and what the system shows of it. A file is a number, a directory its path; its names have the number of
    their file, None for a directory."""

    def __init__(self) -> None:
        self.files: dict[int, _File] = {}
        self.seen: dict[str, dict[str, int | None]] = {"": {}}
        self._kept: dict[str, dict[str, int | None]] = {"": {}}
        self._pending: dict[str, list[tuple[int, Op]]] = {"": []}
        self._number = 0

    def apply(self, op: Op) -> None:
        """Take one change."""
        self._number += 1
        directory = os.path.dirname(op.path)
        match op.kind:
            case "write" | "truncate":
                self.files[op.inode].write(self._number, op)
            case "chmod":
                self.files[op.inode].seen_mode = op.at
            case "sync":
                self.files[op.inode].sync()
            case "drop":
                self.files[op.inode].pending.clear()
            case "sync directory":
                self._kept[op.path] = dict(self.seen[op.path])
                self._pending[op.path].clear()
            case "create" | "mkdir" | "unlink" | "rename":
                if op.kind == "create":
                    self.files[op.inode] = _File()
                if op.kind == "mkdir":
                    self.seen[op.path], self._kept[op.path], self._pending[op.path] = {}, {}, []
                _rename(self.seen[directory], op)
                self._pending[directory].append((self._number, op))

    @property
    def has_unsynced(self) -> bool:
        return any(self._pending.values()) or any(file.pending for file in self.files.values())

    def copy(self) -> Disk:
        return deepcopy(self)

    # --- after a restart -------------------------------------------------------------------------------------------

    def restarted(self, root: Path) -> tuple[dict[str, int], dict[int, int]]:
        """Write what the system shows to `root`. Return the numbers of the files, and their sizes: the disk goes on
        there."""
        inodes = {}
        for path, inode in _walk(self.seen, ""):
            if inode is None:
                (root / path).mkdir()
                continue
            (root / path).write_bytes(self.files[inode].seen)
            (root / path).chmod(self.files[inode].seen_mode)
            inodes[path] = inode
        return inodes, {inode: len(file.seen) for inode, file in self.files.items()}

    # --- after a power cut -----------------------------------------------------------------------------------------

    def image(self, way: str, chance: random.Random) -> dict[str, tuple[bytes, int] | None]:
        """Return the files, with their mode, and directories (None) that may be there, in one of the WAYS:

        synced    nothing else               written   everything
        first     what came first            names     all names, no content
        contents  all content, no names      any       any part of it
        """
        last = chance.randint(0, self._number) if way == "first" else self._number
        names: Choose = {
            "synced": lambda _: False,
            "contents": lambda _: False,
            "first": lambda number: number <= last,
            "any": lambda _: chance.random() < 0.5,
        }.get(way, lambda _: True)
        tree = {}
        for directory, kept in self._kept.items():
            tree[directory] = dict(kept)
            pending = self._pending[directory]
            is_ordered = way == "any" and chance.random() < 0.7
            upto = chance.randint(0, len(pending)) if is_ordered else len(pending)
            for number, op in pending[:upto]:
                if is_ordered or names(number):
                    _rename(tree[directory], op)
        found: dict[str, tuple[bytes, int] | None] = {}
        for path, inode in _walk(tree, ""):
            found[path] = None if inode is None else self._content(self.files[inode], way, last, chance)
            if path.endswith("-wal") and way == "any" and chance.random() < 0.3:
                found[f"{path[:-4]}-shm"] = (STALE_SHM, 0o640)
        return found

    def _content(self, file: _File, way: str, last: int, chance: random.Random) -> tuple[bytes, int]:
        content, pending = bytearray(file.kept), file.pending
        if way in ("synced", "names"):
            pending = []
        if way == "first":
            pending = [(number, op) for number, op in pending if number <= last]
        if way != "any":
            for position, (number, op) in enumerate(pending):
                is_torn = way == "first" and position == len(pending) - 1 and number == last and op.kind == "write"
                _put(content, _torn(op, chance) if is_torn else op)
            return bytes(content), file.mode if way == "synced" else file.seen_mode
        return bytes(_any_part(content, pending, chance)), chance.choice((file.mode, file.seen_mode))


def _torn(op: Op, chance: random.Random) -> Op:
    size = chance.choice(SECTORS)
    cuts = list(range(op.at // size * size + size, op.at + len(op.data), size))
    return op._replace(data=op.data[: chance.choice(cuts) - op.at]) if cuts else op


def _any_part(content: bytearray, pending: list[tuple[int, Op]], chance: random.Random) -> bytearray:
    """Put some sectors of the pending writes into `content`, in the order of their truncations."""
    part, size = chance.choice((0.1, 0.5, 0.9, 0.98)), chance.choice(SECTORS)
    cuts = [position for position, (_, op) in enumerate(pending) if op.kind == "truncate"]
    stop = chance.choice([*cuts, len(pending)])  # the first truncation that is not there
    for _, op in pending[:stop]:
        if op.kind == "truncate":
            _put(content, op)
            continue
        for start in range(op.at // size * size, op.at + len(op.data), size):
            if chance.random() < part:
                begin, end = max(start, op.at), min(start + size, op.at + len(op.data))
                _put(content, op._replace(at=begin, data=op.data[begin - op.at : end - op.at]))
    grown = max([len(content), *(op.at + len(op.data) for _, op in pending[:stop] if op.kind == "write")])
    if chance.random() < 0.3 and not any(op.kind == "truncate" for _, op in pending[:stop]):
        content.extend(bytes(grown - len(content)))
    return content


def _rename(names: dict[str, int | None], op: Op) -> None:
    name = os.path.basename(op.path)
    if op.kind == "create":
        names[name] = op.inode
    elif op.kind == "mkdir":
        names[name] = None
    elif op.kind == "unlink":
        names.pop(name, None)
    elif name in names:
        names[os.path.basename(op.note)] = names.pop(name)


def _walk(tree: dict[str, dict[str, int | None]], directory: str) -> Iterator[tuple[str, int | None]]:
    for name, inode in sorted(tree.get(directory, {}).items()):
        path = os.path.join(directory, name)
        yield path, inode
        if inode is None:
            yield from _walk(tree, path)


def write_image(image: dict[str, tuple[bytes, int] | None], root: Path) -> None:
    """Write the files of an image to `root`."""
    root.mkdir(parents=True)
    for path, found in image.items():
        if found is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(found[0])
            (root / path).chmod(found[1])
