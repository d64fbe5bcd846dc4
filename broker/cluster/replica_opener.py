"""Opening and rebuilding the replicas of this broker, a few at a time, each in a greenlet. One whose files need not be
opened begins at once.

A damaged replica is rebuilt only while another ISR member says that it is whole. Until then an open one serves what can
be read, and one that cannot be opened stays closed with its files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import gevent
from gevent.lock import BoundedSemaphore

from portalmq.broker.cluster.replicas import RecordedReplica, Replicas, recorded_replica
from portalmq.broker.cluster.rpc.brokers import STANDING, LogEndRequest, ReplicaLogEnd
from portalmq.broker.cluster.topic import Topic, TopicsHost
from portalmq.broker.cluster.unclean_election import is_whole_elsewhere
from portalmq.broker.partition.partition import Partition
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.mirror import PartitionKey
from portalmq.control_plane.plane import PlaneError
from portalmq.errors import PortalMQError

log = logging.getLogger(__name__)

OPENING_AT_A_TIME = 16
OPEN_AGAIN_S = 1.0
# How often a damaged replica looks for another one that is whole.
ASK_AGAIN_S = 5.0
ASK_WITHIN_S = 2.0


@dataclass(eq=False, repr=False)
class ReplicaOpener:
    """`is_current` says whether a topic still exists. `publish` gets each replica once it is fully open, `withdraw`
    each before it is rebuilt; `on_changed` is called when an attempt has ended.

    Invariant: `opening` holds the replicas with a greenlet that opens or moves them, `unusable` those of them that stay
    closed because their files are damaged and no other replica is known to be whole.
    """

    _host: TopicsHost
    _catalog: Catalog
    _replicas: Replicas
    is_current: Callable[[Topic], bool]
    publish: Callable[[Topic, Partition], None]
    withdraw: Callable[[Topic, Partition], None]
    on_changed: Callable[[], None]

    def __post_init__(self) -> None:
        self.opening: set[PartitionKey] = set()
        self.unusable: dict[PartitionKey, ReplicaLogEnd] = {}
        # Those of them whose files can be opened, and not written.
        self._unwritable: set[PartitionKey] = set()
        self.closed = False
        self._slots = BoundedSemaphore(OPENING_AT_A_TIME)

    def open_soon(self, topic: Topic, number: int) -> None:
        """Open a replica, at once if its files need not be opened."""
        key = (topic.state.topic_id, number)
        if key not in self.opening and not self.closed:
            recorded = self._recorded(key)
            resumed = None if recorded is None else self._replicas.resume(topic.state, number, recorded)
            if resumed is not None:
                self.publish(topic, resumed)
                return
            self.opening.add(key)
            gevent.spawn(self._open, topic, number)

    def _open(self, topic: Topic, number: int) -> None:
        """Open a replica. Repeat this when the disk has no room, or when its files are damaged and no other replica is
        known to be whole. A fault of the disk ends the broker."""
        key = (topic.state.topic_id, number)
        try:
            while self._is_wanted(topic, number):
                with self._slots:
                    partition = self._opened(topic, number)
                if partition is not None:
                    if self._is_wanted(topic, number):
                        self.publish(topic, partition)
                    else:
                        partition.close(saves=False)
                    return
                gevent.sleep(ASK_AGAIN_S if key in self.unusable else OPEN_AGAIN_S)
        finally:
            self.opening.discard(key)
            self.unusable.pop(key, None)
            self._unwritable.discard(key)
            self.on_changed()

    def _is_wanted(self, topic: Topic, number: int) -> bool:
        return not self.closed and self.is_current(topic) and number not in topic.local

    def _opened(self, topic: Topic, number: int) -> Partition | None:
        key = (topic.state.topic_id, number)
        known = self.unusable.get(key)
        if known is not None:
            if known.fault and self._is_alone(key):
                return None
            elsewhere = self._is_whole_elsewhere(key)
            if elsewhere is False or (elsewhere is None and known.fault):
                return None
            if key in self._unwritable:
                if not self._replicas.set_aside(topic.state, number):
                    return None
                self._unwritable.discard(key)
        recorded = self._recorded(key)
        if recorded is None:  # the mirror does not have it just now
            return None
        opened = self._replicas.open(topic.state, number, lambda: self._is_whole_elsewhere(key), recorded=recorded)
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
            self.unusable[key] = opened
            self.on_changed()
        return None

    def _recorded(self, key: PartitionKey) -> RecordedReplica | None:
        held = self._host.membership.mirror.partitions.get(key)
        return None if held is None else recorded_replica(held.value, self._host.broker_id)

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
        asked, peers = LogEndRequest(*key), self._host.peers
        return is_whole_elsewhere(
            held.value, self._host.broker_id, lambda other: STANDING.ask(peers, other, asked, timeout_s=ASK_WITHIN_S)
        )

    def repair(self, topic: Topic, partition: Partition) -> None:
        """Rebuild a damaged replica once another one is known to be whole. Until then it serves what can be read."""
        key = (topic.state.topic_id, partition.number)
        while not self.closed and topic.local.get(partition.number) is partition:
            is_whole = not self._is_alone(key) and self._is_whole_elsewhere(key)
            if is_whole and topic.local.get(partition.number) is partition:
                self._rebuild(topic, partition)
                return
            gevent.sleep(ASK_AGAIN_S)

    def close_damaged(self, topic: Topic, partition: Partition, fault: str) -> None:
        """Close a replica whose files cannot be written. It is begun again once another one is known to be whole."""
        key = (topic.state.topic_id, partition.number)
        if self.closed or topic.local.get(partition.number) is not partition:
            return
        log.critical("%s is damaged, and cannot be written: it is closed, with its files: %s", partition, fault)
        partition.rebuild_reason = fault
        self.opening.add(key)
        self._unwritable.add(key)
        self.unusable[key] = ReplicaLogEnd("", self._host.incarnation, 0, 0, 0, fault=fault)
        try:
            self.withdraw(topic, partition)
            partition.close(saves=False)
        finally:
            self.on_changed()
            self._open(topic, partition.number)

    def _rebuild(self, topic: Topic, partition: Partition) -> None:
        """Set a damaged replica aside. An empty one, of another store, resigns and copies the leader's log."""
        key = (topic.state.topic_id, partition.number)
        log.critical("%s is damaged, and will be rebuilt from another replica: %s", partition, partition.fault)
        partition.rebuild_reason = partition.fault
        self.opening.add(key)  # no other greenlet opens what is about to be moved
        try:
            self.withdraw(topic, partition)
            partition.close(saves=False)
            self._replicas.set_aside(topic.state, partition.number)
        finally:
            self.opening.discard(key)
            if self.is_current(topic):
                self.open_soon(topic, partition.number)
