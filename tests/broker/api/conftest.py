from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from support.declared import _declared  # noqa: F401 - a fixture of all tests here
from support.fake_broker import FakeBroker
from support.stretches import Stretch, Stretches

from portalmq.broker.api.app import create_app
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig

# The report omits shorter stretches of the event loop.
SHOWN_MS = 2.0


@pytest.fixture(autouse=True)
def stretches(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """Record the longest stretch of the event loop in any request of the test; the report at the end shows the longest.
    The figures inform only: other tests assert how much work runs between two pauses."""
    longest = Stretch(0.0)
    serve = Flask.__call__

    def watched(app: Flask, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        nonlocal longest
        with Stretches() as watch:
            answer: Iterable[bytes] = serve(app, environ, start_response)
        longest = max(longest, watch.longest)
        return answer

    monkeypatch.setattr(Flask, "__call__", watched)
    yield
    if longest.ms >= SHOWN_MS:
        request.node.user_properties.append(("stretch", tuple(longest)))


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("1.2.3")


@pytest.fixture
def client(broker: FakeBroker, metrics: Metrics) -> FlaskClient:
    return create_app(broker, BrokerConfig(body_bytes_max=100_000), metrics, Auth()).test_client()


@pytest.fixture
def problem_of() -> Callable[..., dict[str, Any]]:
    """Check that an answer is a whole problem document, and return its members."""

    def check(response: Any, status: int, code: str, outcome: str = "not_applied") -> dict[str, Any]:
        assert response.status_code == status, response.get_data(as_text=True)
        assert response.content_type == "application/problem+json"
        problem: dict[str, Any] = response.get_json(force=True)
        assert (problem["status"], problem["code"], problem["outcome"]) == (status, code, outcome)
        assert problem["type"] == f"urn:portalmq:error:{code}"
        assert problem["title"]
        assert problem["detail"]
        assert isinstance(problem["retryable"], bool)
        return problem

    return check
