"""What a broker knows of replicas whose files are closed: `closed.sqlite` in its data directory. A start takes it from
there, and opens their files when they are used first.

A note counts only while nothing can have changed since it was written:

- in the same boot of the machine. So no power cut came between, after which a disk may have forgotten what it synced,
  and files tell what was written last, whether it was synced or not;
- while the folder has the same files, by inode, size and time of the last change (which no program can set), and no
  write-ahead log beside them;
- whose last change was old when the note was written: a file system counts time in steps of some milliseconds, and a
  change in the same step would not show.

At the first use the log compares its file with the note (Log.resume). The file is a cache: a power cut makes it void,
so it is not fsynced; damaged, it is deleted; and anybody may delete it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import apsw
import msgspec

from portalmq.broker.storage.fair_lock import FairLock
from portalmq.broker.storage.files import BESIDE
from portalmq.broker.storage.reading import ReplicaStart
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.segment import SegmentFacts
from portalmq.broker.storage.state import SavedState
from portalmq.system import boot_id

CLOSED_NAME = "closed.sqlite"
UNCHANGED_FOR_NS = 2_000_000_000
DDL = """CREATE TABLE IF NOT EXISTS replicas (
    topic_id TEXT, partition INTEGER, note BLOB, crc INTEGER, PRIMARY KEY (topic_id, partition)
) WITHOUT ROWID"""

log = logging.getLogger(__name__)

Key = tuple[str, int]
T = TypeVar("T")


class FileMark(msgspec.Struct, frozen=True, array_like=True):
    """Which file it is, and when its content or its attributes changed last."""

    inode: int
    size: int
    changed_ns: int


class ClosedReplica(msgspec.Struct, frozen=True, array_like=True):
    """A replica whose log and state file are closed, with all of its log committed and in the saved fold.

    `fold` is the encoded fold of its log, `topic_crc` the CRC-32 of its topic's state, as it is beside it.
    """

    identity: LogIdentity
    store_uuid: str
    segment: SegmentFacts
    saved: SavedState
    fold: bytes
    start: ReplicaStart
    readable_end: int
    topic_crc: int


class _Note(msgspec.Struct, frozen=True, array_like=True):
    """`marks` are by the names in the replica's folder; "" is the description of its topic."""

    boot: str
    folder: str
    marks: dict[str, FileMark]
    replica: ClosedReplica


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Note).decode


class ClosedReplicas:
    """The notes of one broker. `root` has the folders of its replicas. Methods read and write files; callers on several
    threads wait for each other. None raises: without a note, the next start opens the files."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / CLOSED_NAME
        self._root = data_dir / "partitions"
        self._boot = boot_id()
        self._turn = FairLock()

    def load(self) -> dict[Key, ClosedReplica]:
        """Return the replicas whose files are as they were noted."""
        return self._on_file(self._read, {}) if self._boot and self.path.exists() else {}

    def _read(self, connection: apsw.Connection) -> dict[Key, ClosedReplica]:
        found: dict[Key, ClosedReplica] = {}
        for topic_id, number, content, crc in connection.execute("SELECT * FROM replicas"):
            if zlib.crc32(content) == crc:
                note = _decode(content)
                if note.boot == self._boot and _marks(self._root / note.folder) == note.marks:
                    found[topic_id, number] = note.replica
        return found

    def mark(self, replica: ClosedReplica, folder: Path, description: bytes, *, is_ending: bool) -> bytes | None:
        """Return the note of a replica; None where its files are open, other files than a plain log has, or changed
        just now. `is_ending`: this process changes nothing any more."""
        marks = _marks(folder)
        names = {replica.segment.name, "state.sqlite", ""}
        if marks is None or not self._boot or names != marks.keys() - {"store.id"}:
            return None
        newest_ns = max(mark.changed_ns for mark in marks.values())
        if not is_ending and not 0 <= newest_ns <= time.time_ns() - UNCHANGED_FOR_NS:
            return None
        with contextlib.suppress(OSError):
            if _description_of(folder).read_bytes() == description:
                return _encode(_Note(self._boot, str(folder.relative_to(self._root)), marks, replica))
        return None

    def put(self, notes: Mapping[Key, bytes]) -> None:
        rows = [(*key, content, zlib.crc32(content)) for key, content in notes.items()]
        put = "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?)"
        self._on_file(lambda connection: connection.executemany(put, rows), None)

    def forget(self, topic_id: str, number: int | None = None) -> None:
        """Forget what was noted of one replica, or of all of a topic."""
        if self.path.exists():
            rest, values = ("", (topic_id,)) if number is None else (" AND partition = ?", (topic_id, number))
            delete = f"DELETE FROM replicas WHERE topic_id = ?{rest}"
            self._on_file(lambda connection: connection.execute(delete, values), None)

    def _on_file(self, work: Callable[[apsw.Connection], T], otherwise: T) -> T:
        """Return what `work` does in one transaction. A file that fails it is deleted: what it says is not needed."""
        with self._turn:
            try:
                with contextlib.closing(apsw.Connection(str(self.path))) as connection:
                    connection.execute("PRAGMA synchronous = OFF")
                    connection.execute("PRAGMA trusted_schema = OFF")
                    with connection:
                        connection.execute(DDL)
                        return work(connection)
            except (apsw.Error, msgspec.MsgspecError, TypeError, ValueError) as fault:
                log.warning("%s is begun again: %s", self.path, fault)
                for suffix in ("", *BESIDE):
                    with contextlib.suppress(OSError):
                        os.unlink(f"{self.path}{suffix}")
        return otherwise


def _description_of(folder: Path) -> Path:
    return folder.parent / "topic.json"


def _marks(folder: Path) -> dict[str, FileMark] | None:
    try:
        marks = {name: _mark_of(f"{folder}/{name}") for name in os.listdir(folder)}
        marks[""] = _mark_of(str(_description_of(folder)))
    except OSError:
        return None
    return marks


def _mark_of(path: str) -> FileMark:
    status = os.stat(path)
    return FileMark(status.st_ino, status.st_size, status.st_ctime_ns)
