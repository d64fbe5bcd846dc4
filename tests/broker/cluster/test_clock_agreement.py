"""The time of day that brokers agree on although some clocks are wrong."""

from __future__ import annotations

import msgspec
import pytest

from portalmq.broker.cluster.clock_agreement import UNHEARD_MAX_MS, ClockAgreement, agreement
from portalmq.broker.cluster.rpc.brokers import TimeAnswer
from portalmq.broker.partition.clock import TOLERANCE_MS, Clock
from portalmq.control_plane.state import BrokerState
from portalmq.errors import Unavailable

HOUR_MS = 3_600_000
START_MS = 1_700_000_000_000


class HandClock(Clock):
    """A machine's clocks, which only a test moves."""

    def __init__(self, off_ms: int = 0) -> None:
        self.steady_ms = START_MS + off_ms
        self.off_ms = 0
        super().__init__(lambda: self.steady_ms * 1_000_000, lambda: (self.steady_ms + self.off_ms) * 1_000_000)


class Cluster:
    """Brokers that ask each other. `slow_ms` passes before an answer comes."""

    def __init__(self, **off_ms: int) -> None:
        self.clocks = {int(name[1:]): HandClock(off_ms) for name, off_ms in off_ms.items()}
        self.away: set[int] = set()
        self.slow_ms = 0
        self.keepers = {
            broker_id: ClockAgreement(clock, broker_id, self.brokers, Calls(self))
            for broker_id, clock in self.clocks.items()
        }

    def brokers(self) -> dict[int, BrokerState]:
        return {broker_id: BrokerState(f"http://b{broker_id}", 1, "s") for broker_id in self.clocks}

    def pass_time(self, ms: int) -> None:
        for clock in self.clocks.values():
            clock.steady_ms += ms

    def compare(self) -> None:
        for broker_id, keeper in self.keepers.items():
            if broker_id not in self.away:
                keeper.compare()

    def wrong_ms(self, broker_id: int) -> int:
        """Return the difference between the broker's time of day and broker 1's steady clock, which is right."""
        return self.clocks[broker_id].wall_ms() - self.clocks[1].steady_ms


class Calls:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def call(self, broker_id: int, name: str, request: msgspec.Struct, kind: type, *, timeout_s: float) -> TimeAnswer:
        assert name == "time"
        if broker_id in self.cluster.away:
            raise Unavailable("away")
        answer = self.cluster.keepers[broker_id].tell(request)
        self.cluster.pass_time(self.cluster.slow_ms)
        return answer


def test_brokers_that_agree_use_the_clocks_of_their_machines():
    cluster = Cluster(b1=0, b2=-900, b3=900)
    cluster.compare()
    assert [cluster.wrong_ms(n) for n in (1, 2, 3)] == [0, -900, 900]
    assert not any(keeper.differs for keeper in cluster.keepers.values())


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS, 8 * 24 * HOUR_MS])
def test_a_clock_that_jumps_is_not_followed_for_a_moment(jump_ms):
    cluster = Cluster(b1=0, b2=0, b3=0)
    cluster.compare()
    cluster.clocks[2].off_ms = jump_ms
    assert cluster.wrong_ms(2) == 0, "before it has asked another broker"
    for _ in range(3):
        cluster.pass_time(2_000)
        cluster.compare()
        assert cluster.wrong_ms(2) == 0
    assert (cluster.keepers[2].differs, cluster.keepers[2].off_ms) == (True, jump_ms)
    assert not cluster.keepers[1].differs
    cluster.clocks[2].off_ms = 0
    cluster.compare()
    assert not cluster.keepers[2].differs


def test_a_broker_that_starts_with_a_wrong_clock_uses_the_time_of_the_others():
    cluster = Cluster(b1=0, b2=0, b3=HOUR_MS)
    cluster.compare()
    assert cluster.wrong_ms(3) == 0
    assert cluster.keepers[3].differs


def test_a_jump_that_most_confirm_is_followed_by_all():
    cluster = Cluster(b1=0, b2=0, b3=0)
    cluster.compare()
    cluster.clocks[1].off_ms = HOUR_MS
    cluster.compare()
    assert cluster.wrong_ms(1) == 0
    cluster.clocks[2].off_ms = HOUR_MS
    cluster.compare()
    assert [cluster.wrong_ms(n) for n in (1, 2, 3)] == [HOUR_MS] * 3


def test_without_a_majority_each_clock_continues_and_reports_it():
    cluster = Cluster(b1=0, b2=0)
    cluster.compare()
    cluster.clocks[2].off_ms = HOUR_MS
    cluster.compare()
    assert [cluster.wrong_ms(n) for n in (1, 2)] == [0, 0]
    assert all(keeper.differs for keeper in cluster.keepers.values())


def test_a_broker_that_is_cut_off_keeps_the_agreed_time():
    cluster = Cluster(b1=0, b2=0, b3=0)
    cluster.compare()
    cluster.away = {2, 3}
    cluster.clocks[1].off_ms = HOUR_MS
    cluster.compare()
    assert cluster.wrong_ms(1) == 0


def test_a_lone_broker_uses_the_clock_of_its_machine():
    cluster = Cluster(b1=0)
    cluster.compare()
    cluster.clocks[1].off_ms = HOUR_MS
    cluster.compare()
    assert cluster.wrong_ms(1) == HOUR_MS
    assert not cluster.keepers[1].differs


def test_a_slow_answer_makes_no_clock_wrong():
    cluster = Cluster(b1=0, b2=0, b3=0)
    cluster.compare()
    for cluster.slow_ms in (TOLERANCE_MS - 1, TOLERANCE_MS // 2, 10 * TOLERANCE_MS):
        cluster.compare()
        assert [cluster.wrong_ms(n) for n in (1, 2, 3)] == [0, 0, 0]
        assert not any(keeper.differs for keeper in cluster.keepers.values())


def test_a_majority_of_clocks_is_required_and_the_brokers_own_is_preferred():
    assert agreement((0, 0), [(100, 100), (HOUR_MS, HOUR_MS)]) == 0
    assert agreement((HOUR_MS, HOUR_MS), [(100, 100), (300, 300)]) == 100
    assert agreement((0, 0), [(HOUR_MS, HOUR_MS)]) is None
    assert agreement((0, 0), [(HOUR_MS, HOUR_MS), (-HOUR_MS, -HOUR_MS)]) is None


def test_the_time_since_which_some_broker_was_up_outlasts_each_of_them():
    cluster = Cluster(b1=0, b2=5_000, b3=-HOUR_MS)
    cluster.pass_time(HOUR_MS)
    assert {keeper.up_ms() for keeper in cluster.keepers.values()} == {HOUR_MS}
    for broker_id in (1, 2, 3):  # a rolling restart
        clock = cluster.clocks[broker_id]
        cluster.keepers[broker_id] = ClockAgreement(clock, broker_id, cluster.brokers, Calls(cluster))
        assert cluster.keepers[broker_id].up_ms() == 0
        cluster.pass_time(1_000)
        cluster.compare()
    assert {keeper.up_ms() for keeper in cluster.keepers.values()} == {HOUR_MS + 3_000}


def test_it_begins_anew_when_all_brokers_were_down():
    cluster = Cluster(b1=0, b2=0)
    cluster.pass_time(HOUR_MS)
    for broker_id, clock in cluster.clocks.items():
        cluster.keepers[broker_id] = ClockAgreement(clock, broker_id, cluster.brokers, Calls(cluster))
        cluster.pass_time(500)
    cluster.compare()
    assert {keeper.up_ms() for keeper in cluster.keepers.values()} == {1_000}


def test_the_time_is_not_known_before_all_that_were_registered_have_answered_or_are_gone():
    cluster = Cluster(b1=0, b2=0, b3=0, b4=0)
    cluster.pass_time(HOUR_MS)
    started = ClockAgreement(cluster.clocks[1], 1, cluster.brokers, Calls(cluster))
    assert not started.is_up_time_known, "it has asked nobody"
    cluster.away = {2, 3}
    started.compare()
    assert not started.is_up_time_known
    assert started.up_ms() == HOUR_MS, "the fourth has answered"
    cluster.away = {3}
    started.compare()
    assert not started.is_up_time_known
    del cluster.clocks[3]
    started.compare()
    assert started.is_up_time_known
    cluster.away = {2, 4}
    started.compare()
    assert started.is_up_time_known, "each has answered once"


def test_a_broker_that_never_answers_is_waited_for_for_a_while():
    cluster = Cluster(b1=0, b2=0)
    started = cluster.keepers[1]
    cluster.away = {2}
    for is_known in (False, True):
        started.compare()
        assert started.is_up_time_known is is_known
        cluster.pass_time(UNHEARD_MAX_MS + 1)


def test_a_broker_that_is_alone_knows_it_at_once():
    cluster = Cluster(b1=0)
    cluster.compare()
    assert cluster.keepers[1].is_up_time_known
