"""Detection of clients that disconnect while their call waits.

A poll for POLLRDHUP distinguishes a closed connection from one with a pipelined request. Reading with MSG_PEEK cannot,
when bytes of a next request are in the buffer. Systems without POLLRDHUP use MSG_PEEK.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from typing import Any

from gevent import get_hub
from gevent.monkey import get_original

from portalmq.broker.api.http_request import HttpRequest

# gevent's monkey patch replaces select.poll by one without POLLRDHUP. This one never waits.
_poll: Any = get_original("select", "poll")
_Socket: Any = get_original("socket", "socket")
_ERRORS = select.POLLHUP | select.POLLERR | select.POLLNVAL
_HALF_CLOSED: int = getattr(select, "POLLRDHUP", 0)  # only on Linux
_READ = 1  # libev's EV_READ


class SocketPeer:
    """A `long_poll.Peer` over the socket of a request."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._poll: Any = None

    def gone(self) -> bool:
        try:
            descriptor = self._connection.fileno()
            if self._poll is None:
                self._poll = _poll()
                self._poll.register(descriptor, _ERRORS | _HALF_CLOSED)
            return descriptor < 0 or bool(self._poll.poll(0)) or (not _HALF_CLOSED and _has_ended(descriptor))
        except (OSError, ValueError):  # closed on our side
            return True

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        try:
            watcher = get_hub().loop.io(self._connection.fileno(), _READ)
        except (OSError, ValueError):
            on_gone()
            return lambda: None

        def stop() -> None:
            watcher.stop()
            watcher.close()

        def readable() -> None:
            # A pipelined request keeps the socket readable: stop watching rather than spin. `gone` is called once more
            # before messages are delivered.
            watcher.stop()
            if self.gone():
                on_gone()

        watcher.start(readable)
        return stop


def _has_ended(descriptor: int) -> bool:
    """Return whether the client has closed the connection. Pipelined requests hide the end."""
    with _Socket(fileno=os.dup(descriptor)) as connection:
        try:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False


def peer_of(request: HttpRequest) -> SocketPeer | None:
    """Return the client of a request, or None without a socket (a test client)."""
    return None if request.client is None else SocketPeer(request.client.socket)
