"""A broker's start survives a ZooKeeper that goes away during it: the broker repeats its requests within a limit."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import gevent
import pytest
from support.failing_plane import FailingPlane
from support.members import until

from portalmq.broker.cluster import retry_budget as patience
from portalmq.broker.cluster.exits import EX_CANTCREAT, EX_UNAVAILABLE, EX_USAGE, StartupError
from portalmq.broker.cluster.retry_budget import RetryBudget
from portalmq.broker.server import composition as server
from portalmq.broker.server import preflight
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.server.preflight import IdentityRequest
from portalmq.broker.storage.disk import DataDirectory
from portalmq.control_plane import zookeeper
from portalmq.control_plane.catalog import BrokerIdTaken, Catalog
from portalmq.control_plane.plane import ControlPlane, Delete, OutcomeUnknown, PlaneRefused, PlaneUnavailable
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import CLUSTER_ID
from portalmq.errors import Unavailable

# A start makes fewer calls.
CALLS_MAX = 100
URL = "http://127.0.0.1:1"  # no server listens there


class Ended(Exception):
    """The exit of the process with this code."""


class Running:
    """A control plane that runs already: `start` does nothing."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    def start(self) -> None:
        pass


class Machine:
    """A broker's data directory, and the control plane of its cluster, which has had another member."""

    def __init__(self, path: Path) -> None:
        self.plane = Standalone(path / "zookeeper")
        self.plane.start()
        self.catalog = Catalog(self.plane)
        self.catalog.claim_broker_id("another", 2)
        self.directory = DataDirectory.open(path / "broker", cluster_id=self.catalog.cluster_id(), broker_id=1)
        self._process: server.BrokerProcess | None = None

    def start(self, fails: int, fault: str, *, for_good: bool = False, wait_s: float = 60.0) -> FailingPlane:
        """Start the broker as its worker does; one call to the control plane fails."""
        plane = FailingPlane(Running(self.plane), fails, fault, for_good=for_good)  # type: ignore[arg-type]
        config = BrokerConfig(
            data_dir=self.directory.path, zookeeper="zookeeper.test:2181", port=5000, zookeeper_wait_s=wait_s
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(zookeeper, "ZooKeeper", lambda *_, **__: plane)
            process = server.BrokerProcess(config, Auth(), self.directory, announce=False)
            process.build()
            self._process = process
            process.start()
        return plane

    @property
    def broker(self) -> Any:
        assert self._process is not None
        return self._process._broker

    def close(self) -> None:
        if self._process is not None:
            self._process._broker.close()
        self.directory.close()
        self.plane.close()


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Iterator[Machine]]:
    """Yield as many machines as a test needs. Their starts do not pause between two attempts."""

    def end(code: int) -> NoReturn:
        raise Ended(code)

    made: list[Machine] = []

    def make() -> Iterator[Machine]:
        for number in itertools.count():
            made.append(Machine(tmp_path / str(number)))
            yield made[-1]
            made.pop().close()

    monkeypatch.setattr(server, "_exit", end)
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: gevent.sleep(0)))
    yield make()
    for each in made:
        each.close()


@pytest.mark.parametrize("fault", ["away", "lost", "unsent"])
def test_each_call_of_a_start_may_fail_once(machines: Iterator[Machine], fault: str) -> None:
    for number, machine in zip(range(CALLS_MAX), machines, strict=False):
        plane = machine.start(number, fault)
        identity, broker = machine.directory.identity, machine.broker
        assert broker.ready
        assert broker.membership.registered
        assert broker.cluster_id == machine.catalog.find_cluster_id() == identity.cluster_id
        assert machine.catalog.brokers() == {1: broker.me}, "one entry, from this start"
        until(lambda: broker.membership.is_controller)  # noqa: B023
        stores = {broker_id: held.value.store_uuid for broker_id, held in machine.catalog.claims().items()}
        assert stores == {1: identity.store_uuid, 2: "another"}
        if not plane.has_failed:
            return
    pytest.fail("the start makes too many calls to try each of them")


@pytest.mark.parametrize("number", [0, 1, 5, 10, 15])
def test_a_control_plane_that_stays_away_is_waited_for_within_the_limit(
    machines: Iterator[Machine], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda pause_s: now.append(now.pop() + pause_s))
    monkeypatch.setattr(patience, "time", clock)
    with pytest.raises(Ended, match=str(EX_UNAVAILABLE)):
        next(machines).start(number, "away", for_good=True, wait_s=20.0)
    assert now[0] == pytest.approx(20.0)


@pytest.mark.parametrize("number", [1, 5, 10, 15])
def test_a_refusal_ends_the_start_at_once(machines: Iterator[Machine], number: int) -> None:
    machine = next(machines)
    with pytest.raises(Ended, match=str(EX_UNAVAILABLE)):
        machine.start(number, "refused")


def test_a_control_plane_that_was_emptied_during_the_start_is_left_as_it_is(machines: Iterator[Machine]) -> None:
    machine = next(machines)
    held = machine.plane.get(CLUSTER_ID)
    assert held is not None
    machine.plane.commit(Delete(CLUSTER_ID, held.version))
    with pytest.raises(Ended, match=str(EX_CANTCREAT)):
        machine.start(CALLS_MAX, "away")
    assert machine.catalog.find_cluster_id() is None
    assert 1 not in machine.catalog.claims()


class Tree(FailingPlane):
    """The tree before the fork, which is open to others until the start closes it."""

    is_open = True

    def open_to_others(self, *paths: str) -> dict[str, int]:
        return self._call(
            "open_to_others", lambda: {path: node.version for path in paths if (node := self._plane.get(path))}
        )

    def close_to_others(self) -> int:
        return self._call("close_to_others", lambda: 1)


@pytest.mark.parametrize("fault", ["away", "lost", "unsent"])
def test_each_call_before_the_fork_may_fail_once(machines: Iterator[Machine], fault: str) -> None:
    for number, machine in zip(range(CALLS_MAX), machines, strict=False):
        before = machine.catalog.cluster_secret(), machine.catalog.receipt_key()
        plane = Tree(machine.plane, number, fault)
        waiting = preflight.patience_of(BrokerConfig())
        waiting(lambda: preflight.close_tree(plane, patience_s=0.0))  # type: ignore[arg-type]  # noqa: B023
        question = IdentityRequest(None, "fresh", False, URL)
        joined = waiting(lambda: preflight.joined(Catalog(plane), question, None, patience_s=0.0))  # type: ignore[arg-type]  # noqa: B023
        assert (joined.cluster_id, joined.broker_id) == (machine.catalog.find_cluster_id(), 1)
        stores = {broker_id: held.value.store_uuid for broker_id, held in machine.catalog.claims().items()}
        assert stores == {1: "fresh", 2: "another"}
        assert not {machine.catalog.cluster_secret(), machine.catalog.receipt_key()} & set(before)
        if not plane.has_failed:
            return
    pytest.fail("there are too many calls to try each of them")


def test_nodes_of_others_are_wrong_usage_before_the_fork(machines: Iterator[Machine]) -> None:
    plane = FailingPlane(next(machines).plane, 0, "refused")
    waiting = preflight.patience_of(BrokerConfig())
    with pytest.raises(StartupError, match="zookeeper-password") as refused:
        waiting(
            lambda: preflight.joined(Catalog(plane), IdentityRequest(None, "fresh", False, URL), None, patience_s=0.0)  # type: ignore[arg-type]
        )
    assert refused.value.exit_code == EX_USAGE
    assert len(plane.calls) == 1


class TestPatience:
    def tried(self, fault: Exception, limit_s: float = 10.0) -> int:
        """Count the attempts that are made when each takes 3 s and raises this fault."""
        attempts = []

        def attempt() -> None:
            attempts.append(fault)
            self.now_s += 3.0
            raise fault

        with pytest.raises(type(fault)):
            self.patience(limit_s)(attempt)
        return len(attempts)

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0

        def sleep(pause_s: float) -> None:
            self.now_s += pause_s

        monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=sleep))

    def patience(self, limit_s: float) -> RetryBudget:
        self.told: list[float] = []
        return RetryBudget(limit_s, tell=lambda fault, left_s: self.told.append(left_s), again_s=1.0)

    @pytest.mark.parametrize(
        "fault", [PlaneUnavailable("away"), OutcomeUnknown("lost"), Unavailable("others changed it 16 times")]
    )
    def test_a_transient_fault_is_retried_until_the_limit(self, fault: Exception) -> None:
        assert self.tried(fault) == 3
        assert self.told == [7.0], "one report"
        assert self.tried(fault, limit_s=0.0) == 1
        assert self.told == []

    @pytest.mark.parametrize("fault", [PlaneRefused("wrong"), BrokerIdTaken("taken"), ValueError("a mistake")])
    def test_a_lasting_fault_is_not_retried(self, fault: Exception) -> None:
        assert self.tried(fault) == 1

    def test_attempts_share_one_limit_and_successes_use_none_of_it(self) -> None:
        waiting = self.patience(10.0)

        def attempts(failures: int) -> Callable[[], str]:
            faults = iter([PlaneUnavailable("away")] * failures)

            def attempt() -> str:
                self.now_s += 3.0
                for fault in faults:
                    raise fault
                return "done"

            return attempt

        assert waiting(attempts(0)) == "done"
        assert waiting.left_s == 10.0
        assert waiting(attempts(1)) == "done"
        assert waiting.left_s == 6.0
        with pytest.raises(PlaneUnavailable):
            waiting(attempts(2))
