"""Keep-alive HTTP/1.1 connections to brokers, and a bounded pool of them.

Requests are written here, head and body in one segment, because two small segments cost a second wake-up of the broker;
http_answer.py reads the answers (with a server that answers at once, both on one core: 12 us an exchange against 65 us
for http.client). Redirects are never followed, so a token never goes to another host.

This is where the outcome of a failed request is known: one that was not sent in full was not applied (`NotSent`), one
that was sent and has no answer may have been (`NoAnswer`).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from portalmq.network.forking import reset_in_children
from portalmq.network.http_answer import PIECE_BYTES, HttpAnswer, read_answer

DEFAULT_PORT = 5000
CONNECTIONS_PER_HOST_MAX = 64
CONNECT_TIMEOUT_S = 5.0
# Below the broker's keep-alive of 75 s, so that the client closes first and rarely uses a connection that is closing.
IDLE_S_MAX = 60.0
JOIN_BYTES_MAX = 64 * 1024
# The kernel takes so much of a request at once, since a connection has one request at a time.
UNBLOCKED_BYTES_MAX = 8 * 1024
TIMEOUT_S_MIN = 0.01


class NotSent(Exception):
    """The request was not sent to the broker in full: it was not applied."""


class NoAnswer(Exception):
    """The request was sent, and no whole answer came: it may have been applied.

    `stale` is true if a used connection was closed before the first byte of an answer: usually the broker closed an
    idle keep-alive connection at the same moment.
    """

    def __init__(self, detail: str, *, stale: bool = False) -> None:
        super().__init__(detail)
        self.stale = stale


class Address(NamedTuple):
    """The address of a broker. `prefix` precedes every path (for brokers behind a proxy)."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.prefix}"

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@lru_cache(256)
def parse_address(url: str) -> Address:
    """Parse `http://host:port`, `https://host`, or `host:port`.

    Raises ValueError for another scheme, for a port that is none, and for user names and passwords, which belong in a
    token.
    """
    text = url.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    if parts.scheme not in {"http", "https"}:
        raise ValueError(f"{url!r}: a broker is reached by http:// or https://, not by {parts.scheme}://")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("a broker's URL has no user, password, query or fragment; pass a secret as token=")
    if not parts.hostname or any(character.isspace() for character in text):
        raise ValueError(f"{url!r} names no host; write for instance http://localhost:{DEFAULT_PORT}")
    try:
        given = parts.port
    except ValueError:
        raise ValueError(f"{url!r}: a port is a number from 1 to 65535") from None
    port = given or (443 if parts.scheme == "https" else DEFAULT_PORT)
    return Address(parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


class Watch(NamedTuple):
    """A check during the wait for an answer: `gives_up()`, called after `first_s` and then each `every_s`, returns True
    to stop waiting."""

    first_s: float
    every_s: float
    gives_up: Callable[[], bool]


class Doubt(NamedTuple):
    """The same check for coroutines."""

    first_s: float
    every_s: float
    gives_up: Callable[[], Coroutine[Any, Any, bool]]


class Connection:
    """One socket to one broker, used by one thread at a time."""

    def __init__(
        self, address: Address, timeout_s: float, tls: ssl.SSLContext | None, poll: Callable[[], Any] = select.poll
    ) -> None:
        """Connect within `timeout_s`. Raises OSError."""
        raw = socket.create_connection((address.host, address.port), timeout=timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = tls.wrap_socket(raw, server_hostname=address.host) if tls else raw
        self._timeout_s = self._recv_timeout_s = timeout_s
        self._is_tls = tls is not None
        is_readable = poll()
        is_readable.register(self._socket, select.POLLIN)
        self._is_readable = is_readable.poll
        self.used = self._was_used = False
        self.reusable = True
        self._cut_off: OSError | None = None  # of the request that was sent last
        self.idle_since = 0.0

    def looks_alive(self, now: float) -> bool:
        """Return False if the broker has closed the connection (an idle one has nothing to read), or it was idle for
        too long."""
        return now - self.idle_since < IDLE_S_MAX and not self._is_readable(0)

    def exchange(
        self, method: str, head: bytes, body: bytes, timeout_s: float, watch: Watch | None = None
    ) -> HttpAnswer:
        """Send one request and read its answer. Each wait for the network ends after `timeout_s`. Raises NotSent or
        NoAnswer."""
        # The pause is set before a request that never waits for room, as setting it is a system call.
        pause_s = timeout_s if watch is None else min(watch.first_s, timeout_s)
        self.send(head, body, pause_s if len(body) <= UNBLOCKED_BYTES_MAX else timeout_s)
        return self.answer(method, timeout_s, watch)

    def send(self, head: bytes, body: bytes, timeout_s: float) -> None:
        """Send one request, whose `answer` is read next. Raises NotSent."""
        self._was_used, self.used, self.reusable = self.used, True, False
        self._cut_off = None
        try:
            if timeout_s != self._timeout_s:
                self._set_timeout(timeout_s)
            if len(body) <= JOIN_BYTES_MAX:
                # Nearly always the whole; sendall of gevent's sockets first asks the system for the buffer's size.
                data = head + body
                sent = self._socket.send(data)
                if sent < len(data):
                    self._socket.sendall(data[sent:])
            else:
                self._send_large(head, body)
        except (BrokenPipeError, ConnectionResetError) as fault:
            # A broker that refuses a body for its length answers early and closes; that answer is worth reading.
            self._cut_off = fault
        except OSError as fault:
            raise NotSent(str(fault)) from fault

    def answer(self, method: str, timeout_s: float, watch: Watch | None = None) -> HttpAnswer:
        """Return the answer to the request that was sent. Raises NotSent or NoAnswer."""
        cut_off = self._cut_off
        pause_s = timeout_s if watch is None else min(watch.first_s, timeout_s)
        try:
            self._recv_timeout_s = timeout_s
            if pause_s != self._timeout_s:
                self._set_timeout(pause_s)
            if watch is None or cut_off is not None:
                piece = self._socket.recv(PIECE_BYTES)
            else:
                piece = self._await_answer(timeout_s, pause_s, watch)
            answer, is_reusable = read_answer(self, method, piece)
        except (OSError, ValueError) as fault:
            if cut_off is not None:
                raise NotSent(str(cut_off)) from fault
            silent = isinstance(fault, ConnectionError)
            raise NoAnswer(describe(fault, timeout_s), stale=self._was_used and silent) from fault
        self.reusable = cut_off is None and is_reusable
        return answer

    def _await_answer(self, timeout_s: float, pause_s: float, watch: Watch) -> bytes:
        """Return the first bytes of an answer, within `timeout_s`. Raises NoAnswer if the watch gives up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._set_timeout(pause_s)
            try:
                return self._socket.recv(PIECE_BYTES)
            except TimeoutError:
                if time.monotonic() < deadline and watch.gives_up():
                    raise NoAnswer("it is silent, and other brokers are not") from None
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise
            # A pause before the answer counts towards the limit.
            self._recv_timeout_s = max(TIMEOUT_S_MIN, left_s)
            pause_s = min(watch.every_s, self._recv_timeout_s)

    def recv(self, at_most: int) -> bytes:
        """Return further bytes of an answer."""
        self._set_timeout(self._recv_timeout_s)
        return self._socket.recv(at_most)

    def recv_into(self, buffer: memoryview) -> int:
        """Read further bytes of an answer, and return their number."""
        self._set_timeout(self._recv_timeout_s)
        return self._socket.recv_into(buffer)

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _send_large(self, head: bytes, body: bytes) -> None:
        if self._is_tls:
            self._socket.sendall(head)
            self._socket.sendall(body)
        else:
            sent = self._socket.sendmsg([head, body])
            if sent < len(head):
                self._socket.sendall(head[sent:])
                sent = len(head)
            self._socket.sendall(memoryview(body)[sent - len(head) :])

    def hang_up(self) -> None:
        """Say, during an exchange of another thread, that no request follows. A broker that waits before it answers
        stops waiting; its answer still arrives."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)  # SSLSocket.shutdown would end the reading too

    def abort(self) -> None:
        """Abort an exchange of another thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def close_in_child(self) -> None:
        """Close it for the child of a fork alone: the parent continues to use it."""
        with contextlib.suppress(OSError):
            os.close(self._socket.detach())


def describe(fault: Exception, timeout_s: float) -> str:
    """Return what to say of a failed wait."""
    if isinstance(fault, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    return str(fault) or type(fault).__name__


class PendingAnswer(NamedTuple):
    """The answer to a request that was sent. Its connection belongs to it until it is read, once."""

    connection: Connection
    method: str
    give_back: Callable[[], None]

    def read(self, timeout_s: float, watch: Watch | None = None) -> HttpAnswer:
        """Wait for the answer. Raises NotSent or NoAnswer."""
        try:
            return self.connection.answer(self.method, timeout_s, watch)
        finally:
            self.give_back()


class _Host:
    """The connections to one address. Invariant, under the pool's lock: len(idle) + taken <= the pool's bound, where
    `taken` counts those in use and those that are being opened."""

    def __init__(self) -> None:
        self.idle: deque[Connection] = deque()
        self.in_use: set[Connection] = set()
        self.taken = 0


class ConnectionPool:
    """Thread-safe. The child of a fork gets an empty pool: two processes on one socket would mix answers."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        connections_per_host_max: int = CONNECTIONS_PER_HOST_MAX,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        poll: Callable[[], Any] = select.poll,
    ) -> None:
        """`poll` creates the object that checks, without waiting, whether a connection was closed. Pass the original
        one under gevent, whose replacement yields to the event loop for each check."""
        self._poll = poll
        self._tls = tls
        self._clock = clock
        self._connections_max = connections_per_host_max
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.RLock()  # a signal handler may close the pool during a call
        self._given_back = threading.Condition(self._lock)
        self._waiting = 0
        self._hosts: dict[Address, _Host] = {}
        self._closed = False
        reset_in_children(self)

    def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, watch: Watch | None = None
    ) -> HttpAnswer:
        """Perform one request over a kept or a new connection. Raises NotSent or NoAnswer."""
        host = self._host(address)
        connection = self._take(address, host, timeout_s)
        try:
            if connection is None:
                connection = self._connect(address, host, timeout_s)
            return connection.exchange(method, head, body, timeout_s, watch)
        finally:
            # After any exception, KeyboardInterrupt included, the connection is not reusable.
            self._give_back(host, connection)

    def begin(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> PendingAnswer:
        """Send one request, whose answer is read later. Raises NotSent."""
        host = self._host(address)
        connection = self._take(address, host, timeout_s)
        try:
            if connection is None:
                connection = self._connect(address, host, timeout_s)
            connection.send(head, body, timeout_s)
        except BaseException:
            self._give_back(host, connection)
            raise
        return PendingAnswer(connection, method, partial(self._give_back, host, connection))

    def _host(self, address: Address) -> _Host:
        host = self._hosts.get(address)
        if host is None:
            with self._lock:
                host = self._hosts.setdefault(address, _Host())
        return host

    def _take(self, address: Address, host: _Host, timeout_s: float) -> Connection | None:
        """Return an idle connection, or None if a new one may be opened."""
        with self._lock:
            if host.taken >= self._connections_max:
                self._await_connection(address, host, timeout_s)
            if self._closed:
                raise NotSent("this client is closed")
            host.taken += 1
            while host.idle:
                connection = host.idle.pop()
                if connection.looks_alive(self._clock()):
                    host.in_use.add(connection)
                    return connection
                connection.close()
        return None

    def _await_connection(self, address: Address, host: _Host, timeout_s: float) -> None:
        self._wait_for(lambda: host.taken < self._connections_max, timeout_s)
        if host.taken >= self._connections_max:
            raise NotSent(f"all {self._connections_max} connections to {address.netloc} are busy")

    def _connect(self, address: Address, host: _Host, timeout_s: float) -> Connection:
        timeout_s = min(self._connect_timeout_s, timeout_s)
        try:
            tls = self._tls_context() if address.scheme == "https" else None
            connection = Connection(address, timeout_s, tls, self._poll)
        except OSError as fault:
            raise NotSent(describe(fault, timeout_s)) from fault
        with self._lock:
            if self._closed:
                connection.close()
                raise NotSent("this client is closed")
            host.in_use.add(connection)
        return connection

    def _give_back(self, host: _Host, connection: Connection | None) -> None:
        with self._lock:
            host.taken -= 1
            if self._waiting:
                self._given_back.notify_all()
            if connection is None:
                return
            host.in_use.discard(connection)
            if connection.reusable and not self._closed:
                connection.idle_since = self._clock()
                host.idle.append(connection)
                return
        connection.close()

    def _wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Wait under the lock until connections that are given back make it so."""
        self._waiting += 1
        try:
            self._given_back.wait_for(is_so, timeout_s)
        finally:
            self._waiting -= 1

    def _tls_context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = ssl.create_default_context()
            return self._tls

    def rest(self) -> None:
        """Close idle connections. The pool remains usable."""
        with self._lock:
            self._close_idle()

    def _close_idle(self) -> None:
        for host in self._hosts.values():
            while host.idle:
                host.idle.pop().close()

    def hang_up(self) -> None:
        """Close idle connections, refuse new requests, and have brokers answer waiting ones now."""
        with self._lock:
            self._closed = True
            self._close_idle()
            for connection in self._in_use():
                connection.hang_up()

    def close(self, answers_within_s: float = 0.0) -> None:
        """Close idle connections and abort the others: a thread that waits for an answer gets NoAnswer at once. With
        `answers_within_s` it may have its answer within that time, and its broker stops waiting."""
        if answers_within_s > 0:
            self.hang_up()
        with self._lock:
            self._closed = True
            self._close_idle()
            self._wait_for(lambda: not self._in_use(), answers_within_s)
            for connection in self._in_use():
                connection.abort()

    def _reset_in_child(self) -> None:
        hosts, self._hosts = self._hosts, {}
        self._lock = threading.RLock()
        self._given_back = threading.Condition(self._lock)
        self._waiting = 0
        for host in hosts.values():
            for connection in [*host.idle, *host.in_use]:
                connection.close_in_child()

    def _in_use(self) -> list[Connection]:
        return [connection for host in self._hosts.values() for connection in host.in_use]
