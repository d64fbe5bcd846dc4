"""What brokers' data directories hold, for `portalmq adopt` (adoption.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path

import msgspec

from portalmq import wire
from portalmq.broker.cluster.exits import EX_STORAGE
from portalmq.broker.cluster.replicas import TOPIC_FILE, Files, read_topic
from portalmq.broker.cluster.saved_copy import GROUPS, SCHEDULES, Saved, SavedCopy, StateT
from portalmq.broker.server.adoption import DERIVED, Adoption, Description, NotAdopted, ReplicaFound, topic_of
from portalmq.broker.storage.disk import DataDirectory, DirectoryInUse, read_brokers, read_identity
from portalmq.broker.storage.errors import CorruptFile, Shortage, StorageError
from portalmq.broker.storage.segment import SEGMENT_NAME
from portalmq.contract.schedules import SCHEDULE_IDS_FROM
from portalmq.control_plane.state import PauseState, TopicState

log = logging.getLogger(__name__)


def read_directories(directories: Iterable[Path], stack: ExitStack | None = None) -> Adoption:
    """Return the contents of the data directories, which no broker may be using; they stay locked until `stack` is
    closed. Raises NotAdopted: for a full disk and a directory that cannot be written too, since a log that cannot be
    opened for that is not damaged."""
    try:
        with nullcontext(stack) if stack is not None else ExitStack() as opened:
            return _read_directories(directories, opened)
    except Shortage as shortage:
        raise NotAdopted(f"{shortage}. Then adopt again", EX_STORAGE) from None
    except OSError as fault:
        raise NotAdopted(f"{fault}. Nothing is adopted: mend that, and adopt again", EX_STORAGE) from None


def _read_directories(directories: Iterable[Path], stack: ExitStack) -> Adoption:
    adoption = Adoption()
    opened = [_opened(path, stack) for path in directories]
    _check_same_cluster(opened)
    adoption.cluster_id = opened[0].identity.cluster_id
    known: dict[int, str] = {}
    for directory in opened:
        try:
            known |= read_brokers(directory.path)
        except CorruptFile as fault:
            adoption.unlisted.append(str(fault))
        adoption.brokers[directory.identity.broker_id] = directory.identity.store_uuid
        schedules = _read_copy(SCHEDULES, directory, adoption.damaged)
        adoption.take_ids([each.schedule_id for each in (schedules.states if schedules else ())])
        adoption.saved = _later(adoption.saved, schedules)
        adoption.saved_groups = _later(adoption.saved_groups, _read_copy(GROUPS, directory, adoption.damaged))
    if known:
        adoption.unlisted.clear()
    adoption.missing = {number: url for number, url in sorted(known.items()) if number not in adoption.brokers}
    folders = [(directory, folder) for directory in opened for folder in _topic_folders(directory)]
    described, derived = adoption.described, dict[str, list[Description]]()
    for directory, folder in folders:
        topic = read_topic(folder)
        found = derived if topic is None else described
        written_ns = DERIVED if topic is None else (folder / TOPIC_FILE).stat().st_mtime_ns
        description = Description(written_ns, directory.identity.broker_id, topic or _derived(folder))
        found.setdefault(_topic_id(folder), []).append(description)
    for topic_id in derived | described:
        adoption.topics[topic_id] = topic_of([*described.get(topic_id, ()), *derived.get(topic_id, ())])
    adoption.undescribed = derived.keys() - described.keys()
    for directory in opened:
        _read_topics(adoption, directory, [folder for place, folder in folders if place is directory])
    _check_names(adoption.topics.values())
    return adoption


def _opened(path: Path, stack: ExitStack) -> DataDirectory:
    try:
        if not path.is_dir() or read_identity(path) is None:
            raise NotAdopted(f"{path} is no broker's data directory: it has no identity.json")
        directory = DataDirectory.open(path)
    except DirectoryInUse as used:
        raise NotAdopted(f"{used}") from None
    except StorageError as fault:
        raise NotAdopted(str(fault), EX_STORAGE) from None
    stack.callback(directory.close)
    return directory


def _check_same_cluster(opened: list[DataDirectory]) -> None:
    by_broker: dict[int, Path] = {}
    for directory in opened:
        identity, first = directory.identity, opened[0]
        if identity.cluster_id != first.identity.cluster_id:
            raise NotAdopted(
                f"{first.path} is of cluster {first.identity.cluster_id} and {directory.path} of cluster "
                f"{identity.cluster_id}: adopt the directories of one cluster"
            )
        if identity.broker_id in by_broker:
            raise NotAdopted(
                f"{by_broker[identity.broker_id]} and {directory.path} are both of broker {identity.broker_id}: "
                "name the one that was used last"
            )
        by_broker[identity.broker_id] = directory.path


def _read_copy(copy: SavedCopy[StateT], directory: DataDirectory, damaged: list[str]) -> Saved[StateT] | None:
    try:
        return copy.read(directory.path)
    except CorruptFile as fault:
        damaged.append(str(fault))
        return None


def _later(one: Saved[StateT] | None, other: Saved[StateT] | None) -> Saved[StateT] | None:
    return max((each for each in (one, other) if each is not None), key=lambda each: each.read_ms, default=None)


def _topic_folders(directory: DataDirectory) -> list[Path]:
    root = directory.path / "partitions"
    return sorted(folder for folder in root.iterdir() if "@" in folder.name) if root.is_dir() else []


def _topic_id(folder: Path) -> str:
    return folder.name.rpartition("@")[2]


def _derived(folder: Path) -> TopicState:
    """Return what the name and the contents of a topic's folder tell of it."""
    name, _, topic_id = folder.name.rpartition("@")
    count = 1 + max((int(place.name) for place in folder.iterdir() if place.name.isdigit()), default=0)
    log.warning("%s has no readable %s: without another one the topic's settings are the defaults", folder, TOPIC_FILE)
    return TopicState(name, topic_id, count, count, 3, wire.TopicConfig())


def _read_topics(adoption: Adoption, directory: DataDirectory, folders: Iterable[Path]) -> None:
    identity = directory.identity
    files = Files(directory.path, identity.cluster_id, identity.store_uuid)
    for folder in folders:
        _read_topic(adoption, files, identity.broker_id, folder)
    files.epochs.close()


def _read_topic(adoption: Adoption, files: Files, broker_id: int, folder: Path) -> None:
    topic = adoption.topics[_topic_id(folder)]
    for replica in folder.iterdir():
        if not replica.name.isdigit() or not any(SEGMENT_NAME.match(entry.name) for entry in replica.iterdir()):
            continue  # no log was ever created here
        found = _read_replica(adoption, files, topic, int(replica.name), broker_id)
        adoption.replicas.setdefault((topic.topic_id, int(replica.name)), []).append(found)


def _read_replica(adoption: Adoption, files: Files, topic: TopicState, number: int, broker_id: int) -> ReplicaFound:
    joining = files.read_joining(topic, number)
    try:
        replica, state_file, recovered, store_uuid = files.open(topic, number, describes=False)
    except Shortage:
        raise
    except StorageError as fault:
        highest_epoch = files.epochs.highest((topic.topic_id, number))
        told = f"broker {broker_id}: {fault}"
        return ReplicaFound(broker_id, highest_epoch=highest_epoch, fault=told, joining=joining)
    try:
        adoption.last_token = max(adoption.last_token, replica.last_timestamp_ms)
        producers = recovered.producers.snapshot()
        adoption.take_ids([each.producer_id for each in producers])
        ticks = tuple((each.producer_id, each.epoch) for each in producers if each.producer_id >= SCHEDULE_IDS_FROM)
        last_epoch = recovered.epochs[-1][0] if recovered.epochs else 0
        lost = f"broker {broker_id}: {recovered.lost}" if recovered.lost else ""
        place = last_epoch, replica.end_offset, recovered.highest_epoch
        groups = recovered.groups
        streams = {name: stream.generation for name, stream in groups.streams.items()}
        queues = {
            name: PauseState(*msgspec.structs.astuple(delivery.pause)) for name, delivery in groups.delivery.items()
        }
        return ReplicaFound(broker_id, store_uuid, *place, lost, ticks, joining, queues, streams)
    finally:
        replica.close()
        state_file.close()


def _check_names(topics: Iterable[TopicState]) -> None:
    by_name: dict[str, str] = {}
    for topic in topics:
        other = by_name.setdefault(topic.name, topic.topic_id)
        if other != topic.topic_id:
            raise NotAdopted(
                f"two topics are named {topic.name!r} (ids {other} and {topic.topic_id}): it was deleted and created "
                "again while a broker was away; move the older one's folder out of the data directory, and repeat"
            )
