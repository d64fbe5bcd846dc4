"""The control plane's state of a partition, in the terms of the core."""

from __future__ import annotations

from portalmq.broker.core.replica.events import PartitionStateChanged
from portalmq.control_plane.state import PartitionState, min_insync


def partition_state_of(
    held: PartitionState, version: int, configured_min_insync: int | None, *, refresh: int = 0
) -> PartitionStateChanged:
    """Return the partition's node at `version` as an event; `refresh` as in the event."""
    return PartitionStateChanged(
        leader=held.leader,
        leader_epoch=held.leader_epoch,
        isr=frozenset(held.isr),
        replicas=held.replicas,
        min_insync_replicas=min_insync(held, configured_min_insync),
        version=version,
        store_uuids=held.store_uuids,
        incarnations=held.incarnations,
        unclean_epochs=held.unclean,
        refresh=refresh,
    )
