"""Several brokers that look for the coordinator of one group, over one control plane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import gevent
import pytest
from support.domain import HandClock

from portalmq.broker.cluster.peers import NotAnswered
from portalmq.broker.cluster.rpc.streams import Coordinate
from portalmq.broker.streams.group_coordinators import GroupCoordinators
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState, GroupState
from portalmq.control_plane.stream_groups import StreamGroups
from portalmq.errors import (
    GroupNotFound,
    IllegalGeneration,
    NotLeader,
    OffsetOutOfRange,
    PortalMQError,
    Unavailable,
)

IDS = (1, 2, 3)


class Cluster:
    """Brokers that coordinate groups, and reach each other, but those in `silent`: a call to one of them has no answer;
    the first one runs `meanwhile`."""

    def __init__(self, plane: Standalone) -> None:
        self.silent: set[int] = set()
        self.meanwhile: Callable[[], object] = lambda: None
        self.store = StreamGroups(plane)  # type: ignore[arg-type]
        self.group: GroupState = Catalog(plane).put_group("g", {"mode": "stream"})[0]  # type: ignore[arg-type]
        groups = SimpleNamespace(
            get=lambda name, mode: self.group,
            get_same=lambda name, group_id: self.group,
            check_same=lambda group: None,
        )
        mirror = SimpleNamespace(
            brokers={broker_id: BrokerState(f"http://broker-{broker_id}", 1, "") for broker_id in IDS},
            topics={},
            url_of=lambda broker_id: f"http://broker-{broker_id}",
        )
        parts: Any = (self.store, groups, None, mirror, SimpleNamespace(call=self._call), HandClock())
        self.brokers: Mapping[int, GroupCoordinators] = {
            broker_id: GroupCoordinators((broker_id, 1), *parts) for broker_id in IDS
        }

    def _call(self, broker_id: int, name: str, request: Coordinate, kind: object, *, timeout_s: float) -> object:
        if broker_id in self.silent:
            meanwhile, self.meanwhile = self.meanwhile, lambda: None
            meanwhile()
            raise NotAnswered("no answer in time")
        return self.brokers[broker_id].answer(request)

    def coordinator(self) -> int | None:
        """The broker that the control plane names."""
        held = self.store.roster(self.group.group_id, sure=True)
        return held.value.coordinator[0] if held else None


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    plane = Standalone(tmp_path)
    plane.start()
    yield Cluster(plane)
    plane.close()


def test_a_silent_coordinator_is_replaced(cluster: Cluster) -> None:
    cluster.brokers[1].leave("g", "nobody")
    cluster.silent.add(1)
    cluster.brokers[2].leave("g", "nobody")
    assert cluster.coordinator() == 2


def test_one_that_took_over_meanwhile_is_not_replaced(cluster: Cluster) -> None:
    """A call to a paused broker may end long after another one took over."""
    cluster.brokers[1].leave("g", "nobody")
    cluster.silent.add(1)
    cluster.meanwhile = lambda: cluster.brokers[2].leave("g", "nobody")
    with pytest.raises(IllegalGeneration):
        cluster.brokers[3].heartbeat("g", "nobody", 1)
    assert cluster.coordinator() == 2


def test_its_successor_answers_however_long_the_call_to_it_took(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.brokers[1].leave("g", "nobody")
    cluster.silent.add(1)

    def take_long() -> None:
        cluster.brokers[2].leave("g", "nobody")
        now_s = time.monotonic()
        monkeypatch.setattr("portalmq.broker.streams.group_coordinators.time.monotonic", lambda: now_s + 15.0)

    cluster.meanwhile = take_long
    cluster.brokers[3].leave("g", "nobody")
    assert cluster.coordinator() == 2


def test_what_a_silent_coordinator_may_have_done_is_unknown(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.broker.streams.group_coordinators.PATIENCE_S", 0.0)
    cluster.brokers[1].leave("g", "nobody")
    cluster.silent.add(1)
    cluster.meanwhile = lambda: cluster.brokers[2].leave("g", "nobody")
    with pytest.raises(Unavailable) as raised:
        cluster.brokers[3].leave("g", "nobody")
    assert raised.value.outcome == "unknown"


@pytest.mark.parametrize("refusal", [OffsetOutOfRange, IllegalGeneration, GroupNotFound])
def test_a_refusal_by_its_successor_leaves_it_unknown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, refusal: type[PortalMQError]
) -> None:
    """The silent one may have moved the group: then a repeat of the seek is out of range."""
    cluster.brokers[1].leave("g", "nobody")
    cluster.silent.add(1)

    def refuse(*_: object) -> NoReturn:
        raise refusal("by the successor")

    monkeypatch.setattr(cluster.brokers[3], "_ask", refuse)
    with pytest.raises(refusal) as raised:
        cluster.brokers[3].leave("g", "nobody")
    assert raised.value.outcome == "unknown"


def test_a_group_that_is_deleted_after_an_unanswered_call_leaves_it_unknown(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.brokers[1].leave("g", "nobody")
    cluster.silent.add(1)

    def refuse(_: GroupState) -> NoReturn:
        raise Unavailable("the group was just deleted")

    cluster.meanwhile = lambda: monkeypatch.setattr(cluster.brokers[3]._groups, "check_same", refuse)
    with pytest.raises(Unavailable, match="just deleted") as raised:
        cluster.brokers[3].leave("g", "nobody")
    assert raised.value.outcome == "unknown"


def test_a_refusal_without_an_unknown_try_is_final(cluster: Cluster) -> None:
    with pytest.raises(IllegalGeneration) as raised:
        cluster.brokers[1].heartbeat("g", "nobody", 1)
    assert raised.value.outcome == "not_applied"


def test_a_call_ends_when_its_successor_gets_no_answers_either(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portalmq.broker.streams.group_coordinators.PATIENCE_S", 0.2)
    cluster.brokers[1].leave("g", "nobody")
    cluster.silent.add(1)

    def no_answer(*_: object) -> NoReturn:
        raise NotAnswered("the leader of a partition")

    monkeypatch.setattr(cluster.brokers[3], "_ask", no_answer)
    with gevent.Timeout(60), pytest.raises(NotAnswered):
        cluster.brokers[3].leave("g", "nobody")


def test_a_call_without_forwarding_names_the_one_that_took_over(cluster: Cluster) -> None:
    cluster.brokers[1].leave("g", "nobody")
    third = cluster.brokers[3]
    look_up = third._look_up

    def while_another_takes_over(group: GroupState) -> tuple[int, int] | None:
        where = look_up(group)
        third._mirror.brokers.pop(1, None)
        cluster.brokers[2].leave("g", "nobody")
        return where

    third._look_up = while_another_takes_over  # type: ignore[method-assign, assignment]
    with pytest.raises(NotLeader) as raised:
        third.leave("g", "nobody", forward=False)
    assert raised.value.extra["leader"] == 2
    assert cluster.coordinator() == 2
