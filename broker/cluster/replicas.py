"""The files of the replicas on this broker: where they are, how often each was rebuilt, and how one is opened.

A replica has a store uuid, which the control plane records with its place in the ISR: that of the data directory,
followed by "/1", "/2", ... for each time that the replica was begun again with an empty log on the same disk. This
number is in `store.id` in the partition's folder, which is written before anything else. A folder without a log takes
the next number after those of its predecessors in lost+found. So no crash between the two makes an emptied replica look
complete.

`joining` is in the folder of a replica that has not been in sync since it was added, or begun again, and says which of
both: it may lack what is acknowledged, and `portalmq adopt` does not count on it.
"""

from __future__ import annotations

import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import gevent
import msgspec

from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.partition.action_queue import EpochWriter
from portalmq.broker.partition.folding import Recovered, recover
from portalmq.broker.partition.host import PartitionHost
from portalmq.broker.partition.native import attempt
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.rest import closed_replica_of, recovered_from, uses_of
from portalmq.broker.storage.closed_replicas import ClosedReplica, ClosedReplicas
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import CorruptBatch, CorruptFile, Shortage, faults_of
from portalmq.broker.storage.files import make_directory, sync_directory, write_atomically
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.open_files import OpenFiles
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.segment import SEGMENT_NAME
from portalmq.broker.storage.state import StateFile
from portalmq.control_plane.state import PartitionState, TopicState, decode_topic, encode

log = logging.getLogger(__name__)

TOPIC_FILE = "topic.json"
STORE_FILE = "store.id"
JOINING_FILE = "joining"
ADDED, BEGUN_AGAIN = "added", "begun again"

# Up to so many replicas keep files open that they do not use. Of more of them these would take too much memory: a
# seventh of a megabyte each if they were only read, else half a megabyte.
REPLICAS_WITH_PATIENCE = 300

P = ParamSpec("P")
T = TypeVar("T")
Opened = tuple[Log, StateFile, Recovered, str]


class Rested(NamedTuple):
    """A partition whose files are closed, how often they had been used, and what is known of it."""

    partition: Partition
    uses: tuple[int, int]
    description: bytes
    closed: ClosedReplica


class RecordedReplica(NamedTuple):
    """What the control plane has of a replica: the store uuid that was in sync last, and whether it is now."""

    store_uuid: str
    is_in_sync: bool

    def joining(self, store_uuid: str) -> str | None:
        """Return why the replica of this store has yet to come in sync: ADDED, BEGUN_AGAIN; "" for one that is in sync,
        None for one that was before."""
        if self.store_uuid != store_uuid:
            return BEGUN_AGAIN if self.store_uuid else ADDED
        return "" if self.is_in_sync else None


def recorded_replica(held: PartitionState, broker_id: int) -> RecordedReplica:
    return RecordedReplica(held.store_uuids.get(broker_id, ""), broker_id in held.isr)


def description_of(topic: TopicState) -> bytes:
    """Return the content of topic.json."""
    return encode(topic) + b"\n"


def read_topic(folder: Path) -> TopicState | None:
    """Return the topic that a folder describes; None without a readable description of its own."""
    try:
        return decode_topic((folder / TOPIC_FILE).read_bytes(), folder.name)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


class Files:
    """The folders of the replicas. Every method reads and writes files, so it runs on native threads."""

    def __init__(self, data_dir: Path, cluster_id: str, store_uuid: str) -> None:
        self.root = data_dir / "partitions"
        self.lost = data_dir / "lost+found"
        self.epochs = EpochFile(data_dir)
        self.closed = ClosedReplicas(data_dir)
        self._cluster_id = cluster_id
        self._store_uuid = store_uuid
        self._open_files = OpenFiles()
        self._opened = 0
        # The replicas that were opened and are marked as joining.
        self.joining: set[tuple[str, int]] = set()

    def folder(self, topic: TopicState) -> Path:
        return self.root / f"{topic.name}@{topic.topic_id}"

    def describe(self, topic: TopicState) -> None:
        """Write the topic's state beside its partitions, for use without a control plane."""
        folder = self.folder(topic)
        content = description_of(topic)
        path = folder / TOPIC_FILE
        make_directory(folder)
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, content)

    def open(
        self, topic: TopicState, number: int, *, describes: bool = True, recorded: RecordedReplica | None = None
    ) -> Opened:
        """Return the log of a replica, its state file, what was recovered, and its store uuid. By `recorded` it is
        marked as joining, or no longer. Raises StorageError."""
        if describes:
            self.describe(topic)
        directory = self.folder(topic) / str(number)
        store_uuid = self._store_uuid_of(directory)
        if recorded is not None:
            self._mark(directory, recorded.joining(store_uuid))
        if self.read_joining(topic, number):
            self.joining.add((topic.topic_id, number))
        identity = LogIdentity(self._cluster_id, topic.name, topic.topic_id, number)
        files = Log.open(
            directory, identity=identity, segment_bytes=topic.config.segment_bytes, open_files=self._open_files
        )
        state_file = StateFile(directory, identity=identity, open_files=self._open_files, epochs=self.epochs)
        try:
            if files.end_offset == 0 and not state_file.path.exists():
                with suppress(Shortage):  # who reads the files looks there for what is committed, from the beginning
                    state_file.save(PartitionFold(), 0)
            opened = files, state_file, recover(files, state_file), store_uuid
            self._opened += 1
            if self._opened > REPLICAS_WITH_PATIENCE and topic.replication_factor == 1:
                files.park()
            return opened
        except BaseException:
            files.close()
            state_file.close()
            raise

    def resume(self, topic: TopicState, number: int, closed: ClosedReplica) -> Opened | None:
        """Return what `open` does, without a look at the files; None if what is known of them is not of this replica.
        Reads no file of the replica."""
        identity = LogIdentity(self._cluster_id, topic.name, topic.topic_id, number)
        is_ours = closed.store_uuid.partition("/")[0] == self._store_uuid
        if closed.identity != identity or not is_ours or closed.topic_crc != zlib.crc32(description_of(topic)):
            return None
        directory = self.folder(topic) / str(number)
        files = Log.resume(
            directory,
            closed.segment,
            identity=identity,
            segment_bytes=topic.config.segment_bytes,
            open_files=self._open_files,
            on_contradiction=lambda: self.closed.forget(*identity.key),
        )
        state_file = StateFile(directory, identity=identity, open_files=self._open_files, epochs=self.epochs)
        state_file.resume(closed.saved)
        return files, state_file, recovered_from(closed, self.epochs.highest(identity.key)), closed.store_uuid

    def note_closed(self, rested: Sequence[Rested], *, is_ending: bool) -> list[Rested]:
        """Note replicas whose files are closed; return those that were noted."""
        notes, noted = {}, []
        for each in rested:
            identity = each.closed.identity
            folder = self.root / f"{identity.topic}@{identity.topic_id}" / str(identity.partition)
            note = self.closed.mark(each.closed, folder, each.description, is_ending=is_ending)
            if note is not None and uses_of(each.partition) == each.uses:  # else they may have changed before the look
                notes[identity.key] = note
                noted.append(each)
        if notes:
            self.closed.put(notes)
        return noted

    def read_joining(self, topic: TopicState, number: int) -> str:
        """Return why the replica is marked as joining, "" if it is not. BEGUN_AGAIN, if that is not readable."""
        path = self.folder(topic) / str(number) / JOINING_FILE
        if not path.exists():  # most often; this takes no descriptor
            return ""
        return ADDED if path.read_bytes() == ADDED.encode() else BEGUN_AGAIN

    def note_joined(self, topic: TopicState, number: int, store_uuid: str) -> None:
        """Note that the replica of this store is in sync. It may have been begun again since."""
        directory = self.folder(topic) / str(number)
        if self._store_uuid_in(directory) == store_uuid:
            self._mark(directory, "")

    @staticmethod
    def _mark(directory: Path, joining: str | None) -> None:
        path = directory / JOINING_FILE
        if joining == "":
            path.unlink(missing_ok=True)
        elif joining and not path.exists():
            write_atomically(path, joining.encode())

    def _store_uuid_of(self, directory: Path) -> str:
        make_directory(directory)
        path = directory / STORE_FILE
        if not any(SEGMENT_NAME.match(name) for name in os.listdir(directory)):
            rebuilds = max([0, *(self._rebuilds_upto(place) + 1 for place in self._predecessors(directory))])
            if rebuilds:
                write_atomically(path, f"{rebuilds}\n".encode())
        return self._store_uuid_in(directory)

    def _store_uuid_in(self, directory: Path) -> str:
        rebuilds = self._rebuilds_of(directory)
        return f"{self._store_uuid}/{rebuilds}" if rebuilds else self._store_uuid

    @staticmethod
    def _rebuilds_of(directory: Path) -> int:
        try:
            return int((directory / STORE_FILE).read_text())
        except FileNotFoundError:
            return 0
        except ValueError as fault:
            raise CorruptFile(f"{directory / STORE_FILE} is damaged: {fault}") from fault

    def _rebuilds_upto(self, directory: Path) -> int:
        """Return the number of rebuilds, or a higher one if it is not readable: the time of the last of them."""
        try:
            return self._rebuilds_of(directory)
        except CorruptFile:
            return int((directory / STORE_FILE).stat().st_mtime)

    def _predecessors(self, directory: Path) -> list[Path]:
        """Return what lost+found has of the same partition: moved there alone, or with its topic."""
        if not self.lost.exists():
            return []
        topic, number = directory.parent.name, directory.name
        topics = [self.lost / topic, *self.lost.glob(f"{topic}.*")]
        return [place for home in topics for pattern in (number, f"{number}.*") for place in home.glob(pattern)]

    def set_aside(self, topic: TopicState, number: int) -> Path:
        """Move one partition to lost+found."""
        return self._move(self.folder(topic) / str(number), self.lost / self.folder(topic).name)

    def _move(self, place: Path, home: Path) -> Path:
        make_directory(home)
        target, copy = home / place.name, 0
        while target.exists():
            copy += 1
            target = home / f"{place.name}.{copy}"
        place.rename(target)
        sync_directory(home)
        sync_directory(place.parent)
        return target

    def describe_set_aside(self, topic: TopicState, number: int) -> tuple[str, ...]:
        """Describe what lost+found has of a partition."""
        return tuple(map(_described, sorted(self._predecessors(self.folder(topic) / str(number)))))

    def exist(self, topic_id: str) -> bool:
        return bool(self._folders_of(topic_id))

    def _folders_of(self, topic_id: str) -> list[Path]:
        if not self.root.exists():
            return []
        return [place for place in self.root.iterdir() if place.name.rpartition("@")[2] == topic_id]

    def remove(self, topic_id: str) -> None:
        """Remove the files of a deleted topic. Raises StorageError."""
        with faults_of(self.root):
            for folder in self._folders_of(topic_id):
                shutil.rmtree(folder)
        self.epochs.forget(topic_id)
        self.closed.forget(topic_id)

    def folders(self) -> list[Path]:
        """Return the folders of all topics, known or not. Raises StorageError."""
        with faults_of(self.root):
            make_directory(self.root)
            return sorted(self.root.iterdir())

    def clean_up(self, folders: Iterable[Path], explained: set[str], deleted: set[str]) -> None:
        """Remove folders of deleted topics, and move those of unknown topics to lost+found.

        `folders` was listed before the control plane was read, so it has no folder of a newer topic. Raises
        StorageError.
        """
        with faults_of(self.root):
            for folder in folders:
                topic_id = folder.name.rpartition("@")[2]
                if topic_id in explained or not folder.exists():
                    continue
                if topic_id in deleted:
                    shutil.rmtree(folder)
                    self.epochs.forget(topic_id)
                    continue
                target = self._move(folder, self.lost)
                log.warning("nothing explains %s: it was moved to %s", folder.name, target)


class Replicas:
    """Opens the replicas, on native threads."""

    def __init__(self, host: PartitionHost, files: Files) -> None:
        self._host = host
        self.files = files
        self._epoch_writer = EpochWriter(host.pool, files.epochs)
        # Replicas whose files were closed when the broker ended, until they are begun again.
        self._closed = files.closed.load()
        # The uses of the files of each replica when it was noted as closed.
        self._noted: dict[tuple[str, int], tuple[int, int]] = {}

    def describe(self, topic: TopicState) -> None:
        failed = attempt(self._host.pool, _naming_faults, self.files, self.files.describe, topic)
        if isinstance(failed, Exception):
            log.warning("%s of topic %r is not up to date: %s", TOPIC_FILE, topic.name, failed)

    def open(
        self,
        topic: TopicState,
        number: int,
        is_whole_elsewhere: Callable[[], bool | None],
        *,
        recorded: RecordedReplica | None = None,
    ) -> Partition | ReplicaLogEnd | None:
        """Return the replica, created when there is none; None while the disk has no room for it.

        A replica with damaged files, or without records that it knew to be committed, is set aside and begun again
        when another ISR member says that it is whole. Otherwise its files stay, it stays closed, and its log end is
        returned, which says why. The only member of the ISR opens with what it has, if that can be read.
        """
        opening = partial(self.files.open, topic, number, recorded=recorded)
        opened = attempt(self._host.pool, _naming_faults, self.files, opening)
        closed = self._unusable(opened)
        if closed is not None:
            elsewhere = is_whole_elsewhere()
            if elsewhere is False or (elsewhere is None and closed.fault):
                self._close(opened)
                return closed
            if elsewhere:
                why = closed.fault or closed.lossy
                log.critical("partition %d of topic %r is damaged, and is begun again: %s", number, topic.name, why)
                self._close(opened)
                if not self.set_aside(topic, number):
                    return None
                opened = attempt(self._host.pool, _naming_faults, self.files, opening)
        if isinstance(opened, Shortage):
            log.warning("partition %d of topic %r cannot be opened yet: %s", number, topic.name, opened)
            return None
        if isinstance(opened, Exception):
            self._host.storage_failed(opened)
            return None
        return self._partition_of(topic, number, opened)

    def note_recorded(self, topic: TopicState, partition: Partition, recorded: RecordedReplica) -> None:
        """Note that a replica has come in sync. If that fails, it is done when its files are opened next."""
        key = (topic.topic_id, partition.number)
        if key in self.files.joining and recorded.joining(partition.store_uuid) == "":
            self.files.joining.discard(key)
            note = partial(self.files.note_joined, topic, partition.number, partition.store_uuid)
            gevent.spawn(attempt, self._host.pool, _naming_faults, self.files, note)

    def resume(self, topic: TopicState, number: int, recorded: RecordedReplica) -> Partition | None:
        """Return a replica whose files are closed, and as they were when the broker ended; None for any other, and for
        one that is to be marked as joining. Each is returned once: what is done with its files from then on is not
        known here."""
        closed = self._closed.pop((topic.topic_id, number), None)
        if closed is None or recorded.joining(closed.store_uuid):
            return None
        resumed = self.files.resume(topic, number, closed)
        if resumed is None:
            return None
        partition = self._partition_of(topic, number, resumed)
        self._noted[topic.topic_id, number] = uses_of(partition)
        return partition

    def note_closed(self, replicas: Iterable[tuple[TopicState, Partition]], *, is_ending: bool = False) -> None:
        """Note those whose files are closed and were used since they were noted last: the next start need not open
        them."""
        rested = []
        for topic, partition in replicas:
            uses, description = uses_of(partition), description_of(topic)
            if self._noted.get((topic.topic_id, partition.number)) != uses:
                closed = closed_replica_of(partition, description)
                if closed is not None:
                    rested.append(Rested(partition, uses, description, closed))
        if rested:
            noted = attempt(self._host.pool, partial(self.files.note_closed, is_ending=is_ending), rested)
            if isinstance(noted, Exception):
                log.warning("closed replicas could not be noted: %s", noted)
            else:
                self._noted |= {each.closed.identity.key: each.uses for each in noted}

    def _partition_of(self, topic: TopicState, number: int, opened: Opened) -> Partition:
        files, state_file, recovered, store_uuid = opened
        return Partition(
            self._host,
            topic.name,
            number,
            files,
            state_file,
            self._epoch_writer,
            dedup_window_ms=topic.config.dedup_window_ms,
            topic_id=topic.topic_id,
            store_uuid=store_uuid,
            min_insync_replicas=topic.config.min_insync_replicas,
            recovered=recovered,
        )

    def _unusable(self, opened: Opened | Exception) -> ReplicaLogEnd | None:
        """Return the log end of a replica that must not take part; None for one that may."""
        incarnation = self._host.incarnation
        if isinstance(opened, CorruptBatch | CorruptFile):
            return ReplicaLogEnd("", incarnation, 0, 0, 0, fault=str(opened))
        if isinstance(opened, Exception) or not opened[2].lost:
            return None
        files, _, found, store_uuid = opened
        last_epoch = found.epochs[-1][0] if found.epochs else 0
        return ReplicaLogEnd(
            store_uuid, incarnation, last_epoch, files.end_offset, found.high_watermark, lossy=found.lost
        )

    def _close(self, opened: Opened | Exception) -> None:
        if not isinstance(opened, Exception):
            self._host.pool.apply(opened[0].close)
            opened[1].close()

    def set_aside(self, topic: TopicState, number: int) -> bool:
        target = attempt(self._host.pool, _naming_faults, self.files, self.files.set_aside, topic, number)
        if isinstance(target, Shortage):
            log.warning("partition %d of topic %r cannot be set aside yet: %s", number, topic.name, target)
            return False
        if isinstance(target, Exception):
            self._host.storage_failed(target)
            return False
        log.warning("partition %d of topic %r was moved to %s", number, topic.name, target)
        return True


def _described(place: Path) -> str:
    files = sorted(path for path in place.iterdir() if SEGMENT_NAME.match(path.name))
    if not files:
        return f"{place} (no records)"
    size = sum(path.stat().st_size for path in place.iterdir())
    return f"{place} ({size:,} bytes, offsets {int(files[0].stem)} to {int(files[-1].stem)} and on)"


def _naming_faults(files: Files, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    with faults_of(files.root):
        return work(*arguments, **more)
