"""Portal MQ's endpoints, as its documentation describes them."""

from __future__ import annotations

from typing import Any

import gevent
import pytest
from flask.testing import FlaskClient
from support.domain import Fixture

from portalmq import wire
from portalmq.broker.cluster import registry


def post(client: FlaskClient, path: str, **body: Any) -> tuple[int, Any]:
    answer = client.post(path, json=body)
    return answer.status_code, answer.get_json(silent=True, force=True) if answer.data else None


@pytest.fixture
def topic(client: FlaskClient) -> str:
    assert post(client, "/topic/create", name="temp_1")[0] == 200
    return "temp_1"


def publish(client: FlaskClient, *messages: Any, **more: Any) -> list[int]:
    return [post(client, "/publish", name="temp_1", message=each, id="s", **more)[1]["offset"] for each in messages]


def test_topics_come_and_go(client: FlaskClient) -> None:
    assert post(client, "/topic/exists", name="t")[0] == 404
    assert post(client, "/topic/exists", name="t")[1]["exists"] is False
    assert post(client, "/topic/create", name="t")[0] == 200
    assert post(client, "/topic/create", name="t")[0] == 200, "again"
    assert post(client, "/topic/exists", name="t") == (200, {"name": "t", "exists": True})
    assert post(client, "/topic/delete", name="t")[0] == 200
    assert post(client, "/topic/exists", name="t")[0] == 404
    assert post(client, "/topic/delete", name="t")[0] == 404


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_programs_come_and_go(client: FlaskClient, kind: str) -> None:
    assert post(client, f"/{kind}/exists", id=7)[0] == 404
    assert post(client, f"/{kind}/create", id=7) == (200, {"id": "7"})
    assert post(client, f"/{kind}/create", id="7")[0] == 200
    assert post(client, f"/{kind}/exists", id=7)[0] == 200
    assert post(client, f"/{kind}/delete", id=7)[0] == 200
    assert post(client, f"/{kind}/delete", id=7)[0] == 404


def test_a_message_is_read_until_it_is_consumed(client: FlaskClient, topic: str) -> None:
    first, second = publish(client, "one", "two")
    for _ in range(2):
        status, shown = post(client, "/read", name=topic, id="c")
        assert (status, shown["message"], shown["offset"]) == (200, "one", first)
    assert post(client, "/consume", name=topic, offset=first)[0] == 200
    assert post(client, "/read", name=topic, id="other")[1]["message"] == "two"
    assert post(client, "/consume", name=topic, offset=second)[0] == 200
    assert post(client, "/read", name=topic, id="c") == (204, None)


def test_consume_goes_on_from_the_current_offset_alone(client: FlaskClient, topic: str) -> None:
    first, second = publish(client, "one", "two")
    assert post(client, "/consume", name=topic, offset=second)[0] == 204
    assert post(client, "/consume", name=topic, offset=first)[0] == 200
    assert post(client, "/consume", name=topic, offset=first)[0] == 204
    assert post(client, "/consume", name=topic, offset=1 << 45)[0] == 204, "a partition that is not there"


@pytest.mark.parametrize("message", ["it's ## quoted; DROP TABLE messages", "", {"celsius": 21.5}, [1, None], 7, None])
def test_any_message_is_delivered_unchanged(client: FlaskClient, topic: str, message: Any) -> None:
    publish(client, message)
    assert post(client, "/read", name=topic, id="c")[1]["message"] == message


def test_a_repeated_publish_with_its_sequence_is_one_message(client: FlaskClient, topic: str) -> None:
    (first,) = publish(client, "one", sequence=1)
    assert publish(client, "one", sequence=1) == [first]
    assert post(client, "/publish", name=topic, message="other", id="s", sequence=1)[0] == 422
    post(client, "/consume", name=topic, offset=first)
    assert post(client, "/read", name=topic, id="c")[0] == 204


def test_a_repeat_is_recognised_in_a_topic_of_several_partitions(client: FlaskClient, fixture: Fixture) -> None:
    fixture.broker.create_topic("temp_1", wire.CreateTopic(partitions=5))
    firsts = [publish(client, str(number), sequence=number) for number in range(20)]
    assert len({offset >> 40 for (offset,) in firsts}) > 1
    assert [publish(client, str(number), sequence=number) for number in range(20)] == firsts


def test_a_sleeping_reader_is_woken(client: FlaskClient, fixture: Fixture, topic: str) -> None:
    sleeping = gevent.spawn(post, client, "/read", name=topic, id="c", wait_ms=60_000)
    gevent.sleep(0)
    publish(client, "wake up")
    assert sleeping.get(timeout=50)[1]["message"] == "wake up"


def test_all_partitions_of_a_topic_are_read(client: FlaskClient, fixture: Fixture) -> None:
    fixture.broker.create_topic("many", wire.CreateTopic(partitions=3))
    sent = {post(client, "/publish", name="many", message=n, id="s")[1]["offset"] for n in range(30)}
    read = set()
    while True:
        status, shown = post(client, "/read", name="many", id="c", wait_ms=0)
        if status == 204:
            break
        assert post(client, "/consume", name="many", offset=shown["offset"])[0] == 200
        read.add(shown["offset"])
    assert read == sent
    assert len(sent) == 30


def test_no_leader_is_asked_for_the_number_of_partitions(
    client: FlaskClient, fixture: Fixture, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (offset,) = publish(client, "a")

    def asked(*_: Any) -> None:
        raise AssertionError("every broker knows how many there are")

    monkeypatch.setattr(fixture.broker, "describe_topic", asked)
    assert post(client, "/read", name=topic, id="c")[1]["offset"] == offset
    assert post(client, "/topic/exists", name=topic)[0] == 200


def test_bad_requests_are_refused(client: FlaskClient) -> None:
    assert client.post("/publish", data=b"no json").status_code == 400
    assert post(client, "/publish", name="a/b", message="x")[0] == 400
    assert post(client, "/publish", message="x")[0] == 400
    assert post(client, "/publish", name="t", message="x", sequence=1)[0] == 400
    assert post(client, "/consume", name="t", offset=-1)[0] == 400
    assert post(client, "/read", name="nowhere", id="c")[0] == 404


def test_producers_with_a_colon_in_their_names_are_apart(client: FlaskClient) -> None:
    _, first = post(client, "/publish", name="t", message="x", id="a:1", sequence="2")
    _, second = post(client, "/publish", name="t", message="x", id="a", sequence="1:2")
    assert first["offset"] != second["offset"]


def test_a_registered_program_may_register_again_at_the_limit(
    client: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "NAMES_MAX", 2)
    for name in ("a", "b"):
        assert post(client, "/consumer/create", id=name)[0] == 200
    assert post(client, "/consumer/create", id="c")[0] == 429
    assert post(client, "/consumer/create", id="a")[0] == 200, "an existing program may register again"
