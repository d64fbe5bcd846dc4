"""The messages that a queue group has not finished, one by one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.domain import Fixture, records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.settle import SettleRequest
from portalmq.errors import GroupModeMismatch, PartitionNotFound, TopicNotFound


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=2))
        yield started


def produce(fixture: Fixture, *values: str, partition: int = 0, **more: object) -> None:
    fixture.broker.produce("t", ProduceRequest(records(*values, **more), partition=partition))


def receive(fixture: Fixture, most: int = 1) -> list[str]:
    request = wire.ReceiveRequest(["t"], max_messages=most, wait_ms=0)
    return [each.receipt for each in fixture.broker.receive_handler.receive("g", request, None)]


def states(fixture: Fixture, group: str = "g") -> list[tuple[str, str, int]]:
    found = fixture.broker.unfinished.messages(group, "t")
    return [(each.stored.record.value.decode(), each.state, each.deliveries) for each in found]


def test_an_unused_group_has_finished_nothing(fixture: Fixture) -> None:
    produce(fixture, "a", "b")
    produce(fixture, "c", partition=1)
    assert states(fixture, "nobody") == [("a", "ready", 0), ("b", "ready", 0), ("c", "ready", 0)]


def test_each_message_has_its_state(fixture: Fixture) -> None:
    produce(fixture, "acked", "nacked", "held", "ready")
    first, second, _ = (receive(fixture)[0] for _ in range(3))
    fixture.broker.settlement.settle("g", [first])
    fixture.broker.settlement.settle("g", [second], SettleRequest("nack", 5_000))
    assert states(fixture) == [("nacked", "scheduled", 1), ("held", "in_flight", 1), ("ready", "ready", 0)]
    fixture.clock.advance(30_000)
    assert states(fixture) == [("nacked", "ready", 1), ("held", "ready", 1), ("ready", "ready", 0)]


def test_priorities_and_delays_are_in_it(fixture: Fixture) -> None:
    later = fixture.clock.wall_ms() + 60_000
    produce(fixture, "later", deliver_at_ms=later)
    produce(fixture, "plain")
    produce(fixture, "first", priority=9)
    assert states(fixture) == [("later", "scheduled", 0), ("plain", "ready", 0), ("first", "ready", 0)]
    (receipt,) = receive(fixture)
    fixture.broker.settlement.settle("g", [receipt])
    assert states(fixture) == [("later", "scheduled", 0), ("plain", "ready", 0)]
    assert next(iter(fixture.broker.unfinished.messages("g", "t"))).available_at_ms == later


def test_acked_and_expired_messages_are_not_listed(fixture: Fixture) -> None:
    produce(fixture, "a", "b")
    produce(fixture, "over", expires_at_ms=fixture.clock.wall_ms() + 1_000)
    receive(fixture)
    waiting = {each.stored.record.value: each.stored.offset for each in fixture.broker.unfinished.messages("g", "t")}
    fixture.broker.offset_acks.finish("g", "t", [(0, waiting[b"b"])])
    fixture.clock.advance(1_000)
    assert states(fixture) == [("a", "in_flight", 1)]


def test_many_pages_make_one_list(fixture: Fixture) -> None:
    for begin in range(0, 5_000, 1_000):
        produce(fixture, *(str(number) for number in range(begin, begin + 1_000)))
    assert [value for value, _, _ in states(fixture)] == [str(number) for number in range(5_000)]


def test_bad_requests_are_refused(fixture: Fixture) -> None:
    with pytest.raises(TopicNotFound):
        list(fixture.broker.unfinished.messages("g", "nowhere"))
    fixture.broker.put_group("s", {"mode": "stream"})
    with pytest.raises(GroupModeMismatch):
        list(fixture.broker.unfinished.messages("s", "t"))


def test_a_list_continues_after_a_message(fixture: Fixture) -> None:
    produce(fixture, "a", "b")
    produce(fixture, "c", partition=1)
    seen = list(fixture.broker.unfinished.messages("g", "t"))
    for number, each in enumerate(seen):
        after = (each.stored.partition, each.stored.offset)
        assert list(fixture.broker.unfinished.messages("g", "t", after=after)) == seen[number + 1 :]
    with pytest.raises(PartitionNotFound):
        list(fixture.broker.unfinished.messages("g", "t", after=(9, 9)))
