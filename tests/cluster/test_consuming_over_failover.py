"""Leases, acks and idempotency keys survive a change of leader."""

from __future__ import annotations

import json

import pytest
from support.cluster import Cluster, wait_until

from portalmq import Consumer, Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def produce(cluster: Cluster, topic: str, count: int) -> list[str]:
    values = [f"{topic}-{number}" for number in range(count)]
    with Producer(cluster.urls) as producer:
        for future in [producer.send(topic, value) for value in values]:
            future.result(timeout=30)
    return values


def test_messages_received_before_a_failover_are_acked_after_it(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    values = produce(cluster, topic, 100)
    leader = cluster.wait_for_leader(topic)
    with Consumer(topic, group=topic, bootstrap=cluster.urls, manual_ack=True, visibility_timeout_s=600) as consumer:
        first = consumer.poll(timeout_s=20, max_messages=40)
        assert first
        cluster.kill(leader)
        cluster.wait_for_leader(topic, other_than=leader)
        consumer.ack(first)
        assert cluster.admin().lag(topic) == len(values) - len(first)
        seen = [message.text for message in first]
        while len(set(seen)) < len(values):
            messages = consumer.poll(timeout_s=30)
            assert messages, f"{len(set(seen))} of {len(values)} were received"
            consumer.ack(messages)
            seen += [message.text for message in messages]
    assert set(seen) == set(values)
    assert len(seen) == len(values), "an acked message is not delivered again"
    assert cluster.admin().lag(topic) == 0


def test_messages_not_acked_before_a_failover_are_delivered_again(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    values = produce(cluster, topic, 20)
    leader = cluster.wait_for_leader(topic)
    with Consumer(topic, group=topic, bootstrap=cluster.urls, manual_ack=True, visibility_timeout_s=3) as lost:
        assert lost.poll(timeout_s=20)
        cluster.kill(leader)
        with Consumer(topic, group=topic, bootstrap=cluster.urls, idle_timeout_s=60) as consumer:
            seen = {next(consumer).text}
            while seen < set(values):
                seen.add(next(consumer).text)
    assert seen == set(values)


def test_a_consumer_that_sleeps_is_woken_by_the_new_leader(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    with Consumer(topic, group=topic, bootstrap=cluster.urls, idle_timeout_s=40) as consumer:
        assert consumer.poll(timeout_s=1) == []
        cluster.kill(leader)
        cluster.wait_for_leader(topic, other_than=leader)
        with Producer(cluster.urls) as producer:
            producer.send(topic, "awake").result(timeout=30)
        assert [message.text for message in consumer.poll(timeout_s=30)] == ["awake"]


def test_an_idempotency_key_is_known_to_the_next_leader(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic)
    headers = {"Idempotency-Key": "order-17", "Content-Type": "text/plain"}

    def send(broker_id: int, body: bytes):
        return cluster.brokers[broker_id].request("POST", f"/v1/topics/{topic}/messages", body, headers)

    first = send(leader, b"once")
    assert first.status == 200
    cluster.kill(leader)
    cluster.wait_for_leader(topic, other_than=leader)
    for broker_id in cluster.running:
        again = wait_until(lambda broker_id=broker_id: ok(send(broker_id, b"once")), "the repeat is answered")
        assert again.json() == first.json()
        assert send(broker_id, b"twice").status == 422
    assert [message.text for message in cluster.admin().read_all(topic)] == ["once"]


def ok(answer):
    """During an election a call may be answered 503, not applied; every other answer is final."""
    if answer.status == 503 and json.loads(answer.body)["outcome"] == "not_applied":
        return None
    return answer
