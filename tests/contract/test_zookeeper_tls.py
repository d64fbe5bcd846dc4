"""A real ZooKeeper with a TLS port that asks for certificates: the control plane and zk:// addresses work over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ports import kept_port, number_of
from support.tls import key, pem
from support.zookeeper import fresh_chroot, until

from portalmq.control_plane import embedded
from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Create, PlaneUnavailable, Set
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.control_plane.zookeeper.connection import Tls
from portalmq.errors import Unavailable
from portalmq.transport.zookeeper_bootstrap import ZooKeeperBootstrap

pytestmark = pytest.mark.cluster

SHOWN = Tls(pem("authority"), pem("client"), key("client"))
OURS = ("portalmq", "secret")
SESSION_S = 20.0
# The jars that ZooKeeper's NettyServerCnxnFactory needs, beside ZooKeeper's own in pyspark.
NETTY = ("buffer", "codec-base", "common", "handler", "resolver", "transport", "transport-native-unix-common")


@pytest.fixture(scope="module")
def secure_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    jars = embedded._pyspark_jars()
    netty = [
        found for part in (*NETTY, "transport-classes-epoll") for found in _beside(jars, f"netty-{part}-[0-9]*.jar")
    ]
    if len(netty) <= len(NETTY):
        pytest.skip("there are no jars of Netty 4.2 beside ZooKeeper's")
    directory = tmp_path_factory.mktemp("secure")
    # Files of ZooKeeper's type PEM hold the key and the chain.
    (directory / "server.pem").write_bytes(key("server").read_bytes() + pem("server").read_bytes())
    with kept_port() as kept, pytest.MonkeyPatch.context() as patched:
        port = number_of(kept)
        patched.setenv(embedded.CLASSPATH_VARIABLE, os.pathsep.join([*jars, *netty]))
        settings = {
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "secureClientPort": str(port),
            "secureClientPortAddress": "127.0.0.1",
            "ssl.clientAuth": "need",
            "ssl.keyStore.type": "PEM",
            "ssl.keyStore.location": str(directory / "server.pem"),
            "ssl.trustStore.type": "PEM",
            "ssl.trustStore.location": str(pem("authority")),
        }
        with EmbeddedZooKeeper(directory / "zookeeper", settings=settings):
            yield port


def _beside(jars: list[str], pattern: str) -> list[str]:
    return [str(found) for found in Path(jars[0]).parent.glob(pattern)] if jars else []


def test_the_control_plane_works_over_it(secure_port: int) -> None:
    hosts = f"localhost:{secure_port}{fresh_chroot()}"
    one, other = (ZooKeeper(hosts, tls=SHOWN, auth=OURS, session_timeout_s=SESSION_S) for _ in range(2))
    changed: list[str] = []
    try:
        one.start()
        other.start()
        other.watch(changed.append)
        one.commit(*(Create(f"/many/{number}", b"x" * 1_000) for number in range(90)))
        assert one.commit(Set("/many/1", b"y", 0)) == [1]
        one.commit(Create("/mine", ephemeral=True))
        other.sync()
        assert len(other.get_children("/many")) == 90
        until(lambda: "/mine" in changed, what="the other is told of the change")
        assert other.close_to_others() == 0
    finally:
        one.close()
        until(lambda: other.get("/mine") is None, what="what was its session's goes with it")
        other.close()


@pytest.mark.parametrize("tls", [Tls(pem("authority")), Tls(pem("stranger"), *SHOWN[1:]), None], ids=repr)
def test_clients_without_a_certificate_or_trust_are_not_served(secure_port: int, tls: Tls | None) -> None:
    with pytest.raises(PlaneUnavailable):
        ZooKeeper(f"localhost:{secure_port}", tls=tls, session_timeout_s=0.5).start()


def test_clients_find_brokers_over_tls(secure_port: int) -> None:
    chroot = fresh_chroot()
    plane = ZooKeeper(f"localhost:{secure_port}{chroot}", tls=SHOWN, session_timeout_s=SESSION_S)
    plane.start()
    plane.commit(Create("/brokers/ids/1", b'{"url": "https://broker1:5000"}'))
    files = "&".join(f"zookeeper_tls_{name}={file}" for name, file in SHOWN._asdict().items())
    url = f"zk://localhost:{secure_port}{chroot}"
    assert ZooKeeperBootstrap(f"{url}?{files}").broker_urls(SESSION_S) == ["https://broker1:5000"]
    with pytest.raises(Unavailable, match="secureClientPort"):
        ZooKeeperBootstrap(url).broker_urls(0.3)
    plane.close()
