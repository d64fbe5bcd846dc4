"""Where everything is: topics by name and id, and the leader of each partition, as the mirror has them."""

from __future__ import annotations

from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.partition.partition import Partition
from portalmq.control_plane.mirror import Mirror
from portalmq.control_plane.state import partition_path, topic_path
from portalmq.errors import TopicNotFound, Unavailable


class MetadataCache:
    """The metadata that routing to leaders uses, and that other brokers' calls are resolved with."""

    def __init__(self, topics: Topics, mirror: Mirror) -> None:
        self._topics = topics
        self._mirror = mirror

    def topic(self, name: str, topic_id: str) -> Topic:
        """Return the topic with this id. Raises Unavailable for one that this broker does not know."""
        topic = self._topics.get(name)
        if topic is None or topic.state.topic_id != topic_id:
            raise Unavailable(f"this broker does not know this topic {name!r} yet, or any more", retry_after_s=0.1)
        return topic

    def partition(self, place: TopicPartition) -> Partition:
        """Return the partition if this broker leads it. Raises NotLeader, Unavailable."""
        return self._topic_with(place).partition(place.number)

    def leader_of(self, place: TopicPartition) -> int | None:
        """Return the leader, as far as this broker knows. Raises Unavailable where it knows less than the sender, and
        TopicNotFound only for a topic with a tombstone."""
        if place.topic_id in self._mirror.tombstones:
            raise TopicNotFound(f"topic {place.topic!r} was deleted while this was on its way")
        return self._topic_with(place).leader_of(place.number)

    def _topic_with(self, place: TopicPartition) -> Topic:
        topic = self.topic(place.topic, place.topic_id)
        if place.number >= topic.state.partitions:  # it only grows
            self._mirror.note(topic_path(place.topic))
            raise Unavailable(
                f"this broker does not know partition {place.number} of topic {place.topic!r} yet", retry_after_s=0.1
            )
        return topic

    def url_of(self, broker_id: int) -> str | None:
        return self._mirror.url_of(broker_id)

    def look_again(self, place: TopicPartition) -> None:
        self._mirror.note(partition_path(place.topic_id, place.number))
