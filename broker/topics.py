"""The topics of this broker: their partitions here, made, found again at start, and removed.

    <data>/partitions/<topic>@<topic id>/<partition>/     see storage
    <data>/lost+found/                                    files that no topic and no tombstone explains

Nothing is destroyed without authority: a folder goes only when the control plane says by name and id that its topic
was deleted; one that nobody can explain is moved aside and kept.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gevent.lock import BoundedSemaphore

from portalmq import wire
from portalmq.broker.core.events import PartitionStateChanged
from portalmq.broker.core.receipts import topic_tag
from portalmq.broker.partition import Partition, PartitionHost
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.state import StateFile
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.state import PartitionState, TopicState
from portalmq.errors import InvalidRequest, PartitionNotFound, TopicNotFound

log = logging.getLogger(__name__)

LATER_CONFIG = ("default_ttl_ms", "max_backlog_messages")


@dataclass
class Topic:
    """A topic and its partitions on this broker."""

    state: TopicState
    partitions: list[Partition]

    def __post_init__(self) -> None:
        self.tag = topic_tag(self.state.topic_id)

    @property
    def name(self) -> str:
        return self.state.name

    def partition(self, number: int) -> Partition:
        """Raises PartitionNotFound."""
        if not 0 <= number < len(self.partitions):
            raise PartitionNotFound(
                f"topic {self.name!r} has partitions 0 to {len(self.partitions) - 1}, there is no {number}"
            )
        return self.partitions[number]


class Topics:
    """All topics. `on_removed` hears of a topic before its files go, `on_grown` when it has more partitions."""

    def __init__(
        self,
        host: PartitionHost,
        catalog: Catalog,
        cluster_id: str,
        data_dir: Path,
        *,
        auto_create: bool,
        default_replication_factor: int,
    ) -> None:
        self._host = host
        self._catalog = catalog
        self._cluster_id = cluster_id
        self._root = data_dir / "partitions"
        self._lost = data_dir / "lost+found"
        self._auto_create = auto_create
        self._default_replication_factor = default_replication_factor
        self._topics: dict[str, Topic] = {}
        self._changing = BoundedSemaphore()
        self.on_removed: Callable[[Topic], None] = lambda topic: None
        self.on_grown: Callable[[Topic], None] = lambda topic: None

    def __iter__(self) -> Iterator[Topic]:
        return iter(tuple(self._topics.values()))

    def open_all(self) -> None:
        """Open every partition that the control plane gives this broker, and set aside what nothing explains."""
        self._root.mkdir(parents=True, exist_ok=True)
        states = self._catalog.topics()
        self._set_aside({_folder(state) for state in states.values()})
        for state in states.values():
            self._open(state)

    def _set_aside(self, explained: set[str]) -> None:
        deleted = self._catalog.tombstones()
        for folder in sorted(self._root.iterdir()):
            if folder.name in explained:
                continue
            _, _, topic_id = folder.name.rpartition("@")
            if topic_id in deleted:
                shutil.rmtree(folder)
                continue
            self._lost.mkdir(exist_ok=True)
            target = self._lost / folder.name
            number = 0
            while target.exists():
                number += 1
                target = self._lost / f"{folder.name}.{number}"
            folder.rename(target)
            log.warning("nothing explains %s: it was moved to %s", folder.name, target)

    def _open(self, state: TopicState) -> Topic:
        topic = Topic(state, [])
        topic.partitions = self._opened(state, [])
        self._topics[state.name] = topic
        return topic

    def _opened(self, state: TopicState, there: list[Partition]) -> list[Partition]:
        """All partitions of the topic: those that are open already, and the rest. It waits for the disk, so nobody
        is shown a topic before this is done."""
        partitions = list(there)
        words = self._catalog.partitions(state)
        for number in range(len(there), state.partitions):
            directory = self._root / _folder(state) / str(number)
            identity = LogIdentity(self._cluster_id, state.name, state.topic_id, number)
            partition = Partition(
                self._host,
                state.name,
                number,
                Log.open(directory, identity=identity, segment_bytes=state.config.segment_bytes),
                StateFile(directory, identity=identity),
                dedup_window_ms=state.config.dedup_window_ms,
            )
            partition.lead(_word(words[number].value, state))
            partitions.append(partition)
        return partitions

    # --- finding -----------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Topic:
        """Raises TopicNotFound, and InvalidRequest for what cannot be a name."""
        topic = self._topics.get(name)
        if topic is None:
            wire.check_name(name, "topic")
            raise TopicNotFound(f"there is no topic {name!r}: create it with PUT {wire.topic_path(name)}")
        return topic

    def holds(self, topic: Topic) -> bool:
        """Whether this very topic is still there, and not another one of its name."""
        return self._topics.get(topic.name) is topic

    def get_or_create(self, name: str) -> Topic:
        """The topic; made with one partition when it is missing and the cluster allows that."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        if not self._auto_create:
            return self.get(name)
        self.create(name, wire.CreateTopic())
        return self.get(name)

    # --- changing ----------------------------------------------------------------------------------------------------

    def create(self, name: str, request: wire.CreateTopic) -> tuple[Topic, bool]:
        """The topic, and whether it is new. Raises TopicExists when it exists with other settings."""
        _check_supported(request.config)
        with self._changing:
            return self._create(name, request)

    def _create(self, name: str, request: wire.CreateTopic) -> tuple[Topic, bool]:
        state, created = self._catalog.create_topic(
            name,
            request,
            brokers=self._catalog.brokers(),
            default_replication_factor=self._default_replication_factor,
        )
        topic = self._topics.get(name)
        if topic is None or topic.state.topic_id != state.topic_id:
            topic = self._open(state)
        return topic, created

    def alter(self, name: str, request: wire.AlterTopic) -> Topic:
        self.get(name)
        _check_supported(request.config)
        with self._changing:
            return self._alter(self.get(name), request)

    def _alter(self, topic: Topic, request: wire.AlterTopic) -> Topic:
        state = self._catalog.alter_topic(topic.name, request, brokers=self._catalog.brokers())
        config, before = state.config, len(topic.partitions)
        topic.partitions, topic.state = self._opened(state, topic.partitions), state
        if len(topic.partitions) > before:
            self.on_grown(topic)
        for partition in topic.partitions:
            partition.dedup_window_ms = config.dedup_window_ms
            partition.log.segment_bytes = config.segment_bytes
        return topic

    def delete(self, name: str) -> None:
        """Remove the topic: first its name and its tombstone, then its files."""
        with self._changing:
            self._delete(self.get(name))

    def _delete(self, topic: Topic) -> None:
        name = topic.name
        self._catalog.delete_topic(name, now_ms=self._host.clock.wall_ms())
        del self._topics[name]
        self.on_removed(topic)
        for partition in topic.partitions:
            partition.close()
        folder = self._root / _folder(topic.state)
        self._host.pool.apply(shutil.rmtree, (folder,))

    def close(self) -> None:
        for topic in self:
            for partition in topic.partitions:
                partition.close()


def _check_supported(config: Mapping[str, object]) -> None:
    """Raises InvalidRequest for settings that would be kept and not honoured."""
    for field in LATER_CONFIG:
        if config.get(field) is not None:
            raise InvalidRequest(f"config: {field} is not supported by this release")
    if config.get("cleanup", "delete") != "delete":
        raise InvalidRequest("config: cleanup other than 'delete' is not supported by this release")


def _folder(state: TopicState) -> str:
    return f"{state.name}@{state.topic_id}"


def _word(state: PartitionState, topic: TopicState) -> PartitionStateChanged:
    return PartitionStateChanged(
        leader=state.leader,
        leader_epoch=state.leader_epoch,
        isr=frozenset(state.isr),
        replicas=tuple(state.replicas),
        min_insync_replicas=min(len(state.replicas), topic.config.min_insync_replicas or len(state.replicas) // 2 + 1),
    )
