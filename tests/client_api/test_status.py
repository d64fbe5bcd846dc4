"""`portalmq status`: the cluster on one screen, and a list of problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.scripted_broker import Reply, ScriptedBroker, refuse

from portalmq import wire
from portalmq.cli.main import main
from portalmq.cli.status import needing_attention

CLUSTER = wire.ClusterDescription(
    "c" * 8,
    2,
    [wire.BrokerDescription(1, "http://one:1", False), wire.BrokerDescription(2, "http://two:2", True)],
)


def partition(number: int, leader: int | None, replicas: list[int], isr: list[int]) -> wire.PartitionDescription:
    return wire.PartitionDescription(number, leader, 1, replicas, isr, 0, 3, 100)


def topic(*partitions: wire.PartitionDescription, replication_factor: int = 3) -> wire.TopicDescription:
    return wire.TopicDescription("t", list(partitions), wire.TopicConfig(), replication_factor=replication_factor)


TROUBLED = topic(partition(0, 2, [1, 2, 3], [2, 3]), partition(1, None, [1, 2, 3], [1]), partition(2, 2, [2], [2]))


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def answer(broker: ScriptedBroker, described: wire.TopicDescription) -> None:
    def reply(body: object):  # type: ignore[no-untyped-def]
        return lambda broker, call: Reply(200, msgspec.json.encode(body))

    broker.script("GET", "/v1/cluster", [reply(CLUSTER)])
    broker.script("GET", "/healthz", [reply({"status": "ready", "zookeeper": "connected"})])
    broker.script("GET", "/v1/topics/t", [reply(described)])
    broker.script("GET", "/v1/topics/gone", [refuse(404, "topic_not_found")])
    broker.script(
        "GET", "/v1/topics", [reply({"topics": [wire.TopicSummary("t", 1, 3), wire.TopicSummary("gone", 1, 3)]})]
    )


def run(broker: ScriptedBroker, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["status", *arguments, "--server", broker.url])


def test_a_partition_needs_attention_without_leader_or_with_too_few_in_sync() -> None:
    told = [(row["partition"], row["problem"], row["missing"]) for row in needing_attention(TROUBLED, 3)]
    assert told == [(0, "under-replicated", [1]), (1, "without leader", [2, 3]), (2, "under-replicated", [])]
    assert list(needing_attention(topic(partition(0, 1, [1, 2, 3], [1, 2, 3])), 3)) == []
    assert list(needing_attention(topic(partition(0, 1, [1], [1]), replication_factor=1), 3)) == []


def test_a_single_broker_reports_no_missing_replicas() -> None:
    assert list(needing_attention(topic(partition(0, 1, [1], [1])), 1)) == []


def test_a_dead_broker_needs_attention_though_the_answering_one_is_healthy(broker: ScriptedBroker) -> None:
    answer(broker, topic(partition(0, 2, [1, 2], [1, 2]), replication_factor=2))
    said = run(broker).stdout
    of_cluster, _, of_broker = said.partition("The broker that answered:")
    assert "needs attention" in of_cluster
    assert "status" not in of_cluster
    assert "ready" in of_broker


def test_the_table_shows_brokers_controller_and_problems(broker: ScriptedBroker) -> None:
    answer(broker, TROUBLED)
    lines = run(broker).stdout.splitlines()
    words = [line.split() for line in lines]
    assert ["controller", "2"] in words
    assert ["zookeeper", "connected"] in words
    assert ["without_leader", "1"] in words
    assert ["under_replicated", "2"] in words
    assert ["1", "http://one:1", "false", "false", "0"] in words
    assert ["2", "http://two:2", "true", "true", "2"] in words
    assert "t      1          without leader    -       [1,2,3]   [1]" in lines


def test_a_healthy_cluster_has_no_list_of_problems(broker: ScriptedBroker) -> None:
    answer(broker, topic(partition(0, 1, [1, 2, 3], [1, 2, 3])))
    said = run(broker).stdout
    assert "under_replicated  0" in said
    assert "PROBLEM" not in said


def test_json_has_everything_and_a_deleted_topic_is_no_error(broker: ScriptedBroker) -> None:
    answer(broker, TROUBLED)
    told = json.loads(run(broker, "-o", "json").stdout)
    assert (told["topics"], told["partitions"], told["without_leader"], told["under_replicated"]) == (1, 3, 1, 2)
    assert [broker["leads"] for broker in told["brokers"]] == [0, 2]
    assert [row["partition"] for row in told["attention"]] == [0, 1, 2]
    assert told["health"]["zookeeper"] == "connected"


def test_the_brokers_of_portalmq_up_are_asked_when_none_is_named(
    broker: ScriptedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PORTALMQ_URL", raising=False)
    answer(broker, TROUBLED)
    (tmp_path / "cluster.json").write_text(json.dumps({"urls": [broker.url], "more": 1}))
    result = CliRunner().invoke(main, ["status", "--data-dir", str(tmp_path), "-o", "json"])
    assert json.loads(result.stdout)["controller"] == 2
