"""A producer with invalid options, a full topic, or a name that other producers use."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from support.scripted_broker import ScriptedBroker, lose_answer, refuse

from portalmq import Backpressure, Fenced, MessageTooLarge, Producer

PRODUCE = "/v1/topics/t/messages"
PRODUCERS = "/v1/producers"


def full(**members):
    return refuse(429, "backpressure", retry_after_s=0.01, **members)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"delay_s": -1}, "delay_s"),
        ({"delay_s": float("nan")}, "delay_s"),
        ({"delay_s": 1, "deliver_at": 5.0}, "both"),
        ({"deliver_at": datetime(1969, 1, 1, tzinfo=UTC)}, "deliver_at"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"priority": 32}, "priority"),
        ({"priority": -1}, "priority"),
        ({"priority": "high"}, "priority"),
    ],
)
def test_invalid_times_and_priorities_are_refused_at_the_call(options, what) -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        with pytest.raises(ValueError, match=what):
            producer.send("t", b"x", **options)
        assert broker.calls_of("POST", PRODUCE) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"deliver_at": "2031-01-01T00:00:00Z"}, "deliver_at=.*datetime"),
        ({"delay_s": timedelta(seconds=1)}, "delay_s=.*a number"),
        ({"ttl_s": "1"}, "ttl_s='1' must be a number"),
    ],
)
def test_times_of_another_type_are_refused_with_the_valid_type(options, what) -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer, pytest.raises(TypeError, match=what):
        producer.send("t", b"x", **options)


def test_a_full_topic_is_retried_and_gets_each_message_once() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        broker.script("POST", PRODUCE, [full()] * 5)
        futures = [producer.send("t", b"%d" % number) for number in range(3)]
        assert [future.result(10).offset for future in futures] == [0, 1, 2]
        assert len(broker.calls_of("POST", PRODUCE)) >= 6
        assert broker.values("t") == [b"0", b"1", b"2"]
        assert len(broker.calls_of("POST", PRODUCERS)) == 1, "a batch that was not applied keeps the identity"


def test_a_topic_that_stays_full_fails_the_send_after_the_delivery_timeout() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, delivery_timeout_s=70) as producer:
        broker.script("POST", PRODUCE, [full()] * 1_000)
        sent = producer.send("t", b"x")
        assert sent._batch.deadline == sent._batch.born + 70
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) >= 2)
        sent._batch.deadline = 0.0
        with pytest.raises(Backpressure, match="not delivered within") as late:
            sent.result(20)
        assert late.value.outcome == "not_applied"


def test_a_batch_above_the_backlog_limit_is_sent_in_parts() -> None:
    def at_most_two(broker: ScriptedBroker, call):  # type: ignore[no-untyped-def]
        if len(call.batch().messages) > 2:
            raise MessageTooLarge("at most 2 may wait: split it")
        return broker.work(call)

    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=60_000) as producer:
        broker.script("POST", PRODUCE, [at_most_two] * 100)
        futures = [producer.send("t", b"%d" % number) for number in range(9)]
        producer.flush(10)
        assert [future.result(0).offset for future in futures] == list(range(9))


def test_a_producer_that_requests_a_new_epoch_sends_its_instance() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, producer_name="billing") as producer:
        producer.send("t", b"one").result(10)
        broker.stamps.clear()  # the broker has forgotten the producer
        producer.send("t", b"two").result(10)
        first, second = [call.json() for call in broker.calls_of("POST", PRODUCERS)]
    assert first["name"] == second["name"] == "billing"
    assert first["instance"] == second["instance"] != ""
    assert (first.get("renews", False), second.get("renews", False)) == (False, True)


def test_a_superseded_producer_that_renews_its_epoch_does_not_fence_its_successor() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, producer_name="billing") as zombie:
        zombie.send("t", b"one").result(10)
        broker.script("POST", PRODUCE, [lose_answer, *[refuse(503, "unavailable")] * 1_000])
        sent = zombie.send("t", b"two")
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) >= 3)
        sent._batch.deadline = 0.0
        assert sent.exception(20) is not None
        broker._scripts.clear()
        broker.script("POST", PRODUCERS, [refuse(409, "fenced")])
        with pytest.raises(Fenced) as fenced:
            zombie.send("t", b"three").result(10)
        assert fenced.value.outcome == "not_applied"


def test_an_unnamed_producer_requests_only_an_identity() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", b"one").result(10)
        assert [call.json() for call in broker.calls_of("POST", PRODUCERS)] == [{}]
