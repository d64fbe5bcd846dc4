"""The rates of a cluster: the sums over its brokers, of which some may not answer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from gevent.event import Event

from portalmq.broker.cluster.rpc.brokers import (
    ClusterMark,
    GroupLagNow,
    Rate,
    RatesAnswer,
    RatesRequest,
    Registered,
    TopicRate,
)
from portalmq.broker.dashboard import cluster_rates
from portalmq.broker.dashboard.cluster_rates import ClusterRates, lags_of, there_at
from portalmq.errors import Unavailable

NOW_S = 1_000_000


class FakeRates:
    """The rings of one broker; it notes what it was asked for."""

    def __init__(self, broker_id: int) -> None:
        self.broker_id = broker_id
        self.asked: list[RatesRequest] = []
        self.is_gone = False
        self.incarnation = 1
        self.since, self.upto = NOW_S - 50, NOW_S
        self.registered = [Registered(NOW_S - 51, [(number, 1) for number in (1, 2, 3)])]
        self.series: list[tuple[int, int]] = []
        self.marks: list[ClusterMark] = []

    def answer(self, request: RatesRequest) -> RatesAnswer:
        self.asked.append(request)
        rows = [Rate(second, self.broker_id, 10, 2, 1, 0, 5, 7) for second in range(self.since, self.upto + 1)]
        return RatesAnswer(
            self.broker_id,
            [row for row in rows if row.second > request.after],
            self.marks,
            [GroupLagNow("g", 5, 1, 0, self.broker_id)],
            [TopicRate("t", 1.5, 1, 0)],
            self.series,
            *(3, 4, 0, 1 << 30, False, self.incarnation, self.registered),
        )

    def saw(self, at: int, *brokers: tuple[int, int]) -> None:
        self.registered = [*self.registered, Registered(at, list(brokers))]


class FakeCluster:
    """Three brokers, of which the first has a page open."""

    broker_id = 1
    ready = True

    def __init__(self) -> None:
        self.each = {number: FakeRates(number) for number in (1, 2, 3)}
        self.rates = self.each[1]
        self.mirror = SimpleNamespace(brokers=self.each)
        self.clock = SimpleNamespace(wall_ms=lambda: self.now_ms)
        self.now_ms = (NOW_S + 2) * 1_000
        self.peers = self
        self.overview = SimpleNamespace(
            cluster=lambda: SimpleNamespace(
                controller=1,
                brokers=[
                    SimpleNamespace(id=number, url=f"http://b{number}", live=not each.is_gone)
                    for number, each in self.each.items()
                ],
            ),
            offline_partitions=lambda: 0,
        )

    def call(self, broker_id: int, name: str, request: RatesRequest, kind: type, *, timeout_s: float) -> RatesAnswer:
        assert (name, kind) == ("rates", RatesAnswer)
        if self.each[broker_id].is_gone:
            raise Unavailable("no answer")
        return self.each[broker_id].answer(request)


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def rates(cluster: FakeCluster) -> ClusterRates:
    return ClusterRates(cluster)  # type: ignore[arg-type]


def data_of(event: bytes) -> Any:
    return json.loads(event.partition(b"data: ")[2])


def test_rows_are_sums_over_the_brokers(rates: ClusterRates) -> None:
    rates.enter()
    shown = data_of(rates.history())
    rates.leave()
    assert shown["rows"][-1] == [NOW_S, 6, 30, 6, 3, 0, 15, 7]
    assert len(shown["rows"]) == 51
    assert shown["topics"] == [["t", 4.5, 3, 0]]
    assert shown["groups"] == [["g", 15, 3, 0, 3]]
    assert [broker["led"] for broker in shown["brokers"]] == [3, 3, 3]


def test_only_newer_rows_are_asked_for_also_while_a_broker_is_gone(cluster: FakeCluster, rates: ClusterRates) -> None:
    rates.enter()
    cluster.each[3].is_gone = True
    for second in range(NOW_S + 1, NOW_S + 5):
        cluster.now_ms = (second + 2) * 1_000
        for each in cluster.each.values():
            each.upto = second
        rates._ask()
        rates._tick()
    rates.leave()
    assert [request.after for request in cluster.rates.asked] == [0, *range(NOW_S, NOW_S + 4)]
    shown = data_of(rates.event)
    assert shown["rows"] == [[NOW_S + 4]], "what the third one does is unknown"
    assert [(broker["live"], broker["answers"]) for broker in shown["brokers"]] == [(True, True)] * 2 + [(False, False)]


def each_second(cluster: FakeCluster, rates: ClusterRates, *seconds: int) -> list[Any]:
    """Let the seconds pass, and return the rows of the last event."""
    for second in seconds:
        cluster.now_ms = (second + 2) * 1_000
        for each in cluster.each.values():
            each.upto = second
        rates._ask()
        rates._tick()
    return data_of(rates.event)["rows"]


def test_the_past_of_a_broker_that_is_gone_is_unknown_and_not_zero(cluster: FakeCluster, rates: ClusterRates) -> None:
    cluster.mirror.brokers = {number: cluster.each[number] for number in (1, 2)}
    cluster.each[1].saw(NOW_S - 10, (1, 1), (2, 1))
    cluster.each[2].saw(NOW_S - 9, (1, 1), (2, 1))
    rates.enter()
    rows = data_of(rates.history())["rows"]
    rates.leave()
    assert rows[:43] == [[second] for second in range(NOW_S - 50, NOW_S - 7)]
    assert rows[43:] == [[second, 3, 20, 4, 2, 0, 10, 7] for second in range(NOW_S - 7, NOW_S + 1)]


def test_a_broker_whose_past_was_seen_while_it_was_there_is_known(cluster: FakeCluster, rates: ClusterRates) -> None:
    rates.enter()
    cluster.mirror.brokers = {number: cluster.each[number] for number in (1, 2)}
    for number in (1, 2):
        cluster.each[number].saw(NOW_S, (1, 1), (2, 1))
    each_second(cluster, rates, NOW_S + 1, NOW_S + 2)
    rows = data_of(rates.history())["rows"]
    rates.leave()
    assert rows[-3:] == [[NOW_S, 6, 30, 6, 3, 0, 15, 7], [NOW_S + 1], [NOW_S + 2, 3, 20, 4, 2, 0, 10, 7]]


def test_a_broker_that_started_again_does_not_know_what_it_did_before(
    cluster: FakeCluster, rates: ClusterRates
) -> None:
    cluster.each[2].incarnation, cluster.each[2].since = 2, NOW_S - 4
    cluster.each[2].registered = [Registered(NOW_S - 5, [(1, 1), (2, 2), (3, 1)])]
    for number in (1, 3):
        cluster.each[number].saw(NOW_S - 9, (1, 1), (3, 1))
        cluster.each[number].saw(NOW_S - 5, (1, 1), (2, 2), (3, 1))
    rates.enter()
    rows = data_of(rates.history())["rows"]
    rates.leave()
    assert [len(row) > 1 for row in rows[-12:]] == [False] * 4 + [True] * 8
    assert [row[1] for row in rows[-8:]] == [4, 4, 4, 6, 6, 6, 6, 6]


def test_what_a_broker_tells_late_fills_the_gap(cluster: FakeCluster, rates: ClusterRates) -> None:
    rates.enter()
    cluster.each[3].is_gone = True
    assert each_second(cluster, rates, NOW_S + 1, NOW_S + 2) == [[NOW_S + 2]]
    cluster.each[3].is_gone = False
    rows = each_second(cluster, rates, NOW_S + 3)
    rates.leave()
    assert rows == [[NOW_S + second, 6, 30, 6, 3, 0, 15, 7] for second in (1, 2, 3)]
    assert cluster.each[3].asked[-1].after == NOW_S


def test_what_happened_before_anybody_remembers_is_unknown(cluster: FakeCluster, rates: ClusterRates) -> None:
    for each in cluster.each.values():
        each.registered = [Registered(NOW_S - 20, [(number, 1) for number in (1, 2, 3)])]
    rates.enter()
    rows = data_of(rates.history())["rows"]
    rates.leave()
    assert [len(row) > 1 for row in rows] == [False] * 31 + [True] * 20


@pytest.mark.parametrize(
    ("second", "length_s", "there"),
    [
        (100, 1, None),
        (101, 1, {(1, 1)}),
        (110, 1, {(1, 1)}),
        (111, 1, {(1, 1), (2, 1)}),
        (120, 1, {(1, 1), (2, 1)}),
        (121, 1, {(1, 1), (2, 1), (2, 2)}),
        (122, 1, {(2, 2)}),
        (160, 60, {(1, 1), (2, 1), (2, 2)}),
        (190, 60, {(2, 2)}),
    ],
)
def test_who_was_there_in_an_interval(second: int, length_s: int, there: set[tuple[int, int]] | None) -> None:
    history = [Registered(100, [(1, 1)]), Registered(110, [(1, 1), (2, 1)]), Registered(120, [(2, 2)])]
    assert there_at([history, []], second, length_s) == there


def test_lags_are_unknown_where_a_broker_does_not_tell_and_the_last_readings_count(cluster: FakeCluster) -> None:
    begun = NOW_S // 5 * 5
    cluster.each[1].series = [(begun, 1), (begun + 5, 2), (begun + 10, 3), (begun + 15, 4)]
    cluster.each[2].series = [(begun + 1, 10), (begun + 12, 30)]
    answers = [cluster.each[number].answer(RatesRequest()) for number in (1, 2, 3)]
    known = [(begun, 11), (begun + 5, 12), (begun + 10, 33), (begun + 15, 34)]
    assert lags_of(answers) == known
    assert lags_of(answers[:2]) == [(moment, None) for moment, _ in known]


def test_events_are_those_that_this_broker_sees_and_full_disks_of_all(
    cluster: FakeCluster, rates: ClusterRates
) -> None:
    for number, each in cluster.each.items():
        each.marks = [
            ClusterMark(NOW_S * 1_000, "gone", "broker 9 is gone", number),
            ClusterMark(NOW_S * 1_000 + number, "disk", f"the disk of broker {number} is full", number),
        ]
    rates.enter()
    rates._ask()
    rates.leave()
    texts = [mark[2] for mark in data_of(rates.history())["marks"]]
    assert texts == ["broker 9 is gone", *(f"the disk of broker {number} is full" for number in (1, 2, 3))]


def test_nobody_is_asked_while_no_page_is_open(cluster: FakeCluster, rates: ClusterRates) -> None:
    rates.enter()
    rates.enter()
    rates.leave()
    assert rates._greenlet is not None
    assert not rates._greenlet.dead
    rates.leave()
    rates._greenlet.join(5)
    assert rates._greenlet.dead


def test_two_pages_that_open_at_once_both_have_a_past(
    cluster: FakeCluster, rates: ClusterRates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_rates, "PAST_WITHIN_S", 60.0)
    answer_now, may_answer = cluster.call, Event()

    def call(*arguments: Any, timeout_s: float) -> RatesAnswer:
        assert may_answer.wait(60)
        return answer_now(*arguments, timeout_s=timeout_s)

    cluster.call = call  # type: ignore[method-assign]

    def page() -> int:
        rates.enter()
        return len(data_of(rates.history())["rows"])

    pages = [gevent.spawn(page) for _ in range(2)]
    gevent.sleep(0)
    may_answer.set()
    assert [each.get(timeout=60) for each in pages] == [51, 51]
    rates.leave()
    rates.leave()
