"""Elections among replicas that have all restarted: the replicas that are queried, and the length of the wait."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from support.domain import HandClock

from portalmq.broker.cluster.cold_elections import ASKED_AT_ONCE, WAIT_FOR_ABSENT_MS, ColdElections
from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.control_plane.state import BrokerState, PartitionState
from portalmq.errors import Unavailable

KEY = ("id", 0)
HELD = PartitionState(1, 7, (1, 2, 3), (1, 2, 3), {n: f"s{n}" for n in (1, 2, 3)}, {})
LIVE = {n: BrokerState(f"http://b{n}", 2, f"s{n}") for n in (1, 2, 3)}


class Brokers:
    """Answers by broker; one that is missing does not answer."""

    def __init__(self, **ends: tuple[int, int] | None) -> None:
        self.log_ends = {
            int(name[1:]): ReplicaLogEnd(f"s{name[1:]}", 2, *end, 0) if end else None for name, end in ends.items()
        }
        self.asked: list[int] = []

    def __call__(self, broker_id: int, keys: Sequence[tuple[str, int]]) -> list[ReplicaLogEnd | None]:
        self.asked.append(len(keys))
        if broker_id not in self.log_ends:
            raise Unavailable("cut off")
        return [self.log_ends[broker_id]] * len(keys)


def test_the_election_is_held_at_once_when_all_have_answered():
    elections = ColdElections(Brokers(b1=(7, 9), b2=(7, 10), b3=(6, 30)), HandClock())
    assert elections.log_ends({KEY: HELD}, LIVE) == {KEY: {1: (7, 9), 2: (7, 10), 3: (6, 30)}}


def test_the_election_waits_a_bounded_time_for_absent_replicas():
    for live, brokers in (
        ({n: LIVE[n] for n in (1, 2)}, Brokers(b1=(7, 9), b2=(7, 10), b3=(7, 10))),
        (LIVE, Brokers(b1=(7, 9), b2=(7, 10))),
        (LIVE, Brokers(b1=(7, 9), b2=(7, 10), b3=None)),
    ):
        clock = HandClock()
        elections = ColdElections(brokers, clock)
        assert elections.log_ends({KEY: HELD}, live) == {}
        assert elections.is_waiting
        clock.advance(WAIT_FOR_ABSENT_MS - 1)
        assert elections.log_ends({KEY: HELD}, live) == {}
        clock.advance(1)
        assert elections.log_ends({KEY: HELD}, live) == {KEY: {1: (7, 9), 2: (7, 10)}}
        assert elections.log_ends({}, live) == {}
        assert not elections.is_waiting


def test_a_replica_that_is_damaged_or_of_another_store_never_leads():
    brokers = Brokers(b1=(7, 9), b2=(7, 10), b3=(7, 10))
    brokers.log_ends[1] = msgspec.structs.replace(brokers.log_ends[1], lossy="its log ends at 9")
    brokers.log_ends[2] = msgspec.structs.replace(brokers.log_ends[2], store_uuid="s2/1")
    elections = ColdElections(brokers, HandClock())
    assert elections.log_ends({KEY: HELD}, LIVE) == {KEY: {1: None, 2: None, 3: (7, 10)}}


def test_one_request_queries_many_partitions():
    brokers = Brokers(b1=(7, 9), b2=(7, 10), b3=(7, 10))
    elections = ColdElections(brokers, HandClock())
    cold = {("id", number): HELD for number in range(ASKED_AT_ONCE + 1)}
    assert len(elections.log_ends(cold, LIVE)) == len(cold)
    assert sorted(brokers.asked) == [1, 1, 1, *[ASKED_AT_ONCE] * 3]
