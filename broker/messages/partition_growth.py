"""Whether a topic may grow: with other partitions a key goes to another one, and its order there begins anew.

A group that is ordered by key relies on one partition for each key. Messages of a key that wait in the old partition
and those that come to the new one are handed out side by side, so growing such a topic is for somebody to decide who
knows that: `force`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.peers import Peers
from portalmq.broker.cluster.routing import LeaderRouter, Outcomes, place_of
from portalmq.broker.cluster.rpc import GroupBegunCall, Result, TopicPartition
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
        """Raises KeyOrder when a group that is ordered by key reads the topic, and partitions would be added; and what
        a leader answers that cannot be asked."""
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
                    f"group {name!r} reads topic {topic.name!r} in the order of keys, and with more partitions a key"
                    f" goes to another one while older messages of it wait in this: let the group finish first, or say"
                    f" ?force=true"
                )
            for error in errors:
                error.outcome = "not_applied"  # so far it was asked for, and nothing was changed
                raise error
