"""Compressed batches over three brokers: consumers get every message, also after the leader was killed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.cluster import Cluster

from portalmq import Consumer, Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

COUNT = 3_000


def test_compressed_messages_outlive_their_leader(tmp_path: Path):
    with Cluster(tmp_path) as cluster:
        _outlives(cluster, "t")


def _outlives(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=1)
    cluster.wait_in_sync(topic)
    sent = [{"number": number, "celsius": 21.5} for number in range(2 * COUNT)]
    with Producer(cluster.urls, compression="zstd") as producer:
        _send(producer, topic, sent[:COUNT])
        leader = cluster.wait_for_leader(topic)
        cluster.kill(leader)
        _send(producer, topic, sent[COUNT:])
    cluster.start(leader)
    cluster.wait_in_sync(topic)
    for mode in ("queue", "stream"):
        with Consumer(topic, group=f"{topic}-{mode}", bootstrap=cluster.urls, mode=mode) as consumer:
            found = []
            while len(found) < 2 * COUNT:
                messages = consumer.poll(timeout_s=60, max_messages=1_000)
                assert messages, f"{len(found)} of {2 * COUNT} messages came"
                found += [message.json() for message in messages]
                consumer.commit()
            assert found == sent
    cluster.kill(*cluster.running)
    stored = {_compressed(cluster.directory / f"broker-{broker_id}" / "data", topic) for broker_id in cluster.brokers}
    assert len(stored) == 1
    assert min(stored) > COUNT  # batches of a few messages are sent plain


def _compressed(data_dir: Path, topic: str) -> int:
    """Return how many messages are stored without a value of their own."""
    (file,) = data_dir.glob(f"partitions/{topic}@*/0/0*.sqlite")
    with closing(sqlite3.connect(file)) as connection:
        return connection.execute("SELECT count(*) - count(value) FROM messages").fetchone()[0]


def _send(producer: Producer, topic: str, messages: list[dict[str, object]]) -> None:
    futures = [producer.send(topic, message, key="k") for message in messages]
    producer.flush()
    for future in futures:
        future.result(60)
