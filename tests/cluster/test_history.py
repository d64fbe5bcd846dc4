"""The life of a message and the past of a group, at all brokers of a cluster."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from support.cluster import Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def call(cluster: Cluster, broker_id: int, method: str, path: str, body: object = None) -> Any:
    raw = b"" if body is None else json.dumps(body).encode()
    answer = cluster.brokers[broker_id].request(method, path, raw, {"Content-Type": "application/json"})
    assert answer.status == 200, answer.body
    return answer.json()


def receipts(cluster: Cluster, broker_id: int, topic: str) -> list[str]:
    body = {"topics": [topic], "wait_ms": 20_000, "consumer": f"at-{broker_id}"}
    return [
        each["receipt"] for each in call(cluster, broker_id, "POST", f"/v1/groups/{topic}/receive", body)["messages"]
    ]


def test_any_broker_tells_the_life_of_a_message_and_the_past_of_a_group(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=1)
    cluster.wait_in_sync(topic)
    leader = cluster.wait_for_leader(topic, 0)
    message_id = call(cluster, 1, "POST", f"/v1/topics/{topic}/messages", {"n": 1})["id"]
    nack = {"receipts": receipts(cluster, 1, topic), "delay_ms": 300, "reason": "later"}
    call(cluster, 2, "POST", f"/v1/groups/{topic}/nack", nack)
    call(cluster, 3, "POST", f"/v1/groups/{topic}/ack", {"receipts": receipts(cluster, 2, topic)})

    def trace(broker_id: int, query: str = "") -> Any:
        return call(cluster, broker_id, "GET", f"/v1/messages/{topic}/{message_id}/trace{query}")

    whole = trace(1)
    events = whole["events"]
    assert [(each["event"], each.get("consumer")) for each in events] == [
        ("appended", None),
        ("delivered", "at-1"),
        ("nacked", None),
        ("delivered", "at-2"),
        ("acked", None),
    ]
    assert {each["broker"] for each in events} == {leader}
    assert sorted(whole["replicas"]["isr"]) == [1, 2, 3]
    for broker_id in cluster.brokers:
        assert trace(broker_id)["events"] == events

        def knows_all(at: int = broker_id) -> bool:
            answer = cluster.brokers[at].request("GET", f"/v1/messages/{topic}/{message_id}/trace?local=true")
            return answer.status == 200 and answer.json()["events"] == events

        wait_until(knows_all, "a follower learns of what is committed")
        local = trace(broker_id, "?local=true")["as_of"]
        assert (local["broker"], local["is_leader"]) == (broker_id, broker_id == leader)
        for at_ms, state in ((events[2]["at_ms"] + 100, "scheduled"), (events[4]["at_ms"], "")):
            at = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat().replace("+00:00", "Z")
            past = call(cluster, broker_id, "GET", f"/v1/groups/{topic}?at={at}")
            assert (past["scheduled"], past["lag"]) == ((1, 1) if state else (0, 0))
            listed = call(cluster, broker_id, "GET", f"/v1/groups/{topic}/messages?topic={topic}&at={at}")["messages"]
            assert [each["state"] for each in listed] == ([state] if state else [])
