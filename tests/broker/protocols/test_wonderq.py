"""WonderQ, as its documentation describes it."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture

from portalmq import wire
from portalmq.broker.core.queue import delivery


def publish(client: FlaskClient, message: Any) -> int:
    answer = client.post("/v1/publish", json={"message": message})
    assert answer.status_code == 200
    number = answer.get_json()["id"]
    assert isinstance(number, int)
    return number


def take(client: FlaskClient, cid: int, limit: int = 10) -> list[tuple[int, Any]]:
    answer = client.get(f"/v1/consumer?cid={cid}&limit={limit}")
    assert answer.status_code == 200
    return [(each["id"], each["message"]) for each in answer.get_json()["messages"]]


def delete(client: FlaskClient, cid: int, number: int) -> bool:
    answer = client.delete(f"/v1/consumer?cid={cid}&id={number}")
    assert answer.status_code == 200
    found: bool = answer.get_json()
    return found


def test_a_processed_message_is_deleted_by_its_consumer(client: FlaskClient) -> None:
    first, second = publish(client, "a"), publish(client, {"b": 2})
    assert take(client, 7, limit=1) == [(first, "a")]
    assert take(client, 8) == [(second, {"b": 2})], "no two consumers have one message"
    assert take(client, 9) == []
    assert delete(client, 8, first) is False, "another consumer has it"
    assert delete(client, 7, first) is True
    assert delete(client, 8, second) is True


def test_a_message_that_is_not_processed_in_time_is_unlocked(client: FlaskClient, fixture: Fixture) -> None:
    number = publish(client, "a")
    take(client, 7)
    fixture.clock.advance(31_000)
    assert delete(client, 7, number) is False
    assert take(client, 8) == [(number, "a")]
    assert delete(client, 7, number) is False
    assert delete(client, 8, number) is True


def test_ids_are_integers_and_differ_over_partitions(client: FlaskClient, fixture: Fixture) -> None:
    fixture.broker.create_topic("default", wire.CreateTopic(partitions=3))
    numbers = {publish(client, n) for n in range(30)}
    assert len(numbers) == 30
    assert all(number < 2**53 for number in numbers)
    taken = take(client, 1, limit=100)
    assert {number for number, _ in taken} == numbers
    assert all(delete(client, 1, number) for number, _ in taken)
    assert client.get("/v1/queue").get_json()["messages"] == []


def test_the_queue_s_state_is_shown(client: FlaskClient, fixture: Fixture) -> None:
    assert client.get("/v1/queue").get_json()["messages"] == []
    first, second = publish(client, "a"), publish(client, "b")
    take(client, 7, limit=1)
    fixture.clock.advance(5_000)
    shown = client.get("/v1/queue").get_json()
    assert (shown["ready"], shown["in_flight"], shown["oldest_unacked_ms"]) == (1, 1, 5_000)
    assert [(each["id"], each["state"], each["deliveries"]) for each in shown["messages"]] == [
        (first, "in_flight", 1),
        (second, "ready", 0),
    ]
    assert shown["more"] is False


def test_the_state_counts_messages_not_received_yet(client: FlaskClient) -> None:
    publish(client, "a")
    publish(client, "b")
    shown = client.get("/v1/queue").get_json()
    assert (shown["ready"], len(shown["messages"])) == (2, 2)


def test_looking_at_the_state_changes_nothing(client: FlaskClient, fixture: Fixture) -> None:
    publish(client, "a")
    partition = fixture.broker.topics.known("default").local[0]
    end = partition.replica.next_offset
    for shown in (client.get("/v1/queue"), client.get("/v1/queue")):
        assert (shown.get_json()["ready"], len(shown.get_json()["messages"])) == (1, 1)
    size = client.post("/miniq/command", json={"type": "QUEUE_SIZE", "payload": {"queue": "default"}}).get_json()
    assert size["ready"] == 1
    assert partition.replica.next_offset == end
    assert fixture.broker.groups.find("default") is None
    assert take(client, 7) == [(shown.get_json()["messages"][0]["id"], "a")]


def test_the_state_is_only_of_wonderq_s_queue(client: FlaskClient, fixture: Fixture) -> None:
    client.post("/message?queue=other", json={"Message": "MiniQ's, of the same group"})
    client.get("/message?queue=other")
    fixture.clock.advance(5_000)
    shown = client.get("/v1/queue").get_json()
    assert [shown[name] for name in ("ready", "in_flight", "dead", "oldest_unacked_ms")] == [0, 0, 0, 0]
    publish(client, "a")
    fixture.clock.advance(1_000)
    shown = client.get("/v1/queue").get_json()
    assert [shown[name] for name in ("ready", "in_flight", "dead", "oldest_unacked_ms")] == [1, 0, 0, 1_000]


def test_a_repeated_delete_is_answered_as_the_first(client: FlaskClient) -> None:
    """The first answer may have been lost."""
    first, second = publish(client, "a"), publish(client, "b")
    take(client, 7)
    assert [delete(client, 7, first) for _ in range(2)] == [True, True]
    assert delete(client, 8, first) is False
    assert [each["id"] for each in client.get("/v1/queue").get_json()["messages"]] == [second]


def test_an_id_of_a_deleted_queue_deletes_nothing_in_a_new_queue(client: FlaskClient, fixture: Fixture) -> None:
    old = publish(client, "old")
    assert take(client, 7) == [(old, "old")]
    fixture.broker.delete_topic("default")
    assert publish(client, "new") == old, "the next queue counts from the beginning"
    assert delete(client, 7, old) is False, "no consumer has it"
    assert take(client, 8) == [(old, "new")]
    assert delete(client, 7, old) is False, "another consumer has it"
    assert [each["state"] for each in client.get("/v1/queue").get_json()["messages"]] == ["in_flight"]
    assert delete(client, 8, old) is True


def test_a_lock_lasts_whatever_other_consumers_receive(
    client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "ATTEMPTS_MAX", 3)
    first = publish(client, "first")
    others = [publish(client, number) for number in range(10)]
    assert take(client, 7, limit=1) == [(first, "first")]
    assert [number for _ in others for number, _ in take(client, 8, limit=1)] == others
    fixture.clock.advance(29_000)
    assert delete(client, 8, first) is False
    assert delete(client, 7, first) is True


def test_an_id_that_no_queue_can_have_is_no_message(client: FlaskClient) -> None:
    publish(client, "a")
    assert delete(client, 7, 2**53 - 1) is False
    assert client.delete(f"/v1/consumer?cid=7&id={2**53}").status_code == 400


def test_bad_requests_are_refused(client: FlaskClient) -> None:
    assert client.get("/v1/consumer").status_code == 400
    assert client.get("/v1/consumer?cid=x").status_code == 400
    assert client.get("/v1/consumer?cid=1&limit=0").status_code == 400
    assert client.get("/v1/consumer?cid=1&limit=1000000").status_code == 400
    assert client.delete("/v1/consumer?cid=1").status_code == 400
    assert client.delete("/v1/consumer?id=1").status_code == 400
    assert client.post("/v1/publish", json={}).status_code == 400
    assert delete(client, 1, 5) is False, "there is no queue yet"
