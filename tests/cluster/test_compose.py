"""docker-compose.yml and compose.miniq.yml without Docker: each service's command runs in its environment as a plain
process."""

from __future__ import annotations

import re
import signal
import urllib.error
import urllib.request

import pytest
from support.cluster import wait_until
from support.compose import MINIQ, compose, containers

from portalmq import Admin
from portalmq.control_plane.embedded import EmbeddedZooKeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(360)]


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
            wait_until(lambda name=name: running.is_healthy(name) or dead(running, name), f"{name} is healthy", 60)
        urls = running.environment(sensors[0])["PORTALMQ_URL"]
        with Admin(urls) as admin:
            everyone = [(number, True) for number in (1, 2, 3)]
            wait_until(
                lambda: [(broker.id, broker.live) for broker in admin.cluster().brokers] == everyone,
                "each broker knows the others",
            )
        for name in [*sensors, *controllers]:
            running.start(name)

        def delivered() -> dict[str, int]:
            told = "".join(running.said(name) for name in controllers)
            return {topic: len(set(re.findall(rf"{topic} #(\d+) ", told))) for topic in ("temp_1", "wind_2")}

        wait_until(lambda: min(delivered().values()) >= 5, "readings of each sensor reach a controller", 120)
        for name in [*sensors, *controllers]:
            running.running[name].send_signal(signal.SIGTERM)
            running.running[name].wait(30)
        for name in brokers:
            running.running[name].send_signal(signal.SIGTERM)
        assert [running.running[name].wait(60) for name in brokers] == [0, 0, 0]
    assert all((tmp_path / name / "partitions").is_dir() for name in brokers), "messages are on the volume"


def test_the_miniq_of_its_compose_file_asks_for_the_secret_and_keeps_messages_over_a_crash(tmp_path):
    with containers(tmp_path, [], file=MINIQ, MINIQ_SECRET="a secret of the test") as running:
        port = running.places["miniq:5000"].rpartition(":")[2]

        def ask(path: str, body: bytes | None = None, secret: str = "a secret of the test") -> tuple[int, bytes]:
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"Authorization": secret})
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return answer.status, answer.read()
            except urllib.error.HTTPError as refused:
                return refused.code, refused.read()

        for crash in (True, False):
            process = running.start("miniq")
            wait_until(lambda: running.is_healthy("miniq") or dead(running, "miniq"), "miniq is healthy", 60)
            if crash:
                assert ask("/message", b'{"Message": "hello"}')[0] == 200
                assert ask("/message", secret="a guess")[0] == 401
                process.kill()
                process.wait(30)
        status, body = ask("/message")
        assert (status, b'"hello"' in body) == (200, True)


def dead(running, name: str) -> bool:
    assert running.running[name].poll() is None, running.said(name)
    return False
