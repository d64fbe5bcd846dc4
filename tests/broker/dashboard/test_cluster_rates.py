"""The rates of a cluster: the sums over its brokers, of which some may not answer."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import gevent
import pytest
from gevent.event import Event

from portalmq.broker.cluster.rpc.brokers import ClusterMark, GroupLagNow, Rate, RatesAnswer, RatesRequest, TopicRate
from portalmq.broker.dashboard import cluster_rates
from portalmq.broker.dashboard.cluster_rates import ClusterRates
from portalmq.errors import Unavailable

NOW_S = 1_000_000


class FakeRates:
    """The rings of one broker; it notes what it was asked for."""

    def __init__(self, broker_id: int) -> None:
        self.broker_id = broker_id
        self.asked: list[RatesRequest] = []
        self.is_gone = False
        self.upto = NOW_S
        self.marks: list[ClusterMark] = []

    def answer(self, request: RatesRequest) -> RatesAnswer:
        self.asked.append(request)
        rows = [Rate(second, self.broker_id, 10, 2, 1, 0, 5, 7) for second in range(NOW_S - 50, self.upto + 1)]
        return RatesAnswer(
            self.broker_id,
            [row for row in rows if row.second > request.after],
            self.marks,
            [GroupLagNow("g", 5, 1, 0, self.broker_id)],
            [TopicRate("t", 1.5, 1, 0)],
            *([], 3, 4, 0, 1 << 30, False),
        )


class FakeCluster:
    """Three brokers, of which the first has a page open."""

    broker_id = 1
    ready = True

    def __init__(self) -> None:
        self.each = {number: FakeRates(number) for number in (1, 2, 3)}
        self.rates = self.each[1]
        self.mirror = SimpleNamespace(brokers=dict.fromkeys(self.each))
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
    assert shown["rows"] == [[NOW_S + 4, 3, 20, 4, 2, 0, 10, 7]]
    assert [(broker["live"], broker["answers"]) for broker in shown["brokers"]] == [(True, True)] * 2 + [(False, False)]


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
