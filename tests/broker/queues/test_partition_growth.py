"""A topic that a group reads in the order of keys grows only by force."""

from __future__ import annotations

import gevent
import pytest
from support.domain import running
from support.held_writes import held_writes

from portalmq import wire
from portalmq.broker.cluster.routing import outcome_of
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import KeyOrder, PortalMQError, StorageFull


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        fixture.broker.produce("t", ProduceRequest([Record(b"x", key=b"k")]))
        yield fixture


def read(fixture, group: str, ordering: str) -> None:
    fixture.broker.put_group(group, {"ordering": ordering})
    fixture.broker.receive_handler.receive(group, wire.ReceiveRequest(["t"], wait_ms=0), None)


def grow(fixture, partitions: int, **how) -> int:
    return len(fixture.broker.alter_topic("t", wire.AlterTopic(partitions=partitions), **how).partitions)


def test_a_topic_that_a_key_ordered_group_reads_grows_only_by_force(fixture):
    read(fixture, "ordered", "key")
    with pytest.raises(KeyOrder, match="'ordered'") as refused:
        grow(fixture, 3)
    assert (refused.value.status, refused.value.outcome) == (409, "not_applied")
    assert len(fixture.broker.describe_topic("t").partitions) == 2
    assert grow(fixture, 3, force=True) == 3


def test_other_groups_and_groups_of_other_topics_do_not_prevent_growth(fixture):
    read(fixture, "plain", "none")
    fixture.broker.put_group("ordered", {"ordering": "key"})
    assert grow(fixture, 3) == 3


def test_a_change_that_adds_no_partition_needs_no_force(fixture):
    read(fixture, "ordered", "key")
    assert grow(fixture, 2) == 2
    fixture.broker.alter_topic("t", wire.AlterTopic(config={"retention_ms": 5_000}))


def test_a_deleted_group_does_not_prevent_growth(fixture):
    read(fixture, "ordered", "key")
    fixture.broker.group_admin.delete("ordered")
    assert grow(fixture, 3) == 3


@pytest.mark.parametrize("is_refused", [True, False])
def test_only_a_committed_start_of_a_group_prevents_growth(fixture, monkeypatch, is_refused):
    fixture.broker.put_group("ordered", {"ordering": "key"})
    topic, groups = fixture.broker.topics.get("t"), fixture.broker.groups
    partition = topic.local[0]
    with held_writes(monkeypatch, partition) as writes:
        gevent.spawn(outcome_of, groups.begin_here, groups.get("ordered"), topic.place(0), "earliest")
        gevent.sleep(0)
        growing = gevent.spawn(told, fixture)
        gevent.idle()
        assert not growing.ready()
        if is_refused:
            writes.refuse()
            error = growing.get()
            assert isinstance(error, StorageFull)
            assert error.outcome == "not_applied"
            assert grow(fixture, 3) == 3
        else:
            writes.let_through()
            assert isinstance(growing.get(), KeyOrder)


def told(fixture) -> PortalMQError | None:
    try:
        grow(fixture, 3)
    except PortalMQError as error:
        return error
    return None
