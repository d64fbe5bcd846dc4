"""A draft of a stream group's next membership.

It begins as the known state, takes the changes, and ends as the next generation's state. A partition whose ownership
did not change keeps it, with the generation since which it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from portalmq.broker.core.stream.assignment import assign
from portalmq.broker.core.stream.events import GroupMembers, Member, Partition, PartitionOwner, SubscribedTopic


class Draft:
    """The next membership under construction. Call join and drop first, then renew, release and assign, in this
    order."""

    def __init__(self, known: GroupMembers, generation: int, topics: Mapping[str, SubscribedTopic]) -> None:
        self.generation = generation
        self._known = known
        self._topics = topics
        self._members = dict(known.members)
        # Clients that join hold nothing yet, whatever an older client of their id held.
        self._fresh: set[str] = set()
        self._owners = {
            partition: ownership
            for partition, ownership in known.owners.items()
            if self._is_there(partition, known.topic_ids.get(partition[0]))
        }

    def _is_there(self, partition: Partition, topic_id: str | None) -> bool:
        topic = self._topics.get(partition[0])
        return topic is not None and topic.topic_id == topic_id and partition[1] < topic.partitions

    def drop(self, member_ids: Collection[str]) -> None:
        for member_id in member_ids:
            self._members.pop(member_id, None)
            self._fresh.discard(member_id)

    def join(self, member: Member) -> None:
        self._members[member.member_id] = member
        self._fresh.add(member.member_id)

    def renew(self, partitions: Iterable[Partition]) -> None:
        """Give these partitions to their owners from this generation on, without waiting for members that release
        them."""
        for partition in partitions:
            ownership = self._owners.get(partition)
            if ownership is not None:
                self._owners[partition] = PartitionOwner(ownership.owner, self.generation)

    def release(self, heard: Mapping[str, int]) -> None:
        """Renew the partitions of clients that join, and those whose last owner has released them, is gone, or is
        another client now."""
        for partition, ownership in self._owners.items():
            leaving = ownership.leaving
            if leaving:
                is_free = (
                    leaving not in self._members or leaving in self._fresh or heard.get(leaving, 0) >= ownership.since
                )
            else:
                is_free = ownership.owner in self._fresh
            if is_free:
                self._owners[partition] = PartitionOwner(ownership.owner, self.generation)

    def assign(self) -> None:
        current = {
            partition: ownership.owner if ownership.owner in self._members else ownership.leaving
            for partition, ownership in self._owners.items()
        }
        assigned = assign(
            {member.member_id: member.topics for member in self._members.values()},
            {name: topic.partitions for name, topic in self._topics.items()},
            current,
            [partition for partition, ownership in self._owners.items() if ownership.leaving],
        )
        self._owners = {partition: self._ownership(partition, owner) for partition, owner in sorted(assigned.items())}

    def _ownership(self, partition: Partition, owner: str) -> PartitionOwner:
        ownership = self._owners.get(partition)
        if ownership is None:
            return PartitionOwner(owner, self.generation)
        if ownership.owner == owner:
            return ownership
        holder = ownership.leaving or ownership.owner
        if holder == owner or holder not in self._members or holder in self._fresh:
            return PartitionOwner(owner, self.generation)
        return PartitionOwner(owner, ownership.since if ownership.leaving else self.generation, holder)

    def changed_nothing(self) -> bool:
        return self._members == self._known.members and self._owners == self._known.owners

    def membership(self, coordinator: tuple[int, int]) -> GroupMembers:
        read = {topic for topic, _ in self._owners}
        topic_ids = {name: self._topics[name].topic_id for name in sorted(read)}
        return GroupMembers(self.generation, coordinator, self._members, self._owners, topic_ids)
