"""Calls between brokers accept only the cluster's secret, and no other route accepts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from support.fake_broker import FakeBroker

from portalmq.broker.api.app import create_app
from portalmq.broker.cluster.peers import credential
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.errors import NotLeader

ProblemOf = Callable[..., dict[str, Any]]
SECRET = {"Authorization": credential(FakeBroker.cluster_secret)}


def test_a_broker_with_the_secret_is_answered(client: FlaskClient) -> None:
    answer = client.post("/internal/v1/echo", data=b"\x00\xff", headers=SECRET)
    assert (answer.status_code, answer.get_data()) == (200, b"\x00\xff")
    assert answer.content_type == "application/vnd.msgpack"


def test_a_call_without_the_credential_is_refused(client: FlaskClient, problem_of: ProblemOf) -> None:
    problem_of(client.post("/internal/v1/echo", data=b"x"), 401, "unauthorized")


@pytest.mark.parametrize(
    "shown", ["Bearer s3cret", "s3cret", credential("t" * 64), "PortalMQ-Broker", "PortalMQ-Broker \xff"]
)
def test_no_token_of_a_client_opens_it(broker: FakeBroker, problem_of: ProblemOf, shown: str) -> None:
    client = create_app(broker, BrokerConfig(), Metrics("1"), Auth(["s3cret"])).test_client()
    problem_of(client.post("/internal/v1/echo", data=b"x", headers={"Authorization": shown}), 403, "forbidden")
    assert broker.calls_made("serve_peer") == 0


@pytest.mark.parametrize("tokens", [(), ("s3cret",)])
@pytest.mark.parametrize("path", ["/v1/topics/t/messages", "/v1/groups/g/receive", "/v1/topics", "/metrics"])
def test_the_secret_is_not_accepted_on_routes_for_clients(
    broker: FakeBroker, problem_of: ProblemOf, tokens: tuple[str, ...], path: str
) -> None:
    client = create_app(broker, BrokerConfig(), Metrics("1"), Auth(tokens)).test_client()
    call = client.post if path.endswith(("messages", "receive")) else client.get
    problem_of(call(path, headers=SECRET), 403, "forbidden")


def test_an_error_travels_as_a_problem_with_its_outcome(
    client: FlaskClient, broker: FakeBroker, problem_of: ProblemOf
) -> None:
    broker.refuse = NotLeader("gone", leader=2, leader_url="http://two", outcome="unknown")
    problem = problem_of(client.post("/internal/v1/echo", data=b"x", headers=SECRET), 421, "not_leader", "unknown")
    assert (problem["leader"], problem["leader_url"]) == (2, "http://two")


def test_an_unknown_name_is_404_and_creates_no_series(
    client: FlaskClient, metrics: Metrics, problem_of: ProblemOf
) -> None:
    problem_of(client.post("/internal/v1/nonsense", data=b"x", headers=SECRET), 404, "not_found")
    assert b"nonsense" not in metrics.exposition()


def test_only_post_is_accepted(client: FlaskClient, problem_of: ProblemOf) -> None:
    answer = client.get("/internal/v1/echo", headers=SECRET)
    problem_of(answer, 405, "method_not_allowed")
    assert answer.headers["Allow"] == "POST"


def test_calls_are_served_while_the_broker_starts_and_drains(client: FlaskClient, broker: FakeBroker) -> None:
    broker.ready = False
    assert client.post("/internal/v1/echo", data=b"x", headers=SECRET).status_code == 200


def test_a_body_over_the_limit_is_refused_by_its_length(client: FlaskClient, problem_of: ProblemOf) -> None:
    answer = client.post(
        "/internal/v1/echo", data=b"x", headers=SECRET, environ_overrides={"CONTENT_LENGTH": str(1 << 30)}
    )
    problem_of(answer, 413, "message_too_large")


def test_a_body_that_is_not_messagepack_is_a_client_error(
    client: FlaskClient, broker: FakeBroker, problem_of: ProblemOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "serve_peer", lambda name, body, peer: msgspec.msgpack.decode(body, type=list[int]))
    for body in (b"", b"\xc1", b"\x93\x01", b"\xa2\xff\xff"):
        problem_of(client.post("/internal/v1/echo", data=body, headers=SECRET), 400, "invalid_request")
    # A body that decodes to the wrong type is a fault of the broker, not of the caller.
    problem_of(client.post("/internal/v1/echo", data=b"\x01", headers=SECRET), 500, "internal", "unknown")
