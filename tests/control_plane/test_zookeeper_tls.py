"""ZooKeeper by TLS: the plane checks its name, refuses untrusted servers, and reads every answer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from kazoo.handlers.threading import SequentialThreadingHandler
from support.tls import TlsFront, key, pem
from support.zookeeper import WITHIN_S, fresh_chroot

from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Create, PlaneUnavailable, Set
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.control_plane.zookeeper.connection import Tls
from portalmq.network.tls import secure_handler

pytestmark = pytest.mark.cluster

OURS = ("portalmq", "secret")
TRUSTED = Tls(pem("authority"))
LONG_SESSION_S = 20.0


def test_the_control_plane_works_by_tls(zookeeper_server: EmbeddedZooKeeper) -> None:
    with TlsFront(zookeeper_server.ports[0], "server") as front:
        plane = ZooKeeper(
            f"localhost:{front.port}{fresh_chroot()}", tls=TRUSTED, auth=OURS, session_timeout_s=LONG_SESSION_S
        )
        plane.start()
        plane.commit(Create("/a", b"1"))
        assert plane.commit(Set("/a", b"2", 0)) == [1]
        plane.close()


def test_trap_an_answer_in_the_buffer_of_tls_is_read() -> None:
    """The second answer of a record is in no socket: kazoo would read it seconds later, with the next one."""
    handler = SequentialThreadingHandler()
    secure_handler(handler, TRUSTED.context())
    with socket.create_server(("127.0.0.1", 0)) as server, TlsFront(server.getsockname()[1], "server") as front:
        address = ("127.0.0.1", front.port)
        connection = handler.create_connection(address=address, hostname="localhost", timeout=WITHIN_S)
        with connection, server.accept()[0] as answering:
            answering.sendall(b"two answers")
            assert connection.recv(1) == b"t"
            assert connection.pending()
            assert handler.select([connection], [], [], 0) == ([connection], [], [])


def test_many_answers_at_a_time_are_all_read(zookeeper_server: EmbeddedZooKeeper) -> None:
    with TlsFront(zookeeper_server.ports[0], "server") as front:
        plane = ZooKeeper(
            f"127.0.0.1:{front.port}{fresh_chroot()}", tls=TRUSTED, auth=OURS, session_timeout_s=LONG_SESSION_S
        )
        plane.start()
        plane.commit(*(Create(f"/many/{number}", b"x" * 100) for number in range(99)))
        assert plane.close_to_others() == 0
        plane.close()


def test_a_client_certificate_is_sent_on_request(zookeeper_server: EmbeddedZooKeeper) -> None:
    with TlsFront(zookeeper_server.ports[0], "server", asks_for_certificate=True) as front:
        hosts = f"localhost:{front.port}{fresh_chroot()}"
        plane = ZooKeeper(
            hosts, tls=Tls(pem("authority"), pem("client"), key("client")), session_timeout_s=LONG_SESSION_S
        )
        plane.start()
        plane.close()
        assert set(front.names_shown) == {"client"}  # once for each connection
        with pytest.raises(PlaneUnavailable):
            ZooKeeper(hosts, tls=TRUSTED, session_timeout_s=0.5).start()


@pytest.mark.parametrize("certificate", ["elsewhere", "untrusted"])
def test_an_untrusted_server_is_refused(zookeeper_server: EmbeddedZooKeeper, certificate: str) -> None:
    with TlsFront(zookeeper_server.ports[0], certificate) as front:
        plane = ZooKeeper(f"localhost:{front.port}", tls=TRUSTED, session_timeout_s=0.5)
        with pytest.raises(PlaneUnavailable):
            plane.start()


def test_an_error_names_unusable_files(tmp_path: Path) -> None:
    (tmp_path / "broken.pem").write_text("nothing")
    for tls in (Tls(tmp_path / "missing.pem"), Tls(tmp_path / "broken.pem"), Tls(None, pem("client"), key("server"))):
        plane = ZooKeeper("localhost:1", tls=tls)
        with pytest.raises(ValueError, match=r"\.pem"):
            plane.start()
