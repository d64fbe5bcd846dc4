"""The check before a topic grows: more partitions move keys to other partitions and break the order by key.

A group that is ordered by key relies on one partition for each key. After growth, messages of a key that wait in the
old partition and messages in the new one are delivered concurrently. So growing such a topic needs `force`.
"""

from __future__ import annotations

from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one
from portalmq.broker.cluster.rpc.queues import KNOWN, GroupBegunCall
from portalmq.broker.cluster.topic import Topic
from portalmq.control_plane.mirror import Mirror
from portalmq.errors import KeyOrder, PortalMQError


class PartitionGrowth:
    def __init__(self, mirror: Mirror, metadata_cache: MetadataCache, leaders: LeaderRouter) -> None:
        self._mirror = mirror
        self._metadata_cache = metadata_cache
        self._leaders = leaders

    def check(self, topic: Topic, partitions: int | None) -> None:
        """Raise KeyOrder when partitions would be added to a topic that a group reads in the order of keys; also raises
        the error of a leader that cannot be asked."""
        if partitions is None or partitions <= topic.state.partitions:
            return
        state = topic.state
        for name, group in sorted(self._mirror.groups.items()):
            if group.config.ordering != "key":
                continue
            request = GroupBegunCall(name, state.name, state.topic_id, list(range(state.partitions)))
            outcomes = self._leaders.call(KNOWN, request, self.local_known(request), repeatable=True)
            errors = [outcome for outcome in outcomes.values() if isinstance(outcome, PortalMQError)]
            if True in outcomes.values():
                raise KeyOrder(
                    f"group {name!r} reads topic {topic.name!r} in the order of keys: with more partitions a key moves"
                    f" to another one while its older messages wait in the old one. Let the group finish first, or use"
                    f" ?force=true"
                )
            for error in errors:
                error.outcome = "not_applied"  # nothing has changed yet
                raise error

    def local_known(self, request: GroupBegunCall) -> LocalWork[bool]:
        return one_by_one(lambda place: request.group in self._metadata_cache.partition(place).delivery)
