"""Brokers' data directories as an origin: their partitions, committed offsets and files.

    <data>/identity.json                                          the cluster and broker of the directory
    <data>/partitions/<topic>@<topic id>/topic.json               the topic's number of partitions
    <data>/partitions/<topic>@<topic id>/<partition>/*.sqlite     its segments, and state.sqlite
    <data>/partitions/<topic>@<topic id>/<partition>/manifest.json   the sealed segments, and their times

Of several replicas it reads the one that knows the most committed messages: messages of another one above its own high
watermark may yet be truncated. When a file of it cannot be read, the copies of other replicas are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa

from portalmq.spark.errors import DamagedFile, DataLoss, NothingThere, NoTopic, NotReadable, SourceError
from portalmq.spark.files.replica import DirectoryReplica, SegmentFile, first_at
from portalmq.spark.files.segment import SegmentRows
from portalmq.spark.origin import SPAN_OFFSETS, PartitionLog, Span
from portalmq.spark.topics import is_wanted, not_found

_TOPIC = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,190})@(?P<topic_id>[0-9a-f]+)\Z")


class _Identity(msgspec.Struct):
    cluster_id: str


class _TopicFile(msgspec.Struct):
    partitions: int


class FileSpan(Span):
    """Offsets within one file. `elsewhere` has the partition's directories in other replicas."""

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
            raise missing_file(self.path, self.log, reached, self.end) from fault
        raise fault


def missing_file(path: Path, log: PartitionLog, start: int, end: int) -> SourceError:
    """Return the error for a planned file that is missing at reading time. Its messages were removed; or this machine
    of a Spark cluster does not see the data directory at all, which failOnDataLoss=false must not hide."""
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
        """Select `topics`; None selects all but internal ones."""
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
        """Return the offset. Opens only files whose times the manifest does not settle."""
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
        """Run `first_at` on the segment, or on another replica's files where this one cannot be read."""
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
        """Return the other replicas that know all below `end` to be committed."""
        return [other for other in self._replicas_of(log) if other is not replica and other.high_watermark >= end]

    def spans(self, log: PartitionLog, start: int, end: int) -> list[Span]:
        found: list[Span] = []
        reached = start
        for replica, segment, upto in self._pieces(log, start, end):
            elsewhere = tuple(other.directory for other in self._others(log, replica, upto))
            tasks = -(-(upto - reached) // self._span_offsets)
            size = -(-(upto - reached) // tasks)  # of equal size, since the longest task decides the duration
            found += [
                FileSpan(log, low, min(low + size, upto), segment.path, elsewhere) for low in range(reached, upto, size)
            ]
            reached = upto
        return found

    def _pieces(self, log: PartitionLog, start: int, end: int) -> Iterator[tuple[DirectoryReplica, SegmentFile, int]]:
        """Yield [start, end) by files: the replica, its file, and the end of the piece. A file that the best replica
        lacks comes from another one that knows it to be committed."""
        replicas = self._replicas_of(log)
        if replicas[0].high_watermark < end:  # committed since the last look
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

    def directories(self, log: PartitionLog) -> list[Path]:
        """Return the partition's directories, the best copy first."""
        return [replica.directory for replica in self._replicas_of(log)]

    def _replicas_of(self, log: PartitionLog) -> list[DirectoryReplica]:
        """Return the partition's replicas, best first."""
        if log.name not in self._seen:
            self.logs()
        if log.name not in self._seen:
            raise NothingThere(f"{log.name} is in none of {self._where}")
        return self._seen[log.name][1]

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self._roots))

    def _found(self) -> list[tuple[PartitionLog, list[DirectoryReplica]]]:
        replicas_by_key: dict[tuple[str, str, int], list[DirectoryReplica]] = {}
        sizes: dict[tuple[str, str], int] = {}
        for root in self._checked_roots():
            for directory in sorted((root / "partitions").iterdir()):
                match = _TOPIC.match(directory.name)
                if match is None or not is_wanted(match["topic"], self._topics):
                    continue
                try:
                    found = [path for path in directory.iterdir() if path.name.isdecimal() and path.is_dir()]
                except (FileNotFoundError, NotADirectoryError):  # just deleted, or not a topic
                    continue
                name = (match["topic"], match["topic_id"])
                sizes[name] = max(sizes.get(name, 0), _size_of(directory))
                for path in found:
                    replicas_by_key.setdefault((*name, int(path.name)), []).append(DirectoryReplica(path))
        self._check_topics(sizes)
        self._check_complete(sizes, replicas_by_key)
        logs = []
        for key, replicas in sorted(replicas_by_key.items()):
            readable, fault = _readable(replicas)
            if readable:
                start = _start_of(readable)
                logs.append((PartitionLog(*key, start, max(start, readable[0].high_watermark)), readable))
            elif fault is not None:
                raise fault
        return logs

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
        # Each once, under its given name: other machines of a cluster may mount it under that name elsewhere.
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
        self, sizes: dict[tuple[str, str], int], replicas_by_key: dict[tuple[str, str, int], list[DirectoryReplica]]
    ) -> None:
        for (topic, topic_id), size in sizes.items():
            missing = [number for number in range(size) if (topic, topic_id, number) not in replicas_by_key]
            if missing:
                raise NothingThere(
                    f"partition {', '.join(map(str, missing))} of {topic!r} is in none of {self._where}:"
                    " name the data directories of all brokers, separated by commas"
                )


def _size_of(directory: Path) -> int:
    """Return the topic's number of partitions as far as this broker knows it."""
    path = directory / "topic.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TopicFile).partitions
    except FileNotFoundError:
        return 0
    except msgspec.MsgspecError as error:
        raise DamagedFile(path, f"describes no topic ({error})") from error


def _readable(replicas: Sequence[DirectoryReplica]) -> tuple[list[DirectoryReplica], DamagedFile | None]:
    """Return the replicas that know what is committed, best first, and the fault of another one. Both are empty when
    all were removed with their topic."""
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
    """Return the start of the log by the best replica that knows it. Raises DamagedFile."""
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
    return replicas[0].high_watermark  # all were just removed
