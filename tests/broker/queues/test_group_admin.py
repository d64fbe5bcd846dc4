"""A group over the whole cluster: its sums, and the partitions that an answer may and may not omit."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace
from support.domain import HandClock

from portalmq import wire
from portalmq.broker.cluster.peers import NotReached
from portalmq.broker.cluster.rpc.queues import EndedGroup, GroupCount, GroupCounts
from portalmq.broker.queues.group_admin import GroupAdmin
from portalmq.control_plane.state import GroupState, PauseState
from portalmq.errors import StorageFull, Unavailable

GROUP = GroupState("g", wire.GroupConfig(), "id")


def count(topic: str, number: int, lag: int = 0) -> GroupCount:
    return GroupCount("g", topic, number, lag, 0, 0, lag, 10 * lag)


@dataclass
class World:
    """Topics with the leaders of their partitions (None: no leader; broker 1 calls), and where the group has begun."""

    leaders: dict[tuple[str, int], int | None]
    begun: dict[tuple[str, int], int] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)
    ended: list[tuple[str, int]] = field(default_factory=list)
    forgotten: bool = False
    paused: bool = False

    def led(self, broker_id: int) -> list[tuple[str, int]]:
        return [where for where, leader in self.leaders.items() if leader == broker_id]

    def counts(self, broker_id: int) -> GroupCounts:
        led = self.led(broker_id)
        return GroupCounts([count(*where, self.begun[where]) for where in led if where in self.begun], led)

    def end(self, broker_id: int) -> EndedGroup:
        here = [where for where in self.led(broker_id) if where in self.begun]
        self.ended += here
        return EndedGroup(here, self.led(broker_id))

    # the parts of the groups, the mirror and the peers that the admin uses

    @property
    def topics(self) -> list[Any]:
        sizes = {topic: sum(name == topic for name, _ in self.leaders) for topic, _ in self.leaders}
        mine = [SimpleNamespace(number=number) for _, number in self.led(1)]
        return [
            SimpleNamespace(name=name, state=SimpleNamespace(partitions=size), led=lambda mine=mine: mine)
            for name, size in sizes.items()
        ]

    @property
    def brokers(self) -> tuple[int, ...]:
        return (1, 2, 3)

    def get(self, name: str) -> GroupState:
        return GROUP

    find = get

    def names(self) -> list[str]:
        return ["g"]

    def set_paused(self, name: str, *, paused: bool, at_ms: int, reason: str, by: str) -> GroupState:
        self.paused = paused
        return replace(GROUP, pause=PauseState(7, paused, at_ms, reason, by))

    @contextmanager
    def deleting(self, name: str) -> Any:
        yield GROUP
        self.forgotten = True

    def call(self, broker_id: int, name: str, request: Any, kind: Any, *, timeout_s: float) -> Any:
        if broker_id in self.away:
            raise NotReached("away", refused=True)
        return self.counts(broker_id) if name == "groups" else self.end(broker_id)

    def group_admin(self) -> GroupAdmin:
        """Create an admin; it is patient only if every leader can be reached."""
        is_whole = not self.away and None not in self.leaders.values()
        admin = GroupAdmin(1, self, self, self, HandClock(), patience_s=60.0 if is_whole else 0.05)  # type: ignore[arg-type]
        admin._count_here = lambda names: self.counts(1)  # type: ignore[method-assign]
        admin._end_here = lambda name, group_id: self.end(1)  # type: ignore[method-assign]
        admin._pause_here = lambda call: self.end(1)  # type: ignore[method-assign]
        return admin


def test_counts_are_summed_over_the_leaders() -> None:
    world = World({("t", 0): 1, ("t", 1): 2, ("t", 2): 3}, {("t", 0): 1, ("t", 1): 2, ("t", 2): 4})
    described = world.group_admin().describe("g")
    assert (described.lag, described.ready, described.oldest_unacked_ms) == (7, 7, 40)


def test_a_lag_that_omits_a_partition_is_refused() -> None:
    world = World({("t", 0): 1, ("t", 1): 2}, {("t", 0): 1, ("t", 1): 2}, away={2})
    with pytest.raises(Unavailable, match="partition 1 of topic 't'") as caught:
        world.group_admin().describe("g")
    assert caught.value.retryable
    assert world.group_admin().describe("g", leave_out=True).lag == 1
    assert [described.lag for described in world.group_admin().describe_all()] == [1]


def test_a_partition_without_a_leader_is_ignored_where_the_group_has_not_begun() -> None:
    """A group begins on all partitions of a topic: if the reachable ones do not know it, no partition does."""
    world = World({("t", 0): 1, ("other", 0): 2, ("other", 1): None}, {("t", 0): 5})
    assert world.group_admin().describe("g").lag == 5


def test_a_topic_without_any_leader_may_have_the_group() -> None:
    world = World({("t", 0): 1, ("other", 0): None}, {("t", 0): 5})
    with pytest.raises(Unavailable, match="topic 'other'"):
        world.group_admin().describe("g")


def test_a_partition_that_two_brokers_report_counts_once() -> None:
    world = World({("t", 0): 2}, {("t", 0): 5})
    world.counts = lambda broker_id: GroupCounts([count("t", 0, 5)], [("t", 0)])  # type: ignore[method-assign]
    assert world.group_admin().describe("g").lag == 5


def test_a_group_ends_at_every_leader_before_it_is_forgotten() -> None:
    world = World({("t", 0): 1, ("t", 1): 2, ("u", 0): 3}, {("t", 0): 0, ("t", 1): 0})
    world.group_admin().delete("g")
    assert sorted(world.ended) == [("t", 0), ("t", 1)]
    assert world.forgotten


def test_a_group_stays_when_a_leader_cannot_be_asked_to_end_it() -> None:
    world = World({("t", 0): 1, ("t", 1): 2}, {("t", 0): 0, ("t", 1): 0}, away={2})
    with pytest.raises(Unavailable):
        world.group_admin().delete("g")
    assert not world.forgotten
    world.away = set()
    world.group_admin().delete("g")
    assert world.forgotten


def test_a_partial_deletion_has_an_unknown_outcome() -> None:
    """The partitions where the group has ended forget its acks."""
    world = World({("t", 0): 1, ("t", 1): 2}, {("t", 0): 0, ("t", 1): 0}, away={2})
    with pytest.raises(Unavailable) as caught:
        world.group_admin().delete("g")
    assert world.ended
    assert caught.value.outcome == "unknown"
    assert caught.value.retryable


def test_a_deletion_that_a_full_disk_refuses_halfway_has_an_unknown_outcome() -> None:
    world = World({("t", 0): 1, ("t", 1): 2}, {("t", 0): 0, ("t", 1): 0})
    admin = world.group_admin()

    def full(name: str, group_id: str) -> EndedGroup:
        world.end(2)
        raise StorageFull("the disk is full")

    admin._end_here = full  # type: ignore[method-assign]
    with pytest.raises(StorageFull) as caught:
        admin.delete("g")
    assert caught.value.outcome == "unknown"


def test_a_group_that_ended_and_was_not_deleted_has_an_unknown_outcome() -> None:
    world = World({("t", 0): 1}, {("t", 0): 0})

    @contextmanager
    def deleting(name: str) -> Any:
        yield GROUP
        raise Unavailable("ZooKeeper does not answer")

    world.deleting = deleting  # type: ignore[method-assign]
    with pytest.raises(Unavailable) as caught:
        world.group_admin().delete("g")
    assert caught.value.outcome == "unknown"


def test_a_pause_reaches_every_leader() -> None:
    world = World({("t", 0): 1, ("t", 1): 2, ("u", 0): 3}, {("t", 0): 0, ("t", 1): 0})
    world.group_admin().pause("g", paused=True)
    assert sorted(world.ended) == [("t", 0), ("t", 1)]


def test_a_pause_that_omits_a_partition_is_unknown_and_a_repeat_completes_it() -> None:
    world = World({("t", 0): 1, ("t", 1): 2}, {("t", 0): 0, ("t", 1): 0}, away={2})
    with pytest.raises(Unavailable) as caught:
        world.group_admin().pause("g", paused=True)
    assert (caught.value.outcome, caught.value.retryable, world.paused) == ("unknown", True, True)
    world.away = set()
    world.group_admin().pause("g", paused=True)
    assert ("t", 1) in world.ended
