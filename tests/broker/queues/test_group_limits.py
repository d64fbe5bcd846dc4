"""Limits of a group with a real broker in this process: who waits, and what wakes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.domain import HandClock, records, running

from portalmq import Admin, Consumer, InvalidRequest, Message, Producer, wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.group_registry import LIMITS
from portalmq.errors import Unavailable
from portalmq.testing import InMemoryBroker

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def admin(broker: InMemoryBroker) -> Iterator[Admin]:
    with Admin(transport=broker.transport) as admin:
        yield admin


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name).replace("[", "-").replace("]", "")


@pytest.fixture
def consumer(broker: InMemoryBroker, topic: str) -> Iterator[Consumer]:
    with Consumer(topic, group=topic, transport=broker.transport, manual_ack=True, max_messages=1) as consumer:
        yield consumer


def send(broker: InMemoryBroker, topic: str, count: int, **options: Any) -> None:
    with Producer(transport=broker.transport) as producer:
        for number in range(count):
            producer.send(topic, number, **options)


def poll(consumer: Consumer) -> list[Message]:
    """Receive what there is at once."""
    return consumer.poll(0.01, 100)


class Parked:
    """A receive of another consumer that waits at the broker."""

    def __init__(self, broker: InMemoryBroker, topic: str) -> None:
        self._found: list[Message] = []
        self._consumer = Consumer(topic, group=topic, transport=broker.transport, manual_ack=True)
        self._thread = threading.Thread(target=lambda: self._found.extend(self._consumer.poll(WITHIN_S, 1)))
        self._thread.start()

    def woken(self) -> list[Message]:
        self._thread.join(WITHIN_S)
        found = list(self._found)
        self._consumer.release(found)
        self._consumer.close()
        return found


ENDS: dict[str, Callable[[InMemoryBroker, Admin, Consumer, list[Message]], object]] = {
    "ack": lambda broker, admin, consumer, messages: consumer.ack(messages[0]),
    "nack": lambda broker, admin, consumer, messages: consumer.nack(messages[0]),
    "delayed-nack": lambda broker, admin, consumer, messages: consumer.nack(messages[0], 3600),
    "release": lambda broker, admin, consumer, messages: consumer.release(messages[0]),
    "reject": lambda broker, admin, consumer, messages: consumer.reject(messages[0]),
    "commit": lambda broker, admin, consumer, messages: consumer.commit_with(messages[0], []),
    "lease-end": lambda broker, admin, consumer, messages: broker.advance(31),
    "higher-limit": lambda broker, admin, consumer, messages: admin.create_group(consumer.group, max_in_flight=3),
    "no-limit": lambda broker, admin, consumer, messages: admin.create_group(consumer.group, max_in_flight=None),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_waiting_receive_wakes_when_a_place_is_free(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer, end: str
) -> None:
    admin.create_group(topic, max_in_flight=2)
    send(broker, topic, 5)
    messages = poll(consumer)
    assert [message.json() for message in messages] == [0, 1]
    assert poll(consumer) == []
    parked = Parked(broker, topic)
    ENDS[end](broker, admin, consumer, messages)
    assert len(parked.woken()) == 1


def test_a_rate_lets_a_burst_through_and_then_one_at_a_time(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer
) -> None:
    admin.create_group(topic, rate_per_s=0.01, rate_burst=3)
    send(broker, topic, 10)
    messages = poll(consumer)
    assert [message.json() for message in messages] == [0, 1, 2]
    assert poll(consumer) == []
    consumer.ack(messages)
    parked = Parked(broker, topic)
    broker.advance(101)
    assert [message.json() for message in parked.woken()] == [3]


def test_a_waiting_receive_wakes_by_itself_when_the_rate_allows_it(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer
) -> None:
    admin.create_group(topic, rate_per_s=5, rate_burst=1)
    send(broker, topic, 3)
    found = [message.json() for _ in range(3) for message in consumer.poll(WITHIN_S, 1)]
    assert found == [0, 1, 2]


def test_redeliveries_count_for_the_rate(broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer) -> None:
    admin.create_group(topic, rate_per_s=0.001, rate_burst=2)
    send(broker, topic, 1)
    for _ in range(2):
        consumer.release(poll(consumer))
    assert poll(consumer) == []


def test_partitions_share_the_limit(broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer) -> None:
    admin.create_topic(topic, partitions=4)
    admin.create_group(topic, max_in_flight=6)
    for partition in range(4):
        send(broker, topic, 10, partition=partition)
    received = [message for _ in range(20) for message in poll(consumer)]
    shares = [sum(message.partition == partition for message in received) for partition in range(4)]
    assert shares == [2, 2, 1, 1]


def test_a_lower_limit_ends_no_lease(broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer) -> None:
    send(broker, topic, 6)
    first = consumer.poll(WITHIN_S, 4)
    assert len(first) == 4
    admin.create_group(topic, max_in_flight=2)
    assert poll(consumer) == []
    consumer.ack(first[:2])
    assert poll(consumer) == []
    consumer.ack(first[2:3])
    assert len(poll(consumer)) == 1


def test_a_limit_in_the_order_of_keys(broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer) -> None:
    admin.create_group(topic, ordering="key", max_in_flight=2)
    for key in ("a", "b", "c"):
        send(broker, topic, 2, key=key)
    first = poll(consumer)
    assert [message.key for message in first] == [b"a", b"b"]
    consumer.ack(first)
    assert [(message.key, message.json()) for message in consumer.poll(WITHIN_S, 10)] == [(b"a", 1), (b"b", 1)]


def test_a_limit_for_each_key(broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer) -> None:
    admin.create_group(topic, max_in_flight_per_key=2)
    for key in ("a", "b", None):
        send(broker, topic, 4, key=key)
    first = poll(consumer)
    assert [(message.key, message.json()) for message in first] == [
        *((b"a", 0), (b"a", 1), (b"b", 0), (b"b", 1), (None, 0), (None, 1), (None, 2), (None, 3))
    ]
    parked = Parked(broker, topic)
    consumer.ack(first[1])
    (woken,) = parked.woken()
    assert (woken.key, woken.json()) == (b"a", 2)
    parked = Parked(broker, topic)
    admin.create_group(topic, max_in_flight_per_key=4)
    assert len(parked.woken()) == 1


def test_a_rate_for_each_key(broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer) -> None:
    admin.create_group(topic, rate_per_s_per_key=0.01, rate_burst_per_key=2)
    for key in ("a", None, "b"):
        send(broker, topic, 4, key=key)
    first = poll(consumer)
    assert [(message.key, message.json()) for message in first] == [
        *((b"a", 0), (b"a", 1), (None, 0), (None, 1), (None, 2), (None, 3), (b"b", 0), (b"b", 1))
    ]
    consumer.ack(first)
    assert poll(consumer) == [], "an ack gives no token"
    parked = Parked(broker, topic)
    broker.advance(101)
    (woken,) = parked.woken()
    assert (woken.key, woken.json()) == (b"a", 2)
    assert poll(consumer) == [], "what the other consumer fetched and gave back took the tokens of its keys"
    broker.advance(1_000)
    assert [(message.key, message.json()) for message in poll(consumer)] == [(b"a", 2), (b"a", 3), (b"b", 2), (b"b", 3)]


def test_a_waiting_receive_wakes_by_itself_when_the_rate_of_a_key_allows_it(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer
) -> None:
    admin.create_group(topic, rate_per_s_per_key=5, rate_burst_per_key=1, ordering="key")
    send(broker, topic, 3, key="a")
    found = []
    for _ in range(3):
        (message,) = consumer.poll(WITHIN_S, 1)
        consumer.ack(message)
        found.append(message.json())
    assert found == [0, 1, 2]


def test_a_rate_for_each_key_counts_redeliveries_and_may_change(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer
) -> None:
    admin.create_group(topic, rate_per_s_per_key=0.001, rate_burst_per_key=2)
    send(broker, topic, 2, key="a")
    consumer.nack(consumer.poll(WITHIN_S, 1))
    consumer.release(consumer.poll(WITHIN_S, 1))
    assert poll(consumer) == []
    send(broker, topic, 1, key="b")
    assert [message.key for message in poll(consumer)] == [b"b"]
    parked = Parked(broker, topic)
    admin.create_group(topic, rate_per_s_per_key=1_000)
    assert len(parked.woken()) == 1


def test_a_rate_for_each_key_with_delivery_at_most_once(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer
) -> None:
    admin.create_group(topic, delivery="at_most_once", rate_per_s_per_key=0.01, rate_burst_per_key=1)
    send(broker, topic, 3, key="a")
    assert [message.json() for message in poll(consumer)] == [0]
    assert poll(consumer) == []
    broker.advance(101)
    assert [message.json() for message in poll(consumer)] == [1]


@pytest.mark.parametrize(
    "limits", [{"max_in_flight_per_key": 2}, {"rate_per_s_per_key": 0.01, "rate_burst_per_key": 2}]
)
def test_delayed_messages_under_a_limit_for_each_key(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer, limits: dict[str, Any]
) -> None:
    """Each is delivered once, after it is due, and the limit holds for fresh, delayed and returned ones together."""
    admin.create_group(topic, **limits)
    send(broker, topic, 3, key="a", delay_s=40)
    send(broker, topic, 3, key="a")
    send(broker, topic, 3, key="b", delay_s=40)
    found: list[tuple[bytes | None, str]] = []
    late = 0
    for round_ in range(60):
        messages = poll(consumer)
        for key in (b"a", b"b"):
            assert sum(message.key == key for message in messages) <= 2
        if round_ == 1 and messages:
            consumer.nack(messages[:1])
            messages = messages[1:]
        found += [(message.key, message.id) for message in messages]
        late += sum(message.deliver_at_ms is not None for message in messages)
        assert late == 0 or round_ * 10_000 >= 40_000
        consumer.ack(messages)
        broker.advance(10)
    assert len(found) == len(set(found)) == 9


def test_whether_keys_are_limited_is_fixed(admin: Admin, topic: str) -> None:
    admin.create_group(topic)
    with pytest.raises(InvalidRequest, match="made without max_in_flight_per_key"):
        admin.create_group(topic, max_in_flight_per_key=2)
    admin.create_group(f"{topic}-limited", max_in_flight_per_key=2)
    admin.create_group(f"{topic}-limited", max_in_flight_per_key=3, max_deliveries=2)
    with pytest.raises(InvalidRequest, match="made with max_in_flight_per_key"):
        admin.create_group(f"{topic}-limited", max_in_flight_per_key=None)
    with pytest.raises(InvalidRequest, match="made without max_in_flight_per_key or rate_per_s_per_key"):
        admin.create_group(topic, rate_per_s_per_key=2)
    admin.create_group(f"{topic}-limited", rate_per_s_per_key=3, max_in_flight_per_key=None)
    with pytest.raises(InvalidRequest, match="made with max_in_flight_per_key"):
        admin.create_group(f"{topic}-limited", rate_per_s_per_key=None)
    with pytest.raises(InvalidRequest, match="one message of a key at a time"):
        admin.create_group(f"{topic}-ordered", ordering="key", max_in_flight_per_key=2)


def test_a_group_that_exists_in_key_order_is_named_when_its_keys_shall_be_limited(admin: Admin, topic: str) -> None:
    admin.create_group(topic, ordering="key")
    with pytest.raises(InvalidRequest, match=f"group '{topic}' exists with ordering 'key'"):
        admin.create_group(topic, max_in_flight_per_key=2)


def test_priorities_keep_their_order_under_a_limit(
    broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer
) -> None:
    admin.create_group(topic, max_in_flight=1)
    send(broker, topic, 2)
    send(broker, topic, 1, priority=9)
    found = []
    for _ in range(3):
        (message,) = consumer.poll(WITHIN_S, 10)
        found.append((message.priority, message.json()))
        consumer.ack(message)
    assert found == [(9, 0), (0, 0), (0, 1)]


def test_a_move_passes_the_limit(broker: InMemoryBroker, admin: Admin, topic: str) -> None:
    admin.create_group(topic, max_in_flight=1, rate_per_s=0.001)
    send(broker, topic, 20)
    assert admin.move(topic, topic, f"{topic}.moved").moved == 20


def test_a_move_passes_the_rate_of_a_key(broker: InMemoryBroker, admin: Admin, topic: str, consumer: Consumer) -> None:
    admin.create_group(topic, rate_per_s_per_key=0.001)
    send(broker, topic, 20, key="a")
    assert len(poll(consumer)) == 1
    assert admin.move(topic, topic, f"{topic}.moved").moved == 19


def test_only_queue_groups_have_limits(admin: Admin, topic: str) -> None:
    for setting in LIMITS:
        with pytest.raises(InvalidRequest, match=f"{setting} is for queue groups"):
            admin.create_group(topic, mode="stream", **{setting: 1})
        for wrong in (0, -1, "many"):
            with pytest.raises(InvalidRequest, match=setting):
                admin.create_group(topic, **{setting: wrong})


def test_a_restarted_broker_counts_the_leases_in_its_log(tmp_path: Path) -> None:
    clock = HandClock()
    request = wire.ReceiveRequest(topics=["t"], max_messages=10)
    with running(tmp_path, clock) as first:
        first.broker.put_group("g", {"max_in_flight": 3})
        first.broker.produce("t", ProduceRequest(records(*map(str, range(10)))))
        assert len(first.broker.receive_handler.receive("g", request, None)) == 3
    with running(tmp_path, clock) as second:
        assert second.broker.receive_handler.receive("g", request, None) == []
        clock.advance(30_001)
        assert [each.offset for each in second.broker.receive_handler.receive("g", request, None)] == [1, 2, 3]


def test_a_restarted_broker_gives_each_key_one_burst_more(tmp_path: Path) -> None:
    clock = HandClock()
    request = wire.ReceiveRequest(topics=["t"], max_messages=10)
    found = []
    with running(tmp_path, clock) as first:
        first.broker.put_group("g", {"rate_per_s_per_key": 0.1, "rate_burst_per_key": 2})
        first.broker.produce("t", ProduceRequest(records(*map(str, range(6)), key=b"a")))
        found += [each.offset for each in first.broker.receive_handler.receive("g", request, None)]
        assert first.broker.receive_handler.receive("g", request, None) == []
    with running(tmp_path, clock) as second:
        found += [each.offset for each in second.broker.receive_handler.receive("g", request, None)]
        clock.advance(10_001)
        found += [each.offset for each in second.broker.receive_handler.receive("g", request, None)]
    assert found == [1, 2, 3, 4, 5], "offsets: the first record begins the leader's epoch"


def test_a_group_that_is_put_and_not_described_is_of_unknown_outcome(tmp_path, monkeypatch):
    def fail(*_arguments: object, **_more: object) -> None:
        raise Unavailable("its leader cannot be asked")

    with running(tmp_path) as fixture:
        with monkeypatch.context() as patch:
            patch.setattr(fixture.broker.group_admin, "describe", fail)
            with pytest.raises(Unavailable) as told:
                fixture.broker.put_group("g", {})
        assert told.value.outcome == "unknown"
        assert fixture.broker.describe_group("g").group == "g"
