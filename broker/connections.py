"""Which connections a broker keeps when there are many: nobody shuts the others out by holding connections open.

An idle one is between two requests, or has not sent the head of one. When nearly all places are taken, a new connection
takes the place of an idle one: of the address that has the most, the one that has been idle longest. An address that
has as many as it may gives up one of its own, and gets no new one while all are at work.

What is closed is closed for reading: a request that came in this very moment is served still.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from socket import SHUT_RD

import gevent.socket

from portalmq.broker.config import is_loopback

RESERVE = 100


class Connection:
    """One connection of a client. `hang_up` ends it when it has nothing more to be read."""

    __slots__ = ("address", "counts", "hang_up", "is_open")

    def __init__(self, address: str, hang_up: Callable[[], None]) -> None:
        self.address = address
        self.hang_up = hang_up
        self.is_open = True
        # Whether it is among those of its address that are bounded.
        self.counts = False


class Connections:
    """Invariant: `_idle` holds open connections alone, by address, the longest idle first; none of its values is empty.

    `per_address_max` is 0 where an address may have as many as there are. Loopback's are bounded `with_loopback` only:
    a proxy on this machine brings many clients."""

    def __init__(self, at_most: int, per_address_max: int, *, with_loopback: bool = False) -> None:
        self._full_from = at_most - min(RESERVE, at_most // 10)
        self._per_address_max = per_address_max
        self._with_loopback = with_loopback
        self._open: set[Connection] = set()
        self._of: Counter[str] = Counter()
        self._idle: dict[str, OrderedDict[Connection, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> bool:
        """Whether the connection is taken. It is idle then."""
        address = connection.address
        if self._is_bounded(address):
            if self._of[address] >= self._per_address_max and not self._close_idle(address):
                return False
            connection.counts = True
            self._of[address] += 1
        if len(self._open) >= self._full_from:
            self.make_room()
        self._open.add(connection)
        self.idle(connection)
        return True

    def leave(self, connection: Connection) -> None:
        if connection.is_open:
            self.busy(connection)
            self._forget(connection)

    def idle(self, connection: Connection) -> None:
        if connection.is_open:
            self._idle.setdefault(connection.address, OrderedDict())[connection] = None

    def busy(self, connection: Connection) -> None:
        idle = self._idle.get(connection.address)
        if idle is not None and idle.pop(connection, connection) is None and not idle:
            del self._idle[connection.address]

    def trust(self, connection: Connection) -> None:
        """It is another broker's, which needs as many as it makes."""
        if connection.counts:
            self._uncount(connection)

    def make_room(self) -> bool:
        """Close an idle connection, of the address that has the most. False when all are at work."""
        if not self._idle:
            return False
        return self._close_idle(max(self._idle, key=lambda address: len(self._idle[address])))

    def _is_bounded(self, address: str) -> bool:
        return self._per_address_max > 0 and (self._with_loopback or not is_loopback(address))

    def _close_idle(self, address: str) -> bool:
        idle = self._idle.get(address)
        if not idle:
            return False
        longest = next(iter(idle))
        self.leave(longest)
        longest.hang_up()
        return True

    def _forget(self, connection: Connection) -> None:
        connection.is_open = False
        self._open.discard(connection)
        if connection.counts:
            self._uncount(connection)

    def _uncount(self, connection: Connection) -> None:
        connection.counts = False
        self._of[connection.address] -= 1
        if not self._of[connection.address]:
            del self._of[connection.address]


def hang_up(client: gevent.socket.socket) -> None:
    """Let the next read find the end. With TLS too it is the socket below that is shut."""
    with suppress(OSError):  # it has gone
        gevent.socket.socket.shutdown(client, SHUT_RD)
