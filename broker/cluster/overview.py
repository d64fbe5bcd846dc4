"""The cluster as any broker describes it: its brokers, leaders and topics.

All of it comes from the mirror, and is a moment old. Only offsets and sizes come from the leaders; for a leader that
does not answer the last known values are used.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from portalmq import wire
from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one, place_of
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.rpc.messages import PARTITIONS, Partitions, PartitionSize
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.control_plane.mirror import Mirror
from portalmq.control_plane.state import PartitionState, TopicState
from portalmq.errors import TopicNotFound

UNKNOWN = PartitionSize(0, 0, 0)


@dataclass(eq=False, repr=False)
class Overview:
    _cluster_id: str
    _topics: Topics
    _metadata_cache: MetadataCache
    _leaders: LeaderRouter
    _mirror: Mirror
    _sizes: dict[TopicPartition, PartitionSize] = field(default_factory=dict, init=False)
    _urls: dict[int, str] = field(default_factory=dict, init=False)

    # --- topics ------------------------------------------------------------------------------------------------------

    def describe_topic(self, topic: Topic) -> wire.TopicDescription:
        state = topic.state
        places = [place_of(state, number) for number in range(state.partitions)]
        request = Partitions(state.name, state.topic_id, list(range(state.partitions)))
        sizes = self._leaders.call(PARTITIONS, request, self.local_sizes(request), patience_s=0.0)
        for place, size in sizes.items():
            if isinstance(size, PartitionSize):
                self._sizes[place] = size
        return wire.TopicDescription(
            state.name,
            [self._described(state, place) for place in in_short_turns(places)],
            state.config,
            topic_id=state.topic_id,
            replication_factor=state.replication_factor,
        )

    def _described(self, topic: TopicState, place: TopicPartition) -> wire.PartitionDescription:
        held = self._partition(topic, place.number)
        size = self._sizes.get(place, UNKNOWN)
        return wire.PartitionDescription(
            place.number,
            held.leader if held else None,
            held.leader_epoch if held else 0,
            list(held.replicas) if held else [],
            sorted(held.isr) if held else [],
            size.log_start_offset,
            size.high_watermark,
            size.size_bytes,
        )

    def local_sizes(self, request: Partitions) -> LocalWork[PartitionSize]:
        def size(place: TopicPartition) -> PartitionSize:
            partition = self._metadata_cache.partition(place)
            return PartitionSize(partition.log.log_start_offset, partition.high_watermark, partition.log.size_bytes)

        return one_by_one(size)

    def forget_topic(self, topic: Topic) -> None:
        self._sizes = {place: size for place, size in self._sizes.items() if place.topic_id != topic.state.topic_id}

    # --- the cluster -------------------------------------------------------------------------------------------------

    def cluster(self) -> wire.ClusterDescription:
        controller = self._mirror.controller
        return wire.ClusterDescription(
            self._cluster_id, controller.value.broker_id if controller else None, self._brokers()
        )

    def metadata(self, names: list[str] | None) -> wire.Metadata:
        """Return the leader of every partition. Topics that do not exist are left out."""
        for name in names or ():
            with suppress(TopicNotFound):
                self._topics.known(name)
        states = [topic.state for topic in self._topics]
        if names is not None:
            wanted = set(names)
            states = [state for state in states if state.name in wanted]
        return wire.Metadata(
            self._brokers(),
            [
                wire.TopicMetadata(
                    state.name,
                    [self._leader(state, number) for number in range(state.partitions)],
                    state.first_partitions,
                )
                for state in in_short_turns(sorted(states, key=lambda state: state.name))
            ],
        )

    def _leader(self, topic: TopicState, number: int) -> wire.PartitionLeader:
        held = self._partition(topic, number)
        if held is None:
            return wire.PartitionLeader(number, None, 0, None)
        url = self._mirror.url_of(held.leader) if held.leader is not None else None
        return wire.PartitionLeader(number, held.leader, held.leader_epoch, url)

    def _brokers(self) -> list[wire.BrokerDescription]:
        """Return the registered brokers, and those that should be: they hold replicas, or were registered before."""
        live = {broker_id: broker.url for broker_id, broker in self._mirror.brokers.items()}
        self._urls |= live
        holders = {replica for held in list(self._mirror.partitions.values()) for replica in held.value.replicas}
        return [
            wire.BrokerDescription(broker_id, self._urls.get(broker_id, ""), broker_id in live)
            for broker_id in sorted(holders | self._urls.keys())
        ]

    def _partition(self, topic: TopicState, number: int) -> PartitionState | None:
        held = self._mirror.partitions.get((topic.topic_id, number))
        return held.value if held else None

    def offline_partitions(self) -> int:
        """Return how many partitions of the cluster have no leader."""
        return sum(held.value.leader is None for held in list(self._mirror.partitions.values()))
