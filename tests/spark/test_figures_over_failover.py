"""A cluster with a killed leader: the report over all brokers' files agrees with a count in plain SQL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cluster import Cluster
from support.compared import agrees
from support.plain_figures import logs_in

from portalmq import Consumer, Producer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(300)]

PARTITIONS = 3
MESSAGES = 600


def send(cluster: Cluster, topic: str, count: int) -> None:
    with Producer(cluster.urls) as producer:
        sent = [producer.send(topic, b"x" * (number % 200), key=str(number)) for number in range(count)]
        for future in sent:
            future.result(timeout=60)


def take(cluster: Cluster, topic: str, group: str, count: int, mode: str) -> None:
    with Consumer(
        topic, group=group, bootstrap=cluster.urls, mode=mode, max_messages=50, idle_timeout_s=60
    ) as consumer:
        for number, message in enumerate(consumer, 1):
            if mode == "queue" and number % 10 == 0:
                consumer.nack(message, reason="every tenth")
            if number == count:
                break


@pytest.mark.prove
def test_a_report_over_three_brokers_and_a_killed_leader(spark: SparkSession, tmp_path: Path) -> None:
    with Cluster(tmp_path / "cluster") as cluster:
        cluster.admin().create_topic("t", partitions=PARTITIONS)
        cluster.wait_in_sync("t")
        send(cluster, "t", MESSAGES)
        take(cluster, "t", "queue-group", 250, "queue")
        killed = cluster.wait_for_leader("t")
        orphans = cluster.led_by(killed, "t")
        cluster.kill(killed)
        send(cluster, "t", MESSAGES)
        take(cluster, "t", "stream-group", 300, "stream")
        cluster.start(killed)
        cluster.wait_in_sync("t")
        send(cluster, "t", 30)
        directories = [broker.data_dir for broker in cluster.brokers.values()]
        for broker in cluster.brokers.values():
            broker.stop()
    from portalmq.spark.figures import report_figures

    made = report_figures.compute(spark, directories, ["t"], tmp_path / "parquet", made_at_ms=1)
    agrees(made, [log for log in logs_in(*directories) if log.topic == "t"])
    assert made.totals.messages == 2 * MESSAGES + 30
    gaps = {each.partition for each in made.fail_overs if each.gap_ms is not None}
    assert gaps >= set(orphans)
    assert {group.mode for group in made.groups} == {"queue", "stream"}
