"""One connection of a client: its requests, one after the other, and their answers in the same order.

    wait for a head  ->  parse  ->  traffic, calls of brokers: the dispatcher's answer  ->  send  -> ...
                                    every other route: a WSGI environment, Flask

A connection ends quietly when a head does not arrive in time, with an answer when a request is not understood. It is
idle, and may be closed for another one, only while it waits for a head.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import partial
from socket import SHUT_WR
from typing import Any

import gevent
from gevent import get_hub
from gevent.ssl import SSLSocket

from portalmq.broker.api import problems
from portalmq.broker.api.dispatch import Dispatcher
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.api.problems import InternalError
from portalmq.broker.server.connections import ClientConnection, Connections, hang_up
from portalmq.broker.server.http import answers
from portalmq.broker.server.http.heads import RefusedHead, RequestHead, parse_head
from portalmq.broker.server.http.stream import RECEIVE_BYTES, ReceivedBytes, RequestBody
from portalmq.broker.server.http.wsgi import WsgiAnswer, environ_of
from portalmq.errors import PortalMQError

log = logging.getLogger("portalmq.http")

# A new connection has this long for its handshake and the head of its first request.
FIRST_HEAD_S = 10.0
# A refused client that still sends has this long to read the reason, before its connection is closed.
LINGER_S = 2.0
LINGER_BYTES_MAX = 64 * 1024 * 1024

_READ = 1  # libev's EV_READ


class HttpServer:
    """The connections of a broker. `in_flight`: requests that are being answered. While `draining`, each answer ends
    its connection."""

    def __init__(
        self, application: Dispatcher, connections: Connections, *, keepalive_s: float, body_timeout_s: float
    ) -> None:
        self.application = application
        self.connections = connections
        self.keepalive_s = keepalive_s
        self.body_timeout_s = body_timeout_s
        self.in_flight = 0
        self.draining = False

    def handle(self, client: Any, address: Any) -> None:
        """Serve a connection to its end."""
        entry = ClientConnection(address[0], partial(hang_up, client))
        if not self.connections.enter(entry):
            log.debug("%s is at its limit of connections", address[0])
            client.close()
            return
        connection = HttpConnection(self, client, entry, address)
        try:
            connection.serve()
        finally:
            connection.close()
            self.connections.leave(entry)


class HttpConnection:
    """One connection. To requests it is their `http_request.Client`."""

    __slots__ = ("_address", "_entry", "_hub", "_is_tls", "_readable", "_received", "_server", "_timer", "socket")

    def __init__(self, server: HttpServer, client: Any, entry: ClientConnection, address: Any) -> None:
        self.socket = client
        self._server = server
        self._entry = entry
        self._address = address
        self._is_tls = isinstance(client, SSLSocket)
        self._received = ReceivedBytes(client)
        self._hub = get_hub()
        self._readable = self._hub.loop.io(client.fileno(), _READ)
        self._timer = self._hub.loop.timer(min(FIRST_HEAD_S, server.keepalive_s), server.keepalive_s)

    def trust(self) -> None:
        self._server.connections.trust(self._entry)

    def serve(self) -> None:
        client = self.socket
        client.settimeout(self._server.body_timeout_s)
        self._timer.start(hang_up, client)
        try:
            if self._is_tls:
                client.do_handshake()
            while self._serve_next():
                pass
        except RefusedHead as refused:
            self._refuse(refused)
        except OSError as fault:  # of the connection, or of TLS
            log.debug("a connection has failed: %s", fault)
        except Exception:
            log.exception("a connection has failed")

    def close(self) -> None:
        for watcher in (self._timer, self._readable):
            watcher.stop()
            watcher.close()
        self.socket.close()

    def _serve_next(self) -> bool:
        """Serve the next request; return False when no other follows."""
        server, received = self._server, self._received
        try:
            raw = received.head(self._receive)
        finally:
            self._timer.stop()
        if raw is None:
            return False
        head = parse_head(raw)
        request = self._request(head)
        server.in_flight += 1
        server.connections.busy(self._entry)
        try:
            keeps = self._answer(head, request)
            if request.must_close or (not keeps and received.has_some()):
                self._linger()
        finally:
            server.in_flight -= 1
            server.connections.idle(self._entry)
        if request.must_close or not keeps:
            return False
        if received.has_some():
            gevent.sleep(0)  # a client that pipelines does not keep the others waiting
        self._timer.again(hang_up, self.socket)
        return True

    def _receive(self) -> bytes:
        """Wait for bytes. Other greenlets run meanwhile: no connection keeps the others waiting."""
        client = self.socket
        if self._is_tls and client.pending():
            gevent.sleep(0)
        else:
            self._hub.wait(self._readable)
        data: bytes = client.recv(RECEIVE_BYTES)
        return data

    def _request(self, head: RequestHead) -> HttpRequest:
        received, length = self._received, head.length
        body = source = None
        if length is not None and length <= len(received.data) - received.at:
            body = received.take(length) if length else b""
        elif length is not None or head.is_chunked:
            source = RequestBody(received, length, asks=head.expects_continue)
        return HttpRequest(
            head.method, head.path, head.query, head.headers, length, head.is_chunked, body, source, self
        )

    def _answer(self, head: RequestHead, request: HttpRequest) -> bool:
        """Answer a request; return whether the connection may have another."""
        application = self._server.application

        def keeps() -> bool:
            return head.keeps_alive and not request.must_close and not self._server.draining

        answer = application.answer(request)
        if answer is not None:
            kept = keeps()
            try:
                opening = answers.head_of(answer, head.minor, keeps=kept)
                answers.send(self.socket, opening, b"" if head.method == "HEAD" else answer.body)
            finally:
                application.sent(request)
            return kept
        scheme = "https" if self._is_tls else "http"
        environ = environ_of(request, head, self._address, self.socket.getsockname(), scheme)
        response = WsgiAnswer(self.socket, head, keeps)
        try:
            response.serve(application, environ)
        except OSError:
            raise
        except Exception:
            log.exception("%s %s failed", head.method, head.path[:200])
            if response.has_begun:
                return False  # an answer that ends early shows that it is not complete
            request.must_close = True
            self._send_problem(InternalError(outcome="unknown"))
        return response.keeps

    def _refuse(self, refused: RefusedHead) -> None:
        with suppress(OSError):
            self._send_problem(refused)
            self._linger()

    def _send_problem(self, error: PortalMQError) -> None:
        answer = problems.of(error)
        answers.send(self.socket, answers.head_of(answer, 1, keeps=False), answer.body)

    def _linger(self) -> None:
        """Read what the client still sends, for a while: closing with unread bytes sends a reset, which can destroy the
        answer before the client reads it (RFC 9112, section 9.6)."""
        client = self.socket
        left = LINGER_BYTES_MAX
        with suppress(OSError), gevent.Timeout(LINGER_S, False):
            client.shutdown(SHUT_WR)
            while left > 0 and (data := client.recv(RECEIVE_BYTES)):
                left -= len(data)
