"""Ports of 127.0.0.1 that remain reserved while no process listens there: other processes, such as parallel tests and
their brokers, ask for free ports all the time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


def kept_port(port: int = 0) -> socket.socket:
    """Bind a port without listening: connections are refused, a server that sets SO_REUSEADDR (as those of Python,
    gunicorn, ZooKeeper and nginx do) may listen there, and no process gets the port as a free one until this socket is
    closed. 0 is any port. Raises OSError when another process listens there."""
    kept = socket.socket()
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        kept.bind(("127.0.0.1", port))
    except BaseException:
        kept.close()
        raise
    return kept


@contextmanager
def kept_ports(count: int) -> Iterator[list[int]]:
    """Yield `count` ports, reserved until the block ends."""
    with ExitStack() as held:
        yield [number_of(held.enter_context(kept_port())) for _ in range(count)]


def number_of(kept: socket.socket) -> int:
    number: int = kept.getsockname()[1]
    return number
