"""The proxies: what each state of a link does to a connection through it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos.links import Links

SHORT_S = 0.2
LONG_S = 30.0


@pytest.fixture
def port() -> Iterator[int]:
    """A server that sends back what it gets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo(connection: socket.socket) -> None:
            with connection:
                while data := connection.recv(1_000):
                    connection.sendall(data)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=echo, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def links(port: int, tmp_path: Path) -> Iterator[Links]:
    running = Links({"1>2": port}, tmp_path / "log")
    yield running
    running.close()


def connected(links: Links) -> socket.socket:
    return socket.create_connection(("127.0.0.1", links.ports["1>2"]), timeout=LONG_S)


def got(connection: socket.socket, within_s: float) -> bytes | None:
    """What arrives: b"" when the connection has ended, None when nothing comes."""
    connection.settimeout(within_s)
    try:
        return connection.recv(1_000)
    except TimeoutError:
        return None
    except ConnectionError:
        return b""


@pytest.mark.parametrize("way", ["in", "out"])
def test_data_that_was_held_arrives_once_the_link_is_whole(links: Links, way: str) -> None:
    with connected(links) as connection:
        links.set("1>2", hold=way)
        connection.sendall(b"hello")
        assert got(connection, SHORT_S) is None
        links.set("1>2")
        assert got(connection, LONG_S) == b"hello"


def test_a_connection_that_lost_data_ends_once_the_link_is_whole(links: Links) -> None:
    with connected(links) as connection, connected(links) as idle:
        links.set("1>2", lose=True)
        connection.sendall(b"hello")
        assert got(connection, SHORT_S) is None
        links.set("1>2")
        assert got(connection, LONG_S) == b""
        idle.sendall(b"again")
        assert got(idle, LONG_S) == b"again"


def test_a_link_that_refuses_ends_connections_and_accepts_none(links: Links) -> None:
    with connected(links) as connection:
        links.set("1>2", refuse=True)
        assert got(connection, LONG_S) == b""
        with connected(links) as another:
            assert got(another, LONG_S) == b""
        links.set("1>2")
        with connected(links) as after:
            after.sendall(b"hello")
            assert got(after, LONG_S) == b"hello"


def test_a_slow_link_delays_each_way(links: Links) -> None:
    with connected(links) as connection:
        links.set("1>2", slow_s=SHORT_S)
        sent_at = time.monotonic()
        connection.sendall(b"hello")
        assert got(connection, LONG_S) == b"hello"
        assert time.monotonic() - sent_at >= 2 * SHORT_S
