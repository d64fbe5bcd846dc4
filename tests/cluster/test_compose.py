"""docker-compose.yml without Docker: each service's command in its environment, as a plain process."""

from __future__ import annotations

import re
import signal

import pytest
from support.cluster import wait_until
from support.compose import compose, containers

from portalmq import Admin
from portalmq.control_plane.embedded import EmbeddedZooKeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def test_the_services_of_the_compose_file_work_together(tmp_path):
    names = list(compose()["services"])
    brokers = [name for name in names if name.startswith("broker")]
    sensors = [name for name in names if name.startswith("sensor")]
    controllers = [name for name in names if name.startswith("controller")]
    with (
        EmbeddedZooKeeper(tmp_path / "zookeeper", servers=3) as zookeeper,
        containers(tmp_path, zookeeper.ports) as running,
    ):
        assert not running.is_healthy(brokers[0]), "the health check can fail"
        for name in brokers:
            running.start(name)
        for name in brokers:
            wait_until(lambda name=name: running.is_healthy(name) or dead(running, name), f"{name} is healthy")
        urls = running.environment(sensors[0])["PORTALMQ_URL"]
        with Admin(urls) as admin:
            assert [(broker.id, broker.live) for broker in admin.cluster().brokers] == [(1, True), (2, True), (3, True)]
        for name in [*sensors, *controllers]:
            running.start(name)

        def delivered() -> dict[str, int]:
            told = "".join(running.said(name) for name in controllers)
            return {topic: len(set(re.findall(rf"{topic} #(\d+) ", told))) for topic in ("temp_1", "wind_2")}

        wait_until(lambda: min(delivered().values()) >= 5, "readings of each sensor reach a controller", 60)
        for name in [*sensors, *controllers]:
            running.running[name].send_signal(signal.SIGTERM)
            running.running[name].wait(30)
        for name in brokers:
            running.running[name].send_signal(signal.SIGTERM)
        assert [running.running[name].wait(40) for name in brokers] == [0, 0, 0]
    assert all((tmp_path / name / "partitions").is_dir() for name in brokers), "messages are on the volume"


def dead(running, name: str) -> bool:
    assert running.running[name].poll() is None, running.said(name)
    return False
