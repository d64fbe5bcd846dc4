"""One broker's copy of a partition, through its files: committed offsets, the start of the log, and its segments.

Small queries go to SQLite directly; segment.py reads messages.
"""

from __future__ import annotations

import os
import re
import sqlite3
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from portalmq.spark.errors import DamagedFile, SourceError
from portalmq.spark.files.segment import ATTEMPTS, is_at_rest, opened, rest_state

T = TypeVar("T")

_SEGMENT = re.compile(r"\d{20}\.sqlite\Z")
STATE_NAME: Final = "state.sqlite"
SCHEMA_VERSION: Final = 2  # of segment files; the meta table of the state file does not change
OFFSET_END: Final = 1 << 63


class _Sealed(msgspec.Struct):
    base_offset: int
    end_offset: int
    last_timestamp_ms: int


class _SegmentManifest(msgspec.Struct):
    segments: list[_Sealed] = []


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file. `last_ms`, the Unix time of its last batch, is None before it is sealed; the last one then ends
    at OFFSET_END."""

    path: Path
    base_offset: int
    end_offset: int
    last_ms: int | None


class DirectoryReplica:
    """One broker's copy of a partition, as of the first query. Its directory may be removed with its topic: all methods
    raise FileNotFoundError then."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def _state(self) -> dict[str, Any] | None:
        """The meta table of the snapshot; None without one."""
        path = self.directory / STATE_NAME
        try:
            return self._meta_of(path)
        except FileNotFoundError:
            return None

    def _meta_of(self, path: Path) -> dict[str, Any]:
        """Return the meta table. Raises FileNotFoundError, DamagedFile, SourceError."""
        meta = dict(_asked(path, _rows("SELECT key, value FROM meta")))
        try:
            if path.name != STATE_NAME and int(meta.get("schema_version", SCHEMA_VERSION)) > SCHEMA_VERSION:
                raise SourceError(f"{path} was written by a newer PortalMQ: read it with that one's portalmq[spark]")
            whose = (meta.get("topic_id", ""), int(meta.get("partition", -1)))
        except ValueError as error:
            raise DamagedFile(path, f"is not a file of PortalMQ ({error})") from error
        if whose != (self.directory.parent.name.rpartition("@")[2], int(self.directory.name)):
            raise DamagedFile(path, f"belongs to partition {whose[1]} of the topic with the id {whose[0]!r}, not here")
        return meta

    @cached_property
    def _sealed(self) -> dict[int, _Sealed]:
        path = self.directory / "manifest.json"
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=_SegmentManifest)
        except FileNotFoundError:
            return {}
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise DamagedFile(path, f"is no manifest ({error})") from error
        return {segment.base_offset: segment for segment in manifest.segments}

    @cached_property
    def paths(self) -> list[Path]:
        return sorted(path for path in self.directory.iterdir() if _SEGMENT.match(path.name))

    @cached_property
    def _bases(self) -> list[int]:
        return [int(path.name[:20]) for path in self.paths]

    @cached_property
    def high_watermark(self) -> int:
        """The end of the committed offsets. Sealed segments are committed, even when the snapshot of the state is
        older, or was not copied. A broker writes the snapshot before the first message, so beside a live file it can
        only be missing by a fault."""
        sealed_end = max((segment.end_offset for segment in self._sealed.values()), default=0)
        if self._state is None and self._has_unsealed():
            raise DamagedFile(
                self.directory / STATE_NAME,
                "is missing, and only it says which of the newest messages are committed",
            )
        return max(int((self._state or {}).get("high_watermark", 0)), sealed_end)

    def _has_unsealed(self) -> bool:
        unsealed = [path for path, base in zip(self.paths, self._bases, strict=True) if base not in self._sealed]
        return any(_asked(path, _rows("SELECT 1 FROM batches LIMIT 1")) for path in unsealed)

    @cached_property
    def start_offset(self) -> int:
        """The first offset that is present and not purged. It rises before files are removed: a first file that begins
        above it means that a file is missing."""
        if not self.paths:
            if self.high_watermark:
                raise DamagedFile(self.directory, "holds no segment any more")
            return 0
        starts = [(self._state or {}).get("log_start_offset", 0)]
        starts.append(self._meta_of(self.paths[-1]).get("log_start_offset", 0))
        start = max(map(int, starts))
        if start < self._bases[0]:
            raise DamagedFile(
                self.directory, f"a segment is missing: the log begins at offset {start}, its files at {self._bases[0]}"
            )
        return start

    def segment_at(self, offset: int) -> SegmentFile | None:
        """Return the file with this offset; None when it is missing. Only the manifest has the end of a file that is
        not the last; reading finds the end of others."""
        index = bisect_right(self._bases, offset) - 1
        if index < 0:
            return None
        path, base = self.paths[index], self._bases[index]
        sealed = self._sealed.get(base)
        if sealed is not None:
            return (
                SegmentFile(path, base, sealed.end_offset, sealed.last_timestamp_ms)
                if offset < sealed.end_offset
                else None
            )
        following = self._bases[index + 1] if index + 1 < len(self._bases) else OFFSET_END
        return SegmentFile(path, base, following, None)

    def segments(self, start: int, end: int) -> list[SegmentFile]:
        """Return the files that hold [start, end). Raises DamagedFile when one is missing."""
        found: list[SegmentFile] = []
        reached = start
        while reached < end:
            segment = self.segment_at(reached)
            if segment is None:
                raise DamagedFile(self.directory, f"a segment is missing: there is none that holds offset {reached}")
            found.append(segment)
            reached = segment.end_offset
        return found


def first_at(segment: SegmentFile, start: int, end: int, timestamp_ms: int) -> int | None:
    """Return the first offset in [start, end), all within the file, of a batch appended at that time or later. Bisects,
    since times never fall."""

    def ask(connection: sqlite3.Connection) -> int | None:
        low, high = start, end
        while low < high:
            middle = (low + high) // 2
            found = connection.execute(_BATCH_AT, (middle,)).fetchone()
            if found is None:
                raise DamagedFile(segment.path, f"the header of the batch at offset {middle} is missing")
            base_offset, count, appended_at_ms = found
            if appended_at_ms >= timestamp_ms:
                high = base_offset
            else:
                low = base_offset + count
        return max(low, start) if low < end else None

    return _asked(segment.path, ask)


_BATCH_AT = """
SELECT base_offset, count, appended_at_ms FROM batches WHERE base_offset <= ? ORDER BY base_offset DESC LIMIT 1"""


def _asked(path: Path, ask: Callable[[sqlite3.Connection], T]) -> T:
    """Return the answer to a small query. Repeats it when a broker has begun to write to the file in the meantime.
    Raises FileNotFoundError, DamagedFile, SourceError."""
    for attempt in range(1, ATTEMPTS + 1):
        before = rest_state(path)
        try:
            with opened(path) as connection:
                answer = ask(connection)
            if before is None or before == rest_state(path):
                return answer
        except DamagedFile as fault:
            if _may_not_recover(path):
                raise SourceError(
                    f"{path} was in use by a broker that was killed: SQLite has to recover its write-ahead log, and may"
                    f" not write to {path.parent}. Copy the data directory with its -shm files, or to a place where"
                    " this user may write"
                ) from fault
            if attempt == ATTEMPTS or before is None or before == rest_state(path):
                raise
    raise SourceError(f"{path} was changed each time it was read: try again")


def _rows(query: str) -> Callable[[sqlite3.Connection], list[tuple[Any, ...]]]:
    return lambda connection: connection.execute(query).fetchall()


def _may_not_recover(path: Path) -> bool:
    has_index = os.path.exists(f"{path}-shm")
    return not is_at_rest(path) and not has_index and not os.access(path.parent, os.W_OK)
