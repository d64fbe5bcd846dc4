"""Long work on the event loop gives way, and the tests can see where it does not."""

from __future__ import annotations

import gevent
from support.domain import records, running
from support.stretches import Stretches

from portalmq.broker.core.delivery import GroupDelivery
from portalmq.broker.core.fold import DeadFold, GroupFold, SpanFold
from portalmq.broker.fairness import give_way, in_turns
from portalmq.broker.tally import SPANS_A_TURN, tallied

STEPS = 40


def work() -> None:
    sum(number * number for number in range(20_000))


def test_others_who_wait_at_the_clock_or_a_socket_have_their_turn_at_each_pause():
    turns = []
    gevent.spawn_later(1e-6, turns.append, "timer")
    give_way()
    give_way()
    assert turns == ["timer"]


def test_items_come_in_order_with_a_pause_after_each_few(monkeypatch):
    done, pauses = [], []
    monkeypatch.setattr("portalmq.broker.fairness.give_way", lambda: pauses.append(len(done)))
    for item in in_turns(range(7), 3):
        done.append(item)
    assert (done, pauses) == ([0, 1, 2, 3, 4, 5, 6], [3, 6])


def test_a_stretch_ends_where_the_loop_looks_at_its_sockets():
    with Stretches() as whole:
        for _ in range(STEPS):
            work()
    longest = []
    for _ in range(5):  # some machines count a pause of theirs as processor time
        with Stretches() as cut:
            for _ in in_turns(range(STEPS), 1):
                work()
        assert cut.count > STEPS / 2
        longest.append(cut.longest.ms)
    assert min(longest) < whole.longest.ms / 2


def test_work_is_measured_in_processor_time_so_that_sleep_is_none():
    with Stretches() as stretches:
        for _ in range(STEPS):
            work()
        worked = stretches.count
        gevent.sleep(0.05)
    assert (worked, stretches.count >= 2) == (0, True)
    assert stretches.longest.ms > 0


def test_others_have_their_turn_while_what_a_group_has_is_added_up(tmp_path, monkeypatch):
    """However many messages are leased one by one. Nobody looks at the partition after a pause: it may be gone."""
    pauses = []
    monkeypatch.setattr("portalmq.broker.fairness.give_way", lambda: pauses.append(None))
    with running(tmp_path) as fixture:
        fixture.broker.produce("t", records("a"), None, acks="all")
        (partition,) = fixture.broker.topics.known("t").led()
        now_ms = fixture.clock.now_ms()
        spans = [
            SpanFold(offset, offset + 1, 1, 0, offset % 4 == 0, now_ms, now_ms + offset % 4)
            for offset in range(0, 5 * SPANS_A_TURN, 2)
        ]
        dead = [DeadFold(offset, offset + 1, 1, 0, "") for offset in range(1, 3 * SPANS_A_TURN, 2)]
        delivery = GroupDelivery(GroupFold("g", 0, 5 * SPANS_A_TURN, spans, dead=dead))
        pauses.clear()
        counts = tallied(partition, delivery, fixture.clock)
    half = 5 * SPANS_A_TURN // 4
    assert (counts["ready"], counts["in_flight"], counts["scheduled"]) == (half, 0, half)
    assert (counts["lag"], counts["dead"]) == (2 * half, len(dead))
    assert len(pauses) == 3
