"""The replicas in data directories of stopped brokers, opened as a broker opens them: what a kill left unfinished is
finished. Nothing else is changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from portalmq import wire
from portalmq.broker.storage.batch import BatchKind
from portalmq.broker.storage.digest import digest_of
from portalmq.broker.storage.disk import DataDirectory, DirectoryInUse, read_brokers, read_identity
from portalmq.broker.storage.errors import DAMAGE, CorruptBatch, CorruptFile, OffsetPurged, StorageError
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.segment import SEGMENT_NAME
from portalmq.broker.storage.state import StateFile
from portalmq.broker.verify.compare import PartitionFinding, ReplicaComparison, ReplicaFinding
from portalmq.broker.verify.receipts import MessagePage, StoredContent
from portalmq.control_plane.state import TopicState, decode_topic
from portalmq.errors import InvalidRequest, Unavailable

# The end of a log that nobody can read.
ANYWHERE = 1 << 62


class StoppedReplica:
    """A replica in a data directory. One that cannot be opened is damaged."""

    def __init__(self, directory: Path, cluster_id: str, broker_id: int, topic: TopicState) -> None:
        self.broker_id = broker_id
        self.name = str(directory)
        self.is_compacted = topic.config.cleanup == "compact"
        self._fault = ""
        self._log: Log | None = None
        self.high_watermark = self._compacted = 0
        identity = LogIdentity(cluster_id, topic.name, topic.topic_id, int(directory.name))
        try:
            self._log = Log.open(directory, identity=identity)
            self._read_state(StateFile(directory, identity=identity))
        except StorageError as fault:
            self._fault = str(fault)

    def _read_state(self, state_file: StateFile) -> None:
        assert self._log is not None
        self.high_watermark = self._log.log_start_offset
        try:
            if not state_file.is_sound():
                self._fault = f"{state_file.path} is damaged; a broker that starts writes it again"
            elif (saved := state_file.load()) is None:
                pass
            elif saved[0].log_start_offset <= self._log.log_start_offset:  # else saved for a reset that did not happen
                self._compacted, self.high_watermark = saved[0].compacted, saved[1]
                if self.high_watermark > self._log.end_offset:
                    self._fault = f"its log ends at {self._log.end_offset}, and {self.high_watermark} is committed"
            newest = self._log.newest_control(BatchKind.COMPACT)
            self._compacted = max(self._compacted, 0 if newest is None else newest.base_offset)
        finally:
            state_file.close()

    def digest(self, offset: int, below: int, *, batches: bool = False) -> wire.ReplicaDigest:
        if self._log is None or below <= offset:
            return self._answer(offset)
        try:
            part = digest_of(self._log, offset, below, lists=batches)
        except OffsetPurged:
            return self._answer(offset)
        except CorruptBatch as fault:
            return self._answer(fault.offset, str(fault))
        except DAMAGE as fault:
            return self._answer(offset, str(fault))
        return msgspec.structs.replace(self._answer(part.next_offset), sha256=part.sha256, batches=part.batches)

    def check_file(self, offset: int) -> wire.ReplicaDigest:
        if self._log is None or self._fault:
            return self._answer(offset)
        try:
            return self._answer(self._log.check_file(offset))
        except DAMAGE as fault:
            return self._answer(offset, str(fault))

    def _answer(self, next_offset: int, fault: str = "") -> wire.ReplicaDigest:
        log = self._log
        start, end = (0, 0) if log is None else (log.log_start_offset, log.end_offset)
        return wire.ReplicaDigest(
            self.broker_id, start, self.high_watermark, end, self._compacted, next_offset, fault=fault or self._fault
        )

    def page(self, offset: int) -> MessagePage:
        if self._log is None:
            raise Unavailable(self._fault)
        log = self._log
        try:
            batches = log.read(max(offset, log.log_start_offset), max_messages=1_000, max_bytes=1 << 20)
        except StorageError as fault:
            raise Unavailable(str(fault)) from fault
        messages = [
            StoredContent(at, record.key, record.value, record.content_type, record.headers or {})
            for batch in batches
            for start, end in (batch.runs(batch.base_offset, batch.end_offset) if batch.records else ())
            for at, record in enumerate(batch.records[start - batch.base_offset : end - batch.base_offset], start)
        ]
        following = batches[-1].end_offset if batches else log.end_offset
        return MessagePage(messages, following, log.log_start_offset, log.end_offset)

    @property
    def end_offset(self) -> int:
        return ANYWHERE if self._log is None else self._log.end_offset

    def close(self) -> None:
        if self._log is not None:
            self._log.close()


class StoppedBrokers:
    """The data directories of brokers of one cluster, which no broker uses meanwhile. `brokers`: how many brokers they
    know of."""

    def __init__(self, opened: list[DataDirectory]) -> None:
        self._opened = opened
        known: set[int] = set()
        for directory in opened:
            known |= _known_brokers(directory.path) | {directory.identity.broker_id}
        self.brokers = len(known)
        self.topics: dict[str, TopicState] = {}
        self._places: dict[tuple[str, int], list[tuple[Path, DataDirectory]]] = {}
        for directory in opened:
            for folder in sorted((directory.path / "partitions").glob("*@*")):
                self._add(folder, directory)

    def _add(self, folder: Path, directory: DataDirectory) -> None:
        name, _, topic_id = folder.name.rpartition("@")
        try:
            state = decode_topic((folder / "topic.json").read_bytes(), folder.name)
        except (FileNotFoundError, msgspec.DecodeError):
            state = TopicState(name, topic_id, 0, 0, self.brokers, wire.TopicConfig())
        known = self.topics.get(topic_id)
        if known is None or known.partitions < state.partitions:
            self.topics[topic_id] = state
        for place in sorted(folder.iterdir()):
            if place.name.isdigit() and any(SEGMENT_NAME.match(each.name) for each in place.iterdir()):
                self._places.setdefault((topic_id, int(place.name)), []).append((place, directory))

    @property
    def partitions(self) -> list[tuple[TopicState, int]]:
        numbered = {(topic_id, number) for topic_id, topic in self.topics.items() for number in range(topic.partitions)}
        found = [(self.topics[topic_id], number) for topic_id, number in numbered | self._places.keys()]
        return sorted(found, key=lambda each: (each[0].name, each[0].topic_id, each[1]))

    @contextmanager
    def replicas(self, topic: TopicState, number: int) -> Iterator[list[StoppedReplica]]:
        """Open the replicas of a partition."""
        with ExitStack() as stack:
            opened: list[StoppedReplica] = []
            for place, directory in self._places.get((topic.topic_id, number), []):
                identity = directory.identity
                opened.append(StoppedReplica(place, identity.cluster_id, identity.broker_id, topic))
                stack.callback(opened[-1].close)
            yield opened

    def unsettled(self, topic: TopicState, replica: StoppedReplica, replicas: list[StoppedReplica]) -> range:
        """Return the offsets that a replica does not count as committed, and that another one may have."""
        is_complete = len(replicas) >= min(topic.replication_factor, self.brokers)
        others = [each.end_offset for each in replicas if each is not replica]
        return range(replica.high_watermark, max(others, default=0) if is_complete else ANYWHERE)

    def compare(self, topic: TopicState, number: int) -> PartitionFinding:
        with self.replicas(topic, number) as replicas:
            found = ReplicaComparison(topic.name, number, replicas).run()
        missing = min(topic.replication_factor, self.brokers) - len(found.replicas)
        found.replicas += [
            ReplicaFinding(-1, "unknown", problem="it is in none of the directories") for _ in range(missing)
        ]
        return found


@contextmanager
def opened(paths: tuple[Path, ...]) -> Iterator[StoppedBrokers]:
    """Lock and read the directories. Raises InvalidRequest for one that cannot be used."""
    with ExitStack() as stack:
        found: list[DataDirectory] = []
        for path in paths:
            found.append(_opened(path))
            stack.callback(found[-1].close)
        if len({directory.identity.cluster_id for directory in found}) > 1:
            raise InvalidRequest("these are the directories of several clusters: verify one at a time")
        brokers = [directory.identity.broker_id for directory in found]
        if len(set(brokers)) < len(brokers):
            raise InvalidRequest("two of these directories are of the same broker: name the one that was used last")
        yield StoppedBrokers(found)


def _opened(path: Path) -> DataDirectory:
    try:
        if not path.is_dir() or read_identity(path) is None:
            raise InvalidRequest(f"{path} is no broker's data directory: it has no identity.json")
        return DataDirectory.open(path)
    except DirectoryInUse as used:
        raise InvalidRequest(f"{used}; a running broker is verified without --data-dir") from None
    except StorageError as fault:
        raise InvalidRequest(str(fault)) from fault


def _known_brokers(path: Path) -> set[int]:
    """Return the ids of the cluster's brokers, as far as a directory lists them."""
    try:
        return set(read_brokers(path))
    except CorruptFile:
        return set()
