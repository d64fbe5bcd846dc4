"""Every error is a problem document, reveals nothing internal, and says when to retry."""

from __future__ import annotations

import pytest

from portalmq import errors
from portalmq.broker.api.routes import ROUTES


@pytest.mark.parametrize(
    "cls", sorted(set(errors.ERRORS_BY_CODE.values()), key=lambda cls: cls.code), ids=lambda c: c.code
)
def test_every_error_of_the_contract_becomes_its_problem(client, broker, problem_of, cls):
    broker.refuse = cls("what to do", outcome="unknown", hint=5)
    answer = client.get("/v1/topics/t")
    problem = problem_of(answer, cls.status, cls.code, "unknown")
    assert (problem["detail"], problem["hint"]) == ("what to do", 5)
    assert ("Retry-After" in answer.headers) == (cls.status in (429, 503))


def test_a_detail_that_quotes_a_megabyte_is_cut(client, broker, problem_of):
    broker.refuse = errors.InvalidRequest("x" * 1_000_000)
    problem = problem_of(client.get("/v1/topics/t"), 400, "invalid_request")
    assert len(problem["detail"]) < 2_000


def test_retry_after_is_whole_seconds_rounded_up(client, broker):
    broker.refuse = errors.Backpressure("slow down", retry_after_s=1.2)
    assert client.get("/v1/topics/t").headers["Retry-After"] == "2"
    broker.refuse = errors.Unavailable("later", retry_after_s=0.1)
    assert client.get("/v1/topics/t").headers["Retry-After"] == "1"


def test_an_unexpected_fault_is_unknown_and_shows_no_trace(client, broker, problem_of, caplog):
    broker.refuse = RuntimeError("secret path /var/lib/x")
    answer = client.get("/v1/topics/t")
    problem_of(answer, 500, "internal", "unknown")
    assert b"/var/lib" not in answer.data
    assert b"Traceback" not in answer.data
    assert "secret path" in caplog.text


def test_unknown_paths_and_methods_are_problems(client, problem_of):
    for path in (
        "/",
        "/v1",
        "/v2/topics",
        "/v1/topics/a/b",
        "/v1/topics/t/messages/x",
        "//v1//topics",
        "/%00",
        "/etc/passwd",
    ):
        problem_of(client.get(path), 404, "not_found")
    answer = client.put("/v1/topics")
    problem_of(answer, 405, "method_not_allowed")
    assert "GET" in answer.headers["Allow"]
    answer = client.open("/v1/topics/t", method="BREW")
    problem_of(answer, 405, "method_not_allowed")
    assert {"GET", "PUT", "PATCH", "DELETE"} <= {word.strip() for word in answer.headers["Allow"].split(",")}


def test_head_is_get_without_a_body(client, broker):
    broker.logs["t"] = [[]]
    answer = client.head("/v1/topics/t")
    assert (answer.status_code, answer.data) == (200, b"")
    assert int(answer.headers["Content-Length"]) > 0
    assert client.head("/livez").status_code == 200


def test_while_starting_or_draining_only_the_health_routes_answer(client, broker, problem_of):
    broker.ready = False
    assert client.get("/livez").status_code == 200
    assert client.get("/metrics").status_code == 200
    for path in ("/readyz", "/healthz", "/v1/topics"):
        answer = client.get(path)
        problem_of(answer, 503, "unavailable")
        assert answer.headers["Retry-After"] == "1"
    broker.ready = True
    assert client.get("/readyz").get_json() == {"status": "ready", "broker_id": 7}
    assert client.get("/healthz").get_json()["disk_full"] is False


def test_each_route_exists_once():
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)
