"""Protection against multipart messages that never end.

libzmq collects all frames of a multipart message before it delivers the first one. It bounds a frame (ZMQ_MAXMSGSIZE)
but not their sum: a connection that always sends MORE fills the memory at a third of a gigabyte a second. libzmq has no
option against that, and reports nothing before the message is complete. The kernel counts the bytes received on each
connection (TCP_INFO). While no message of a connection is complete, libzmq holds all of them.

A thread checks the memory of the process every few milliseconds, and the connections when memory has grown. It shuts
down a connection that has sent more bytes than any request may have without completing one; libzmq then frees the
bytes. Tiny frames take thirty times their length in memory, so when memory still exceeds its limit, the connection that
holds most is shut down, whatever its size.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from portalmq.system import resident_bytes

_log = logging.getLogger("portalmq.zeromq")

CHECK_EVERY_S = 0.05
GROWTH_BYTES = 16 * 1024 * 1024
# Bytes in the kernel's buffers, which its count includes.
KERNEL_BYTES = 8 * 1024 * 1024
# A connection that holds less is never shut down.
HELD_BYTES_LEAST = 256 * 1024
TCP_INFO_BYTES = 256
TCP_INFO_RECEIVED_AT = 128  # tcpi_bytes_received, Linux 4.1


@dataclass(slots=True)
class _ConnectionSample:
    """A connection at the last check: its peer, completed requests, and the bytes received by then."""

    peer: object
    requests: int
    bytes_then: int


class FloodGuard:
    """`request_bytes_max`: the bytes that one connection may send without completing a request. `growth_bytes_max`: how
    far the memory of the process may grow.

    `request_completed` is called by the reading thread, for each request; all else runs in the guard's own thread.
    """

    def __init__(self, ports: Callable[[], set[int]], request_bytes_max: int, growth_bytes_max: int) -> None:
        self._ports = ports
        self._held_max = request_bytes_max + KERNEL_BYTES
        self._memory_max = memory_bytes() + growth_bytes_max
        self._requests: dict[int, int] = {}
        self._anonymous = self._anonymous_then = 0
        self._samples: dict[int, _ConnectionSample] = {}
        self._memory_then = memory_bytes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flood guard", daemon=True)
        self.cut = 0

    def start(self) -> None:
        if sys.platform == "linux":
            self._thread.start()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def request_completed(self, descriptor: int | None) -> None:
        """Count a complete request of the connection with this file descriptor. None for clients older than libzmq 4:
        any connection without a known request may have sent it."""
        if descriptor is None:
            self._anonymous += 1
            return
        self._requests[descriptor] = self._requests.get(descriptor, 0) + 1

    def _run(self) -> None:
        while not self._ended.wait(CHECK_EVERY_S):
            try:
                self.check()
            except Exception:  # noqa: BLE001 - the next check may succeed
                _log.exception("the check of the connections failed")

    def check(self) -> None:
        """Check once; expensive only when memory has grown."""
        memory = memory_bytes()
        is_over = memory > self._memory_max
        if is_over or memory > self._memory_then + GROWTH_BYTES:
            self._check_connections(is_over=is_over)
            self._memory_then = memory
        self._memory_then = min(self._memory_then, memory)

    def _check_connections(self, *, is_over: bool) -> None:
        seen: dict[int, _ConnectionSample] = {}
        held: dict[int, int] = {}
        # Above the limit a request without a descriptor excuses no connection.
        anonymous_completed = self._anonymous != self._anonymous_then and not is_over
        self._anonymous_then = self._anonymous
        for descriptor, connection in self._connections():
            with connection:
                try:
                    peer = connection.getpeername()
                    received = _received_bytes(connection)
                except OSError:  # the connection has ended
                    continue
                requests, before = self._requests.get(descriptor, 0), self._samples.get(descriptor)
                if before is None or before.peer != peer or before.bytes_then > received:
                    # A new connection: count all bytes that it ever sent, unless it completed a request.
                    before = _ConnectionSample(peer, requests, received if requests or anonymous_completed else 0)
                elif before.requests != requests or (anonymous_completed and not requests):
                    before = _ConnectionSample(peer, requests, received)
                seen[descriptor] = before
                held[descriptor] = received - before.bytes_then
                if held[descriptor] > self._held_max:
                    self._cut(connection, held.pop(descriptor))
        self._samples = seen
        self._requests = {descriptor: number for descriptor, number in self._requests.items() if descriptor in seen}
        if is_over and held:
            worst = max(held, key=held.__getitem__)
            if held[worst] >= HELD_BYTES_LEAST:
                self._cut_largest(worst, seen[worst].peer, held[worst])

    def _cut_largest(self, descriptor: int, peer: object, held: int) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername() == peer:
                self._cut(connection, held)

    def _cut(self, connection: socket.socket, held: int) -> None:
        self.cut += 1
        _log.warning("cut off a connection of %s: %d bytes without a complete message", connection.getpeername(), held)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Yield duplicates of libzmq's sockets, with libzmq's descriptors. A duplicate cannot be reused by another
        connection before it is shut down."""
        ports = self._ports()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                duplicate = os.dup(int(name))
                try:
                    connection = socket.socket(fileno=duplicate)
                except OSError:  # not a socket
                    os.close(duplicate)
                    continue
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] in ports:
                    yield int(name), connection
                else:
                    connection.close()


def memory_bytes() -> int:
    """Return the memory of this process; 0 where the system does not report it."""
    return resident_bytes() or 0


def _received_bytes(connection: socket.socket) -> int:
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    (received,) = struct.unpack_from("=Q", info, TCP_INFO_RECEIVED_AT)
    return int(received)
