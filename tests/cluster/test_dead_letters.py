"""Dead letters over several leaders: any broker serves them, and each is copied once while leaders are killed.

`PORTALMQ_DEAD` sets the number of messages that are dead-lettered (the suite: 1,000), `PORTALMQ_KILLS` the number of
leaders that are killed during the test (the suite: 2).
"""

from __future__ import annotations

import json
import os
import threading
from collections import Counter

import pytest
from support.cluster import Cluster, wait_until

from portalmq import Consumer, PortalMQError, Producer, StaleReceipt, TopicNotFound

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

DEAD = int(os.environ.get("PORTALMQ_DEAD", "1000"))
KILLS = int(os.environ.get("PORTALMQ_KILLS", "2"))
PARTITIONS = 3
LEASE_S = 2.0


def call(cluster: Cluster, broker_id: int, method: str, path: str, body: object = None):
    raw = b"" if body is None else json.dumps(body).encode()
    return cluster.brokers[broker_id].request(method, path, raw, {"Content-Type": "application/json"})


def prepared(cluster: Cluster, topic: str, messages: int, **settings: object) -> None:
    """Create a topic whose partitions have different leaders, with numbered messages, and a group with these
    settings."""
    cluster.admin().create_topic(topic, partitions=PARTITIONS)
    cluster.wait_in_sync(topic)
    assert call(cluster, 1, "PUT", f"/v1/groups/{topic}", settings).status == 201
    with Producer(cluster.urls) as producer:
        for number in range(messages):
            producer.send(topic, {"n": number}, partition=number % PARTITIONS)


def listed(cluster: Cluster, broker_id: int, topic: str) -> list[dict]:
    """All dead letters, page by page."""
    found, after = [], ""
    while True:
        answer = call(cluster, broker_id, "GET", f"/v1/groups/{topic}/dead-letters?topic={topic}&limit=7{after}")
        assert answer.status == 200, answer.body
        page = answer.json()
        found += page["messages"]
        if page["next_after"] is None:
            return found
        after = f"&after={page['next_after']}"


def sources_of_copies(cluster: Cluster, topic: str) -> Counter:
    """Count the source of each message in the dead-letter topic, which the first copy makes."""
    try:
        headers = [message.headers for message in cluster.admin().read_all(f"{topic}.dlq")]
    except TopicNotFound:
        return Counter()
    return Counter((each["portalmq-source-partition"], each["portalmq-source-offset"]) for each in headers)


def test_dead_letters_of_all_leaders_from_any_broker(cluster: Cluster, topic: str):
    prepared(cluster, topic, 30, max_deliveries=1)
    leaders = {cluster.wait_for_leader(topic, number) for number in range(PARTITIONS)}
    assert len(leaders) > 1, "one broker leads everything, so no call is forwarded"
    with Consumer(topic, group=topic, bootstrap=cluster.urls, manual_ack=True) as consumer:
        given = 0
        while given < 30:
            messages = consumer.poll(timeout_s=20)
            consumer.nack(messages, reason="it timed out")
            given += len(messages)
    for broker_id in cluster.brokers:
        found = listed(cluster, broker_id, topic)
        assert len({message["id"] for message in found}) == len(found) == 30
        assert {message["headers"]["portalmq-source-topic"] for message in found} == {topic}
    wait_until(lambda: sum(sources_of_copies(cluster, topic).values()) >= 30, "all are copied")
    assert set(sources_of_copies(cluster, topic).values()) == {1}
    where = {"value.n": {"lt": 9}}
    path = f"/v1/groups/{topic}/dead-letters/redrive"
    for broker_id in cluster.brokers:
        dry = call(cluster, broker_id, "POST", path, {"topic": topic, "where": where, "dry_run": True})
        assert dry.json() == {"matched": 9, "redriven": 0}
    assert call(cluster, 1, "POST", path, {"topic": topic, "where": where}).json() == {"matched": 9, "redriven": 9}
    with Consumer(topic, group=topic, bootstrap=cluster.urls, idle_timeout_s=30) as consumer:
        again = [next(consumer) for _ in range(9)] + consumer.poll(timeout_s=0.2)
    assert sorted((message.json()["n"], message.delivery_count) for message in again) == [(n, 1) for n in range(9)]
    rest = [message["id"] for message in listed(cluster, 2, topic)]
    assert len(rest) == 21
    dropped = call(cluster, 3, "DELETE", f"/v1/groups/{topic}/dead-letters?topic={topic}&ids={','.join(rest[:5])}")
    assert dropped.json() == {"dropped": 5}
    assert [message["id"] for message in listed(cluster, 1, topic)] == rest[5:]


def test_each_dead_letter_is_copied_once_while_leaders_are_killed(cluster: Cluster, topic: str):
    prepared(cluster, topic, DEAD, max_deliveries=2, visibility_timeout_ms=round(LEASE_S * 1000))
    over = threading.Event()
    given_back = Counter()

    def give_back() -> None:
        """Receive and nack: a message that is not settled in time is delivered again, and is dead-lettered later."""
        with Consumer(
            topic, group=topic, bootstrap=cluster.urls, manual_ack=True, visibility_timeout_s=LEASE_S, max_messages=50
        ) as consumer:
            while not over.is_set():
                try:
                    messages = consumer.poll(timeout_s=1)
                    given_back.update(message.id for message in messages)
                    if messages:
                        consumer.nack(messages, delay_s=0)
                except StaleReceipt:
                    continue
                except PortalMQError as error:
                    print(f"given back later: {error}")

    threads = [threading.Thread(target=give_back) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for kill in range(KILLS):
            wait_until(
                lambda kill=kill: len(given_back) >= DEAD * (kill + 1) // (KILLS + 2), "some of the work is done", 120
            )
            leader = cluster.wait_for_leader(topic, kill % PARTITIONS)
            cluster.kill(leader)
            cluster.wait_for_leader(topic, kill % PARTITIONS, other_than=leader)
            cluster.start(leader)
            cluster.wait_in_sync(topic)
        wait_until(lambda: len(sources_of_copies(cluster, topic)) == DEAD, "a copy of each", 120)
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    counts = sources_of_copies(cluster, topic)
    assert len(counts) == DEAD
    assert set(counts.values()) == {1}
    assert len(listed(cluster, 1, topic)) == DEAD, "the group lists each"


def test_a_commit_sent_to_any_broker_is_applied_once(cluster: Cluster, topic: str):
    """A commit takes one hop to the leader. A repeat gets the first answer from every broker, and from the next
    leader."""
    prepared(cluster, topic, 1)
    leader = cluster.wait_for_leader(topic)
    receipts = []
    for broker_id in cluster.brokers:
        body = {"topics": [topic], "wait_ms": 2_000}
        answer = call(cluster, broker_id, "POST", f"/v1/groups/{topic}/receive", body).json()
        receipts += [message["receipt"] for message in answer["messages"]]
    assert len(receipts) == 1
    body = {"ack": receipts, "publish": [{"topic": f"{topic}-out", "value": "A", "content_type": "text/plain"}]}
    path = f"/v1/groups/{topic}/commit"
    answers = [call(cluster, broker_id, "POST", path, body) for broker_id in cluster.brokers]
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    cluster.kill(leader)
    cluster.wait_for_leader(topic, other_than=leader)

    def repeated():
        again = call(cluster, cluster.running[0], "POST", path, body)
        return again if again.status == 200 else None

    assert wait_until(repeated, "the next leader answers").body == answers[0].body
    wait_until(lambda: [m.text for m in cluster.admin().read_all(f"{topic}-out")] == ["A"], "it is there, once")
