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
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from portalmq.spark.errors import DamagedFile, DataLoss, NothingThere, NoTopic, NotReadable, SourceError
from portalmq.spark.origin import SPAN_OFFSETS, PartitionLog, Span
from portalmq.spark.replica import DirectoryReplica, SegmentFile, first_at
from portalmq.spark.segment import SegmentRows
from portalmq.spark.topics import is_wanted, not_found

_TOPIC = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,190})@(?P<topic_id>[0-9a-f]+)\Z")


class _Identity(msgspec.Struct):
    cluster_id: str


class _TopicFile(msgspec.Struct):
    partitions: int


class FileSpan(Span):
    """Offsets that lie in one file. `elsewhere` are other replicas' directories of the partition."""

    def __init__(self, log: PartitionLog, start: int, end: int, path: Path, elsewhere: tuple[Path, ...]) -> None:
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
                segments = DirectoryReplica(directory).segments(reached, self.end)
                for segment in segments:
                    low, high = max(reached, segment.base_offset), min(self.end, segment.end_offset)
                    for batch in SegmentRows(segment.path, self.log, wanted).batches(low, high):
                        reached = batch.column("offset")[-1].as_py() + 1
                        yield batch.select(list(columns))
                return
            except (FileNotFoundError, DamagedFile):
                continue
        if isinstance(fault, FileNotFoundError):
            raise not_there(self.path, self.log, reached, self.end) from fault
        raise fault


def not_there(path: Path, log: PartitionLog, start: int, end: int) -> SourceError:
    """Why a file that was planned is not there when its offsets are read: its messages were removed. Or this machine of
    a Spark cluster does not see the data directory at all, which is no loss that may be passed over."""
    root = path.parents[3]
    if not (root / "partitions").is_dir():
        return NothingThere(
            f"{root} is not there on this machine ({os.uname().nodename}): each machine of Spark has to see it by this"
            " path. Where they do not, read by HTTP (option bootstrap)"
        )
    return DataLoss(
        f"{path} is gone: offsets {start} to {end - 1} of {log.topic!r}, partition {log.partition}, were removed while"
        " they were read (retention, a purge, or by hand)"
    )


class Directories:
    """The data directories of one or all brokers of a cluster. Implements Origin."""

    def __init__(
        self, paths: Sequence[str], topics: Sequence[str] | None = None, span_offsets: int = SPAN_OFFSETS
    ) -> None:
        """`topics` None means all, but for those whose names begin with two underscores."""
        self._span_offsets = span_offsets
        self._roots = [Path(path).absolute() for path in paths]
        self._topics = None if topics is None else tuple(topics)
        self._seen: dict[str, tuple[PartitionLog, list[DirectoryReplica]]] = {}

    def logs(self) -> list[PartitionLog]:
        try:
            self._seen = {log.name: (log, replicas) for log, replicas in self._found()}
        except PermissionError as error:
            raise NotReadable(error.filename) from error
        return [log for log, _ in self._seen.values()]

    def offset_at(self, log: PartitionLog, timestamp_ms: int) -> int:
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
        self,
        log: PartitionLog,
        replica: DirectoryReplica,
        segment: SegmentFile,
        start: int,
        end: int,
        timestamp_ms: int,
    ) -> int | None:
        """As `_first_at`, by another replica's files where this one's cannot be read."""
        try:
            return first_at(segment, start, end, timestamp_ms)
        except (FileNotFoundError, DamagedFile) as fault:
            for other in self._others(log, replica, end):
                try:
                    for part in other.segments(start, end):
                        low, high = max(start, part.base_offset), min(end, part.end_offset)
                        found = first_at(part, low, high, timestamp_ms)
                        if found is not None:
                            return found
                    return None
                except (FileNotFoundError, DamagedFile):
                    continue
            if isinstance(fault, FileNotFoundError):
                raise DataLoss(f"{segment.path} is gone: it was removed while the query was planned") from fault
            raise

    def _others(self, log: PartitionLog, replica: DirectoryReplica, end: int) -> list[DirectoryReplica]:
        """Who else knows all below `end` to be committed."""
        return [other for other in self._replicas_of(log) if other is not replica and other.high_watermark >= end]

    def spans(self, log: PartitionLog, start: int, end: int) -> list[Span]:
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

    def _pieces(self, log: PartitionLog, start: int, end: int) -> Iterator[tuple[DirectoryReplica, SegmentFile, int]]:
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

    def homes(self, log: PartitionLog) -> list[Path]:
        """Where the partition stands, the best copy first."""
        return [replica.directory for replica in self._replicas_of(log)]

    def _replicas_of(self, log: PartitionLog) -> list[DirectoryReplica]:
        """Best first."""
        if log.name not in self._seen:
            self.logs()
        if log.name not in self._seen:
            raise NothingThere(f"{log.name} is in none of {self._where}")
        return self._seen[log.name][1]

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self._roots))

    def _found(self) -> list[tuple[PartitionLog, list[DirectoryReplica]]]:
        places: dict[tuple[str, str, int], list[DirectoryReplica]] = {}
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
                    places.setdefault((*name, int(place.name)), []).append(DirectoryReplica(place))
        self._check_topics(sizes)
        self._check_complete(sizes, places)
        logs = []
        for key, replicas in sorted(places.items()):
            readable, fault = _readable(replicas)
            if readable:
                start = _start_of(readable)
                logs.append((PartitionLog(*key, start, max(start, readable[0].high_watermark)), readable))
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
        # Each once, by the name it was given: other machines of a cluster may have it behind that name elsewhere.
        return list({root.resolve(): root for root in reversed(self._roots)}.values())[::-1]

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
        self, sizes: dict[tuple[str, str], int], places: dict[tuple[str, str, int], list[DirectoryReplica]]
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


def _readable(replicas: Sequence[DirectoryReplica]) -> tuple[list[DirectoryReplica], DamagedFile | None]:
    """Those that tell what is committed, best first, and why another one does not. None when all went away with their
    topic."""
    found: list[tuple[int, DirectoryReplica]] = []
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


def _start_of(replicas: Sequence[DirectoryReplica]) -> int:
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
