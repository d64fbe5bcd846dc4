"""A ZooKeeper that was emptied, or restored from an older copy, while its clients live.

Such a server closes the connections of clients that have seen a later state. A lagging server and a port without a
server do the same. The first must end a session that would otherwise be suspended for ever, the others must not.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.zookeeper import Wire, until

from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Create, PlaneState, Set
from portalmq.control_plane.zookeeper import ZooKeeper

pytestmark = pytest.mark.cluster

# A server restarts the session's count when it reads its files: the session has to outlast the rest of the start.
SESSION_S = 6.0
LONG_SESSION_S = 10.0
COMMITS = 30


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedZooKeeper]:
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as running:
        yield running


@pytest.fixture
def wire(server: EmbeddedZooKeeper) -> Iterator[Wire]:
    with Wire(server.ports[0]) as made:
        yield made


@pytest.fixture
def plane(server: EmbeddedZooKeeper) -> Iterator[ZooKeeper]:
    made = ZooKeeper(f"{server.hosts}/c", session_timeout_s=LONG_SESSION_S)
    made.start()
    yield made
    made.close()


def commit_some(plane: ZooKeeper, path: str) -> None:
    plane.commit(Create(path))
    for version in range(COMMITS):
        plane.commit(Set(path, b"", version))


def has_new_session(plane: ZooKeeper, before: int) -> bool:
    return plane.state is PlaneState.CONNECTED and plane.session_id not in (0, before)


class TestServersThatForgot:
    def test_a_session_ends_where_a_wiped_server_serves_others(
        self, server: EmbeddedZooKeeper, plane: ZooKeeper
    ) -> None:
        commit_some(plane, "/a")
        before, lost = plane.session_id, []
        plane.watch(lambda _: lost.append(plane.session_id != before))
        server.stop()
        shutil.rmtree(server.directory / "1")
        server.start()
        until(lambda: has_new_session(plane, before))
        until(lambda: any(lost), what="who led in the old session has to hear of its end")
        plane.sync()
        assert plane.set_back
        assert plane.get("/a") is None

    def test_a_session_ends_where_a_server_was_restored_from_an_older_copy_that_contains_it(
        self, server: EmbeddedZooKeeper, plane: ZooKeeper, tmp_path: Path
    ) -> None:
        plane.commit(Create("/a"))
        before = plane.session_id
        server.stop()
        shutil.copytree(server.directory, tmp_path / "copy")
        server.start()
        until(lambda: plane.state is PlaneState.CONNECTED)
        assert plane.session_id == before
        commit_some(plane, "/b")
        assert not plane.set_back
        server.stop()
        shutil.rmtree(server.directory)
        (tmp_path / "copy").rename(server.directory)
        server.start()
        until(lambda: has_new_session(plane, before))
        plane.sync()
        assert plane.set_back
        assert plane.get("/a") is not None
        assert plane.get("/b") is None


class TestServersThatLag:
    """These servers close the connections of clients that have seen a later state, and then catch up."""

    def test_a_session_that_is_refused_repeatedly_continues(self, server: EmbeddedZooKeeper, wire: Wire) -> None:
        plane = ZooKeeper(f"{wire.hosts}/c", session_timeout_s=LONG_SESSION_S)
        plane.start()
        session_id = plane.session_id
        wire.turns_away = True
        wire.cut()
        wire.heal()
        until(lambda: wire.turned_away >= 6)
        wire.turns_away = False
        until(lambda: plane.state is PlaneState.CONNECTED)
        assert plane.session_id == session_id
        assert not plane.set_back
        plane.close()


class TestServersThatDoNotServe:
    def test_a_port_that_takes_connections_and_closes_them_ends_no_session(
        self, server: EmbeddedZooKeeper, wire: Wire
    ) -> None:
        """A proxy without its server does so, and a server without its quorum."""
        plane = ZooKeeper(f"{wire.hosts}/c", session_timeout_s=SESSION_S)
        plane.start()
        plane.commit(Create("/e", ephemeral=True))
        session_id = plane.session_id
        server.kill()
        until(lambda: plane.state is PlaneState.SUSPENDED)
        time.sleep(1.5 * SESSION_S)  # nothing must happen: there is no condition to wait for
        assert (plane.state, plane.session_id) == (PlaneState.SUSPENDED, session_id)
        server.start()
        until(lambda: plane.state is PlaneState.CONNECTED)
        assert plane.session_id == session_id
        plane.sync()
        assert plane.get("/e") is not None
        assert not plane.set_back
        plane.close()

    def test_three_servers_without_a_quorum_end_no_session(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path / "three", servers=3) as servers:
            plane = ZooKeeper(f"{servers.hosts}/c", session_timeout_s=SESSION_S)
            plane.start()
            session_id = plane.session_id
            servers.kill(0)
            servers.kill(1)
            until(lambda: plane.state is PlaneState.SUSPENDED)
            time.sleep(1.5 * SESSION_S)  # as above
            assert plane.session_id == session_id
            servers.start()
            until(lambda: plane.state is PlaneState.CONNECTED)
            plane.sync()
            assert plane.session_id == session_id
            assert not plane.set_back
            plane.close()
