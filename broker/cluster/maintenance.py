"""Periodic maintenance of the replicas on this broker: folds are saved, old messages dropped, superseded ones
compacted, idle files closed; and groups are swept.

A replica whose maintenance fails does not delay the others, and is tried again the next time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import gevent
from gevent.event import Event

from portalmq import wire
from portalmq.broker.cluster.replicas import REPLICAS_WITH_PATIENCE
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.partition.compaction import Compactor
from portalmq.broker.partition.native import NativeThreads
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.storage.errors import DAMAGE, Shortage
from portalmq.errors import PortalMQError
from portalmq.system import return_free_memory

log = logging.getLogger(__name__)

SAVE_STATE_EVERY_S = 1.0
RETAIN_EVERY_S = 10.0
COMPACT_EVERY_S = 2.0
SWEEP_EVERY_S = 2.0
CLOSE_IDLE_EVERY_S = 15.0
# So few replicas as have patience keep the files that they used in the last minute: one that is used every now and then
# is not opened each time.
PATIENCE = 4
GROUP_EXPIRY_MS = 7 * wire.DAY_MS


@contextmanager
def attempt_on(partition: Partition, done: str) -> Iterator[None]:
    """Log what keeps a replica from being `done`, so that it delays no other, and report damage of its files."""
    try:
        yield
    except DAMAGE as fault:
        partition.report_damage(str(fault))
    except (PortalMQError, Shortage) as error:
        log.warning("%s will be %s later: %s", partition, done, error)


class MaintenanceHost(Protocol):
    """The broker, as its maintenance sees it."""

    pool: NativeThreads

    def disk_is_full(self) -> bool: ...
    def release_disk(self) -> object:
        """Free the reserved disk space."""
        ...

    def storage_failed(self, fault: BaseException) -> None: ...


@dataclass(eq=False, repr=False)
class Maintenance:
    """Runs each task at its interval until `draining` is set. `sweep` maintains the groups."""

    _topics: Topics
    _compactor: Compactor
    _draining: Event
    _host: MaintenanceHost
    sweep: Callable[[], None]

    def __post_init__(self) -> None:
        self._greenlets: list[gevent.Greenlet] = []
        self._idle_turns = 0

    def start(self) -> None:
        self._greenlets = [
            gevent.spawn(self._every, SAVE_STATE_EVERY_S, self.save_state),
            gevent.spawn(self._every, RETAIN_EVERY_S, self.retain),
            gevent.spawn(self._every, SWEEP_EVERY_S, self.sweep),
            gevent.spawn(self._every, COMPACT_EVERY_S, self.compact),
            gevent.spawn(self._every, CLOSE_IDLE_EVERY_S, self._close_idle_files_in_time),
        ]

    def close(self) -> None:
        gevent.killall(self._greenlets)

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while not self._draining.wait(seconds):
            try:
                work()
            except (PortalMQError, Shortage) as error:
                log.warning("maintenance will be tried again: %s", error)
            except Exception as fault:  # noqa: BLE001 - any other failure of maintenance ends the broker
                self._host.storage_failed(fault)

    def save_state(self) -> None:
        unsaved = [each for each in self._topics.partitions() if each.changed or each.retention.unsaved]
        for partition in in_short_turns(unsaved):
            with attempt_on(partition, "saved"):
                partition.retention.save_state()

    def _close_idle_files_in_time(self) -> None:
        self._idle_turns += 1
        if self._idle_turns % PATIENCE == 0 or len(self._topics.partitions()) > REPLICAS_WITH_PATIENCE:
            self.close_idle_files()

    def close_idle_files(self) -> None:
        closed = 0
        for partition in in_short_turns(self._topics.partitions()):
            with attempt_on(partition, "closed"):
                closed += partition.close_if_idle()
        if closed > REPLICAS_WITH_PATIENCE:
            self._host.pool.apply(return_free_memory)
        self._topics.note_closed()

    def retain(self) -> None:
        if self._host.disk_is_full():
            self._host.release_disk()  # sealing and dropping segments makes room, and needs a little room
        for topic in self._topics:
            config = topic.state.config
            for partition in in_short_turns(tuple(topic.local.values())):
                with attempt_on(partition, "cleaned"):
                    partition.retention.retain(config.retention_ms, config.retention_bytes, GROUP_EXPIRY_MS)

    def compact(self) -> None:
        compacted = [
            (topic, partition)
            for topic in self._topics
            for partition in topic.local.values()
            if partition.groups.compacted or topic.state.config.cleanup == "compact"
        ]
        for topic, partition in compacted:
            with attempt_on(partition, "compacted"):
                self._compactor.compact_if_due(partition, keeps_last=topic.state.config.cleanup == "compact")
