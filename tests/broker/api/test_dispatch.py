"""The broker serves the routes that are marked as traffic in front of Flask."""

from __future__ import annotations

from typing import Any

import flask
import pytest
from support.fake_broker import FakeBroker

from portalmq.broker.api.app import create_app
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.api.request_context import RequestContext, ResponseParts
from portalmq.broker.api.route import Route
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.errors import InvalidRequest

METRICS = Metrics("0")


def whether_flask_serves(_room: RequestContext, _request: HttpRequest, thing: str) -> ResponseParts:
    return ResponseParts(f"{thing} {flask.has_request_context()}".encode())


@pytest.fixture
def client(broker: FakeBroker) -> Any:
    routes = [Route("POST", "/v1/things/<thing>/poke", whether_flask_serves, is_traffic=True)]
    return create_app(broker, BrokerConfig(), METRICS, Auth(), more=routes).test_client()


def test_a_marked_route_is_served_without_flask(client: Any) -> None:
    assert client.post("/v1/things/lamp/poke").data == b"lamp False"


@pytest.mark.parametrize("path", ["/v1/things//poke", "/v1/things/lamp/prod", "/v2/things/lamp/poke"])
def test_another_path_is_unknown(client: Any, path: str) -> None:
    assert client.post(path).status_code == 404


def test_another_method_is_not_allowed(client: Any) -> None:
    assert client.get("/v1/things/lamp/poke").status_code == 405


def test_traffic_is_posted() -> None:
    assert {route.method for route in ROUTES if route.is_traffic} == {"POST"}


def test_the_traffic_routes_are_served_in_front_of_flask(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(broker, BrokerConfig(), METRICS, Auth())
    broker.refuse = InvalidRequest("in front of Flask")
    monkeypatch.setattr(app, "full_dispatch_request", lambda: flask.Response(status=599))
    served = {
        route.path
        for route in ROUTES
        if app.test_client().open(route.path.replace("<", "").replace(">", ""), method=route.method).status_code != 599
    }
    assert served == {
        "/v1/fetch",
        "/v1/topics/<topic>/messages",
        *(f"/v1/groups/<group>/{last}" for last in ("receive", "ack", "nack", "extend", "commit")),
    }
