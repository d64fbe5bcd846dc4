"""The check before a topic grows: more partitions move keys to other partitions and break the order by key.

A group that is ordered by key relies on one partition for each key. After growth, messages of a key that wait in the
old partition and messages in the new one are delivered concurrently. So growing such a topic needs `force`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.peers import Peers
from portalmq.broker.cluster.routing import LeaderRouter, place_of
from portalmq.broker.cluster.rpc import Outcomes, Result, TopicPartition
from portalmq.broker.cluster.rpc.queues import GroupBegunCall
from portalmq.broker.cluster.topics import Topic
from portalmq.control_plane.mirror import Mirror
from portalmq.errors import KeyOrder, PortalMQError

KNOWN_TIMEOUT_S = 10.0

_Bools = list[Result[bool]]


@dataclass(slots=True)
class _Reading:
    """The work of asking on which partitions a group has begun."""

    partition_growth: PartitionGrowth
    group: str

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[bool]:
        outcomes: Outcomes[bool] = {}
        for place in places:
            try:
                outcomes[place] = self.group in self.partition_growth.metadata_cache.partition(place).delivery
            except PortalMQError as error:
                outcomes[place] = error
        return outcomes

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[bool]:
        call = GroupBegunCall(self.group, places[0].topic, places[0].topic_id, [place.number for place in places])
        results = self.partition_growth.peers.call(broker_id, "known", call, _Bools, timeout_s=KNOWN_TIMEOUT_S)
        return {place: result.outcome() for place, result in zip(places, results, strict=True)}


class PartitionGrowth:
    def __init__(self, mirror: Mirror, metadata_cache: MetadataCache, leaders: LeaderRouter, peers: Peers) -> None:
        self._mirror = mirror
        self.metadata_cache = metadata_cache
        self.peers = peers
        self._leaders = leaders

    def check(self, topic: Topic, partitions: int | None) -> None:
        """Raise KeyOrder when partitions would be added to a topic that a group reads in the order of keys; also raises
        the error of a leader that cannot be asked."""
        if partitions is None or partitions <= topic.state.partitions:
            return
        places = [place_of(topic.state, number) for number in range(topic.state.partitions)]
        for name, group in sorted(self._mirror.groups.items()):
            if group.config.ordering != "key":
                continue
            outcomes = self._leaders.run(places, _Reading(self, name), repeatable=True)
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
