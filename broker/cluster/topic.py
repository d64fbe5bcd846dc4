"""One topic of the cluster, with its replicas that are open on this broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from portalmq.broker.cluster.routing import NoSuchPartition, place_of
from portalmq.broker.cluster.rpc import PeerCaller, TopicPartition
from portalmq.broker.core.queue.receipts import topic_tag
from portalmq.broker.partition.host import PartitionHost, PartitionMembership
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.refusals import not_serving_yet
from portalmq.control_plane.mirror import Mirror
from portalmq.control_plane.state import TopicState
from portalmq.errors import NotEnoughReplicas, NotLeader, Unavailable


class TopicsMembership(PartitionMembership, Protocol):
    @property
    def mirror(self) -> Mirror: ...

    def suspect(self, broker_id: int, incarnation: int, *, refused: bool) -> None: ...


class TopicsHost(PartitionHost, Protocol):
    @property
    def membership(self) -> TopicsMembership: ...

    @property
    def peers(self) -> PeerCaller: ...

    def on_topic_grown(self, topic: Topic) -> None:
        """Called for a topic with more partitions than before."""
        ...

    def on_topic_removed(self, topic: Topic) -> None:
        """Called for a topic that is gone from the cluster, before its files are removed."""
        ...

    def on_topic_closing(self, topic: Topic) -> None:
        """Called after that, before its replicas are closed. May take some seconds."""
        ...

    def on_leading(self, topic: Topic, partition: Partition) -> None: ...
    def on_stepped_down(self, topic: Topic, partition: Partition) -> None: ...


class Topic:
    """A topic of the cluster. `local` are the replicas open on this broker, by number. `confirm` raises Unavailable for
    a partition that is missing here and that the control plane may have."""

    def __init__(self, state: TopicState, host: TopicsHost, confirm: Callable[[NoSuchPartition], None]) -> None:
        self.state = state
        self.tag = topic_tag(state.topic_id)
        self.local: dict[int, Partition] = {}
        self._host = host
        self._confirm = confirm

    @property
    def name(self) -> str:
        return self.state.name

    def place(self, number: int) -> TopicPartition:
        """Return the address of a partition that a caller names. Raises PartitionNotFound only if the control plane has
        no such partition; Unavailable where the topic has grown and this broker does not know it yet."""
        try:
            return place_of(self.state, number)
        except NoSuchPartition as missing:
            self._confirm(missing)
            raise

    def partition(self, number: int) -> Partition:
        """Return the replica here, which leads and knows all that is committed. Raises PartitionNotFound and NotLeader;
        NotEnoughReplicas and Unavailable for conditions that pass."""
        partition = self.local.get(number)
        if partition is not None:
            now_ms = self._host.clock.now_ms()
            partition.check_pause(now_ms)
            if partition.replica.leading:
                self._check_serves(partition, now_ms)
                return partition
        leader = self.leader_of(number)
        if leader is None:
            raise Unavailable(f"partition {number} of topic {self.name!r} has no leader just now", retry_after_s=0.1)
        if leader == self._host.broker_id:
            raise not_serving_yet()
        raise NotLeader(
            f"broker {leader} leads partition {number} of topic {self.name!r}",
            leader=leader,
            leader_url=self._host.membership.mirror.url_of(leader),
        )

    def _check_serves(self, partition: Partition, now_ms: int) -> None:
        if not partition.replica.may_serve(now_ms):
            raise Unavailable("this broker cannot know whether it still leads the partition", retry_after_s=0.2)
        isr_tracker = partition.replica.in_sync
        if partition.serves or isr_tracker is None:
            return
        live, needed = isr_tracker.live_members(now_ms), isr_tracker.state.min_insync_replicas
        if live < needed:
            raise NotEnoughReplicas(f"{live} replicas are in sync, {needed} are needed", retry_after_s=1.0)
        raise not_serving_yet()

    def leader_of(self, number: int) -> int | None:
        """Return the leader, as far as this broker knows. Raises PartitionNotFound."""
        if not 0 <= number < self.state.partitions:
            raise NoSuchPartition(self.state, number)
        held = self._host.membership.mirror.partitions.get((self.state.topic_id, number))
        return held.value.leader if held is not None else None

    def led(self) -> list[Partition]:
        """Return the partitions that this broker leads and serves."""
        now_ms = self._host.clock.now_ms()
        for partition in tuple(self.local.values()):
            partition.check_pause(now_ms)
        return [partition for _, partition in sorted(self.local.items()) if partition.serves]
