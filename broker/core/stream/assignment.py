"""Assignment of partitions to the members of a stream group: sticky, balanced, with as few moves as that takes.

    balanced  a member has at most one partition more than any other that could have one of its partitions
    sticky    a partition stays where it is, unless its member is gone or has more than its share

Partitions without a member go to the one with the fewest. Then the fullest give to the emptiest until all is balanced.
Each step makes the sum of squares smaller, so it ends. Nothing moves between members that differ by less than two, so
no assignment that is as balanced takes fewer moves when all members read the same topics (after KIP-54 and KIP-848).
Over chains of differing subscriptions the best assignment is not sought.
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
    """Return the member of each partition of `topics` (name -> partitions) that a member reads (member -> topics).

    `current` maps partitions to their members now. `moving` are partitions that change hands anyway: where two would
    serve, one of these moves.
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
    """The partitions of each member, by topic. `load` is their number."""

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
        """Remove and return the last partition of `topic` that `member` has."""
        self.load[member] -= 1
        return self.held[member][topic].pop()

    def sort_for_moves(self, member: str, topic: str) -> None:
        """Sort the partitions of `member` so that those to be moved first come last."""
        self.held[member][topic].sort(key=lambda partition: (partition in self._moving, partition))


def _fill(topic: str, vacant: list[Partition], readers: list[str], assignment: _Assignment) -> None:
    """Give each vacant partition to the reader with the fewest."""
    emptiest = [(assignment.load[member], assignment.count(member, topic), member) for member in readers]
    heapify(emptiest)
    for partition in vacant:
        _, _, member = emptiest[0]
        assignment.give(partition, member)
        heapreplace(emptiest, (assignment.load[member], assignment.count(member, topic), member))


def _balance(topic: str, readers: list[str], assignment: _Assignment) -> bool:
    """Move partitions of `topic` from the fullest of its readers to the emptiest; return whether any moved."""
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
