"""GET /v1/groups/{group}/messages: a group's unfinished messages, on a broker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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


def produce(client: FlaskClient, value: str, partition: int = 0) -> str:
    answer = client.post(f"/v1/topics/t/messages?partition={partition}", data=value, content_type="text/plain")
    return str(answer.get_json()["id"])


def test_each_message_is_shown_with_its_state(client: FlaskClient, fixture: Fixture) -> None:
    taken, ready = produce(client, "taken"), produce(client, "ready")
    client.post("/v1/groups/g/receive", json={"topics": ["t"], "max_messages": 1, "wait_ms": 0})
    shown = client.get("/v1/groups/g/messages?topic=t").get_json()
    assert [(each["id"], each["value"], each["state"], each["delivery_count"]) for each in shown["messages"]] == [
        (taken, "taken", "in_flight", 1),
        (ready, "ready", "ready", 0),
    ]
    assert shown["messages"][0]["available_at_ms"] == fixture.clock.now_ms() + 30_000
    assert "available_at_ms" not in shown["messages"][1]
    assert "next" not in shown
    assert shown["counts"] == {"ready": 1, "in_flight": 1, "scheduled": 0, "dead": 0, "oldest_unacked_ms": 0}


def test_pages_cover_all_partitions_without_gap_or_overlap(client: FlaskClient) -> None:
    ids = [produce(client, str(number), partition=number // 5) for number in range(10)]
    found: list[str] = []
    after = ""
    for _ in range(5):
        page = client.get(f"/v1/groups/g/messages?topic=t&limit=2{after}").get_json()
        found += [each["id"] for each in page["messages"]]
        after = f"&after={page.get('next')}"
    assert found == ids
    assert "next" not in page


def test_listing_creates_no_group(client: FlaskClient, fixture: Fixture) -> None:
    produce(client, "a")
    fixture.clock.advance(7_000)
    shown = client.get("/v1/groups/nobody/messages?topic=t").get_json()
    assert (len(shown["messages"]), shown["counts"]["ready"], shown["counts"]["oldest_unacked_ms"]) == (1, 1, 7_000)
    assert client.get("/v1/groups/nobody").status_code == 404


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ("", 400),
        ("?topic=t&limit=0", 400),
        ("?topic=t&after=x", 400),
        ("?topic=t&after=0-x", 400),
        ("?topic=a%20b", 400),
        ("?topic=nowhere", 404),
        ("?topic=t&topics=u", 400),
    ],
)
def test_invalid_parameters_are_refused(client: FlaskClient, query: str, status: int) -> None:
    assert client.get(f"/v1/groups/g/messages{query}").status_code == status


def test_the_counts_are_of_the_requested_topic(client: FlaskClient) -> None:
    produce(client, "a")
    produce(client, "b", partition=1)
    client.post("/v1/topics/other/messages", data=b"x")
    client.post("/v1/groups/g/receive", json={"topics": ["other"], "max_messages": 1, "wait_ms": 0})
    counts = client.get("/v1/groups/g/messages?topic=t").get_json()["counts"]
    assert (counts["ready"], counts["in_flight"]) == (2, 0)


def test_urgent_and_scheduled_messages_are_counted_for_a_group_that_has_not_begun(client: FlaskClient) -> None:
    produce(client, "plain")
    client.post("/v1/topics/t/messages", data=b"urgent", headers={"PortalMQ-Priority": "9"})
    client.post("/v1/topics/t/messages", data=b"later", headers={"PortalMQ-Delay-Ms": "60000"})
    counts = client.get("/v1/groups/nobody/messages?topic=t").get_json()["counts"]
    assert (counts["ready"], counts["scheduled"]) == (2, 1)


def test_a_stream_group_has_no_such_messages(client: FlaskClient) -> None:
    client.put("/v1/groups/s", json={"mode": "stream"})
    answer = client.get("/v1/groups/s/messages?topic=t")
    assert (answer.status_code, answer.get_json(force=True)["code"]) == (409, "group_mode_mismatch")
