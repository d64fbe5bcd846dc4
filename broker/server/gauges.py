"""The broker's state as gauges, read when Prometheus scrapes.

A new gauge is a field of Gauges, its value in `gauges_of`, and a row of FAMILIES.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from gevent.lock import BoundedSemaphore
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from portalmq.broker.broker import Broker, is_under_replicated
from portalmq.broker.storage.disk import DiskGuard
from portalmq.broker.storage.errors import StorageError
from portalmq.system import memory_limit_bytes, resident_bytes

# The state of so many groups is expensive to read: it is kept for KEPT_S, and every scrape within that time gets it.
MANY_LAGS = 1_000
KEPT_S = 1.0


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group on one partition: messages not yet done, and the age of the oldest of them."""

    topic: str
    partition: int
    group: str
    lag: int
    oldest_unacked_age_s: float


@dataclass(frozen=True, slots=True)
class PartitionGauge:
    """A replica on this broker. `backlog`: offsets on the leader's disk that are not committed yet."""

    topic: str
    partition: int
    leading: bool
    log_start_offset: int
    high_watermark: int
    under_replicated: bool = False
    quarantined: bool = False
    backlog: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of the broker at one moment. `storage_bytes` has the kind of file ("log") as its key;
    `offline_partitions` counts the partitions of the whole cluster that have no leader."""

    group_lags: list[GroupLag] = field(default_factory=list)
    partitions: list[PartitionGauge] = field(default_factory=list)
    storage_bytes: dict[str, int] = field(default_factory=dict)
    coordinator_connected: bool = False
    is_controller: bool = False
    offline_partitions: int = 0
    # Commits and dead letters of partitions led here whose outputs are not appended yet.
    open_orders: int = 0
    # How far the machine's time of day is ahead of the brokers' agreed time; 0 within the tolerance.
    clock_off_ms: int = 0
    clocks_differ: bool = False
    # Of the process and of the disk of the data directory; None where the system does not report them.
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_low_water_bytes: int | None = None
    # Processor time of this process since it began.
    cpu_seconds: float = 0.0


Samples = Iterable[tuple[tuple[str, ...], float]]


class Family(NamedTuple):
    """A gauge. `samples` returns pairs of label values and a value; a gauge without labels and samples is left out."""

    name: str
    meaning: str
    labels: tuple[str, ...]
    samples: Callable[[Gauges], Samples]

    def metric(self, state: Gauges) -> GaugeMetricFamily | None:
        metric = GaugeMetricFamily(f"portalmq_{self.name}", self.meaning, labels=self.labels)
        for values, value in self.samples(state):
            metric.add_metric(values, value)
        return metric if self.labels or metric.samples else None


def _of_lag(name: str, meaning: str, value: Callable[[GroupLag], float]) -> Family:
    return Family(
        name,
        meaning,
        ("topic", "partition", "group"),
        lambda state: [((lag.topic, str(lag.partition), lag.group), value(lag)) for lag in state.group_lags],
    )


def _of_partition(name: str, meaning: str, value: Callable[[PartitionGauge], float | None]) -> Family:
    def samples(state: Gauges) -> Samples:
        for each in state.partitions:
            if (found := value(each)) is not None:
                yield (each.topic, str(each.partition)), found

    return Family(name, meaning, ("topic", "partition"), samples)


def _single(name: str, meaning: str, value: Callable[[Gauges], float | None]) -> Family:
    return Family(name, meaning, (), lambda state: [((), found)] if (found := value(state)) is not None else [])


FAMILIES = (
    _of_lag("group_lag_messages", "Messages of the partition that the group has not done", lambda lag: lag.lag),
    _of_lag(
        "oldest_unacked_age_seconds",
        "Age of the oldest message that the group has not done",
        lambda lag: lag.oldest_unacked_age_s,
    ),
    _of_partition("partition_leader", "1 while this broker leads the partition", lambda each: int(each.leading)),
    _of_partition("partition_log_start_offset", "First offset of the log", lambda each: each.log_start_offset),
    _of_partition(
        "partition_high_watermark", "First offset that is not yet readable", lambda each: each.high_watermark
    ),
    _of_partition(
        "partition_backlog_offsets",
        "Offsets on the leader's disk that wait for followers to be committed",
        lambda each: each.backlog if each.leading else None,
    ),
    Family(
        "storage_bytes",
        "Bytes on disk, by kind of file",
        ("file",),
        lambda state: [((kind,), size) for kind, size in sorted(state.storage_bytes.items())],
    ),
    _single(
        "coordinator_connected", "1 while the control plane answers", lambda state: int(state.coordinator_connected)
    ),
    _single(
        "under_replicated_partitions",
        "Partitions led here of which a replica is not in sync",
        lambda state: sum(each.under_replicated for each in state.partitions if each.leading),
    ),
    _single(
        "quarantined_partitions",
        "Replicas here that contradict their leader; an operator has to look",
        lambda state: sum(each.quarantined for each in state.partitions),
    ),
    _single(
        "offline_partitions", "Partitions of the cluster that have no leader", lambda state: state.offline_partitions
    ),
    _single(
        "outbox_orders",
        "Commits and dead letters whose outputs are not appended yet",
        lambda state: state.open_orders,
    ),
    _single(
        "clock_off_seconds",
        "How far this machine is ahead of the time that brokers agree on",
        lambda state: state.clock_off_ms / 1000,
    ),
    _single(
        "clocks_differ",
        "1 while this broker finds that the clocks do not agree",
        lambda state: int(state.clocks_differ),
    ),
    _single("is_controller", "1 while this broker is the controller", lambda state: int(state.is_controller)),
    _single("memory_bytes", "Main memory that this broker uses", lambda state: state.memory_bytes),
    _single(
        "memory_limit_bytes",
        "Memory that it may use: the limit of a container, or the machine's memory",
        lambda state: state.memory_limit_bytes,
    ),
    _single("disk_free_bytes", "Free bytes on the disk of the data directory", lambda state: state.disk_free_bytes),
    _single(
        "disk_low_water_bytes",
        "With fewer free bytes, messages are refused with 507",
        lambda state: state.disk_low_water_bytes,
    ),
)


class GaugeCollector(Collector):
    """Reads the broker's state for each scrape; at most once in KEPT_S when there are very many groups."""

    def __init__(self, read: Callable[[], Gauges], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._reading = BoundedSemaphore()
        self._kept: tuple[float, Gauges] | None = None

    def describe(self) -> list[Metric]:
        return []  # without this, registering would read the state at once

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        for family in FAMILIES:
            metric = family.metric(state)
            if metric is not None:
                yield metric
        yield CounterMetricFamily("portalmq_cpu_seconds", "Processor time that this broker used", state.cpu_seconds)

    def _state(self) -> Gauges:
        with self._reading:  # scrapes that wait for this one get its result when it is kept
            if self._kept is not None and self._clock() < self._kept[0]:
                return self._kept[1]
            state = self._read()
            is_large = len(state.group_lags) > MANY_LAGS
            self._kept = (self._clock() + KEPT_S, state) if is_large else None
            return state


def gauges_of(broker: Broker, disk: DiskGuard, *, connected: bool) -> Gauges:
    """Return the broker's state now; lags are of the partitions led here. `connected`: the control plane answers."""
    lags = []
    for attached in broker.groups.all_attached():
        counts, partition = attached.counts(), attached.partition
        age_s = counts["oldest_unacked_ms"] / 1000
        lags.append(GroupLag(partition.topic, partition.number, attached.group, counts["lag"], age_s))
    replicas = broker.topics.partitions()
    partitions = [
        PartitionGauge(
            partition.topic,
            partition.number,
            partition.replica.leading,
            partition.log.log_start_offset,
            partition.high_watermark,
            is_under_replicated(partition),
            bool(partition.quarantined),
            partition.log.end_offset - partition.high_watermark if partition.replica.leading else 0,
        )
        for partition in replicas
    ]
    size = sum([partition.log.size_bytes for partition in replicas])
    return Gauges(
        lags,
        partitions,
        {"log": size},
        connected,
        is_controller=broker.membership.is_controller,
        offline_partitions=broker.overview.offline_partitions(),
        open_orders=broker.outboxes.open,
        clock_off_ms=broker.clock_agreement.off_ms if broker.clock_agreement.differs else 0,
        clocks_differ=broker.clock_agreement.differs,
        memory_bytes=resident_bytes(),
        memory_limit_bytes=memory_limit_bytes(),
        disk_free_bytes=_free_bytes(disk),
        disk_low_water_bytes=disk.low_water_bytes,
        cpu_seconds=time.process_time(),
    )


def _free_bytes(disk: DiskGuard) -> int | None:
    try:
        return disk.free_bytes()
    except StorageError:
        return None  # the other gauges are needed most when a disk fails
