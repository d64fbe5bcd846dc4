"""Two `celery beat` at a time, while beats and brokers are killed: each tick becomes one task."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("celery", reason="the extra `celery` is not installed")

from support import celery_beat_program
from support.cluster import Cluster, wait_until

_numbers = itertools.count(1)
EVERY_S = 1
# The long run: PORTALMQ_SCHEDULE_SECONDS=600 with `-m prove`.
SECONDS = float(os.environ.get("PORTALMQ_SCHEDULE_SECONDS", "60"))


class Beats:
    """Beat processes of one application."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster = cluster
        self.prefix = f"beats{next(_numbers)}."
        self.log = directory / "beats.log"
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        broker = ";".join(url.replace("http", "portalmq") for url in self.cluster.urls)
        with self.log.open("ab") as log:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, celery_beat_program.__file__, broker, self.prefix, str(EVERY_S)],
                    stdout=log,
                    stderr=log,
                    cwd=self.log.parent,
                    env=os.environ | {"PYTHONPATH": str(Path(celery_beat_program.__file__).parents[1])},
                )
            )

    def kill_one(self) -> None:
        victim = self.running.pop(0)
        victim.kill()
        victim.wait()

    def end(self) -> None:
        while self.running:
            self.kill_one()

    def ticks(self) -> list[datetime]:
        with self.cluster.admin() as admin:
            found = list(admin.read_all(f"{self.prefix}celery-beat"))
        return sorted(datetime.fromisoformat(each.headers["portalmq-tick"]) for each in found)

    def tasks(self) -> list[str]:
        with self.cluster.admin() as admin:
            return [each.json()["headers"]["id"] for each in admin.read_all(f"{self.prefix}celery")]

    def wait_for_tasks(self, count: int) -> None:
        wait_until(lambda: f"{self.prefix}celery" in self.topics() and len(self.tasks()) >= count, f"{count} tasks", 90)

    def topics(self) -> set[str]:
        with self.cluster.admin() as admin:
            return {topic.name for topic in admin.topics()}

    def check(self) -> None:
        """Stop the ticks, let the beats finish, and compare."""
        with self.cluster.admin() as admin:
            for each in admin.schedules():
                if each.topic == f"{self.prefix}celery-beat":
                    admin.delete_schedule(each.name)
        ticks = self.ticks()
        assert max(Counter(ticks).values()) == 1
        assert {after - before for before, after in pairwise(ticks)} == {timedelta(seconds=EVERY_S)}
        self.wait_for_tasks(len(ticks))
        tasks = self.tasks()
        assert len(tasks) == len(ticks)
        assert len(set(tasks)) == len(tasks)


@pytest.fixture
def beats(cluster: Cluster, tmp_path: Path) -> Iterator[Beats]:
    made = Beats(cluster, tmp_path)
    yield made
    made.end()


@pytest.mark.timeout(300)
def test_two_beats_send_each_tick_once_though_one_is_killed(beats: Beats) -> None:
    beats.start()
    beats.start()
    beats.wait_for_tasks(3)
    beats.kill_one()
    beats.wait_for_tasks(len(beats.tasks()) + 3)
    beats.check()


@pytest.mark.prove
@pytest.mark.timeout(1_800)
def test_each_tick_is_one_task_while_beats_and_brokers_are_killed(beats: Beats) -> None:
    cluster = beats.cluster
    beats.start()
    beats.start()
    beats.wait_for_tasks(3)
    until_s = time.monotonic() + SECONDS
    for number in itertools.count():
        if time.monotonic() >= until_s:
            break
        if number % 3 == 0:
            beats.kill_one()
            beats.start()
        else:
            victim = cluster.controller() if number % 3 == 1 else cluster.wait_for_leader(f"{beats.prefix}celery-beat")
            assert victim is not None
            cluster.kill(victim)
            cluster.start(victim)
        beats.wait_for_tasks(len(beats.tasks()) + 1)
    beats.check()
