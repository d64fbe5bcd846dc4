from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portalmq.control_plane.assignment import first_for, place

counts = st.integers(0, 60)
factors = st.integers(1, 6)
brokers = st.sets(st.integers(0, 50), min_size=1, max_size=9)
firsts = st.integers(0, 2**32)


def spread(counted: Counter[int], over: set[int]) -> int:
    held = [counted[broker] for broker in over]
    return max(held) - min(held)


@given(counts, factors, brokers, firsts)
def test_every_partition_is_on_as_many_brokers_as_exist(
    partitions: int, factor: int, live: set[int], first: int
) -> None:
    placed = place(partitions, factor, live, first=first)
    assert len(placed) == partitions
    for replicas in placed:
        assert len(replicas) == len(set(replicas)) == min(factor, len(live))
        assert set(replicas) <= live


@given(counts, factors, brokers, firsts)
def test_leaders_are_spread_evenly(partitions: int, factor: int, live: set[int], first: int) -> None:
    placed = place(partitions, factor, live, first=first)
    assert spread(Counter(replicas[0] for replicas in placed), live) <= 1


@given(counts, factors, brokers, firsts)
def test_replicas_are_spread_evenly(partitions: int, factor: int, live: set[int], first: int) -> None:
    placed = place(partitions, factor, live, first=first)
    assert spread(Counter(broker for replicas in placed for broker in replicas), live) <= factor


@given(st.integers(3, 9), firsts)
def test_all_others_share_the_partitions_of_a_dead_leader(live: int, first: int) -> None:
    placed = place(live * (live - 1), 2, range(live), first=first)
    for dead in range(live):
        heirs = Counter(follower for leader, follower in placed if leader == dead)
        assert heirs == Counter(set(range(live)) - {dead})


@given(counts, counts, factors, brokers, firsts)
def test_growing_moves_no_partition(few: int, more: int, factor: int, live: set[int], first: int) -> None:
    grown = place(few + more, factor, live, first=first)
    assert grown[:few] == place(few, factor, live, first=first)


def test_the_order_in_which_brokers_are_named_does_not_matter() -> None:
    assert place(7, 2, [3, 1, 2]) == place(7, 2, [1, 2, 3])


def test_topics_of_one_partition_do_not_all_begin_at_the_same_broker() -> None:
    leaders = Counter(place(1, 1, range(3), first=first_for(f"topic_{n}"))[0][0] for n in range(300))
    assert min(leaders.values()) > 60


def test_without_brokers_no_assignment_is_made() -> None:
    with pytest.raises(ValueError, match="no broker"):
        place(1, 1, [])
