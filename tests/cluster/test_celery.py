"""Celery on a cluster: tasks run, at their time, and survive workers and leaders that are killed."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("celery", reason="the extra `celery` is not installed")

from support.celery_program import Notes, Worker, application
from support.cluster import Cluster, wait_until
from support.leader_kills import LeaderKills

_numbers = itertools.count(1)
WITHIN_S = 90.0


class Proof:
    """An application with topics of its own, and its workers."""

    def __init__(self, cluster: Cluster, directory: Path, **options: float) -> None:
        self.cluster = cluster
        self.broker = ";".join(url.replace("http", "portalmq") for url in cluster.urls)
        self.notes = Notes(directory / "notes")
        self.options = {"topic_prefix": f"proof{next(_numbers)}.", **options}
        self.app = application(self.broker, self.notes.path, **self.options)
        self.queue_topic = f"{self.options['topic_prefix']}celery"

    def worker(self, *arguments: str) -> Worker:
        return Worker(self.broker, self.notes.path, *arguments, options=self.options)

    def send(self, numbers: range, name: str = "note", **options: object) -> None:
        for number in numbers:
            self.app.send_task(name, [number], **options)


def told(counts: Counter[int]) -> str:
    return f"{sum(1 for runs in counts.values() if runs > 1)} of them ran more than once"


@pytest.fixture
def proof(cluster: Cluster, tmp_path: Path) -> Proof:
    return Proof(cluster, tmp_path, visibility_timeout=2)


def test_tasks_run_once_at_their_time_and_longer_than_their_lease(proof: Proof) -> None:
    proof.send(range(10))
    with proof.worker("-c", "2") as worker:
        for number in range(10, 20):
            proof.app.send_task("note", [number], countdown=1 + number % 5)
        proof.app.send_task("note", [20, 7.0])  # more than three times the visibility timeout
        proof.send(range(21, 24), "fails_first")
        proof.notes.wait_for(range(24), WITHIN_S)
        inspected = proof.app.control.inspect(timeout=10, limit=1).ping()
        assert inspected is not None
        assert next(iter(inspected.values())) == {"ok": "pong"}
        assert worker.stop() == 0
        assert proof.notes.repeated() == []
    group = proof.cluster.admin().group(proof.queue_topic)
    assert (group.lag, group.dead) == (0, 0)


def test_no_task_is_lost_when_a_worker_and_the_leader_are_killed(proof: Proof) -> None:
    count = 60
    for number in range(count):
        proof.app.send_task("note", [number, 0.05])
    first = proof.worker("-c", "2")
    proof.notes.wait_for(range(1), WITHIN_S)
    first.kill()
    leader = proof.cluster.leader(proof.queue_topic)
    assert leader is not None
    with proof.worker("-c", "2"):
        proof.cluster.kill(leader)
        proof.send(range(count, count + 10))
        proof.notes.wait_for(range(count + 10), WITHIN_S)


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_tasks_with_an_eta_beyond_the_visibility_timeout_run_once(cluster: Cluster, tmp_path: Path) -> None:
    proof = Proof(cluster, tmp_path, visibility_timeout=5)
    count = int(os.environ.get("PORTALMQ_ETA_TASKS", "1000"))
    chance = random.Random(1)
    with proof.worker("-c", "2"):
        for number in range(count):
            proof.app.send_task("note", [number], countdown=chance.uniform(2, 90))
        proof.notes.wait_for(range(count), 3000)
        assert proof.notes.repeated() == []


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_no_task_is_lost_when_workers_are_killed_again_and_again(cluster: Cluster, tmp_path: Path) -> None:
    proof = Proof(cluster, tmp_path, visibility_timeout=5)
    count, kills = int(os.environ.get("PORTALMQ_KILL_TASKS", "2000")), int(os.environ.get("PORTALMQ_KILLS", "10"))
    proof.send(range(count))
    for number in range(kills):
        worker = proof.worker("-c", "2")
        goal = count * (number + 1) // (kills + 2)
        wait_until(lambda goal=goal: len(proof.notes.counts()) >= goal, f"{goal} tasks", 600)
        worker.kill()
    with proof.worker("-c", "2"):
        counts = proof.notes.wait_for(range(count), 3000)
    print(f"{kills} kills, {count} tasks, {told(counts)}")
    assert counts.keys() == set(range(count))


@pytest.mark.prove
@pytest.mark.timeout(3600)
def test_no_task_is_lost_while_the_leader_is_killed_again_and_again(cluster: Cluster, tmp_path: Path) -> None:
    proof = Proof(cluster, tmp_path, visibility_timeout=5)
    count = int(os.environ.get("PORTALMQ_LEADER_KILL_TASKS", "1000"))
    every_s = float(os.environ.get("PORTALMQ_KILL_EVERY_S", "20"))
    with proof.worker("-c", "2"), LeaderKills(cluster, every_s, lambda _: cluster.leader(proof.queue_topic)) as kills:
        for number in range(count):
            proof.app.send_task("note", [number, 0.02])
        counts = proof.notes.wait_for(range(count), 3000)
    print(f"{kills.count} kills, {count} tasks, {told(counts)}")
    assert kills.count
    assert counts.keys() == set(range(count))
