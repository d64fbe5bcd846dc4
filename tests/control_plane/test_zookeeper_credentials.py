"""ZooKeeper's nodes are world-writable by default, and not with credentials. Wrong credentials fail at the start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kazoo.client import KazooClient
from kazoo.security import make_digest_acl
from support.zookeeper import WITHIN_S, fresh_chroot, until

from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Create, Delete, Op, PlaneRefused, PlaneState, PlaneUnavailable, Set
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.transport.zookeeper_bootstrap import ZooKeeperBootstrap

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


def test_trap_nodes_are_open_to_all_without_credentials_and_private_with_them(plane: ZooKeeper, hosts: str) -> None:
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
    assert anonymous.state is PlaneState.CONNECTED, "a refusal does not end the session"
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


def test_trap_a_chroot_made_by_hand_is_open_until_a_broker_closes_it(hosts: str) -> None:
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


def acls(hosts: str, *paths: str, user: tuple[str, str] = OURS) -> list[list[str]]:
    """Return the identities with rights on each of the nodes."""
    client = KazooClient(hosts, auth_data=[("digest", ":".join(user))])
    client.start(timeout=WITHIN_S)
    try:
        return [sorted(each.id.id.partition(":")[0] for each in client.get_acls(path)[0]) for path in paths]
    finally:
        client.stop()
        client.close()


# A pause of the machine does not end such a session, nor its ephemeral nodes.
LONG_SESSION_S = 20.0
OPEN_TREE = ["/cluster_secret", "/a/b/c", "/topics/t", "/brokers/ids/7", "/brokers/stores/7"]


@pytest.mark.parametrize("owns_root", [False, True])
def test_a_tree_that_was_open_is_closed_to_the_last_node(tmp_path: Path, owns_root: bool) -> None:
    with EmbeddedZooKeeper(tmp_path) as server:
        hosts = server.hosts if owns_root else f"{server.hosts}/portalmq"
        anonymous = ZooKeeper(hosts, session_timeout_s=LONG_SESSION_S)
        anonymous.start()
        anonymous.commit(*map(Create, OPEN_TREE))
        for hundred in range(3):
            anonymous.commit(*(Create(f"/many/{hundred}{number}") for number in range(100)))
        plane = ZooKeeper(hosts, auth=OURS, owns_root=owns_root, closes=False, session_timeout_s=LONG_SESSION_S)
        plane.start()
        assert plane.is_open
        assert plane.open_to_others("/cluster_secret", "/missing") == {"/cluster_secret": 0}
        assert plane.close_to_others() == 1 + 11 + 301
        assert plane.close_to_others() == 0
        assert not plane.is_open
        assert plane.open_to_others("/cluster_secret") == {}
        plane.commit(Create("/brokers/ids/8", ephemeral=True), Create("/later"))
        closed = ["/", "/a", "/a/b", "/a/b/c", "/topics/t", "/brokers", "/brokers/stores/7", "/many/299", "/later"]
        assert acls(hosts, *closed) == [["portalmq"]] * len(closed)
        # Clients find brokers by `zk://` without credentials. Only brokers register one.
        shown = ["/brokers/ids", "/brokers/ids/7", "/brokers/ids/8"]
        assert acls(hosts, *shown) == [["anyone", "portalmq"]] * 3
        assert anonymous.children("/brokers/ids") == ["7", "8"]
        for op in (Create("/brokers/ids/9"), Set("/brokers/ids/7", b"", 0), Delete("/brokers/ids/7", 0), Create("/x")):
            with pytest.raises(PlaneRefused):
                anonymous.commit(op)
        with pytest.raises(PlaneRefused):
            anonymous.get("/cluster_secret")
        anonymous.close()
        plane.close()


def test_an_error_names_a_node_that_another_user_owns(hosts: str) -> None:
    plane = ZooKeeper(hosts, auth=OURS)
    plane.start()
    plane.commit(Create("/a"))
    client = KazooClient(hosts, auth_data=[("digest", ":".join(OURS))])
    client.start(timeout=WITHIN_S)
    client.set_acls("/a", [make_digest_acl("another", "user", all=True)])
    client.stop()
    client.close()
    with pytest.raises(PlaneRefused, match="for others"):
        plane.close_to_others()
    plane.close()


def test_brokers_are_found_by_clients_without_credentials(plane: ZooKeeper, hosts: str) -> None:
    plane.commit(Create("/brokers/ids/1", b'{"url":"http://127.0.0.1:5000"}', ephemeral=True))
    assert ZooKeeperBootstrap(f"zk://{hosts}").broker_urls(WITHIN_S) == ["http://127.0.0.1:5000"]


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
    assert "session" in caplog.text, "something was logged, so the search is meaningful"
