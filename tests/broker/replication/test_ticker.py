"""Ticks of all partitions at little cost, and the probes of overdue followers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gevent
import pytest
from support.replicas import Group, eventually, replicas

from portalmq.broker.core.replica.events import LeaseRenewed, Tick
from portalmq.broker.partition.writer import Pending
from portalmq.broker.replication import ticker as ticker_module
from portalmq.broker.replication.ticker import QUIET_EVERY_TICKS, SCRUB_PART_S, Ticker
from portalmq.broker.storage.batch import Batch, BatchKind


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    with replicas(tmp_path, 3) as it:
        eventually(lambda: it.leader.serves and it.agree())
        yield it


def ticker_of(group: Group, **more) -> Ticker:
    return Ticker(group.hosts[1], lambda: [group.partition(1)], **more)


def heard(partition, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    told: list[object] = []
    original = partition.step

    def step(event) -> None:
        told.append(event)
        original(event)

    monkeypatch.setattr(partition, "step", step)
    return told


def test_a_quiet_partition_gets_every_third_tick(group, monkeypatch):
    ticker = ticker_of(group)
    eventually(lambda: group.leader.is_quiet)
    told = heard(group.leader, monkeypatch)
    for _ in range(9):
        ticker.tick()
    assert sum(isinstance(event, Tick) for event in told) == 3


def test_a_waiting_partition_gets_every_tick(group, monkeypatch):
    ticker = ticker_of(group)
    group.cut(3)
    eventually(lambda: group.state.isr == (1, 2))
    eventually(lambda: not group.leader.is_quiet)
    told = heard(group.leader, monkeypatch)
    for _ in range(9):
        ticker.tick()
    assert sum(isinstance(event, Tick) for event in told) == 9


def test_a_partition_without_followers_gets_ticks_while_acks_wait_for_the_lease_of_an_earlier_leader(tmp_path):
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        assert not group.leader.needs_ticks
        ack = Pending(Batch(0, 1, 0, BatchKind.ACK, 0, 0))
        group.leader.uncommitted.unsettled.append(ack)
        ticker = ticker_of(group)
        for _ in range(QUIET_EVERY_TICKS):
            ticker.tick()
        assert ack.done.is_set()
        assert not group.leader.needs_ticks


@pytest.mark.parametrize(("partitions", "looks"), [(1, 10), (3_000, 10), (6_000, 5), (10_000, 3), (20_000, 3)])
def test_of_many_partitions_few_are_looked_at_each_tick(group, partitions, looks):
    class Idle:
        seen = 0

        @property
        def needs_ticks(self) -> bool:
            Idle.seen += 1
            return False

    ticker = Ticker(group.hosts[1], lambda: [Idle()] * partitions)
    for _ in range(30):
        ticker.tick()
    assert Idle.seen == looks * partitions


def test_partitions_get_the_lease_only_when_it_was_renewed(group, monkeypatch):
    ticker = ticker_of(group)
    group._beat.kill()
    told = heard(group.leader, monkeypatch)
    monkeypatch.setattr(group.hosts[1].membership, "answered_ms", lambda: 4_711)
    for _ in range(3):
        ticker.tick()
    assert [event for event in told if isinstance(event, LeaseRenewed)] == [LeaseRenewed(4_711)]


def test_a_follower_that_is_gone_leaves_the_isr_before_its_lag_does(group):
    lag_ms = group.leader.replica.lag_ms
    group.leader.replica.in_sync.lag_ms = 60_000
    group.stop(3)
    ticker = ticker_of(group, polls=group.hosts[1].replication.polls, refuses=lambda url: url == "http://broker-3")
    began_ms = group.clock.now_ms()

    def looked_after() -> bool:
        ticker.probe_overdue_followers()
        return group.state.isr == (1, 2)

    eventually(looked_after)
    assert group.clock.now_ms() - began_ms < 10_000
    assert (3, True) in group.hosts[1].membership.suspected
    assert lag_ms < 60_000


def test_a_live_follower_that_does_not_fetch_is_suspected_and_stays_in_sync(group):
    """The follower may not reach this broker: the controller queries the other brokers."""
    ticker = ticker_of(group, polls=lambda broker_id: False, refuses=lambda url: False)
    group.leader.replica.in_sync.began_ms -= 10_000
    for known in group.leader.replica.in_sync._followers.values():
        known.fetched_ms -= 10_000
    ticker.probe_overdue_followers()
    eventually(lambda: (3, False) in group.hosts[1].membership.suspected)
    assert group.state.isr == (1, 2, 3)


def test_a_follower_with_a_parked_fetch_is_not_probed(group):
    probed: list[str] = []
    ticker = ticker_of(group, polls=lambda broker_id: True, refuses=lambda url: bool(probed.append(url)))
    group.leader.replica.in_sync.began_ms -= 10_000
    for known in group.leader.replica.in_sync._followers.values():
        known.fetched_ms -= 10_000
    ticker.probe_overdue_followers()
    gevent.sleep(0)
    assert probed == []


def test_a_failing_partition_does_not_keep_the_lease_from_the_others(group, monkeypatch):
    def fail(event) -> None:
        raise RuntimeError("a bug")

    broken, whole = group.partition(2), group.partition(1)
    told = heard(whole, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(broken, "step", fail)
        Ticker(group.hosts[1], lambda: [broken, whole]).tick()
    assert any(isinstance(event, LeaseRenewed) for event in told)


def test_ticks_continue_after_a_failed_one(group, monkeypatch):
    ticker = ticker_of(group)
    beats: list[int] = []

    def fail() -> None:
        beats.append(1)
        raise RuntimeError("a bug")

    monkeypatch.setattr(ticker, "tick", fail)
    ticker.start()
    eventually(lambda: len(beats) >= 3)
    ticker.close()


@pytest.mark.parametrize(("is_sealed", "pause_s"), [(True, 0.0), (False, SCRUB_PART_S)])
def test_only_what_is_checked_again_in_every_round_is_checked_slowly(group, monkeypatch, is_sealed, pause_s):
    pauses: list[float] = []
    parts = iter([True, True, False])
    retention = SimpleNamespace(scrub=lambda: next(parts), scrubs_sealed=is_sealed)
    monkeypatch.setattr(ticker_module, "monotonic", lambda: 0.0)
    monkeypatch.setattr(ticker_module, "gevent", SimpleNamespace(sleep=pauses.append))
    ticker_of(group)._scrub_one(SimpleNamespace(closed=False, rebuild_reason="", retention=retention))
    assert pauses == [pause_s, pause_s]
