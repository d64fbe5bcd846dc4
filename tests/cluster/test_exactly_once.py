"""Consume, transform, produce with the atomic commit: each output is stored once, although programs and leaders are
killed.

`PORTALMQ_INPUTS` sets the number of transformed messages (the suite: 4,000; the full run: 100,000), `PORTALMQ_KILLS`
how often the leader of the input and one of the transforming programs are killed (the suite: 2; the full run: 5).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import transformer
from support.cluster import Cluster, wait_until
from support.load import everything_in

from portalmq import Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

INPUTS = int(os.environ.get("PORTALMQ_INPUTS", "4000"))
KILLS = int(os.environ.get("PORTALMQ_KILLS", "2"))
PARTITIONS = 3
WITHIN_S = 60 + INPUTS / 200
PROGRAM = str(Path(transformer.__file__))


class Transformers:
    """The transforming programs, each in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.processes = [self._started() for _ in range(2)]
        self._turn = 0

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, PROGRAM, *self._arguments])

    def kill_one(self) -> None:
        """Kill one program with SIGKILL at any point of its work, and start another."""
        at = self._turn % len(self.processes)
        self._turn += 1
        assert self.processes[at].poll() is None, "it ran until now"
        self.processes[at].kill()
        self.processes[at].wait(20)
        self.processes[at] = self._started()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(20)


@contextmanager
def transforming(cluster: Cluster, topic: str, mode: str) -> Iterator[Transformers]:
    running = Transformers(",".join(cluster.urls), topic, f"{topic}-out", f"{topic}-group", mode)
    try:
        yield running
    finally:
        running.end()


def made(cluster: Cluster, out: str) -> int:
    """The number of stored outputs, by offsets."""
    return sum(partition["high_watermark"] for partition in cluster.partitions(out))


def values(cluster: Cluster, topic: str) -> list[str]:
    found = everything_in(cluster.urls, topic)
    return [value for places in found.values() for _, value in places]


def prove(cluster: Cluster, topic: str, mode: str) -> None:
    out = f"{topic}-out"
    admin = cluster.admin()
    for name in (topic, out):
        admin.create_topic(name, partitions=PARTITIONS)
    settings = (
        {"mode": mode, "delivery": "exactly_once", "max_deliveries": 1_000} if mode == "queue" else {"mode": mode}
    )
    assert put_group(cluster, f"{topic}-group", settings) in {200, 201}
    cluster.wait_in_sync(topic, out)
    inputs = [f"{number}" for number in range(INPUTS)]
    began = time.monotonic()
    with transforming(cluster, topic, mode) as running, Producer(cluster.urls) as producer:
        step = INPUTS // (KILLS + 1)
        sent = 0
        for kill in range(KILLS + 1):
            until = INPUTS if kill == KILLS else sent + step
            futures = [producer.send(topic, text, key=f"k{int(text) % 1000}") for text in inputs[sent:until]]
            producer.flush(60)
            for future in futures:
                future.result(timeout=60)
            if kill == KILLS:
                break
            # In the middle of the step: some messages are transformed, and some are not.
            wait_until(lambda sent=sent: made(cluster, out) > sent + step // 4, "some outputs", WITHIN_S)
            sent = until
            leader = cluster.wait_for_leader(topic, kill % PARTITIONS)
            cluster.kill(leader)
            running.kill_one()
            cluster.wait_for_leader(topic, kill % PARTITIONS, other_than=leader)
            cluster.start(leader)
            cluster.wait_in_sync(topic, out)
        wait_until(lambda: made(cluster, out) >= INPUTS, "all outputs", WITHIN_S)
        wait_until(lambda: len(set(values(cluster, out))) == INPUTS, "every output", WITHIN_S)
        wait_until(lambda: lag(cluster, topic) == 0, "all input is done", WITHIN_S)
    seconds = time.monotonic() - began
    counts = Counter(values(cluster, out))
    assert counts == Counter(transformer.transformed(text) for text in inputs), Counter(counts.values())
    print(f"{mode}: {INPUTS} inputs, {KILLS} leaders and {KILLS} programs killed, each output once, {seconds:.1f} s")


def put_group(cluster: Cluster, group: str, settings: dict[str, object]) -> int:
    import json

    body = json.dumps(settings).encode()
    broker = cluster.brokers[cluster.running[0]]
    return broker.request("PUT", f"/v1/groups/{group}", body, {"Content-Type": "application/json"}).status


def lag(cluster: Cluster, topic: str) -> int | None:
    described = cluster.ask(f"/v1/groups/{topic}-group")
    return described["lag"] if described else None


def test_every_output_is_there_once_in_queue_mode(cluster: Cluster, topic: str):
    prove(cluster, topic, "queue")


@pytest.mark.prove
def test_every_output_is_there_once_in_stream_mode(cluster: Cluster, topic: str):
    prove(cluster, topic, "stream")
