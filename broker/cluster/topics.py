"""All topics of the cluster as the mirror has them, and the replicas on this broker.

    mirror changed -> sync() -> states of open replicas           at once
                             -> replicas to open, close, remove   in greenlets, a few at a time, on native threads

    <data>/partitions/<topic>@<topic id>/topic.json       the topic's state, for `portalmq adopt`
    <data>/partitions/<topic>@<topic id>/<partition>/     see storage; store.id counts how often the replica was rebuilt
                                                          joining: it has not been in sync yet
    <data>/lost+found/                                    files of unknown topics, and damaged replicas
    <data>/epochs.sqlite                                  the highest leader epochs that they have seen
    <data>/closed.sqlite                                  replicas whose files the next start need not open

Nothing is destroyed without authority: a folder is removed only when the control plane says by name and id that its
topic was deleted. A folder of an unknown topic is moved aside and kept. A replica is visible once fully open.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from weakref import WeakValueDictionary

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from portalmq import wire
from portalmq.broker.cluster.capacity import Capacity
from portalmq.broker.cluster.replica_opener import ReplicaOpener
from portalmq.broker.cluster.replicas import Files, Replicas, recorded_replica
from portalmq.broker.cluster.routing import NoSuchPartition
from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.broker.cluster.topic import Topic, TopicsHost
from portalmq.broker.cluster.topic_files import TopicFiles
from portalmq.broker.core.replica.events import BrokersChanged, PartitionStateChanged, SessionLost
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.partition_state import partition_state_of
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.replication.ticker import Ticker
from portalmq.control_plane.catalog import Catalog, Versioned
from portalmq.control_plane.mirror import Changes
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState, topic_path
from portalmq.errors import (
    TopicNotFound,
    Unavailable,
)

log = logging.getLogger(__name__)

# How long a change of a topic waits until this broker sees it and its partitions have leaders.
SETTLE_WITHIN_S = 5.0
# How long this broker waits to see a topic that another one has just created.
KNOWN_WITHIN_S = 3.0


def _how_to_create(name: str) -> str:
    return f"create it with PUT {wire.topic_path(name)}, `portalmq topic create {name}`, or Admin.create_topic"


class Topics:
    """The topics by name and id. `on_opened` is called for each partition; `polls` returns True for a broker that has a
    fetch parked here."""

    def __init__(
        self,
        host: TopicsHost,
        catalog: Catalog,
        cluster_id: str,
        data_dir: Path,
        *,
        capacity: Capacity,
        polls: Callable[[int], bool],
        auto_create: bool,
        default_replication_factor: int,
    ) -> None:
        self._capacity = capacity
        self._host = host
        self._catalog = catalog
        self._auto_create = auto_create
        self._default_replication_factor = default_replication_factor
        self._topics: dict[str, Topic] = {}
        # What partitions() returned; None after a change of `_topics` or of one of their `local`.
        self._open: tuple[Partition, ...] | None = None
        # Of replicas, since the start.
        self.closed_count = 0
        self._by_id: dict[str, Topic] = {}
        self._brokers: Mapping[int, tuple[int, str]] = {}
        self._replicas = Replicas(host, Files(data_dir, cluster_id, host.store_uuid))
        self._opener = ReplicaOpener(
            host,
            catalog,
            self._replicas,
            is_current=self.holds,
            publish=self._publish,
            withdraw=self._withdraw,
            on_changed=self._notify_changed,
        )
        self._ending: dict[str, Topic] = {}
        self.files = TopicFiles(
            host,
            catalog,
            self._replicas.files,
            known=(self._by_id, self._ending),
            on_changed=self._notify_changed,
        )
        self._change_locks: WeakValueDictionary[str, BoundedSemaphore] = WeakValueDictionary()
        self._describe_lock = BoundedSemaphore()
        self._changed = Event()
        self._closed = False
        self.ticker = Ticker(host, lambda: (*self.partitions(), *self._closing()), polls=polls)
        self.on_opened: Callable[[Partition], None] = lambda partition: None

    def __iter__(self) -> Iterator[Topic]:
        return iter(tuple(self._topics.values()))

    def partitions(self) -> tuple[Partition, ...]:
        """Return all replicas that are open here, leading or not."""
        if self._open is None:
            self._open = tuple([partition for topic in self for partition in topic.local.values()])
        return self._open

    def report_damage(self, fault: Exception) -> None:
        """Note damage that a call has met in a file of a replica here."""
        path: Path | None = getattr(fault, "path", None)
        places = () if path is None else (path, path.parent)
        for partition in self.partitions() if places else ():
            if partition.log.directory in places:
                partition.report_damage(str(fault))

    def led(self) -> list[Partition]:
        """Return all partitions that this broker leads and serves, in no order. It is one step: none can move away
        meanwhile."""
        partitions, now_ms = self.partitions(), self._host.clock.now_ms()
        for partition in partitions:
            partition.check_pause(now_ms)
        return [partition for partition in partitions if partition.serves]

    def _closing(self) -> list[Partition]:
        """Return the replicas of deleted topics that are still open."""
        return [partition for topic in tuple(self._ending.values()) for partition in tuple(topic.local.values())]

    def note_closed(self, *, is_ending: bool = False) -> None:
        """Note the replicas whose files are closed, so that the next start need not open them."""
        held = ((topic.state, partition) for topic in self for partition in tuple(topic.local.values()))
        self._replicas.note_closed(held if is_ending else in_short_turns(held), is_ending=is_ending)

    def local(self, topic_id: str, number: int) -> Partition | None:
        topic = self._by_id.get(topic_id)
        return topic.local.get(number) if topic is not None else None

    def closed_log_end(self, topic_id: str, number: int) -> ReplicaLogEnd | None:
        """Return the log end of a replica that stays closed because its files are damaged."""
        return self._opener.unusable.get((topic_id, number))

    def set_aside(self, topic_id: str, number: int) -> tuple[str, ...]:
        """Describe what this broker's lost+found has of the partition."""
        topic = self._by_id.get(topic_id)
        return (
            self._host.pool.apply(self._replicas.files.describe_set_aside, (topic.state, number))
            if topic is not None
            else ()
        )

    # --- the mirror --------------------------------------------------------------------------------------------------

    def sync(self, changes: Changes) -> None:
        """Apply changes of the mirror. Files are opened and removed afterwards, in greenlets."""
        if self._closed:
            return
        mirror = self._host.membership.mirror
        if changes.brokers or changes.everything:
            self._update_brokers(mirror.brokers)
        names = set(mirror.topics) | set(self._topics) if changes.everything else changes.topics
        keys = mirror.partitions if changes.everything else changes.partitions
        with _without_collector() if changes.everything else nullcontext():
            for name in in_short_turns(tuple(names)):
                self._sync_topic(name, mirror.topics.get(name))
            for key in in_short_turns(tuple(keys)):
                self._sync_partition(*key)
        if changes.tombstones or changes.everything:
            for topic_id in mirror.tombstones:
                self.files.remove(topic_id)
        self._notify_changed()

    def session_lost(self) -> None:
        """Make the leaders step down, since others may have been elected. A synced state lets them lead again."""
        for partition in self.partitions():
            partition.step(SessionLost())

    def _update_brokers(self, brokers: Mapping[int, BrokerState]) -> None:
        self._brokers = {number: (broker.incarnation, broker.store_uuid) for number, broker in brokers.items()}
        for partition in in_short_turns(self.partitions()):
            partition.step(BrokersChanged(self._brokers))

    def _sync_topic(self, name: str, state: TopicState | None) -> None:
        topic = self._topics.get(name)
        if topic is not None and (state is None or state.topic_id != topic.state.topic_id):
            self._forget(topic)
            topic = None
        if state is None:
            return
        if topic is None:
            topic = self._topics[name] = self._by_id[state.topic_id] = Topic(state, self._host, self.confirm_missing)
            for number in in_short_turns(range(state.partitions)):
                self._sync_partition(state.topic_id, number)
            return
        before, topic.state = topic.state, state
        if before == state:
            return
        for partition in topic.local.values():
            _configure(partition, state)
        for number in in_short_turns(range(state.partitions)):
            self._sync_partition(state.topic_id, number)
        gevent.spawn(self._describe, topic)
        if state.partitions > before.partitions:
            self._host.on_topic_grown(topic)

    def _describe(self, topic: Topic) -> None:
        """Write topic.json. One write at a time, so that the last state known is the last one written."""
        with self._describe_lock:
            self._replicas.describe(topic.state)

    def _sync_partition(self, topic_id: str, number: int) -> None:
        topic = self._by_id.get(topic_id)
        held = self._host.membership.mirror.partitions.get((topic_id, number))
        if topic is None or held is None or number >= topic.state.partitions:
            return
        partition = topic.local.get(number)
        if partition is not None:
            self._replicas.note_recorded(topic.state, partition, recorded_replica(held.value, self._host.broker_id))
            partition.on_partition_state(_partition_state_of(held, topic.state))
        elif self._host.broker_id in held.value.replicas:
            self._opener.open_soon(topic, number)

    def _forget(self, topic: Topic) -> None:
        """Drop a topic that is gone from the cluster. Its files stay until a tombstone allows their removal."""
        del self._topics[topic.name]
        self._open = None
        self._by_id.pop(topic.state.topic_id, None)
        self._ending[topic.state.topic_id] = topic
        self._host.on_topic_removed(topic)
        gevent.spawn(self._end, topic)

    def _end(self, topic: Topic) -> None:
        topic_id = topic.state.topic_id
        try:
            self._host.on_topic_closing(topic)
            local, topic.local = topic.local, {}
            self.closed_count += len(local)
            gevent.joinall([gevent.spawn(partition.close, saves=False) for partition in local.values()])
            while any(key[0] == topic_id for key in self._opener.opening):
                gevent.sleep(0.05)
        finally:
            self._ending.pop(topic_id, None)
        if topic_id in self._host.membership.mirror.tombstones:
            self.files.remove(topic_id)

    # --- replicas ----------------------------------------------------------------------------------------------------

    def _publish(self, topic: Topic, partition: Partition) -> None:
        _configure(partition, topic.state)
        partition.on_leading = lambda it: self._leading(topic, it)
        partition.on_stepped_down = lambda it: self._host.on_stepped_down(topic, it)
        partition.on_damaged = lambda it: self._opener.repair(topic, it)
        partition.on_unwritable = lambda it, fault: self._opener.close_damaged(topic, it, fault)
        topic.local[partition.number] = partition
        self._open = None
        held = self._host.membership.mirror.partitions.get((topic.state.topic_id, partition.number))
        if held is not None:
            self._replicas.note_recorded(topic.state, partition, recorded_replica(held.value, self._host.broker_id))
            partition.on_partition_state(_partition_state_of(held, topic.state), self._brokers)
        self.on_opened(partition)

    def _withdraw(self, topic: Topic, partition: Partition) -> None:
        if topic.local.get(partition.number) is partition:
            del topic.local[partition.number]
            self._open = None
            self.closed_count += 1

    def _leading(self, topic: Topic, partition: Partition) -> None:
        if partition.serves:
            self._host.on_leading(topic, partition)
        self._notify_changed()

    @property
    def is_settled(self) -> bool:
        """Whether every replica assigned to this broker is open, and serves where no other broker is needed for that.
        A replica that stays closed because it is damaged does not count."""
        if len(self._opener.opening) > len(self._opener.unusable):
            return False  # most often, and known without looking at each
        mine = self._host.broker_id
        for key, held in tuple(self._host.membership.mirror.partitions.items()):
            if mine in held.value.replicas:
                partition = self.local(*key)
                if key in self._opener.unusable:
                    continue
                alone = held.value.leader == mine and held.value.isr == (mine,)
                if partition is None or (alone and not partition.serves):
                    return False
        return True

    def wait_settled(self, timeout_s: float) -> bool:
        return self._wait_for(lambda: self.is_settled, timeout_s)

    def _notify_changed(self) -> None:
        changed, self._changed = self._changed, Event()
        changed.set()

    def _wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        with gevent.Timeout(timeout_s, False):
            while not is_so():
                self._changed.wait(0.05)
            return True
        return is_so()

    def start(self) -> None:
        """Start the ticker. Look for files of unknown topics once, as soon as the control plane can be read."""
        self.ticker.start()
        gevent.spawn(self.files.look_for_strays)

    # --- finding -----------------------------------------------------------------------------------------------------

    def get(self, name: str) -> Topic | None:
        """Return the topic, as far as this broker knows it."""
        return self._topics.get(name)

    def known(self, name: str) -> Topic:
        """Return the topic. For one that this broker does not know, ask the control plane and wait for the mirror.
        Raises TopicNotFound, InvalidRequest for an invalid name, Unavailable."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        if self._catalog.find_topic(name) is None:
            raise TopicNotFound(f"there is no topic {name!r}: {_how_to_create(name)}")
        self._host.membership.mirror.note(topic_path(name))
        if not self._wait_for(lambda: name in self._topics, KNOWN_WITHIN_S):
            raise Unavailable(f"this broker does not know topic {name!r} yet", retry_after_s=0.1)
        return self._topics[name]

    def confirm_missing(self, missing: NoSuchPartition) -> None:
        """Raise Unavailable when the topic has grown and this broker does not know it yet."""
        known = missing.topic
        self._catalog.confirm()
        now = self._catalog.find_topic(known.name)
        if now is not None and (now.topic_id, now.partitions) != (known.topic_id, known.partitions):
            self._host.membership.mirror.note(topic_path(known.name))
            raise Unavailable(f"this broker does not know topic {known.name!r} as it is yet", retry_after_s=0.1)

    def holds(self, topic: Topic) -> bool:
        """Whether this topic still exists, and not another one of its name."""
        return self._topics.get(topic.name) is topic

    def get_or_create(self, name: str) -> Topic:
        """Return the topic. Create it with one partition when it is missing and the cluster allows that."""
        topic = self._topics.get(name)
        if topic is not None:
            return topic
        if not self._auto_create:
            try:
                return self.known(name)
            except TopicNotFound:
                raise TopicNotFound(
                    f"there is no topic {name!r}, and this cluster makes none at its first use "
                    f"(auto_create_topics=false): {_how_to_create(name)}"
                ) from None
        with self._change_lock(name):  # waiting calls continue in the order of their arrival
            topic = self._topics.get(name)
            return topic or self._create(name, wire.CreateTopic())[0]

    def _change_lock(self, name: str) -> BoundedSemaphore:
        """Return the lock under which one change of a topic runs at a time."""
        lock = self._change_locks.get(name)
        if lock is None:
            lock = self._change_locks[name] = BoundedSemaphore()
        return lock

    # --- changing ----------------------------------------------------------------------------------------------------

    def create(self, name: str, request: wire.CreateTopic) -> tuple[Topic, bool]:
        """Return the topic, and whether it is new. Raises TopicExists when it exists with other settings."""
        with self._change_lock(name):
            return self._create(name, request)

    def _create(self, name: str, request: wire.CreateTopic) -> tuple[Topic, bool]:
        brokers, default = self._host.membership.mirror.brokers, self._default_replication_factor
        with ExitStack() as reserved:
            if name not in self._topics:
                factor = min(request.replication_factor or default, max(1, len(brokers)))
                reserved.enter_context(self._capacity.topic((request.partitions or 1) * factor))
            state, created = self._catalog.create_topic(
                name, request, brokers=brokers, default_replication_factor=default
            )
            return self._wait_applied(state), created

    def alter(self, name: str, request: wire.AlterTopic) -> Topic:
        with self._change_lock(name), ExitStack() as reserved:
            topic = self._topics.get(name)
            if topic is not None and request.partitions is not None:
                more = request.partitions - topic.state.partitions
                reserved.enter_context(self._capacity.replicas(max(0, more) * topic.state.replication_factor))
            state = self._catalog.alter_topic(name, request, brokers=self._host.membership.mirror.brokers)
            return self._wait_applied(state)

    def delete(self, name: str) -> None:
        """Delete the topic: first its name, leaving a tombstone, then its files on every broker."""
        with self._change_lock(name):
            state = self._catalog.delete_topic(name, now_ms=self._host.clock.wall_ms())
            self._wait_for(lambda: not self.files.exist(state.topic_id), SETTLE_WITHIN_S)

    def _wait_applied(self, state: TopicState) -> Topic:
        """Return the topic once this broker sees it as `state` has it, with leaders. Raises Unavailable (unknown) when
        that takes too long: the topic exists, and this broker will know it."""
        if not self._wait_for(lambda: self._matches(state), SETTLE_WITHIN_S):
            topic = self._by_id.get(state.topic_id)
            if topic is None:
                raise Unavailable(f"topic {state.name!r} is made, and not known on this broker yet", outcome="unknown")
            return topic
        return self._by_id[state.topic_id]

    def _matches(self, state: TopicState) -> bool:
        topic = self._by_id.get(state.topic_id)
        if topic is None or topic.state.partitions < state.partitions:
            return False
        if topic.state != state and topic.state.config != state.config:
            return False
        return all(self._is_led(topic, number) for number in range(state.partitions))

    def _is_led(self, topic: Topic, number: int) -> bool:
        leader = topic.leader_of(number)
        if leader != self._host.broker_id:
            return leader is not None
        partition = topic.local.get(number)
        return partition is not None and partition.serves

    def close(self) -> None:
        """Write pending records, save the folds, close the files."""
        self._closed = self._opener.closed = self.files.closed = True
        self.ticker.close()
        gevent.joinall([gevent.spawn(partition.close) for partition in (*self.partitions(), *self._closing())])
        self.note_closed(is_ending=True)
        self._host.pool.apply(self._replicas.files.epochs.close)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keep the garbage collector off while thousands of replicas are made: it would search them again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _partition_state_of(held: Versioned[PartitionState], state: TopicState) -> PartitionStateChanged:
    return partition_state_of(held.value, held.version, state.config.min_insync_replicas)


def _configure(partition: Partition, state: TopicState) -> None:
    partition.dedup_window_ms = state.config.dedup_window_ms
    partition.min_insync_replicas = state.config.min_insync_replicas
    partition.log.segment_bytes = state.config.segment_bytes
