"""Altering and deleting a topic over HTTP: what breaks the order of keys, or loses outputs, needs a confirmation."""

from __future__ import annotations

import pytest

from portalmq.errors import KeyOrder

URL = "/v1/topics/t"


@pytest.mark.parametrize(("query", "force"), [("", False), ("?force=false", False), ("?force=true", True)])
def test_a_deletion_is_forced_by_a_parameter(client, broker, query, force):
    broker.logs["t"] = [[]]
    assert client.delete(f"{URL}{query}").status_code == 204
    assert broker.last("delete_topic")["force"] is force


@pytest.mark.parametrize(("query", "force"), [("", False), ("?force=false", False), ("?force=true", True)])
def test_growth_is_forced_by_a_parameter(client, broker, query, force):
    broker.logs["t"] = [[]]
    assert client.patch(f"{URL}{query}", json={"partitions": 2}).status_code == 200
    assert broker.last("alter_topic")["force"] is force


def test_growth_that_breaks_the_order_of_keys_is_a_conflict(client, broker, problem_of):
    broker.refuse = KeyOrder("group 'g' reads topic 't' in the order of keys: say ?force=true")
    problem = problem_of(client.patch(URL, json={"partitions": 2}), 409, "key_order")
    assert "force=true" in problem["detail"]
    assert problem["retryable"] is False


@pytest.mark.parametrize("query", ["force=yes", "force=1", "force=", "forse=true", "force=true&force=true"])
def test_a_misspelt_force_is_refused(client, broker, problem_of, query):
    broker.logs["t"] = [[]]
    problem_of(client.patch(f"{URL}?{query}", json={"partitions": 2}), 400, "invalid_request")
    assert not broker.calls_made("alter_topic")
