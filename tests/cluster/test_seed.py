"""The seed's README as it stands: three servers by port, sensors, controllers, and a leader that is shut down."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from support.cluster import wait_until

from portalmq import Admin
from portalmq.control_plane.embedded import EmbeddedZooKeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
SENSORS = {"temp_1": ("temp", "1", "0.02"), "temp_1 too": ("temp", "1", "0.01"), "temp_2": ("temp", "2", "0.02")}
COUNT = 300


class Scripts:
    """Scripts of the checkout as processes of their own, with what they say in files."""

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
def ports() -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        return [each.getsockname()[1] for each in sockets]


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


def readings(text: str) -> set[tuple[str, str]]:
    """(topic, number) of the readings that a sensor or a controller tells of."""
    return set(re.findall(r"(temp_[12]) #(\d+) ", text))


def test_the_seed_runs_as_it_is_written(scripts: Scripts, ports: list[int]) -> None:
    for port in ports:
        scripts.start(f"server-{port}", "server.py", str(port))
    for port in ports:
        wait_until(lambda port=port: is_ready(port), f"server.py {port} is ready")
    for name, arguments in SENSORS.items():
        scripts.start(name, "demo_iot/sensor.py", *arguments, "--count", str(COUNT))
    controllers = {"controller-1": "temp_1", "controller-2": "temp_1", "controller-3": "temp_2"}
    for name, topic in controllers.items():
        scripts.start(name, "demo_iot/controller.py", topic)

    wait_until(lambda: len(readings(scripts.said("temp_1"))) > COUNT // 4, "the sensors send")
    with Admin([f"http://localhost:{port}" for port in ports]) as admin:
        (partition,) = admin.metadata(["temp_1"]).topics[0].partitions
        assert partition.leader_url
        leader_port = int(partition.leader_url.rpartition(":")[2])
        server = scripts.running[f"server-{leader_port}"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0

        for name in SENSORS:
            assert scripts.running[name].wait(60) == 0, scripts.said(name)
            assert len(readings(scripts.said(name))) == COUNT
        new = admin.metadata(["temp_1"]).topics[0].partitions[0]
        assert new.leader not in {None, partition.leader}

        def delivered() -> int:
            return sum(len(re.findall(r"temp_[12] #", scripts.said(name))) for name in controllers)

        wait_until(lambda: delivered() >= 3 * COUNT, "the controllers have everything", 60)
    shares = [readings(scripts.said(name)) for name in ("controller-1", "controller-2")]
    assert all(shares), "two controllers on one topic share it"
    numbers = {str(number) for number in range(1, COUNT + 1)}
    assert {n for topic, n in shares[0] | shares[1]} == numbers
    assert {n for topic, n in readings(scripts.said("controller-3"))} == numbers
