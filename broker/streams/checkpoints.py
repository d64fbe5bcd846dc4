"""Checkpoints: offsets of the stream groups that this broker coordinates, copied into the control plane.

They answer for partitions without a leader, and keep the topics that no member reads any more.
"""

from __future__ import annotations

import logging

from portalmq.broker.cluster.routing import place_of
from portalmq.broker.partition.clock import Clock
from portalmq.broker.streams.coordinator import Coordinator
from portalmq.broker.streams.stream_partitions import StreamPartitions
from portalmq.control_plane.mirror import Mirror
from portalmq.control_plane.stream_groups import CheckpointState, StreamGroups
from portalmq.errors import PortalMQError

log = logging.getLogger(__name__)


class Checkpoints:
    """Writes checkpoints. `_saved` holds the last written ones: (group id, topic id) -> partition -> offset, high
    watermark, lag."""

    def __init__(self, store: StreamGroups, partitions: StreamPartitions, mirror: Mirror, clock: Clock) -> None:
        self._store = store
        self._partitions = partitions
        self._mirror = mirror
        self._clock = clock
        self._saved: dict[tuple[str, str], dict[int, tuple[int, int, int]]] = {}

    def save(self, coordinator: Coordinator) -> None:
        try:
            self._copy(coordinator)
        except PortalMQError as error:
            log.info("the offsets of group %r will be saved later: %s", coordinator.group.name, error)
        except Exception:  # the other groups still need their checkpoints
            log.exception("the offsets of group %r could not be saved", coordinator.group.name)

    def _copy(self, coordinator: Coordinator) -> None:
        """Copy the group's changed offsets into the control plane, by topic."""
        known = coordinator.membership.known
        if known is None or not coordinator.membership.coordinates:
            return
        group = coordinator.group
        states = [topic for name in known.topic_ids if (topic := self._mirror.topics.get(name)) is not None]
        places = [place_of(topic, number) for topic in states for number in range(topic.partitions)]
        positions = self._partitions.positions(group.name, places, ages=False, patience_s=0.0)
        for topic in states:
            before = self._before(group.group_id, topic.topic_id)
            offsets = dict(before)
            for number in range(topic.partitions):
                position = positions[place_of(topic, number)]
                if not isinstance(position, PortalMQError) and position.committed >= 0:
                    offsets[number] = (position.committed, position.high_watermark, position.lag)
            if offsets != before:
                checkpoint = CheckpointState(topic.name, self._clock.wall_ms(), offsets)
                self._store.save_checkpoint(group.name, group.group_id, topic.topic_id, checkpoint)
                self._saved[group.group_id, topic.topic_id] = offsets

    def _before(self, group_id: str, topic_id: str) -> dict[int, tuple[int, int, int]]:
        """Return what is saved of a topic. An earlier coordinator's offsets stay where the leader cannot be asked now:
        it often died with that coordinator."""
        if (group_id, topic_id) not in self._saved:
            held = self._store.checkpoint(group_id, topic_id)
            self._saved[group_id, topic_id] = held.offsets if held is not None else {}
        return self._saved[group_id, topic_id]

    def forget(self, group_id: str) -> None:
        """Forget a group that this broker no longer coordinates."""
        self._saved = {key: saved for key, saved in self._saved.items() if key[0] != group_id}
