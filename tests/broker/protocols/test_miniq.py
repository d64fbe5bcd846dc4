"""MiniQ over HTTP, as its documentation describes it, with its to-do list."""

from __future__ import annotations

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture
from support.protocols import client_of

from portalmq.broker.partition import answer_size as answers


def test_a_message_stays_until_it_is_confirmed(client: FlaskClient, fixture: Fixture) -> None:
    assert client.get("/message").status_code == 404
    posted = client.post("/message", json={"Message": "hello"})
    assert posted.status_code == 200
    shown = client.get("/message").get_json()
    assert shown == {"message": "hello", "timestamp": fixture.clock.wall_ms(), "key": posted.get_json()["key"]}
    assert client.get("/message").status_code == 404, "another caller has it"
    fixture.clock.advance(31_000)
    assert client.get("/message").get_json()["key"] == shown["key"], "it was not confirmed, so it is delivered again"
    assert client.post("/confirm", json={"Key": shown["key"]}).status_code == 200
    fixture.clock.advance(31_000)
    assert client.get("/message").status_code == 404


def test_another_caller_gets_the_next_one(client: FlaskClient) -> None:
    for message in ("a", "b"):
        client.post("/message", json={"Message": message})
    assert [client.get("/message").get_json()["message"] for _ in range(2)] == ["a", "b"]


def test_a_body_that_is_no_such_object_is_the_message(client: FlaskClient) -> None:
    client.post("/message", data=b"plain text")
    client.post("/message", data=b'{"celsius": 21.5}')
    client.post("/message", data=b"\xff\x00")
    assert client.get("/message").get_json()["message"] == "plain text"
    assert client.get("/message").get_json()["message"] == '{"celsius": 21.5}'
    assert client.get("/message").get_json()["message_base64"] == "/wA="


def test_without_confirmation_a_message_is_gone_when_it_is_read(fixture: Fixture) -> None:
    client = client_of(fixture, no_confirm=True)
    client.post("/message", json={"Message": "once"})
    assert client.get("/message").get_json()["message"] == "once"
    fixture.clock.advance(31_000)
    assert client.get("/message").status_code == 404


def test_queues_are_apart(client: FlaskClient) -> None:
    client.post("/message?queue=red", json={"Message": "r"})
    client.post("/message?queue=blue", json={"Message": "b"})
    assert client.get("/message").status_code == 404
    shown = client.get("/message?queue=blue").get_json()
    assert shown["message"] == "b"
    assert client.post("/confirm?queue=blue", json={"Key": shown["key"]}).status_code == 200
    assert client.get("/message?queue=red").get_json()["message"] == "r"


def test_the_whole_queue_is_read_at_once(client: FlaskClient) -> None:
    for message in ("a", "b", "c"):
        client.post("/message", json={"Message": message})
    first = client.get("/message").get_json()
    client.post("/confirm", json={"Key": first["key"]})
    client.get("/message")
    listed = client.get("/messages").get_json()
    assert [(each["message"], each["state"]) for each in listed["messages"]] == [("b", "in_flight"), ("c", "ready")]
    assert listed["more"] is False


@pytest.mark.parametrize("key", ["0-999", "9-0"])
def test_a_key_of_no_message_is_not_found(client: FlaskClient, key: str) -> None:
    client.post("/message", json={"Message": "a"})
    assert client.post("/confirm", json={"Key": key}).status_code == 404


def test_a_key_of_a_queue_that_was_deleted_names_no_message_of_the_next_one(
    client: FlaskClient, fixture: Fixture
) -> None:
    client.post("/message", json={"Message": "old"})
    old = client.get("/message").get_json()["key"]
    fixture.broker.delete_topic("default")
    posted = client.post("/message", json={"Message": "new"}).get_json()["key"]
    (listed,) = client.get("/messages").get_json()["messages"]
    shown = client.get("/message").get_json()
    assert posted == listed["key"] == shown["key"] != old
    assert posted.split("-")[1:] == old.split("-")[1:], "it has the place of the old one"
    assert client.post("/confirm", json={"Key": old}).status_code == 404
    ids = {"type": "DELETE_MSG", "payload": {"ids": [old, shown["key"]]}}
    assert client.post("/miniq/command", json={"type": "DELETE_MSG", "payload": {"id": old}}).status_code == 404
    assert [each["key"] for each in client.get("/messages").get_json()["messages"]] == [shown["key"]]
    assert client.post("/miniq/command", json=ids).get_json()["deleted"] == [False, True]
    assert client.get("/messages").get_json()["messages"] == []


def test_a_key_may_omit_its_queue(client: FlaskClient) -> None:
    """Older keys and the ids of other protocols have no mark."""
    client.post("/message", json={"Message": "a"})
    mark, partition, offset = client.get("/message").get_json()["key"].split("-")
    assert (len(mark), partition) == (8, "0")
    assert client.post("/confirm", json={"Key": f"{partition}-{offset}"}).status_code == 200
    assert client.get("/messages").get_json()["messages"] == []


@pytest.mark.parametrize(
    "key", ["0-1-2", "00ff00f-0-1", "00FF00FF-0-1", "00ff00ff-0", "00ff00ff--1", "-0-1", "0x0f0f0f-0-1"]
)
def test_a_key_with_an_invalid_queue_mark_is_refused(client: FlaskClient, key: str) -> None:
    client.post("/message", json={"Message": "a"})
    assert client.post("/confirm", json={"Key": key}).status_code == 400


def test_bad_requests_are_refused(client: FlaskClient) -> None:
    assert client.post("/confirm", json={"Key": "nonsense"}).status_code == 400
    assert client.post("/confirm", json={}).status_code == 400
    assert client.post("/confirm", json={"Key": "0-0"}).status_code == 404, "there is no queue yet"
    assert client.get("/message?queue=a/b").status_code == 400


def test_the_bare_secret_opens(fixture: Fixture) -> None:
    client = client_of(fixture, "strong-secret")
    assert client.get("/message").status_code == 401
    assert client.get("/message", headers={"Authorization": "wrong"}).status_code == 401
    assert client.get("/message", headers={"Authorization": "strong-secret"}).status_code == 404


def test_only_get_takes_a_message(fixture: Fixture) -> None:
    client = client_of(fixture, no_confirm=True)
    client.post("/message", json={"Message": "a"})
    for path, other in (("/message", "POST"), ("/v1/consumer?cid=7", "DELETE")):
        refused = client.head(path)
        assert refused.status_code == 405, "an answer to HEAD has no body for the message"
        assert set(refused.headers["Allow"].split(", ")) == {"GET", other}
    assert client.get("/message").get_json()["message"] == "a"


def test_the_list_of_a_queue_is_bounded_in_bytes(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_BYTES_MAX", 250)
    for _ in range(5):
        client.post("/message", json={"Message": "x" * 100})
    for path in ("/messages", "/v1/queue"):
        shown = client.get(path).get_json()
        assert (len(shown["messages"]), shown["more"]) == (3, True)
    monkeypatch.setattr(answers, "ANSWER_BYTES_MAX", 1)
    assert len(client.get("/messages").get_json()["messages"]) == 1, "at least one"


def test_a_key_with_an_invalid_number_is_refused(client: FlaskClient) -> None:
    client.post("/message", json={"Message": "a"})
    assert client.post("/confirm", json={"Key": "0-" + "9" * 30}).status_code == 400, "no partition has that offset"
