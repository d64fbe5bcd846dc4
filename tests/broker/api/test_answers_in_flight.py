"""The broker makes a page of messages only while all unsent pages fit the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from support.domain import Fixture, running
from werkzeug.test import EnvironBuilder

from portalmq.broker.api.answers_in_flight import AnswersInFlight, Portion
from portalmq.broker.api.app import create_app
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.errors import Backpressure

MANY, FEW = 40_000, 1_000
PAGES = ["/v1/topics/t/partitions/0/messages?offset=0", "/v1/topics/t/messages"]


@pytest.fixture
def app(broker: Any) -> Flask:
    config = BrokerConfig(answer_bytes_in_flight_max=64 * 1024)
    served = create_app(broker, config, Metrics("0"), Auth(), more=PROTOCOL_ROUTES)
    for topic, size in (("t", MANY), ("small", FEW)):
        assert served.test_client().post(f"/v1/topics/{topic}/messages", data=b"x" * size).status_code == 200
    return served


def begun(app: Flask, path: str, body: Any = None) -> tuple[int, Any]:
    """Return the status and the unread body of an answered request; the body holds its room until it is closed."""
    status: list[str] = []
    method = "GET" if body is None else "POST"
    builder = EnvironBuilder(path=path, base_url="http://localhost:5000", method=method, json=body)
    environ = builder.get_environ()
    answer = app.wsgi_app(environ, lambda line, headers, *_: status.append(line))
    return int(status[0].split()[0]), answer


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_refused_until_unsent_pages_are_sent(app: Flask, path: str) -> None:
    status, unsent = begun(app, path)
    assert status == 200
    refused, problem = begun(app, path)
    assert refused == 429
    assert b"not_applied" in b"".join(problem)
    problem.close()
    assert begun(app, "/v1/topics/small/messages")[0] == 200, "small pages pass"
    assert app.test_client().get("/v1/topics/t").status_code == 200, "an answer without messages passes"
    unsent.close()
    assert begun(app, path)[0] == 200


def test_a_page_larger_than_the_limit_is_sent_alone_and_releases_its_room(app: Flask) -> None:
    client = app.test_client()
    assert client.post("/v1/topics/large/messages", data=b"\x01" * 70_000).status_code == 200
    for _ in range(3):
        status, unsent = begun(app, "/v1/topics/large/messages")
        assert status == 200
        unsent.close()


def test_a_page_takes_room_for_its_size_as_json(app: Flask) -> None:
    text = {"Content-Type": "text/plain; charset=utf-8"}
    app.test_client().post("/v1/topics/control/messages", data=b"\x01" * 12_000, headers=text)
    status, unsent = begun(app, "/v1/topics/control/messages")
    assert status == 200
    assert begun(app, "/v1/topics/t/messages")[0] == 429, "it holds 72,000 bytes, not 12,000"
    unsent.close()
    assert begun(app, "/v1/topics/t/messages")[0] == 200


# --- receive ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def queue(fixture: Fixture) -> Flask:
    served = create_app(fixture.broker, BrokerConfig(answer_bytes_in_flight_max=64 * 1024), Metrics("0"), Auth())
    for _ in range(3):
        served.test_client().post("/v1/topics/t/messages", data=b"x" * MANY)
    return served


def receive(app: Flask, **more: Any) -> tuple[int, Any]:
    return begun(app, "/v1/groups/g/receive", {"topics": ["t"], "max_messages": 10, "wait_ms": 0, **more})


def in_flight(fixture: Fixture) -> int:
    return fixture.broker.describe_group("g").in_flight


def test_a_receive_leases_only_messages_that_it_has_room_for(queue: Flask, fixture: Fixture) -> None:
    unsent = []
    for leased in (1, 2):
        status, answer = receive(queue)
        unsent.append(answer)
        assert (status, in_flight(fixture)) == (200, leased), "at least one message, and no more than fit"
    taken = [message for answer in unsent for message in json.loads(b"".join(answer))["messages"]]
    refused, problem = receive(queue, ack=[taken[0]["receipt"]])
    assert (refused, in_flight(fixture)) == (429, 2), "nothing is leased or acked"
    assert json.loads(b"".join(problem))["outcome"] == "not_applied"
    for answer in unsent:
        answer.close()
    assert (receive(queue)[0], in_flight(fixture)) == (200, 3)


def test_receives_that_find_nothing_or_little_take_no_room(queue: Flask, fixture: Fixture) -> None:
    for _ in range(3):
        receive(queue)[1].close()
    for _ in range(100):
        assert receive(queue)[0] == 200
    queue.test_client().post("/v1/topics/t/messages", data=b"x" * MANY)
    assert in_flight(fixture) == 3
    assert len(json.loads(b"".join(receive(queue)[1]))["messages"]) == 1


def test_receives_at_the_same_time_share_the_room_that_is_left() -> None:
    answers = AnswersInFlight(1_000)
    first, second = Portion(answers), Portion(answers)
    assert (first.begin(), second.begin(), first.begin()) == (1_000, 500, 500)
    first.end()
    first.end()
    assert second.begin() == 1_000
    answers.note(HttpRequest("POST", "/", "", {}), 10_000)
    with pytest.raises(Backpressure):
        second.begin()
    second.end()
    assert answers.making == 0


# --- stream readers --------------------------------------------------------------------------------------------------


def test_a_bulk_fetch_is_refused_while_answers_are_unsent_and_takes_room(queue: Flask) -> None:
    asked = {"partitions": [{"topic": "t", "partition": 0, "offset": 0}], "wait_ms": 0}
    status, unsent = begun(queue, "/v1/fetch", asked)
    assert status == 200
    assert begun(queue, "/v1/fetch", asked)[0] == 429
    assert begun(queue, "/v1/topics/t/messages")[0] == 429
    unsent.close()
    status, page = begun(queue, "/v1/topics/t/messages?limit=1")
    assert status == 200
    assert begun(queue, "/v1/fetch", asked)[0] == 429, "it has read more than there is room for"
    page.close()
    assert begun(queue, "/v1/fetch", asked)[0] == 200
