"""The broker's state at the moment when Prometheus asks: read from the domain, kept nowhere."""

from __future__ import annotations

from portalmq.broker.broker import Broker
from portalmq.broker.metrics import Gauges, GroupLag, PartitionGauge


def gauges_of(broker: Broker, *, connected: bool) -> Gauges:
    """`connected` tells whether the control plane answers."""
    lags = []
    for group in broker.groups.names():
        for on_partition in broker.groups.on_partitions(group):
            counts = on_partition.counts()
            partition = on_partition.partition
            lags.append(
                GroupLag(partition.topic, partition.number, group, counts["lag"], counts["oldest_unacked_ms"] / 1000)
            )
    partitions = [
        PartitionGauge(
            partition.topic,
            partition.number,
            partition.replica.leading,
            partition.log.log_start_offset,
            partition.high_watermark,
        )
        for topic in broker.topics
        for partition in topic.partitions
    ]
    size = sum([partition.log.size_bytes for topic in broker.topics for partition in topic.partitions])
    return Gauges(lags, partitions, {"log": size}, connected)
