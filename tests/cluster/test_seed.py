"""The seed's README, unchanged: three servers by port, sensors, controllers, and a leader that is shut down."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import requests
from support.cluster import wait_until
from support.ports import kept_ports

from portalmq import Admin
from portalmq.control_plane.embedded import EmbeddedZooKeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
COUNT = 300
# The second one sends until it is stopped.
SENSORS = {
    "temp_1": ("temp", "1", "0.02", "--count", str(COUNT)),
    "temp_1 too": ("temp", "1", "0.01"),
    "temp_2": ("temp", "2", "0.02", "--count", str(COUNT)),
}
CONTROLLERS = {"controller-1": "temp_1", "controller-2": "temp_1", "controller-3": "temp_2"}


class Scripts:
    """Scripts of the checkout as processes, with their output in files."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PORTALMQ_")}
        self._environment = inherited | environment | {"PYTHONUNBUFFERED": "1"}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, script: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / script), *arguments],
                cwd=self.directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.running[name] = process
        return process

    def said(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text("utf-8", "replace")

    def end(self) -> None:
        for process in self.running.values():
            process.kill()
        for process in self.running.values():
            process.wait()


@pytest.fixture
def ports() -> Iterator[list[int]]:
    """Yield ports that are bound and not listening: the servers may listen there, and no other process gets them."""
    with kept_ports(3) as ports:
        yield ports


@pytest.fixture
def scripts(tmp_path: Path, ports: list[int]) -> Iterator[Scripts]:
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as zookeeper:
        urls = ",".join(f"http://localhost:{port}" for port in ports)
        scripts = Scripts(tmp_path, {"PORTALMQ_ZOOKEEPER": zookeeper.hosts, "PORTALMQ_URL": urls})
        try:
            yield scripts
        finally:
            scripts.end()


def is_ready(port: int) -> bool:
    try:
        return requests.get(f"http://localhost:{port}/readyz", timeout=2).ok
    except requests.RequestException:
        return False


def readings(text: str) -> Counter[tuple[str, str]]:
    """Count the (topic, number) of the readings that a sensor or a controller prints."""
    return Counter(re.findall(r"(temp_[12]) #(\d+) ", text))


def test_the_seed_runs_as_it_is_written(scripts: Scripts, ports: list[int]) -> None:
    for port in ports:
        scripts.start(f"server-{port}", "server.py", str(port))
    for port in ports:
        wait_until(lambda port=port: is_ready(port), f"server.py {port} is ready")
    for name, arguments in SENSORS.items():
        scripts.start(name, "demo_iot/sensor.py", *arguments)
    for name, topic in CONTROLLERS.items():
        scripts.start(name, "demo_iot/controller.py", topic)

    wait_until(lambda: len(readings(scripts.said("temp_1"))) > COUNT // 4, "the sensors send")
    with Admin([f"http://localhost:{port}" for port in ports]) as admin:
        (partition,) = admin.metadata(["temp_1"]).topics[0].partitions
        assert partition.leader_url
        leader_port = int(partition.leader_url.rpartition(":")[2])
        server = scripts.running[f"server-{leader_port}"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0

        for name in ("temp_1", "temp_2"):
            assert scripts.running[name].wait(60) == 0, scripts.said(name)
            assert len(readings(scripts.said(name))) == COUNT

        def leader() -> int | None:
            return admin.metadata(["temp_1"]).topics[0].partitions[0].leader

        wait_until(lambda: leader() not in {None, partition.leader}, "another server leads")
    for name in CONTROLLERS:
        wait_until(lambda name=name: readings(scripts.said(name)), "two controllers on one topic share it")
    endless = scripts.running["temp_1 too"]
    assert endless.poll() is None, scripts.said("temp_1 too")
    endless.send_signal(signal.SIGINT)
    assert endless.wait(60) == 130

    def told(names: Iterable[str]) -> Counter[tuple[str, str]]:
        return sum((readings(scripts.said(name)) for name in names), Counter())

    sent = told(SENSORS)
    wait_until(lambda: sent <= told(CONTROLLERS), "the controllers have everything", 90)
