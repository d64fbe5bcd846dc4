"""A cluster that creates no topics on first use creates none through the older protocols either."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture
from support.protocols import client_of

from portalmq import wire


@pytest.fixture
def strict(fixture: Fixture) -> FlaskClient:
    fixture.broker.topics._auto_create = False
    return client_of(fixture)


FIRST_USES: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "Portal MQ's publish": ("POST", "/publish", {"name": "default", "message": "x"}),
    "Portal MQ's publish with a sequence": (
        "POST", "/publish", {"name": "default", "message": "x", "id": "s", "sequence": 1},
    ),
    "Portal MQ's read": ("POST", "/read", {"name": "default", "id": "c"}),
    "PortalConsumer's read": ("POST", "/read", {"name": "default", "id": "c", "first_use": True}),
    "Portal MQ's consume": ("POST", "/consume", {"name": "default", "offset": 0}),
    "MiniQ's POST": ("POST", "/message", {"Message": "x"}),
    "MiniQ's GET": ("GET", "/message", None),
    "WonderQ's publish": ("POST", "/v1/publish", {"message": "x"}),
    "WonderQ's consumer": ("GET", "/v1/consumer?cid=7", None),
    "PRODUCE_MSG": ("POST", "/miniq/command", {"type": "PRODUCE_MSG"}),
    "CONSUME": ("POST", "/miniq/command", {"type": "CONSUME"}),
    "the producers of today": ("PUT", "/v1/topics/default?first_use=true", {}),
}  # fmt: skip


@pytest.mark.parametrize("door", FIRST_USES)
def test_no_protocol_creates_a_topic_where_the_cluster_creates_none(
    fixture: Fixture, strict: FlaskClient, door: str
) -> None:
    method, path, body = FIRST_USES[door]
    answer = strict.open(path, method=method, json=body)
    problem = answer.get_json()
    assert (answer.status_code, problem["code"]) == (404, "topic_not_found"), problem
    assert "create it with PUT /v1/topics/default" in problem["detail"] or "CREATE_QUEUE" in problem["detail"]
    assert fixture.broker.list_topics() == []


@pytest.mark.parametrize("door", FIRST_USES)
def test_each_protocol_works_once_the_topic_exists(fixture: Fixture, strict: FlaskClient, door: str) -> None:
    fixture.broker.create_topic("default", wire.CreateTopic(partitions=2))
    method, path, body = FIRST_USES[door]
    answer = strict.open(path, method=method, json=body)
    there_is_no_message = door == "MiniQ's GET"
    assert answer.status_code == 404 if there_is_no_message else answer.status_code in (200, 204), answer.get_json()
    assert [topic.partitions for topic in fixture.broker.list_topics()] == [2]


@pytest.mark.parametrize("kind", ["/topic/create", "CREATE_QUEUE"])
def test_creating_a_topic_by_name_is_allowed(fixture: Fixture, strict: FlaskClient, kind: str) -> None:
    body: dict[str, Any] = {"type": kind, "payload": {"queue": "q"}} if kind == "CREATE_QUEUE" else {"name": "q"}
    path = "/miniq/command" if kind == "CREATE_QUEUE" else kind
    assert strict.post(path, json=body).status_code == 200
    assert [topic.name for topic in fixture.broker.list_topics()] == ["q"]


def test_a_reader_s_first_use_makes_the_topic_where_the_cluster_does(client: FlaskClient, fixture: Fixture) -> None:
    assert client.post("/read", json={"name": "t", "id": "c", "first_use": True}).status_code == 204
    assert client.put("/v1/topics/other?first_use=true", json={}).get_json()["name"] == "other"
    assert {topic.name for topic in fixture.broker.list_topics()} == {"t", "other"}


def test_a_topic_made_at_its_first_use_has_no_settings_of_its_own(client: FlaskClient, fixture: Fixture) -> None:
    assert client.put("/v1/topics/t?first_use=true", json={"partitions": 3}).status_code == 400
    assert fixture.broker.list_topics() == []
