"""GET /v1/groups/{group}?at= and its messages: a group as it was, on a broker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, running
from support.protocols import client_of

from portalmq import wire


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=2))
        yield started


@pytest.fixture
def client(fixture: Fixture) -> FlaskClient:
    return client_of(fixture)


def time_text(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat().replace("+00:00", "Z")


def past(client: FlaskClient, at_ms: int, path: str = "") -> dict[str, Any]:
    answer = client.get(f"/v1/groups/g{path}{'&' if '?' in path else '?'}at={time_text(at_ms)}")
    assert answer.status_code == 200, answer.get_json()
    shown: dict[str, Any] = answer.get_json()
    return shown


def produce(client: FlaskClient, partition: int) -> str:
    answer = client.post(f"/v1/topics/t/messages?partition={partition}", data="x", content_type="text/plain")
    return str(answer.get_json()["id"])


def receive(client: FlaskClient, most: int) -> list[str]:
    body = {"topics": ["t"], "wait_ms": 0, "max_messages": most}
    return [each["receipt"] for each in client.post("/v1/groups/g/receive", json=body).get_json()["messages"]]


def test_each_moment_has_its_counts_over_all_partitions(client: FlaskClient, fixture: Fixture) -> None:
    clock, moments = fixture.clock, []
    for number in range(6):
        produce(client, number % 2)

    def passes(ms: int = 1_000) -> None:
        moments.append(clock.wall_ms())
        clock.advance(ms)

    receipts = receive(client, 4)
    passes()
    client.post("/v1/groups/g/ack", json={"receipts": receipts[:1]})
    client.post("/v1/groups/g/nack", json={"receipts": receipts[1:2], "delay_ms": 5_000})
    passes()
    moments.append(clock.wall_ms() + 29_000)
    clock.advance(60_000)
    fields = ("ready", "in_flight", "scheduled", "dead", "lag")
    assert [tuple(past(client, at_ms)[field] for field in fields) for at_ms in moments] == [
        (2, 4, 0, 0, 6),
        (2, 2, 1, 0, 5),
        (5, 0, 0, 0, 5),
    ]
    shown = past(client, moments[0])
    assert (shown["group"], shown["at_ms"], shown["mode"]) == ("g", moments[0], "queue")
    assert [(each["topic"], each["partition"], each["lag"]) for each in shown["partitions"]] == [
        ("t", 0, 3),
        ("t", 1, 3),
    ]
    states = [each["state"] for each in past(client, moments[1], "/messages?topic=t")["messages"]]
    assert sorted(states) == ["in_flight", "in_flight", "ready", "ready", "scheduled"]


def test_a_list_of_the_past_comes_in_pages(client: FlaskClient, fixture: Fixture) -> None:
    ids = [produce(client, number // 3) for number in range(6)]
    receipts = receive(client, 1)
    at_ms = fixture.clock.wall_ms()
    fixture.clock.advance(1)
    client.post("/v1/groups/g/ack", json={"receipts": receipts + receive(client, 5)})
    found: list[str] = []
    after = ""
    while True:
        page = past(client, at_ms, f"/messages?topic=t&limit=2{after}")
        found += [each["id"] for each in page["messages"]]
        if "next" not in page:
            break
        after = f"&after={page['next']}"
    assert found == ids
    assert client.get("/v1/groups/g/messages?topic=t").get_json()["messages"] == []


def test_a_stream_group_has_its_lag_of_then(client: FlaskClient, fixture: Fixture) -> None:
    client.put("/v1/groups/g", json={"mode": "stream"})
    ids = [produce(client, 0) for _ in range(3)]
    member = client.post("/v1/groups/g/members", json={"topics": ["t"]}).get_json()
    moments = []
    for message_id in ids:
        fixture.clock.advance(1_000)
        moments.append(fixture.clock.wall_ms() - 1)
        offset = int(message_id.partition("-")[2]) + 1
        commit = {"topic": "t", "partition": 0, "offset": offset}
        body = {"member_id": member["member_id"], "generation": member["generation"], "offsets": [commit]}
        assert client.put("/v1/groups/g/offsets", json=body).status_code == 200
    shown = [past(client, at_ms) for at_ms in moments]
    assert [(each["mode"], each["lag"], each["oldest_unacked_ms"]) for each in shown] == [
        ("stream", 3, 999),
        ("stream", 2, 1_999),
        ("stream", 1, 2_999),
    ]


def test_a_pause_is_told_for_its_time(client: FlaskClient, fixture: Fixture) -> None:
    receive(client, 1)
    moments = []
    for verb in ("pause", "resume", "pause"):
        moments.append(fixture.clock.wall_ms())
        fixture.clock.advance(1_000)
        assert client.post(f"/v1/groups/g/{verb}", json={"reason": "lunch"}).status_code == 204
    moments.append(fixture.clock.wall_ms())
    shown = [past(client, at_ms)["paused"] for at_ms in moments]
    assert [each and (each["since_ms"], each["reason"]) for each in shown] == [
        None,
        (moments[1], "lunch"),
        None,
        (moments[3], "lunch"),
    ]


def test_what_is_purged_cannot_be_counted_any_more(client: FlaskClient, fixture: Fixture) -> None:
    produce(client, 0)
    receive(client, 1)
    at_ms = fixture.clock.wall_ms()
    fixture.clock.advance(1_000)
    client.delete("/v1/topics/t/messages")
    answer = client.get(f"/v1/groups/g?at={time_text(at_ms)}")
    assert (answer.status_code, answer.get_json()["code"]) == (416, "offset_out_of_range")
    assert past(client, fixture.clock.wall_ms())["lag"] == 0


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [
        ("at=yesterday", 400, "invalid_request"),
        ("at=2023-11-14T22:13:20", 400, "invalid_request"),
        ("at=2123-11-14T22:13:20Z", 400, "invalid_request"),
        ("at=", 400, "invalid_request"),
    ],
)
def test_what_is_no_moment_of_the_past_is_refused(client: FlaskClient, query: str, status: int, code: str) -> None:
    receive(client, 1)
    for path in ("/v1/groups/g?", "/v1/groups/g/messages?topic=t&"):
        answer = client.get(path + query)
        assert (answer.status_code, answer.get_json()["code"]) == (status, code)


def test_a_group_that_is_not_there_has_no_past(client: FlaskClient, fixture: Fixture) -> None:
    answer = client.get(f"/v1/groups/nobody?at={time_text(fixture.clock.wall_ms())}")
    assert (answer.status_code, answer.get_json()["code"]) == (404, "group_not_found")
