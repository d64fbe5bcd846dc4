"""The rings of rates, lags and marks that a broker keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.domain import Fixture, running

from portalmq.broker.cluster.rpc.brokers import RatesRequest
from portalmq.broker.messages import rates as module
from portalmq.broker.messages.rates import Rates
from portalmq.control_plane.mirror import Changes
from portalmq.control_plane.state import BrokerState


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as fixture:
        yield fixture


@pytest.fixture
def rates(fixture: Fixture) -> Rates:
    return fixture.broker.rates


def test_a_row_is_what_was_counted_since_the_one_before_per_second(fixture: Fixture, rates: Rates) -> None:
    metrics = fixture.broker.metrics
    metrics.published("t", 30, 600)
    metrics.delivered("t", "g", 20)
    metrics.acked("t", "g", 10)
    fixture.clock.advance(2_000)
    rates.sample()
    metrics.dead("t", "g", 1)
    fixture.clock.advance(1_000)
    rates.sample()
    before, first, second = rates.seconds
    assert (first.published, first.bytes_published, first.delivered, first.acked, first.dead) == (15, 300, 10, 5, 0)
    assert (second.published, second.dead, second.second - first.second) == (0, 1, 1)
    assert (before.published, before.second) == (15, first.second - 1), "two seconds passed"


def test_a_broker_that_stood_still_has_a_row_for_each_second_and_minute(fixture: Fixture, rates: Rates) -> None:
    fixture.clock.advance(1_000)
    rates.sample()
    began = rates.seconds[-1].second
    fixture.broker.metrics.published("t", 1_200, 20)
    fixture.clock.advance(120_000)
    rates.sample()
    assert [row.second for row in rates.seconds] == list(range(began, began + 121))
    assert {row.published for row in list(rates.seconds)[1:]} == {10}
    assert [row.second for row in rates.minutes] == [began // 60 * 60 + 60, began // 60 * 60 + 120]


def test_a_clock_that_jumps_far_makes_no_more_rows_than_are_kept(fixture: Fixture, rates: Rates) -> None:
    fixture.clock.advance(400 * 86_400_000)
    rates.sample()
    assert len(rates.seconds) == module.SECONDS_KEPT
    assert len(rates.minutes) == module.MINUTES_KEPT
    assert rates.seconds[-1].second == fixture.clock.wall_ms() // 1_000


def test_rows_are_bounded_and_minutes_are_kept_longer(fixture: Fixture, rates: Rates) -> None:
    for _ in range(module.SECONDS_KEPT + 200):
        fixture.broker.metrics.published("t", 2, 20)
        fixture.clock.advance(1_000)
        rates.sample()
    assert len(rates.seconds) == module.SECONDS_KEPT
    assert len(rates.minutes) == (module.SECONDS_KEPT + 200) // 60
    assert [row.published for row in rates.minutes][1:] == pytest.approx([2.0] * (len(rates.minutes) - 1))
    assert all(row.second % 60 == 0 for row in rates.minutes)


def test_a_clock_that_is_put_back_makes_no_row(fixture: Fixture, rates: Rates) -> None:
    fixture.clock.advance(-5_000)
    rates.sample()
    assert not rates.seconds


def test_a_full_disk_is_marked_once_and_so_is_its_end(fixture: Fixture, rates: Rates) -> None:
    for full in (False, True, True, False, False):
        fixture.disk.is_full = full
        fixture.clock.advance(1_000)
        rates.sample()
    assert [(mark.kind, mark.text) for mark in rates.marks] == [
        ("disk", "the disk of broker 1 is full"),
        ("disk", "broker 1 has room on its disk again"),
    ]


def held(leader: int | None, *isr: int) -> Any:
    return SimpleNamespace(value=SimpleNamespace(leader=leader, isr=frozenset(isr)))


class TestMarks:
    @pytest.fixture
    def mirror(self, fixture: Fixture) -> Any:
        return SimpleNamespace(partitions={}, brokers={})

    @pytest.fixture
    def rates(self, fixture: Fixture, mirror: Any) -> Rates:
        host: Any = SimpleNamespace(
            broker_id=1, mirror=mirror, clock=fixture.clock, metrics=fixture.broker.metrics, disk_is_full=lambda: False
        )
        return Rates(host)

    def texts(self, rates: Rates) -> list[str]:
        return [mark.text for mark in rates.marks]

    def test_what_is_found_at_the_start_is_no_event(self, rates: Rates, mirror: Any) -> None:
        mirror.partitions = {("t", 0): held(1, 1, 2), ("t", 1): held(None)}
        mirror.brokers = {1: BrokerState("u", 1, "s"), 2: BrokerState("u", 1, "s")}
        rates.on_cluster_changed(Changes(brokers=True, partitions=set(mirror.partitions), everything=True))
        assert self.texts(rates) == []

    def test_a_fail_over_is_one_mark_however_many_partitions_move(
        self, rates: Rates, mirror: Any, fixture: Fixture
    ) -> None:
        keys = {("t", number) for number in range(3)}
        for leader, isr in ((2, (1, 2, 3)), (None, (1, 2, 3)), (3, (1, 3))):
            mirror.partitions = {key: held(leader, *isr) for key in keys}
            rates.on_cluster_changed(Changes(partitions=keys))
            fixture.clock.advance(500)
            rates.sample()
        assert self.texts(rates) == []
        at_ms = fixture.clock.wall_ms() - 500
        fixture.clock.advance(3_000)
        rates.sample()
        assert {mark.at_ms for mark in rates.marks} == {at_ms}
        assert self.texts(rates) == ["broker 3 leads 3 more partitions", "3 partitions with fewer replicas in sync"]

    def test_brokers_that_go_and_come(self, rates: Rates, mirror: Any) -> None:
        for live in ((1, 2), (1,), (1, 2)):
            mirror.brokers = {each: BrokerState("u", 1, "s") for each in live}
            rates.on_cluster_changed(Changes(brokers=True))
        assert self.texts(rates) == ["broker 2 is gone", "broker 2 has joined"]

    def test_who_was_registered_is_kept_by_incarnation(self, rates: Rates, mirror: Any, fixture: Fixture) -> None:
        began = fixture.clock.wall_ms() // 1_000
        for live in ({1: 1, 2: 1}, {1: 1, 2: 1}, {1: 1}, {1: 1, 2: 2}):
            mirror.brokers = {each: BrokerState("u", incarnation, "s") for each, incarnation in live.items()}
            rates.on_cluster_changed(Changes(brokers=True))
            fixture.clock.advance(1_000)
        assert [(each.second - began, each.brokers) for each in rates.registered] == [
            (0, [(1, 1), (2, 1)]),
            (2, [(1, 1)]),
            (3, [(1, 1), (2, 2)]),
        ]

    def test_marks_are_bounded(self, rates: Rates) -> None:
        for n in range(module.MARKS_KEPT + 5):
            rates.mark("isr", str(n))
        assert len(rates.marks) == module.MARKS_KEPT


def test_another_broker_gets_what_is_newer_and_the_largest(fixture: Fixture, rates: Rates) -> None:
    for n in range(5):
        fixture.broker.metrics.published(f"t{n}", 10 * n, 10)
    rates.read_topics()
    for n in range(5):
        fixture.broker.metrics.published(f"t{n}", 10 * n, 10)
    rates.read_topics()
    for _ in range(3):
        fixture.clock.advance(1_000)
        rates.sample()
    answer = rates.answer(RatesRequest(after=rates.seconds[0].second, top=2, topics=["t1", "t9"]))
    assert len(answer.rows) == 2
    assert [topic.name for topic in answer.topics] == ["t4", "t3", "t1"]
    assert answer.disk_free_bytes > 0
