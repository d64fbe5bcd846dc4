"""MiniQ's commands, at any broker."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture
from support.protocols import client_of

from portalmq import wire


def tell(client: FlaskClient, kind: str, **payload: Any) -> Any:
    answer = client.post("/miniq/command", json={"type": kind, "payload": payload})
    assert answer.status_code == 200, answer.get_json()
    return answer.get_json()


def refused(client: FlaskClient, body: Any) -> tuple[int, str]:
    answer = client.post("/miniq/command", json=body)
    return answer.status_code, answer.get_json()["detail"]


def put(client: FlaskClient, queue: str, *messages: Any) -> list[str]:
    return [client.post(f"/message?queue={queue}", json={"Message": message}).get_json()["key"] for message in messages]


def test_a_queue_is_created_once_and_may_be_created_again(client: FlaskClient, fixture: Fixture) -> None:
    assert tell(client, "CREATE_QUEUE", queue="q") == {"status": "ok", "queue": "q", "created": True}
    assert tell(client, "CREATE_QUEUE", queue="q") == {"status": "ok", "queue": "q", "created": False}
    assert fixture.broker.describe_topic("q").name == "q"


def test_the_size_counts_undeleted_messages_even_before_the_first_consume(client: FlaskClient) -> None:
    ids = put(client, "q", "a", "b", "c")
    size = {"status": "ok", "queue": "q", "size": 3, "ready": 3, "in_flight": 0, "scheduled": 0}
    assert tell(client, "QUEUE_SIZE", queue="q") == size
    client.get("/message?queue=q")
    assert tell(client, "QUEUE_SIZE", queue="q") == {**size, "ready": 2, "in_flight": 1}
    tell(client, "DELETE_MSG", queue="q", id=ids[0])
    assert tell(client, "QUEUE_SIZE", queue="q")["size"] == 2


def test_the_size_is_of_one_queue_and_of_all_its_partitions(client: FlaskClient, fixture: Fixture) -> None:
    fixture.broker.create_topic("wide", wire.CreateTopic(partitions=3))
    put(client, "wide", *range(9))
    put(client, "other", "x")
    assert tell(client, "QUEUE_SIZE", queue="wide")["size"] == 9
    assert tell(client, "QUEUE_SIZE", queue="other")["size"] == 1


def test_a_deleted_message_does_not_come_again(client: FlaskClient, fixture: Fixture) -> None:
    put(client, "q", "a")
    key = client.get("/message?queue=q").get_json()["key"]
    assert tell(client, "DELETE_MSG", queue="q", id=key) == {"status": "ok", "queue": "q", "id": key}
    assert tell(client, "DELETE_MSG", queue="q", id=key)["status"] == "ok", "a repeat does no harm"
    fixture.clock.advance(31_000)
    assert client.get("/message?queue=q").status_code == 404


def test_many_are_deleted_at_once_and_each_has_its_verdict(client: FlaskClient) -> None:
    ids = put(client, "q", "a", "b")
    told = tell(client, "DELETE_MSG", queue="q", ids=[ids[0], "0-999", "7-0", ids[1]])
    assert told["deleted"] == [True, False, False, True]
    assert tell(client, "QUEUE_SIZE", queue="q")["size"] == 0
    assert tell(client, "DELETE_MSG", queue="q", ids=[])["deleted"] == []


@pytest.mark.parametrize("kind", ["PRODUCE_MSG", "CONSUME"])
def test_produce_and_consume_commands_create_a_missing_queue(client: FlaskClient, fixture: Fixture, kind: str) -> None:
    assert tell(client, kind, queue="q") == {"status": "ok", "queue": "q"}
    fixture.broker.create_topic("wide", wire.CreateTopic(partitions=3))
    assert tell(client, kind, queue="wide") == {"status": "ok", "queue": "wide"}, "an existing queue stays unchanged"
    assert tell(client, kind) == {"status": "ok", "queue": "default"}


def test_impossible_commands_are_refused(client: FlaskClient) -> None:
    there_is_none = (404, "there is no queue 'none': make it with CREATE_QUEUE")
    assert refused(client, {"type": "QUEUE_SIZE", "payload": {"queue": "none"}}) == there_is_none
    assert refused(client, {"type": "DELETE_MSG", "payload": {"queue": "none", "id": "0-0"}}) == there_is_none
    put(client, "q", "a")
    assert refused(client, {"type": "DELETE_MSG", "payload": {"queue": "q", "id": "0-999"}})[0] == 404
    assert refused(client, {"type": "DELETE_MSG", "payload": {"queue": "q", "id": "x"}})[0] == 400
    assert refused(client, {"type": "DELETE_MSG", "payload": {"queue": "q", "ids": ["0-0"] * 1_001}})[0] == 400
    status, detail = refused(client, {"type": "DELETE_MSG", "payload": {"queue": "q"}})
    assert (status, "`id`" in detail) == (400, True)
    status, detail = refused(client, {"type": "DANCE", "payload": {}})
    assert (status, "QUEUE_SIZE" in detail) == (400, True)
    assert refused(client, {"payload": {}})[0] == 400
    assert refused(client, [])[0] == 400
    assert refused(client, {"type": "CREATE_QUEUE", "payload": {"queue": "a/b"}})[0] == 400


def test_a_message_in_a_command_is_not_dropped_silently(client: FlaskClient) -> None:
    status, detail = refused(client, {"type": "PRODUCE_MSG", "payload": {"queue": "q", "message": "x"}})
    assert (status, "producers' port" in detail) == (400, True)


def test_commands_need_the_secret(fixture: Fixture) -> None:
    client = client_of(fixture, "strong-secret")
    assert client.post("/miniq/command", json={"type": "CREATE_QUEUE"}).status_code == 401
    shown = {"Authorization": "strong-secret"}
    assert client.post("/miniq/command", json={"type": "CREATE_QUEUE"}, headers=shown).status_code == 200
