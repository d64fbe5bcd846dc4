"""Acks of messages by partition and offset, without a receipt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gevent
import pytest
from support.domain import Fixture, HandClock, records, running
from support.held_writes import held_writes

from portalmq import wire
from portalmq.broker.cluster.routing import outcome_of
from portalmq.broker.core.queue import delivery as core_delivery
from portalmq.broker.core.queue.receipts import topic_mark
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues import group_partition
from portalmq.control_plane.state import TopicState
from portalmq.errors import Backpressure, GroupModeMismatch, PartitionNotFound, StorageFull, TopicNotFound, Unavailable


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=2))
        yield started


def produce(fixture: Fixture, *values: str, partition: int = 0) -> list[int]:
    produced = fixture.broker.produce("t", ProduceRequest(records(*values), partition=partition))
    return [each.offset for each in produced]  # type: ignore[union-attr]


def receive(fixture: Fixture, attempt_id: str | None = None, most: int = 10) -> list[str]:
    request = wire.ReceiveRequest(["t"], max_messages=most, wait_ms=0, attempt_id=attempt_id)
    return [each.record.value.decode() for each in fixture.broker.receive_handler.receive("g", request, None)]


def finish(fixture: Fixture, *places: tuple[int, int], holder: str | None = None) -> list[object]:
    return list(fixture.broker.offset_acks.finish("g", "t", places, holder=holder))


def test_delivered_messages_are_acked(fixture: Fixture) -> None:
    first, second = produce(fixture, "a", "b")
    assert receive(fixture) == ["a", "b"]
    assert finish(fixture, (0, first)) == [True]
    fixture.clock.advance(31_000)
    assert receive(fixture) == ["b"]
    assert finish(fixture, (0, second)) == [True]
    assert fixture.broker.describe_group("g").lag == 0


def test_messages_acked_before_delivery_are_not_delivered(fixture: Fixture) -> None:
    _, second, _ = produce(fixture, "a", "b", "c")
    assert finish(fixture, (0, second)) == [True]
    assert receive(fixture) == ["a", "c"]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_message_that_is_not_committed_yet_is_not_denied(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    produce(fixture, "a")
    receive(fixture)
    partition = fixture.broker.topics.get("t").local[0]
    with held_writes(monkeypatch, partition) as writes:
        offset = partition.replica.next_offset
        fixture.broker.produce("t", ProduceRequest(records("b"), partition=0, acks="none"))
        acking = gevent.spawn(outcome_of, finish, fixture, (0, offset))
        gevent.idle()
        assert not acking.ready()
        if is_refused:
            writes.refuse()
            assert isinstance(acking.get(), StorageFull)
        else:
            writes.let_through()
            assert acking.get() == [True]


def test_an_ack_may_be_repeated(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    receive(fixture)
    assert finish(fixture, (0, first)) == [True]
    assert finish(fixture, (0, first)) == [True]


def test_an_offset_without_a_message_is_not_acked(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    assert finish(fixture, (0, first + 100), (1, 5), (0, -1)) == [False, False, False]
    assert finish(fixture, (0, first - 1)) == [False], "the record that begins the leader's epoch"


def test_a_leader_that_may_be_deposed_denies_no_message_that_its_log_lacks(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pass_by(seconds: float) -> None:
        fixture.clock.advance(round(1_000 * seconds))

    (first,) = produce(fixture, "a")
    monkeypatch.setattr(fixture.broker.leaders, "_patience_s", 0.0)  # a refusal is not retried
    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=pass_by))
    monkeypatch.setattr(PartitionReplica, "led_at", lambda replica, then_ms: False)
    with pytest.raises(Unavailable, match="do not vouch"):
        finish(fixture, (0, first + 100))
    assert finish(fixture, (0, first)) == [True]


def test_verdicts_of_several_partitions_are_in_order(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    (other,) = produce(fixture, "b", partition=1)
    assert finish(fixture, (1, other), (0, 999), (0, first)) == [True, False, True]
    assert receive(fixture) == []


def test_with_a_holder_only_its_messages_are_acked(fixture: Fixture) -> None:
    first, second = produce(fixture, "a", "b")
    assert receive(fixture, "7:one", most=1) == ["a"]
    assert receive(fixture, "70:two", most=1) == ["b"]
    assert finish(fixture, (0, first), (0, second), holder="7") == [True, False]
    assert finish(fixture, (0, first), holder="7") == [True], "a repeat by its holder"
    assert finish(fixture, (0, first), holder="70") == [False]


def test_a_holder_whose_lease_has_ended_acks_nothing(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    receive(fixture, "7:one")
    fixture.clock.advance(30_001)
    assert finish(fixture, (0, first), holder="7") == [False]
    assert receive(fixture, "8:two") == ["a"]
    assert finish(fixture, (0, first), holder="7") == [False]
    assert finish(fixture, (0, first), holder="8") == [True]


def test_the_holders_of_messages_survive_a_restart(tmp_path: Path) -> None:
    clock = HandClock()
    with running(tmp_path, clock) as before:
        before.broker.create_topic("t", wire.CreateTopic(partitions=1))
        (first,) = produce(before, "a")
        receive(before, "7:one")
    with running(tmp_path, clock) as after:
        assert finish(after, (0, first), holder="8") == [False]
        assert finish(after, (0, first), holder="7") == [True]
        clock.advance(31_000)
        assert receive(after) == []


def test_a_holder_is_known_until_its_lease_ends_whatever_others_receive(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_delivery, "ATTEMPTS_MAX", 3)
    (first, *_) = produce(fixture, "a", *[str(number) for number in range(10)])
    assert receive(fixture, "7:one", most=1) == ["a"]
    for number in range(10):
        assert receive(fixture, f"8:{number}", most=1) == [str(number)]
    fixture.clock.advance(29_000)
    assert finish(fixture, (0, first), holder="8") == [False]
    assert finish(fixture, (0, first), holder="7") == [True]
    assert fixture.broker.describe_group("g").lag == 10


def test_an_offset_with_the_mark_of_an_earlier_topic_is_not_acked(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    old = fixture.broker.offset_acks.mark("t")
    fixture.broker.delete_topic("t")
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    assert produce(fixture, "b") == [first]
    mark = fixture.broker.offset_acks.mark("t")
    places = [(0, first), (9, 0), (0, first)]
    assert list(fixture.broker.offset_acks.finish("g", "t", places[:2], marks=[old, old])) == [False, False]
    assert list(fixture.broker.offset_acks.finish("g", "t", places, marks=[old, old, mark])) == [False, False, True]
    assert receive(fixture) == []


def test_a_broker_that_knows_only_the_earlier_topic_is_unavailable(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = produce(fixture, "a")
    stands = TopicState("t", "another id", 2, 2, 1, wire.TopicConfig())
    monkeypatch.setattr(fixture.broker.offset_acks, "_stands", lambda name: stands)
    with pytest.raises(Unavailable) as refused:
        fixture.broker.offset_acks.finish("g", "t", [(0, first)], marks=[topic_mark("another id")])
    assert (refused.value.retryable, refused.value.outcome) == (True, "not_applied")
    assert receive(fixture) == ["a"]


def acked(fixture: Fixture) -> float | None:
    labels = {"topic": "t", "group": "g"}
    return fixture.broker.metrics.registry.get_sample_value("portalmq_messages_acked_total", labels)


def test_each_message_is_counted_once_as_acked_however_often_it_is_done(fixture: Fixture) -> None:
    first, second, third, fourth = produce(fixture, "a", "b", "c", "d")
    request = wire.ReceiveRequest(["t"], max_messages=2, wait_ms=0)
    receipts = [each.receipt for each in fixture.broker.receive_handler.receive("g", request, None)]
    assert fixture.broker.settlement.settle("g", receipts[:1]) == [True]
    assert acked(fixture) == 1
    assert fixture.broker.settlement.settle("g", receipts) == [True, True]
    assert fixture.broker.settlement.settle("g", receipts) == [True, True], "a repeat counts, and is not counted"
    assert acked(fixture) == 2
    assert finish(fixture, (0, first), (0, second), (0, third), (0, third)) == [True] * 4
    assert acked(fixture) == 3, "the third one was acked by its offset, before delivery"
    assert finish(fixture, (0, fourth), (0, third), (0, 999)) == [True, True, False]
    assert acked(fixture) == 4


def test_a_dead_message_is_not_acked_by_its_offset(fixture: Fixture) -> None:
    fixture.broker.put_group("g", {"max_deliveries": 1, "dead_letter_topic": ""})
    (first,) = produce(fixture, "a")
    receive(fixture)
    fixture.clock.advance(31_000)
    assert receive(fixture) == []
    assert finish(fixture, (0, first)) == [False]


def test_bad_requests_are_refused(fixture: Fixture) -> None:
    with pytest.raises(PartitionNotFound):
        finish(fixture, (9, 0))
    with pytest.raises(TopicNotFound):
        fixture.broker.offset_acks.finish("g", "nowhere", [(0, 0)])
    fixture.broker.put_group("s", {"mode": "stream"})
    with pytest.raises(GroupModeMismatch):
        fixture.broker.offset_acks.finish("s", "t", [(0, 0)])


def test_a_holder_loses_messages_that_are_delivered_again_without_an_attempt_id(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    receive(fixture, "7:one")
    fixture.clock.advance(30_001)
    assert receive(fixture) == ["a"], "another holder has its lease now"
    assert finish(fixture, (0, first), holder="7") == [False]


def test_acks_ahead_of_the_cursor_are_not_kept_one_by_one_forever(fixture: Fixture) -> None:
    offsets = produce(fixture, *[str(number) for number in range(3_000)])
    for start in range(0, 3_000, 500):
        assert all(finish(fixture, *[(0, offset) for offset in offsets[start : start + 500]]))
    (at,) = fixture.broker.groups.attached("g")
    assert at.delivery.ahead_count <= 1_000
    assert receive(fixture) == []
    (more,) = produce(fixture, "more")
    assert receive(fixture) == ["more"]
    assert finish(fixture, (0, more)) == [True]


def test_a_group_that_begins_at_the_end_ignores_earlier_messages(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    fixture.broker.put_group("g", {"start": "latest"})
    assert finish(fixture, (0, first)) == [True], "the group never delivers it"
    (second,) = produce(fixture, "b")
    assert receive(fixture) == ["b"]
    assert finish(fixture, (0, second)) == [True]


def test_acks_ahead_of_an_unreceived_message_are_bounded(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_partition, "OUTSTANDING_MAX", 5)
    first, *others = produce(fixture, *"abcdefgh")
    assert all(finish(fixture, *[(0, offset) for offset in others[:5]]))
    with pytest.raises(Backpressure, match="receive"):
        finish(fixture, (0, others[5]))
    assert finish(fixture, (0, others[0])) == [True], "acked already"
    assert receive(fixture, most=1) == ["a"]
    assert finish(fixture, (0, first), (0, others[5])) == [True, True]
    assert receive(fixture) == ["h"]
