"""The client's end of the connection, watched while the client waits.

A poll for POLLRDHUP tells a closed peer apart from one that has sent its next request already (pipelining), which
reading with MSG_PEEK cannot do once such bytes lie in the way.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from gevent import get_hub
from gevent.monkey import get_original

# The worker's monkey patch replaces select.poll by one that knows no POLLRDHUP. This one never waits.
_poll: Any = get_original("select", "poll")
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL
_READ = 1  # libev's EV_READ


class SocketPeer:
    """A `domain.Peer` over the socket of a request."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def gone(self) -> bool:
        try:
            poll = _poll()
            poll.register(self._connection.fileno(), _GONE)
            return bool(poll.poll(0))
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
            # A pipelined request keeps the socket readable for ever: give up the watch rather than spin. Whoever hands
            # out messages asks `gone` once more.
            watcher.stop()
            if self.gone():
                on_gone()

        watcher.start(readable)
        return stop


def peer_of(environ: dict[str, Any]) -> SocketPeer | None:
    """The peer of a request, or None when no socket stands behind it (a test client)."""
    connection = environ.get("gunicorn.socket")
    return None if connection is None else SocketPeer(connection)
