"""Brokers join: the id of each, refusals, and a disk that was emptied. With real processes and ZooKeeper."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from support.broker_process import BrokerProcess
from support.cluster import Cluster, wait_until

from portalmq import Producer
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.zookeeper import ZooKeeper

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

LONG_MS = 180_000


def joining(cluster: Cluster, directory: Path, *options: str) -> BrokerProcess:
    return BrokerProcess(directory, *options, command=("broker", "--zookeeper", cluster.zookeeper.hosts))


def lasting(directory: Path, brokers: int = 3) -> Cluster:
    """A cluster whose sessions outlast every wait of these tests."""
    cluster = Cluster(directory, "--session-timeout-ms", str(LONG_MS), brokers=brokers)
    cluster.zookeeper = EmbeddedZooKeeper(directory / "zookeeper", settings={"maxSessionTimeout": str(LONG_MS)})
    return cluster


def identity(broker: BrokerProcess) -> dict[str, object]:
    return dict(json.loads((broker.data_dir / "identity.json").read_text()))


def test_brokers_that_name_no_id_get_the_smallest_free_ones_and_keep_them(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=0) as cluster:
        first, second = (joining(cluster, tmp_path / name) for name in ("first", "second"))
        with first, second:
            ids = {first: identity(first)["broker_id"], second: identity(second)["broker_id"]}
            assert sorted(ids.values()) == [1, 2]  # type: ignore[type-var]
            assert identity(first)["cluster_id"] == identity(second)["cluster_id"]
            first.restart()
            second.restart()
            assert {first: identity(first)["broker_id"], second: identity(second)["broker_id"]} == ids
            wanted = {ids[first]: first.url, ids[second]: second.url}

            def live() -> dict[int, str]:
                brokers = first.request("GET", "/v1/cluster").json()["brokers"]
                return {each["id"]: each["url"] for each in brokers if each["live"]}

            wait_until(lambda: live() == wanted, "both know each other")


def test_an_id_that_a_live_broker_has_is_refused_at_once(tmp_path: Path) -> None:
    with lasting(tmp_path, brokers=1) as cluster:
        # A broker that waited for the holder's session to end would wait for two sessions of its own.
        other = joining(cluster, tmp_path / "other", "--broker-id", "1", "--session-timeout-ms", str(LONG_MS))
        other.launch()
        assert other.wait() == 73
        assert "broker id 1 is held by" in other.stderr()
        assert "choose another --broker-id" in other.stderr()
        assert other.stderr().count("Traceback") == 0
        assert cluster.brokers[1].request("GET", "/readyz").status == 200


def test_a_disk_that_was_emptied_comes_back_under_its_id_and_is_filled_again(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.admin().create_topic("t")
        cluster.wait_in_sync("t")
        with Producer(cluster.urls) as producer:
            for number in range(20):
                producer.send("t", str(number)).result(60)
        leader = cluster.wait_for_leader("t")
        before = identity(cluster.brokers[leader])
        cluster.kill(leader)
        cluster.empty_disk(leader)
        cluster.start(leader)  # its old session may still exist
        after = identity(cluster.brokers[leader])
        assert (after["broker_id"], after["cluster_id"]) == (leader, before["cluster_id"])
        assert after["store_uuid"] != before["store_uuid"]
        cluster.wait_in_sync("t")
        others = [number for number in cluster.brokers if number != leader]
        cluster.kill(others[0])
        wait_until(lambda: cluster.leader("t") not in (None, others[0]), "a leader")
        wanted = [str(number) for number in range(20)]

        def held() -> list[str]:
            page = cluster.ask("/v1/topics/t/partitions/0/messages", leader) or {"messages": []}
            return [message["value"] for message in page["messages"]]

        # A new leader shows what is committed once its followers have reported their positions.
        wait_until(lambda: len(held()) >= len(wanted), "everything is readable")
        assert held() == wanted


def test_a_restart_within_the_old_session_is_ready_at_once(tmp_path: Path) -> None:
    # A broker that waited for its old session to end would exceed the time limit of a start.
    with lasting(tmp_path) as cluster:
        cluster.admin().create_topic("t")
        cluster.wait_in_sync("t")
        leader = cluster.wait_for_leader("t")
        cluster.kill(leader)
        cluster.start(leader)
        assert cluster.brokers[leader].ready_after_s < LONG_MS / 2_000
        cluster.wait_in_sync("t")


def test_sigterm_hands_over_what_is_led_before_the_process_ends(tmp_path: Path) -> None:
    with lasting(tmp_path) as cluster:
        cluster.admin().create_topic("t", partitions=3)
        cluster.wait_in_sync("t")
        leaving = cluster.wait_for_leader("t")
        others = set(cluster.brokers) - {leaving}
        observer = min(others)
        with closing(ZooKeeper(cluster.zookeeper.hosts)) as plane:
            plane.start()
            catalog = Catalog(plane)
            topic = catalog.topic("t")
            cluster.brokers[leaving].process.send_signal(signal.SIGTERM)
            assert cluster.brokers[leaving].wait() == 0
            # ZooKeeper already has the state that the other brokers receive.
            assert {each.value.leader for each in catalog.partitions(topic).values()} <= others
        wait_until(lambda: cluster.live(observer) == others, "it has left the cluster")
        led = wait_until(lambda: cluster.partitions("t", observer), "a broker describes the topic")
        assert {each["leader"] for each in led} <= others


def test_the_arbiter_holds_no_connection_to_zookeeper(tmp_path: Path) -> None:
    with Cluster(tmp_path, brokers=1) as cluster:
        arbiter = psutil.Process(cluster.brokers[1].process.pid)
        assert len(arbiter.children()) == 1
        assert arbiter.num_threads() == 1
        ports = {connection.raddr.port for connection in arbiter.net_connections() if connection.raddr}
        assert ports == set()


def test_an_advertised_url_has_to_be_one(tmp_path: Path) -> None:
    for url in ("ftp://host:1", "http://user:secret@host:1", "host:1", "http://"):
        broker = BrokerProcess(tmp_path, "--advertised-url", url)
        broker.launch()
        assert broker.wait() == 2
        assert "advertised_url" in broker.stderr()
        assert "secret@" not in broker.stderr()
