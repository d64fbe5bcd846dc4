"""All topics of the cluster as the mirror has them, and the replicas on this broker.

    mirror changed -> sync() -> states of open replicas           at once
                             -> replicas to open, close, remove   in greenlets, a few at a time, on native threads

    <data>/partitions/<topic>@<topic id>/topic.json       the topic's state, for `portalmq adopt`
    <data>/partitions/<topic>@<topic id>/<partition>/     see storage; store.id counts how often the replica was rebuilt
    <data>/lost+found/                                    files of unknown topics, and damaged replicas

Nothing is destroyed without authority: a folder is removed only when the control plane says by name and id that its
topic was deleted. A folder of an unknown topic is moved aside and kept. A replica is visible once fully open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from portalmq import wire
from portalmq.broker.cluster.capacity import Capacity
from portalmq.broker.cluster.replicas import Files, Replicas
from portalmq.broker.cluster.routing import NoSuchPartition, place_of
from portalmq.broker.cluster.rpc import PeerCaller, TopicPartition
from portalmq.broker.cluster.rpc.brokers import STANDING, LogEndRequest, ReplicaLogEnd
from portalmq.broker.cluster.unclean_election import is_whole_elsewhere
from portalmq.broker.core.queue.receipts import topic_tag
from portalmq.broker.core.replica.events import PartitionStateChanged, SessionLost
from portalmq.broker.partition.host import PartitionHost, PartitionMembership
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.partition_state import partition_state_of
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.replication.ticker import Ticker
from portalmq.control_plane.catalog import Catalog, Versioned
from portalmq.control_plane.mirror import Changes, Mirror
from portalmq.control_plane.plane import PlaneError
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState, topic_path
from portalmq.errors import (
    NotEnoughReplicas,
    NotLeader,
    PortalMQError,
    TopicNotFound,
    Unavailable,
)

log = logging.getLogger(__name__)

# How long a change of a topic waits until this broker sees it and its partitions have leaders.
SETTLE_WITHIN_S = 5.0
# How long this broker waits to see a topic that another one has just created.
KNOWN_WITHIN_S = 3.0
OPENING_AT_A_TIME = 16
OPEN_AGAIN_S = 1.0
# How often a damaged replica looks for another one that is whole.
ASK_AGAIN_S = 5.0
ASK_WITHIN_S = 2.0
# How often the search for files of unknown topics is repeated while the control plane is unavailable.
STRAYS_AGAIN_S = 5.0


class TopicsMembership(PartitionMembership, Protocol):
    @property
    def mirror(self) -> Mirror: ...

    def suspect(self, broker_id: int, incarnation: int, *, refused: bool) -> None: ...


class TopicsHost(PartitionHost, Protocol):
    @property
    def membership(self) -> TopicsMembership: ...

    @property
    def peers(self) -> PeerCaller: ...


class Topic:
    """A topic of the cluster. `local` are the replicas open on this broker, by number. `confirm` raises Unavailable for
    a partition that is missing here and that the control plane may have."""

    def __init__(self, state: TopicState, host: TopicsHost, confirm: Callable[[NoSuchPartition], None]) -> None:
        self.state = state
        self.tag = topic_tag(state.topic_id)
        self.local: dict[int, Partition] = {}
        self._host = host
        self._confirm = confirm

    @property
    def name(self) -> str:
        return self.state.name

    def place(self, number: int) -> TopicPartition:
        """Return the address of a partition that a caller names. Raises PartitionNotFound only if the control plane has
        no such partition; Unavailable where the topic has grown and this broker does not know it yet."""
        try:
            return place_of(self.state, number)
        except NoSuchPartition as missing:
            self._confirm(missing)
            raise

    def partition(self, number: int) -> Partition:
        """Return the replica here, which leads and knows all that is committed. Raises PartitionNotFound and NotLeader;
        NotEnoughReplicas and Unavailable for conditions that pass."""
        partition = self.local.get(number)
        if partition is not None:
            now_ms = self._host.clock.now_ms()
            partition.check_pause(now_ms)
            if partition.replica.leading:
                self._check_serves(partition, now_ms)
                return partition
        leader = self.leader_of(number)
        if leader is None:
            raise Unavailable(f"partition {number} of topic {self.name!r} has no leader just now", retry_after_s=0.1)
        if leader == self._host.broker_id:
            raise Unavailable("this broker was elected, and has not begun to lead yet", retry_after_s=0.1)
        raise NotLeader(
            f"broker {leader} leads partition {number} of topic {self.name!r}",
            leader=leader,
            leader_url=self._host.membership.mirror.url_of(leader),
        )

    def _check_serves(self, partition: Partition, now_ms: int) -> None:
        if not partition.replica.may_serve(now_ms):
            raise Unavailable("this broker cannot know whether it still leads the partition", retry_after_s=0.2)
        isr_tracker = partition.replica.in_sync
        if partition.serves or isr_tracker is None:
            return
        live, needed = isr_tracker.live_members(now_ms), isr_tracker.state.min_insync_replicas
        if live < needed:
            raise NotEnoughReplicas(f"{live} replicas are in sync, {needed} are needed", retry_after_s=1.0)
        raise Unavailable("this broker was elected, and has not begun to lead yet", retry_after_s=0.1)

    def leader_of(self, number: int) -> int | None:
        """Return the leader, as far as this broker knows. Raises PartitionNotFound."""
        if not 0 <= number < self.state.partitions:
            raise NoSuchPartition(self.state, number)
        held = self._host.membership.mirror.partitions.get((self.state.topic_id, number))
        return held.value.leader if held is not None else None

    def led(self) -> list[Partition]:
        """Return the partitions that this broker leads and serves."""
        now_ms = self._host.clock.now_ms()
        for partition in tuple(self.local.values()):
            partition.check_pause(now_ms)
        return [partition for _, partition in sorted(self.local.items()) if partition.serves]


def _how_to_create(name: str) -> str:
    return f"create it with PUT {wire.topic_path(name)}, `portalmq topic create {name}`, or Admin.create_topic"


class Topics:
    """The topics by name and id.

    `on_opened`, `on_leading` and `on_stepped_down` are called for each partition; `on_removed` for a topic that is gone
    from the cluster, before its files are removed; `on_grown` for a topic with more partitions than before.
    """

    def __init__(
        self,
        host: TopicsHost,
        catalog: Catalog,
        cluster_id: str,
        data_dir: Path,
        *,
        auto_create: bool,
        default_replication_factor: int,
    ) -> None:
        self.capacity: Capacity | None = None
        self._host = host
        self._catalog = catalog
        self._auto_create = auto_create
        self._default_replication_factor = default_replication_factor
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[str, Topic] = {}
        self._brokers: Mapping[int, tuple[int, str]] = {}
        self._replicas = Replicas(host, Files(data_dir, cluster_id, host.store_uuid))
        self._opening: set[tuple[str, int]] = set()
        # Replicas that stay closed: their files are damaged, and no other replica is known to be whole.
        self._unusable: dict[tuple[str, int], ReplicaLogEnd] = {}
        self._ending: set[str] = set()
        self._removing: set[str] = set()
        self._open_slots = BoundedSemaphore(OPENING_AT_A_TIME)
        self._change_locks: WeakValueDictionary[str, BoundedSemaphore] = WeakValueDictionary()
        self._strays_lock = BoundedSemaphore()
        self._describe_lock = BoundedSemaphore()
        self._changed = Event()
        self._closed = False
        self.ticker = Ticker(host, self.partitions)
        self.on_removed: Callable[[Topic], None] = lambda topic: None
        self.on_grown: Callable[[Topic], None] = lambda topic: None
        self.on_opened: Callable[[Partition], None] = lambda partition: None
        self.on_leading: Callable[[Topic, Partition], None] = lambda topic, partition: None
        self.on_stepped_down: Callable[[Topic, Partition], None] = lambda topic, partition: None

    def __iter__(self) -> Iterator[Topic]:
        return iter(tuple(self._topics.values()))

    def partitions(self) -> list[Partition]:
        """Return all replicas that are open here, leading or not."""
        return [partition for topic in self for partition in tuple(topic.local.values())]

    def local(self, topic_id: str, number: int) -> Partition | None:
        topic = self._by_id.get(topic_id)
        return topic.local.get(number) if topic is not None else None

    def closed_log_end(self, topic_id: str, number: int) -> ReplicaLogEnd | None:
        """Return the log end of a replica that stays closed because its files are damaged."""
        return self._unusable.get((topic_id, number))

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
        for name in in_short_turns(tuple(names)):
            self._sync_topic(name, mirror.topics.get(name))
        keys = mirror.partitions if changes.everything else changes.partitions
        for key in in_short_turns(tuple(keys)):
            self._sync_partition(*key)
        if changes.tombstones or changes.everything:
            for topic_id in mirror.tombstones:
                self._remove_files(topic_id)
        self._notify_changed()

    def session_lost(self) -> None:
        """Make the leaders step down, since others may have been elected. A synced state lets them lead again."""
        for partition in self.partitions():
            partition.step(SessionLost())

    def _update_brokers(self, brokers: Mapping[int, BrokerState]) -> None:
        self._brokers = {number: (broker.incarnation, broker.store_uuid) for number, broker in brokers.items()}
        for partition in in_short_turns(self.partitions()):
            partition.on_brokers_changed(self._brokers)

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
            self.on_grown(topic)

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
            partition.on_partition_state(_partition_state_of(held, topic.state))
        elif self._host.broker_id in held.value.replicas:
            self._open_soon(topic, number)

    def _forget(self, topic: Topic) -> None:
        """Drop a topic that is gone from the cluster. Its files stay until a tombstone allows their removal."""
        del self._topics[topic.name]
        self._by_id.pop(topic.state.topic_id, None)
        self._ending.add(topic.state.topic_id)
        self.on_removed(topic)
        gevent.spawn(self._end, topic)

    def _end(self, topic: Topic) -> None:
        topic_id = topic.state.topic_id
        try:
            local, topic.local = topic.local, {}
            gevent.joinall([gevent.spawn(partition.close, saves=False) for partition in local.values()])
            while any(key[0] == topic_id for key in self._opening):
                gevent.sleep(0.05)
        finally:
            self._ending.discard(topic_id)
        if topic_id in self._host.membership.mirror.tombstones:
            self._remove_files(topic_id)

    # --- opening -----------------------------------------------------------------------------------------------------

    def _open_soon(self, topic: Topic, number: int) -> None:
        key = (topic.state.topic_id, number)
        if key not in self._opening and not self._closed:
            self._opening.add(key)
            gevent.spawn(self._open, topic, number)

    def _open(self, topic: Topic, number: int) -> None:
        """Open a replica. Repeat this when the disk has no room, or when its files are damaged and no other replica is
        known to be whole. A fault of the disk ends the broker."""
        key = (topic.state.topic_id, number)
        try:
            while self._is_wanted(topic, number):
                with self._open_slots:
                    partition = self._opened(topic, number)
                if partition is not None:
                    self._publish(topic, partition)
                    return
                gevent.sleep(ASK_AGAIN_S if key in self._unusable else OPEN_AGAIN_S)
        finally:
            self._opening.discard(key)
            self._unusable.pop(key, None)
            self._notify_changed()

    def _is_wanted(self, topic: Topic, number: int) -> bool:
        return not self._closed and self.holds(topic) and number not in topic.local

    def _opened(self, topic: Topic, number: int) -> Partition | None:
        key = (topic.state.topic_id, number)
        known = self._unusable.get(key)
        if known is not None:
            if known.fault and self._is_alone(key):
                return None
            elsewhere = self._is_whole_elsewhere(key)
            if elsewhere is False or (elsewhere is None and known.fault):
                return None
        opened = self._replicas.open(topic.state, number, lambda: self._is_whole_elsewhere(key))
        if isinstance(opened, Partition):
            return opened
        if opened is not None and known is None:
            why = opened.fault or opened.lossy
            log.critical(
                "partition %d of topic %r is damaged, and no other replica in sync says that it is whole: its files"
                " are kept, and it stays closed: %s",
                *(number, topic.name, why),
            )
        if opened is not None:
            self._unusable[key] = opened
            self._notify_changed()
        return None

    def _is_alone(self, key: tuple[str, int]) -> bool:
        """Whether the mirror shows no other ISR member. There is no broker to ask then, and no need for a sync."""
        held = self._host.membership.mirror.partitions.get(key)
        return held is not None and not set(held.value.isr) - {self._host.broker_id}

    def _is_whole_elsewhere(self, key: tuple[str, int]) -> bool | None:
        """See unclean_election.py. Reads the present ISR; False when it cannot be read."""
        try:
            self._catalog.plane.sync()
            held = self._catalog.partition(*key)
        except (PlaneError, PortalMQError) as error:
            log.info("the ISR cannot be read now: %s", error)
            return False
        if held is None:
            return False
        question, peers = LogEndRequest(*key), self._host.peers

        def ask(broker_id: int) -> ReplicaLogEnd:
            return STANDING.ask(peers, broker_id, question, timeout_s=ASK_WITHIN_S)

        return is_whole_elsewhere(held.value, self._host.broker_id, ask)

    def _publish(self, topic: Topic, partition: Partition) -> None:
        if not self._is_wanted(topic, partition.number):
            partition.close(saves=False)
            return
        _configure(partition, topic.state)
        partition.on_leading = lambda it: self._leading(topic, it)
        partition.on_stepped_down = lambda it: self.on_stepped_down(topic, it)
        partition.on_damaged = lambda it: self._repair(topic, it)
        topic.local[partition.number] = partition
        held = self._host.membership.mirror.partitions.get((topic.state.topic_id, partition.number))
        if held is not None:
            partition.on_partition_state(_partition_state_of(held, topic.state), self._brokers)
        self.on_opened(partition)

    def _leading(self, topic: Topic, partition: Partition) -> None:
        if partition.serves:
            self.on_leading(topic, partition)
        self._notify_changed()

    def _repair(self, topic: Topic, partition: Partition) -> None:
        """Rebuild a damaged replica once another one is known to be whole. Until then it serves what can be read."""
        key = (topic.state.topic_id, partition.number)
        while not self._closed and topic.local.get(partition.number) is partition:
            if not self._is_alone(key) and self._is_whole_elsewhere(key):
                self._rebuild(topic, partition)
                return
            gevent.sleep(ASK_AGAIN_S)

    def _rebuild(self, topic: Topic, partition: Partition) -> None:
        """Set a damaged replica aside. An empty one, of another store, resigns and copies the leader's log."""
        key = (topic.state.topic_id, partition.number)
        log.critical("%s is damaged, and will be rebuilt from another replica: %s", partition, partition.fault)
        partition.rebuild_reason = partition.fault
        self._opening.add(key)  # no other greenlet opens what is about to be moved
        try:
            if topic.local.get(partition.number) is partition:
                del topic.local[partition.number]
            partition.close(saves=False)
            self._replicas.set_aside(topic.state, partition.number)
        finally:
            self._opening.discard(key)
        if self.holds(topic):
            self._open_soon(topic, partition.number)

    @property
    def is_settled(self) -> bool:
        """Whether every replica assigned to this broker is open, and serves where no other broker is needed for that.
        A replica that stays closed because it is damaged does not count."""
        mine = self._host.broker_id
        for key, held in tuple(self._host.membership.mirror.partitions.items()):
            if mine in held.value.replicas:
                partition = self.local(*key)
                if key in self._unusable:
                    continue
                alone = held.value.leader == mine and held.value.isr == (mine,)
                if partition is None or (alone and not partition.serves):
                    return False
        return not self._opening - self._unusable.keys()

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

    # --- files of no topic --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the ticker. Look for files of unknown topics once, as soon as the control plane can be read."""
        self.ticker.start()
        gevent.spawn(self._look_for_strays)

    def has_files(self, topic_id: str) -> bool:
        """Whether any file of the topic is on this broker's disk."""
        known = topic_id in self._by_id or topic_id in self._ending or topic_id in self._removing
        return known or self._replicas.files.exist(topic_id)

    def _remove_files(self, topic_id: str) -> None:
        """Remove the files of a topic with a tombstone. For a topic that is still closing this runs again later."""
        if topic_id in self._by_id or topic_id in self._ending or topic_id in self._removing or self._closed:
            return
        self._removing.add(topic_id)
        gevent.spawn(self._remove, topic_id)

    def _remove(self, topic_id: str) -> None:
        try:
            self._host.pool.apply(self._replicas.files.remove, (topic_id,))
        finally:
            self._removing.discard(topic_id)
            self._notify_changed()

    def _look_for_strays(self) -> None:
        while not self._closed and not self.set_aside_strays():
            gevent.sleep(STRAYS_AGAIN_S)

    def set_aside_strays(self) -> bool:
        """Move files of unknown topics to lost+found. A topic is known by the control plane, read after a sync, or by
        a tombstone. Return False, and touch nothing, while the control plane cannot be read."""
        with self._strays_lock:
            folders = self._host.pool.apply(self._replicas.files.folders)
            try:
                self._catalog.plane.sync()
                explained = self._catalog.topic_ids()
                deleted = set(self._catalog.tombstones())
            except (PlaneError, PortalMQError) as error:
                log.info("files of unknown topics cannot be looked for now: %s", error)
                return False
            explained |= {*self._by_id, *self._removing, *self._ending}
            self._host.pool.apply(self._replicas.files.clean_up, (folders, explained, deleted))
            return True

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
            if self.capacity is not None and name not in self._topics:
                factor = min(request.replication_factor or default, max(1, len(brokers)))
                reserved.enter_context(self.capacity.topic((request.partitions or 1) * factor))
            state, created = self._catalog.create_topic(
                name, request, brokers=brokers, default_replication_factor=default
            )
            return self._wait_applied(state), created

    def alter(self, name: str, request: wire.AlterTopic) -> Topic:
        with self._change_lock(name), ExitStack() as reserved:
            topic = self._topics.get(name)
            if self.capacity is not None and topic is not None and request.partitions is not None:
                more = request.partitions - topic.state.partitions
                reserved.enter_context(self.capacity.replicas(max(0, more) * topic.state.replication_factor))
            state = self._catalog.alter_topic(name, request, brokers=self._host.membership.mirror.brokers)
            return self._wait_applied(state)

    def delete(self, name: str) -> None:
        """Delete the topic: first its name, leaving a tombstone, then its files on every broker."""
        with self._change_lock(name):
            state = self._catalog.delete_topic(name, now_ms=self._host.clock.wall_ms())
            self._wait_for(lambda: not self.has_files(state.topic_id), SETTLE_WITHIN_S)

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
        self._closed = True
        self.ticker.close()
        gevent.joinall([gevent.spawn(partition.close) for partition in self.partitions()])


def _partition_state_of(held: Versioned[PartitionState], state: TopicState) -> PartitionStateChanged:
    return partition_state_of(held.value, held.version, state.config.min_insync_replicas)


def _configure(partition: Partition, state: TopicState) -> None:
    partition.dedup_window_ms = state.config.dedup_window_ms
    partition.min_insync_replicas = state.config.min_insync_replicas
    partition.log.segment_bytes = state.config.segment_bytes
