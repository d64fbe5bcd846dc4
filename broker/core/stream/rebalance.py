"""The next state of a stream group's membership, while it is being made.

A draft begins as the state that is known, is told what is different, and ends as the next generation's state. What did
not change keeps its Place, and with it the generation from which it stands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from portalmq.broker.core.stream.assignment import assign
from portalmq.broker.core.stream.events import GroupMembers, Member, Partition, PartitionOwner, SubscribedTopic


class Draft:
    """Tell it of members first, then renew, release and share, in this order."""

    def __init__(self, known: GroupMembers, generation: int, topics: Mapping[str, SubscribedTopic]) -> None:
        self.generation = generation
        self._known = known
        self._topics = topics
        self._members = dict(known.members)
        # Clients that joined just now hold nothing yet, whatever an older one of their name held.
        self._fresh: set[str] = set()
        self._owners = {
            partition: place
            for partition, place in known.owners.items()
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
        """All that is under way in these is void: who is to have them has them from now on."""
        for partition in partitions:
            place = self._owners.get(partition)
            if place is not None:
                self._owners[partition] = PartitionOwner(place.owner, self.generation)

    def release(self, heard: Mapping[str, int]) -> None:
        """Renew what a client holds that joined just now, and partitions whose last owner has let go, or is gone, or is
        another client by now."""
        for partition, place in self._owners.items():
            leaving = place.leaving
            if leaving:
                is_free = leaving not in self._members or leaving in self._fresh or heard.get(leaving, 0) >= place.since
            else:
                is_free = place.owner in self._fresh
            if is_free:
                self._owners[partition] = PartitionOwner(place.owner, self.generation)

    def assign(self) -> None:
        current = {
            partition: place.owner if place.owner in self._members else place.leaving
            for partition, place in self._owners.items()
        }
        shares = assign(
            {member.member_id: member.topics for member in self._members.values()},
            {name: topic.partitions for name, topic in self._topics.items()},
            current,
            [partition for partition, place in self._owners.items() if place.leaving],
        )
        self._owners = {partition: self._place(partition, owner) for partition, owner in sorted(shares.items())}

    def _place(self, partition: Partition, owner: str) -> PartitionOwner:
        place = self._owners.get(partition)
        if place is None:
            return PartitionOwner(owner, self.generation)
        if place.owner == owner:
            return place
        holder = place.leaving or place.owner
        if holder == owner or holder not in self._members or holder in self._fresh:
            return PartitionOwner(owner, self.generation)
        return PartitionOwner(owner, place.since if place.leaving else self.generation, holder)

    def changed_nothing(self) -> bool:
        return self._members == self._known.members and self._owners == self._known.owners

    def membership(self, coordinator: tuple[int, int]) -> GroupMembers:
        read = {topic for topic, _ in self._owners}
        topic_ids = {name: self._topics[name].topic_id for name in sorted(read)}
        return GroupMembers(self.generation, coordinator, self._members, self._owners, topic_ids)
