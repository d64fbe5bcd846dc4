"""Messages that never end, found and cut off.

libzmq gathers the frames of a multipart message before it shows the first one, and bounds a frame (ZMQ_MAXMSGSIZE) but
not their sum: a connection that always says MORE fills the memory, by a third of a gigabyte a second. No option of
libzmq ends that, and nothing it tells does before the message is complete. The kernel, though, counts what came over
each connection (TCP_INFO). While no message of a connection is complete, all that came is still held.

So this thread looks at the memory of the process every few milliseconds, and when that has grown, at the connections:
one that brought more than any request is long, with no request of it seen meanwhile, is shut down, and libzmq lets go
of what it held. Tiny frames take thirty times their length in memory: so when the memory is above its bound all the
same, the connection that holds most goes, whatever that is.
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
# What may lie in the kernel's buffers and is counted there.
KERNEL_BYTES = 8 * 1024 * 1024
# Below this a connection holds nothing worth cutting it off.
HELD_BYTES_LEAST = 256 * 1024
TCP_INFO_BYTES = 256
TCP_INFO_RECEIVED_AT = 128  # tcpi_bytes_received, Linux 4.1


@dataclass(slots=True)
class _ConnectionSample:
    """A connection at the last look: who, how many requests of it had come, and how many bytes by then."""

    peer: object
    requests: int
    bytes_then: int


class FloodGuard:
    """`request_bytes_max` is what one connection may bring without a request of it being complete, `growth_bytes_max`
    how much more than now the process may take.

    `came` is called by the thread that reads, for each request; all else is this guard's own thread.
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
        """A request of the connection with this file descriptor is complete. Of clients older than libzmq 4 libzmq does
        not tell it: any of the connections that no request is known of may have sent that."""
        if descriptor is None:
            self._anonymous += 1
            return
        self._requests[descriptor] = self._requests.get(descriptor, 0) + 1

    def _run(self) -> None:
        while not self._ended.wait(CHECK_EVERY_S):
            try:
                self.check()
            except Exception:  # noqa: BLE001 - the next look may do better
                _log.exception("the look at the connections failed")

    def check(self) -> None:
        """One look: dear only when the memory has grown."""
        memory = memory_bytes()
        is_over = memory > self._memory_max
        if is_over or memory > self._memory_then + GROWTH_BYTES:
            self._check_connections(is_over=is_over)
            self._memory_then = memory
        self._memory_then = min(self._memory_then, memory)

    def _check_connections(self, *, is_over: bool) -> None:
        seen: dict[int, _ConnectionSample] = {}
        held: dict[int, int] = {}
        # Above the bound nobody is spared for what may have been another's request.
        anonymous_completed = self._anonymous != self._anonymous_then and not is_over
        self._anonymous_then = self._anonymous
        for descriptor, connection in self._connections():
            with connection:
                try:
                    peer = connection.getpeername()
                    received = _received_bytes(connection)
                except OSError:  # it has ended
                    continue
                requests, before = self._requests.get(descriptor, 0), self._samples.get(descriptor)
                if before is None or before.peer != peer or before.bytes_then > received:
                    # Of one that is new here: all it ever brought, unless some of that was complete.
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
        _log.warning("a connection of %s is cut off: %d bytes, and no end of a message", connection.getpeername(), held)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[tuple[int, socket.socket]]:
        """Duplicates of libzmq's sockets, with its own numbers: none can be another one by the time it is cut."""
        ports = self._ports()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                duplicate = os.dup(int(name))
                try:
                    connection = socket.socket(fileno=duplicate)
                except OSError:  # no socket
                    os.close(duplicate)
                    continue
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] in ports:
                    yield int(name), connection
                else:
                    connection.close()


def memory_bytes() -> int:
    """What this process holds in memory; 0 where the system does not tell."""
    return resident_bytes() or 0


def _received_bytes(connection: socket.socket) -> int:
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    (received,) = struct.unpack_from("=Q", told, TCP_INFO_RECEIVED_AT)
    return int(received)
