"""Pages of messages are made as long as there is room for all that are not sent yet."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask
from werkzeug.test import EnvironBuilder

from portalmq.broker.api.app import create_app
from portalmq.broker.auth import Auth
from portalmq.broker.config import BrokerConfig
from portalmq.broker.metrics import Metrics
from portalmq.broker.seeds.routes import SEED_ROUTES

MANY, FEW = 40_000, 1_000
PAGES = ["/v1/topics/t/partitions/0/messages?offset=0", "/v1/topics/t/messages"]


@pytest.fixture
def app(domain: Any) -> Flask:
    config = BrokerConfig(answer_bytes_in_flight_max=64 * 1024)
    served = create_app(domain, config, Metrics("0"), Auth(), more=SEED_ROUTES)
    for topic, size in (("t", MANY), ("small", FEW)):
        assert served.test_client().post(f"/v1/topics/{topic}/messages", data=b"x" * size).status_code == 200
    return served


def begun(app: Flask, path: str) -> tuple[int, Any]:
    """A request that is answered, and whose answer is not taken yet: its status, and what the connection holds."""
    status: list[str] = []
    environ = EnvironBuilder(path=path, base_url="http://localhost:5000").get_environ()
    answer = app.wsgi_app(environ, lambda line, headers, *_: status.append(line))
    return int(status[0].split()[0]), answer


@pytest.mark.parametrize("path", PAGES)
def test_a_page_is_refused_while_others_are_not_sent_and_made_when_they_are(app: Flask, path: str) -> None:
    status, unsent = begun(app, path)
    assert status == 200
    refused, problem = begun(app, path)
    assert refused == 429
    assert b"not_applied" in b"".join(problem)
    problem.close()
    assert begun(app, "/v1/topics/small/messages")[0] == 200, "small pages pass"
    assert app.test_client().get("/v1/topics/t").status_code == 200, "what holds no messages passes"
    unsent.close()
    assert begun(app, path)[0] == 200


def test_a_page_that_is_larger_by_itself_is_made_and_gives_its_room_back(app: Flask) -> None:
    client = app.test_client()
    assert client.post("/v1/topics/large/messages", data=b"\x01" * 70_000).status_code == 200
    for _ in range(3):
        status, unsent = begun(app, "/v1/topics/large/messages")
        assert status == 200
        unsent.close()


def test_a_page_takes_what_it_has_become_as_json(app: Flask) -> None:
    text = {"Content-Type": "text/plain; charset=utf-8"}
    app.test_client().post("/v1/topics/control/messages", data=b"\x01" * 12_000, headers=text)
    status, unsent = begun(app, "/v1/topics/control/messages")
    assert status == 200
    assert begun(app, "/v1/topics/t/messages")[0] == 429, "72,000 bytes are held for it, and not 12,000"
    unsent.close()
    assert begun(app, "/v1/topics/t/messages")[0] == 200
