"""A whole cluster on one machine, as processes of one supervisor (`portalmq up`).

The supervisor starts the same commands that a person would: `portalmq zookeeper`, unless one is running, then `portalmq
broker` for each broker. It decides nothing about the cluster: the brokers agree on leaders and handle failures. A
process that ends is reported and not restarted: a supervisor that restarts brokers would hide how a cluster behaves
without one, and in production systemd or an orchestrator does that better.

    <data>/cluster.json   the running processes: pids with start times, so that `down` ends only these
    <data>/up.lock        held by the supervisor while it lives
    <data>/<name>.log     the output of a process; <data>/<name> is its data directory
    <data>/zookeeper.password   password of the user that owns the nodes of this ZooKeeper, so that no other user of the
                          machine can read the cluster's secret there

The processes die with the supervisor (system.py), even when it is killed. Each has its own process group, so Ctrl-C
reaches only the supervisor, which ends brokers first and ZooKeeper last.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import secrets
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from portalmq.broker.cluster.exits import EX_CANTCREAT, EX_SOFTWARE, StartupError
from portalmq.broker.server.config import BrokerConfig
from portalmq.system import boot_id, dies_with_this_process, open_locked, start_of

READY_WITHIN_S = 60.0
# Longer than a broker needs to transfer leadership and to complete running calls.
BROKER_ENDS_WITHIN_S = 30.0
ZOOKEEPER_ENDS_WITHIN_S = 10.0
PROBE_TIMEOUT_S = 2.0
POLL_S = 0.05
LOG_TAIL_LINES = 15
ZOOKEEPER_USER = "portalmq"

_SERVES_AT = re.compile(r"ZooKeeper serves at (\S+)")

Tell = Callable[[str], None]


# --- records of processes --------------------------------------------------------------------------------------------


class ProcessRecord(msgspec.Struct, frozen=True):
    """A process; its start time (system.start_of) distinguishes it from later ones with the same pid."""

    name: str
    pid: int
    started: int
    log: str

    @property
    def is_there(self) -> bool:
        return start_of(self.pid) == self.started


class ClusterRecord(msgspec.Struct, frozen=True):
    """The content of cluster.json. `boot_id` names the boot of the machine: pids of an earlier boot are invalid."""

    boot_id: str
    supervisor: ProcessRecord
    processes: list[ProcessRecord]
    zookeeper: str
    urls: list[str]
    ready: bool

    @property
    def running(self) -> list[ProcessRecord]:
        if self.boot_id != boot_id():
            return []
        return [process for process in [self.supervisor, *self.processes] if process.is_there]


def read_record(data_dir: Path) -> ClusterRecord | None:
    """Return the record of the latest supervisor of this directory; None without one."""
    try:
        return msgspec.json.decode((data_dir / "cluster.json").read_bytes(), type=ClusterRecord)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


# --- one process -----------------------------------------------------------------------------------------------------


class Supervised:
    """A process started by the supervisor. `arguments` are those of `portalmq`."""

    def __init__(self, name: str, arguments: list[str], log: Path, environment: dict[str, str]) -> None:
        self.name = name
        self.arguments = arguments
        self.log = log
        self._log_start = log.stat().st_size if log.exists() else 0
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "portalmq.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                process_group=0,
                preexec_fn=dies_with_this_process(),
            )
        self.record = ProcessRecord(name, self._process.pid, start_of(self._process.pid) or 0, str(log))

    @property
    def command(self) -> str:
        return shlex.join(["portalmq", *self.arguments])

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def said(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode("utf-8", "replace")

    def tail(self) -> str:
        return "\n".join(f"    {line}" for line in self.said().splitlines()[-LOG_TAIL_LINES:])

    def ask_to_end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        # A stopped process handles no signal.
        self._process.send_signal(signal.SIGCONT)

    def end_by(self, deadline: float) -> bool:
        """Wait for the end, and kill the process at the deadline; return False when that was needed."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


def _how(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


# --- all of them -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to start: `brokers` by name, and `zookeepers` servers; with 0 the ZooKeeper at `zookeeper`."""

    data_dir: Path
    brokers: dict[str, BrokerConfig]
    zookeeper: str
    zookeepers: int
    zookeeper_port: int


@dataclass
class Supervisor:
    """Runs a plan in the foreground, until SIGINT or SIGTERM."""

    plan: Plan
    tell: Tell
    stopping: bool = False
    _lock: int = -1
    _zookeeper: str = ""
    _credentials: tuple[str, ...] = ()
    _ready: bool = False
    _running: list[Supervised] = field(default_factory=list)
    _reported: set[str] = field(default_factory=set)

    def run(self) -> int:
        """Start everything, print the addresses, watch, and end everything in order. Return the exit code.

        Raises StartupError when the cluster cannot start; nothing is left running then.
        """
        self._take_directory()
        previous = {each: signal.signal(each, self._on_signal) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            check_ports(self.plan)
            began = time.monotonic()
            self._start_zookeeper()
            self._start_brokers()
            if not self.stopping:
                self._ready = True
                self._write_record()
                self._tell_where(time.monotonic() - began)
                self._watch()
            return 0 if self.stopping else EX_SOFTWARE
        finally:
            self._end()
            for each, handler in previous.items():
                signal.signal(each, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if self.stopping:  # a second signal ends everything at once
            for process in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.record.pid, signal.SIGKILL)
        self.stopping = True

    # --- starting ----------------------------------------------------------------------------------------------------

    def _take_directory(self) -> None:
        try:
            self.plan.data_dir.mkdir(parents=True, exist_ok=True)
            self._lock = open_locked(self.plan.data_dir / "up.lock")
        except BlockingIOError:
            raise StartupError(
                f"a cluster runs from {self.plan.data_dir} already: `portalmq down --data-dir {self.plan.data_dir}` "
                "ends it, another --data-dir starts another",
                EX_CANTCREAT,
            ) from None
        except OSError as fault:
            sentence = f"{self.plan.data_dir} cannot be used ({fault.strerror}): name another --data-dir"
            raise StartupError(sentence, EX_CANTCREAT) from None

    def _start(self, name: str, *arguments: str) -> Supervised:
        # Settings that differ between brokers are given as options; the other PORTALMQ_… variables apply to all.
        inherited = {key: value for key, value in os.environ.items() if key not in _OWN_OF_A_BROKER}
        if self.plan.zookeepers:
            inherited = {key: inherited[key] for key in inherited if not key.startswith("PORTALMQ_ZOOKEEPER_")}
        process = Supervised(name, list(arguments), self.plan.data_dir / f"{name}.log", inherited)
        self._running.append(process)
        self._write_record()
        return process

    def _start_zookeeper(self) -> None:
        self._zookeeper = self.plan.zookeeper
        if not self.plan.zookeepers:
            return
        process = self._start(
            "zookeeper",
            *("zookeeper", "--servers", str(self.plan.zookeepers), "--port", str(self.plan.zookeeper_port)),
            *("--data-dir", str(self.plan.data_dir / "zookeeper")),
        )
        self._wait([process], lambda _: _SERVES_AT.search(process.said()) is not None)
        serves = _SERVES_AT.search(process.said())
        self._zookeeper = serves[1] if serves else ""
        password = _kept_password(self.plan.data_dir.absolute() / "zookeeper.password")
        self._credentials = (
            *("--zookeeper-own-root", "--zookeeper-user", ZOOKEEPER_USER),
            *("--zookeeper-password", f"@{password}"),
        )

    def _start_brokers(self) -> None:
        if self.stopping:
            return
        brokers = {
            self._start(
                name,
                *("broker", str(config.port), "--broker-id", str(config.broker_id)),
                *("--zookeeper", self._zookeeper, *self._credentials, "--data-dir", str(config.data_dir)),
                # A person waits: report soon that the named ZooKeeper does not answer.
                *(() if self.plan.zookeepers else ("--zookeeper-wait-s", "5")),
            ): config
            for name, config in self.plan.brokers.items()
        }
        self._wait(list(brokers), lambda process: _is_ready(brokers[process]))

    def _wait(self, processes: list[Supervised], is_ready: Callable[[Supervised], bool]) -> None:
        """Wait until all are ready, or a signal. Raises StartupError when one ends, or takes too long."""
        deadline = time.monotonic() + READY_WITHIN_S
        waiting = list(processes)
        while waiting and not self.stopping:
            for process in self._running:
                code = process.exit_code
                if code is not None:
                    sentence = f"{process.name} ended {_how(code)}; it said:\n{process.tail()}"
                    raise StartupError(sentence, code if code > 0 else EX_SOFTWARE)
            waiting = [process for process in waiting if not is_ready(process)]
            if waiting and time.monotonic() > deadline:
                late = waiting[0]
                sentence = f"{late.name} is not ready after {READY_WITHIN_S:g} s; it said:\n{late.tail()}"
                raise StartupError(sentence, EX_SOFTWARE)
            time.sleep(POLL_S)

    def _tell_where(self, took_s: float) -> None:
        for name, config in self.plan.brokers.items():
            self.tell(f"{name}   {config.url}")
        self.tell(f"zookeeper  {self._zookeeper}")
        self.tell(f"dashboard  {next(iter(self.plan.brokers.values())).url}/ui/")
        self.tell(f"ready after {took_s:.1f} s; data and logs in {self.plan.data_dir}")

    # --- watching and ending -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Wait for a signal, or the end of all processes. Report each end, with the command that starts it again."""
        while not self.stopping and len(self._reported) < len(self._running):
            for process in self._running:
                code = process.exit_code
                if code is not None and process.name not in self._reported:
                    self._reported.add(process.name)
                    self.tell(
                        f"{process.name} ended {_how(code)}, and is not restarted automatically "
                        f"(see {process.log}). This starts it: {process.command}"
                    )
            time.sleep(POLL_S)

    def _end(self) -> None:
        brokers = [process for process in self._running if process.name in self.plan.brokers]
        others = [process for process in self._running if process not in brokers]
        for group, within_s in ((brokers, BROKER_ENDS_WITHIN_S), (others, ZOOKEEPER_ENDS_WITHIN_S)):
            for process in group:
                process.ask_to_end()
            deadline = time.monotonic() + within_s
            for process in group:
                if not process.end_by(deadline):
                    self.tell(f"{process.name} did not end within {within_s:g} s of SIGTERM, and was killed")
        (self.plan.data_dir / "cluster.json").unlink(missing_ok=True)
        os.close(self._lock)

    def _write_record(self) -> None:
        me = ProcessRecord("supervisor", os.getpid(), start_of(os.getpid()) or 0, str(self.plan.data_dir / "up.log"))
        record = ClusterRecord(
            boot_id(),
            me,
            [process.record for process in self._running],
            self._zookeeper,
            [config.url for config in self.plan.brokers.values()],
            self._ready,
        )
        path = self.plan.data_dir / "cluster.json"
        fresh = path.with_suffix(".new")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(record)))
        fresh.replace(path)


_OWN_OF_A_BROKER = {
    f"PORTALMQ_{name}" for name in ("PORT", "BROKER_ID", "DATA_DIR", "ADVERTISED_URL", "ZOOKEEPER", "URL")
}


def _kept_password(file: Path) -> Path:
    """Return the file of the password, created at the first start."""
    if not file.exists():
        fresh = file.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as written:
            written.write(f"{secrets.token_hex(32)}\n")
        fresh.replace(file)
    return file


def check_ports(plan: Plan) -> None:
    """Raise StartupError when a port of the plan is taken."""
    brokers = [(name, config.host, config.port, "--base-port") for name, config in plan.brokers.items()]
    servers = range(plan.zookeepers if plan.zookeeper_port else 0)
    zookeepers = [("zookeeper", "127.0.0.1", plan.zookeeper_port + n, "--zookeeper-port") for n in servers]
    for name, host, port, option in [*zookeepers, *brokers]:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as fault:
            hint = ", or use the ZooKeeper that is there: --zookeeper HOST:PORT" if name == "zookeeper" else ""
            raise StartupError(
                f"port {port} of {host}, for {name}, is not available ({fault.strerror}): stop the other program, "
                f"choose other ports with {option}{hint}",
                EX_CANTCREAT,
            ) from None


def free_ports(host: str, number: int) -> list[int]:
    """Return `number` different ports that are free now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server((host, 0), family=family)) for _ in range(number)]
        return [int(each.getsockname()[1]) for each in sockets]


def _is_ready(config: BrokerConfig) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    connection: http.client.HTTPConnection
    if config.tls_cert is None:
        connection = http.client.HTTPConnection(host, config.port, timeout=PROBE_TIMEOUT_S)
    else:
        # Our own broker on this machine: the name in the certificate does not matter.
        context = ssl._create_unverified_context()
        if config.shown_to_brokers is not None:
            context.load_cert_chain(*config.shown_to_brokers)
        connection = http.client.HTTPSConnection(host, config.port, timeout=PROBE_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
