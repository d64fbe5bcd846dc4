"""The number of unfinished messages of a queue group in a topic, counted by the leaders.

A group that has not begun on a partition would count nothing there, although all messages wait for it. So `size` lets
the group begin. `look` changes nothing: a group that has not begun counts all messages.
"""

from __future__ import annotations

from collections.abc import Mapping

from portalmq.broker.cluster.routing import LocalWork, one_by_one
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition, values_of
from portalmq.broker.cluster.rpc.queues import LOOK, SIZES, LookAt, QueueSize, SizeOf
from portalmq.broker.partition.clock import Clock
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.partition_counts import tallied, untouched
from portalmq.control_plane.state import GroupState


class QueueSizes:
    """Counts queues."""

    def __init__(self, groups: Groups, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock

    def size(self, name: str, topic_name: str) -> QueueSize:
        """Return the counts over all partitions. Raises TopicNotFound, GroupModeMismatch; Unavailable when a leader
        cannot be asked, since its part would be missing."""
        topic = self._groups.topics.known(topic_name)
        group = self._groups.ensure(name)
        self._groups.begin(group, topic)
        state = topic.state
        request = SizeOf(name, group.group_id, state.name, state.topic_id, list(range(state.partitions)))
        return _sum(self._groups.leaders.call(SIZES, request, self._local_sizes(group), repeatable=True))

    def look(self, name: str, topic_name: str, *, forward: bool = True) -> QueueSize:
        """Return the same counts without creating the group or letting it begin."""
        topic = self._groups.topics.known(topic_name)
        self._groups.find_queue(name)
        request = LookAt(name, topic.state.name, topic.state.topic_id, list(range(topic.state.partitions)))
        local = self.local_look(request)
        return _sum(self._groups.leaders.call(LOOK, request, local, forward=forward, repeatable=True))

    def local_sizes(self, request: SizeOf) -> LocalWork[QueueSize]:
        return self._local_sizes(self._groups.get_by_id(request.group, request.group_id))

    def _local_sizes(self, group: GroupState) -> LocalWork[QueueSize]:
        def size(place: TopicPartition) -> QueueSize:
            if group.config.start == "earliest":
                self._groups.begin_here(group, place, "earliest")
            return _size_of(self._groups.at(group, place).counts())

        return one_by_one(size)

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
