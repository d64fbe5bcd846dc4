"""The start of a group on a partition: until it is committed, nothing is delivered there, and all else elsewhere."""

from __future__ import annotations

from _queue import SimpleQueue
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest
from gevent.event import Event
from support.domain import Fixture, records, running
from support.held import held
from support.held_writes import held_writes

from portalmq import wire
from portalmq.broker.cluster.rpc.queues import LookAt
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues import group_receiver
from portalmq.broker.queues.wakeup import Wakeup
from portalmq.broker.storage.errors import DiskFull
from portalmq.errors import PortalMQError, StorageFull, Unavailable


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as it:
        yield it


def send(fixture: Fixture, *values: str, **more):
    return fixture.broker.produce("t", ProduceRequest(records(*values), **more))


def receive(fixture: Fixture, **more):
    return fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], **more), None)


def texts(messages) -> list[str]:
    return [message.record.value.decode() for message in messages]


def test_a_group_has_begun_for_nobody_before_its_start_is_on_disk(fixture, monkeypatch):
    """Found by `make simulate SEED=704555`: a second receive got a message, the leader was lost with the start, and the
    group began later, at messages after it."""
    send(fixture, "a")
    fixture.broker.put_group("g", {"start": "latest"})
    group = fixture.broker.groups.get("g")
    topic = fixture.broker.topics.get("t")
    with held(monkeypatch, topic.partition(0).log, "append") as release:
        begins = [gevent.spawn(fixture.broker.groups.begin, group, topic) for _ in range(2)]
        gevent.joinall(begins, timeout=0.1)
        assert "g" in topic.partition(0).delivery
        assert not any(begin.ready() for begin in begins)
        release()
        gevent.joinall(begins, timeout=10)
    assert all(begin.successful() for begin in begins)


def test_a_start_that_the_disk_refuses_lets_no_group_begin_at_old_messages(fixture, monkeypatch):
    """Where a group is known on partition 0, it begins elsewhere at the earliest message."""
    send(fixture, "old")
    fixture.broker.put_group("g", {"start": "latest"})
    topic = fixture.broker.topics.get("t")
    asked = LookAt("g", "t", topic.state.topic_id, [0])
    known = fixture.broker.groups.local_known(asked)
    with held_writes(monkeypatch, topic.partition(0)) as writes:
        begin = gevent.spawn(begun, fixture)
        asking = gevent.spawn(known, asked.places)
        gevent.idle()
        assert "g" in topic.partition(0).delivery
        assert not asking.ready()
        writes.refuse()
        assert isinstance(asking.get()[asked.places[0]], StorageFull)
        assert isinstance(begin.get(), StorageFull)
    assert known(asked.places) == {asked.places[0]: False}
    assert begun(fixture) is None
    assert known(asked.places) == {asked.places[0]: True}
    assert receive(fixture, wait_ms=0) == []


def test_what_is_not_committed_after_its_start_keeps_no_group_from_beginning(fixture, monkeypatch):
    """With partition 0 cut off from its followers the group would get nothing from the other partitions either."""
    send(fixture, "old")
    fixture.broker.put_group("g", {"start": "latest"})
    topic = fixture.broker.topics.get("t")
    assert begun(fixture) is None
    asked = LookAt("g", "t", topic.state.topic_id, [0])
    with held_writes(monkeypatch, topic.partition(0)):
        topic.partition(0).submit(tuple(records("late")), 4)
        assert fixture.broker.groups.local_known(asked)(asked.places) == {asked.places[0]: True}


def begun(fixture) -> PortalMQError | None:
    groups = fixture.broker.groups
    try:
        groups.begin(groups.get("g"), fixture.broker.topics.get("t"))
    except PortalMQError as error:
        return error
    return None


def test_a_group_that_begins_before_a_refusal_is_final_has_not_ended(fixture, monkeypatch):
    send(fixture, "a")
    group = fixture.broker.groups.ensure("g")
    topic = fixture.broker.topics.get("t")
    place, partition = topic.place(0), topic.partition(0)
    with held_writes(monkeypatch, partition) as writes:
        send(fixture, "b", acks="none")
        asking = gevent.spawn(fixture.broker.groups.at, group, place)
        gevent.idle()
        assert not asking.ready()
        fixture.broker.groups.start_here(group, place, "earliest")
        writes.let_through()
        assert asking.get().delivery is partition.delivery["g"]


def test_nothing_is_delivered_before_the_start_of_the_group_is_on_disk(fixture, monkeypatch):
    """Found by `make simulate-shell SEED=66024`: the start was lost with the leader, and a commit was refused for good,
    with "the group has ended", of which a copy was carried out later."""
    send(fixture, "a", "b")
    with held(monkeypatch, fixture.broker.topics.get("t").partition(0).log, "append") as release:
        receives = [gevent.spawn(receive, fixture, max_messages=1) for _ in range(2)]
        gevent.joinall(receives, timeout=0.1)
        assert not any(each.ready() for each in receives)
        release()
        gevent.joinall(receives, timeout=10)
    assert sorted(texts(messages) for each in receives for messages in [each.get()]) == [["a"], ["b"]]


def test_a_start_that_is_not_committed_keeps_no_messages_of_other_partitions_waiting(fixture, monkeypatch):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    for number in range(3):
        send(fixture, f"{number}a", f"{number}b", partition=number)
    partitions = [fixture.broker.topics.get("t").partition(number) for number in range(2)]
    monkeypatch.setattr(group_receiver, "BEGUN_WITHIN_S", 0.1)
    with (
        held(monkeypatch, partitions[0].log, "append"),
        held(monkeypatch, partitions[1].log, "append"),
        gevent.Timeout(10),  # far less than an append may take
    ):
        assert sorted(texts([*receive(fixture, max_messages=1), *receive(fixture, max_messages=1)])) == ["2a", "2b"]
        with pytest.raises(Unavailable, match="start"):
            receive(fixture, wait_ms=0)
        began = gevent.spawn(receive, fixture, max_messages=9, wait_ms=60_000)
        gevent.idle()
    assert len(texts(began.get(timeout=30))) + len(texts(receive(fixture, max_messages=9))) == 4


def test_a_waiting_receive_begins_again_after_its_start_is_refused(fixture, monkeypatch):
    """A full disk refused it, after the receive had given up waiting for it."""
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
    partition = fixture.broker.topics.get("t").partition(0)
    monkeypatch.setattr(group_receiver, "BEGUN_WITHIN_S", 0.0)
    append, parked, refuse = partition.log.append, Event(), SimpleQueue()

    def refused(batches):
        refuse.get()
        monkeypatch.setattr(partition.log, "append", append)
        raise DiskFull("no room")

    park = Wakeup.park
    monkeypatch.setattr(Wakeup, "park", lambda *waiter: (park(*waiter), parked.set()))
    monkeypatch.setattr(partition.log, "append", refused)
    with gevent.Timeout(10):
        receiving = gevent.spawn(receive, fixture, wait_ms=60_000)
        parked.wait()
        assert "g" in partition.delivery
        refuse.put(None)
        partition._writer.wait_idle()
        send(fixture, "a")
        assert texts(receiving.get()) == ["a"]
