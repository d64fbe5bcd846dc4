"""Recurring messages on three real brokers, while leaders and controllers are killed: each tick once, none missing."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import datetime, timedelta
from itertools import pairwise

import pytest
from support.cluster import Cluster, wait_until

EVERY_MS = 1_000
# The long run: PORTALMQ_SCHEDULE_SECONDS=600 with `-m prove`.
SECONDS = float(os.environ.get("PORTALMQ_SCHEDULE_SECONDS", "60"))


def ticks(cluster: Cluster, topic: str) -> list[datetime]:
    with cluster.admin() as admin:
        found = list(admin.read_all(topic))
    return sorted(datetime.fromisoformat(each.headers["portalmq-tick"]) for each in found)


def check_each_once(cluster: Cluster, topic: str, at_least: int) -> None:
    found = wait_until(lambda: len(each := ticks(cluster, topic)) >= at_least and each, f"{at_least} ticks")
    assert [each for each, times in Counter(found).items() if times > 1] == []
    gaps = {after - before for before, after in pairwise(found)}
    assert gaps == {timedelta(milliseconds=EVERY_MS)}, "a tick is missing"


def kill_and_restart(cluster: Cluster, broker_id: int) -> None:
    cluster.kill(broker_id)
    cluster.start(broker_id)


@pytest.mark.timeout(300)
def test_each_tick_is_published_once_while_leader_and_controller_are_killed(cluster: Cluster, topic: str) -> None:
    with cluster.admin() as admin:
        admin.create_schedule(topic, topic, "tick", every=timedelta(milliseconds=EVERY_MS))
    cluster.wait_for_leader(topic)
    check_each_once(cluster, topic, 2)
    kill_and_restart(cluster, cluster.wait_for_leader(topic))
    check_each_once(cluster, topic, 5)
    with cluster.admin() as admin:
        controller = admin.cluster().controller
    assert controller is not None
    kill_and_restart(cluster, controller)
    check_each_once(cluster, topic, 8)
    with cluster.admin() as admin:
        admin.pause_schedule(topic)
        count = len(ticks(cluster, topic))
        admin.resume_schedule(topic)
        wait_until(lambda: len(ticks(cluster, topic)) > count, "a tick after the pause")
        admin.delete_schedule(topic)
    found = ticks(cluster, topic)
    assert max(Counter(found).values()) == 1
    cluster.kill(cluster.wait_for_leader(topic))
    cluster.wait_for_leader(topic)
    assert ticks(cluster, topic) == found, "nothing is published after the deletion, whoever leads"
    cluster.heal()


@pytest.mark.timeout(300)
def test_of_the_ticks_missed_while_no_broker_was_up_one_is_published(cluster: Cluster, topic: str) -> None:
    with cluster.admin() as admin:
        for name, catch_up in ((f"{topic}-one", True), (f"{topic}-none", False)):
            admin.create_schedule(name, name, "tick", every=timedelta(seconds=1), catch_up=catch_up)
    for name in (f"{topic}-one", f"{topic}-none"):
        wait_until(lambda name=name: ticks(cluster, name), "a first tick")
    cluster.kill(1, 2, 3)
    down_s = time.time()
    time.sleep(4.5)  # what is tested: a time at which no broker is up
    up_s = time.time()
    cluster.start(1, 2, 3)
    missed = {}
    for name in (f"{topic}-one", f"{topic}-none"):
        wait_until(lambda name=name: ticks(cluster, name)[-1].timestamp() > up_s + 5, "a tick after the start")
        found = [each.timestamp() for each in ticks(cluster, name)]
        assert len(set(found)) == len(found)
        missed[name] = len([each for each in found if down_s < each < up_s])
    assert missed[f"{topic}-none"] == 0
    assert missed[f"{topic}-one"] <= 1
    with cluster.admin() as admin:
        for name in missed:
            admin.delete_schedule(name)


@pytest.mark.prove
@pytest.mark.timeout(1_800)
def test_each_tick_is_published_once_for_as_long_as_brokers_are_killed(cluster: Cluster, topic: str) -> None:
    names = [f"{topic}-{number}" for number in range(5)]
    with cluster.admin() as admin:
        for number, name in enumerate(names):
            admin.create_topic(name, partitions=1 + number % 3)
            admin.create_schedule(name, name, "tick", every=timedelta(milliseconds=EVERY_MS), key=name)
    until_s = time.monotonic() + SECONDS
    kills = 0
    while time.monotonic() < until_s:
        with cluster.admin() as admin:
            controller = admin.cluster().controller
        victim = controller if kills % 2 and controller is not None else cluster.wait_for_leader(names[kills % 5])
        kill_and_restart(cluster, victim)
        kills += 1
    for name in names:
        check_each_once(cluster, name, int(SECONDS) - 20)
    with cluster.admin() as admin:
        for name in names:
            admin.delete_schedule(name)
