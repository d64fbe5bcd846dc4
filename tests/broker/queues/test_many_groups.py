"""A description of all groups costs no more than the number of groups, and other greenlets run during it."""

from __future__ import annotations

import gevent
import pytest
from support.domain import records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition import reader, yielding
from portalmq.broker.partition.cache import BatchCache
from portalmq.broker.server.gauges import gauges_of

GROUPS = 120


@pytest.fixture
def broker(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
        fixture.broker.produce("t", ProduceRequest(records("first")))
        yield fixture.broker


@pytest.fixture
def looks(monkeypatch):
    """A list that grows by one with each batch looked up."""
    seen: list[int] = []
    find = BatchCache.find
    monkeypatch.setattr(BatchCache, "find", lambda *args: seen.append(1) or find(*args))
    return seen


def receive(broker, group, most=10):
    request = wire.ReceiveRequest(topics=["t"], max_messages=most, wait_ms=0)
    return broker.receive_handler.receive(group, request, None)


def with_groups(broker, count):
    for number in range(count):
        receive(broker, f"g{number}")


class Disk:
    low_water_bytes = 0

    def free_bytes(self) -> int:
        return 0


def test_groups_that_lease_every_message_do_not_read_each_others_records(broker, looks):
    with_groups(broker, GROUPS)
    looks.clear()
    assert {each.lag for each in gauges_of(broker, Disk(), connected=True).group_lags} == {1}
    assert len(broker.list_groups()) == GROUPS
    assert len(looks) <= 4 * GROUPS  # each group looks up its lease, for the age, twice


def test_a_message_behind_the_records_of_many_groups_is_found_without_reading_them(broker, looks, monkeypatch):
    monkeypatch.setattr(reader, "CONTROL_RECORDS_MAX", 4)
    with_groups(broker, GROUPS)
    broker.produce("t", ProduceRequest(records("last")))
    looks.clear()
    assert {each.ready for each in broker.list_groups()} == {1}
    assert len(looks) <= 10 * GROUPS
    looks.clear()
    assert [message.record.value for message in receive(broker, "g0")] == [b"last"]
    assert len(looks) <= 20


def test_the_age_of_a_message_behind_the_records_of_others_is_its_own(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.produce("t", ProduceRequest(records("first")))
        for number in range(40):
            (message,) = receive(fixture.broker, f"g{number}")
            assert fixture.broker.settlement.settle(f"g{number}", [message.receipt]) == [True]
        fixture.clock.advance(7_000)
        fixture.broker.produce("t", ProduceRequest(records("last")))
        fixture.clock.advance(2_000)
        assert {each.oldest_unacked_ms for each in fixture.broker.list_groups()} == {2_000}


def test_a_group_that_stands_still_is_counted_without_files(tmp_path):
    with running(tmp_path) as fixture:
        broker = fixture.broker
        broker.produce("t", ProduceRequest(records("first", "second")))
        receive(broker, "behind", 1)
        (message,) = receive(broker, "done", 1)
        assert broker.settlement.settle("done", [message.receipt]) == [True]
        counted, log = broker.list_groups(), broker.topics.known("t").local[0].log
        log.park()
        fixture.clock.advance(1_000)
        again = broker.list_groups()
        assert not log.is_open
        assert [each.oldest_unacked_ms for each in again] == [each.oldest_unacked_ms + 1_000 for each in counted]
        assert [(each.ready, each.in_flight) for each in again] == [(1, 1), (1, 0)]
        broker.produce("t", ProduceRequest(records("third")))
        assert [(each.ready, each.in_flight) for each in broker.list_groups()] == [(2, 1), (2, 0)]


def test_other_greenlets_run_while_all_groups_are_described(broker, monkeypatch):
    monkeypatch.setattr(yielding, "TURN_S", 0)
    with_groups(broker, 12)
    turns = []

    def serve() -> None:
        while True:
            gevent.sleep(0)
            turns.append(1)

    other = gevent.spawn(serve)
    gevent.sleep(0)
    turns.clear()
    gauges_of(broker, Disk(), connected=True)
    assert len(turns) >= 5
    turns.clear()
    broker.list_groups()
    assert len(turns) >= 5
    other.kill()
