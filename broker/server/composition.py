"""The composition root: from settings to a running broker. Only the commands import it.

    serve           in the arbiter, before the fork: all checks that can refuse the start, each with an exit code and a
                    sentence; then gunicorn. Imports stay light, since the arbiter lives as long as the broker.
    BrokerProcess   in the worker: builds the broker and the application, starts, drains and closes them.

The checks come before the fork so that a worker that cannot start leaves no open port without answers: settings (exit
code 2), ZooKeeper (69), the port and the data directory (73).
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import gevent
from gunicorn.app.base import BaseApplication

from portalmq.broker.cluster.exits import (
    EX_CANTCREAT,
    EX_SOFTWARE,
    EX_STORAGE,
    EX_UNAVAILABLE,
    StartupError,
    UsageError,
)
from portalmq.broker.cluster.retry_budget import RetryBudget
from portalmq.broker.partition.yielding import give_way
from portalmq.broker.server.auth import Auth, auth_from, has_open_zookeeper
from portalmq.broker.server.collector import FullCollections
from portalmq.broker.server.config import SECRET_LENGTH_MIN, BrokerConfig, cluster_secret_in
from portalmq.broker.server.logs import ServerLogger, start_logging
from portalmq.broker.server.preflight import IdentityRequest, Preflight, zookeeper_of
from portalmq.broker.server.process import BrokerArbiter, BrokerWorker
from portalmq.broker.storage.disk import (
    DataDirectory,
    DirectoryInUse,
    DiskGuard,
    StoreIdentity,
    WrongCluster,
    read_brokers,
)
from portalmq.broker.storage.errors import CorruptFile, StorageError, StorageFault, faults_of
from portalmq.broker.storage.files import write_atomically
from portalmq.broker.storage.open_files import descriptor_limit
from portalmq.control_plane.plane import ControlPlane, PlaneError, PlaneState
from portalmq.errors import Unavailable
from portalmq.system import raise_open_files_limit
from portalmq.tokens import is_loopback

if TYPE_CHECKING:
    from flask import Flask

    from portalmq.broker.broker import Broker
    from portalmq.control_plane.catalog import Catalog
    from portalmq.control_plane.mirror import Changes
    from portalmq.control_plane.state import GroupState

log = logging.getLogger("portalmq.server")

BACKLOG = 2048
IN_USE_PATIENCE_S = 1.0
IN_USE_RETRY_S = 0.05
ANSWER_BEFORE_EXIT_S = 0.25
# File descriptors besides connections: segments, state files, the server's own.
DESCRIPTORS_BESIDE = 2_000


def serve(config: BrokerConfig, *, announce: bool = False) -> NoReturn:
    """Run one broker until SIGTERM. Does not return: the process ends with the broker's exit code.

    With `announce`, a line with the URL is printed to stderr when the broker is ready. Raises StartupError.
    """
    auth = auth_from(config)
    preflight = Preflight.begin(config) if config.is_clustered else None
    try:
        listener = bind(config)
        config = reachable(replace(config, port=listener.getsockname()[1]))
        start_logging(config)
        if auth.needed and has_open_zookeeper(config):
            log.warning(
                "tokens do not protect from clients that reach ZooKeeper at %s, which is open: see --zookeeper-user",
                config.zookeeper,
            )
        if config.secret is not None and len(config.secret) < SECRET_LENGTH_MIN:
            log.warning(
                "the secret has %d characters, and could be guessed: `openssl rand -hex 32`", len(config.secret)
            )
        if auth.needed and config.tls_cert is None and not is_loopback(config.host):
            log.warning("tokens arrive in plain text: give --tls-cert and --tls-key, or use TLS in front")
        config = within_limit(config)
        directory = lock_data_directory(config, preflight)
        if preflight is not None:
            config = replace(config, zookeeper_wait_s=preflight.left_s)  # one limit for the whole start
    finally:
        if preflight is not None:
            preflight.close()
    process = BrokerProcess(config, auth, directory, announce=announce)
    BrokerArbiter(_Application(process, listener)).run()
    sys.exit(EX_SOFTWARE)  # not reached: run() ends the process itself


# --- checks before the start -----------------------------------------------------------------------------------------


def bind(config: BrokerConfig) -> socket.socket:
    """Return the listening socket. Raises StartupError when the port is taken, UsageError for a foreign host."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return _while_in_use(lambda fault: isinstance(fault, OSError) and fault.errno == errno.EADDRINUSE)(
            lambda: socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
        )
    except OSError as fault:
        if fault.errno == errno.EADDRINUSE:
            sentence = f"port {config.port} of {config.host} is taken: stop the other program, or choose another port"
            raise StartupError(sentence, EX_CANTCREAT) from None
        if fault.errno == errno.EACCES:
            sentence = f"port {config.port} needs rights that this user lacks: choose one above 1023"
            raise StartupError(sentence, EX_CANTCREAT) from None
        raise UsageError(f"cannot listen on {config.host}: {fault.strerror or fault}") from None


def reachable(config: BrokerConfig) -> BrokerConfig:
    """Return the settings, with a URL that clients can use if the broker listens on every address of the machine."""
    if config.advertised_url or config.host not in {"0.0.0.0", "::"}:
        return config
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        name = "localhost"
    return replace(config, advertised_url=replace(config, host=name).url)


def _is_in_use(data_dir: Path, broker_id: int) -> bool:
    partitions = data_dir / "partitions"
    if partitions.is_dir() and any(partitions.iterdir()):
        return True
    try:
        return bool(read_brokers(data_dir).keys() - {broker_id})
    except CorruptFile:
        return True


def lock_data_directory(config: BrokerConfig, preflight: Preflight | None = None) -> DataDirectory:
    """Return the data directory, locked while this process lives. Raises StartupError.

    In a cluster the `preflight` gives the broker's identity; a single broker takes it from the directory.
    """

    def join(held: StoreIdentity | None, store_uuid: str) -> tuple[str, int]:
        assert preflight is not None
        in_use = held is not None and _is_in_use(config.data_directory, held.broker_id)
        return preflight.join(IdentityRequest(held, store_uuid, in_use, config.url))

    try:
        return _while_in_use(lambda fault: isinstance(fault, DirectoryInUse))(
            lambda: DataDirectory.open(
                config.data_directory,
                broker_id=config.broker_id if preflight is None else None,
                join=None if preflight is None else join,
            )
        )
    except (DirectoryInUse, WrongCluster) as fault:
        raise StartupError(str(fault), EX_CANTCREAT) from None
    except StorageError as fault:
        raise StartupError(str(fault), EX_STORAGE) from None


def _while_in_use(in_use: Callable[[Exception], bool]) -> RetryBudget:
    """Retry for a moment: a broker that was just killed releases its port and lock a little later."""
    return RetryBudget(IN_USE_PATIENCE_S, in_use, again_s=IN_USE_RETRY_S)


def within_limit(config: BrokerConfig) -> BrokerConfig:
    """Return the settings with as many connections as the limit of open files allows: a third, beside a third for logs
    and a third for the rest. Raises the soft limit to the hard one."""
    raise_open_files_limit()
    limit = descriptor_limit()
    if limit >= config.worker_connections + DESCRIPTORS_BESIDE:
        return config
    connections = min(config.worker_connections, max(10, limit // 3))
    log.warning(
        "this process may open %d files, and %d connections with their files need %d: it accepts %d connections;"
        " raise the limit (ulimit -n)",
        *(limit, config.worker_connections, config.worker_connections + DESCRIPTORS_BESIDE, connections),
    )
    parked = min(config.parked_receives_max, connections // 2)
    return replace(config, worker_connections=connections, parked_receives_max=parked)


# --- gunicorn --------------------------------------------------------------------------------------------------------


class _Application(BaseApplication):  # type: ignore[misc]
    """gunicorn, embedded: its settings come only from the broker's."""

    def __init__(self, process: BrokerProcess, listener: socket.socket) -> None:
        self.broker_process = process
        self.config = process.config
        self._listener_fd = listener.detach()  # gunicorn closes the descriptor
        super().__init__()

    def load_config(self) -> None:
        settings: dict[str, Any] = {
            "bind": f"fd://{self._listener_fd}",
            "workers": 1,
            "worker_class": f"{BrokerWorker.__module__}.{BrokerWorker.__qualname__}",
            "worker_connections": self.config.worker_connections,
            "timeout": 0,  # with a heartbeat file, the arbiter would kill a worker that waits for a slow disk
            "graceful_timeout": int(self.config.drain_timeout_s) + 5,
            "control_socket_disable": True,  # its path is the same for all brokers of a user
            "errorlog": "-",
            "logger_class": ServerLogger,
            "http_protocols": "h1",  # what TLS negotiates
            "proc_name": "portalmq",
        }
        if self.config.tls_cert is not None:
            settings |= {"certfile": str(self.config.tls_cert), "keyfile": str(self.config.tls_key)}
        if self.config.tls_client_ca is not None:
            settings |= {"ca_certs": str(self.config.tls_client_ca), "cert_reqs": ssl.CERT_REQUIRED}
        for name, value in settings.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        return self.broker_process.build()


# --- the worker ------------------------------------------------------------------------------------------------------


class BrokerProcess:
    """The broker inside the worker."""

    def __init__(self, config: BrokerConfig, auth: Auth, directory: DataDirectory, *, announce: bool) -> None:
        self.config = config
        self._auth = auth
        self._directory = directory
        self._announce = announce
        self._patience = RetryBudget(config.zookeeper_wait_s if config.is_clustered else 0.0, tell=_tell_waiting)
        self._broker: Broker
        self._plane: ControlPlane
        self._collections: FullCollections | None = None

    def build(self) -> Flask:
        """Build the broker and its application. The heavy imports are here, so the arbiter stays small."""
        try:
            return self._build()
        except Exception as fault:  # noqa: BLE001 - any error ends the process with its exit code
            self._end(fault)

    def _build(self) -> Flask:
        from portalmq.broker.api.app import create_app
        from portalmq.broker.broker import Broker
        from portalmq.broker.dashboard.routes import DASHBOARD_ROUTES
        from portalmq.broker.messages.metrics import Metrics
        from portalmq.broker.protocols.routes import PROTOCOL_ROUTES
        from portalmq.broker.server.gauges import GaugeCollector, gauges_of
        from portalmq.control_plane.catalog import Catalog
        from portalmq.control_plane.state import BrokerState

        identity = self._directory.identity
        plane = self._started_plane()
        catalog = Catalog(plane)
        if self.config.is_clustered:
            self._patience(lambda: _check_cluster(plane, identity.cluster_id))
        else:
            _join_cluster(plane, identity.cluster_id)
        metrics = Metrics(version("portalmq"), broker_id=identity.broker_id)
        disk = DiskGuard(self._directory.path, low_water_bytes=self.config.disk_low_water_bytes)
        incarnation = self._patience(lambda: self._next_incarnation(catalog))
        broker = self._patience(
            lambda: Broker(
                self.config,
                catalog,
                broker_id=identity.broker_id,
                me=BrokerState(self.config.url, incarnation, identity.store_uuid),
                disk=disk,
                metrics=metrics,
                on_fatal=self._on_fatal,
                cluster_secret=cluster_secret_in(self.config),
            )
        )
        metrics.registry.register(
            GaugeCollector(lambda: gauges_of(broker, disk, connected=plane.state is PlaneState.CONNECTED))
        )
        if self.config.is_clustered:
            broker.membership.on_changed.append(lambda changes: self._remember_brokers())
            self._save_copies(broker, catalog)
        self._broker, self._plane = broker, plane
        return create_app(broker, self.config, metrics, self._auth, more=PROTOCOL_ROUTES, pages=DASHBOARD_ROUTES)

    def _started_plane(self) -> ControlPlane:
        """Return the started control plane: the cluster's ZooKeeper, or this broker's own journal."""
        if self.config.is_clustered:
            zookeeper = zookeeper_of(self.config, self.config.session_timeout_ms / 1_000)
            self._patience(zookeeper.start)
            return zookeeper
        from portalmq.control_plane.standalone import Standalone

        standalone = Standalone(self._directory.path / "control", give_way=give_way)
        with faults_of(self._directory.path):
            standalone.start()
        standalone.watch(lambda _path: self._on_journal_changed(standalone))
        return standalone

    def _next_incarnation(self, catalog: Catalog) -> int:
        """Return a number above that of every earlier start, of this disk (from a file) and of this broker id."""
        identity, file = self._directory.identity, self._directory.path / "incarnation"
        with faults_of(file):
            before = int(file.read_text("ascii")) if file.exists() else 0
        incarnation = catalog.next_incarnation(identity.broker_id, identity.store_uuid, before)
        with faults_of(file):
            write_atomically(file, f"{incarnation}\n".encode("ascii"))
        return incarnation

    def _remember_brokers(self) -> None:
        from portalmq.broker.server.adoption import remember_brokers

        urls = {number: broker.url for number, broker in self._broker.membership.mirror.brokers.items()}
        try:
            remember_brokers(self._directory.path, urls)
        except OSError as error:  # the file serves only `portalmq adopt`: go on
            log.warning("the list of the cluster's brokers could not be saved: %s", error)

    def _save_copies(self, broker: Broker, catalog: Catalog) -> None:
        from portalmq.broker.cluster.saved_copy import GROUPS, SCHEDULES, CopySaver

        def is_whole() -> bool:
            return catalog.find_cluster_id() == self._directory.identity.cluster_id and not catalog.plane.set_back

        def known_groups() -> list[GroupState]:
            return [group for _, group in sorted(broker.membership.mirror.groups.items())]

        directory, rest = self._directory.path, (is_whole, broker.clock, broker.pool)
        schedules = CopySaver(SCHEDULES, directory, broker.schedules.known, *rest)
        broker.schedule_runner.on_read = schedules.note
        groups = CopySaver(GROUPS, directory, known_groups, *rest)

        def note_groups(changes: Changes) -> None:
            if changes.groups or changes.everything:
                groups.note()

        broker.membership.on_changed.append(note_groups)
        schedules.start()
        groups.start()

    def start(self) -> None:
        """Open the replicas and begin to serve. Runs as a greenlet, so /livez already answers."""
        try:
            self._broker.start(self._patience)
            self._broker.rates.start()
            self._collections = FullCollections(self._broker.topics)
            self._collections.start()
        except Exception as fault:  # noqa: BLE001 - any error ends the process with its exit code
            self._end(fault)
        ready = f"PortalMQ broker {self._broker.broker_id} is ready at {self.config.url}"
        if self._announce:
            print(f"{ready} (data in {self.config.data_directory})", file=sys.stderr, flush=True)
        else:
            log.info("%s (data in %s)", ready, self.config.data_directory)

    def drain(self) -> None:
        """Become unready and end waiting calls."""
        log.info("draining")
        self._broker.drain()

    def close(self) -> None:
        try:
            self._broker.close()
            self._plane.close()
            if self._collections is not None:
                self._collections.close()
        except Exception as fault:  # noqa: BLE001 - any error ends the process with its exit code
            self._end(fault)

    def _on_fatal(self, fault: BaseException) -> None:
        """End the process after a fatal fault. Calls that wait for the disk are answered `unknown` first."""
        log.critical("the broker ends: %s", fault, exc_info=fault)
        gevent.spawn_later(ANSWER_BEFORE_EXIT_S, _exit, self._exit_code(fault))

    def _on_journal_changed(self, plane: ControlPlane) -> None:
        """End the broker when its journal cannot be written, the only way to lose a standalone control plane."""
        if plane.state is PlaneState.LOST:
            self._on_fatal(StorageFault("the journal of the metadata cannot be written"))

    def _end(self, fault: Exception) -> NoReturn:
        """End the process after an error at start or close."""
        code = self._exit_code(fault)
        log.critical("the broker failed: %s", fault, exc_info=fault if code == EX_SOFTWARE else None)
        _exit(code)

    def _exit_code(self, fault: BaseException) -> int:
        match fault:
            case StartupError():
                return fault.exit_code
            case StorageError():
                return EX_STORAGE
            case PlaneError() if not self.config.is_clustered:
                return EX_STORAGE  # a standalone control plane is a file
            case Unavailable():
                return EX_UNAVAILABLE
            case PlaneError():
                return EX_CANTCREAT  # another broker has the id, or ZooKeeper is another cluster's
        return EX_SOFTWARE


def _join_cluster(plane: ControlPlane, cluster_id: str) -> None:
    """Give a standalone control plane the data directory's cluster id. Raises StartupError when it has another."""
    from portalmq.control_plane.plane import Create
    from portalmq.control_plane.state import CLUSTER_ID

    held = plane.get(CLUSTER_ID)
    if held is None:
        plane.commit(Create(CLUSTER_ID, cluster_id.encode("ascii")))
    elif held.data != cluster_id.encode("ascii"):
        raise StartupError(
            f"the data directory is of cluster {cluster_id}, the metadata in it of cluster {held.data.decode()}: "
            "one of them was copied here from elsewhere; restore the pair that belongs together",
            EX_CANTCREAT,
        )


def _check_cluster(plane: ControlPlane, cluster_id: str) -> None:
    """Raise StartupError when ZooKeeper has become another cluster's, or empty, since the preflight: nothing may be
    written into it then."""
    from portalmq.control_plane.state import CLUSTER_ID

    plane.sync()
    held = plane.get(CLUSTER_ID)
    if held is None or held.data != cluster_id.encode("ascii"):
        found = "no cluster" if held is None else f"cluster {held.data.decode()}"
        raise StartupError(
            f"the data directory is of cluster {cluster_id}, and ZooKeeper is of {found} now: was it wiped? "
            "`portalmq adopt` writes back what the brokers hold",
            EX_CANTCREAT,
        )


def _tell_waiting(away: Exception, left_s: float) -> None:
    log.warning("%s. Waiting for ZooKeeper, %.0f s more (--zookeeper-wait-s)", away, left_s)


def _exit(code: int) -> NoReturn:
    """End this process at once: within a greenlet, sys.exit would end only the greenlet."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
