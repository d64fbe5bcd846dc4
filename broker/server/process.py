"""The two processes of a broker: an arbiter that holds the port and the data directory, and one worker that serves.

gunicorn is made for many equal, replaceable workers. Here the one worker is the broker: it is never respawned, and
neither process outlives the other. gunicorn keeps the processes; http/ serves the connections.

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
from importlib import metadata
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Pool
from gevent.server import StreamServer
from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer
from gunicorn.sock import ssl_context
from gunicorn.workers.ggevent import GeventWorker

from portalmq.broker.cluster.exits import EX_SOFTWARE
from portalmq.broker.server.connections import Connections
from portalmq.broker.server.http.connection import HttpServer
from portalmq.system import die_with

log = logging.getLogger("portalmq.process")

PARENT_CHECK_S = 1.0
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
        self.http: HttpServer
        self._ending: Event | None = None

    def init_process(self) -> None:
        if not die_with(self.ppid):
            log.info("the system does not end this worker with its arbiter: the worker checks for that itself")
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        super().init_process()

    def patch(self) -> None:
        """Patch the standard library. For each of its 25 events gevent asks the metadata of all installed packages for
        subscribers: 0.13 s of processor time where there are a hundred. They are read once."""
        entry_points = metadata.entry_points
        metadata.entry_points = entry_points().select
        try:
            super().patch()
        finally:
            metadata.entry_points = entry_points

    def init_signals(self) -> None:
        super().init_signals()
        # Ctrl-C reaches the whole foreground group; the arbiter forwards it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.alive = False
        if self._ending is None:
            os._exit(0)  # it may still wait for ZooKeeper, and has acknowledged nothing
        self.http.draining = True
        self._ending.set()

    def run(self) -> None:
        config = self.app.config
        self.http = HttpServer(
            self.wsgi.wsgi_app,
            self.connections,
            keepalive_s=float(config.keepalive_s),
            body_timeout_s=config.body_timeout_s,
        )
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
            log.warning("%d calls were still running after the drain timeout", self.http.in_flight)
        process.close()

    def _serve(self, listener: Any) -> StreamServer:
        listener.setblocking(1)
        # `HttpConnection` does the handshake, where it has a time limit.
        tls = {"ssl_context": ssl_context(self.cfg), "do_handshake_on_connect": False} if self.cfg.is_ssl else {}
        server = Listener(listener, handle=self.http.handle, spawn=Pool(self.worker_connections), **tls)
        server.connections = self.connections
        server.start()
        return server

    def _idle_within(self, seconds: float) -> bool:
        """Wait for running requests, not for idle connections; return False after `seconds`."""
        with gevent.Timeout(seconds, False):
            while self.http.in_flight:
                gevent.sleep(0.01)
            return True
        return False


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
