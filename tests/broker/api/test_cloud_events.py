"""CloudEvents 1.0: events in the binary, the structured and the batch mode are stored alike and given out again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, running

from portalmq import wire
from portalmq.broker.api.app import create_app
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig

EVENT = {"specversion": "1.0", "id": "a-1", "source": "/shop", "type": "shop.order"}
MESSAGES = "/v1/topics/t/messages"
BROWSE = "/v1/topics/t/partitions/0/messages"


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def http(fixture: Fixture) -> FlaskClient:
    return create_app(fixture.broker, BrokerConfig(), Metrics("1.2.3"), Auth()).test_client()


def send(http: FlaskClient, event: Any, **headers: str) -> Any:
    return http.post(MESSAGES, data=json.dumps(event), content_type=wire.CLOUD_EVENT, headers=headers)


def stored(http: FlaskClient) -> list[dict[str, Any]]:
    """Return what is stored, without its place."""
    messages = http.get(BROWSE).get_json()["messages"]
    return [
        {name: each.get(name) for name in ("value", "value_base64", "content_type", "headers")} for each in messages
    ]


def events(http: FlaskClient, accept: str = wire.CLOUD_EVENTS, **query: Any) -> Any:
    answer = http.get(BROWSE, headers={"Accept": accept}, query_string=query)
    assert (answer.status_code, answer.content_type) == (200, accept)
    return answer.get_json(force=True)


def test_the_three_modes_are_stored_alike(http: FlaskClient) -> None:
    event = {**EVENT, "subject": "Käse 100%", "data": {"total": 12.50}}
    headers = {f"ce-{name}": value for name, value in EVENT.items()} | {"ce-subject": "K%C3%A4se%20100%25"}
    http.post(MESSAGES, data=b'{"total": 12.5}', content_type="application/json", headers=headers)
    assert send(http, event).status_code == 200
    batch = http.post(MESSAGES, data=json.dumps([event]), content_type=wire.CLOUD_EVENTS)
    assert [result["offset"] for result in batch.get_json()["results"]] == [
        http.get(BROWSE).get_json()["next_offset"] - 1
    ]
    binary, structured, batched = stored(http)
    assert binary == structured == batched
    assert binary["headers"] == headers
    first, second, third = (
        {name: value for name, value in each.items() if name not in {"portalmqid"}} for each in events(http)
    )
    assert first == second == third == {**event, "datacontenttype": "application/json", "portalmqtopic": "t"}


@pytest.mark.parametrize(
    ("members", "value"),
    [
        ({"data": {"a": [1, None]}}, {"value": {"a": [1, None]}, "content_type": "application/json"}),
        ({"data": "text"}, {"value": "text", "content_type": "application/json"}),
        ({"data": None}, {"value": None, "content_type": "application/json"}),
        ({"data": "<a/>", "datacontenttype": "text/xml"}, {"value": "<a/>", "content_type": "text/xml"}),
        (
            {"data_base64": "/wA=", "datacontenttype": wire.BYTES},
            {"value_base64": "/wA=", "content_type": wire.BYTES},
        ),
        ({}, {"value": "", "content_type": wire.BYTES}),
        ({"data": 7, "datacontenttype": "application/x+json"}, {"value": 7, "content_type": "application/x+json"}),
    ],
    ids=str,
)
def test_the_data_of_an_event_comes_back(http: FlaskClient, members: dict[str, Any], value: dict[str, Any]) -> None:
    send(http, {**EVENT, **members})
    assert {name: stored(http)[0].get(name) for name in value} == value
    (event,) = events(http)
    assert {name: event.get(name) for name in members} == members
    send(http, event)
    again, first = stored(http)[1], stored(http)[0]
    assert again == first


def test_attributes_of_all_types_come_back_as_text(http: FlaskClient) -> None:
    more = {"time": "2026-01-31T12:00:00.5+01:00", "dataschema": "urn:x", "flag": True, "count": -7, "none": None}
    send(http, {**EVENT, **more, "traceparent": "00-1-2-01"})
    (event,) = events(http)
    shown = {"time": more["time"], "dataschema": "urn:x", "flag": "true", "count": "-7", "traceparent": "00-1-2-01"}
    assert {name: event.get(name) for name in (*shown, "none")} == {**shown, "none": None}


def test_one_event_is_one_message_with_its_options(http: FlaskClient) -> None:
    options = {"PortalMQ-Key": "k", "PortalMQ-Header-Shade": "red", "Idempotency-Key": "once", "ce-id": "another"}
    first = send(http, {**EVENT, "data": 1}, **options)
    again = send(http, {**EVENT, "data": 1}, **options)
    assert first.get_json() == again.get_json()
    (message,) = http.get(BROWSE).get_json()["messages"]
    assert (message["key"], message["headers"]["shade"], message["headers"]["ce-id"]) == ("k", "red", "a-1")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "not an event in JSON"),
        (b"[]", "not an event in JSON"),
        (b"{", "not an event in JSON"),
        (b'{"a": \xff}', "not an event in JSON"),
        *(({**EVENT, name: None}, f"has no {name}") for name in EVENT),
        *(({**EVENT, name: ""}, f"{name} of the body must be text") for name in EVENT),
        ({**EVENT, "id": 7}, "id of the body must be text"),
        ({**EVENT, "specversion": "0.3"}, "of version '0.3'"),
        ({**EVENT, "time": "noon"}, "time of the body"),
        ({**EVENT, "time": "2026-01-31T12:00:00"}, "names no zone"),
        *(
            ({**EVENT, "time": text}, "RFC 3339")
            for text in ("20260131T120000Z", "2026-W05-6T12:00:00Z", "2026-01-31T12Z")
        ),
        ({**EVENT, "time": "2026-01-31T12:00:00 01:00"}, "RFC 3339"),
        ({**EVENT, "Sub": "x"}, "cannot name an attribute"),
        ({**EVENT, "a-b": "x"}, "cannot name an attribute"),
        ({**EVENT, "a": {}}, "must be text, true, false"),
        ({**EVENT, "a": 1.5}, "must be text, true, false"),
        ({**EVENT, "a": 2**31}, "must be text, true, false"),
        ({**EVENT, "a": "x\ny"}, "control character"),
        ({**EVENT, "data": 1, "data_base64": "AA=="}, "both data and data_base64"),
        ({**EVENT, "data_base64": "A"}, "not base64"),
        ({**EVENT, "data_base64": 7}, "data_base64 of the body must be text"),
        ({**EVENT, "data": {}, "datacontenttype": "text/xml"}, "must be text, or base64"),
        ({**EVENT, "a": "x" * 9_000}, "the limit is 8192"),
    ],
)
def test_a_wrong_event_is_refused(http: FlaskClient, problem_of: Any, body: Any, error: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body)
    problem = problem_of(http.post(MESSAGES, data=data, content_type=wire.CLOUD_EVENT), 400, "invalid_request")
    assert error in problem["detail"]
    assert http.get("/v1/topics").get_json() == {"topics": []}


@pytest.mark.parametrize(
    ("body", "headers", "error"),
    [
        ([EVENT, {**EVENT, "id": ""}], {}, "id of event 1"),
        ({**EVENT}, {}, "not an array of events"),
        ([EVENT, 7], {}, "event 1 is not an event"),
        ([EVENT], {"PortalMQ-Key": "k"}, "belongs to a single message"),
        ([EVENT], {"Idempotency-Key": "k"}, "belongs to a single message"),
    ],
    ids=str,
)
def test_a_wrong_batch_is_refused_as_a_whole(
    http: FlaskClient, problem_of: Any, body: Any, headers: Any, error: str
) -> None:
    answer = http.post(MESSAGES, data=json.dumps(body), content_type=wire.CLOUD_EVENTS, headers=headers)
    assert error in problem_of(answer, 400, "invalid_request")["detail"]
    assert http.get("/v1/topics").get_json() == {"topics": []}


def test_a_batch_has_a_limit(http: FlaskClient, problem_of: Any) -> None:
    body = b"[" + b",".join([b"{}"] * (wire.BATCH_MESSAGES_MAX + 1)) + b"]"
    problem_of(http.post(MESSAGES, data=body, content_type=wire.CLOUD_EVENTS), 413, "message_too_large")


def test_an_empty_batch_is_nothing(http: FlaskClient) -> None:
    assert http.post(MESSAGES, data=b"[]", content_type=wire.CLOUD_EVENTS).get_json() == {"results": []}


# --- out -------------------------------------------------------------------------------------------------------------


def test_a_message_that_is_no_event_is_given_out_as_one(http: FlaskClient, fixture: Fixture) -> None:
    http.post(MESSAGES, data=b"\xff", content_type="text/plain", headers={"PortalMQ-Header-A": "b"})
    assert events(http) == [
        {
            "specversion": "1.0",
            "id": "0-1",
            "source": "/v1/topics/t",
            "type": "portalmq.message",
            "time": "2023-11-14T22:13:20.000+00:00",
            "datacontenttype": "text/plain",
            "data_base64": "/w==",
            "portalmqtopic": "t",
            "portalmqid": "0-1",
        }
    ]


def test_attributes_that_cannot_be_events_are_left_out(http: FlaskClient) -> None:
    headers = {"ce-id": "%FF", "ce-a-b": "x", "ce-specversion": "0.3", "ce-portalmqtopic": "other"}
    http.post(MESSAGES, data=b"x", headers=headers)
    (event,) = events(http)
    assert (event["id"], event["specversion"], event["portalmqtopic"]) == ("%FF", "1.0", "t")
    assert "a-b" not in event


@pytest.mark.parametrize(
    ("value", "kind"), [(b"", wire.BYTES), (b"", wire.JSON), (b"\xff", wire.BYTES), (b"x", "text/a")]
)
def test_no_header_stands_for_the_data_of_an_event(http: FlaskClient, value: bytes, kind: str) -> None:
    spoof = {"ce-data": "spoof", "ce-data_base64": "c3Bvb2Y=", "ce-datacontenttype": "text/spoof"}
    attributes = {f"ce-{name}": text for name, text in EVENT.items()}
    http.post(MESSAGES, data=value, content_type=kind, headers=attributes | spoof)
    (event,) = events(http)
    assert "spoof" not in json.dumps(event)
    assert not ("data" in event and "data_base64" in event)
    assert {name: event[name] for name in EVENT} == EVENT


@pytest.mark.parametrize(
    "text", ["yesterday", "20260131T120000Z", "2026-01-31", "2026-13-31T12:00:00Z", "2026-01-31T12:00:00"]
)
def test_a_time_that_is_none_is_left_out(http: FlaskClient, text: str) -> None:
    http.post(MESSAGES, data=b"x", headers={f"ce-{name}": value for name, value in EVENT.items()} | {"ce-time": text})
    (event,) = events(http)
    assert "time" not in event


def test_empty_and_unprintable_attributes_make_no_wrong_event(http: FlaskClient) -> None:
    http.post(
        MESSAGES, data=b"x", headers={"ce-id": "", "ce-source": "", "ce-type": "a%0Ab", "ce-subject": "", "ce-a": ""}
    )
    (event,) = events(http)
    assert (event["id"], event["source"], event["type"], event["a"]) == ("0-1", "/v1/topics/t", "a%0Ab", "")
    assert "subject" not in event


def test_browse_gives_one_event_or_none(http: FlaskClient) -> None:
    for number in "12":
        send(http, {**EVENT, "id": number})
    assert events(http, wire.CLOUD_EVENT, limit=9)["id"] == "1"
    answer = http.get(BROWSE, headers={"Accept": wire.CLOUD_EVENT}, query_string={"offset": "latest"})
    assert (answer.status_code, answer.data) == (204, b"")
    page = http.get(BROWSE).get_json()
    assert answer.headers["PortalMQ-Next-Offset"] == str(page["next_offset"])


def test_received_events_carry_their_receipts(http: FlaskClient) -> None:
    for number in "123":
        send(http, {**EVENT, "id": number})

    def receive(accept: str) -> Any:
        wanted = {"topics": ["t"], "max_messages": 2}
        return http.post("/v1/groups/g/receive", json=wanted, headers={"Accept": accept})

    one = receive(wire.CLOUD_EVENT)
    batch = receive(wire.CLOUD_EVENTS)
    assert (one.content_type, batch.content_type) == (wire.CLOUD_EVENT, wire.CLOUD_EVENTS)
    received = [one.get_json(force=True), *batch.get_json(force=True)]
    assert [(event["id"], event["portalmqdeliveries"]) for event in received] == [("1", 1), ("2", 1), ("3", 1)]
    receipts = [event["portalmqreceipt"] for event in received]
    assert http.post("/v1/groups/g/ack", json={"receipts": receipts}).status_code == 200
    assert receive(wire.CLOUD_EVENT).status_code == 204
    assert receive(wire.CLOUD_EVENTS).get_json(force=True) == []


def test_a_whole_topic_is_given_out_as_events(http: FlaskClient) -> None:
    for number in "123":
        send(http, {**EVENT, "id": number})
    for limit, ids, more in ((9, ["1", "2", "3"], "false"), (2, ["1", "2"], "true")):
        answer = http.get(f"{MESSAGES}?limit={limit}", headers={"Accept": wire.CLOUD_EVENTS})
        assert (answer.content_type, answer.headers["PortalMQ-More"]) == (wire.CLOUD_EVENTS, more)
        assert [event["id"] for event in answer.get_json(force=True)] == ids


def test_dead_letters_are_given_out_as_events(http: FlaskClient) -> None:
    http.put("/v1/groups/g", json={"max_deliveries": 1})
    for number in "12":
        send(http, {**EVENT, "id": number})
    messages = http.post("/v1/groups/g/receive", json={"topics": ["t"], "max_messages": 2}).get_json()["messages"]
    http.post("/v1/groups/g/nack", json={"receipts": [each["receipt"] for each in messages], "reason": "no such user"})
    found, after = [], ""
    while after is not None:
        path = f"/v1/groups/g/dead-letters?topic=t&limit=1{after}"
        answer = http.get(path, headers={"Accept": wire.CLOUD_EVENTS})
        found += answer.get_json(force=True)
        last = answer.headers.get("PortalMQ-Next-After")
        after = None if last is None else f"&after={last}"
    assert [(event["id"], event["portalmqdeadreason"]) for event in found] == [
        ("1", "no such user"),
        ("2", "no such user"),
    ]


def test_an_ack_with_a_receive_of_events_is_refused(http: FlaskClient, problem_of: Any) -> None:
    wanted = {"topics": ["t"], "ack": ["x"]}
    answer = http.post("/v1/groups/g/receive", json=wanted, headers={"Accept": wire.CLOUD_EVENTS})
    problem_of(answer, 400, "invalid_request")
