"""A queue with one offset that all its consumers share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import gevent
import pytest
from support.domain import Fixture, records, running

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.errors import GroupModeMismatch, IllegalGeneration, PartitionNotFound, TopicNotFound, Unavailable


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=2))
        yield started


def produce(fixture: Fixture, *values: str, partition: int = 0) -> list[int]:
    produced = fixture.broker.produce("t", ProduceRequest(records(*values), partition=partition))
    return [each.offset for each in produced]  # type: ignore[union-attr]


def head(fixture: Fixture, partition: int = 0) -> tuple[int, str] | None:
    stored = fixture.broker.shared_offsets.head("g", "t", partition).message
    return None if stored is None else (stored.offset, stored.record.value.decode())


def advance(fixture: Fixture, offset: int, partition: int = 0) -> bool:
    return fixture.broker.shared_offsets.advance("g", "t", partition, offset)


def test_all_consumers_see_the_same_message_until_it_is_done(fixture: Fixture) -> None:
    first, second = produce(fixture, "a", "b")
    assert head(fixture) == head(fixture) == (first, "a")
    assert advance(fixture, first)
    assert head(fixture) == (second, "b")
    assert advance(fixture, second)
    assert head(fixture) is None


def test_only_the_message_at_the_head_can_be_acked(fixture: Fixture) -> None:
    first, second = produce(fixture, "a", "b")
    assert not advance(fixture, second)
    assert advance(fixture, first)
    assert not advance(fixture, first), "a second time"
    assert not advance(fixture, 999)
    assert head(fixture) == (second, "b")


def test_one_of_many_consumers_ends_a_message(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    ends = [gevent.spawn(advance, fixture, first) for _ in range(20)]
    gevent.joinall(ends, timeout=60, raise_error=True)
    assert sorted(end.value for end in ends) == [False] * 19 + [True]


def test_an_empty_partition_has_no_head(fixture: Fixture) -> None:
    assert head(fixture) is None
    assert head(fixture, 1) is None
    assert not advance(fixture, 0)


def test_control_records_are_passed_over(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    fixture.broker.receive_handler.receive("other", wire.ReceiveRequest(["t"], wait_ms=0), None)
    (second,) = produce(fixture, "b")
    assert second > first + 1
    assert advance(fixture, first)
    assert head(fixture) == (second, "b")


def test_purged_messages_are_not_the_head(fixture: Fixture) -> None:
    _, second = produce(fixture, "a", "b")
    fixture.broker.browser.purge("t", partition=0, before_offset=second)
    assert head(fixture) == (second, "b")


def test_the_offset_survives_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as before:
        before.broker.create_topic("t", wire.CreateTopic(partitions=1))
        first, second = produce(before, "a", "b")
        assert advance(before, first)
    with running(tmp_path) as after:
        assert head(after) == (second, "b")
        assert not advance(after, first)


def test_a_member_of_the_group_moves_the_offset_alone(fixture: Fixture) -> None:
    (first,) = produce(fixture, "a")
    assert head(fixture) == (first, "a")
    fixture.broker.group_coordinators.join("g", contract.JoinRequest(["t"], "m"))
    with pytest.raises(IllegalGeneration):
        advance(fixture, first)


def test_the_first_head_with_a_message_is_found_among_many(fixture: Fixture) -> None:
    def found(*numbers: int) -> tuple[int, int] | None:
        stored = fixture.broker.shared_offsets.first_head("g", "t", numbers).message
        return None if stored is None else (stored.partition, stored.offset)

    assert found(0, 1) is None
    fixture.broker.create_topic("one", wire.CreateTopic())
    assert fixture.broker.shared_offsets.first_head("g", "one", [0]).message is None
    (first,) = produce(fixture, "a", partition=1)
    assert found(0, 1) == found(1, 0) == (1, first)
    assert found(0) is None
    (other,) = produce(fixture, "b", partition=0)
    assert (found(0, 1), found(1, 0)) == ((0, other), (1, first))


def test_a_message_is_found_though_another_partition_cannot_be_asked(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.broker.create_topic("wide", wire.CreateTopic(partitions=3))
    turns = fixture.broker.shared_offsets
    here = turns._here

    def lame(group: object, place: TopicPartition, done: int | None, **more: bool) -> object:
        if place.number == 1:
            raise Unavailable("no leader just now", outcome="not_applied")
        return here(group, place, done, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(turns, "_here", lame)
    monkeypatch.setattr(turns._groups.leaders, "_patience_s", 0.1)
    with pytest.raises(Unavailable):
        turns.first_head("g", "wide", [0, 1, 2])
    monkeypatch.setattr(turns._groups.leaders, "_patience_s", 60)
    produced = fixture.broker.produce("wide", ProduceRequest(records("x"), partition=2))
    message = turns.first_head("g", "wide", [0, 1, 2]).message
    assert message is not None
    assert (message.partition, message.offset) == (2, produced[0].offset)  # type: ignore[union-attr]


def test_waits_for_silent_followers_of_several_partitions_overlap(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture.broker.create_topic("wide", wire.CreateTopic(partitions=6))
    turns = fixture.broker.shared_offsets
    assert turns.first_head("g", "wide", range(6)).message is None
    (produced,) = fixture.broker.produce("wide", ProduceRequest(records("x"), partition=3))
    silent = set(range(6))
    slept: list[float] = []

    def may_deliver(replica: PartitionReplica, now_ms: int) -> bool:
        return by_replica[replica] not in silent

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        fixture.clock.advance(round(seconds * 1_000))

    local = fixture.broker.topics.known("wide").local
    by_replica = {partition.replica: number for number, partition in local.items()}
    monkeypatch.setattr(PartitionReplica, "may_deliver", may_deliver)
    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(turns._groups.leaders, "_patience_s", 0.1)
    with pytest.raises(Unavailable, match="do not vouch"):
        turns.first_head("g", "wide", range(6))
    assert not slept, "the waits do not add up"
    silent.remove(3)
    monkeypatch.setattr(turns._groups.leaders, "_patience_s", 60)
    found = turns.first_head("g", "wide", range(6))
    assert found.message is not None
    assert (found.message.partition, found.message.offset) == (3, produced.offset)  # type: ignore[union-attr]


def test_bad_requests_are_refused(fixture: Fixture) -> None:
    with pytest.raises(TopicNotFound):
        fixture.broker.shared_offsets.head("g", "nowhere", 0)
    with pytest.raises(PartitionNotFound):
        fixture.broker.shared_offsets.head("g", "t", 7)
    fixture.broker.put_group("q", {})
    with pytest.raises(GroupModeMismatch):
        fixture.broker.shared_offsets.head("q", "t", 0)


def test_a_group_deleted_during_a_wait_for_followers_is_not_restored(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another group of the name would begin at its offset."""
    produce(fixture, "a")
    fixture.broker.put_group("g", {"mode": "stream"})
    group = fixture.broker.groups.get("g")
    topic = fixture.broker.topics.known("t")
    is_deleted: list[bool] = []

    def delete(seconds: float) -> None:
        fixture.broker.group_admin.delete("g")
        is_deleted.append(True)

    monkeypatch.setattr(PartitionReplica, "may_deliver", lambda replica, now_ms: bool(is_deleted))
    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=delete))
    with pytest.raises(Unavailable, match="deleted"):
        fixture.broker.shared_offsets._here(group, topic.place(0), None)
    assert "g" not in topic.local[0].streams
