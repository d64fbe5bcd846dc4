"""Placement of partitions on brokers: pure, deterministic, spread evenly.

The scheme is Kafka's (AdminUtils, without racks): leaders go round the brokers, and the followers of each full round
are one broker further from their leaders. So a broker that dies leaves its work to all others and not to one.

    4 brokers, 2 replicas:   round 0   [0 1] [1 2] [2 3] [3 0]
                             round 1   [0 2] [1 3] [2 0] [3 1]
                             round 2   [0 3] [1 0] [2 1] [3 2]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar
from zlib import crc32

Key = TypeVar("Key")


def place(partitions: int, replication_factor: int, brokers: Collection[int], *, first: int = 0) -> list[list[int]]:
    """Return the replicas of each partition, the preferred leader first.

    `first` shifts the round, so that topics with one partition do not all begin at the same broker. With fewer brokers
    than `replication_factor` each partition has a replica on all of them.

    Leaders differ by at most 1 between brokers, replicas by at most `replication_factor`.
    """
    ring = sorted(set(brokers))
    if not ring:
        raise ValueError("there is no broker to place partitions on")
    count = len(ring)
    followers = min(replication_factor, count) - 1
    placed: list[list[int]] = []
    for partition in range(partitions):
        leader = (first + partition) % count
        turn = partition // count
        placed.append([ring[leader], *(ring[(leader + _gap(turn, nth, count)) % count] for nth in range(followers))])
    return placed


def _gap(turn: int, nth: int, brokers: int) -> int:
    """Return how far from its leader the nth follower is: 1 to brokers - 1, and different for each nth."""
    return 1 + (turn + nth) % (brokers - 1)


def first_for(topic: str) -> int:
    """Return where the round begins for a topic: spread by name, the same on every broker."""
    return crc32(topic.encode())


def add_replicas(
    placed: Mapping[Key, Sequence[int]], wanted: Mapping[Key, int], brokers: Collection[int]
) -> dict[Key, list[int]]:
    """Return the `brokers` that get another replica, by partition: as many as are missing to what is `wanted`.

    `placed` are the replicas of all partitions; one that `wanted` does not name is unchanged, and counts as load. Each
    replica goes to the broker with the fewest replicas; of equal ones to the next in the round, so that followers of
    one leader are spread. None is ever removed.
    """
    ring = sorted(set(brokers))
    load = Counter(replica for replicas in placed.values() for replica in replicas)
    added: dict[Key, list[int]] = {}
    turn = 0
    for key, replicas in placed.items():
        for _ in range(wanted.get(key, 0) - len(replicas)):
            free = [broker for broker in ring if broker not in replicas and broker not in added.get(key, ())]
            if not free:
                break
            chosen = min(free, key=lambda broker: (load[broker], (ring.index(broker) - turn) % len(ring)))
            turn = ring.index(chosen) + 1
            load[chosen] += 1
            added.setdefault(key, []).append(chosen)
    return added
