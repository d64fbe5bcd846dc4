from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.fake_broker import FakeBroker

from portalmq.broker.api.app import create_app
from portalmq.broker.auth import Auth
from portalmq.broker.config import BrokerConfig
from portalmq.broker.metrics import Metrics


@pytest.fixture
def domain() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("1.2.3")


@pytest.fixture
def client(domain: FakeBroker, metrics: Metrics) -> FlaskClient:
    return create_app(domain, BrokerConfig(body_bytes_max=100_000), metrics, Auth()).test_client()


@pytest.fixture
def problem_of() -> Callable[..., dict[str, Any]]:
    """Checks that an answer is a whole problem document, and gives its members."""

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
