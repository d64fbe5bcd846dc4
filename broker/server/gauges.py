"""The broker's state as gauges, read when Prometheus scrapes.

A new gauge is a field made by `_gauge`, and its value in `gauges_of`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from gevent.lock import BoundedSemaphore
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from portalmq.broker.broker import Broker, is_under_replicated
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.storage.disk import DiskGuard
from portalmq.broker.storage.errors import StorageError
from portalmq.system import memory_limit_bytes, resident_bytes

# The state of so many groups is expensive to read: it is kept for KEPT_S, and every scrape within that time gets it.
MANY_LAGS = 1_000
KEPT_S = 1.0


def _gauge(name: str, meaning: str, default: Any = MISSING) -> Any:
    """Return a field that is a gauge. It has no sample where its value is None."""
    return field(default=default, metadata={"gauge": (f"portalmq_{name}", meaning)})


@dataclass(frozen=True, slots=True)
class GroupLag:
    """The lag of a group on one partition."""

    topic: str
    partition: int
    group: str
    lag: int = _gauge("group_lag_messages", "Messages of the partition that the group has not done")
    oldest_unacked_age_s: float = _gauge(
        "oldest_unacked_age_seconds", "Age of the oldest message that the group has not done"
    )
    paused: bool = _gauge("group_paused", "1 while the group is paused: nothing is delivered to it", False)


@dataclass(frozen=True, slots=True)
class PartitionGauge:
    """A replica on this broker."""

    topic: str
    partition: int
    leading: bool = _gauge("partition_leader", "1 while this broker leads the partition")
    log_start_offset: int = _gauge("partition_log_start_offset", "First offset of the log")
    high_watermark: int = _gauge("partition_high_watermark", "First offset that is not yet readable")
    under_replicated: bool = False
    quarantined: bool = False
    backlog: int | None = _gauge(
        "partition_backlog_offsets", "Offsets on the leader's disk that wait for followers to be committed", None
    )


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of the broker at one moment. `storage_bytes` has the kind of file ("log") as its key."""

    group_lags: list[GroupLag] = field(default_factory=list)
    partitions: list[PartitionGauge] = field(default_factory=list)
    storage_bytes: dict[str, int] = field(default_factory=dict)
    connected: bool = _gauge("coordinator_connected", "1 while the control plane answers", False)
    is_controller: bool = _gauge("is_controller", "1 while this broker is the controller", False)
    offline_partitions: int = _gauge("offline_partitions", "Partitions of the cluster that have no leader", 0)
    open_orders: int = _gauge("outbox_orders", "Commits and dead letters whose outputs are not appended yet", 0)
    clock_off_s: float = _gauge(
        "clock_off_seconds", "How far this machine is ahead of the time that brokers agree on; 0 within tolerance", 0.0
    )
    clocks_differ: bool = _gauge("clocks_differ", "1 while this broker finds that the clocks do not agree", False)
    memory_bytes: int | None = _gauge("memory_bytes", "Main memory that this broker uses", None)
    memory_limit_bytes: int | None = _gauge(
        "memory_limit_bytes", "Memory that it may use: the limit of a container, or the machine's memory", None
    )
    disk_free_bytes: int | None = _gauge("disk_free_bytes", "Free bytes on the disk of the data directory", None)
    disk_low_water_bytes: int | None = _gauge(
        "disk_low_water_bytes", "With fewer free bytes, messages are refused with 507", None
    )
    cpu_seconds: float = 0.0


def _families(kind: type[Any], rows: Sequence[Any], *labels: str) -> Iterator[Metric]:
    """Yield the gauges of a class: a sample for each row, made when it is written. One without labels and samples is
    left out."""
    for each in fields(kind):
        if "gauge" in each.metadata:
            name, meaning = each.metadata["gauge"]
            if labels or any(getattr(row, each.name) is not None for row in rows):
                metric = GaugeMetricFamily(name, meaning, labels=labels)
                metric.samples = _samples(name, each.name, rows, labels)  # type: ignore[assignment]  # iterated over once
                yield metric


def _samples(name: str, of: str, rows: Sequence[Any], labels: tuple[str, ...]) -> Iterator[Sample]:
    for row in rows:
        if (value := getattr(row, of)) is not None:
            yield Sample(name, {label: str(getattr(row, label)) for label in labels}, value)


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
        partitions = state.partitions
        yield from _families(GroupLag, state.group_lags, "topic", "partition", "group")
        yield from _families(PartitionGauge, partitions, "topic", "partition")
        yield from _families(Gauges, [state])
        storage = GaugeMetricFamily("portalmq_storage_bytes", "Bytes on disk, by kind of file", labels=["file"])
        for kind, size in sorted(state.storage_bytes.items()):
            storage.add_metric([kind], size)
        yield storage
        yield GaugeMetricFamily(
            "portalmq_under_replicated_partitions",
            "Partitions led here of which a replica is not in sync",
            sum(each.under_replicated for each in partitions if each.leading),
        )
        yield GaugeMetricFamily(
            "portalmq_quarantined_partitions",
            "Replicas here that contradict their leader; an operator has to look",
            sum(each.quarantined for each in partitions),
        )
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
        paused = attached.is_paused()
        lags.append(GroupLag(partition.topic, partition.number, attached.group, counts["lag"], age_s, paused))
    partitions, log_bytes = [], 0
    for partition in in_short_turns(broker.topics.partitions()):
        log_bytes += partition.log.size_bytes
        partitions.append(
            PartitionGauge(
                partition.topic,
                partition.number,
                partition.replica.leading,
                partition.log.log_start_offset,
                partition.high_watermark,
                is_under_replicated(partition),
                bool(partition.replica.quarantined),
                partition.log.end_offset - partition.high_watermark if partition.replica.leading else None,
            )
        )
    return Gauges(
        lags,
        partitions,
        {"log": log_bytes},
        connected,
        is_controller=broker.membership.is_controller,
        offline_partitions=broker.overview.offline_partitions(),
        open_orders=broker.outboxes.open,
        clock_off_s=broker.clock_agreement.off_ms / 1000 if broker.clock_agreement.differs else 0.0,
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
