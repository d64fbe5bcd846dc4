"""Counts of delayed messages that go on from the last one agree with counts of everything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from support.domain import Fixture, records, running

from portalmq import wire
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues import delayed_counts
from portalmq.broker.queues.delayed_counts import waiting
from portalmq.broker.queues.partition_counts import NEAR, not_due
from portalmq.broker.storage.lanes import Lanes

LANES = (DELAYED, DELAYED + 3)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as it:
        it.broker.create_topic("t", wire.CreateTopic())
        yield it


@pytest.fixture
def partition(fixture: Fixture) -> Partition:
    return fixture.broker.topics.get("t").partition(0)


def messages(dice: Random, now_ms: int) -> ProduceRequest:
    """A few messages: plain ones, or delayed by up to a second."""
    many = range(dice.randrange(1, 12))
    if dice.random() < 0.4:
        return ProduceRequest(records(*["plain"] * len(many), priority=dice.choice((0, 3))))
    late = [
        records("late", deliver_at_ms=now_ms + dice.randrange(1, 1_000), priority=dice.choice((0, 3))) for _ in many
    ]
    return ProduceRequest([each for (each,) in late])


@pytest.mark.parametrize("seed", range(6))
def test_they_agree_whatever_is_sent_purged_and_passed(seed: int, fixture: Fixture, partition: Partition) -> None:
    dice, lanes, now_ms = Random(seed), partition.log.lanes, fixture.clock.wall_ms()
    partition.log.segment_bytes = 2_000
    position, start = (0, 0), 0
    for _ in range(60):
        fixture.broker.produce("t", messages(dice, now_ms))
        end = partition.high_watermark
        if dice.random() < 0.5:
            position = max(position, (now_ms + dice.randrange(1_000), dice.randrange(end)))
        if dice.random() < 0.3:
            start = max(start, dice.randrange(end))
        if dice.random() < 0.05:
            position, start = (0, 0), 0  # as for a seek
        if dice.random() < 0.1:
            fixture.broker.browser.purge("t", partition=0, before_offset=dice.randrange(end))
            fixture.broker.maintenance.retain()
        start = max(start, partition.log.log_start_offset)  # files below that go at any time
        for lane in LANES:
            found = waiting(partition, partition.groups, "test", lane, position, start=start, end=end)
            assert found == lanes.count(lane, *position, end, start=start), (position, start, end)
    assert len(partition.log._segments) > 3


def test_a_count_of_what_is_below_the_start_of_the_log_is_not_gone_on_with() -> None:
    """Its files go after the start of the log has moved: the next count would subtract nothing for them."""
    last = delayed_counts._LastCount((0, 0), start=10, end=20, removed=(10, 0), messages=5)
    assert delayed_counts._goes_on(last, (0, 0), 12, 20, (10, 0))
    assert not delayed_counts._goes_on(last._replace(removed=(11, 0)), (0, 0), 12, 20, (11, 0))


def test_a_count_before_compaction_is_not_gone_on_with() -> None:
    last = delayed_counts._LastCount((0, 0), start=10, end=20, removed=(10, 0), messages=5)
    assert not delayed_counts._goes_on(last, (0, 0), 12, 20, (10, 1))


def test_a_start_behind_the_end_counts_nothing_and_is_not_gone_on_with(fixture: Fixture, partition: Partition) -> None:
    def send() -> int:
        late_ms = fixture.clock.wall_ms() + 60_000
        fixture.broker.produce("t", ProduceRequest(records(*["late"] * 5, deliver_at_ms=late_ms)))
        return partition.high_watermark

    def count(start: int, end: int) -> int:
        return waiting(partition, partition.groups, "test", DELAYED, (0, 0), start=start, end=end)

    end = send()
    assert count(end + 1, end) == 0
    assert count(end + 1, send()) == 4


def test_many_messages_of_the_log_are_not_read_to_count_a_few(
    fixture: Fixture, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_ms = fixture.clock.wall_ms() + 60_000
    fixture.broker.produce("t", ProduceRequest(records("late", deliver_at_ms=late_ms)))
    assert not_due(partition, fixture.clock.wall_ms()) == 1
    monkeypatch.setattr(delayed_counts, "READ_MAX", 10)
    monkeypatch.setattr(Lanes, "count_among", None)
    fixture.broker.produce("t", ProduceRequest(records(*["plain"] * 20)))
    fixture.broker.produce("t", ProduceRequest(records("late", deliver_at_ms=late_ms)))
    assert not_due(partition, fixture.clock.wall_ms()) == 2


def test_a_group_with_very_many_delayed_messages_is_counted_by_what_has_changed(
    fixture: Fixture, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_ms = fixture.clock.wall_ms() + 60_000
    fixture.broker.produce("t", ProduceRequest(records(*["late"] * (NEAR + 10), deliver_at_ms=late_ms)))
    fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)

    def counts() -> tuple[int, int, int]:
        found = fixture.broker.describe_group("g")
        return found.ready, found.scheduled, not_due(partition, fixture.clock.wall_ms())

    assert counts() == (0, NEAR + 10, NEAR + 10)
    whole = Lanes.count

    def count(*given: object, until_ms: int | None = None, **more: int) -> int:
        assert until_ms is not None, "everything is counted again"
        return whole(*given, until_ms=until_ms, **more)

    monkeypatch.setattr(Lanes, "count", count)
    fixture.broker.produce("t", ProduceRequest(records("later", deliver_at_ms=late_ms + 1)))
    assert counts() == (0, NEAR + 11, NEAR + 11)
    fixture.clock.advance(60_000)
    assert counts() == (NEAR + 10, 1, 1)
    assert len(fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)) == 10
    assert counts() == (NEAR, 1, 1)
