"""ZooKeeper's nodes are world-writable by default. With credentials they are not, and wrong ones end at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.zookeeper import fresh_chroot, until

from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Create, Delete, Op, PlaneRefused, PlaneState, PlaneUnavailable, Set
from portalmq.control_plane.zookeeper import ZooKeeper

pytestmark = pytest.mark.cluster

OURS = ("portalmq", "a secret: with colons")


@pytest.fixture
def hosts(zookeeper_server: EmbeddedZooKeeper) -> str:
    return f"{zookeeper_server.hosts}{fresh_chroot()}/portalmq"


@pytest.fixture
def plane(hosts: str) -> Iterator[ZooKeeper]:
    made = ZooKeeper(hosts, auth=OURS)
    made.start()
    yield made
    made.close()


def split(hosts: str) -> tuple[str, str]:
    servers, slash, chroot = hosts.partition("/")
    return servers, slash + chroot


def test_trap_nodes_are_open_to_all_without_credentials_and_ours_alone_with_them(plane: ZooKeeper, hosts: str) -> None:
    plane.commit(Create("/a/b", b"ours"), Create("/e", ephemeral=True))
    servers, chroot = split(hosts)
    anonymous = ZooKeeper(servers)
    anonymous.start()
    forbidden: list[Op] = [
        Create(f"{chroot}/mine"),
        Create(f"{chroot}/a/mine"),
        Create(f"{chroot}/new/parents/too"),
        Set(f"{chroot}/a/b", b"theirs", 0),
        Set(f"{chroot}/a", b"theirs", 0),
        Delete(f"{chroot}/a/b", 0),
        Delete(f"{chroot}/e", 0),
        Set(chroot, b"theirs", 0),
    ]
    for op in forbidden:
        with pytest.raises(PlaneRefused):
            anonymous.commit(op)
    reads: list[Callable[[], object]] = [
        lambda: anonymous.get(f"{chroot}/a/b"),
        lambda: anonymous.get_many([f"{chroot}/a/b"]),
        lambda: anonymous.children(f"{chroot}/a"),
    ]
    for read in reads:
        with pytest.raises(PlaneRefused):
            read()
    assert anonymous.state is PlaneState.CONNECTED, "a refusal costs nobody the session"
    anonymous.close()
    assert plane.children("/a") == ["b"]


@pytest.mark.parametrize("auth", [None, ("portalmq", "wrong"), ("someone", "a secret: with colons")])
def test_a_plane_with_other_credentials_does_not_start(
    plane: ZooKeeper, hosts: str, auth: tuple[str, str] | None
) -> None:
    stranger = ZooKeeper(hosts, auth=auth)
    with pytest.raises(PlaneRefused, match="for others"):
        stranger.start()
    assert stranger.state is PlaneState.LOST


def test_the_credentials_hold_on_every_new_connection_and_session(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path) as server:
        plane = ZooKeeper(f"{server.hosts}/c", auth=OURS)
        plane.start()
        plane.commit(Create("/a"))
        server.kill()
        until(lambda: plane.state is PlaneState.SUSPENDED)
        server.start()
        until(lambda: plane.state is PlaneState.CONNECTED)
        assert plane.commit(Set("/a", b"1", 0)) == [1]
        plane.close()
        plane.start()
        assert plane.commit(Set("/a", b"2", 1)) == [2]
        plane.close()


def test_trap_a_chroot_made_by_hand_is_open_until_we_close_it(hosts: str) -> None:
    servers, chroot = split(hosts)
    anonymous = ZooKeeper(servers)
    anonymous.start()
    anonymous.commit(Create(chroot))
    plane = ZooKeeper(hosts, auth=OURS)
    plane.start()
    with pytest.raises(PlaneRefused):
        anonymous.commit(Create(f"{chroot}/brokers/ids/1"))
    plane.close()
    anonymous.close()


def test_credentials_without_a_chroot_are_refused(zookeeper_server: EmbeddedZooKeeper) -> None:
    with pytest.raises(ValueError, match="chroot"):
        ZooKeeper(zookeeper_server.hosts, auth=OURS)


def test_trap_a_server_that_takes_no_credentials_is_final_and_not_an_outage(tmp_path: Path) -> None:
    with EmbeddedZooKeeper(tmp_path, settings={"DigestAuthenticationProvider.enabled": "false"}) as server:
        plane = ZooKeeper(f"{server.hosts}/c", auth=OURS)
        with pytest.raises(PlaneRefused, match="credentials"):
            plane.start()


def test_trap_credentials_refused_later_end_the_plane_for_good(tmp_path: Path) -> None:
    server = EmbeddedZooKeeper(tmp_path)
    with server:
        plane = ZooKeeper(f"{server.hosts}/c", auth=OURS)
        plane.start()
        rung: list[str | None] = []
        plane.watch(rung.append)
        port = server.ports[0]
    with EmbeddedZooKeeper(tmp_path, port=port, settings={"DigestAuthenticationProvider.enabled": "false"}):
        until(lambda: plane.state is PlaneState.LOST)
        until(lambda: None in rung)
        for call in (plane.sync, lambda: plane.get("/a"), lambda: plane.commit(Create("/a"))):
            with pytest.raises(PlaneRefused, match="credentials"):
                call()
        plane.close()
        with pytest.raises(PlaneUnavailable):
            plane.sync()


def test_credentials_are_in_no_log(plane: ZooKeeper, hosts: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        again = ZooKeeper(hosts, auth=OURS)
        again.start()
        again.commit(Create("/a"))
        again.close()
    assert OURS[1] not in caplog.text
    assert "session" in caplog.text, "something was logged, so the search could have found it"
