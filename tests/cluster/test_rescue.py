"""The operator's commands: writing a lost ZooKeeper back, and electing a replica that is out of sync."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.cluster import Cluster, wait_until

from portalmq import Producer

pytestmark = pytest.mark.cluster

MESSAGES = 200


def portalmq(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "from portalmq.broker.ops.elect import elect, adopt, partitions; import sys; "
        "globals()[sys.argv[1]](sys.argv[2:])"
    )
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PORTALMQ_")}
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=inherited,
    )


def fill(cluster: Cluster, topic: str, values: range) -> None:
    with Producer(cluster.urls) as producer:
        futures = [producer.send(topic, str(value)) for value in values]
        for future in futures:
            future.result(timeout=30)


def values_of(broker: BrokerProcess, topic: str) -> list[int]:
    said = broker.request("GET", f"/v1/topics/{topic}/messages", headers={"Accept": "application/x-ndjson"})
    assert said.status == 200, said.body
    return sorted(int(json.loads(line)["value"]) for line in said.body.splitlines())


def wipe_zookeeper(cluster: Cluster) -> None:
    cluster.zookeeper.stop()
    for server in (cluster.directory / "zookeeper").glob("[0-9]"):
        shutil.rmtree(server)
    cluster.zookeeper.start()


def directories(*brokers: BrokerProcess) -> list[str]:
    return [word for broker in brokers for word in ("--data-dir", str(broker.data_dir))]


class TestAdopting:
    @pytest.mark.prove
    def test_a_wiped_zookeeper_is_written_back_and_nothing_acknowledged_is_missing(self, tmp_path: Path) -> None:
        with Cluster(tmp_path) as cluster:
            at = ("--zookeeper", cluster.zookeeper.hosts)
            cluster.admin().create_topic("t", partitions=3)
            cluster.wait_in_sync("t")
            fill(cluster, "t", range(MESSAGES))
            cluster.brokers[1].request("POST", "/v1/groups/g/receive", {"topics": ["t"], "max_messages": 5})
            running = portalmq("adopt", *at, *directories(*cluster.brokers.values()))
            assert (running.returncode, "is used by the process" in running.stderr) == (73, True)
            cluster.kill(1, 2, 3)
            wipe_zookeeper(cluster)

            one = portalmq("adopt", *at, *directories(cluster.brokers[1]))
            assert one.returncode == 73
            assert "the data directory of broker 2" in one.stderr
            assert "--i-accept-data-loss" in one.stderr

            done = portalmq("adopt", *at, *directories(*cluster.brokers.values()))
            assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
            assert "topic t: 3 partitions" in done.stdout
            again = portalmq("adopt", *at, *directories(*cluster.brokers.values()))
            assert (again.returncode, "is there already" in again.stdout) == (0, True), again.stderr

            cluster.start(1, 2, 3)
            cluster.wait_in_sync("t")
            assert values_of(cluster.brokers[1], "t") == list(range(MESSAGES))
            fill(cluster, "t", range(MESSAGES, 2 * MESSAGES))
            assert values_of(cluster.brokers[2], "t") == list(range(2 * MESSAGES))

            # The first broker to start may lead all partitions now.
            balanced = portalmq("partitions", "rebalance", *at)
            assert balanced.returncode == 0, balanced.stderr
            leaders = [1, 2, 3]

            def is_even() -> bool:
                if sorted(cluster.leader("t", each) or 0 for each in range(3)) == leaders:
                    return "0 leaders would move" in portalmq("partitions", "rebalance", "--dry-run", *at).stderr
                # On a slow machine leaders may have changed in the meantime.
                assert portalmq("partitions", "rebalance", *at).returncode == 0
                return False

            wait_until(is_even, "each leads one, and no leader would move")
            fill(cluster, "t", range(2 * MESSAGES, 3 * MESSAGES))
            assert values_of(cluster.brokers[3], "t") == list(range(3 * MESSAGES))

    def test_a_lagging_replica_catches_up_before_it_leads(self, tmp_path: Path) -> None:
        with Cluster(tmp_path) as cluster:
            cluster.admin().create_topic("t")
            cluster.wait_in_sync("t")
            fill(cluster, "t", range(50))
            behind = next(number for number in (1, 2, 3) if number != cluster.wait_for_leader("t"))
            cluster.kill(behind)
            fill(cluster, "t", range(50, 150))
            cluster.kill(*(number for number in (1, 2, 3) if number != behind))
            wipe_zookeeper(cluster)
            done = portalmq("adopt", "--zookeeper", cluster.zookeeper.hosts, *directories(*cluster.brokers.values()))
            assert done.returncode == 0, done.stderr
            assert "have to catch up" in done.stdout
            cluster.start(behind)
            assert cluster.leader("t") is None
            cluster.start(*(number for number in (1, 2, 3) if number != behind))
            cluster.wait_in_sync("t")
            assert values_of(cluster.brokers[behind], "t") == list(range(150))

    def test_a_standalone_brokers_directory_joins_a_cluster(self, tmp_path: Path) -> None:
        alone = BrokerProcess(tmp_path / "alone", command=("dev",))
        with alone:
            for value in range(10):
                assert alone.request("POST", "/v1/topics/t/messages", str(value).encode()).status == 200
            alone.stop()
        with Cluster(tmp_path, brokers=1) as cluster:
            other = f"{cluster.zookeeper.hosts}/other"
            done = portalmq("adopt", "--zookeeper", other, *directories(alone))
            assert done.returncode == 0, done.stderr
            joined = BrokerProcess(tmp_path / "alone", command=("broker", "--zookeeper", other))
            with joined:
                assert values_of(joined, "t") == list(range(10))

    def test_adopting_replaces_a_newer_empty_cluster_only_by_its_name(self, tmp_path: Path) -> None:
        with Cluster(tmp_path, brokers=1) as cluster:
            at = ("--zookeeper", cluster.zookeeper.hosts)
            fill(cluster, "t", range(20))
            cluster.brokers[1].stop()
            wipe_zookeeper(cluster)
            with BrokerProcess(tmp_path / "new", command=("broker", *at)) as between:
                between.stop()
            refused = portalmq("adopt", *at, *directories(cluster.brokers[1]))
            assert (refused.returncode, "--replace-cluster" in refused.stderr) == (73, True)
            done = portalmq("adopt", *at, "--replace-cluster", *directories(cluster.brokers[1]))
            assert done.returncode == 0, done.stderr
            cluster.start(1)
            assert values_of(cluster.brokers[1], "t") == list(range(20))


class TestElectingByName:
    @pytest.fixture
    def offline(self, tmp_path: Path) -> Iterator[Cluster]:
        """Broker 3 holds 50 messages of 150; brokers 1 and 2, which hold them all, are down."""
        with Cluster(tmp_path) as cluster:
            cluster.admin().create_topic("t")
            cluster.wait_in_sync("t")
            fill(cluster, "t", range(50))
            cluster.wait_in_sync("t")
            cluster.kill(3)
            fill(cluster, "t", range(50, 150))
            in_sync = [{1, 2}]
            wait_until(lambda: [set(each["isr"]) for each in cluster.partitions("t")] == in_sync, "3 is out of sync")
            cluster.kill(1, 2)
            cluster.start(3)
            yield cluster

    def test_an_unclean_election_needs_both_options_and_keeps_the_remaining_messages(self, offline: Cluster) -> None:
        at = ("--zookeeper", offline.zookeeper.hosts)
        for words in ((), ("--unclean",), ("--i-accept-data-loss",)):
            refused = portalmq("elect", "t", "0", *words, *at)
            assert (refused.returncode, "--i-accept-data-loss" in refused.stderr) == (2, True)
        wait_until(lambda: offline.leader("t") is None, "the sessions of the killed brokers have ended", 60)
        elected = portalmq("elect", "t", "0", "--unclean", "--i-accept-data-loss", *at)
        assert elected.returncode == 0, elected.stderr
        assert "broker 3 leads t/0" in elected.stdout
        offline.start(1, 2)
        offline.wait_in_sync("t")
        assert values_of(offline.brokers[1], "t") == list(range(50))
        fill(offline, "t", range(1_000, 1_050))
        expected = [*range(50), *range(1_000, 1_050)]
        assert [values_of(broker, "t") for broker in offline.brokers.values()] == [expected] * 3

    def test_an_unclean_election_is_refused_while_an_in_sync_replica_is_live(self, offline: Cluster) -> None:
        words = ("--unclean", "--i-accept-data-loss", "--zookeeper", offline.zookeeper.hosts)
        absent = portalmq("elect", "t", "0", "--broker", "2", *words)
        assert (absent.returncode, "broker 2 cannot lead" in absent.stderr) == (69, True)
        offline.start(2)
        refused = portalmq("elect", "t", "0", *words)
        assert (refused.returncode, "is there, and holds all that was acknowledged" in refused.stderr) == (73, True)
        offline.wait_in_sync("t")
        assert values_of(offline.brokers[3], "t") == list(range(150))

    def test_a_missing_topic_or_partition_is_named(self, offline: Cluster) -> None:
        words = ("--unclean", "--i-accept-data-loss", "--zookeeper", offline.zookeeper.hosts)
        for arguments, said in ((("u", "0"), "no topic 'u'"), (("t", "7"), "has partitions 0 to 0")):
            refused = portalmq("elect", *arguments, *words)
            assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr


def test_without_a_zookeeper_both_say_where_they_looked() -> None:
    for arguments in (
        ("elect", "t", "0", "--unclean", "--i-accept-data-loss", "--zookeeper", "127.0.0.1:1"),
        ("elect", "t", "0", "--unclean", "--i-accept-data-loss", "--zookeeper", "none"),
    ):
        refused = portalmq(*arguments)
        assert refused.returncode in (2, 69)
        assert "ZooKeeper" in refused.stderr or "zookeeper" in refused.stderr
        assert "Traceback" not in refused.stderr


def test_what_is_no_data_directory_is_named(tmp_path: Path) -> None:
    refused = portalmq("adopt", "--data-dir", str(tmp_path), "--zookeeper", "127.0.0.1:1")
    assert (refused.returncode, "is no broker's data directory" in refused.stderr) == (73, True)
