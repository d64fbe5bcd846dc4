"""The schedule routes: requests, answers and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, running

from portalmq.broker.api.app import create_app
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig

Check = Callable[..., dict[str, Any]]
PATH = "/v1/schedules/report"
CRON = {"topic": "t", "cron": "0 6 * * 1-5", "timezone": "Europe/Berlin", "value": {"a": [1, 2]}}


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def client(fixture: Fixture) -> FlaskClient:
    return create_app(fixture.broker, BrokerConfig(body_bytes_max=100_000), Metrics("1.2.3"), Auth()).test_client()


def test_a_schedule_is_put_shown_listed_paused_and_deleted(client: FlaskClient) -> None:
    shown = {
        **CRON,
        "name": "report",
        "partition": 0,
        "content_type": "application/json",
        "key": None,
        "headers": {},
        "paused": False,
        "catch_up": True,
        "next_tick": "2023-11-15T05:00:00Z",
    }
    created = client.put(PATH, json=CRON)
    assert (created.status_code, created.json) == (201, shown)
    again = client.put(PATH, json=CRON)
    assert (again.status_code, again.json) == (200, shown)
    assert client.get(PATH).json == shown
    assert client.get("/v1/schedules").json == {"schedules": [shown]}
    assert client.post(f"{PATH}/pause").status_code == 204
    assert client.get(PATH).json == {**shown, "paused": True, "next_tick": None}
    assert client.post(f"{PATH}/resume", json={}).status_code == 204
    assert client.get(PATH).json == shown
    assert client.delete(PATH).status_code == 204
    assert client.get("/v1/schedules").json == {"schedules": []}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"value": None}, {"value": None, "content_type": "application/json"}),
        ({"value": "text"}, {"value": "text", "content_type": "application/json"}),
        ({"value": "text", "content_type": "text/plain"}, {"value": "text", "content_type": "text/plain"}),
        ({"value_base64": "/w=="}, {"value_base64": "/w==", "content_type": "application/octet-stream"}),
        ({"value_base64": "YQ=="}, {"value": "a", "content_type": "application/octet-stream"}),
        ({"value": 1, "key": "k", "headers": {"X-A": "1"}}, {"value": 1, "key": "k", "headers": {"x-a": "1"}}),
        ({"value": 1, "key_base64": "/w=="}, {"value": 1, "key": None, "key_base64": "/w=="}),
    ],
)
def test_the_message_is_shown_as_it_will_be(
    client: FlaskClient, message: dict[str, Any], shown: dict[str, Any]
) -> None:
    answer = client.put(PATH, json={"topic": "t", "every_ms": 1_000, **message})
    assert answer.status_code == 201, answer.text
    assert answer.json.items() >= shown.items()
    assert client.get(PATH).json == answer.json


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"cron": None},
            {"cron": "x"},
            {"cron": "* * *"},
            {"cron": "0 0 30 2 *"},
            {"timezone": "Mars"},
            {"every_ms": 5_000},
        ),
        *(
            {"cron": None, "every_ms": 999},
            {"cron": None, "every_ms": -1},
            {"cron": None, "every_ms": 10**12},
            {"crn": 1},
        ),
        *({"topic": "a/b"}, {"topic": None}, {"value_base64": "YQ=="}, {"headers": {"a b": "c"}}, {"key": "k" * 5_000}),
        *({"timezone": "Europe"}, {"cron": "* " * 400}, {"paused": 1}, {"value": "x" * 20_000}, {"catch_up": "no"}),
    ],
)
def test_a_wrong_definition_is_refused(client: FlaskClient, problem_of: Check, change: dict[str, Any]) -> None:
    problem_of(client.put(PATH, json={**CRON, **change}), 400, "invalid_request")
    problem_of(client.get(PATH), 404, "schedule_not_found")


@pytest.mark.parametrize("verb", ["get", "delete", "pause", "resume"])
def test_a_schedule_that_does_not_exist_is_not_found(client: FlaskClient, problem_of: Check, verb: str) -> None:
    answer = client.post(f"{PATH}/{verb}") if verb in {"pause", "resume"} else getattr(client, verb)(PATH)
    problem_of(answer, 404, "schedule_not_found")


def test_a_name_is_one_of_those_that_topics_have(client: FlaskClient, problem_of: Check) -> None:
    problem_of(client.put("/v1/schedules/a b", json=CRON), 400, "invalid_request")
    problem_of(client.put(f"{PATH}?dry_run=true", json=CRON), 400, "invalid_request")


def test_a_missing_value_is_refused(client: FlaskClient, problem_of: Check) -> None:
    problem_of(client.put(PATH, json={"topic": "t", "every_ms": 1_000}), 400, "invalid_request")
