"""Counts of delayed messages that go on from the last one agree with counts of everything."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from support.domain import Fixture, records, running

from portalmq import wire
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.delayed_counts import waiting
from portalmq.broker.queues.partition_counts import NEAR, not_due
from portalmq.broker.storage.lanes import Lanes

LANES = (DELAYED, DELAYED + 3)


def send(fixture: Fixture, dice: Random, now_ms: int) -> None:
    many = dice.randrange(1, 12)
    if dice.random() < 0.4:
        fixture.broker.produce("t", ProduceRequest(records(*["plain"] * many, priority=dice.choice((0, 3)))))
        return
    for _ in range(many):
        at_ms = now_ms + dice.randrange(1, 1_000)
        fixture.broker.produce("t", ProduceRequest(records("late", deliver_at_ms=at_ms, priority=dice.choice((0, 3)))))


@pytest.mark.parametrize("seed", range(4))
def test_they_agree_whatever_is_sent_purged_and_passed(seed: int, tmp_path: Path) -> None:
    dice = Random(seed)
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic())
        partition = fixture.broker.topics.get("t").partition(0)
        partition.log.segment_bytes = 2_000
        lanes, now_ms = partition.log.lanes, fixture.clock.wall_ms()
        position, start = (0, 0), 0
        for _ in range(40):
            send(fixture, dice, now_ms)
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
            for lane in LANES:
                found = waiting(partition, partition.groups, "test", lane, position, start=start, end=end)
                assert found == lanes.count(lane, *position, end, start=start), (position, start, end)
        assert len(partition.log._segments) > 3


def test_a_group_with_very_many_delayed_messages_is_counted_by_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path) as fixture:
        late_ms = fixture.clock.wall_ms() + 60_000
        fixture.broker.produce("t", ProduceRequest(records(*["late"] * (NEAR + 10), deliver_at_ms=late_ms)))
        fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
        partition = fixture.broker.topics.get("t").partition(0)

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
