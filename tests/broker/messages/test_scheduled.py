"""Scheduled messages are listed in the order of their due times, and can be cancelled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.domain import HandClock, running

from portalmq import wire
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.messages.scheduled import BEGINNING
from portalmq.broker.storage.batch import Record
from portalmq.errors import MessageNotFound, TopicNotFound, Unavailable


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
        yield fixture


def schedule(fixture, *delays_ms: int, partition: int = 0, priority: int = 0) -> list[int]:
    now_ms = fixture.clock.wall_ms()
    sent = [Record(b"%d" % delay, deliver_at_ms=now_ms + delay, priority=priority) for delay in delays_ms]
    return [each.offset for each in fixture.broker.produce("t", ProduceRequest(sent, partition=partition))]


def listed(fixture, **how) -> list[tuple[int, str]]:
    page = fixture.broker.scheduled_messages.page("t", **{"limit": 100, **how})
    return [(each.partition, each.record.value.decode()) for each in page.messages]


def receive(fixture, group="g", topics=("t",)) -> list[str]:
    request = wire.ReceiveRequest(list(topics), max_messages=100, wait_ms=0)
    return sorted(each.record.value.decode() for each in fixture.broker.receive_handler.receive(group, request, None))


def test_scheduled_messages_are_listed_by_due_time_over_partitions_and_priorities(fixture):
    schedule(fixture, 500, 100, partition=0)
    schedule(fixture, 400, 200, partition=1, priority=9)
    schedule(fixture, 300, partition=2)
    fixture.broker.produce("t", ProduceRequest([Record(b"plain"), Record(b"late", deliver_at_ms=5)]))
    assert listed(fixture) == [(0, "100"), (1, "200"), (2, "300"), (1, "400"), (0, "500")]


def test_due_messages_are_not_listed(fixture):
    schedule(fixture, 100, 200)
    fixture.clock.advance(100)
    assert listed(fixture) == [(0, "200")]


def test_pages_have_no_gap_or_repeat_even_where_many_messages_are_due_at_once(fixture):
    for partition in range(3):
        schedule(fixture, *[700] * 7, 100 + partition, 900, partition=partition)
    seen, after = [], BEGINNING
    while after is not None:
        page = fixture.broker.scheduled_messages.page("t", after=after, limit=4)
        assert len(page.messages) <= 4
        seen += [(each.record.deliver_at_ms, each.partition, each.offset) for each in page.messages]
        after = page.after
    assert len(seen) == 27
    assert seen == sorted(set(seen))


def test_a_page_of_large_messages_is_short_and_the_next_goes_on(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.messages.scheduled.PAGE_BYTES", 7)
    for partition in range(3):
        schedule(fixture, *[100 + partition, 400, 800], partition=partition)
    seen, sizes, after = [], [], BEGINNING
    while after is not None:
        page = fixture.broker.scheduled_messages.page("t", after=after, limit=100)
        sizes.append(len(page.messages))
        seen += [(each.record.deliver_at_ms, each.partition) for each in page.messages]
        after = page.after
    assert len(seen) == 9
    assert seen == sorted(set(seen))
    assert max(sizes) == 3


def test_a_cancelled_message_is_delivered_to_no_group(fixture):
    offsets = schedule(fixture, 100, 200, 300)
    fixture.broker.scheduled_messages.cancel("t", 0, offsets[1])
    assert listed(fixture) == [(0, "100"), (0, "300")]
    fixture.clock.advance(1_000)
    assert receive(fixture) == ["100", "300"]
    assert receive(fixture, "another") == ["100", "300"]


def test_a_cancelled_message_stays_cancelled_after_a_restart(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as fixture:
        offsets = schedule(fixture, 100, 200)
        fixture.broker.scheduled_messages.cancel("t", 0, offsets[0])
    with running(tmp_path, clock) as fixture:
        assert listed(fixture) == [(0, "200")]
        clock.advance(500)
        assert receive(fixture) == ["200"]


def test_a_message_that_is_not_scheduled_cannot_be_cancelled(fixture):
    (due,) = schedule(fixture, 50)
    (kept,) = schedule(fixture, 500)
    (plain,) = fixture.broker.produce("t", ProduceRequest([Record(b"x")], partition=0))
    fixture.clock.advance(50)
    fixture.broker.scheduled_messages.cancel("t", 0, kept)
    for number, offset in [(0, due), (0, plain.offset), (0, kept), (0, 10_000), (1, 0), (9, 0)]:
        with pytest.raises(MessageNotFound):
            fixture.broker.scheduled_messages.cancel("t", number, offset)
    with pytest.raises(TopicNotFound):
        fixture.broker.scheduled_messages.cancel("nothing", 0, 0)


def test_a_leader_that_may_be_deposed_does_not_answer_not_found(fixture, monkeypatch):
    def pass_by(seconds: float) -> None:
        fixture.clock.advance(round(1_000 * seconds))

    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=pass_by))
    monkeypatch.setattr(PartitionReplica, "led_at", lambda replica, then_ms: False)
    monkeypatch.setattr(fixture.broker.scheduled_messages._leaders, "_patience_s", 0.0)  # a refusal is not retried
    with pytest.raises(Unavailable, match="do not vouch"):
        fixture.broker.scheduled_messages.cancel("t", 0, 10_000)


def test_a_clock_set_back_makes_no_delivered_message_cancellable(fixture):
    (offset,) = schedule(fixture, 100)
    fixture.clock.advance(100)
    assert receive(fixture) == ["100"]
    fixture.clock.day_ms -= 60_000
    assert listed(fixture) == []
    with pytest.raises(MessageNotFound):
        fixture.broker.scheduled_messages.cancel("t", 0, offset)


def test_a_purge_removes_scheduled_messages_too(fixture):
    schedule(fixture, 100, 200)
    fixture.broker.browser.purge("t", partition=None, before_offset=None)
    schedule(fixture, 300)
    assert listed(fixture) == [(0, "300")]


def test_an_unknown_topic_has_no_list(fixture):
    with pytest.raises(TopicNotFound):
        fixture.broker.scheduled_messages.page("nothing", limit=5)


def test_cancelled_messages_are_not_counted_and_are_looked_up_once(tmp_path, monkeypatch):
    clock = HandClock()
    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
        fixture.broker.put_group("late", {"start": "latest"})
        receive(fixture)
        first = schedule(fixture, 100, 200, 300, 400)
        receive(fixture, "late")
        more = schedule(fixture, 150, 350, priority=7)
        lanes = next(iter(fixture.broker.topics.get("t").led())).log.lanes
        looked_up, spots = [], lanes.lane_positions
        monkeypatch.setattr(
            lanes, "lane_positions", lambda offsets: spots(looked_up.extend(offsets) or looked_up[-len(offsets) :])
        )

        def counts(group: str) -> tuple[int, int]:
            found = fixture.broker.describe_group(group)
            return found.ready, found.scheduled

        assert counts("g") == (0, 6)
        for offset in (first[1], more[0]):
            fixture.broker.scheduled_messages.cancel("t", 0, offset)
            counts("g")
        assert counts("g") == (0, 4)
        assert counts("late") == (0, 1), "it began after the first ones"
        fixture.broker.scheduled_messages.cancel("t", 0, first[3])
        clock.advance(250)
        assert counts("g") == (1, 2)
        assert receive(fixture) == ["100"]
        clock.advance(500)
        assert counts("g") == (2, 0)
        assert sorted(looked_up) == sorted([first[1], first[3], more[0]])
    with running(tmp_path, clock) as fixture:
        assert fixture.broker.describe_group("g").lag == 3
