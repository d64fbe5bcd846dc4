"""Which connections a broker keeps when there are many: nobody shuts the others out by holding connections open.

An idle one is between two requests, or has not sent the head of one. When nearly all places are taken, a new connection
takes the place of an idle one: of the address that has the most, the one that has been idle longest. An address that
has as many as it may gives up one of its own, and gets no new one while all are at work.

What is closed is closed for reading: a request that came in this very moment is served still.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from socket import SHUT_RD

import gevent.socket

from portalmq.broker.server.config import is_loopback

RESERVE = 100


class ClientConnection:
    """One connection of a client. `hang_up` ends it when it has nothing more to be read."""

    __slots__ = ("address", "counts", "hang_up", "is_open", "owner")

    def __init__(self, address: str, hang_up: Callable[[], None]) -> None:
        self.address = address
        self.hang_up = hang_up
        self.is_open = False
        # Whether it is among those of its address that are bounded.
        self.counts = False
        self.owner: _Address


class _Address:
    """What one address has: `open` connections, of which so many are `bounded`; and the idle ones of them, the longest
    idle first."""

    __slots__ = ("bounded", "idle", "open")

    def __init__(self) -> None:
        self.open = self.bounded = 0
        self.idle: OrderedDict[ClientConnection, None] = OrderedDict()


class Connections:
    """Invariant: `_homes` has the addresses with open connections, and no other; idle connections are open.

    `per_address_max` is 0 where an address may have as many as there are. Loopback's are bounded `with_loopback` only:
    a proxy on this machine brings many clients."""

    def __init__(self, at_most: int, per_address_max: int, *, with_loopback: bool = False) -> None:
        self._full_from = at_most - min(RESERVE, at_most // 10)
        self._per_address_max = per_address_max
        self._with_loopback = with_loopback
        self._open = 0
        self._addresses: dict[str, _Address] = {}

    def __len__(self) -> int:
        return self._open

    def enter(self, connection: ClientConnection) -> bool:
        """Whether the connection is taken. It is idle then."""
        address = connection.address
        if self._is_bounded(address):
            owner = self._addresses.get(address)
            if owner is not None and owner.bounded >= self._per_address_max and not self._close_idle(owner):
                return False
            connection.counts = True
        if self._open >= self._full_from:
            self.make_room()
        connection.owner = owner = self._addresses.setdefault(address, _Address())
        owner.open += 1
        owner.bounded += connection.counts
        self._open += 1
        connection.is_open = True
        self.idle(connection)
        return True

    def leave(self, connection: ClientConnection) -> None:
        if not connection.is_open:
            return
        self.busy(connection)
        self.trust(connection)
        connection.is_open = False
        self._open -= 1
        connection.owner.open -= 1
        if not connection.owner.open:
            del self._addresses[connection.address]

    def idle(self, connection: ClientConnection) -> None:
        if connection.is_open:
            connection.owner.idle[connection] = None

    def busy(self, connection: ClientConnection) -> None:
        connection.owner.idle.pop(connection, None)

    def trust(self, connection: ClientConnection) -> None:
        """It is another broker's, which needs as many as it makes."""
        connection.owner.bounded -= connection.counts
        connection.counts = False

    def make_room(self) -> bool:
        """Close an idle connection, of the address that has the most. False when all are at work."""
        most = max(self._addresses.values(), key=lambda owner: len(owner.idle), default=None)
        return most is not None and self._close_idle(most)

    def _is_bounded(self, address: str) -> bool:
        return self._per_address_max > 0 and (self._with_loopback or not is_loopback(address))

    def _close_idle(self, owner: _Address) -> bool:
        if not owner.idle:
            return False
        longest = next(iter(owner.idle))
        self.leave(longest)
        longest.hang_up()
        return True


def hang_up(client: gevent.socket.socket) -> None:
    """Let the next read find the end. With TLS too it is the socket below that is shut."""
    with suppress(OSError):  # it has gone
        gevent.socket.socket.shutdown(client, SHUT_RD)
