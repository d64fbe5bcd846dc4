"""Brokers' data directories as a source: which partitions stand in them, which offsets are committed, in which files.

    <data>/identity.json                                          whose directory it is
    <data>/partitions/<topic>@<topic id>/topic.json               how many partitions the topic has
    <data>/partitions/<topic>@<topic id>/<partition>/*.sqlite     its segments, and state.sqlite
    <data>/partitions/<topic>@<topic id>/<partition>/manifest.json   which of them are sealed, and their times

Of several replicas the one is read that knows of the most committed messages: what another one has above its own high
watermark may yet be taken back. Where a file of it cannot be read, the others' copies are.
"""

from __future__ import annotations

import os
import re
import sqlite3
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pyarrow as pa

from portalmq.spark.errors import DamagedFile, DataLoss, NothingThere, NoTopic, NotReadable, SourceError
from portalmq.spark.origin import SPAN_OFFSETS, Log, Span
from portalmq.spark.segment import ATTEMPTS, SegmentRows, is_at_rest, opened
from portalmq.spark.topics import is_wanted, not_found

T = TypeVar("T")

_SEGMENT = re.compile(r"\d{20}\.sqlite\Z")
_TOPIC = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,190})@(?P<topic_id>[0-9a-f]+)\Z")
STATE_NAME: Final = "state.sqlite"
SCHEMA_VERSION: Final = 1  # of segment files; of the state its meta is read, which stays
OFFSET_END: Final = 1 << 63


class _Sealed(msgspec.Struct):
    base_offset: int
    end_offset: int
    last_timestamp_ms: int


class _Manifest(msgspec.Struct):
    segments: list[_Sealed] = []


class _Identity(msgspec.Struct):
    cluster_id: str


class _TopicFile(msgspec.Struct):
    partitions: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One file. `last_ms`, the Unix time of its last batch, is None while it is not sealed; the last one then ends at
    OFFSET_END."""

    path: Path
    base_offset: int
    end_offset: int
    last_ms: int | None


class Replica:
    """One broker's copy of a partition, as it stood when it was first asked. Its directory may go meanwhile, with its
    topic: all of it raises FileNotFoundError then."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def _state(self) -> dict[str, Any] | None:
        """None where there is no snapshot."""
        path = self.directory / STATE_NAME
        try:
            return self._meta_of(path)
        except FileNotFoundError:
            return None

    def _meta_of(self, path: Path) -> dict[str, Any]:
        """Raises FileNotFoundError, DamagedFile, SourceError."""
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
            manifest = msgspec.json.decode(path.read_bytes(), type=_Manifest)
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
        """All below is committed. What is sealed is, even where the snapshot of the state is older, or was not copied
        along. A broker writes the snapshot before the first message, so it is missing beside a live file by a fault
        alone."""
        sealed_end = max((segment.end_offset for segment in self._sealed.values()), default=0)
        if self._state is None and self._has_unsealed():
            raise DamagedFile(
                self.directory / STATE_NAME,
                "is missing, and it alone tells which of the newest messages are committed",
            )
        return max(int((self._state or {}).get("high_watermark", 0)), sealed_end)

    def _has_unsealed(self) -> bool:
        unsealed = [path for path, base in zip(self.paths, self._bases, strict=True) if base not in self._sealed]
        return any(_asked(path, _rows("SELECT 1 FROM batches LIMIT 1")) for path in unsealed)

    @cached_property
    def start_offset(self) -> int:
        """The first offset that is there and not purged. It moves before files are removed: so where the first file
        begins behind it, a file is missing."""
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

    def segment_at(self, offset: int) -> Segment | None:
        """The file that holds the offset; None when it is missing. Only the manifest tells where a file ends that is
        not the last: of others it is found out by reading."""
        index = bisect_right(self._bases, offset) - 1
        if index < 0:
            return None
        path, base = self.paths[index], self._bases[index]
        sealed = self._sealed.get(base)
        if sealed is not None:
            return (
                Segment(path, base, sealed.end_offset, sealed.last_timestamp_ms) if offset < sealed.end_offset else None
            )
        following = self._bases[index + 1] if index + 1 < len(self._bases) else OFFSET_END
        return Segment(path, base, following, None)

    def segments(self, start: int, end: int) -> list[Segment]:
        """The files that hold [start, end). Raises DamagedFile when one of them is missing."""
        found: list[Segment] = []
        reached = start
        while reached < end:
            segment = self.segment_at(reached)
            if segment is None:
                raise DamagedFile(self.directory, f"a segment is missing: there is none that holds offset {reached}")
            found.append(segment)
            reached = segment.end_offset
        return found


class FileSpan(Span):
    """Offsets that lie in one file. `elsewhere` are other replicas' directories of the partition."""

    def __init__(self, log: Log, start: int, end: int, path: Path, elsewhere: tuple[Path, ...]) -> None:
        super().__init__(log, start, end)
        self.path = path
        self.elsewhere = elsewhere

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        reached = self.start
        wanted = tuple(columns) if "offset" in columns else (*columns, "offset")
        try:
            for batch in SegmentRows(self.path, self.log, wanted).batches(self.start, self.end):
                reached = batch.column("offset")[-1].as_py() + 1
                yield batch.select(list(columns))
            return
        except (FileNotFoundError, DamagedFile) as error:
            fault = error
        for directory in self.elsewhere:
            try:
                segments = Replica(directory).segments(reached, self.end)
                for segment in segments:
                    low, high = max(reached, segment.base_offset), min(self.end, segment.end_offset)
                    for batch in SegmentRows(segment.path, self.log, wanted).batches(low, high):
                        reached = batch.column("offset")[-1].as_py() + 1
                        yield batch.select(list(columns))
                return
            except (FileNotFoundError, DamagedFile):
                continue
        if isinstance(fault, FileNotFoundError):
            raise DataLoss(
                f"{self.path} is gone: offsets {reached} to {self.end - 1} of {self.log.topic!r}, partition"
                f" {self.log.partition}, were removed while they were read (retention, a purge, or by hand)"
            ) from fault
        raise fault


class Directories:
    """The data directories of one or all brokers of a cluster. Implements Origin."""

    def __init__(
        self, paths: Sequence[str], topics: Sequence[str] | None = None, span_offsets: int = SPAN_OFFSETS
    ) -> None:
        """`topics` None means all, but for those whose names begin with two underscores."""
        self._span_offsets = span_offsets
        self._roots = [Path(path).absolute() for path in paths]
        self._topics = None if topics is None else tuple(topics)
        self._seen: dict[str, tuple[Log, list[Replica]]] = {}

    def logs(self) -> list[Log]:
        try:
            self._seen = {log.name: (log, replicas) for log, replicas in self._found()}
        except PermissionError as error:
            raise NotReadable(error.filename) from error
        return [log for log, _ in self._seen.values()]

    def offset_at(self, log: Log, timestamp_ms: int) -> int:
        """Only files are opened whose times the manifest does not settle."""
        reached = log.start_offset
        for replica, segment, upto in self._pieces(log, log.start_offset, log.end_offset):
            if segment.last_ms is None or segment.last_ms >= timestamp_ms:
                found = self._first_in(log, replica, segment, reached, upto, timestamp_ms)
                if found is not None:
                    return found
            reached = upto
        return log.end_offset

    def _first_in(
        self, log: Log, replica: Replica, segment: Segment, start: int, end: int, timestamp_ms: int
    ) -> int | None:
        """As `_first_at`, by another replica's files where this one's cannot be read."""
        try:
            return _first_at(segment, start, end, timestamp_ms)
        except (FileNotFoundError, DamagedFile) as fault:
            for other in self._others(log, replica, end):
                try:
                    for part in other.segments(start, end):
                        low, high = max(start, part.base_offset), min(end, part.end_offset)
                        found = _first_at(part, low, high, timestamp_ms)
                        if found is not None:
                            return found
                    return None
                except (FileNotFoundError, DamagedFile):
                    continue
            if isinstance(fault, FileNotFoundError):
                raise DataLoss(f"{segment.path} is gone: it was removed while the query was planned") from fault
            raise

    def _others(self, log: Log, replica: Replica, end: int) -> list[Replica]:
        """Who else knows all below `end` to be committed."""
        return [other for other in self._replicas_of(log) if other is not replica and other.high_watermark >= end]

    def spans(self, log: Log, start: int, end: int) -> list[Span]:
        found: list[Span] = []
        reached = start
        for replica, segment, upto in self._pieces(log, start, end):
            elsewhere = tuple(other.directory for other in self._others(log, replica, upto))
            tasks = -(-(upto - reached) // self._span_offsets)
            size = -(-(upto - reached) // tasks)  # as equal as can be: the longest task decides when all are done
            found += [
                FileSpan(log, low, min(low + size, upto), segment.path, elsewhere) for low in range(reached, upto, size)
            ]
            reached = upto
        return found

    def _pieces(self, log: Log, start: int, end: int) -> Iterator[tuple[Replica, Segment, int]]:
        """[start, end) by files: each with the replica it is of, and the offset up to which it is to be read. A file
        that the best replica lacks is taken from another one that knows it to be committed."""
        replicas = self._replicas_of(log)
        if replicas[0].high_watermark < end:  # committed since we looked
            self.logs()
            replicas = self._replicas_of(log)
        reached = start
        while reached < end:
            committed = [replica for replica in replicas if replica.high_watermark > reached]
            if not committed:
                raise SourceError(
                    f"offsets {reached} to {end - 1} of {log.name} are not known to be committed in {self._where}: name"
                    " the data directories of all brokers, separated by commas"
                )
            pieces = ((replica, replica.segment_at(reached)) for replica in committed)
            found = next(((replica, segment) for replica, segment in pieces if segment is not None), None)
            if found is None:
                raise DamagedFile(
                    committed[0].directory, f"a segment is missing: there is none that holds offset {reached}"
                )
            replica, segment = found
            upto = min(segment.end_offset, replica.high_watermark, end)
            yield replica, segment, upto
            reached = upto

    def homes(self, log: Log) -> list[Path]:
        """Where the partition stands, the best copy first."""
        return [replica.directory for replica in self._replicas_of(log)]

    def _replicas_of(self, log: Log) -> list[Replica]:
        """Best first."""
        if log.name not in self._seen:
            self.logs()
        if log.name not in self._seen:
            raise NothingThere(f"{log.name} is in none of {self._where}")
        return self._seen[log.name][1]

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self._roots))

    def _found(self) -> list[tuple[Log, list[Replica]]]:
        places: dict[tuple[str, str, int], list[Replica]] = {}
        sizes: dict[tuple[str, str], int] = {}
        for root in self._checked_roots():
            for directory in sorted((root / "partitions").iterdir()):
                match = _TOPIC.match(directory.name)
                if match is None or not self._wants(match["topic"]):
                    continue
                try:
                    found = [place for place in directory.iterdir() if place.name.isdecimal() and place.is_dir()]
                except (FileNotFoundError, NotADirectoryError):  # deleted just now; or no topic's
                    continue
                name = (match["topic"], match["topic_id"])
                sizes[name] = max(sizes.get(name, 0), _size_of(directory))
                for place in found:
                    places.setdefault((*name, int(place.name)), []).append(Replica(place))
        self._check_topics(sizes)
        self._check_complete(sizes, places)
        logs = []
        for key, replicas in sorted(places.items()):
            readable, fault = _readable(replicas)
            if readable:
                start = _start_of(readable)
                logs.append((Log(*key, start, max(start, readable[0].high_watermark)), readable))
            elif fault is not None:
                raise fault
        return logs

    def _wants(self, topic: str) -> bool:
        return is_wanted(topic, self._topics)

    def _checked_roots(self) -> list[Path]:
        clusters: dict[str, Path] = {}
        for root in self._roots:
            if not root.is_dir():
                raise NothingThere(f"there is no directory {root}: name what the broker was given as --data-dir")
            if not (root / "partitions").is_dir():
                raise NothingThere(
                    f"{root} is no broker's data directory: it has no folder 'partitions'. Name what the broker was"
                    " given as --data-dir"
                )
            identity = root / "identity.json"
            if identity.is_file():
                try:
                    cluster = msgspec.json.decode(identity.read_bytes(), type=_Identity).cluster_id
                except msgspec.MsgspecError as error:
                    raise DamagedFile(identity, f"is no broker's identity ({error})") from error
                clusters.setdefault(cluster, root)
        if len(clusters) > 1:
            one, other, *_ = clusters.values()
            raise SourceError(f"{one} and {other} are of two clusters: read each cluster by itself")
        return list(dict.fromkeys(root.resolve() for root in self._roots))

    def _check_topics(self, sizes: dict[tuple[str, str], int]) -> None:
        names = [topic for topic, _ in sizes]
        for topic in not_found(self._topics, names):
            raise NoTopic(f"there is no topic {topic!r} in {self._where}")
        if not names:
            raise NoTopic(f"there are no topics in {self._where} yet")
        for topic in names:
            if names.count(topic) > 1:
                ids = " and ".join(topic_id for name, topic_id in sizes if name == topic)
                raise SourceError(
                    f"{topic!r} was deleted and made again: {self._where} hold it with the ids {ids}. Start the broker"
                    " that was away, so that it learns of it, or leave its directory out"
                )

    def _check_complete(
        self, sizes: dict[tuple[str, str], int], places: dict[tuple[str, str, int], list[Replica]]
    ) -> None:
        for (topic, topic_id), size in sizes.items():
            missing = [number for number in range(size) if (topic, topic_id, number) not in places]
            if missing:
                raise NothingThere(
                    f"partition {', '.join(map(str, missing))} of {topic!r} is in none of {self._where}:"
                    " name the data directories of all brokers, separated by commas"
                )


def _size_of(directory: Path) -> int:
    """How many partitions the topic has, as far as this broker was told."""
    path = directory / "topic.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TopicFile).partitions
    except FileNotFoundError:
        return 0
    except msgspec.MsgspecError as error:
        raise DamagedFile(path, f"describes no topic ({error})") from error


def _readable(replicas: Sequence[Replica]) -> tuple[list[Replica], DamagedFile | None]:
    """Those that tell what is committed, best first, and why another one does not. None when all went away with their
    topic."""
    found: list[tuple[int, Replica]] = []
    fault: DamagedFile | None = None
    for replica in replicas:
        try:
            found.append((replica.high_watermark, replica))
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            fault = fault or error
    found.sort(key=lambda pair: -pair[0])
    return [replica for _, replica in found], fault


def _start_of(replicas: Sequence[Replica]) -> int:
    """Where the log begins, by the best replica that can tell. Raises DamagedFile."""
    fault: DamagedFile | None = None
    for replica in replicas:
        try:
            return replica.start_offset
        except FileNotFoundError:
            continue
        except DamagedFile as error:
            fault = fault or error
    if fault is not None:
        raise fault
    return replicas[0].high_watermark  # all went away just now


def _first_at(segment: Segment, start: int, end: int, timestamp_ms: int) -> int | None:
    """The first offset of [start, end), all of it in the file, of a batch that was appended at that time or later.
    Times never fall: bisect."""

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
    """The answer to a small question. Where a broker has begun to write to the file meanwhile, it is asked again.
    Raises FileNotFoundError, DamagedFile, SourceError."""
    for attempt in range(1, ATTEMPTS + 1):
        before = _quiet_state(path)
        try:
            with opened(path) as connection:
                answer = ask(connection)
            if before is None or before == _quiet_state(path):
                return answer
        except sqlite3.OperationalError as error:
            raise SourceError(f"{path} was kept locked for seconds ({error}): try again") from error
        except DamagedFile as fault:
            if _may_not_recover(path):
                raise SourceError(
                    f"{path} was in use by a broker that was killed: SQLite has to recover its write-ahead log, and may"
                    f" not write to {path.parent}. Copy the data directory with its -shm files, or to a place where"
                    " this user may write"
                ) from fault
            if attempt == ATTEMPTS or before is None or before == _quiet_state(path):
                raise
    raise SourceError(f"{path} was changed each time it was read: try again")


def _rows(query: str) -> Callable[[sqlite3.Connection], list[tuple[Any, ...]]]:
    return lambda connection: connection.execute(query).fetchall()


def _may_not_recover(path: Path) -> bool:
    has_index = os.path.exists(f"{path}-shm")
    return not is_at_rest(path) and not has_index and not os.access(path.parent, os.W_OK)


def _quiet_state(path: Path) -> tuple[int, int, int] | None:
    """Changes when the file does; None while somebody may be writing to it, and SQLite sees to the order."""
    if not is_at_rest(path):
        return None
    state = path.stat()
    return state.st_ino, state.st_size, state.st_mtime_ns
