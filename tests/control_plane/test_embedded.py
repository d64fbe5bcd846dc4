"""A real ZooKeeper on this machine: its requirements, its address, its end, and the command that runs it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.broker_process import wait_until_gone
from support.zookeeper import until

from portalmq.control_plane import embedded
from portalmq.control_plane.embedded import AlreadyInUse, EmbeddedError, EmbeddedZooKeeper, ZooKeeperMissing
from portalmq.control_plane.plane import Create, Node, Set
from portalmq.control_plane.zookeeper import ZooKeeper

# The limit of a command: longer than the command gives its servers.
END_WITHIN_S = 60.0
COMMAND = (sys.executable, "-m", "portalmq.cli.main", "zookeeper")


def fake_java(directory: Path, says: str, exit_code: int = 0) -> Path:
    """Create a `java` that only prints a text; return its home."""
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {exit_code}\n")
    java.chmod(0o755)
    return directory


def fake_jars(directory: Path, *names: str) -> Path:
    """Create a package `pyspark` that has these jars and cannot be imported; return its parent folder."""
    jars = directory / "pyspark" / "jars"
    jars.mkdir(parents=True)
    (directory / "pyspark" / "__init__.py").write_text("raise AssertionError('it takes a second to import')")
    for name in names:
        (jars / name).touch()
    return directory


FIVE_JARS = (
    "zookeeper-3.9.9.jar",
    "zookeeper-jute-3.9.9.jar",
    "slf4j-api-2.0.jar",
    "metrics-core-4.jar",
    "snappy-java-1.jar",
)


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java and jars."""
    for name in ("JAVA_HOME", "PORTALMQ_ZK_CLASSPATH"):
        monkeypatch.delenv(name, raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setattr(embedded, "DEBIAN_DIRECTORY", str(empty))
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name, package=None: None)
    return tmp_path


class TestFindingJava:
    def test_a_machine_without_one_is_given_ways_to_install_it(self, bare: Path) -> None:
        with pytest.raises(ZooKeeperMissing, match=r"no Java 17(.|\n)*pip install 'portalmq\[zookeeper\]'") as caught:
            embedded.find_java()
        assert caught.value.exit_code == 2

    @pytest.mark.parametrize(
        "says", ['openjdk version "17.0.15" 2025-04-15', 'java version "25" 2025-09-16 LTS', 'openjdk version "21.0.1"']
    )
    def test_a_new_enough_java_is_used(self, bare: Path, monkeypatch: pytest.MonkeyPatch, says: str) -> None:
        monkeypatch.setenv("PATH", str(fake_java(bare / "jdk", says) / "bin"))
        assert embedded.find_java() == str(bare / "jdk" / "bin" / "java")

    def test_java_home_comes_before_the_path_and_old_javas_are_skipped(
        self, bare: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "old", 'java version "1.8.0_392"')))
        monkeypatch.setenv("PATH", str(fake_java(bare / "new", 'openjdk version "17"') / "bin"))
        assert embedded.find_java() == str(bare / "new" / "bin" / "java")
        monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "newer", 'openjdk version "25.0.2"')))
        assert embedded.find_java() == str(bare / "newer" / "bin" / "java")

    def test_an_error_names_old_and_broken_javas(self, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("JAVA_HOME", str(fake_java(bare / "old", 'java version "1.8.0_392"')))
        monkeypatch.setenv("PATH", str(fake_java(bare / "broken", "no such VM", exit_code=1) / "bin"))
        with pytest.raises(ZooKeeperMissing, match=r"old/bin/java is Java 8; .*broken/bin/java does not run"):
            embedded.find_java()


class TestFindingZooKeeper:
    def test_a_machine_without_one_is_given_ways_to_install_it(self, bare: Path) -> None:
        with pytest.raises(ZooKeeperMissing, match=r"no ZooKeeper was found(.|\n)*apt-get install") as caught:
            embedded.find_classpath()
        assert caught.value.exit_code == 2

    def test_the_variable_comes_first_and_is_used_unchanged(self, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PORTALMQ_ZK_CLASSPATH", "/opt/zookeeper/lib/*")
        assert embedded.find_classpath() == "/opt/zookeeper/lib/*"

    def test_all_five_jars_are_found_in_pyspark_without_importing_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PORTALMQ_ZK_CLASSPATH", raising=False)
        home = fake_jars(tmp_path / "site [1]", *FIVE_JARS, "zookeeper-jute-x.jar.old", "netty-4.jar")
        monkeypatch.setattr(sys, "path", [str(home), *sys.path])
        monkeypatch.delitem(sys.modules, "pyspark", raising=False)
        found = embedded.find_classpath().split(os.pathsep)
        assert [Path(jar).name for jar in found] == list(FIVE_JARS)

    @pytest.mark.parametrize("missing", FIVE_JARS)
    def test_four_of_the_five_jars_are_not_enough(
        self, bare: Path, monkeypatch: pytest.MonkeyPatch, missing: str
    ) -> None:
        """Without snappy-java, for one, the server opens its port, answers `ruok`, and never serves."""
        home = fake_jars(bare / "site", *(jar for jar in FIVE_JARS if jar != missing))
        found = {"pyspark": type("Spec", (), {"origin": str(home / "pyspark" / "__init__.py")})}
        monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name, package=None: found.get(name))
        with pytest.raises(ZooKeeperMissing):
            embedded.find_classpath()

    def test_the_jars_of_debians_package_are_found(self, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        java = bare / "java"
        java.mkdir()
        for name in embedded.DEBIAN_JARS:
            (java / f"{name}.jar").touch()
        monkeypatch.setattr(embedded, "DEBIAN_DIRECTORY", str(java))
        assert len(embedded.find_classpath().split(os.pathsep)) == 5


@pytest.mark.cluster
class TestRunning:
    def test_a_started_zookeeper_serves_and_leaves_no_process(self, tmp_path: Path) -> None:
        server = EmbeddedZooKeeper(tmp_path)
        with server:
            plane = ZooKeeper(f"{server.hosts}/c")
            plane.start()
            plane.commit(Create("/a"))
            plane.close()
            processes = [psutil.Process(pid) for pid in server.pids]
            assert len(processes) == 1
            addresses = {each.laddr.ip for each in processes[0].net_connections("tcp") if each.status == "LISTEN"}
            assert {address.removeprefix("::ffff:") for address in addresses} == {"127.0.0.1"}
        for process in processes:
            wait_until_gone(process)
        assert server.pids == []

    @pytest.mark.parametrize("servers", [1, pytest.param(3, marks=pytest.mark.prove)])
    def test_commits_survive_a_kill_and_a_new_start(self, tmp_path: Path, servers: int) -> None:
        with EmbeddedZooKeeper(tmp_path, servers=servers) as first:
            hosts = first.hosts
            plane = ZooKeeper(f"{hosts}/c", session_timeout_s=10.0)
            plane.start()
            plane.commit(Create("/a", b"1"))
            connections = plane._connections
            first.kill()
            first.start()
            assert first.hosts == hosts
            until(lambda: plane._connections > connections)
            assert plane.commit(Set("/a", b"2", 0)) == [1]
            plane.close()
        with EmbeddedZooKeeper(tmp_path, servers=servers) as second:
            plane = ZooKeeper(f"{second.hosts}/c")
            plane.start()
            assert plane.get("/a") == Node("/a", b"2", 1)
            plane.close()

    def test_a_failed_start_leaves_no_process_and_says_how_to_look(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PORTALMQ_ZK_CLASSPATH", str(tmp_path / "none.jar"))
        server = EmbeddedZooKeeper(tmp_path / "data")
        with pytest.raises(EmbeddedError, match=r"ended with 1(.|\n)*output"):
            server.start()
        assert server.pids == []
        assert "ClassNotFoundException" in (tmp_path / "data" / "1" / "output").read_text()

    def test_a_second_zookeeper_on_one_data_directory_is_refused(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path), pytest.raises(AlreadyInUse, match="--data-dir"):
            EmbeddedZooKeeper(tmp_path).start()

    def test_a_paused_server_is_ended_too(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path) as server:
            process = psutil.Process(server.pids[0])
            process.suspend()
        wait_until_gone(process)

    @pytest.mark.parametrize(("first", "then"), [(1, 3), pytest.param(3, 1, marks=pytest.mark.prove)])
    def test_a_directory_keeps_its_number_of_servers(self, tmp_path: Path, first: int, then: int) -> None:
        """Two servers with an empty or older state would be a majority over the server with the latest one."""
        with EmbeddedZooKeeper(tmp_path, servers=first):
            pass
        with pytest.raises(AlreadyInUse, match=f"--servers {first}"):
            EmbeddedZooKeeper(tmp_path, servers=then).start()
        with EmbeddedZooKeeper(tmp_path, servers=first) as again:
            assert len(again.pids) == first

    @pytest.mark.parametrize("servers", [0, 2, 5])
    def test_only_one_or_three_servers_are_accepted(self, tmp_path: Path, servers: int) -> None:
        with pytest.raises(ValueError, match="1 server or 3"):
            EmbeddedZooKeeper(tmp_path, servers=servers)


@pytest.fixture
def port() -> int:
    """A free port outside the system's ephemeral range, so no other process gets it by chance."""
    while True:
        number = random.randrange(15_000, 32_000)
        with socket.socket() as held, contextlib.suppress(OSError):
            held.bind(("127.0.0.1", number))
            return number


class Foreground:
    """The command as a process, as a user runs it."""

    def __init__(self, directory: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.output = directory / "said"
        with self.output.open("wb") as said:
            self.process = subprocess.Popen(
                [*COMMAND, *options, "--data-dir", str(directory / "data")],
                stdout=said,
                stderr=said,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def said(self) -> str:
        return self.output.read_text()

    def hosts(self) -> str:
        def told() -> bool:
            assert self.process.poll() is None, self.said()
            return "serves at" in self.said()

        until(told, within_s=END_WITHIN_S, what="the command says where it listens")
        found = re.search(r"serves at (\S+)", self.said())
        assert found
        return found[1]

    def servers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.mark.cluster
class TestTheCommand:
    @pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
    def test_the_command_prints_its_address_and_ends_cleanly(
        self, tmp_path: Path, port: int, ending: signal.Signals
    ) -> None:
        command = Foreground(tmp_path, "--port", str(port))
        try:
            assert command.hosts() == f"127.0.0.1:{port}"
            plane = ZooKeeper(command.hosts())
            plane.start()
            plane.close()
            servers = command.servers()
            assert len(servers) == 1
            command.process.send_signal(ending)
            assert command.process.wait(END_WITHIN_S) == 0, command.said()
            for server in servers:
                wait_until_gone(server)
        finally:
            command.process.kill()
            command.process.wait()

    def test_three_servers_serve_on_the_port_and_the_next_two_and_die_with_a_killed_command(
        self, tmp_path: Path
    ) -> None:
        command = Foreground(tmp_path, "--port", "0", "--servers", "3")
        try:
            assert len(command.hosts().split(",")) == 3
            servers = command.servers()
            assert len(servers) == 3
            command.process.kill()
            command.process.wait()
            for server in servers:
                wait_until_gone(server)
        finally:
            command.process.kill()
            command.process.wait()

    def test_a_server_that_ends_by_itself_ends_the_command_with_a_message(self, tmp_path: Path) -> None:
        command = Foreground(tmp_path, "--port", "0")
        try:
            command.hosts()
            command.servers()[0].kill()
            assert command.process.wait(END_WITHIN_S) == 69
            assert "ended by itself" in command.said()
        finally:
            command.process.kill()
            command.process.wait()

    def test_a_taken_port_is_73(self, tmp_path: Path) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            held.listen()
            command = Foreground(tmp_path, "--port", str(held.getsockname()[1]))
            assert command.process.wait(END_WITHIN_S) == 73
        assert "--port" in command.said()
        assert "Traceback" not in command.said()

    def test_a_data_directory_that_cannot_be_made_is_73(self, tmp_path: Path) -> None:
        (tmp_path / "data").write_text("a file")
        command = Foreground(tmp_path, "--port", "0")
        assert command.process.wait(END_WITHIN_S) == 73
        assert "--data-dir" in command.said()
        assert "Traceback" not in command.said()

    def test_a_wrong_option_is_2(self, tmp_path: Path) -> None:
        command = Foreground(tmp_path, "--servers", "2")
        assert command.process.wait(END_WITHIN_S) == 2

    def test_without_java_it_is_2_with_the_commands_that_install_it(self, tmp_path: Path) -> None:
        """Neither PATH nor the environment has a Java; the test names the interpreter by its path."""
        script = (
            "import sys; from portalmq import java; java._javas = lambda: iter(());"
            "from portalmq.cli.main import main; sys.exit(main(sys.argv[1:]))"
        )
        ran = subprocess.run(
            [sys.executable, "-c", script, "zookeeper", "--port", "0", "--data-dir", str(tmp_path / "data")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 2, ran.stderr
        assert "pip install 'portalmq[zookeeper]'" in ran.stderr
        assert "Traceback" not in ran.stderr
