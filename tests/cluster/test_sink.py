"""A sink with transactions of its own, killed repeatedly: each message takes effect once."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support import counter
from support.cluster import Cluster, wait_until

from portalmq import Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

MESSAGES = 1_500
KILLS = 4
PARTITIONS = 2


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_every_effect_is_there_once_however_often_the_sink_and_a_leader_are_killed(
    cluster: Cluster, topic: str, tmp_path: Path, mode: str
):
    cluster.admin().create_topic(topic, partitions=PARTITIONS)
    cluster.wait_in_sync(topic)
    file = tmp_path / "sink.db"
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=NORMAL")  # SIGKILL loses nothing that the operating system has
        database.execute("CREATE TABLE effects (value INTEGER)")
    body = f'{{"mode": "{mode}", "max_deliveries": 1000}}' if mode == "queue" else '{"mode": "stream"}'
    made = cluster.brokers[1].request("PUT", f"/v1/groups/{topic}", body.encode(), {"Content-Type": "application/json"})
    assert made.status == 201
    with Producer(cluster.urls) as producer:
        for number in range(MESSAGES):
            producer.send(topic, str(number), partition=number % PARTITIONS)
    command = [sys.executable, str(Path(counter.__file__)), ",".join(cluster.urls), topic, topic, mode, str(file)]

    def effects() -> list[int]:
        reading = sqlite3.connect(file, timeout=20)
        rows = [row[0] for row in reading.execute("SELECT value FROM effects")]
        reading.close()
        return rows

    running = subprocess.Popen(command)
    try:
        for kill in range(KILLS):
            wait_until(lambda kill=kill: len(effects()) > MESSAGES * (kill + 1) // (KILLS + 2), "some effects")
            assert running.poll() is None, "it ran until now"
            running.kill()
            running.wait(20)
            running = subprocess.Popen(command)
            if kill == 1:
                leader = cluster.wait_for_leader(topic)
                cluster.kill(leader)
                cluster.wait_for_leader(topic, other_than=leader)
        wait_until(lambda: len(set(effects())) == MESSAGES, "every effect", 60)
    finally:
        running.kill()
        running.wait(20)
    assert sorted(effects()) == list(range(MESSAGES))
