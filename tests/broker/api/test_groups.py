"""Groups and receipts, topics and settings: each call is answered in the form of the contract."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from portalmq import wire
from portalmq.broker.partition.long_poll import Leaderships, LeasedMessage
from portalmq.broker.queues.later_acks import Acked
from portalmq.broker.storage.batch import Record
from portalmq.errors import Unavailable


def test_received_messages_carry_their_lease(client, broker):
    broker.logs["t"] = [[Record(b"1", "application/json")]]
    answer = client.post("/v1/groups/g/receive", json={"topics": ["t"], "wait_ms": 5})
    message = answer.get_json()["messages"][0]
    assert (message["value"], message["receipt"], message["delivery_count"]) == (1, "r0", 1)
    assert message["lease_expires_at_ms"] == 1_700_000_030_000
    request = broker.last("receive")["request"]
    assert (request.topics, request.wait_ms, request.max_messages) == (["t"], 5, 10)


def test_received_messages_come_as_messagepack_when_asked_for(client, broker):
    broker.logs["t"] = [[Record(b"\x00", "image/png", b"k")]]
    answer = client.post("/v1/groups/g/receive", json={"topics": ["t"]}, headers={"Accept": wire.BATCH_MSGPACK})
    message = msgspec.msgpack.decode(answer.data, type=wire.PackReceived).messages[0]
    assert (message.topic, message.value, message.key, message.receipt) == ("t", b"\x00", b"k", "r0")


def test_an_empty_receive_is_an_empty_list(client):
    assert client.post("/v1/groups/g/receive", json={"topics": ["t"]}).get_json() == {"messages": []}


@pytest.mark.parametrize(
    "body",
    [{}, {"topics": []}, {"topics": ["a b"]}, {"topics": "t"}, {"topics": ["t"], "wait_ms": 60_001}]
    + [{"topics": ["t"], "max_messages": 0}, {"topics": ["t"], "wiat_ms": 1}, {"topics": ["t"], "attempt_id": ""}, []],
    ids=str,
)
def test_a_wrong_receive_is_refused(client, broker, problem_of, body):
    problem_of(client.post("/v1/groups/g/receive", json=body), 400, "invalid_request")
    assert broker.made == []


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_receipts_are_answered_one_by_one(client, broker, problem_of, verb):
    answer = client.post(f"/v1/groups/g/{verb}", json={"receipts": ["a", "b"]})
    assert answer.get_json() == {"results": [{"receipt": "a", "status": "ok"}, {"receipt": "b", "status": "ok"}]}
    broker.stale.add("a")
    problem = problem_of(
        client.post(f"/v1/groups/g/{verb}", json={"receipts": ["a", "b"]}), 409, "stale_receipt", "partial"
    )
    assert problem["results"] == [{"receipt": "a", "status": "stale_receipt"}, {"receipt": "b", "status": "ok"}]
    problem_of(client.post(f"/v1/groups/g/{verb}", json={"receipts": []}), 400, "invalid_request")


def test_settings_of_a_nack_and_an_extend_reach_the_domain(client, broker):
    client.post("/v1/groups/g/nack", json={"receipts": ["a"], "delay_ms": 5, "reason": "busy"})
    assert broker.last("nack") == {"group": "g", "receipts": ["a"], "time_ms": 5, "reason": "busy"}
    client.post("/v1/groups/g/nack", json={"receipts": ["a"], "unseen": True})
    assert broker.calls_made("release") == 1
    client.post("/v1/groups/g/extend", json={"receipts": ["a"], "visibility_timeout_ms": 9})
    assert broker.last("extend")["time_ms"] == 9


def test_a_group_is_made_shown_listed_and_deleted(client, broker, problem_of):
    assert client.put("/v1/groups/g", json={"max_deliveries": 3}).status_code == 201
    assert broker.last("put_group")["config_patch"] == {"max_deliveries": 3}
    assert client.put("/v1/groups/g").status_code == 200
    assert client.put("/v1/groups/g?delivery=exactly_once").status_code == 200
    assert broker.last("put_group")["initial"] == {"delivery": "exactly_once"}
    assert client.get("/v1/groups/g").get_json()["group"] == "g"
    assert [group["group"] for group in client.get("/v1/groups").get_json()["groups"]] == ["g"]
    assert client.delete("/v1/groups/g").status_code == 204
    problem_of(client.get("/v1/groups/g"), 404, "group_not_found")
    problem_of(client.put("/v1/groups/g", json=[1]), 400, "invalid_request")


def test_a_topic_is_made_shown_listed_altered_and_deleted(client, broker, problem_of):
    assert client.put("/v1/topics/t", json={"partitions": 2}).status_code == 201
    assert client.put("/v1/topics/t").status_code == 200
    shown = client.get("/v1/topics/t").get_json()
    assert (shown["name"], len(shown["partitions"])) == ("t", 2)
    assert client.get("/v1/topics").get_json() == {"topics": [{"name": "t", "partitions": 2, "replication_factor": 1}]}
    assert client.patch("/v1/topics/t", json={"config": {"retention_ms": 5}}).status_code == 200
    assert broker.last("alter_topic")["request"].config == {"retention_ms": 5}
    assert client.delete("/v1/topics/t").status_code == 204
    problem_of(client.delete("/v1/topics/t"), 404, "topic_not_found")


@pytest.mark.parametrize(
    "body", [{"partitions": 0}, {"partitions": 1001}, {"partitions": "2"}, {"replicas": 1}], ids=str
)
def test_wrong_settings_of_a_topic_are_refused(client, problem_of, body):
    problem_of(client.put("/v1/topics/t", json=body), 400, "invalid_request")


def test_a_purge_takes_an_offset_and_refuses_a_misspelt_parameter(client, broker, problem_of):
    assert client.delete("/v1/topics/t/messages?before_offset=5&partition=1").status_code == 204
    assert broker.last("purge") == {"name": "t", "partition": 1, "before_offset": 5}
    broker.made.clear()
    problem_of(client.delete("/v1/topics/t/messages?before_ofset=5"), 400, "invalid_request")
    assert broker.made == []


def test_the_cluster_and_its_metadata_are_shown(client, broker):
    assert client.get("/v1/cluster").get_json()["brokers"] == [{"id": 7, "url": "http://x", "live": True}]
    client.get("/v1/metadata?topics=a,b")
    assert broker.last("metadata") == {"topics": ["a", "b"]}
    client.get("/v1/metadata")
    assert broker.last("metadata") == {"topics": None}


@pytest.mark.parametrize("verb", ["ack", "nack", "extend"])
def test_receipts_whose_leader_cannot_be_asked_are_unknown_in_the_results(client, broker, problem_of, verb):
    error = Unavailable("no leader just now", retry_after_s=0.1)
    broker.settlement.settle = lambda *_, **__: [True, error, False]
    problem = problem_of(
        client.post(f"/v1/groups/g/{verb}", json={"receipts": ["a", "b", "c"]}), 503, "unavailable", "unknown"
    )
    assert problem["retryable"]
    assert [result["status"] for result in problem["results"]] == ["ok", "unknown", "stale_receipt"]


def test_a_receive_fails_when_its_acks_do_not_reach_their_leader(client, broker, problem_of):
    error = Unavailable("no leader just now")
    broker.receive_handler.ack_and_receive = lambda *_, **__: ([], Acked([True, error], [], []))
    answer = client.post("/v1/groups/g/receive", json={"topics": ["t"], "ack": ["a", "b"]})
    problem_of(answer, 503, "unavailable", "unknown")


@pytest.mark.parametrize(("holds", "status"), [(True, 200), (False, 503)])
def test_an_answer_that_was_encoded_in_turns_needs_the_leadership_still(client, broker, holds, status):
    def receive(*_: object, leaderships: Leaderships, **__: object) -> list[LeasedMessage]:
        leaderships.note(SimpleNamespace(is_remote=False, leadership=lambda: lambda: holds))  # type: ignore[arg-type]
        return []

    broker.receive_handler.receive = receive
    answer = client.post("/v1/groups/g/receive", json={"topics": ["t"]})
    assert answer.status_code == status
    if not holds:
        assert answer.get_json()["outcome"] == "unknown"


@pytest.mark.parametrize(("header", "forwards"), [(None, True), ("0", True), ("1", False), ("true", False)])
def test_no_forward_reaches_the_domain(client, broker, header, forwards):
    seen = []
    broker.receive_handler.receive = lambda *_, forward, **__: seen.append(forward) or []
    broker.settlement.settle = lambda *_, forward, **__: seen.append(forward) or [True]
    headers = {} if header is None else {"PortalMQ-No-Forward": header}
    client.post("/v1/groups/g/receive", json={"topics": ["t"]}, headers=headers)
    client.post("/v1/groups/g/ack", json={"receipts": ["a"]}, headers=headers)
    client.post("/v1/topics/t/messages", data=b"x", headers=headers)
    client.get("/v1/topics/t/partitions/0/messages", headers=headers)
    assert seen == [forwards, forwards]
    assert broker.last("produce")["forward"] is forwards
    assert broker.last("browse")["forward"] is forwards


@pytest.mark.parametrize(("header", "is_first"), [(None, False), ("1", True), ("2", False)])
def test_the_header_of_a_first_try_reaches_the_domain(client, broker, header, is_first):
    headers = {} if header is None else {"PortalMQ-First-Try": header}
    client.post("/v1/groups/g/receive", json={"topics": ["t"], "attempt_id": "a"}, headers=headers)
    assert broker.last("receive")["is_first"] is is_first


def test_a_group_starts_at_a_time_in_either_format(client, broker, problem_of):
    for at in ("2026-01-31T12:00:00Z", 1_769_860_800_000):
        assert client.put(f"/v1/groups/g{len(str(at))}", json={"start": {"at": at}}).status_code == 201
        assert broker.last("put_group")["config_patch"] == {"start": {"at": 1_769_860_800_000}}
    problem = problem_of(client.put("/v1/groups/h", json={"start": {"at": "yesterday"}}), 400, "invalid_request")
    assert "start.at" in problem["detail"]


def test_a_group_is_paused_and_resumed(client, broker, problem_of):
    problem_of(client.post("/v1/groups/g/pause"), 404, "group_not_found")
    client.put("/v1/groups/g")
    assert client.post("/v1/groups/g/pause", json={"reason": "why", "by": "eva"}).status_code == 204
    assert broker.last("pause") == {"paused": True, "reason": "why", "by": "eva"}
    assert client.post("/v1/groups/g/resume").status_code == 204
    assert broker.last("pause") == {"paused": False, "reason": "", "by": ""}
    for wrong in ({"reason": 1}, {"why": "x"}, {"reason": "x" * 1_001}):
        problem_of(client.post("/v1/groups/g/pause", json=wrong), 400, "invalid_request")


def test_ready_messages_are_moved_to_another_topic(client, broker, problem_of):
    body = {"topic": "t", "to_topic": "u", "limit": 5, "rate_per_s": 2.5, "dry_run": True}
    assert client.post("/v1/groups/g/move", json=body).get_json() == {"matched": 3, "moved": 2}
    assert broker.last("move") == {"group": "g", "wanted": wire.MoveRequest("t", "u", 5, 2.5, True)}
    for wrong in ({}, {"topic": "t"}, {"topic": "t", "to_topic": "a b"}, {**body, "limit": 0}, {**body, "where": {}}):
        problem_of(client.post("/v1/groups/g/move", json=wrong), 400, "invalid_request")
