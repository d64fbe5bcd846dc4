"""A broker inside another program, for tests: the real one, on a thread of its own, with its files in memory.

    the caller's threads --HTTP over loopback--> event loop of this thread --> Broker --> SQLite files in /dev/shm

No process starts, and no module is patched: gevent has an event loop for each thread. Time can be moved on, so that a
test need not wait for a lease, a delay or a message's end.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

import gevent
from gevent.event import Event
from gevent.server import StreamServer

from portalmq.broker.api.app import create_app
from portalmq.broker.broker import Broker
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.yielding import give_way
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.server.connections import Connections
from portalmq.broker.server.http.connection import HttpServer
from portalmq.broker.storage.disk import DiskGuard
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState
from portalmq.system import steady_clock

HOST = "127.0.0.1"
START_WITHIN_S = 60.0
CALL_WITHIN_S = 60.0
CONNECTIONS_MAX = 500
SHARED_MEMORY = Path("/dev/shm")

T = TypeVar("T")


class InProcessBroker:
    """Runs until `close`. Its data is deleted then."""

    def __init__(self) -> None:
        self.url = ""
        self._skipped_ns = 0
        self._ready = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="portalmq-in-process-broker", daemon=True)

    def start(self) -> None:
        """Return once it serves. Raises the error that prevents it."""
        self._thread.start()
        if not self._ready.wait(START_WITHIN_S):
            raise TimeoutError(f"the broker in this process was not ready within {START_WITHIN_S:g} s")
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """End the broker and delete its data. Raises the fault that ended it earlier, if one did."""
        if self._thread.is_alive():
            self._loop.run_callback_threadsafe(self._stop.set)
            self._thread.join(CALL_WITHIN_S)
        if self._fault is not None:
            raise self._fault

    def advance(self, seconds: float) -> None:
        """Move the broker's clocks on: leases and delays end, messages expire, as if the time had passed."""
        if seconds < 0:
            raise ValueError("time moves on, and not back")

        def move() -> None:
            self._skipped_ns += round(seconds * 1e9)
            for attached in self._broker.groups.all_attached():
                attached.on_time_passed()

        self._on_loop(move)

    def _on_loop(self, work: Callable[[], T]) -> T:
        """Run `work` in a greenlet of the broker, and return what it returns."""
        done = threading.Event()
        outcome: list[T] = []
        fault: list[BaseException] = []

        def run() -> None:
            try:
                outcome.append(work())
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                fault.append(error)
            finally:
                done.set()

        if not self._thread.is_alive():
            raise RuntimeError("the broker is closed")
        self._loop.run_callback_threadsafe(lambda: gevent.spawn(run))
        if not done.wait(CALL_WITHIN_S):
            raise TimeoutError(f"the broker in this process did not answer within {CALL_WITHIN_S:g} s")
        if fault:
            raise fault[0]
        return outcome[0]

    # --- the broker's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        hub = gevent.get_hub()
        hub.NOT_ERROR = (*hub.NOT_ERROR, ConnectionError)
        self._loop, self._stop = hub.loop, Event()
        try:
            with _directory() as directory, self._serving(directory):
                self._ready.set()
                self._stop.wait()
        except BaseException as fault:  # noqa: BLE001 - raised in the caller's thread
            self._fault = fault
        finally:
            self._ready.set()
            hub.destroy(destroy_loop=True)

    @contextmanager
    def _serving(self, directory: Path) -> Iterator[None]:
        plane = Standalone(directory / "control", give_way=give_way)
        plane.start()
        connections = Connections(CONNECTIONS_MAX, 0)
        place = socket.create_server((HOST, 0))
        place.setblocking(False)
        config = BrokerConfig(data_dir=directory, zookeeper="none", host=HOST, port=place.getsockname()[1])
        metrics = Metrics(version("portalmq"), broker_id=1)
        broker = self._broker = Broker(
            config,
            Catalog(plane),
            broker_id=1,
            me=BrokerState(url=config.url, incarnation=1, store_uuid="in-process"),
            disk=DiskGuard(directory, low_water_bytes=0, ballast_bytes=0),
            metrics=metrics,
            on_fatal=self._on_fatal,
            clock=Clock(
                lambda: time.clock_gettime_ns(steady_clock()) + self._skipped_ns,
                lambda: time.time_ns() + self._skipped_ns,
            ),
        )
        app = create_app(broker, config, metrics, Auth(), more=PROTOCOL_ROUTES)
        http = HttpServer(
            cast(Any, app).wsgi_app,  # with the hot routes in front
            connections,
            keepalive_s=float(config.keepalive_s),
            body_timeout_s=config.body_timeout_s,
        )
        listener = StreamServer(place, http.handle)
        broker.start()
        listener.start()
        self.url = config.url
        try:
            yield
        finally:
            http.draining = True
            broker.drain()
            listener.close()
            with gevent.Timeout(config.drain_timeout_s, False):
                while http.in_flight:
                    gevent.sleep(0.01)
            broker.close()
            plane.close()

    def _on_fatal(self, fault: BaseException) -> None:
        self._fault = fault
        self._stop.set()


@contextmanager
def _directory() -> Iterator[Path]:
    """Yield a directory in shared memory, or on disk where there is none, and delete it."""
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="portalmq-", dir=memory))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
