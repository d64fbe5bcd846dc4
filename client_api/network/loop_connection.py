"""Keep-alive HTTP/1.1 connections to brokers for an asyncio event loop, and a bounded pool of them.

What connection.py does for threads, with the same errors and the same reader of answers. A request counts as sent in
full once the kernel has all of it: a connection that is lost before that raises NotSent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from portalmq.network.connection import (
    CONNECT_TIMEOUT_S,
    CONNECTIONS_PER_HOST_MAX,
    IDLE_S_MAX,
    JOIN_BYTES_MAX,
    Address,
    Doubt,
    NoAnswer,
    NotSent,
    describe,
)
from portalmq.network.forking import reset_in_children
from portalmq.network.http_answer import AnswerEnd, Arrived, HttpAnswer, read_answer


class LoopConnection(asyncio.Protocol):
    """One socket to one broker, with one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._end: AnswerEnd | None = None
        self._arrived = bytearray()
        self._is_whole = self._is_over = False
        self._is_sent = True
        self._fault: Exception | None = None
        self.used = self._was_used = False
        self.reusable = True
        self.idle_since = 0.0

    # --- what the event loop reports ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=0)  # so that it reports when all is with the kernel

    def pause_writing(self) -> None:
        self._is_sent = False

    def resume_writing(self) -> None:
        self._is_sent = True

    def data_received(self, data: bytes) -> None:
        if self._end is None:
            self.abort()  # nobody asked
            return
        self._arrived += data
        self._is_whole = self._end.is_in(self._arrived)
        self._tell()

    def eof_received(self) -> None:
        self._is_over = True
        self._tell()

    def connection_lost(self, fault: Exception | None) -> None:
        self._is_over, self._fault = True, fault
        self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    # --- one exchange ------------------------------------------------------------------------------------------------

    def looks_alive(self, now: float) -> bool:
        """Return False if the broker has closed the connection, or it was idle for too long."""
        return not self._is_over and now - self.idle_since < IDLE_S_MAX

    def send(self, method: str, head: bytes, body: bytes) -> None:
        """Send one request, whose `answer` is read next. Raises NotSent."""
        assert self._transport is not None
        self._was_used, self.used, self.reusable = self.used, True, False
        self._end, self._arrived, self._is_whole = AnswerEnd(method), bytearray(), False
        if not self._is_over and not self._transport.is_closing():
            if len(body) <= JOIN_BYTES_MAX:
                self._transport.write(head + body)
            else:
                self._transport.write(head)
                self._transport.write(body)
        if self._is_over or self._transport.is_closing():
            raise NotSent(str(self._fault or "the connection was closed"))

    async def answer(self, method: str, timeout_s: float, doubt: Doubt | None) -> HttpAnswer:
        """Return the answer to the request that was sent. Each wait for the network ends after `timeout_s`. Raises
        NotSent or NoAnswer."""
        pause_s = timeout_s if doubt is None else min(doubt.first_s, timeout_s)
        deadline = time.monotonic() + timeout_s
        while not self._is_whole and not self._is_over:
            if await self._wait(pause_s):
                pause_s, deadline = timeout_s, time.monotonic() + timeout_s
                continue
            is_doubtful = doubt is not None and not self._arrived and time.monotonic() < deadline
            if doubt is not None and is_doubtful and await doubt.gives_up() and not self._arrived:
                raise NoAnswer("it is silent, and other brokers are not")
            left_s = deadline - time.monotonic()
            if left_s <= 0 and not (self._is_whole or self._is_over):
                raise NoAnswer(describe(TimeoutError(), timeout_s))
            pause_s = left_s if doubt is None else min(doubt.every_s, left_s)
        try:
            answer, is_reusable = read_answer(Arrived(b""), method, bytes(self._arrived))
        except (OSError, ValueError) as fault:
            if not self._is_sent:
                raise NotSent(str(self._fault or fault)) from fault
            silent = isinstance(fault, ConnectionError)
            raise NoAnswer(describe(self._fault or fault, timeout_s), stale=self._was_used and silent) from fault
        self._end, self._arrived = None, bytearray()
        self.reusable = self._is_sent and is_reusable and not self._is_over
        return answer

    async def _wait(self, within_s: float) -> bool:
        """Return whether something has come."""
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(within_s, _end_wait, waiter)
        try:
            has_come: bool = await waiter
        finally:
            timer.cancel()
            self._waiter = None
        return has_come

    # --- the end -----------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Say, during an exchange, that no request follows. A broker that waits before it answers stops waiting."""
        if self._transport is None or self._is_over:
            return
        # TLS has no half to close, but the connection below it has; not every event loop lets one at it.
        with contextlib.suppress(OSError, TypeError, AttributeError):
            if self._transport.get_extra_info("ssl_object") is None:
                self._transport.write_eof()
            else:
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_WR)

    def abort(self) -> None:
        """Close it now."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()


def _end_wait(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


class _LoopHost:
    """The connections to one address. Invariant: len(idle) + taken <= the pool's bound, where `taken` counts those in
    use and those that are being opened."""

    def __init__(self) -> None:
        self.idle: deque[LoopConnection] = deque()
        self.in_use: set[LoopConnection] = set()
        self.waiting: deque[asyncio.Future[bool]] = deque()
        self.taken = 0


class LoopAnswer(NamedTuple):
    """The answer to a request that was sent. Its connection belongs to it until it is read, once."""

    host: _LoopHost
    connection: LoopConnection
    method: str


class LoopPool:
    """For one event loop. The child of a fork gets an empty pool: two processes on one socket would mix answers."""

    def __init__(
        self,
        *,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        connections_per_host_max: int = CONNECTIONS_PER_HOST_MAX,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self._tls = tls
        self._clock = clock
        self._connections_max = connections_per_host_max
        self._connect_timeout_s = connect_timeout_s
        self._hosts: dict[Address, _LoopHost] = {}
        self._free = asyncio.Event()
        self._closed = False
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        self._hosts = {}

    async def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, doubt: Doubt | None = None
    ) -> HttpAnswer:
        """Perform one request over a kept or a new connection. Raises NotSent or NoAnswer."""
        return await self.read(await self.begin(address, method, head, body, timeout_s), timeout_s, doubt)

    async def begin(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> LoopAnswer:
        """Send one request, whose answer is read later. Raises NotSent."""
        host = self._hosts.setdefault(address, _LoopHost())
        while True:
            connection = await self._take(address, host, timeout_s)
            was_used = connection.used
            try:
                connection.send(method, head, body)
            except NotSent:
                self._give_back(host, connection)
                if not was_used:
                    raise
            except BaseException:
                self._give_back(host, connection)
                raise
            else:
                return LoopAnswer(host, connection, method)

    async def read(self, pending: LoopAnswer, timeout_s: float, doubt: Doubt | None = None) -> HttpAnswer:
        """Read an answer, once. Raises NotSent or NoAnswer."""
        try:
            return await pending.connection.answer(pending.method, timeout_s, doubt)
        finally:
            self._give_back(pending.host, pending.connection)

    async def _take(self, address: Address, host: _LoopHost, timeout_s: float) -> LoopConnection:
        deadline = self._clock() + timeout_s
        while host.taken >= self._connections_max and not self._closed:
            await self._await_connection(address, host, deadline - self._clock())
        if self._closed:
            raise NotSent("this client is closed")
        host.taken += 1
        while host.idle:
            connection = host.idle.pop()
            if connection.looks_alive(self._clock()):
                host.in_use.add(connection)
                return connection
            connection.abort()
        try:
            connection = await self._connect(address, min(self._connect_timeout_s, timeout_s))
        except BaseException:
            self._give_back(host, None)
            raise
        host.in_use.add(connection)
        return connection

    async def _await_connection(self, address: Address, host: _LoopHost, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[bool] = loop.create_future()
        host.waiting.append(waiter)
        timer = loop.call_later(max(0.0, within_s), _end_wait, waiter)
        try:
            if not await waiter:
                raise NotSent(f"all {self._connections_max} connections to {address.netloc} are busy")
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._wake_one(host)  # it was given a connection that it does not take
            raise
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):
                host.waiting.remove(waiter)

    async def _connect(self, address: Address, timeout_s: float) -> LoopConnection:
        is_tls = address.scheme == "https"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await loop.create_connection(
                    LoopConnection,
                    address.host,
                    address.port,
                    ssl=self._tls_context() if is_tls else None,
                    server_hostname=address.host if is_tls else None,
                )
        except OSError as fault:
            raise NotSent(describe(fault, timeout_s)) from fault
        if self._closed:
            connection.abort()
            raise NotSent("this client is closed")
        return connection

    def _give_back(self, host: _LoopHost, connection: LoopConnection | None) -> None:
        host.taken -= 1
        self._wake_one(host)
        self._free.set()
        if connection is None:
            return
        host.in_use.discard(connection)
        if connection.reusable and not self._closed:
            connection.idle_since = self._clock()
            host.idle.append(connection)
        else:
            connection.abort()

    def _wake_one(self, host: _LoopHost) -> None:
        while host.waiting:
            waiter = host.waiting.popleft()
            if not waiter.done():
                waiter.set_result(True)
                return

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def rest(self) -> None:
        """Close idle connections. The pool remains usable."""
        for host in self._hosts.values():
            while host.idle:
                host.idle.pop().abort()

    def hang_up(self) -> None:
        """Close idle connections, refuse new requests, and have brokers answer waiting ones now."""
        self._closed = True
        self.rest()
        for host in self._hosts.values():
            for waiter in host.waiting:
                _end_wait(waiter)
            for connection in host.in_use:
                connection.hang_up()

    async def close(self, answers_within_s: float = 0.0) -> None:
        """Close idle connections and abort the others; those that wait for an answer may have it within
        `answers_within_s`."""
        self.hang_up()
        deadline = self._clock() + answers_within_s
        with contextlib.suppress(TimeoutError):
            while answers_within_s and self._in_use():
                self._free.clear()
                await asyncio.wait_for(self._free.wait(), max(0.0, deadline - self._clock()))
        for connection in self._in_use():
            connection.abort()
            connection._tell()

    def _in_use(self) -> list[LoopConnection]:
        return [connection for host in self._hosts.values() for connection in host.in_use]
