"""The broker's state at the moment when Prometheus asks: read from the domain, kept nowhere."""

from __future__ import annotations

from time import process_time

from portalmq.broker.broker import Broker, is_under_replicated
from portalmq.broker.server.metrics import Gauges, GroupLag, PartitionGauge
from portalmq.broker.storage.disk import DiskGuard
from portalmq.broker.storage.errors import StorageError
from portalmq.system import memory_limit_bytes, resident_bytes


def gauges_of(broker: Broker, disk: DiskGuard, *, connected: bool) -> Gauges:
    """`connected` tells whether the control plane answers. Lags are those of the partitions that are led here."""
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
        offline_partitions=broker.offline_partitions(),
        open_orders=broker.outboxes.open,
        clock_off_ms=broker.timekeeping.off_ms if broker.timekeeping.differs else 0,
        clocks_differ=broker.timekeeping.differs,
        memory_bytes=resident_bytes(),
        memory_limit_bytes=memory_limit_bytes(),
        disk_free_bytes=_free_bytes(disk),
        disk_low_water_bytes=disk.low_water_bytes,
        cpu_seconds=process_time(),
    )


def _free_bytes(disk: DiskGuard) -> int | None:
    try:
        return disk.free_bytes()
    except StorageError:
        return None  # the other figures are wanted most when a disk is gone
