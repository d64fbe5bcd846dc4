"""ZooKeeper dies, comes back, comes back empty or with an old state: brokers with elected leaders work without it.

`PORTALMQ_ZOOKEEPER_OUTAGE_S` sets the length of the outage (the suite: 8 s, more than a session; by hand: 30 s).
"""

from __future__ import annotations

import os
import shutil
import time
from datetime import timedelta

import pytest
from support.broker_process import BrokerProcess
from support.cluster import Cluster, wait_until
from support.load import check, everything_in, loads

from portalmq import Consumer
from portalmq.broker.cluster.saved_copy import GROUPS, SCHEDULES
from portalmq.broker.server.adoption import write_back
from portalmq.broker.server.adoption_reading import read_directories
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.zookeeper import ZooKeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OUTAGE_S = float(os.environ.get("PORTALMQ_ZOOKEEPER_OUTAGE_S", "8"))
PAUSE_S = 0.002
# A session of the brokers: a shorter gap may be a slow machine, a longer one is a lost leader.
GAP_MAX_S = 6.0


def test_producing_and_consuming_go_on_without_zookeeper(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic, partitions=3)
    cluster.wait_in_sync(topic)
    before = led(cluster, topic)
    received = set()
    with (
        loads(cluster.urls, topic=topic, partitions=3, pause_s=PAUSE_S) as running,
        Consumer(topic, group=topic, bootstrap=cluster.urls, manual_ack=True) as consumer,
    ):
        for load in running:
            load.wait_for_acked(200)
        # The group's first use writes its settings to ZooKeeper, as creating a topic does.
        first = consumer.poll(timeout_s=60)
        assert first
        consumer.ack(first)
        gone_at = time.monotonic()
        cluster.zookeeper.kill()
        while time.monotonic() - gone_at < OUTAGE_S or len(received) <= 100:
            messages = consumer.poll(timeout_s=60)
            assert messages, "nothing is received while ZooKeeper is gone"
            consumer.ack(messages)
            received |= {message.text for message in messages}
        # All sessions have ended by now, and each partition still accepts writes.
        for load in running:
            for partition in before:
                load.wait_for_acked(100, partition=partition)
        assert led(cluster, topic) == before, "a ZooKeeper outage alone stops no partition"
        cluster.zookeeper.start()
        for load in running:
            load.wait_for_acked(500)
        wait_until(lambda: cluster.live() == set(cluster.brokers), "every broker is registered again")
        for load in running:
            load.wait_for_acked(500)
        assert led(cluster, topic) == before, "the end of the outage stops no partition either"
        gap = max(load.longest_gap_s(gone_at, partition) for load in running for partition in range(3))
    print(f"{len(received)} received during the outage, longest gap {gap:.2f} s")
    assert gap < GAP_MAX_S
    check(running, everything_in(cluster.urls, topic))


def led(cluster: Cluster, topic: str) -> dict[int, tuple[int, int]]:
    """Each partition's leader and leader epoch: no election happened while they are the same."""
    described = wait_until(lambda: cluster.partitions(topic), "a broker names the leaders")
    return {each["partition"]: (each["leader"], each["leader_epoch"]) for each in described}


def test_a_leader_killed_while_zookeeper_is_gone_is_replaced_once_it_is_back(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    with loads(cluster.urls, topic=topic, pause_s=PAUSE_S) as running:
        for load in running:
            load.wait_for_acked(200)
        cluster.zookeeper.kill()
        cluster.kill(leader)
        time.sleep(1)  # no election is possible during this time, so there is no condition to wait for
        cluster.zookeeper.start()
        cluster.wait_for_leader(topic, other_than=leader)
        for load in running:
            load.wait_for_acked(200)
    check(running, everything_in(cluster.urls, topic))


@pytest.mark.prove
def test_one_of_three_zookeepers_killed_is_not_felt(tmp_path, topic: str):
    with Cluster(tmp_path, zookeepers=3) as cluster:
        cluster.admin().create_topic(topic)
        cluster.wait_in_sync(topic)
        before = led(cluster, topic)
        with loads(cluster.urls, topic=topic, pause_s=PAUSE_S) as running:
            for number in range(3):  # one after another, so the leader of the ensemble is among them
                for load in running:
                    load.wait_for_acked(200)
                killed_at = time.monotonic()
                cluster.zookeeper.kill(number)
                cluster.admin().create_topic(f"{topic}-{number}")
                for load in running:
                    load.wait_for_acked(200)
                assert led(cluster, topic) == before
                assert max(load.longest_gap_s(killed_at) for load in running) < GAP_MAX_S
                cluster.zookeeper.start()
        check(running, everything_in(cluster.urls, topic))


def test_brokers_refuse_a_wiped_zookeeper_and_keep_their_data(tmp_path, topic: str):
    with Cluster(tmp_path, brokers=1) as cluster:
        broker = cluster.brokers[1]
        assert broker.request("POST", f"/v1/topics/{topic}/messages", b"kept").status == 200
        assert broker.stop() == 0
        cluster.zookeeper.stop()
        for server in (tmp_path / "zookeeper").glob("[0-9]"):
            shutil.rmtree(server)
        cluster.zookeeper.start()
        broker.launch()
        assert broker.wait() == 73
        assert "portalmq adopt" in broker.stderr()
        assert list((broker.data_dir / "partitions").glob(f"{topic}@*/0/*.sqlite")), "nothing was removed"


def test_brokers_end_when_zookeeper_is_wiped_under_them_and_adopting_brings_all_back(tmp_path, topic: str):
    with Cluster(tmp_path) as cluster:
        cluster.admin().create_topic(topic, partitions=3)
        cluster.wait_in_sync(topic)
        beats = f"{topic}-beats"
        cluster.admin().create_schedule(beats, beats, "tick", every=timedelta(seconds=1))
        wait_until(lambda: ticks(cluster, beats), "a first tick")
        keyed, stream = f"{topic}-keyed", f"{topic}-stream"
        cluster.admin().create_group(keyed, ordering="key")
        first = next_tick(cluster, beats, stream)
        for broker in cluster.brokers.values():
            wait_until(lambda broker=broker: saved(broker) == [beats], "a copy of the schedule")
            wait_until(lambda broker=broker: {keyed, stream} <= saved_groups(broker), "a copy of the groups")
        with loads(cluster.urls, topic=topic, partitions=3, pause_s=PAUSE_S) as running:
            for load in running:
                load.wait_for_acked(200)
            cluster.zookeeper.stop()
            shutil.rmtree(tmp_path / "zookeeper" / "1")
            for load in running:
                load.wait_for_acked(200)
            cluster.zookeeper.start()
            for broker in cluster.brokers.values():
                assert broker.wait() == 73
                assert "was ZooKeeper wiped" in broker.stderr()
                assert "portalmq adopt" in broker.stderr()
            adopt(cluster)
            cluster.start(1, 2, 3)
            for load in running:
                load.wait_for_acked(200)
        check(running, everything_in(cluster.urls, topic))
        before = len(ticks(cluster, beats))
        found = wait_until(lambda: len(each := ticks(cluster, beats)) > before + 2 and each, "ticks as before")
        assert len(set(found)) == len(found)
        assert cluster.admin().group(keyed).config.ordering == "key"
        assert next_tick(cluster, beats, stream) != first, "members of the stream group go on where they were"


def next_tick(cluster: Cluster, topic: str, group: str) -> str:
    with Consumer(topic, group=group, bootstrap=cluster.urls, mode="stream") as consumer:
        tick = next(iter(consumer)).headers["portalmq-tick"]
        consumer.commit()
        return tick


def saved_groups(broker: BrokerProcess) -> set[str]:
    found = GROUPS.read(broker.data_dir)
    return set() if found is None else {each.name for each in found.states}


def ticks(cluster: Cluster, topic: str) -> list[str]:
    with cluster.admin() as admin:
        return [each.headers["portalmq-tick"] for each in admin.read_all(topic)]


def saved(broker: BrokerProcess) -> list[str]:
    found = SCHEDULES.read(broker.data_dir)
    return [] if found is None else [each.name for each in found.states]


def test_a_broker_ends_when_zookeeper_is_restored_from_an_older_copy_under_it_and_adopting_helps(tmp_path, topic: str):
    with Cluster(tmp_path, "--session-timeout-ms", "3000", brokers=1) as cluster:
        broker = cluster.brokers[1]
        cluster.zookeeper.stop()
        shutil.copytree(tmp_path / "zookeeper", tmp_path / "copy")
        cluster.zookeeper.start()
        assert broker.request("POST", f"/v1/topics/{topic}/messages", b"kept").status == 200
        cluster.zookeeper.stop()
        shutil.rmtree(tmp_path / "zookeeper")
        (tmp_path / "copy").rename(tmp_path / "zookeeper")
        cluster.zookeeper.start()
        assert broker.wait() == 73
        assert "older copy" in broker.stderr()
        assert "portalmq adopt" in broker.stderr()
        assert list((broker.data_dir / "partitions").glob(f"{topic}@*/0/*.sqlite")), "nothing was moved"
        adopt(cluster)
        cluster.start(1)
        with cluster.admin() as admin:
            assert [message.value for message in admin.read_all(topic)] == [b"kept"]


def adopt(cluster: Cluster) -> None:
    plane = ZooKeeper(cluster.zookeeper.hosts)
    plane.start()
    try:
        wait_until(lambda: not Catalog(plane).brokers(), "the sessions of the brokers end")
        found = read_directories([broker.data_dir for broker in cluster.brokers.values()])
        write_back(Catalog(plane), found, accept_loss=False, replace_cluster=False)
    finally:
        plane.close()


def test_a_data_directory_of_another_cluster_is_refused(cluster: Cluster, tmp_path):
    other = BrokerProcess(tmp_path, command=("dev",))
    with other:
        other.request("POST", "/v1/topics/t/messages", b"elsewhere")
        other.stop()
        foreign = cluster.add(9, directory=tmp_path)
        try:
            foreign.launch()
            assert foreign.wait() == 73
            assert "cluster" in foreign.stderr()
        finally:
            del cluster.brokers[9]
            foreign.end()
