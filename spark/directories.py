"""Brokers' data directories as a source: which partitions stand in them, which offsets are committed, in which files.

    <data>/identity.json                                          whose directory it is
    <data>/partitions/<topic>@<topic id>/topic.json               how many partitions the topic has
    <data>/partitions/<topic>@<topic id>/<partition>/*.sqlite     its segments, and state.sqlite
    <data>/partitions/<topic>@<topic id>/<partition>/manifest.json   which of them are sealed, and their times

Of several replicas the one is read that knows of the most committed messages: what another one has above its own high
watermark may yet be taken back. Where a file of it cannot be read, the others' copies are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import pyarrow as pa

from portalmq.spark.errors import DamagedFile, DataLoss, NothingThere, SourceError
from portalmq.spark.origin import SPAN_OFFSETS, Log, Span
from portalmq.spark.segment import SegmentRows, opened

_SEGMENT = re.compile(r"\d{20}\.sqlite\Z")
_TOPIC = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,190})@(?P<topic_id>[0-9a-f]+)\Z")
SCHEMA_VERSION = 1


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
    """One file. `end_offset` and `last_ms` (Unix time of its last batch) are None while it is not sealed and not the
    last one."""

    path: Path
    base_offset: int
    end_offset: int
    last_ms: int | None


class Replica:
    """One broker's copy of a partition, as it stands now."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def _state(self) -> dict[str, int]:
        path = self.directory / "state.sqlite"
        try:
            with opened(path) as connection:
                return dict(connection.execute("SELECT key, value FROM meta"))
        except FileNotFoundError:
            return {}

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
    def high_watermark(self) -> int:
        """All below is committed. What is sealed is, even where the snapshot of the state is missing or older."""
        sealed_end = max((segment.end_offset for segment in self._sealed.values()), default=0)
        return max(int(self._state.get("high_watermark", 0)), sealed_end)

    @cached_property
    def start_offset(self) -> int:
        """The first offset that is there and not purged."""
        if not self.paths:
            return self.high_watermark
        with opened(self.paths[-1]) as connection:
            newest = dict(connection.execute("SELECT key, value FROM meta"))
        if int(newest.get("schema_version", SCHEMA_VERSION)) > SCHEMA_VERSION:
            raise SourceError(
                f"{self.paths[-1]} was written by a newer PortalMQ: read it with that one's portalmq[spark]"
            )
        purged = max(int(self._state.get("log_start_offset", 0)), int(newest.get("log_start_offset", 0)))
        return max(purged, int(self.paths[0].name[:20]))

    def segments(self, start: int, end: int) -> list[Segment]:
        """The files that hold [start, end). Raises DamagedFile when one of them is missing."""
        bases = [int(path.name[:20]) for path in self.paths]
        found: list[Segment] = []
        reached = start
        for index, (path, base) in enumerate(zip(self.paths, bases, strict=True)):
            sealed = self._sealed.get(base)
            following = bases[index + 1] if index + 1 < len(bases) else end
            segment_end = sealed.end_offset if sealed is not None else max(following, base)
            if segment_end <= start or base >= end:
                continue
            if base > reached:
                break
            found.append(Segment(path, base, segment_end, sealed.last_timestamp_ms if sealed is not None else None))
            reached = segment_end
        if reached < end:
            raise DamagedFile(self.directory, f"a segment is missing: there is none that holds offset {reached}")
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

    def logs(self) -> list[Log]:
        return [log for log, _ in self._found()]

    def offset_at(self, log: Log, timestamp_ms: int) -> int:
        replica = self._replicas_of(log)[0]
        for segment in replica.segments(log.start_offset, log.end_offset):
            if segment.last_ms is not None and segment.last_ms < timestamp_ms:
                continue
            found = _first_at(segment, timestamp_ms)
            if found is not None:
                return min(max(found, log.start_offset), log.end_offset)
        return log.end_offset

    def spans(self, log: Log, start: int, end: int) -> list[Span]:
        if start >= end:
            return []
        replicas = self._replicas_of(log)
        fault: DamagedFile | None = None
        for replica in replicas:
            try:
                segments = replica.segments(start, end)
            except DamagedFile as error:
                fault = fault or error
                continue
            if replica.high_watermark < end:
                continue
            elsewhere = tuple(
                other.directory for other in replicas if other is not replica and other.high_watermark >= end
            )
            return [
                FileSpan(log, low, min(low + self._span_offsets, segment.end_offset, end), segment.path, elsewhere)
                for segment in segments
                for low in range(max(start, segment.base_offset), min(segment.end_offset, end), self._span_offsets)
            ]
        assert fault is not None
        raise fault

    def _replicas_of(self, log: Log) -> list[Replica]:
        """Best first."""
        for found, replicas in self._found():
            if found.name == log.name:
                return replicas
        raise NothingThere(f"{log.name} is in none of {self._where}")

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
                name = (match["topic"], match["topic_id"])
                sizes[name] = max(sizes.get(name, 0), _size_of(directory))
                for place in directory.iterdir():
                    if place.name.isdecimal() and place.is_dir():
                        places.setdefault((*name, int(place.name)), []).append(Replica(place))
        self._check_topics(sizes)
        self._check_complete(sizes, places)
        found = []
        for (topic, topic_id, partition), replicas in sorted(places.items()):
            replicas.sort(key=lambda replica: -replica.high_watermark)
            best = replicas[0]
            found.append((Log(topic, topic_id, partition, best.start_offset, best.high_watermark), replicas))
        return found

    def _wants(self, topic: str) -> bool:
        return not topic.startswith("__") if self._topics is None else topic in self._topics

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
        for topic in self._topics or ():
            if topic not in names:
                raise NothingThere(f"there is no topic {topic!r} in {self._where}")
        if not names:
            raise NothingThere(f"there are no topics in {self._where} yet")
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


def _first_at(segment: Segment, timestamp_ms: int) -> int | None:
    """The first offset of the file's first batch that was appended at that time or later. Times never fall: bisect."""
    with opened(segment.path) as connection:
        low, high = segment.base_offset, segment.end_offset
        while low < high:
            middle = (low + high) // 2
            row = connection.execute(
                "SELECT base_offset, count, appended_at_ms FROM batches WHERE base_offset <= ?"
                " ORDER BY base_offset DESC LIMIT 1",
                (middle,),
            ).fetchone()
            if row is None:
                raise DamagedFile(segment.path, f"the header of the batch at offset {middle} is missing")
            base_offset, count, appended_at_ms = row
            if appended_at_ms >= timestamp_ms:
                high = base_offset
            else:
                low = base_offset + count
        return low if low < segment.end_offset else None
