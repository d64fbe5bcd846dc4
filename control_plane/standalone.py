"""The control plane in one process, without ZooKeeper: the same contract, durable in one file.

The tree lives in memory. `<directory>/journal` holds each commit as one record, fsynced before the commit returns:

    MAGIC 4 | length 4 | crc32(payload) 4 | payload: msgpack [[path, data, version] or [path, nil, -1] for gone, …]

So a commit is on disk in full or not at all. kill -9 can tear only the last record, whose commit was never answered;
the next start drops it. A damaged record before an intact one means a damaged disk: the start fails, since it would
lose answered commits. A journal that has outgrown the tree is rewritten (the tree as records, then the commits made
during the rewrite) beside the old one and renamed over it.

Ephemeral nodes are not written, since they end with the process. Rejected: SQLite (only the storage room uses apsw, and
this tree is small), and a new snapshot for each commit (a thousand topics would cost a thousand times their size).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import assert_never

import msgspec

from portalmq.control_plane.plane import (
    COMMIT_BYTES_MAX,
    ChangeCallback,
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    NodeNotEmpty,
    Op,
    OutcomeUnknown,
    PlaneError,
    PlaneState,
    PlaneUnavailable,
    Set,
    VersionMismatch,
    check_commit,
    check_path,
    clock_s,
    parent_of,
)
from portalmq.system import open_locked, sync, sync_data

_MAGIC = b"PMQ1"
_HEADER = struct.Struct(">4sII")
_COMPACT_BYTES_MIN = 1024 * 1024
# A commit of this many operations, which may be one of many, takes a while.
_LONG_OPS = 50
# The number of nodes to look up between two pauses.
_NODES_A_TURN = 5_000
# The only session. It lasts as long as the process.
_SESSION_ID = 1

Change = tuple[str, bytes | None, int]
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Change]).decode


class JournalInUse(PlaneError):
    """Another process has this journal open."""


class JournalDamaged(PlaneError):
    """The journal has a damaged record before intact ones: to continue would lose answered commits."""


class Standalone:
    """A `ControlPlane` for one broker; a missing `directory` is created.

    It belongs to one thread: each method completes without yielding, a commit's fsync included. After a long commit,
    and between the parts of a rewrite of the journal or of `get_children`, it calls `give_way`, which may let other
    routines run.
    """

    session_timeout_s = 6.0  # only serves computations
    set_back = False

    def __init__(self, directory: Path, *, give_way: Callable[[], None] = lambda: None) -> None:
        self._directory = directory
        self._give_way = give_way
        self._path = directory / "journal"
        self._nodes: dict[str, Node] = {}
        self._children: dict[str, set[str]] = {}
        self._callbacks: list[ChangeCallback] = []
        self.state = PlaneState.LOST
        self._lock = -1
        self._journal = -1
        # Invariant: the length of the journal, all of it fsynced.
        self._journal_bytes = 0
        self._compact_at_bytes = _COMPACT_BYTES_MIN
        # The records appended since the current rewrite began; None without one.
        self._since: list[bytes] | None = None

    @property
    def session_id(self) -> int:
        return _SESSION_ID if self.state is PlaneState.CONNECTED else 0

    @property
    def last_answered(self) -> float:
        return clock_s()

    def start(self) -> None:
        """Open the journal. Raises JournalInUse, JournalDamaged, and OSError when the directory cannot be used."""
        assert self._lock == -1, "started twice"
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = open_locked(self._directory / "lock")
        except BlockingIOError:
            used = f"another process uses {self._directory}: stop it, or name another data directory"
            raise JournalInUse(used) from None
        try:
            self._load()
        except BaseException:
            self.close()
            raise
        self.state = PlaneState.CONNECTED

    def close(self) -> None:
        """End the session and forget the tree; the next start reads it from disk."""
        self.state = PlaneState.LOST
        for descriptor in (self._journal, self._lock):
            if descriptor != -1:
                os.close(descriptor)
        self._journal = self._lock = -1
        self._nodes.clear()
        self._children.clear()

    def get(self, path: str) -> Node | None:
        self._check_connected()
        return self._nodes.get(check_path(path))

    def children(self, path: str) -> list[str]:
        self._check_connected()
        return sorted(self._children.get(check_path(path), ()))

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        return [self.get(path) for path in paths]

    def get_children(self, path: str) -> list[Node]:
        found: list[Node] = []
        for index, name in enumerate(self.children(path)):
            if index % _NODES_A_TURN == _NODES_A_TURN - 1:
                self._give_way()
                self._check_connected()
            node = self._nodes.get(f"{path}/{name}")
            if node is not None:  # not deleted during a pause
                found.append(node)
        return found

    def sync(self) -> None:
        self._check_connected()

    def watch(self, callback: ChangeCallback) -> None:
        self._callbacks.append(callback)

    def commit(self, *ops: Op) -> list[int]:
        self._check_connected()
        check_commit(ops)
        draft = _Draft(self._nodes, self._children)
        versions = [draft.apply(op) for op in ops]
        if not draft.changed:
            return versions
        # The journal has no ephemeral nodes; one that replaces a persistent node is recorded as its removal.
        lasting: list[Change] = [
            (path, None, -1) if node is None or node.ephemeral else (path, node.data, node.version)
            for path, node in draft.changed.items()
            if _lasts(node) or _lasts(self._nodes.get(path))
        ]
        if lasting:
            self._append(lasting)
        self._install(draft.changed)
        self._ring(*draft.changed)
        if self._journal_bytes > self._compact_at_bytes and self._since is None:
            self._compact()
        if len(ops) >= _LONG_OPS:
            self._give_way()
        return versions

    def _check_connected(self) -> None:
        if self.state is not PlaneState.CONNECTED:
            raise PlaneUnavailable(f"the control plane in {self._directory} is closed, or its disk failed")

    def _ring(self, *paths: str | None) -> None:
        for path in paths:
            for callback in self._callbacks:
                callback(path)

    def _lose(self) -> None:
        self.state = PlaneState.LOST
        self._ring(None)

    def _install(self, changed: dict[str, Node | None]) -> None:
        for path, node in changed.items():
            parent, _, name = path.rpartition("/")
            if node is None:
                self._nodes.pop(path, None)
                names = self._children.get(parent, set())
                names.discard(name)
                if not names:
                    self._children.pop(parent, None)
            else:
                self._nodes[path] = node
                self._children.setdefault(parent, set()).add(name)

    def _append(self, changes: list[Change]) -> None:
        record = _record(changes)
        try:
            _write_all(self._journal, record)
            sync_data(self._journal)
        except OSError as fault:
            # After a failed fsync the kernel may have dropped the pages: only a restart, which reads the file, knows.
            self._lose()
            raise OutcomeUnknown(
                f"cannot write {self._path}: {fault}; mend the disk and start the broker again"
            ) from fault
        self._journal_bytes += len(record)
        if self._since is not None:
            self._since.append(record)

    def _compact(self) -> None:
        """Rewrite the journal from the tree. A failure is harmless: the old journal remains, and grows."""
        # As of now: commits made between two parts follow.
        lasting: Iterator[Change] = (
            (node.path, node.data, node.version) for node in list(self._nodes.values()) if not node.ephemeral
        )
        self._since = []
        fresh_path = self._path.with_suffix(".new")
        fresh = -1
        replaced = False
        try:
            fresh = os.open(fresh_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
            size = 0
            for batch in _batched(lasting):
                size += _write_all(fresh, _record(batch))
                self._give_way()
            if self.state is not PlaneState.CONNECTED:
                return
            size += _write_all(fresh, b"".join(self._since))
            sync(fresh)
            os.rename(fresh_path, self._path)
            replaced = True
        except OSError:
            self._compact_at_bytes = 2 * self._journal_bytes
            return
        finally:
            self._since = None
            if not replaced:
                if fresh != -1:
                    os.close(fresh)
                fresh_path.unlink(missing_ok=True)
        os.close(self._journal)
        self._journal, self._journal_bytes = fresh, size
        self._compact_at_bytes = max(_COMPACT_BYTES_MIN, 2 * size)
        try:
            _sync_directory(self._directory)
        except OSError:
            # A crash could bring the old journal back, without later commits: accept none.
            self._lose()

    def _load(self) -> None:
        self._path.with_suffix(".new").unlink(missing_ok=True)
        self._journal = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        data = self._path.read_bytes()
        end = 0
        while found := _record_at(data, end):
            changes, end = found
            self._install(
                {path: None if held is None else Node(path, held, version) for path, held, version in changes}
            )
        if _whole_record_behind(data, end):
            raise JournalDamaged(
                f"{self._path} is damaged at byte {end}, with whole records behind it. Restore the data directory "
                f"from a copy; or, to go on without what came after that byte, truncate the file there"
            )
        if end < len(data):
            os.ftruncate(self._journal, end)
        # A killed process may have written the tail without an fsync. After a failed fsync the system shows records
        # that are not on disk, and syncs them no more unless they are written again. In place: that takes no room.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            _write_all(descriptor, data[:end])
            sync(descriptor)
        finally:
            os.close(descriptor)
        _sync_directory(self._directory)
        _sync_directory(self._directory.parent)
        self._journal_bytes = end
        self._compact_at_bytes = max(_COMPACT_BYTES_MIN, 2 * end)


class _Draft:
    """The tree after the commit; `changed` has the differences, None for a removed node."""

    def __init__(self, nodes: dict[str, Node], children: dict[str, set[str]]) -> None:
        self._nodes = nodes
        self._children = children
        self.changed: dict[str, Node | None] = {}

    def apply(self, op: Op) -> int:
        """Apply one operation. Return the node's version after it, -1 for a removed node."""
        match op:
            case Create(path, data, ephemeral):
                if self._get(path) is not None:
                    raise NodeExists(path)
                self._make_parents(path)
                self.changed[path] = Node(path, data, 0, ephemeral, _SESSION_ID if ephemeral else 0)
                return 0
            case Set(path, data, version):
                node = self._expect(path, version)
                self.changed[path] = Node(path, data, version + 1, node.ephemeral, node.owner)
                return version + 1
            case Delete(path, version):
                self._expect(path, version)
                if self._has_children(path):
                    raise NodeNotEmpty(path)
                self.changed[path] = None
                return -1
            case Check(path, version):
                self._expect(path, version)
                return version
            case _:
                assert_never(op)

    def _get(self, path: str) -> Node | None:
        return self.changed[path] if path in self.changed else self._nodes.get(path)

    def _expect(self, path: str, version: int) -> Node:
        node = self._get(path)
        if node is None:
            raise NodeMissing(path)
        if node.version != version:
            raise VersionMismatch(path)
        return node

    def _make_parents(self, path: str) -> None:
        parent = parent_of(path)
        if not parent:
            return
        node = self._get(parent)
        if node is None:
            self._make_parents(parent)
            self.changed[parent] = Node(parent, b"", 0)
        elif node.ephemeral:
            raise ValueError(f"{path}: an ephemeral node has no children")

    def _has_children(self, path: str) -> bool:
        held = (f"{path}/{name}" for name in self._children.get(path, ()))
        if any(self._get(child) is not None for child in held):
            return True
        return any(node is not None and parent_of(child) == path for child, node in self.changed.items())


def _lasts(node: Node | None) -> bool:
    return node is not None and not node.ephemeral


def _record(changes: list[Change]) -> bytes:
    payload = _encode(changes)
    return _HEADER.pack(_MAGIC, len(payload), zlib.crc32(payload)) + payload


def _record_at(data: bytes, start: int) -> tuple[list[Change], int] | None:
    """Return the intact record at `start` and its end, or None."""
    if len(data) - start < _HEADER.size:
        return None
    magic, length, crc = _HEADER.unpack_from(data, start)
    end = start + _HEADER.size + length
    if magic != _MAGIC or end > len(data):
        return None
    payload = data[start + _HEADER.size : end]
    if zlib.crc32(payload) != crc:
        return None
    return _decode(payload), end


def _whole_record_behind(data: bytes, bad: int) -> bool:
    start = data.find(_MAGIC, bad + 1)
    while start != -1:
        if _record_at(data, start) is not None:
            return True
        start = data.find(_MAGIC, start + 1)
    return False


def _batched(changes: Iterator[Change]) -> Iterator[list[Change]]:
    """Yield the changes in lists of bounded size, which bounds the records of a rewritten journal."""
    batch: list[Change] = []
    size = 0
    for change in changes:
        batch.append(change)
        size += len(change[0]) + len(change[1] or b"")
        if size > COMMIT_BYTES_MAX:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_all(descriptor: int, data: bytes) -> int:
    """Write all bytes. Return their number."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    return len(data)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
