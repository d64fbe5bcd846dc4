"""The contract of the table of locks, over each control plane, whose compare-and-set makes the locks safe."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.zookeeper import fresh_chroot

from portalmq.control_plane.locks import LockTable, LockTicket, VersionedLock, digest_of
from portalmq.control_plane.plane import ControlPlane
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.errors import Fenced, LockNotFound, Unavailable

LIVE = {1: 1}
TTL = 5_000
PLANES = ["standalone", pytest.param("zookeeper", marks=pytest.mark.cluster)]


@pytest.fixture(params=PLANES)
def make_plane(request: pytest.FixtureRequest) -> Callable[[Path], ControlPlane]:
    if request.param == "standalone":
        return Standalone
    server, chroot = request.getfixturevalue("zookeeper_server"), fresh_chroot()
    return lambda directory: ZooKeeper(f"{server.hosts}{chroot}/{directory.name}")


@pytest.fixture
def plane(make_plane: Callable[[Path], ControlPlane], tmp_path: Path) -> Iterator[ControlPlane]:
    made = make_plane(tmp_path / "control")
    made.start()
    yield made
    made.close()


def just_seen(name: str, held: VersionedLock | None) -> int:
    return 0


def long_ago(name: str, held: VersionedLock | None) -> int:
    return TTL


def ticket(owner: str) -> LockTicket:
    return LockTicket(digest_of(owner), 1, 1)


def test_one_holds_the_next_waits_and_follows(plane: ControlPlane) -> None:
    table = LockTable(plane)
    assert table.ask("l", "a", TTL, just_seen, LIVE).state.token == 1
    waiting = table.ask("l", "b", TTL, just_seen, LIVE, ticket=ticket("b"))
    assert not waiting.granted
    table.release("l", "a", 1, just_seen)
    assert not table.ask("l", "c", TTL, just_seen, LIVE).granted
    assert table.ask("l", "b", TTL, just_seen, LIVE, ticket=ticket("b")).state.token == 2
    with pytest.raises(Fenced):
        table.renew("l", "a", 1, None, just_seen)


def test_a_holder_that_does_not_renew_loses_the_lock(plane: ControlPlane) -> None:
    table = LockTable(plane)
    table.ask("l", "a", TTL, just_seen, LIVE)
    assert table.ask("l", "b", TTL, long_ago, LIVE).state.token == 2


def test_tokens_rise_over_removals_and_restarts(make_plane: Callable[[Path], ControlPlane], tmp_path: Path) -> None:
    for token in range(1, 5):
        plane = make_plane(tmp_path / "control")
        plane.start()
        try:
            table = LockTable(plane)
            assert table.ask("l", "a", TTL, just_seen, LIVE).state.token == token
            assert table.remove("l", table.release("l", "a", token, just_seen).mark)
            with pytest.raises(Fenced):
                table.release("l", "a", token, just_seen)
            with pytest.raises(LockNotFound):
                table.release("l", "a", token + 1, just_seen)
        finally:
            plane.close()


@pytest.mark.cluster
def test_with_many_callers_over_many_sessions_each_token_has_one_holder(
    zookeeper_server: object, tmp_path: Path
) -> None:
    """Each caller acquires, waits in the queue if needed, and releases; no clocks are compared."""
    chroot = fresh_chroot()
    holders: dict[int, str] = {}
    failures: list[BaseException] = []

    def contend(name: str) -> None:
        plane = ZooKeeper(f"{zookeeper_server.hosts}{chroot}")  # type: ignore[attr-defined]
        plane.start()
        try:
            table, won = LockTable(plane), 0
            while won < 5:
                try:
                    requested = table.ask("l", name, TTL, just_seen, LIVE, ticket=ticket(name))
                    if requested.granted:
                        assert holders.setdefault(requested.state.token, name) == name
                        table.release("l", name, requested.state.token, just_seen)
                        won += 1
                except Unavailable:
                    continue  # others were faster too often
        except BaseException as fault:  # noqa: BLE001 - the test checks how the thread ended
            failures.append(fault)
        finally:
            plane.close()

    threads = [threading.Thread(target=contend, args=(f"c{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert failures == []
    assert sorted(holders) == list(range(1, 21))
