"""The limits on topics, partitions, groups and producers."""

from __future__ import annotations

from types import SimpleNamespace

import gevent
import pytest
from support.domain import records, running

from portalmq import wire
from portalmq.broker.cluster.capacity import Capacity
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.server.config import BrokerConfig
from portalmq.control_plane.plane import PlaneUnavailable
from portalmq.errors import Backpressure, InvalidRequest


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as started:
        yield started


def bounded(fixture, **limits):
    """The broker, with the limits of a test."""
    capacity = Capacity(BrokerConfig(zookeeper="none", **limits), fixture.broker.mirror)
    fixture.broker.topics._capacity = fixture.broker.groups._capacity = capacity
    return fixture.broker


def test_the_number_of_topics_is_limited(fixture):
    broker = bounded(fixture, topics_max=2)
    broker.create_topic("a", wire.CreateTopic())
    broker.produce("b", ProduceRequest(records("first use")))
    for make in (
        lambda: broker.create_topic("c", wire.CreateTopic()),
        lambda: broker.produce("c", ProduceRequest(records("x"))),
        lambda: broker.receive_handler.receive("g", wire.ReceiveRequest(topics=["c"]), None),
    ):
        with pytest.raises(Backpressure, match="topics_max") as caught:
            make()
        assert (caught.value.outcome, caught.value.retryable) == ("not_applied", False)
    assert not broker.create_topic("a", wire.CreateTopic())[1], "an existing topic may be created again"
    broker.delete_topic("a")
    assert broker.create_topic("c", wire.CreateTopic())[1]


def test_the_number_of_partitions_is_limited(fixture):
    broker = bounded(fixture, partitions_max=5)
    broker.create_topic("a", wire.CreateTopic(partitions=3))
    with pytest.raises(Backpressure, match="partitions_max"):
        broker.create_topic("b", wire.CreateTopic(partitions=3))
    with pytest.raises(Backpressure, match="3 more"):
        broker.alter_topic("a", wire.AlterTopic(partitions=6))
    assert len(broker.alter_topic("a", wire.AlterTopic(partitions=5)).partitions) == 5
    with pytest.raises(Backpressure):
        broker.produce("c", ProduceRequest(records("x")))


def test_the_number_of_groups_is_limited(fixture):
    broker = bounded(fixture, groups_max=2)
    broker.create_topic("t", wire.CreateTopic())
    broker.put_group("a", {})
    broker.receive_handler.receive("b", wire.ReceiveRequest(topics=["t"]), None)
    for make in (
        lambda: broker.put_group("c", {}),
        lambda: broker.receive_handler.receive("c", wire.ReceiveRequest(topics=["t"]), None),
    ):
        with pytest.raises(Backpressure, match="groups_max"):
            make()
    broker.put_group("a", {"max_deliveries": 3})
    broker.group_admin.delete("a")
    broker.put_group("c", {})


def test_a_topic_being_created_counts_before_the_mirror_shows_it():
    mirror = SimpleNamespace(topics={}, groups={}, partitions={}, brokers={1: None, 2: None})
    capacity = Capacity(BrokerConfig(topics_max=3, partitions_max=4), mirror)  # type: ignore[arg-type]

    def make() -> bool:
        try:
            with capacity.topic(4):
                gevent.sleep(0)
                return True
        except Backpressure:
            return False

    made = [gevent.spawn(make) for _ in range(5)]
    gevent.joinall(made, raise_error=True)
    assert [each.value for each in made] == [True, True, False, False, False], "two brokers hold eight replicas"
    assert make(), "a failed creation reserves nothing"


def test_a_segment_with_very_many_content_types_is_followed_by_another(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.storage.log.CONTENT_TYPES_MAX", 20)
    for number in range(10):
        batch = [records("x", content_type=f"text/x{number}-{each}")[0] for each in range(8)]
        fixture.broker.produce("t", ProduceRequest(batch))
    log = fixture.broker.topics.get("t").led()[0].log
    assert len(log._segments) >= 4
    assert max(segment.content_types for segment in log._segments) < 20 + 8 + 10
    found = list(fixture.broker.browser.read_all("t", None))
    assert [each.record.content_type for each in found] == [f"text/x{n}-{e}" for n in range(10) for e in range(8)]


def test_an_id_that_was_never_allocated_is_refused(fixture):
    made_up, given = 1 << 40, fixture.broker.new_producer(None).id
    for call in (
        lambda stamp: fixture.broker.produce("t", ProduceRequest(records("x"), partition=0, producer=stamp)),
        lambda stamp: fixture.broker.produce_range("t", ProduceRequest(records("y"), partition=0, producer=stamp)),
    ):
        with pytest.raises(InvalidRequest, match="never allocated"):
            call(wire.ProducerStamp(made_up, 0, 0))
    assert fixture.broker.produce(
        "t", ProduceRequest(records("x"), partition=0, producer=wire.ProducerStamp(given, 0, 0))
    )


def test_a_producer_is_accepted_while_the_control_plane_is_unavailable(fixture, monkeypatch):
    def away():
        raise PlaneUnavailable("away")

    monkeypatch.setattr(fixture.broker.producer_fencing._catalog, "producer_ids_below", away)
    fixture.broker.producer_fencing.check_given(1 << 40)
