"""`portalmq.testing.InMemoryBroker`: the real broker's semantics in the process of a test, and time that moves on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from portalmq import Admin, Consumer, InvalidRequest, Message, Producer, StaleReceipt
from portalmq.testing import InMemoryBroker


@pytest.fixture(scope="module")
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as broker:
        yield broker


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)[:150]


def send(broker: InMemoryBroker, topic: str, *values: object, **options: object) -> None:
    with Producer(transport=broker.transport) as producer:
        for value in values:
            producer.send(topic, value, **options)  # type: ignore[arg-type]


def consumer(broker: InMemoryBroker, topic: str, **options: object) -> Consumer:
    return Consumer(topic, group=topic, transport=broker.transport, idle_timeout_s=0.05, **options)  # type: ignore[arg-type]


def value_of(message: Message) -> object:
    return message.json() if "json" in message.content_type else message.text


def received(broker: InMemoryBroker, topic: str, **options: object) -> list[object]:
    with consumer(broker, topic, **options) as each:
        return [value_of(message) for message in each]


def test_messages_are_received_in_order(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, 1, 2, 3)
    assert received(broker, topic) == [1, 2, 3]
    assert received(broker, topic) == []


def test_a_lease_ends_when_time_moves_on(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, "a")
    with consumer(broker, topic, manual_ack=True, visibility_timeout_s=30) as first:
        (message,) = first.poll(5)
        assert received(broker, topic) == []
        broker.advance(31)
        with consumer(broker, topic, manual_ack=True) as second:
            (again,) = second.poll(5)
            assert again.delivery_count == 2
            with pytest.raises(StaleReceipt):
                first.ack(message)
            second.ack(again)


def test_a_waiting_receive_gets_a_delayed_message_when_time_moves_on(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, "later", delay_s=3600)
    assert received(broker, topic) == []
    found: list[object] = []
    with consumer(broker, topic) as waiting:
        thread = threading.Thread(target=lambda: found.extend(map(value_of, waiting.poll(30))))
        thread.start()
        broker.advance(3601)
        thread.join(30)
    assert found == ["later"]


def test_a_message_expires(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, "short", ttl_s=60)
    broker.advance(61)
    assert received(broker, topic) == []


def test_greater_priorities_come_first(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, "low")
    send(broker, topic, "high", priority=9)
    assert received(broker, topic) == ["high", "low"]


def test_a_message_becomes_a_dead_letter_and_is_redriven(broker: InMemoryBroker, topic: str) -> None:
    with Admin(transport=broker.transport) as admin:
        admin.create_group(topic, max_deliveries=1)
        send(broker, topic, "bad")
        with consumer(broker, topic, manual_ack=True) as each:
            each.nack(each.poll(5), reason="no good")
        (dead,) = admin.dead_letters(topic, topic)
        assert dead.headers["portalmq-dead-reason"] == "no good"
        assert admin.redrive(topic, topic).redriven == 1
    assert received(broker, topic) == ["bad"]


def test_a_rejected_message_is_a_dead_letter_at_once(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, 1, 2)
    with consumer(broker, topic, manual_ack=True) as each, Admin(transport=broker.transport) as admin:
        first, second = each.poll(5)
        each.reject(first, "not for us")
        (dead,) = admin.dead_letters(topic, topic)
        assert (dead.json(), dead.headers["portalmq-dead-reason"]) == (1, "not for us")
        assert dead.headers["portalmq-delivery-count"] == "1"
        each.ack(second)
        with pytest.raises(StaleReceipt):
            each.reject(first)
        assert each.poll(0.01) == []


def test_a_dead_nack_with_a_delay_is_refused(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, 1)
    with consumer(broker, topic, manual_ack=True) as each:
        (message,) = each.poll(5)
        transport = broker.transport
        for more in ({"delay_ms": 1}, {"unseen": True}):
            body = {"receipts": [message.receipt], "dead": True, **more}
            with pytest.raises(InvalidRequest, match="dead"):
                transport.send_json("POST", f"/v1/groups/{topic}/nack", body, object)
        each.ack(message)


def test_a_released_message_comes_back_uncounted(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, 1)
    with consumer(broker, topic, manual_ack=True) as each:
        for _ in range(3):
            (message,) = each.poll(5)
            assert message.delivery_count == 1
            each.release(message)


def test_one_message_of_a_key_is_in_flight(broker: InMemoryBroker, topic: str) -> None:
    with Admin(transport=broker.transport) as admin:
        admin.create_group(topic, ordering="key")
    send(broker, topic, 1, 2, key="k")
    with consumer(broker, topic, manual_ack=True) as each:
        (first,) = each.poll(5)
        assert each.poll(0.01) == []
        each.ack(first)
        assert [message.json() for message in each.poll(5)] == [2]


def test_a_stream_reads_from_its_committed_offset(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, 1, 2)
    assert received(broker, topic, mode="stream") == [1, 2]
    send(broker, topic, 3)
    assert received(broker, topic, mode="stream") == [3]


def test_time_does_not_move_back(broker: InMemoryBroker) -> None:
    with pytest.raises(ValueError, match="moves on"):
        broker.advance(-1)


def test_two_brokers_share_nothing(broker: InMemoryBroker, topic: str) -> None:
    send(broker, topic, 1)
    with InMemoryBroker() as other:
        assert received(other, topic) == []
        assert other.url != broker.url


def test_a_closed_broker_says_so() -> None:
    broker = InMemoryBroker()
    broker.close()
    broker.close()
    with pytest.raises(RuntimeError, match="closed"):
        broker.advance(1)


def test_without_the_packages_of_a_broker_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "portalmq.broker.server.in_process", raising=False)
    monkeypatch.setitem(sys.modules, "gevent", None)
    with pytest.raises(ImportError, match=r"portalmq\[broker\]"):
        InMemoryBroker()
