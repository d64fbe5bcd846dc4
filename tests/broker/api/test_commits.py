"""The commit call and dead letters over HTTP: requests, answers and refusals."""

from __future__ import annotations

import msgspec
import pytest
from support.domain import running
from support.outputs import give_up, partition_of, receive, send, settled, stored_in, there

from portalmq import wire
from portalmq.broker.api.app import create_app
from portalmq.broker.core.queue.records import Claim
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as it:
        yield it


@pytest.fixture
def client(fixture):
    return create_app(
        fixture.broker, BrokerConfig(body_bytes_max=100_000), fixture.broker.metrics, Auth()
    ).test_client()


def receipts(fixture, *values: str) -> list[str]:
    send(fixture, *values)
    return [message.receipt for message in receive(fixture, len(values))]


def test_a_commit_in_json(client, fixture, problem_of):
    own = receipts(fixture, "a", "b")
    publish = [
        {"topic": "out", "value": {"n": 1}, "key": "k", "headers": {"H": "x"}, "priority": 3},
        {"topic": "out", "value_base64": "/w=="},
        {"topic": "other", "value": "text", "content_type": "text/plain"},
    ]
    body = {"ack": own, "publish": publish}
    first = client.post("/v1/groups/g/commit", json=body)
    assert first.status_code == 200
    answer = first.get_json()
    assert (answer["acked"], answer["published"]) == (2, 3)
    assert answer["id"].startswith("0-")
    assert client.post("/v1/groups/g/commit", json=body).get_json() == answer, "repeated: the first answer"
    settled(fixture)
    one, two = (stored.record for stored in stored_in(fixture, "out"))
    assert (one.value, one.key, one.headers, one.priority, one.content_type) == (
        b'{"n": 1}', b"k", {"h": "x"}, 3, wire.JSON,
    )  # fmt: skip
    assert (two.value, two.content_type) == (b"\xff", wire.BYTES)
    assert there(fixture, "other") == ["text"]
    problem_of(client.post("/v1/groups/g/commit", json={"ack": own[:1], "publish": []}), 409, "stale_receipt")


def test_an_output_of_a_commit_takes_no_idempotency_key(client, fixture, problem_of):
    body = {"ack": receipts(fixture, "a"), "publish": [{"topic": "out", "value": 1, "idempotency_key": "k"}]}
    problem = problem_of(client.post("/v1/groups/g/commit", json=body), 400, "invalid_request")
    assert "no idempotency_key" in problem["detail"]


def test_a_commit_in_messagepack(client, fixture):
    own = receipts(fixture, "a")
    body = msgspec.msgpack.encode({"ack": own, "publish": [{"topic": "out", "value": b"\x00\xff", "key": b"\xfe"}]})
    types = {"Content-Type": wire.BATCH_MSGPACK, "Accept": wire.BATCH_MSGPACK}
    answer = client.post("/v1/groups/g/commit", data=body, headers=types)
    assert answer.status_code == 200
    assert msgspec.msgpack.decode(answer.data)["published"] == 1
    settled(fixture)
    (stored,) = stored_in(fixture, "out")
    assert (stored.record.value, stored.record.key) == (b"\x00\xff", b"\xfe")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"publish": []},
        {"ack": []},
        {"ack": "r"},
        {"ack": ["r"]},
        {"ack": ["x" * 64]},
        {"ack": ["R"], "member_id": "m"},
        {"member_id": "m", "generation": 1},
        {"member_id": "m", "generation": 1, "offsets": []},
        {"member_id": "m", "generation": -1, "offsets": [{"topic": "in", "partition": 0, "offset": 1}]},
        {"ack": ["R"], "publish": [{"value": 1}]},
        {"ack": ["R"], "publish": [{"topic": "a/b", "value": 1}]},
        {"ack": ["R"], "publish": [{"topic": "out"}]},
        {"ack": ["R"], "publish": [{"topic": "out", "value": 1, "value_base64": "AA=="}]},
        {"ack": ["R"], "publish": [{"topic": "out", "value": 1, "headers": {"a b": "x"}}]},
        {"ack": ["R"], "publish": [{"topic": "out", "value": 1, "priority": 32}]},
        {"ack": ["R"], "publish": [{"topic": "out", "value": 1, "partition": -1}]},
        {"ack": ["R"], "publish": [{"topic": "out", "value": 1, "delay_ms": 1, "deliver_at_ms": 1}]},
        {"ack": ["R"], "publish": [{"topic": "out", "value": 1, "nonsense": 1}]},
        {"ack": ["R"], "nonsense": 1},
    ],
)
def test_an_invalid_commit_is_refused_and_changes_nothing(client, fixture, problem_of, body):
    (own,) = receipts(fixture, "a")
    if isinstance(body.get("ack"), list):
        body = {**body, "ack": [own if each == "R" else each for each in body["ack"]]}
    problem_of(client.post("/v1/groups/g/commit", json=body), 400, "invalid_request")
    assert fixture.broker.settlement.settle("g", [own]) == [True]
    assert there(fixture) == []


def test_two_offsets_and_a_body_that_is_not_json_are_refused(client, fixture, problem_of):
    place = {"topic": "in", "partition": 0, "offset": 1}
    body = {"member_id": "m", "generation": 1, "offsets": [place, place]}
    problem_of(client.post("/v1/groups/g/commit", json=body), 400, "invalid_request")
    problem_of(client.post("/v1/groups/g/commit", data=b"{"), 400, "invalid_request")
    problem_of(client.post("/v1/groups/g/commit", data=b"x" * 100_001), 413, "message_too_large")
    problem_of(client.get("/v1/groups/g/commit"), 405, "method_not_allowed")


def test_an_unknown_group_or_partition_is_not_found(client, fixture, problem_of):
    (own,) = receipts(fixture, "a")
    problem_of(client.post("/v1/groups/nobody/commit", json={"ack": [own]}), 404, "group_not_found")
    publish = [{"topic": "in", "value": 1, "partition": 7}]
    body = {"ack": [own], "publish": publish}
    problem_of(client.post("/v1/groups/g/commit", json=body), 404, "partition_not_found")


def test_a_stale_receipt_is_409_and_nothing_is_published(client, fixture, problem_of):
    (own,) = receipts(fixture, "a")
    fixture.clock.advance(60_000)
    assert receive(fixture)
    body = {"ack": [own], "publish": [{"topic": "out", "value": 1}]}
    problem_of(client.post("/v1/groups/g/commit", json=body), 409, "stale_receipt")
    settled(fixture)
    assert there(fixture) == []


def test_a_commit_of_a_stream_member(client, fixture, problem_of):
    (receipt,) = receipts(fixture, "a", "b", "c")[:1]
    assert client.put("/v1/groups/s", json={"mode": "stream"}).status_code == 201
    partition_of(fixture).append_group_record("s", Claim("m", 3, 0, 1)).wait()

    def body(offset: int, generation: int = 3, member: str = "m") -> dict[str, object]:
        place = {"topic": "in", "partition": 0, "offset": offset}
        publish = [{"topic": "out", "value": "A", "content_type": "text/plain"}]
        return {"member_id": member, "generation": generation, "offsets": [place], "publish": publish}

    path = "/v1/groups/s/commit"
    first = client.post(path, json=body(2))
    assert (first.status_code, first.get_json()["published"]) == (200, 1)
    assert client.post(path, json=body(2)).get_json() == first.get_json()
    problem_of(client.post(path, json=body(3, generation=2)), 409, "illegal_generation")
    problem_of(client.post(path, json=body(3, member="zombie")), 409, "illegal_generation")
    problem_of(client.post(path, json=body(1)), 416, "offset_out_of_range")
    problem_of(client.post(path, json=body(10_000)), 416, "offset_out_of_range")
    problem_of(client.post(path, json={"ack": [receipt]}), 409, "group_mode_mismatch")
    problem_of(client.post("/v1/groups/g/commit", json=body(2)), 409, "group_mode_mismatch")
    settled(fixture)
    assert there(fixture) == ["A"]


# --- dead letters ----------------------------------------------------------------------------------------------------


@pytest.fixture
def dead(fixture) -> list[str]:
    send(fixture, "a", "b", "c", headers={"kind": "test"})
    messages = receive(fixture)
    give_up(fixture, messages, reason="a timeout")
    return [f"0-{message.offset}" for message in messages]


def test_dead_letters_are_listed_in_pages(client, dead):
    page = client.get("/v1/groups/g/dead-letters?topic=in&limit=2").get_json()
    assert [message["id"] for message in page["messages"]] == dead[:2]
    assert page["next_after"] == dead[1]
    (rest,) = client.get(f"/v1/groups/g/dead-letters?topic=in&after={dead[1]}").get_json()["messages"]
    assert (rest["id"], rest["topic"], rest["headers"]["kind"]) == (dead[2], "in", "test")
    assert rest["headers"]["portalmq-dead-reason"] == "a timeout"


def test_a_redrive_by_ids_where_or_all(client, fixture, dead):
    path = "/v1/groups/g/dead-letters/redrive"
    where = {"reason": {"contains": "timeout"}, "headers.kind": {"eq": "test"}}
    dry = client.post(path, json={"topic": "in", "where": where, "dry_run": True})
    assert dry.get_json() == {"matched": 3, "redriven": 0}
    assert client.post(path, json={"topic": "in", "ids": dead[:1]}).get_json() == {"matched": 1, "redriven": 1}
    assert client.post(path, json={"topic": "in", "rate_per_s": 10}).get_json() == {"matched": 2, "redriven": 2}
    assert len(receive(fixture)) == 2, "the other one waits for its turn"


def test_a_drop_by_ids_or_of_all(client, dead):
    dropped = client.delete(f"/v1/groups/g/dead-letters?topic=in&ids={dead[0]},{dead[2]}")
    assert (dropped.status_code, dropped.get_json()) == (200, {"dropped": 2})
    assert client.delete("/v1/groups/g/dead-letters?topic=in").get_json() == {"dropped": 1}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/groups/g/dead-letters", None),
        ("GET", "/v1/groups/g/dead-letters?topic=a%2Fb", None),
        ("GET", "/v1/groups/g/dead-letters?topic=in&limit=0", None),
        ("GET", "/v1/groups/g/dead-letters?topic=in&after=x", None),
        ("GET", "/v1/groups/g/dead-letters?topic=in&what=x", None),
        ("DELETE", "/v1/groups/g/dead-letters", None),
        ("DELETE", "/v1/groups/g/dead-letters?topic=in&ids=", None),
        ("DELETE", "/v1/groups/g/dead-letters?topic=in&ids=0-1;0-2", None),
        ("POST", "/v1/groups/g/dead-letters/redrive", {}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "rate_per_s": 0}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "rate_per_s": -1}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "rate_per_s": 1e300}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "ids": "0-1"}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "ids": ["0-1"], "where": {"key": {"eq": 1}}}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "where": {}}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "where": {"x": {"eq": 1}}}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "where": "1 OR 1=1"}),
        ("POST", "/v1/groups/g/dead-letters/redrive", {"topic": "in", "everything": True}),
    ],
)
def test_an_invalid_redrive_or_drop_is_refused_and_changes_nothing(client, dead, problem_of, method, path, body):
    problem_of(client.open(path, method=method, json=body), 400, "invalid_request")
    assert len(client.get("/v1/groups/g/dead-letters?topic=in").get_json()["messages"]) == 3


def test_an_unknown_topic_or_group_is_not_found(client, dead, problem_of):
    problem_of(client.get("/v1/groups/g/dead-letters?topic=nope"), 404, "topic_not_found")
    problem_of(client.get("/v1/groups/nope/dead-letters?topic=in"), 404, "group_not_found")
