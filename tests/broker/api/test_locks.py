"""The lock routes: requests, answers and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient
from support.domain import HandClock
from support.fake_broker import FakeBroker

from portalmq.broker.cluster.locks import Locks
from portalmq.control_plane.standalone import Standalone

Check = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def locks(broker: FakeBroker, tmp_path: Path) -> Iterator[Locks]:
    plane = Standalone(tmp_path)
    plane.start()
    made = Locks(plane, dict, (broker.broker_id, 1), HandClock())  # type: ignore[arg-type]
    broker.locks = made  # type: ignore[attr-defined]
    made.start()
    yield made
    made.close()
    plane.close()


def acquire(client: FlaskClient, owner: str = "a", **more: object) -> Any:
    return client.post("/v1/locks/l", json={"owner": owner, "ttl_ms": 5000, **more})


def test_a_lock_is_acquired_renewed_shown_and_released(client: FlaskClient, locks: Locks) -> None:
    assert acquire(client).json == {"owner": "a", "fencing_token": 1, "expires_in_ms": 5000}
    renewed = client.put("/v1/locks/l", json={"owner": "a", "fencing_token": 1, "ttl_ms": 9000})
    assert renewed.json == {"owner": "a", "fencing_token": 1, "expires_in_ms": 9000}
    shown = {
        "name": "l",
        "owner": "a",
        "fencing_token": 1,
        "ttl_ms": 9000,
        "expires_in_ms": 9000,
        "waiters": 0,
    }
    assert client.get("/v1/locks/l").json == shown
    assert client.get("/v1/locks").json == {"locks": [shown]}
    assert client.delete("/v1/locks/l?owner=a&fencing_token=1").status_code == 204
    assert client.delete("/v1/locks/l", json={"owner": "a", "fencing_token": 1}).status_code == 204
    assert client.get("/v1/locks/l").json == {**shown, "owner": None, "expires_in_ms": 0}


def test_a_lock_that_is_held_is_409_with_its_holder(client: FlaskClient, problem_of: Check) -> None:
    acquire(client)
    problem = problem_of(acquire(client, "b"), 409, "lock_held")
    assert (problem["owner"], problem["expires_in_ms"], problem["retryable"]) == ("a", 5000, True)


def test_a_wait_is_limited_and_counts_as_a_waiting_call(client: FlaskClient, problem_of: Check) -> None:
    acquire(client)
    problem_of(acquire(client, "b", wait_ms=20), 409, "lock_held")
    problem_of(acquire(client, "b", wait_ms=60_001), 400, "invalid_request")


def test_a_waiting_caller_gets_a_released_lock(client: FlaskClient) -> None:
    acquire(client)
    gevent.spawn_later(0.02, client.delete, "/v1/locks/l?owner=a&fencing_token=1")
    assert acquire(client, "b", wait_ms=60_000).json["fencing_token"] == 2


@pytest.mark.parametrize(
    ("owner", "token", "outcome"), [("a", 2, "not_applied"), ("b", 1, "not_applied"), ("a", 0, "unknown")]
)
def test_stale_and_foreign_tokens_are_fenced(
    client: FlaskClient, problem_of: Check, owner: str, token: int, outcome: str
) -> None:
    acquire(client)
    body = {"owner": owner, "fencing_token": token}
    assert problem_of(client.put("/v1/locks/l", json=body), 409, "fenced", outcome)["newest_token"] == 1
    problem_of(client.delete(f"/v1/locks/l?owner={owner}&fencing_token={token}"), 409, "fenced", outcome)


def test_an_unknown_lock_is_404(client: FlaskClient, problem_of: Check) -> None:
    problem_of(client.get("/v1/locks/l"), 404, "lock_not_found")
    problem_of(client.put("/v1/locks/l", json={"owner": "a", "fencing_token": 1}), 404, "lock_not_found")
    problem_of(client.delete("/v1/locks/l?owner=a&fencing_token=1"), 404, "lock_not_found")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"owner": ""},
        {"owner": "x" * 191},
        {"owner": 5},
        {"owner": "a", "ttl_ms": 499},
        {"owner": "a", "ttl_ms": 24 * 3600 * 1000 + 1},
        {"owner": "a", "ttl_ms": -1},
        {"owner": "a", "ttl_ms": "10"},
        {"owner": "a", "wait_ms": -1},
        {"owner": "a", "keep_place_ms": 5_001},
        {"owner": "a", "ttl": 1000},
        [],
    ],
)
def test_wrong_bodies_are_400_and_create_nothing(client: FlaskClient, problem_of: Check, body: object) -> None:
    problem_of(client.post("/v1/locks/l", json=body), 400, "invalid_request")
    assert client.get("/v1/locks").json == {"locks": []}


@pytest.mark.parametrize(
    "query", ["", "?owner=a", "?fencing_token=1", "?owner=a&fencing_token=x", "?owner=a&fencing_token=-1", "?force=1"]
)
def test_a_release_names_owner_and_token(client: FlaskClient, problem_of: Check, query: str) -> None:
    acquire(client)
    problem_of(client.delete(f"/v1/locks/l{query}"), 400, "invalid_request")
    assert client.get("/v1/locks/l").json["owner"] == "a"


def test_a_release_with_parameters_in_query_and_body_is_400(client: FlaskClient, problem_of: Check) -> None:
    acquire(client)
    twice = client.delete("/v1/locks/l?owner=a&fencing_token=1", json={"owner": "a", "fencing_token": 1})
    problem_of(twice, 400, "invalid_request")


@pytest.mark.parametrize("name", ["a b", "..", "x" * 191, "ä", "a%2Fb"])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_names_are_checked(client: FlaskClient, method: str, name: str) -> None:
    answer = client.open(f"/v1/locks/{name}", method=method, json={"owner": "a", "fencing_token": 1})
    assert answer.status_code in {400, 404}
    assert answer.content_type == "application/problem+json"


def test_an_owner_may_be_any_text(client: FlaskClient) -> None:
    owner = 'worker "7" ☃ \n' + "é" * 100
    assert acquire(client, owner).json["owner"] == owner
    assert acquire(client, owner).json["fencing_token"] == 1
