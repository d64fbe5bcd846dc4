"""Scheduled messages are listed in the order of their due times, and can be cancelled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.domain import HandClock, running
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages import matching
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.messages.scheduled import BEGINNING, ScheduleChange
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, MessageNotFound, TopicNotFound, Unavailable

HOUR_MS = 3_600_000


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


def test_a_page_that_passes_many_cancelled_messages_ends_and_the_next_goes_on(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.messages.scheduled.PASSED_MAX", 4)
    for partition in range(3):
        schedule(fixture, *range(100, 110), 200 + partition, partition=partition)
    fixture.broker.scheduled_messages.change("t", ScheduleChange(cancels=True, limit=30))
    left = schedule(fixture, 50)
    seen, pages, after = [], 0, BEGINNING
    while after is not None:
        page = fixture.broker.scheduled_messages.page("t", after=after, limit=2)
        seen += [int(each.record.value) for each in page.messages]
        pages += 1
        assert page.after is None or page.after > after
        after = page.after
    assert (seen, len(left)) == ([50, 200, 201, 202], 1)
    assert 7 <= pages <= 11


def test_other_greenlets_run_while_cancelled_messages_are_passed(fixture, monkeypatch):
    pauses = []
    schedule(fixture, *range(100, 130))
    fixture.broker.scheduled_messages.change("t", ScheduleChange(cancels=True, limit=30))
    monkeypatch.setattr("portalmq.broker.partition.yielding.TURN_S", -1.0)
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: pauses.append(None))
    assert listed(fixture) == []
    assert len(pauses) >= 30
    pauses.clear()
    assert fixture.broker.scheduled_messages.change("t", ScheduleChange(limit=1, dry_run=True)) == (0, 0)
    assert len(pauses) >= 30


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


def test_a_purged_message_is_not_scheduled_even_before_the_log_start_moves(fixture, monkeypatch):
    offset, moved = schedule(fixture, HOUR_MS, 2 * HOUR_MS)
    move(fixture, moved)
    before = len(stored(fixture))
    advance = "portalmq.broker.partition.retention._advance"
    monkeypatch.setattr(advance, lambda log, upto: Unavailable("the disk is slow"))
    with pytest.raises(Unavailable):
        fixture.broker.browser.purge("t", partition=0, before_offset=None)
    assert listed(fixture) == []
    assert fixture.broker.scheduled_messages.change("t", ScheduleChange(limit=10)) == (0, 0)
    for each in (offset, moved):
        with pytest.raises(MessageNotFound):
            move(fixture, each)
        with pytest.raises(MessageNotFound):
            fixture.broker.scheduled_messages.cancel("t", 0, each)
    assert len(stored(fixture)) == before


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


# --- run now, move, many at once -------------------------------------------------------------------------------------


def change(fixture, **how) -> tuple[int, int]:
    return fixture.broker.scheduled_messages.change("t", ScheduleChange(**{"limit": 1_000, **how}))


def move(fixture, offset: int, deliver_at_ms: int = 0, partition: int = 0) -> None:
    fixture.broker.scheduled_messages.move("t", partition, offset, deliver_at_ms)


def stored(fixture) -> list[StoredMessage]:
    eventually(lambda: fixture.broker.outboxes.open == 0)
    return list(fixture.broker.browser.read_all("t", None))


def test_a_message_that_is_run_comes_at_once_and_once(fixture):
    first, _ = schedule(fixture, HOUR_MS, 2 * HOUR_MS, priority=3)
    assert receive(fixture) == []
    move(fixture, first)
    copy = stored(fixture)[-1]
    assert (copy.record.deliver_at_ms, copy.record.priority, copy.partition) == (None, 3, 0)
    assert copy.record.headers == {"portalmq-copy-of": f"t/0-{first}"}
    assert receive(fixture) == receive(fixture, group="another") == [f"{HOUR_MS}"]
    fixture.clock.advance(HOUR_MS)
    assert receive(fixture, group="later") == [f"{HOUR_MS}"]
    with pytest.raises(MessageNotFound, match="moved or cancelled"):
        move(fixture, first)


def test_a_message_is_moved_to_another_time_and_back(fixture):
    now_ms = fixture.clock.wall_ms()
    (offset,) = schedule(fixture, HOUR_MS)
    move(fixture, offset, now_ms + 2 * HOUR_MS)
    late = stored(fixture)[-1]
    move(fixture, late.offset, now_ms + 500)
    assert [each.record.deliver_at_ms for each in stored(fixture)][-2:] == [now_ms + 2 * HOUR_MS, now_ms + 500]
    fixture.clock.advance(500)
    assert receive(fixture) == [f"{HOUR_MS}"]
    fixture.clock.advance(3 * HOUR_MS)
    assert receive(fixture, group="later") == [f"{HOUR_MS}"]


def test_a_moved_message_lives_as_long_from_its_new_time(fixture):
    now_ms = fixture.clock.wall_ms()
    record = Record(b"x", deliver_at_ms=now_ms + HOUR_MS, expires_at_ms=now_ms + HOUR_MS + 700)
    fixture.broker.produce("t", ProduceRequest([record] * 2, partition=0))
    move(fixture, 1)
    assert stored(fixture)[-1].record.expires_at_ms == now_ms + 700
    move(fixture, 2, now_ms + 9_000)
    assert stored(fixture)[-1].record.expires_at_ms == now_ms + 9_700


def test_what_is_not_scheduled_is_not_moved(fixture):
    (due, later) = schedule(fixture, 100, HOUR_MS)
    fixture.broker.produce("t", ProduceRequest([Record(b"plain")], partition=0))
    fixture.clock.advance(100)
    fixture.broker.scheduled_messages.cancel("t", 0, later)
    for offset in (due, later, later + 1, 0, 999):
        with pytest.raises(MessageNotFound):
            move(fixture, offset)
    with pytest.raises(MessageNotFound):
        move(fixture, due, partition=9)
    assert change(fixture, ids=[(0, due), (0, later)]) == (0, 0)


def test_many_are_chosen_by_predicate_and_due_time_over_all_partitions(fixture):
    for partition in range(3):
        schedule(fixture, HOUR_MS + partition, 2 * HOUR_MS + partition, partition=partition)
    where = {"value": {"contains": "360000"}}
    assert change(fixture, where=where, dry_run=True) == (3, 0)
    assert change(fixture, where=where, limit=2) == (3, 2)
    assert receive(fixture) == ["3600000", "3600001"]
    assert change(fixture, where=where) == (1, 1)
    assert change(fixture, where=where) == (0, 0)
    assert change(fixture, cancels=True) == (3, 3)
    assert listed(fixture) == []
    fixture.clock.advance(9 * HOUR_MS)
    assert receive(fixture, group="later") == ["3600000", "3600001", "3600002"]


def test_chosen_by_id_only_those_are_changed(fixture):
    _, second, third = schedule(fixture, 500, 600, 700)
    assert change(fixture, ids=[(0, second), (0, third), (0, 999)], dry_run=True) == (2, 0)
    assert change(fixture, ids=[(0, second)], cancels=True) == (1, 1)
    assert change(fixture, ids=[(0, third), (0, second)], deliver_at_ms=fixture.clock.wall_ms() + 10) == (1, 1)
    assert stored(fixture)[-1].record.value == b"700"
    assert listed(fixture) == [(0, "700"), (0, "500")]


@pytest.mark.parametrize(
    "how", [{"where": {}}, {"where": {"sql": {"eq": 1}}}, {"ids": [(0, 1)], "where": {"key": {"exists": False}}}]
)
def test_a_wrong_selection_changes_nothing(fixture, how):
    schedule(fixture, 500)
    with pytest.raises(InvalidRequest):
        change(fixture, **how)
    assert listed(fixture) == [(0, "500")]


def test_a_search_that_takes_too_long_changes_nothing(fixture, monkeypatch):
    monkeypatch.setattr(matching, "MATCH_WITHIN_S", -1.0)
    schedule(fixture, 500)
    with pytest.raises(Unavailable, match="nothing was changed"):
        change(fixture, cancels=True)
    assert listed(fixture) == [(0, "500")]


def test_an_ordered_copy_is_made_after_a_restart(tmp_path):
    with running(tmp_path) as before:
        before.broker.create_topic("t", wire.CreateTopic(partitions=1))
        (offset,) = schedule(before, HOUR_MS)
        partition = before.broker.topics.get("t").local[0]
        partition.on_ordered = lambda: None  # the broker dies before it carries out the order
        move(before, offset)
        assert len(before.broker.browser.browse("t", 0, offset=0, limit=10).messages) == 1
    with running(tmp_path, before.clock) as after:
        eventually(lambda: receive(after) == [f"{HOUR_MS}"])
        assert len(stored(after)) == 2
