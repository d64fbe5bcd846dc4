"""What the controller leaves alone: each guard on its own, with what only it keeps out."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec

from portalmq.control_plane.catalog import Versioned
from portalmq.control_plane.controller import (
    View,
    cold_elections,
    cut_off,
    decide,
    departures,
    elect,
    is_cold,
    plan,
    rebalance,
)
from portalmq.control_plane.mirror import PartitionKey
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState
from portalmq.wire import TopicConfig

TOPIC = TopicState("t", "id-t", 1, 9, 3, TopicConfig())
KEY, STRAY = ("id-t", 0), ("gone", 0)


def broker(number: int, incarnation: int = 1, **fields: Any) -> BrokerState:
    return BrokerState(f"http://b{number}", incarnation, f"store-{number}", **fields)


def partition(leader: int | None = 1, isr: tuple[int, ...] = (1, 2, 3), **fields: Any) -> PartitionState:
    known = {"store_uuids": {number: f"store-{number}" for number in (1, 2, 3)}, "incarnations": {1: 1, 2: 1, 3: 1}}
    return PartitionState(leader=leader, leader_epoch=5, isr=isr, **{"replicas": (1, 2, 3), **known, **fields})


def view(partitions: dict[PartitionKey, PartitionState], live: dict[int, BrokerState], **more: Any) -> View:
    held = {key: Versioned(state, 4) for key, state in partitions.items()}
    return View({"t": TOPIC}, held, live, **more)


ALL = {number: broker(number) for number in (1, 2, 3)}
ANEW = {number: broker(number, 2) for number in (1, 2, 3)}


def test_a_partition_that_waits_for_its_logs_is_not_changed() -> None:
    partitions = {KEY: partition(), ("id-t", 1): partition()}
    changes = plan(view(partitions, {2: ALL[2], 3: ALL[3]}, waiting={KEY}))
    assert [change.number for change in changes] == [1]


def test_a_partition_of_no_topic_is_left_alone() -> None:
    cold = view({KEY: partition(), STRAY: partition()}, ANEW)
    assert cold_elections(cold).keys() == {KEY}
    reach = {1: {2: False, 3: False}, 2: {1: False, 3: True}, 3: {1: False, 2: True}}
    assert cut_off(view({KEY: partition(), STRAY: partition()}, ALL, reach=reach)) == {KEY}
    four = {("id-t", number): partition() for number in range(4)} | {STRAY: partition()}
    assert {change.topic_id for change in rebalance(view(four, ALL))} == {"id-t"}
    assert [change.topic_id for change in departures(view({KEY: partition(), STRAY: partition()}, ALL), 3)] == ["id-t"]


def test_only_a_leader_that_was_asked_for_and_may_lead_can_be_cut_off() -> None:
    nobody_reaches_it = {1: {2: False, 3: False}, 2: {3: True}, 3: {2: True}}
    assert cut_off(view({KEY: partition()}, ALL, reach=nobody_reaches_it)) == {KEY}
    assert cut_off(view({KEY: partition()}, ALL, reach={1: {2: True, 3: False}})) == set()
    assert cut_off(view({KEY: partition()}, ALL, reach={2: {1: False, 3: False}})) == set(), "nobody was asked about it"
    assert cut_off(view({KEY: partition(None)}, ALL, reach=nobody_reaches_it)) == set()
    anew = {**ALL, 1: ANEW[1]}
    assert cut_off(view({KEY: partition()}, anew, reach=nobody_reaches_it)) == set(), "it is replaced anyway"


def test_a_replica_whose_life_in_sync_is_not_recorded_has_restarted() -> None:
    held = partition(None, incarnations={})
    assert is_cold(held, ALL)
    assert elect(held, ALL).leader == 1
    assert elect(partition(None, incarnations={2: 1}), ALL).leader == 2, "one that has not restarted comes first"


def test_a_leader_whose_registration_is_older_than_its_election_does_not_lead() -> None:
    held = partition(incarnations={1: 5, 2: 1, 3: 1})
    decided = decide(held, ALL)
    assert decided is not None
    assert decided.leader == 2


def test_a_broker_that_is_not_in_sync_departs_without_a_change() -> None:
    assert departures(view({KEY: partition()}, ALL), 9) == []


def test_a_partition_that_was_moved_is_not_moved_once_more() -> None:
    """It would count twice, and go to another broker than the first time."""
    held: list[tuple[int, tuple[int, ...]]] = [
        *((3, isr) for isr in ((3,), (2, 3, 1), (2, 3), (3, 2))),
        *((1, (1,)), (1, (1,)), (2, (3, 1, 2)), (3, (3,)), (2, (2, 3, 1))),
    ]
    partitions = {("id-t", number): partition(leader, isr, replicas=isr) for number, (leader, isr) in enumerate(held)}
    (moved,) = rebalance(view(partitions, ALL))
    assert (moved.number, moved.state.leader) == (1, 2)


def test_after_a_rebalance_no_partition_would_even_the_leaders_out() -> None:
    random = Random(5)
    for _ in range(200):
        partitions = {}
        for number in range(random.randint(2, 12)):
            isr = tuple(sorted(random.sample((1, 2, 3), random.randint(1, 3))))
            partitions["id-t", number] = partition(random.choice(isr), isr)
        changes = rebalance(view(partitions, ALL))
        moved = {(change.topic_id, change.number): change.state for change in changes}
        assert len(moved) == len(changes)
        led = Counter(state.leader for state in {**partitions, **moved}.values())
        for key in partitions.keys() - moved.keys():
            held = partitions[key]
            least = min(led[member] for member in held.isr)
            assert led[held.leader] - least < 2, (partitions, moved)
        assert all(state.leader_epoch == 6 for state in moved.values())
        assert all(msgspec.structs.replace(state, isr=partitions[key].isr) == state for key, state in moved.items())
