"""Delays, due times, times to live and priorities in every request format, and in the answers."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.fake_broker import NOW_MS

from portalmq import wire
from portalmq.broker.storage.batch import Record
from portalmq.errors import MessageNotFound

URL = "/v1/topics/t/messages"
BROWSE = "/v1/topics/t/partitions/0/messages"
YEAR_MS = 366 * wire.DAY_MS

# (option as sent, deliver_at_ms, expires_at_ms, priority)
OPTIONS = [
    ({"delay_ms": 500}, NOW_MS + 500, None, 0),
    ({"delay_ms": 0}, None, None, 0),
    ({"deliver_at_ms": NOW_MS + 9}, NOW_MS + 9, None, 0),
    ({"deliver_at_ms": 5}, 5, None, 0),
    ({"deliver_at_ms": NOW_MS + 10 * 365 * wire.DAY_MS}, NOW_MS + 10 * 365 * wire.DAY_MS, None, 0),
    ({"ttl_ms": 70}, None, NOW_MS + 70, 0),
    ({"ttl_ms": 70, "delay_ms": 500}, NOW_MS + 500, NOW_MS + 570, 0),
    ({"ttl_ms": 70, "deliver_at_ms": NOW_MS + 9}, NOW_MS + 9, NOW_MS + 79, 0),
    ({"ttl_ms": 70, "deliver_at_ms": 5}, 5, NOW_MS + 70, 0),
    ({"ttl_ms": wire.INTEGER_MAX}, None, wire.INTEGER_MAX, 0),
    ({"priority": 31}, None, None, 31),
    ({"priority": 0}, None, None, 0),
    ({"priority": 4, "delay_ms": 1, "ttl_ms": 2}, NOW_MS + 1, NOW_MS + 3, 4),
]


def schedule_of(record: Record) -> tuple[int | None, int | None, int]:
    return record.deliver_at_ms, record.expires_at_ms, record.priority


@pytest.mark.parametrize(("sent", "deliver_at_ms", "expires_at_ms", "priority"), OPTIONS)
def test_options_mean_the_same_in_every_form(client, broker, sent, deliver_at_ms, expires_at_ms, priority):
    json_batch = json.dumps({"messages": [{"value": 1, **sent}]})
    packed = msgspec.msgpack.encode({"messages": [{"value": b"1", **sent}]})
    names = {
        "delay_ms": wire.HEADER_DELAY_MS,
        "deliver_at_ms": wire.HEADER_DELIVER_AT,
        "ttl_ms": wire.HEADER_TTL_MS,
        "priority": wire.HEADER_PRIORITY,
    }
    for body, content_type, headers in [
        (json_batch, wire.BATCH_JSON, {}),
        (packed, wire.BATCH_MSGPACK, {}),
        (b"1", wire.JSON, {names[name]: str(value) for name, value in sent.items()}),
    ]:
        answer = client.post(URL, data=body, content_type=content_type, headers=headers)
        assert answer.status_code == 200, answer.get_data(as_text=True)
    assert [schedule_of(record) for record in broker.logs["t"][0]] == [(deliver_at_ms, expires_at_ms, priority)] * 3


@pytest.mark.parametrize(
    ("sent", "deliver_at_ms"),
    [
        ("2023-11-15T00:00:00Z", 1_700_006_400_000),
        ("2023-11-15T01:00:00.250+01:00", 1_700_006_400_250),
        ("2023-11-15t00:00:00z", 1_700_006_400_000),
        (" 1700006400000 ", 1_700_006_400_000),
        ("1900-01-01T00:00:00Z", 0),
    ],
)
def test_a_due_time_in_a_header_is_a_time_or_unix_milliseconds(client, broker, sent, deliver_at_ms):
    assert client.post(URL, data=b"x", headers={"PortalMQ-Deliver-At": sent}).status_code == 200
    assert schedule_of(broker.logs["t"][0][0]) == (deliver_at_ms, None, 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"PortalMQ-Delay-Ms": "-1"},
        {"PortalMQ-Delay-Ms": "soon"},
        {"PortalMQ-Delay-Ms": "1.5"},
        {"PortalMQ-Delay-Ms": ""},
        {"PortalMQ-Delay-Ms": str(11 * YEAR_MS)},
        {"PortalMQ-Deliver-At": "-5"},
        {"PortalMQ-Deliver-At": "tomorrow"},
        {"PortalMQ-Deliver-At": "2030-01-01T00:00:00"},
        {"PortalMQ-Deliver-At": "2130-01-01T00:00:00Z"},
        {"PortalMQ-Deliver-At": str(NOW_MS * 1000)},
        {"PortalMQ-Deliver-At": "5", "PortalMQ-Delay-Ms": "5"},
        {"PortalMQ-Ttl-Ms": "0"},
        {"PortalMQ-Ttl-Ms": "-1"},
        {"PortalMQ-Ttl-Ms": "x"},
        {"PortalMQ-Priority": "32"},
        {"PortalMQ-Priority": "-1"},
        {"PortalMQ-Priority": "high"},
    ],
)
def test_invalid_options_are_refused_and_nothing_is_stored(client, broker, problem_of, headers):
    problem_of(client.post(URL, data=b"x", headers=headers), 400, "invalid_request")
    assert broker.logs == {}


def test_too_far_ahead_is_refused_with_the_limit_and_the_unit(client, problem_of):
    answer = client.post(URL, data=b"x", headers={"PortalMQ-Deliver-At": str(NOW_MS * 1000)})
    detail = problem_of(answer, 400, "invalid_request")["detail"]
    assert "10 years" in detail
    assert "milliseconds" in detail


def test_an_idempotency_key_is_compared_with_the_options_as_sent(client, broker):
    headers = {"Idempotency-Key": "k", "PortalMQ-Delay-Ms": "500", "PortalMQ-Priority": "3"}
    client.post(URL, data=b"x", headers=headers)
    assert broker.last("produce")["as_sent"] == (500, None, None, 3)
    client.post(URL, data=b"x", headers={"Idempotency-Key": "k"})
    assert broker.last("produce")["as_sent"] == ()


@pytest.mark.parametrize("accept", [wire.JSON, wire.NDJSON, wire.EVENT_STREAM, wire.BATCH_MSGPACK])
def test_a_browsed_message_shows_its_due_time_expiry_and_priority(client, broker, accept):
    broker.logs["t"] = [[Record(b"x", deliver_at_ms=7, expires_at_ms=8, priority=9), Record(b"plain")]]
    broker.ready = accept != wire.EVENT_STREAM or broker.ready
    answer = client.get(BROWSE, headers={"Accept": accept}, buffered=False)
    if accept == wire.BATCH_MSGPACK:
        shown, plain = msgspec.msgpack.decode(answer.data)["messages"]
    elif accept == wire.JSON:
        shown, plain = answer.get_json()["messages"]
    elif accept == wire.NDJSON:
        shown, plain = map(json.loads, answer.data.splitlines())
    else:
        chunks = iter(answer.response)
        next(chunks)
        shown, plain = (json.loads(line[6:]) for line in next(chunks).split(b"\n") if line.startswith(b"data: "))
    assert (shown["deliver_at_ms"], shown["expires_at_ms"], shown["priority"]) == (7, 8, 9)
    assert not {"deliver_at_ms", "expires_at_ms", "priority"} & set(plain)


# --- scheduled messages ---


def test_scheduled_messages_are_listed_a_page_at_a_time(client, broker):
    broker.logs["t"] = [[Record(b"%d" % number, deliver_at_ms=5 + number) for number in range(3)]]
    first = client.get("/v1/topics/t/scheduled?limit=2").get_json()
    assert [(each["id"], each["deliver_at_ms"]) for each in first["messages"]] == [("0-0", 5), ("0-1", 6)]
    assert first["next"] == "9-0-2"
    client.get(f"/v1/topics/t/scheduled?after={first['next']}")
    assert broker.last("scheduled")["after"] == (9, 0, 2)
    assert "next" not in client.get("/v1/topics/t/scheduled").get_json()


def test_a_page_of_scheduled_messages_has_a_limit(client, broker):
    broker.logs["t"] = [[]]
    client.get("/v1/topics/t/scheduled?limit=100000")
    assert broker.last("scheduled")["limit"] == wire.BROWSE_MESSAGES_MAX


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=x", "after=", "after=5", "after=0-1", "after=1-2-3-4", "after=a-b-c", "colour=red"]
)
def test_an_invalid_list_request_is_refused(client, broker, problem_of, query):
    broker.logs["t"] = [[]]
    problem_of(client.get(f"/v1/topics/t/scheduled?{query}"), 400, "invalid_request")


def test_a_scheduled_message_is_cancelled_by_its_id(client, broker):
    assert client.delete("/v1/topics/t/scheduled/3-17").status_code == 204
    assert broker.last("cancel_scheduled") == {"topic": "t", "partition": 3, "offset": 17}


@pytest.mark.parametrize("message_id", ["3", "3-", "-", "a-b", "3-17-1", "3--1", "3-1.5", "99999999999999999999-0"])
def test_an_invalid_message_id_is_refused(client, broker, problem_of, message_id):
    problem_of(client.delete(f"/v1/topics/t/scheduled/{message_id}"), 400, "invalid_request")
    assert not broker.calls_made("cancel_scheduled")


def test_a_message_that_is_due_already_is_not_found(client, broker, problem_of):
    broker.refuse = MessageNotFound("message 0-1 is due already")
    problem_of(client.delete("/v1/topics/t/scheduled/0-1"), 404, "message_not_found")


@pytest.mark.parametrize("accept", [wire.JSON, wire.BATCH_MSGPACK])
def test_a_received_message_shows_its_due_time_expiry_and_priority(client, broker, accept):
    broker.logs["t"] = [[Record(b"x", deliver_at_ms=7, expires_at_ms=8, priority=9), Record(b"plain")]]
    answer = client.post("/v1/groups/g/receive", json={"topics": ["t"]}, headers={"Accept": accept})
    decode = msgspec.msgpack.decode if accept == wire.BATCH_MSGPACK else msgspec.json.decode
    shown, plain = decode(answer.data)["messages"]
    assert (shown["deliver_at_ms"], shown["expires_at_ms"], shown["priority"]) == (7, 8, 9)
    assert not {"deliver_at_ms", "expires_at_ms", "priority"} & set(plain)


# --- changes of scheduled messages ---


def test_a_scheduled_message_is_run_or_moved_by_its_id(client, broker):
    assert client.post("/v1/topics/t/scheduled/3-17/run").status_code == 204
    assert broker.last("move_scheduled") == {"topic": "t", "partition": 3, "offset": 17, "deliver_at_ms": 0}
    at_ms = NOW_MS + 60_000
    for body in ({"delay_ms": 60_000}, {"deliver_at_ms": at_ms}):
        answer = client.patch("/v1/topics/t/scheduled/3-17", json=body)
        assert answer.get_json() == {"copy_of": "t/3-17", "deliver_at_ms": at_ms}
        assert broker.last("move_scheduled")["deliver_at_ms"] == at_ms
    assert client.patch("/v1/topics/t/scheduled/3-17", json={"deliver_at_ms": 5}).get_json()["deliver_at_ms"] == NOW_MS
    assert broker.last("move_scheduled")["deliver_at_ms"] == 0, "a time that is over means now"


def test_many_scheduled_messages_are_changed_by_a_selection(client, broker):
    where = {"key": {"eq": "k"}}
    for verb, done in (("run", "run"), ("move", "moved"), ("cancel", "cancelled")):
        more = {"deliver_at_ms": NOW_MS + 5} if verb == "move" else {}
        answer = client.post(f"/v1/topics/t/scheduled/{verb}", json={"where": where, "limit": 7, **more})
        assert answer.get_json() == {"matched": 3, done: 2}
        how = broker.last("change_scheduled")["how"]
        assert (how.where, how.limit, how.ids, how.cancels) == (where, 7, None, verb == "cancel")
        assert how.deliver_at_ms == (NOW_MS + 5 if verb == "move" else 0)
    client.post("/v1/topics/t/scheduled/run", json={"ids": ["0-1", "2-3", "0-1"], "dry_run": True})
    how = broker.last("change_scheduled")["how"]
    assert (how.ids, how.dry_run, how.limit) == ([(0, 1), (2, 3)], True, 1_000)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("0-1", {}),
        ("0-1", {"deliver_at_ms": 1, "delay_ms": 1}),
        ("0-1", {"deliver_at_ms": 1 << 52}),
        ("first", {"delay_ms": 1}),
    ],
    ids=str,
)
def test_a_wrong_move_is_refused(client, broker, problem_of, path, body):
    problem_of(client.patch(f"/v1/topics/t/scheduled/{path}", json=body), 400, "invalid_request")
    assert not broker.calls_made("move_scheduled")


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("move", {}),
        ("run", {"deliver_at_ms": 5}),
        ("cancel", {"limit": 0}),
        ("cancel", {"limit": 10_001}),
        ("run", {"ids": ["x"]}),
        ("run", {"were": {}}),
    ],
    ids=str,
)
def test_a_wrong_selection_is_refused(client, broker, problem_of, verb, body):
    problem_of(client.post(f"/v1/topics/t/scheduled/{verb}", json=body), 400, "invalid_request")
    assert not broker.calls_made("change_scheduled")
