"""`portalmq up`, `down` and `status` as a user runs them in a terminal."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from support.broker_process import has_ended, stood_in_line_s
from support.cluster import wait_until

from portalmq import Admin, Consumer, Producer
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import Create, PlaneRefused
from portalmq.control_plane.state import CLUSTER_SECRET, broker_path
from portalmq.control_plane.zookeeper import ZooKeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

READY_WITHIN_S = 10.0
FREE_PORTS = ("--base-port", "0", "--zookeeper-port", "0")


class Terminal:
    """Commands of `portalmq` in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data_dir = directory / "data" / "cluster"
        self.log = directory / "up.out"
        self._environment = {key: value for key, value in os.environ.items() if not key.startswith("PORTALMQ_")}
        self.foreground: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "portalmq.cli.main", *arguments],
            cwd=self.directory,
            env=self._environment | environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def up(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the cluster in the foreground, and return when it is ready."""
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "portalmq.cli.main", "up", *FREE_PORTS, *options],
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.foreground.append(process)
        wait_until(lambda: process.poll() is not None or "ready after" in self.said(), "portalmq up is ready", 60)
        assert process.poll() is None, self.said()
        return process

    def said(self) -> str:
        return self.log.read_text("utf-8", "replace")

    def record(self) -> dict:
        return json.loads((self.data_dir / "cluster.json").read_text())

    def family(self) -> list[psutil.Process]:
        """Every process of the cluster, including the supervisor and all children."""
        root = psutil.Process(self.record()["supervisor"]["pid"])
        return [root, *root.children(recursive=True)]

    def stood_in_line_s(self) -> float:
        """The delay that a busy machine added to the start: ZooKeeper starts first, then the brokers, at the same
        time."""
        added = {}
        for each in self.record()["processes"]:
            process = psutil.Process(each["pid"])
            family = [process, *process.children(recursive=True)]
            added[each["name"]] = sum(map(stood_in_line_s, family))
        return added.pop("zookeeper") + max(added.values())


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    try:
        yield terminal
    finally:
        terminal.run("down")
        for process in terminal.foreground:
            process.kill()
            process.wait()


def live(url: str) -> list[int]:
    """The live brokers, as this broker knows them."""
    brokers = requests.get(f"{url}/v1/cluster", timeout=30).json()["brokers"]
    return [broker["id"] for broker in brokers if broker["live"]]


def all_gone(family: list[psutil.Process]) -> bool:
    return all(has_ended(process) for process in family)


def shown_to_others(directory: Path) -> Iterator[Path]:
    if directory.stat().st_mode & 0o011:
        for each in directory.iterdir():
            if each.is_dir():
                yield from shown_to_others(each)
            elif each.stat().st_mode & 0o077:
                yield each


def assert_private(terminal: Terminal) -> None:
    """Assert that other users of the machine can read neither the files nor ZooKeeper, but can find the brokers
    there."""
    zookeeper, urls = terminal.record()["zookeeper"], terminal.record()["urls"]
    anyone = ZooKeeper(zookeeper, session_timeout_s=20)
    anyone.start()
    with pytest.raises(PlaneRefused):
        anyone.get(CLUSTER_SECRET)
    with pytest.raises(PlaneRefused):
        anyone.commit(Create(broker_path(67)))
    anyone.close()
    with Admin(f"zk://{zookeeper}") as admin:
        assert len(admin.cluster().brokers) == len(urls)
    assert list(shown_to_others(terminal.data_dir)) == []
    assert (terminal.data_dir / "zookeeper.password").stat().st_mode & 0o777 == 0o600


@pytest.mark.prove
def test_an_older_directory_is_kept_and_made_private(terminal: Terminal) -> None:
    with EmbeddedZooKeeper(terminal.data_dir / "zookeeper") as server:
        anyone = ZooKeeper(server.hosts, session_timeout_s=20)
        anyone.start()
        catalog = Catalog(anyone)
        cluster_id, secret = catalog.cluster_id(), catalog.cluster_secret()
        anyone.close()
    terminal.up("--brokers", "1")
    assert_private(terminal)
    (url,) = terminal.record()["urls"]
    assert requests.get(f"{url}/v1/cluster", timeout=30).json()["cluster_id"] == cluster_id
    password = (terminal.data_dir / "zookeeper.password").read_text().strip()
    ours = ZooKeeper(terminal.record()["zookeeper"], auth=("portalmq", password), owns_root=True, session_timeout_s=20)
    ours.start()
    assert Catalog(ours).cluster_secret() != secret
    ours.close()


def test_up_is_ready_soon_says_where_and_ctrl_c_leaves_nothing(terminal: Terminal) -> None:
    process = terminal.up()
    said = terminal.said()
    assert float(re.search(r"ready after ([\d.]+) s", said)[1]) - terminal.stood_in_line_s() <= READY_WITHIN_S
    urls = re.findall(r"broker-\d +(\S+)", said)
    assert len(urls) == 3
    assert re.search(r"zookeeper +127\.0\.0\.1:\d+", said)
    family = terminal.family()
    assert len(family) >= 1 + 2 + 3 * 2
    for url in urls:
        wait_until(lambda url=url: live(url) == [1, 2, 3], "each broker knows the others")
    with Admin(urls) as admin:
        assert len(admin.create_topic("t").partitions[0].replicas) == 3
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0, terminal.said()
    assert all_gone(family)
    assert not (terminal.data_dir / "cluster.json").exists()


def test_a_detached_cluster_keeps_its_data_and_down_ends_it(terminal: Terminal) -> None:
    done = terminal.run("up", "--detach", *FREE_PORTS)
    assert done.returncode == 0, done.stderr
    assert "portalmq down" in done.stderr
    urls = terminal.record()["urls"]
    with Producer(urls) as producer:
        producer.send("t", "kept").result(timeout=20)
    assert_private(terminal)
    family = terminal.family()
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        again = terminal.run("up", *FREE_PORTS)
        assert again.returncode == 73
        assert "runs from data/cluster already" in again.stderr
        done = terminal.run("down")
        assert done.returncode == 0, done.stderr
        assert all_gone(family)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert terminal.run("down").stderr == "no cluster runs from data/cluster\n"

    assert terminal.run("up", "--detach", *FREE_PORTS).returncode == 0
    with Consumer("t", group="g", bootstrap=terminal.record()["urls"]) as consumer:
        assert [message.text for message in consumer.poll(timeout_s=60)] == ["kept"]


def test_status_shows_live_brokers_and_problems(terminal: Terminal) -> None:
    terminal.up()
    with Admin(terminal.record()["urls"]) as admin:
        admin.create_topic("t", partitions=3)

        def told() -> dict:
            return json.loads(terminal.run("status", "-o", "json").stdout)

        def is_healthy() -> bool:
            now = told()
            return (
                [broker["live"] for broker in now["brokers"]] == [True] * 3
                and sum(broker["controller"] for broker in now["brokers"]) == 1
                and (now["topics"], now["partitions"], now["without_leader"], now["under_replicated"]) == (1, 3, 0, 0)
                and sum(broker["leads"] for broker in now["brokers"]) == 3
            )

        wait_until(is_healthy, "all is well, and shown", 60)

        victim = next(each for each in terminal.record()["processes"] if each["name"] == "broker-1")
        os.kill(victim["pid"], signal.SIGKILL)

        def is_hurt() -> bool:
            now = told()
            return (
                [broker["live"] for broker in now["brokers"]] == [False, True, True]
                and (now["without_leader"], now["under_replicated"]) == (0, 3)
                and [row["missing"] for row in now["attention"]] == [[1]] * 3
            )

        wait_until(is_hurt, "status shows what is missing, once its session has ended", 60)
    table = terminal.run("status").stdout
    assert re.search(r"^t +0 +under-replicated", table, re.MULTILINE)
    # It is reported, with the command that starts it, and that command works.
    wait_until(lambda: re.search("broker-1 ended by SIGKILL.*\n", terminal.said()), "it is reported")
    said = terminal.said()
    command = shlex.split(re.search(r"This starts it: portalmq (.*)", said)[1])
    again = subprocess.Popen(
        [sys.executable, "-m", "portalmq.cli.main", *command], cwd=terminal.directory, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: told()["under_replicated"] == 0, "the broker is back and in sync", 60)
    finally:
        again.terminate()
        assert again.wait(60) == 0


@pytest.mark.prove
def test_a_supervisor_that_is_killed_leaves_nothing(terminal: Terminal) -> None:
    process = terminal.up("--brokers", "1")
    family = terminal.family()
    process.kill()
    process.wait()
    wait_until(lambda: all_gone(family), "all have died with it")
    assert terminal.run("down").returncode == 0
    terminal.up("--brokers", "1")


@pytest.mark.prove
def test_down_does_not_signal_another_process_with_a_reused_pid(terminal: Terminal) -> None:
    process = terminal.up("--brokers", "1")
    record = terminal.record()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for each in [record["supervisor"], *record["processes"]]:
            each["pid"] = stranger.pid
        (terminal.data_dir / "cluster.json").write_text(json.dumps(record))
        assert terminal.run("down").returncode == 0
        time.sleep(0.2)  # a signal would have arrived by now
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_port_that_is_taken_is_exit_73_with_the_option_that_helps(terminal: Terminal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        broker = terminal.run("up", "--brokers", "1", "--base-port", port, "--zookeeper-port", "0")
        assert (broker.returncode, "--base-port" in broker.stderr) == (73, True)
        zookeeper = terminal.run("up", "--brokers", "1", "--base-port", "0", "--zookeeper-port", port)
        assert (zookeeper.returncode, "--zookeeper HOST:PORT" in zookeeper.stderr) == (73, True)
    assert not (terminal.data_dir / "cluster.json").exists()


def test_a_zookeeper_that_is_named_and_not_there_is_exit_69(terminal: Terminal) -> None:
    done = terminal.run("up", "--brokers", "1", "--base-port", "0", PORTALMQ_ZOOKEEPER="127.0.0.1:1")
    assert done.returncode == 69
    assert "127.0.0.1:1" in done.stderr


def test_wrong_settings_are_exit_2_before_anything_starts(terminal: Terminal) -> None:
    done = terminal.run("up", *FREE_PORTS, PORTALMQ_KEEPALIVE_S="0")
    assert done.returncode == 2
    assert "keepalive_s" in done.stderr
    done = terminal.run("up", *FREE_PORTS, PORTALMQ_ADVERTISED_URL="http://one:1")
    assert done.returncode == 2
    assert "advertised_url" in done.stderr
    done = terminal.run("up", *FREE_PORTS, PORTALMQ_ZOOKEEPER="none")
    assert done.returncode == 2, "without this refusal each broker would be a cluster of its own"
    assert "portalmq dev" in done.stderr
