"""One broker of three fails in part: its disk is empty or full, its clock is wrong, it is slow, or its id is in use
twice."""

from __future__ import annotations

import threading
import time

import pytest
from support.cluster import Cluster, wait_until
from support.faults import AT_ITS_END, clock_moved_by, disk_that_fills
from support.load import check, everything_in, loads

from portalmq import Consumer, Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

PAUSE_S = 0.002
HOUR_S = 3600


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory):
    """The shared cluster, with a disk and a clock that a test can break at each broker."""
    directory = tmp_path_factory.mktemp("cluster")
    preludes = {
        n: disk_that_fills(directory / f"full-{n}") + clock_moved_by(directory / f"shift-{n}") for n in (1, 2, 3)
    }
    with Cluster(directory, preludes=preludes) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    for file in [*shared_cluster.directory.glob("full-*"), *shared_cluster.directory.glob("shift-*")]:
        file.unlink()
    shared_cluster.heal()
    return shared_cluster


@pytest.mark.prove
def test_an_emptied_disk_is_filled_again_from_the_others(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    with loads(cluster.urls, topic=topic) as running:
        for load in running:
            load.wait_for_acked(3_000)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    emptied = next(broker_id for broker_id in cluster.running if broker_id != leader)
    cluster.kill(emptied)
    wait_until(lambda: emptied not in cluster.live(), "its session has ended")
    cluster.empty_disk(emptied)
    cluster.start(emptied)
    cluster.wait_in_sync(topic)
    # The broker has only what it fetched from the others, so it serves all of it.
    leader = cluster.wait_for_leader(topic)
    if leader != emptied:
        other = next(broker_id for broker_id in cluster.running if broker_id not in {leader, emptied})
        cluster.kill(other)
        cluster.wait_out_of_sync(other, topic)  # the emptied broker is the only one left to elect
        cluster.kill(leader)
        wait_until(lambda: cluster.leader(topic) == emptied, "it leads")
        cluster.start(other)
    check(running, everything_in(cluster.brokers[emptied].url, topic))


def test_an_emptied_leader_does_not_empty_the_others(cluster: Cluster, topic: str):
    """The leader comes back at once with an empty disk. It must not lead again before it has the records."""
    cluster.admin().create_topic(topic)
    with loads(cluster.urls, topic=topic) as running:
        for load in running:
            load.wait_for_acked(1_000)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    cluster.kill(leader)
    cluster.empty_disk(leader)
    wait_until(lambda: leader not in cluster.live(), "its session has ended")
    cluster.start(leader)
    cluster.wait_in_sync(topic)
    check(running, everything_in(cluster.urls, topic))


def test_a_full_leader_refuses_and_serves_what_it_has(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    with Producer(cluster.urls) as producer:
        producer.send(topic, "before").result(timeout=20)
        full = cluster.directory / f"full-{leader}"
        full.touch()

        def refused() -> bool:
            answer = cluster.brokers[leader].request("POST", f"/v1/topics/{topic}/messages", b"probe")
            assert answer.status in {200, 507}, answer.body
            return answer.status == 507

        wait_until(refused, "the leader answers 507")
        with Consumer(topic, group=topic, bootstrap=cluster.urls) as consumer:
            assert "before" in [message.text for message in consumer.poll(timeout_s=30)]
        full.unlink()
        producer.send(topic, "after").result(timeout=60)
    values = [value for _, value in everything_in(cluster.urls, topic)[0]]
    assert values[0] == "before"
    assert values[-1] == "after"
    assert set(values[1:-1]) <= {"probe"}


def test_a_full_follower_falls_behind_alone_and_catches_up(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    follower = next(broker_id for broker_id in cluster.running if broker_id != leader)
    full = cluster.directory / f"full-{follower}"
    with loads(cluster.urls, topic=topic, pause_s=PAUSE_S) as running:
        for load in running:
            load.wait_for_acked(200)
        full.write_text(AT_ITS_END)
        cluster.wait_out_of_sync(follower, topic)
        for load in running:
            load.wait_for_acked(200)
        full.unlink()
        cluster.wait_in_sync(topic)
    assert all(broker.runs for broker in cluster.brokers.values())
    check(running, everything_in(cluster.urls, topic))


def test_a_leader_on_a_full_disk_recovers_when_there_is_space(cluster: Cluster, topic: str):
    """Even the record of an ack finds no space: the broker must recover, and no ack that was answered may be lost."""
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    full = cluster.directory / f"full-{leader}"
    with loads(cluster.urls, topic=topic, pause_s=PAUSE_S) as running:
        for load in running:
            load.wait_for_acked(200)
        full.write_text(AT_ITS_END)
        refused = f"of topic '{topic}': a transaction was refused"
        wait_until(lambda: refused in cluster.brokers[leader].stderr(), "the leader finds no room")
        full.unlink()
        for load in running:
            load.wait_for_acked(200)
        cluster.wait_in_sync(topic)
    assert all(broker.runs for broker in cluster.brokers.values())
    check(running, everything_in(cluster.urls, topic))


def test_clocks_that_jump_an_hour_change_neither_order_nor_leases(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    shift = {broker_id: cluster.directory / f"shift-{broker_id}" for broker_id in cluster.brokers}
    with Producer(cluster.urls) as producer:
        for number in range(20):
            producer.send(topic, f"leased-{number}").result(timeout=20)
    with (
        Consumer(topic, group=topic, bootstrap=cluster.urls, manual_ack=True, visibility_timeout_s=600) as holder,
        Consumer(topic, group=topic, bootstrap=cluster.urls, manual_ack=True) as thief,
    ):
        held = holder.poll(timeout_s=20, max_messages=20)
        while len(held) < 20:
            held += holder.poll(timeout_s=20, max_messages=20 - len(held))
        with loads(cluster.urls, topic=topic, pause_s=PAUSE_S) as running:
            for load in running:
                load.wait_for_acked(100)
            leader = cluster.wait_for_leader(topic)
            shift[leader].write_text(str(-HOUR_S))
            for load in running:
                load.wait_for_acked(200)
            shift[leader].write_text(str(2 * HOUR_S))
            for load in running:
                load.wait_for_acked(200)
            # The next leader's clock is an hour behind the timestamps that are in the log already.
            for other in cluster.brokers:
                if other != leader:
                    shift[other].write_text(str(-HOUR_S))
            assert not [m.text for m in thief.poll(timeout_s=1, max_messages=100) if m.text.startswith("leased")]
            cluster.kill(leader)
            for load in running:
                load.wait_for_acked(200)
        holder.ack(held)
    check(running, without(everything_in(cluster.urls, topic), "leased"))
    stamps = [message.timestamp_ms for message in cluster.admin().read_all(topic)]
    assert stamps == sorted(stamps), "timestamps never decrease, at any leader"


@pytest.mark.prove
def test_a_slow_broker_loses_no_message(cluster: Cluster, topic: str):
    """A follower runs in every other tenth of a second, and stays in sync or leaves and rejoins the ISR."""
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    slow = next(broker_id for broker_id in cluster.running if broker_id != leader)
    ended = threading.Event()

    def stutter() -> None:
        while not ended.wait(0.1):
            cluster.brokers[slow].pause()
            ended.wait(0.1)
            cluster.brokers[slow].resume()

    stutterer = threading.Thread(target=stutter)
    with loads(cluster.urls, topic=topic, pause_s=PAUSE_S) as running:
        for load in running:
            load.wait_for_acked(200)
        began = time.monotonic()
        stutterer.start()
        try:
            while time.monotonic() - began < 8:
                for load in running:
                    load.wait_for_acked(50)
        finally:
            ended.set()
            stutterer.join()
            cluster.brokers[slow].resume()
        gap = max(load.longest_gap_s(began) for load in running)
        cluster.wait_in_sync(topic)
    check(running, everything_in(cluster.urls, topic))
    print(f"longest gap {gap:.2f} s")
    assert gap < 8


def test_a_second_broker_of_the_same_id_is_refused(cluster: Cluster, tmp_path):
    first = cluster.brokers[1]
    twin = cluster.add(1, directory=tmp_path)
    cluster.brokers[1] = first
    try:
        twin.launch()
        assert twin.wait() == 73
        assert "broker id 1 is held by" in twin.stderr()
    finally:
        twin.end()
    assert cluster.live() == {1, 2, 3}


def without(found, prefix: str):
    return {
        partition: [place for place in places if not place[1].startswith(prefix)] for partition, places in found.items()
    }
