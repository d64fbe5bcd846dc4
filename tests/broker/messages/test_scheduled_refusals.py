"""A refusal to cancel or move a scheduled message is final, or its outcome is unknown."""

from __future__ import annotations

import gevent
import pytest
from support.domain import running
from support.held_writes import held_writes
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import MessageNotFound, PortalMQError, StorageFull

HOUR_MS = 3_600_000
CALLS = ["cancel", "move"]


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
        fixture.broker.produce("t", ProduceRequest([Record(b"first")]))
        yield fixture


def schedule(fixture, acks: wire.Acks = "all", deliver_at_ms: int | None = None) -> int:
    """Return the offset of a new message that is due in an hour."""
    record = Record(b"x", deliver_at_ms=deliver_at_ms or fixture.clock.wall_ms() + HOUR_MS)
    offset = partition_of(fixture).replica.next_offset
    fixture.broker.produce("t", ProduceRequest([record], partition=0, acks=acks))
    return offset


def partition_of(fixture):
    return fixture.broker.topics.get("t").local[0]


def try_it(fixture, call: str, offset: int) -> PortalMQError | None:
    try:
        getattr(fixture.broker.scheduled_messages, call)("t", 0, offset)
    except PortalMQError as error:
        return error
    return None


@pytest.mark.parametrize("call", CALLS)
def test_a_message_that_is_not_committed_yet_is_found_once_it_is(fixture, monkeypatch, call):
    with held_writes(monkeypatch, partition_of(fixture)) as writes:
        offset = schedule(fixture, acks="none")
        told = gevent.spawn(try_it, fixture, call, offset)
        gevent.idle()
        assert not told.ready()
        writes.let_through()
        assert told.get() is None
    assert offset in partition_of(fixture).groups.cancelled


@pytest.mark.parametrize("call", CALLS)
def test_a_purge_that_the_disk_refuses_refuses_nothing(fixture, monkeypatch, call):
    offset = schedule(fixture)
    with held_writes(monkeypatch, partition_of(fixture)) as writes:
        purge = gevent.spawn(lambda: fixture.broker.browser.purge("t", partition=0, before_offset=None))
        eventually(lambda: partition_of(fixture).groups.purged_upto > offset)
        told = gevent.spawn(try_it, fixture, call, offset)
        gevent.idle()
        assert not told.ready()
        writes.refuse()
        error = told.get()
        purge.join()
    assert isinstance(error, StorageFull)
    assert error.outcome == "unknown"
    assert try_it(fixture, call, offset) is None


@pytest.mark.parametrize("call", CALLS)
def test_a_repeat_of_what_was_done_does_not_say_that_it_never_was(fixture, call):
    offset = schedule(fixture)
    assert try_it(fixture, call, offset) is None
    for _ in range(2):
        error = try_it(fixture, call, offset)
        assert isinstance(error, MessageNotFound)
        assert error.outcome == "unknown"
        fixture.clock.advance(HOUR_MS)


def test_no_repeat_finds_what_is_due_or_was_purged(fixture):
    due, purged = schedule(fixture), schedule(fixture, deliver_at_ms=fixture.clock.wall_ms() + 9 * HOUR_MS)
    fixture.clock.advance(HOUR_MS)
    for offset in (due, purged):
        if offset == purged:
            fixture.broker.browser.purge("t", partition=0, before_offset=None)
        error = try_it(fixture, "cancel", offset)
        assert isinstance(error, MessageNotFound)
        assert error.outcome == "not_applied"
