"""Which member of a stream group reads which partition: sticky, balanced, and with as few moves as that takes.

    balanced  a member has at most one partition more than any other that could have one of his
    sticky    a partition stays where it is, unless its member is gone or has more than his share

Partitions without a member go to the one with the fewest; then the fullest give to the emptiest until all is balanced.
Each such step makes the sum of the squares smaller, so it ends; and as nothing moves between members that differ by
less than two, no assignment that is as balanced takes fewer moves when all members read the same topics (after KIP-54
and KIP-848; an assignment that were best over chains of differing subscriptions is not sought).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from heapq import heapify, heappop, heappush, heapreplace

Partition = tuple[str, int]


def assign(
    members: Mapping[str, Collection[str]],
    topics: Mapping[str, int],
    current: Mapping[Partition, str],
    moving: Collection[Partition] = (),
) -> dict[Partition, str]:
    """The member of each partition of `topics` (name -> partitions) that a member reads (name -> topics).

    `current` is who has what now. `moving` are partitions that are on their way anyway: of two that would serve alike,
    one of these moves.
    """
    readers = {
        topic: sorted(member for member, subscribed in members.items() if topic in subscribed) for topic in topics
    }
    assignment = _Assignment(members, frozenset(moving))
    vacant: dict[str, list[Partition]] = {}
    for topic, partitions in topics.items():
        for number in range(partitions):
            member = current.get((topic, number))
            if member is not None and topic in members.get(member, ()):
                assignment.give((topic, number), member)
            elif readers[topic]:
                vacant.setdefault(topic, []).append((topic, number))
    for topic in sorted(vacant, key=lambda topic: (len(readers[topic]), topic)):
        _fill(topic, vacant[topic], readers[topic], assignment)
    moved = True
    while moved:
        moved = sum(_balance(topic, readers[topic], assignment) for topic in topics) > 0
    return {partition: member for member, held in assignment.held.items() for of in held.values() for partition in of}


class _Assignment:
    """What each member has, by topic. `load` is how much that is."""

    def __init__(self, members: Collection[str], moving: frozenset[Partition]) -> None:
        self.load = dict.fromkeys(members, 0)
        self.held: dict[str, dict[str, list[Partition]]] = {member: {} for member in members}
        self._moving = moving

    def count(self, member: str, topic: str) -> int:
        return len(self.held[member].get(topic, ()))

    def give(self, partition: Partition, member: str) -> None:
        self.held[member].setdefault(partition[0], []).append(partition)
        self.load[member] += 1

    def take(self, member: str, topic: str) -> Partition:
        """The last partition of `topic` that `member` has."""
        self.load[member] -= 1
        return self.held[member][topic].pop()

    def sort_for_moves(self, member: str, topic: str) -> None:
        """What `member` misses least comes last."""
        self.held[member][topic].sort(key=lambda partition: (partition in self._moving, partition))


def _fill(topic: str, vacant: list[Partition], readers: list[str], assignment: _Assignment) -> None:
    """Give each to the emptiest of the readers then."""
    emptiest = [(assignment.load[member], assignment.count(member, topic), member) for member in readers]
    heapify(emptiest)
    for partition in vacant:
        _, _, member = emptiest[0]
        assignment.give(partition, member)
        heapreplace(emptiest, (assignment.load[member], assignment.count(member, topic), member))


def _balance(topic: str, readers: list[str], assignment: _Assignment) -> bool:
    """Move partitions of `topic` from the fullest of its readers to the emptiest; whether any was moved."""
    emptiest = [(assignment.load[member], member) for member in readers]
    fullest = [(-assignment.load[member], member) for member in readers if assignment.count(member, topic)]
    heapify(emptiest)
    heapify(fullest)
    for _, member in fullest:
        assignment.sort_for_moves(member, topic)
    moved = False
    while emptiest and fullest:
        load, to = emptiest[0]
        if load != assignment.load[to]:
            heappop(emptiest)
            continue
        negative, holder = fullest[0]
        if -negative != assignment.load[holder] or not assignment.count(holder, topic):
            heappop(fullest)
            continue
        if assignment.load[holder] - load < 2:
            break
        assignment.give(assignment.take(holder, topic), to)
        moved = True
        for member in (holder, to):
            heappush(emptiest, (assignment.load[member], member))
            heappush(fullest, (-assignment.load[member], member))
    return moved
