"""Receives that wait for a message of a queue group, over a real log."""

from __future__ import annotations

from pathlib import Path

import gevent
import pytest
from support.domain import FakePeer, Fixture, records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues import wakeup
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.queues.wakeup import Wakeup
from portalmq.broker.storage.errors import DiskFull
from portalmq.errors import Backpressure


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        yield it


def send(fixture: Fixture, *values: str, topic: str = "t", **more) -> None:
    fixture.broker.produce(topic, ProduceRequest(records(*values), **more))


def receive(fixture: Fixture, *topics: str, group: str = "g", peer=None, **more):
    return fixture.broker.receive_handler.receive(group, wire.ReceiveRequest(list(topics) or ["t"], **more), peer)


def texts(messages) -> list[str]:
    return [message.record.value.decode() for message in messages]


def park(fixture: Fixture, *topics: str, **more):
    greenlet = gevent.spawn(receive, fixture, *topics, wait_ms=60_000, **more)
    before = len(fixture.broker.groups.long_polls.waiters)
    with gevent.Timeout(60):
        while len(fixture.broker.groups.long_polls.waiters) == before:
            gevent.sleep(0.001)
    return greenlet


def finished(*greenlets):
    """Return the greenlets that end: wait for the first, and give the others a short time."""
    gevent.wait(greenlets, timeout=60, count=1)
    gevent.joinall(greenlets, timeout=0.3)
    return [greenlet for greenlet in greenlets if greenlet.ready()]


def test_a_waiter_wakes_when_a_message_arrives(fixture):
    waiter = park(fixture)
    send(fixture, "a")
    assert texts(waiter.get(timeout=50)) == ["a"]


def test_one_message_wakes_one_sleeper(fixture):
    waiters = [park(fixture) for _ in range(5)]
    send(fixture, "a")
    (awake,) = finished(*waiters)
    assert texts(awake.get()) == ["a"]
    assert len(fixture.broker.groups.long_polls.waiters) == 4


def test_waiters_are_served_in_the_order_they_came(fixture):
    waiters = [park(fixture, max_messages=1) for _ in range(3)]
    send(fixture, "a", "b")
    assert [texts(waiter.get(timeout=50)) for waiter in waiters[:2]] == [["a"], ["b"]]
    assert not waiters[2].ready()


def test_a_sleeper_watches_all_partitions_of_all_its_topics(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    waiter = park(fixture, "u", "t")
    send(fixture, "a", partition=2)
    assert texts(waiter.get(timeout=50)) == ["a"]


def test_a_client_that_has_gone_gets_nothing(fixture):
    peer = FakePeer()
    gone, there = park(fixture, peer=peer), park(fixture)
    peer.leave()
    assert gone.get(timeout=50) == []
    send(fixture, "a")
    (message,) = there.get(timeout=50)
    assert message.delivery_count == 1


def test_a_client_that_disconnects_as_a_message_arrives_gets_nothing(fixture):
    peer = FakePeer()
    gone, there = park(fixture, peer=peer), park(fixture)
    peer.has_gone = True  # not noticed by the watch yet
    send(fixture, "a")
    (message,) = there.get(timeout=50)
    assert (gone.get(timeout=50), message.delivery_count) == ([], 1)


def test_a_client_that_repeats_elsewhere_what_this_broker_reads_only_now_gets_nothing(fixture):
    """A paused process finds the requests of clients that have gone to another broker in its sockets."""
    send(fixture, "a")
    peer = FakePeer()
    peer.has_gone = True
    assert receive(fixture, peer=peer, attempt_id="0" * 32, wait_ms=60_000) == []
    (message,) = receive(fixture)
    assert message.delivery_count == 1


def test_a_client_that_closed_its_half_gets_what_is_there(fixture):
    send(fixture, "a")
    peer = FakePeer()
    peer.has_gone = True
    assert texts(receive(fixture, peer=peer)) == ["a"]


def test_a_nack_wakes_a_sleeper(fixture):
    send(fixture, "a")
    (message,) = receive(fixture)
    waiter = park(fixture)
    fixture.broker.settlement.settle("g", [message.receipt], SettleRequest("nack"))
    assert texts(waiter.get(timeout=50)) == ["a"]


def test_a_lease_that_ends_wakes_a_sleeper(fixture):
    send(fixture, "a")
    receive(fixture, visibility_timeout_ms=50)
    waiter = park(fixture)
    assert not waiter.ready()
    fixture.clock.advance(50)
    assert texts(waiter.get(timeout=50)) == ["a"]


def test_a_wakeup_is_tried_again_when_the_disk_is_full(fixture, monkeypatch):
    """Found by the simulated shell: the log was at rest, and could not be opened to look for due messages."""
    send(fixture, "a")
    receive(fixture, visibility_timeout_ms=50)
    waiter = park(fixture)
    notify, faults = Wakeup._notify, [DiskFull("no room")]

    def refused_once(self: Wakeup) -> None:
        if faults:
            raise faults.pop()
        notify(self)

    monkeypatch.setattr(Wakeup, "_notify", refused_once)
    monkeypatch.setattr(wakeup, "LOOK_AGAIN_MS", 10)
    fixture.clock.advance(50)
    assert texts(waiter.get(timeout=50)) == ["a"]
    assert not faults


def test_a_wait_that_ends_gives_an_empty_list(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    fixture_clock_moves = gevent.spawn_later(0.02, fixture.clock.advance, 1_000)
    assert receive(fixture, wait_ms=10) == []
    fixture_clock_moves.join()
    assert fixture.broker.groups.long_polls.waiters == {}


def test_drain_ends_every_wait(fixture):
    waiters = [park(fixture) for _ in range(3)]
    fixture.broker.drain()
    assert [waiter.get(timeout=50) for waiter in waiters] == [[], [], []]


def test_more_waiters_than_the_bound_are_refused(fixture):
    fixture.broker.groups.long_polls.parked_max = 1
    park(fixture)
    with pytest.raises(Backpressure):
        receive(fixture, wait_ms=1_000)


def test_a_sleeper_does_not_oversleep_a_message_in_a_partition_that_was_added(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    asleep = park(fixture)
    fixture.broker.alter_topic("t", wire.AlterTopic(config={"retention_ms": 5_000}))
    assert not asleep.ready()
    fixture.broker.alter_topic("t", wire.AlterTopic(partitions=2))
    assert not asleep.ready()
    send(fixture, "a", partition=1)
    assert texts(asleep.get(timeout=50)) == ["a"]
