"""The two processes of a broker: an arbiter that holds the port and the data directory, and one worker that serves.

gunicorn is made for many equal, replaceable workers. Here the one worker is the broker: it is never respawned, and
neither process outlives the other.

    arbiter  checks, binds, locks, forks; forwards SIGTERM; ends with the worker's exit code
    worker   gevent: all requests are greenlets of one thread; dies with the arbiter (system.die_with)
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import time
from functools import partial
from typing import Any

import gevent
import msgspec
from gevent.event import Event
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn import util
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.http import errors as http_errors
from gunicorn.http.parser import RequestParser
from gunicorn.sock import ssl_context
from gunicorn.workers.base_async import AsyncWorker
from gunicorn.workers.ggevent import GeventWorker

from portalmq.broker.cluster.exits import EX_SOFTWARE
from portalmq.broker.server.connections import ClientConnection, Connections, hang_up
from portalmq.broker.server.heads import BoundedRequest
from portalmq.broker.server.responses import join_responses
from portalmq.errors import PROBLEM_TYPE_BASE
from portalmq.system import die_with

log = logging.getLogger("portalmq.process")

PARENT_CHECK_S = 1.0
# A refused client that still sends has this long to read the reason, before its connection is closed.
LINGER_S = 2.0
LINGER_BYTES_MAX = 64 * 1024 * 1024
# A new connection has this long for its handshake and the head of its first request.
FIRST_HEAD_S = 10.0
# Without a free descriptor no connection is accepted for so long; logged once a minute.
ACCEPT_AGAIN_S = 0.5
SHORTAGE_SAID_S = 60.0
SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# A native thread that has waited this long may take the interpreter. With CPython's 5 ms, a commit that needs it for
# 20 us at a time would wait 5 ms before each step while the hub is busy.
SWITCH_INTERVAL_S = 0.0002


class BrokerArbiter(Arbiter):  # type: ignore[misc]
    """One worker, forked once."""

    worker_status: int | None = None

    def init_signals(self) -> None:
        ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        super().init_signals()
        if ignores_hangup:  # started under nohup
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def handle_int(self) -> None:
        """Drain on Ctrl-C as on SIGTERM; a second one ends at once (see Arbiter.stop)."""
        self.handle_term()

    def handle_hup(self) -> None:
        """Drain when the terminal has gone. Nothing is reloaded: settings are read at start."""
        self.handle_term()

    def handle_ttin(self) -> None:
        """Ignore the signal: a broker has one worker."""

    handle_ttou = handle_ttin
    handle_usr2 = handle_ttin

    def reap_workers(self) -> None:
        """Store the worker's exit status; the main loop ends then."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            worker = self.WORKERS.pop(pid, None)
            if worker is not None:
                worker.tmp.close()
                self.worker_status = _exit_code(status)

    def manage_workers(self) -> None:
        if self.worker_status is not None:
            raise HaltServer("the worker has ended", self.worker_status or EX_SOFTWARE)
        super().manage_workers()

    def halt(self, reason: str | None = None, exit_status: int = 0) -> None:
        """End with `exit_status`, or else with the worker's exit code."""
        self.stop()
        code = exit_status or self.worker_status or 0
        if code:
            log.error("the broker ends with exit code %d", code)
        sys.exit(code)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class BrokerWorker(GeventWorker):  # type: ignore[misc]
    """Serves until SIGTERM, then drains. `app.broker_process` is the `composition.BrokerProcess` of the application."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.app.config
        self.connections = Connections(
            config.worker_connections,
            config.connections_per_address_max,
            with_loopback=config.connections_per_address_loopback,
        )
        self.in_flight = 0
        self._ending: Event | None = None

    def init_process(self) -> None:
        if not die_with(self.ppid):
            log.info("the system does not end this worker with its arbiter: the worker checks for that itself")
        RequestParser.mesg_class = BoundedRequest
        join_responses()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        fix_settings(self.cfg)
        super().init_process()

    def init_signals(self) -> None:
        super().init_signals()
        # Ctrl-C reaches the whole foreground group; the arbiter forwards it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.alive = False  # answers have `Connection: close` from now on
        if self._ending is None:
            os._exit(0)  # it may still wait for ZooKeeper, and has acknowledged nothing
        self._ending.set()

    def run(self) -> None:
        self._ending = Event()
        servers = [self._serve(listener) for listener in self.sockets]
        process = self.app.broker_process
        starting = gevent.spawn(process.start)
        while not self._ending.wait(PARENT_CHECK_S):
            if os.getppid() != self.ppid:
                break
        starting.kill()  # it may still wait for ZooKeeper
        process.drain()
        for server in servers:
            server.close()
        if not self._idle_within(self.app.config.drain_timeout_s):
            log.warning("%d calls were still running after the drain timeout", self.in_flight)
        process.close()

    def _serve(self, listener: Any) -> StreamServer:
        listener.setblocking(1)
        # `handle` does the handshake, where a failure is only a refused request.
        tls = {"ssl_context": ssl_context(self.cfg), "do_handshake_on_connect": False} if self.cfg.is_ssl else {}
        server = Listener(listener, handle=partial(self.handle, listener), spawn=Pool(self.worker_connections), **tls)
        server.connections = self.connections
        server.start()
        return server

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        connection = ClientConnection(addr[0], partial(hang_up, client))
        if not self.connections.enter(connection):
            log.debug("%s is at its limit of connections", addr[0])
            client.close()
            return
        here = gevent.getcurrent()
        here.connection = connection
        # To gunicorn the client has disconnected, so it closes without logging.
        late = ConnectionResetError(errno.ECONNRESET, "the first request did not arrive in time")
        here.first_head = gevent.Timeout.start_new(FIRST_HEAD_S, late)
        # Between requests gunicorn's own keep-alive timer is the shorter one.
        client.settimeout(idle_timeout_s(self))
        try:
            AsyncWorker.handle(self, listener, client, addr)
        finally:
            here.first_head.close()
            self.connections.leave(connection)

    def _idle_within(self, seconds: float) -> bool:
        """Wait for running requests, not for idle connections; return False after `seconds`."""
        with gevent.Timeout(seconds, False):
            while self.in_flight:
                gevent.sleep(0.01)
            return True
        return False

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        self.in_flight += 1
        here = gevent.getcurrent()
        if req.req_number == 1:
            here.first_head.close()
        connection = here.connection
        self.connections.busy(connection)
        try:
            return super().handle_request(listener_name, req, sock, addr)
        finally:
            self.in_flight -= 1
            self.connections.idle(connection)

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Answer requests that gunicorn refuses before Flask (a broken request line, say) with a problem document."""
        gevent.getcurrent().first_head.close()
        status, code, title = _refusal(exc)
        if status == 500:
            log.error("a connection failed", exc_info=exc)
        try:
            client.sendall(_problem_response(status, code, title))
        except OSError as fault:
            log.debug("the refusal could not be sent: %s", fault)
            return
        if isinstance(exc, http_errors.ParseException):  # closing with unread bytes would destroy the answer
            util.close_graceful(client, timeout=LINGER_S, max_drain=LINGER_BYTES_MAX)


class Listener(StreamServer):  # type: ignore[misc]
    """Accepts connections. Without a free descriptor it pauses, and logs that."""

    connections: Connections
    _said_at = -SHORTAGE_SAID_S

    def do_read(self) -> Any:
        try:
            return super().do_read()
        except OSError as fault:
            if fault.errno not in SHORTAGES:
                raise
            self._wait(fault)
            return None

    def _wait(self, fault: OSError) -> None:
        now = time.monotonic()
        if now - self._said_at >= SHORTAGE_SAID_S:
            self._said_at = now
            log.error("no connection is accepted for now, while %d are open: %s", len(self.connections), fault)
        self.connections.make_room()
        self.stop_accepting()
        gevent.spawn_later(ACCEPT_AGAIN_S, self._start_accepting_if_started)


# The answers to requests that gunicorn cannot parse.
_REFUSALS: tuple[tuple[type[BaseException], tuple[int, str, str]], ...] = (
    (http_errors.LimitRequestLine, (414, "uri_too_long", "The request line is too long")),
    (http_errors.LimitRequestHeaders, (431, "headers_too_large", "The header fields are too many or too large")),
    (http_errors.UnsupportedTransferCoding, (415, "unsupported_media_type", "The transfer coding is not supported")),
    (http_errors.ExpectationFailed, (417, "expectation_failed", "The expectation is not supported")),
    (http_errors.ForbiddenProxyRequest, (403, "forbidden", "The proxy is not allowed")),
    (http_errors.InvalidResponseHeader, (500, "internal", "The broker made a mistake")),
    (http_errors.InvalidResponseHeaderName, (500, "internal", "The broker made a mistake")),
    (http_errors.ParseException, (400, "invalid_request", "The request is not valid HTTP")),
    (OSError, (400, "invalid_request", "The connection failed within a request")),
)


def _refusal(exc: BaseException) -> tuple[int, str, str]:
    for kind, refusal in _REFUSALS:
        if isinstance(exc, kind):
            return refusal
    return 500, "internal", "The broker made a mistake"


def _problem_response(status: int, code: str, title: str) -> bytes:
    body = msgspec.json.encode(
        {
            "type": PROBLEM_TYPE_BASE + code,
            "title": title,
            "status": status,
            "detail": title,
            "code": code,
            "retryable": False,
            "outcome": "unknown" if status == 500 else "not_applied",
        }
    )
    head = (
        f"HTTP/1.1 {status} {title}\r\nContent-Type: application/problem+json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("ascii") + body


def fix_settings(cfg: Any) -> None:
    """Make each setting an attribute, since none changes. A request reads some 25 of them, and gunicorn's lookup is a
    method call for each."""
    vars(cfg).update({name: setting.get() for name, setting in cfg.settings.items()})


# --- gunicorn's hooks around a request -------------------------------------------------------------------------------


def pre_request(worker: BrokerWorker, req: Any) -> None:
    """Limit the pauses of the client, and let the application close the connection."""
    req.body.close_connection = req.force_close
    req.body.came_with_head = req.came_with_head
    req.body.is_of_a_peer = partial(worker.connections.trust, gevent.getcurrent().connection)
    sock = req.unreader.sock
    sock.settimeout(worker.app.config.body_timeout_s)
    if req._expected_100_continue and _announced_length(req) > worker.app.config.body_bytes_max:
        # Answer 413 at once, without `100 Continue`.
        req._expected_100_continue = False


def post_request(worker: BrokerWorker, req: Any, environ: dict[str, Any], resp: Any) -> None:
    """Yield to other connections: without this, one busy connection starves the rest."""
    sock = req.unreader.sock
    if req.must_close:
        # Closing with unread bytes in the buffer sends RST, which can destroy the answer before the client reads it.
        util.close_graceful(sock, timeout=LINGER_S, max_drain=LINGER_BYTES_MAX)
    else:
        sock.settimeout(idle_timeout_s(worker))
    gevent.sleep(0)


def idle_timeout_s(worker: BrokerWorker) -> float:
    """Return the timeout of a read between two requests: longer than the keep-alive timer, which closes quietly."""
    return float(worker.cfg.keepalive) + 5.0


def _announced_length(req: Any) -> int:
    for name, value in req.headers:
        if name == "CONTENT-LENGTH" and value.isdigit():
            return int(value)
    return 0
