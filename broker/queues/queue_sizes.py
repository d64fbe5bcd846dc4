"""The number of unfinished messages of a queue group in a topic, counted by the leaders.

All messages wait for a group that has not begun on a partition. Counting changes nothing: the group does not begin.
"""

from __future__ import annotations

from collections.abc import Mapping

from portalmq.broker.cluster.routing import LocalWork, one_by_one
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition, values_of
from portalmq.broker.cluster.rpc.queues import LOOK, LookAt, QueueSize
from portalmq.broker.partition.clock import Clock
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.partition_counts import tallied, untouched


class QueueSizes:
    """Counts queues."""

    def __init__(self, groups: Groups, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock

    def look(self, name: str, topic_name: str, *, forward: bool = True) -> QueueSize:
        """Return the counts over all partitions. Raises TopicNotFound, GroupModeMismatch; Unavailable when a leader
        cannot be asked, since its part would be missing."""
        topic = self._groups.topics.known(topic_name)
        self._groups.find_queue(name)
        request = LookAt(name, topic.state.name, topic.state.topic_id, list(range(topic.state.partitions)))
        local = self.local_look(request)
        return _sum(self._groups.leaders.call(LOOK, request, local, forward=forward, repeatable=True))

    def local_look(self, request: LookAt) -> LocalWork[QueueSize]:
        def look(place: TopicPartition) -> QueueSize:
            partition = self._groups.partition(place)
            delivery = partition.delivery.get(request.group) or untouched(partition, request.group)
            return _size_of(tallied(partition, delivery, self._clock))

        return one_by_one(look)


def _size_of(counts: Mapping[str, int]) -> QueueSize:
    return QueueSize(**{field: counts[field] for field in QueueSize.__struct_fields__})


def _sum(outcomes: Outcomes[QueueSize]) -> QueueSize:
    sizes = values_of(outcomes).values()
    return QueueSize(
        sum([size.ready for size in sizes]),
        sum([size.in_flight for size in sizes]),
        sum([size.scheduled for size in sizes]),
        sum([size.dead for size in sizes]),
        max([size.oldest_unacked_ms for size in sizes], default=0),
    )
