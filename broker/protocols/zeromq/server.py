"""MiniQ's three sockets. One thread reads and writes them all, and waits for nothing else.

ROUTER sockets serve any number of REQ clients: each request goes to the dispatcher, and its reply is sent when it is
ready. Pending requests are bounded in number, in bytes, and per client; beyond that a request is refused and may be
repeated. A client that is gone, or does not read, loses its reply and delays no other client; a message in that reply
is released.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from portalmq import wire
from portalmq.broker.protocols.zeromq import protocol
from portalmq.broker.protocols.zeromq.curve import Curve
from portalmq.broker.protocols.zeromq.dispatcher import ClusterClient, Job, Reply, RequestDispatcher
from portalmq.broker.protocols.zeromq.flood import FloodGuard
from portalmq.broker.protocols.zeromq.protocol import (
    PORTS,
    CommandRequest,
    Envelope,
    Malformed,
    NextRequest,
    PortRole,
    SendRequest,
)
from portalmq.errors import Backpressure, PortalMQError, Unauthorized, Unavailable
from portalmq.tokens import Tokens

_log = logging.getLogger("portalmq.zeromq")

# The most pending requests of one client: REQ has one, a DEALER may have more.
PIPELINE_MAX = 100
# libzmq's queues for each connection: requests read ahead, and replies not yet read. libzmq learns of read replies only
# after half of the limit, so a client with all its requests answered at once needs twice the space.
READ_AHEAD = 4
UNREAD_MAX = 4 * PIPELINE_MAX
BURST = 100
BACKLOG = 1_024
# A client whose machine is gone is detected within a minute; one that does not speak ZeroMQ is disconnected sooner.
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3
HANDSHAKE_WITHIN_S = 10
CLOSE_LINGER_MS = 1_000
# A message as JSON, with escapes, in its envelope.
ENVELOPE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """`timeout_s`: the longest time until a request is answered, possibly with an error."""

    timeout_s: float = 15.0
    message_bytes_max: int = wire.MESSAGE_BYTES_MAX
    requests_max: int = 10_000
    request_bytes_max: int = 64 * 1024 * 1024

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame; libzmq closes a connection that sends more."""
        return 2 * self.message_bytes_max + ENVELOPE_BYTES

    @property
    def unread_bytes_max(self) -> int:
        """The bytes that a connection may send before libzmq delivers one of its requests."""
        return (READ_AHEAD + 2) * self.frame_bytes_max

    @property
    def growth_bytes_max(self) -> int:
        """Memory for pending requests, replies and calls to the brokers, and as much again for incomplete requests."""
        return 4 * self.request_bytes_max + 64 * 1024 * 1024


class PortTaken(Exception):
    """A socket cannot be bound; the text says which and why."""


class Server:
    """Create and run it in one thread. Only `stop` may be called from other threads, or from a signal handler."""

    def __init__(
        self,
        cluster: ClusterClient,
        tokens: Tokens,
        *,
        host: str = "127.0.0.1",
        ports: dict[PortRole, int] | None = None,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        curve: Curve | None = None,
    ) -> None:
        """Bind the ports; 0 takes a free one. With `curve` only its clients may connect. Raises PortTaken."""
        self.limits = limits or ServerLimits()
        self._tokens = tokens
        self._clock = clock
        self._context = zmq.Context()
        self._curve = curve
        if curve is not None:
            curve.start(self._context)
        self._poller = zmq.Poller()
        self._sockets: dict[PortRole, zmq.Socket[bytes]] = {}
        self.endpoints: dict[PortRole, str] = {}
        self._dispatcher = RequestDispatcher(cluster, self._on_reply, ports=lambda: self.ports, clock=clock)
        # Invariant: `_pending` counts the dispatched jobs by (port, client), `_bytes` is the sum of their sizes.
        self._pending: dict[tuple[PortRole, bytes], int] = {}
        self._requests = 0
        self._bytes = 0
        self._outbox: deque[Reply] = deque()
        self._wakeup, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._wakeup_writer, False)
        self._stopping = False
        self._poller.register(self._wakeup, zmq.POLLIN)
        try:
            for role, port in (PORTS | (ports or {})).items():
                self._bind(role, host, port)
        except PortTaken:
            self._close_sockets(linger_ms=0)
            raise
        self._guard = FloodGuard(
            lambda: set(self.ports.values()), self.limits.unread_bytes_max, self.limits.growth_bytes_max
        )

    @property
    def ports(self) -> dict[PortRole, int]:
        return {role: int(endpoint.rpartition(":")[2]) for role, endpoint in self.endpoints.items()}

    def _bind(self, role: PortRole, host: str, port: int) -> None:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._sockets[role] = socket
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, self.limits.frame_bytes_max)
        socket.setsockopt(zmq.RCVHWM, READ_AHEAD)
        socket.setsockopt(zmq.SNDHWM, UNREAD_MAX)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_WITHIN_S * 1000)
        if self._curve is not None:
            self._curve.secure(socket)
        shown = f"[{host}]" if ":" in host else host
        if ":" in host:
            socket.setsockopt(zmq.IPV6, 1)
        address = f"tcp://{'127.0.0.1' if host == 'localhost' else shown}:{port or '*'}"
        try:
            socket.bind(address)
        except zmq.ZMQError as fault:
            raise PortTaken(f"cannot listen for {role} on {address}: {fault.strerror}") from None
        self.endpoints[role] = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(socket, zmq.POLLIN)

    # --- the loop ----------------------------------------------------------------------------------------------------

    def run(self, *, drain_s: float = 5.0) -> None:
        """Serve until stop(); then answer pending requests for at most `drain_s`, and close."""
        self._guard.start()
        try:
            while not self._stopping:
                self._poll_once(None)
            for socket in self._sockets.values():
                self._poller.unregister(socket)
            deadline = self._clock() + drain_s
            while self._requests and (left_s := deadline - self._clock()) > 0:
                self._poll_once(left_s)
        finally:
            self._dispatcher.close(0)
            self._guard.close()
            self._close_sockets(linger_ms=CLOSE_LINGER_MS)

    def stop(self) -> None:
        self._stopping = True
        self._wake()

    @property
    def wakeup(self) -> int:
        """The file descriptor that wakes the loop when a byte is written to it: for signal.set_wakeup_fd."""
        return self._wakeup_writer

    def _poll_once(self, timeout_s: float | None) -> None:
        ready = dict(self._poller.poll(None if timeout_s is None else max(1, round(timeout_s * 1000))))
        if self._wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 4096)
        for role, socket in self._sockets.items():
            if socket in ready:
                self._read(role, socket)
        while self._outbox:
            self._finish(self._outbox.popleft())

    def _read(self, role: PortRole, socket: zmq.Socket[bytes]) -> None:
        for _ in range(BURST):
            try:
                sender = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._guard.request_completed(_file_descriptor(sender))
            self._accept(role, [sender.bytes, *(socket.recv_multipart(zmq.NOBLOCK) if sender.more else ())])

    # --- requests ----------------------------------------------------------------------------------------------------

    def _accept(self, role: PortRole, frames: Sequence[bytes]) -> None:
        envelope: Envelope = (frames[0],)
        try:
            envelope, body = protocol.split_frames(frames)
            size = sum(map(len, frames))
            self._check_limits(role, envelope[0], size)
            what = self._parse(role, body)
            self._check_token(what.token)
        except Malformed as error:
            self._send(role, error.envelope, protocol.refusal(error))
        except PortalMQError as error:
            self._send(role, envelope, protocol.refusal(error))
        except Exception as fault:  # noqa: BLE001 - no request ends the server
            _log.exception("a request could not be read")
            self._send(role, envelope, protocol.refusal(Unavailable(f"the request failed: {fault!r}", retryable=False)))
        else:
            client = (role, envelope[0])
            self._pending[client] = self._pending.get(client, 0) + 1
            self._requests += 1
            self._bytes += size
            self._dispatcher.submit(Job(role, envelope, self._clock() + self.limits.timeout_s, size, what))

    def _parse(self, role: PortRole, body: bytes) -> SendRequest | NextRequest | CommandRequest:
        if role == "producers":
            return protocol.parse_send(body, self.limits.message_bytes_max)
        return protocol.parse_receive(body) if role == "consumers" else protocol.parse_command(body)

    def _check_token(self, token: str | None) -> None:
        if self._tokens.needed:
            if token is None:
                raise Unauthorized('a request is a JSON object that carries the member "token"')
            if not self._tokens.include(token.encode("utf-8", "replace")):
                raise Unauthorized("the token is unknown")

    def _check_limits(self, role: PortRole, client: bytes, size: int) -> None:
        if self._pending.get((role, client), 0) >= PIPELINE_MAX:
            raise Backpressure(f"{PIPELINE_MAX} requests of this client are not answered yet: wait for an answer")
        if self._requests >= self.limits.requests_max or self._bytes + size > self.limits.request_bytes_max:
            raise Backpressure(f"{self._requests} requests are pending: ask again in a moment")

    # --- answers -----------------------------------------------------------------------------------------------------

    def _on_reply(self, reply: Reply) -> None:
        """Queue a reply. Called by any thread."""
        self._outbox.append(reply)
        self._wake()

    def _wake(self) -> None:
        # A full pipe wakes the loop anyway; after close there is no loop to wake.
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wakeup_writer, b"!")

    def _finish(self, reply: Reply) -> None:
        job = reply.job
        client = (job.role, job.envelope[0])
        left = self._pending[client] - 1
        if left:
            self._pending[client] = left
        else:
            del self._pending[client]
        self._requests -= 1
        self._bytes -= job.size
        if not self._send(job.role, job.envelope, reply.body) and reply.lease is not None:
            self._dispatcher.give_back(*reply.lease)

    def _send(self, role: PortRole, envelope: Envelope, body: bytes) -> bool:
        """Send a reply; return False when the client is gone, or does not read."""
        try:
            self._sockets[role].send_multipart([*envelope, body], zmq.NOBLOCK)
        except zmq.ZMQError as fault:
            if fault.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def _close_sockets(self, *, linger_ms: int) -> None:
        for socket in self._sockets.values():
            socket.close(linger=linger_ms)
        if self._curve is not None:
            self._curve.stop()
        self._context.term()
        ringer, self._wakeup_writer = self._wakeup_writer, -1
        os.close(ringer)
        os.close(self._wakeup)


def _file_descriptor(frame: zmq.Frame) -> int | None:
    """Return the file descriptor of the connection of a frame; None for clients older than libzmq 4."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None
