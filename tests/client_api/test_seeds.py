"""Portal MQ's classes and the design notes' two calls, against a broker that misbehaves on request."""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, lose_answer, refuse

from portalmq import (
    InvalidRequest,
    PortalClient,
    PortalConsumer,
    PortalProducer,
    TopicNotFound,
    Unauthorized,
    Unavailable,
    errors,
    publishMessage,
    seeds,
    subscribeMessage,
)

NOBODY = "http://127.0.0.1:1"  # a port outside the ephemeral range, so no process takes it


class PortalBroker(ScriptedBroker):
    """A scripted broker with Portal MQ's routes, over lists."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: dict[str, list[dict[str, Any]]] = {}
        self.turn: dict[str, int] = {}
        self.sequences: dict[str, int] = {}
        self.programs: set[str] = set()
        self.makes_topics = True

    def work(self, call: Call) -> Reply:
        with self.changed:
            if call.path.startswith("/v1/"):
                return super().work(call)
            return getattr(self, "at_" + call.path.strip("/").replace("/", "_"))(call.json())

    def at_topic_create(self, body: dict[str, Any]) -> Reply:
        self.messages.setdefault(body["name"], [])
        return done(body)

    def at_topic_exists(self, body: dict[str, Any]) -> Reply:
        self._known(body)
        return done(body)

    def at_topic_delete(self, body: dict[str, Any]) -> Reply:
        self._known(body)
        del self.messages[body["name"]]
        return done(body)

    def at_producer_create(self, body: dict[str, Any]) -> Reply:
        self.programs.add(body["id"])
        return done(body)

    def at_producer_exists(self, body: dict[str, Any]) -> Reply:
        if body["id"] not in self.programs:
            raise errors.NotFound(f"there is no program {body['id']}")
        return done(body)

    def at_producer_delete(self, body: dict[str, Any]) -> Reply:
        self.at_producer_exists(body)
        self.programs.remove(body["id"])
        return done(body)

    at_consumer_create, at_consumer_exists, at_consumer_delete = (
        at_producer_create,
        at_producer_exists,
        at_producer_delete,
    )

    def at_publish(self, body: dict[str, Any]) -> Reply:
        log = self.messages.setdefault(body["name"], [])
        sequence = f"{body['id']}:{body['sequence']}"
        if sequence not in self.sequences:
            self.sequences[sequence] = len(log)
            log.append({name: body[name] for name in ("message", "message_base64") if name in body})
        return done({"partition": 0, "offset": self.sequences[sequence]})

    def at_read(self, body: dict[str, Any]) -> Reply:
        if body.get("first_use") and self.makes_topics:
            self.messages.setdefault(body["name"], [])
        log, turn = self._known(body), self.turn.get(body["name"], 0)
        if turn == len(log):
            self.changed.wait_for(lambda: turn < len(log), min(body["wait_ms"] / 1000, 0.05))
        if turn == len(log):
            return Reply(204)
        return done({**log[turn], "offset": turn, "timestamp_ms": 17})

    def at_consume(self, body: dict[str, Any]) -> Reply:
        self._known(body)
        if body["offset"] != self.turn.get(body["name"], 0):
            return Reply(204)
        self.turn[body["name"]] = body["offset"] + 1
        return done(body)

    def _known(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        if body["name"] not in self.messages:
            raise TopicNotFound(body["name"])
        return self.messages[body["name"]]


def done(body: object) -> Reply:
    return Reply(200, msgspec.json.encode(body))


@pytest.fixture
def broker() -> Iterator[PortalBroker]:
    with PortalBroker() as started:
        yield started


def texts(broker: PortalBroker, topic: str = "t") -> list[Any]:
    return [each.get("message") for each in broker.messages[topic]]


# --- the client ------------------------------------------------------------------------------------------------------


def test_topics_are_created_and_deleted(broker: PortalBroker) -> None:
    with PortalClient(broker.url) as client:
        assert client.topic_exists("t") is False
        client.create_topic("t")
        assert client.topic_exists("t") is True
        assert [client.delete_topic("t") for _ in range(2)] == [True, False]


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_producers_and_consumers_are_registered_and_deleted(broker: PortalBroker, kind: str) -> None:
    with PortalClient(broker.url) as client:
        exists, create = getattr(client, f"{kind}_exists"), getattr(client, f"create_{kind}")
        delete = getattr(client, f"delete_{kind}")
        assert exists("p") is False
        create("p")
        assert exists("p") is True
        assert [delete("p") for _ in range(2)] == [True, False]


def test_a_live_broker_is_found(broker: PortalBroker) -> None:
    with PortalClient([NOBODY, broker.url]) as client:
        client.create_topic("t")
        assert client.topic_exists("t")


def test_names_are_checked_before_any_request(broker: PortalBroker) -> None:
    with PortalClient(broker.url) as client:
        for call in (client.create_topic, client.delete_topic, client.create_producer, client.consumer_exists):
            with pytest.raises(InvalidRequest):
                call("a/b")
        with pytest.raises(InvalidRequest):
            client.read("a/b", consumer_id="c")
    for kind in (PortalProducer, PortalConsumer):
        with pytest.raises(InvalidRequest):
            kind("a/b", bootstrap=broker.url)
    assert broker.calls == []


# --- the producer ----------------------------------------------------------------------------------------------------


def test_a_publish_is_repeated_until_it_is_acked_and_is_one_message(broker: PortalBroker) -> None:
    steps = [hang_up, lose_answer, refuse(503, "unavailable"), refuse(503, "not_enough_replicas")]
    broker.script("POST", "/publish", steps)
    with PortalProducer("t", "sensor", broker.url) as producer:
        assert producer.publish("one") == 0
        assert producer.publish("two") == 1
    assert texts(broker) == ["one", "two"]
    assert len(broker.calls_of("POST", "/publish")) == len(steps) + 2
    assert broker.programs == {"sensor"}


def test_a_producer_that_restarts_under_its_name_repeats_nothing(broker: PortalBroker) -> None:
    for _ in range(2):
        with PortalProducer("t", "sensor", broker.url) as producer:
            producer.publish("alike")
    assert texts(broker) == ["alike", "alike"]


@pytest.mark.parametrize("message", ["text", "", {"celsius": 21.5}, [1, None], 7, None, b"\xff\x00", b""])
def test_any_message_arrives_as_it_was_published(broker: PortalBroker, message: Any) -> None:
    with PortalProducer("t", bootstrap=broker.url) as producer, PortalConsumer("t", bootstrap=broker.url) as consumer:
        producer.publish(message)
        read = consumer.read()
        assert read is not None
        assert (read.message, read.topic, read.offset, read.timestamp_ms) == (message, "t", 0, 17)


def test_a_brokers_refusal_is_raised_at_once(broker: PortalBroker) -> None:
    broker.script("POST", "/publish", [refuse(413, "message_too_large")])
    with PortalProducer("t", bootstrap=broker.url) as producer:
        with pytest.raises(errors.MessageTooLarge):
            producer.publish("x")
        with pytest.raises(TypeError):
            producer.publish(object())
        assert producer.publish("y") == 0


def test_retries_end_with_the_given_time() -> None:
    with PortalProducer("t", bootstrap=NOBODY, delivery_timeout_s=0.2) as producer, pytest.raises(Unavailable):
        producer.publish("x")


def test_the_token_is_sent(broker: PortalBroker) -> None:
    broker.script("POST", "/producer", [refuse(401, "unauthorized")])
    with PortalProducer("t", "sensor", broker.url, token="s3cret") as producer:
        with pytest.raises(Unauthorized):
            producer.publish("x")
        producer.publish("x")
    assert {call.headers["authorization"] for call in broker.calls} == {"Bearer s3cret"}


# --- the consumer ----------------------------------------------------------------------------------------------------


def filled(broker: PortalBroker, *messages: str) -> None:
    broker.messages["t"] = [{"message": message} for message in messages]


def test_a_message_is_consumed_when_the_next_is_requested(broker: PortalBroker) -> None:
    filled(broker, "a", "b")
    with PortalConsumer("t", "c", broker.url, idle_timeout_s=0) as consumer:
        assert next(consumer).message == "a"
        assert broker.turn == {}
        assert next(consumer).message == "b"
        assert broker.turn == {"t": 1}
        assert list(consumer) == []
    assert broker.turn == {"t": 2}
    assert broker.programs == {"c"}


def test_a_consumer_that_dies_with_a_message_in_hand_loses_nothing(broker: PortalBroker) -> None:
    filled(broker, "a")

    def fail() -> None:
        with PortalConsumer("t", bootstrap=broker.url) as consumer:
            for message in consumer:
                raise RuntimeError(message.message)

    with pytest.raises(RuntimeError, match="a"):
        fail()
    with PortalConsumer("t", bootstrap=broker.url, idle_timeout_s=0) as consumer:
        assert [message.message for message in consumer] == ["a"]


def test_a_consume_whose_answer_is_lost_consumes_one_message(broker: PortalBroker) -> None:
    filled(broker, "a", "b", "c")
    broker.script("POST", "/consume", [lose_answer, hang_up])
    with PortalConsumer("t", bootstrap=broker.url, idle_timeout_s=0) as consumer:
        assert [message.message for message in consumer] == ["a", "b", "c"]


def test_a_consumer_continues_when_another_has_consumed_its_message(broker: PortalBroker) -> None:
    filled(broker, "a", "b")
    with PortalConsumer("t", bootstrap=broker.url, idle_timeout_s=0) as slow:
        held = next(slow)
        with PortalConsumer("t", bootstrap=broker.url, idle_timeout_s=0) as quick:
            assert next(quick) == held, "every consumer sees the current message"
            assert quick.consume(held) is True
        assert next(slow).message == "b"


def test_competing_consumers_get_only_messages_that_they_consumed(broker: PortalBroker) -> None:
    numbers = [str(number) for number in range(40)]
    filled(broker, *numbers)
    won: list[list[str]] = [[], []]

    def compete(share: list[str]) -> None:
        with PortalConsumer("t", bootstrap=broker.url, delivery="at_most_once", idle_timeout_s=0) as consumer:
            share += [message.message for message in consumer]

    threads = [threading.Thread(target=compete, args=(share,)) for share in won]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(won[0] + won[1], key=int) == numbers


def test_a_sleeping_consumer_is_woken_by_a_message(broker: PortalBroker) -> None:
    got: list[str] = []
    with PortalConsumer("t", bootstrap=broker.url) as consumer:
        thread = threading.Thread(target=lambda: got.append(next(consumer).message))
        thread.start()
        broker.wait_for(lambda: bool(broker.calls_of("POST", "/read")))
        with PortalProducer("t", bootstrap=broker.url) as producer:
            producer.publish("wake up")
        thread.join(10)
        assert got == ["wake up"]


def test_a_missing_topic_is_created(broker: PortalBroker) -> None:
    with PortalConsumer("t", bootstrap=broker.url) as consumer:
        assert consumer.read() is None
    assert broker.messages == {"t": []}


def test_a_deleted_topic_ends_the_iteration_with_a_message_in_hand(broker: PortalBroker) -> None:
    filled(broker, "a")
    with PortalConsumer("t", bootstrap=broker.url, idle_timeout_s=0) as consumer:
        assert next(consumer).message == "a"
        del broker.messages["t"]
        assert list(consumer) == [], "the topic has no message left"
    assert broker.messages == {"t": []}


def test_generated_names_are_not_registered(broker: PortalBroker) -> None:
    with PortalProducer("t", bootstrap=broker.url) as producer, PortalConsumer("t", bootstrap=broker.url) as consumer:
        producer.publish("a")
        assert consumer.read() is not None
    assert broker.programs == set(), "each start would leave a registration behind for ever"


def test_a_consumer_does_not_create_a_topic_that_brokers_do_not(broker: PortalBroker) -> None:
    broker.makes_topics = False
    with PortalConsumer("t", bootstrap=broker.url) as consumer:
        for _ in range(2):
            with pytest.raises(TopicNotFound):
                consumer.read()
        assert broker.messages == {}
        broker.messages["t"] = []
        assert consumer.read() is None


def test_a_topic_deleted_while_its_consumer_sleeps_is_created_again(broker: PortalBroker) -> None:
    broker.script("POST", "/read", [lambda broker, call: Reply(204), refuse(404, "topic_not_found")])
    with PortalConsumer("t", bootstrap=broker.url) as consumer:
        reading = threading.Thread(target=lambda: consumer.read(wait_s=60))
        reading.start()
        broker.wait_for(lambda: broker.messages == {"t": []})
        publisher = PortalProducer("t", bootstrap=broker.url)
        publisher.publish("wakes it up")
        reading.join(10)
        publisher.close()


def test_close_ends_an_iteration_that_waits(broker: PortalBroker) -> None:
    consumer = PortalConsumer("t", bootstrap=broker.url)
    left: list[list[Any]] = []
    thread = threading.Thread(target=lambda: left.append(list(consumer)))
    thread.start()
    broker.wait_for(lambda: bool(broker.calls_of("POST", "/read")))
    consumer.close()
    thread.join(10)
    assert left == [[]]
    assert list(consumer) == []


def test_invalid_arguments_are_refused(broker: PortalBroker) -> None:
    with pytest.raises(ValueError, match="at_least_once"):
        PortalConsumer("t", bootstrap=broker.url, delivery="exactly_once")  # type: ignore[arg-type]
    filled(broker, "a")
    with PortalConsumer("t", bootstrap=broker.url) as one, PortalConsumer("u", bootstrap=broker.url) as other:
        message = one.read()
        assert message is not None
        with pytest.raises(ValueError, match="'u'"):
            other.consume(message)


# --- the design notes ------------------------------------------------------------------------------------------------


def test_a_published_message_reaches_a_subscriber_and_is_acked_with_the_next(broker: PortalBroker) -> None:
    for payload in ({"n": 1}, "text", b"\xff"):
        publishMessage("t", payload, bootstrap=broker.url, key="k")
    messages = subscribeMessage("t", group="g", bootstrap=broker.url, idle_timeout_s=0)
    assert next(messages).json() == {"n": 1}
    assert broker.done == set()
    assert [message.value for message in messages] == [b"text", b"\xff"]
    assert broker.done == {("t", 0, offset) for offset in range(3)}
    assert broker.topics["t"][0][0].key == "k"


def test_an_abandoned_subscription_returns_its_message(broker: PortalBroker) -> None:
    publishMessage("t", "a", bootstrap=broker.url)
    for message in subscribeMessage("t", bootstrap=broker.url):
        assert message.text == "a"
        break
    broker.wait_for(lambda: not broker.leased)
    assert broker.done == set()


def test_invalid_options_of_a_subscriber_fail_in_its_call(broker: PortalBroker) -> None:
    with pytest.raises(ValueError, match="delivery"):
        subscribeMessage("t", bootstrap=broker.url, delivery="perhaps")
    with pytest.raises(InvalidRequest):
        publishMessage("a/b", "x", bootstrap=broker.url)


def test_one_producer_serves_a_cluster_and_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds, "PRODUCERS_MAX", 2)
    with PortalBroker() as first, PortalBroker() as second, PortalBroker() as third:
        brokers = (first, second, third)
        for number in range(4):
            for each in brokers:
                publishMessage("t", str(number), bootstrap=each.url)
                publishMessage("t", str(number), bootstrap=[each.url])
        assert len(seeds._shared) <= 2
        for each in brokers:
            assert len(each.topics["t"][0]) == 8
    with PortalBroker() as alone:
        for number in range(5):
            publishMessage("t", str(number), bootstrap=alone.url)
        assert len(alone.calls_of("POST", "/v1/producers")) == 1


def test_the_cluster_of_the_environment_is_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with PortalBroker() as first, PortalBroker() as second:
        for each in (first, second):
            monkeypatch.setenv("PORTALMQ_URL", each.url)
            publishMessage("t", "x")
            assert len(each.topics["t"][0]) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_process_publishes_by_its_own_producer(broker: PortalBroker) -> None:
    publishMessage("t", "parent", bootstrap=broker.url)
    child = os.fork()
    if child == 0:
        try:
            publishMessage("t", "child", bootstrap=broker.url, timeout_s=20)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert broker.values("t") == [b"parent", b"child"]


def test_base64_is_that_of_the_http_api() -> None:
    """/publish accepts what /read shows for bytes."""
    with PortalBroker() as broker, PortalClient(broker.url) as client:
        client.publish("t", bytearray(b"\xff"), producer_id="p", sequence="1")
        assert broker.messages["t"] == [{"message_base64": base64.b64encode(b"\xff").decode()}]
