"""Limits on connections: no client excludes the others by holding connections open.

A connection is idle between two requests, or before the head of one. Near the limit, a new connection replaces an idle
one: of the address with the most, the one that has been idle longest. An address at its own limit replaces one of its
own, and gets no new connection while all of its connections are busy.

Connections are closed for reading: a request that has just arrived is still served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from socket import SHUT_RD

import gevent.socket

from portalmq.tokens import is_loopback

RESERVE = 100


class ClientConnection:
    """One connection of a client. `hang_up` ends it after the bytes received so far."""

    __slots__ = ("address", "counts", "hang_up", "is_open", "owner")

    def __init__(self, address: str, hang_up: Callable[[], None]) -> None:
        self.address = address
        self.hang_up = hang_up
        self.is_open = False
        # Whether it counts towards the limit of its address.
        self.counts = False
        self.owner: _Address


class _Address:
    """The connections of one address: how many are `open`, how many of these count as `bounded`, and the idle ones, the
    longest idle first."""

    __slots__ = ("bounded", "idle", "open")

    def __init__(self) -> None:
        self.open = self.bounded = 0
        self.idle: OrderedDict[ClientConnection, None] = OrderedDict()


class Connections:
    """Invariant: `_homes` has the addresses with open connections, and no other; idle connections are open.

    `per_address_max` is 0 without a limit for each address. Loopback is limited only `with_loopback`: a proxy on this
    machine has many clients."""

    def __init__(self, at_most: int, per_address_max: int, *, with_loopback: bool = False) -> None:
        self._full_from = at_most - min(RESERVE, at_most // 10)
        self._per_address_max = per_address_max
        self._with_loopback = with_loopback
        self._open = 0
        self._addresses: dict[str, _Address] = {}

    def __len__(self) -> int:
        return self._open

    def enter(self, connection: ClientConnection) -> bool:
        """Admit a connection, as idle; return False when it is refused."""
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
        """Exempt another broker's connection from the limit of its address."""
        connection.owner.bounded -= connection.counts
        connection.counts = False

    def make_room(self) -> bool:
        """Close an idle connection of the address with the most. Return False when all are busy."""
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
    """Shut the socket for reading, so the next read finds its end; with TLS the socket below it."""
    with suppress(OSError):  # already closed
        gevent.socket.socket.shutdown(client, SHUT_RD)
