"""A group's fold on one partition: what it hands out, takes back and forgets."""

from __future__ import annotations

from portalmq.broker.core.delivery import ATTEMPTS_MAX, OUTSTANDING_MAX, GroupDelivery
from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.records import Ack, Extend, Grant, GroupStart, Nack, ranges_of


def new_group(start: int = 0) -> GroupDelivery:
    return GroupDelivery(GroupFold("g", start, start, []))


def grant(group: GroupDelivery, *ranges: tuple[int, int, int], now: int = 0, lease: int = 100, **more) -> None:
    end = max((end for _, end, _ in ranges), default=0)
    group.apply(Grant(ranges, max(end, group.next), now, now + lease, **more))


def spans(group: GroupDelivery) -> list[tuple[int, int, int]]:
    return [(span.start, span.end, span.deliveries) for span in group.spans()]


def test_a_new_group_hands_out_from_its_start():
    plan = new_group(start=7).plan(now_ms=0, max_messages=10)
    assert (plan.returned, plan.fresh_from, plan.fresh_max) == ((), 7, 10)


def test_granted_messages_are_not_handed_out_again_under_their_lease():
    group = new_group()
    grant(group, (0, 10, 1))
    plan = group.plan(now_ms=99, max_messages=10)
    assert (plan.returned, plan.fresh_from) == ((), 10)


def test_an_expired_lease_returns_its_messages_with_their_count():
    group = new_group()
    grant(group, (0, 10, 1), lease=100)
    (span,) = group.plan(now_ms=100, max_messages=20).returned
    assert (span.start, span.end, span.deliveries, span.expiries) == (0, 10, 1, 0)


def test_a_plan_takes_no_more_than_asked_for_and_the_oldest_first():
    group = new_group()
    grant(group, (0, 3, 1), now=5, lease=10)
    grant(group, (3, 6, 1), now=0, lease=1)
    plan = group.plan(now_ms=50, max_messages=4)
    assert [(span.start, span.end) for span in plan.returned] == [(0, 3), (3, 4)]
    assert plan.fresh_max == 0


def test_planning_changes_nothing():
    group = new_group()
    grant(group, (0, 4, 1), lease=1)
    assert group.plan(10, 2) == group.plan(10, 2)


def test_acked_messages_are_done_for_good():
    group = new_group()
    grant(group, (0, 10, 1), lease=10)
    group.apply(Ack(((0, 10),), 5))
    assert spans(group) == []
    assert group.plan(1_000, 5).returned == ()
    assert group.outstanding == 0


def test_an_ack_in_the_middle_leaves_the_edges_leased():
    group = new_group()
    grant(group, (0, 10, 1))
    group.apply(Ack(((3, 5), (7, 8)), 5))
    assert spans(group) == [(0, 3, 1), (5, 7, 1), (8, 10, 1)]
    assert group.outstanding == 7


def test_an_ack_may_span_several_leases_and_gaps():
    group = new_group()
    grant(group, (0, 3, 1), (5, 8, 1), (9, 12, 1))
    group.apply(Ack(((2, 10),), 5))
    assert spans(group) == [(0, 2, 1), (10, 12, 1)]


def test_offsets_between_granted_runs_hold_no_messages_and_are_done():
    group = new_group()
    grant(group, (0, 3, 1), (5, 8, 1))
    assert group.next == 8
    assert [(span.start, span.end) for span in group.plan(1_000, 100).returned] == [(0, 3), (5, 8)]


def test_a_nacked_message_comes_back_after_its_delay():
    group = new_group()
    grant(group, (0, 4, 1))
    group.apply(Nack(((1, 2, 50),), 10, "no"))
    assert group.plan(49, 10).returned == ()
    (span,) = group.plan(50, 10).returned
    assert (span.start, span.end, span.deliveries) == (1, 2, 1)


def test_an_extended_lease_ends_later():
    group = new_group()
    grant(group, (0, 4, 1), lease=100)
    group.apply(Extend(((0, 2),), 300, 90))
    assert [(span.start, span.end) for span in group.plan(150, 10).returned] == [(2, 4)]
    assert [(span.start, span.end) for span in group.plan(300, 10).returned] == [(0, 2), (2, 4)]


def test_a_message_that_expired_twice_is_delivered_alone():
    group = new_group()
    grant(group, (0, 3, 1), now=0, lease=10)
    grant(group, (0, 3, 2), now=10, lease=10)
    grant(group, (0, 3, 3), now=20, lease=10)
    plan = group.plan(30, 10)
    assert plan.alone
    assert [(span.start, span.end) for span in plan.returned] == [(0, 1)]
    assert plan.fresh_max == 0


def test_a_suspect_does_not_join_a_batch_that_has_begun():
    group = new_group()
    grant(group, (1, 2, 1), now=0, lease=10)
    grant(group, (1, 2, 2), now=10, lease=10)
    grant(group, (1, 2, 3), now=20, lease=10)
    grant(group, (0, 1, 1), now=20, lease=5)
    plan = group.plan(40, 10)
    assert [(span.start, span.end) for span in plan.returned] == [(0, 1)]


def test_nacks_do_not_make_a_message_suspect():
    group = new_group()
    for delivery in range(1, 6):
        grant(group, (0, 2, delivery), now=delivery * 10, lease=100)
        group.apply(Nack(((0, 2, delivery * 10),), delivery * 10))
    assert not group.plan(1_000, 10).alone


def test_acking_twice_is_fine():
    group = new_group()
    grant(group, (0, 1, 1))
    group.apply(Ack(((0, 1),), 1))
    assert group.ackable([0], delivery=1, now_ms=2) == ([True], [])


def test_a_receipt_counts_until_a_later_delivery_is_out():
    group = new_group()
    grant(group, (0, 1, 1), now=0, lease=10)
    assert group.ackable([0], delivery=1, now_ms=50) == ([True], [0]), "expired, but nobody else has it"
    grant(group, (0, 1, 2), now=50, lease=10)
    assert group.ackable([0], delivery=1, now_ms=55) == ([False], [])
    assert group.ackable([0], delivery=2, now_ms=55) == ([True], [0])
    assert group.ackable([0], delivery=1, now_ms=70) == ([True], [0]), "the second lease ended too"


def test_receipts_of_several_spans_are_judged_one_by_one():
    group = new_group()
    grant(group, (0, 2, 1), (4, 6, 1), now=0, lease=10)
    group.apply(Ack(((1, 2),), 1))
    grant(group, (5, 6, 2), now=10, lease=10)
    assert group.ackable([0, 1, 4, 5, 9], delivery=1, now_ms=15) == ([True, True, True, False, True], [0, 4, 9])


def test_a_nack_or_extend_needs_the_latest_delivery():
    group = new_group()
    grant(group, (0, 1, 1), now=0, lease=10)
    grant(group, (0, 1, 2), now=10, lease=10)
    assert not group.holds(0, delivery=1)
    assert group.holds(0, delivery=2)
    group.apply(Nack(((0, 1, 12),), 12))
    assert not group.holds(0, delivery=2)


def test_an_ack_whose_grant_was_lost_leaves_the_rest_to_be_handed_out():
    group = new_group()
    group.apply(Ack(((5, 6),), 1))
    assert group.next == 6
    (span,) = group.plan(1, 100).returned
    assert (span.start, span.end, span.deliveries) == (0, 5, 0)


def test_a_repeated_attempt_finds_its_messages_while_the_lease_lasts():
    group = new_group()
    grant(group, (0, 5, 1), lease=100, attempt_id="a")
    group.apply(Ack(((1, 2),), 10))
    found = group.replay("a", now_ms=50)
    assert found is not None
    assert [(span.start, span.end) for span in found] == [(0, 1), (2, 5)]
    assert group.replay("a", now_ms=100) is None
    assert group.replay("other", now_ms=50) is None


def test_attempts_are_bounded():
    group = new_group()
    for number in range(ATTEMPTS_MAX + 10):
        grant(group, (number, number + 1, 1), now=0, lease=100, attempt_id=str(number))
    assert len(group.attempts) <= ATTEMPTS_MAX


def test_no_more_is_handed_out_than_the_bound():
    group = new_group()
    grant(group, (0, OUTSTANDING_MAX, 1))
    assert group.plan(1, 10).fresh_max == 0
    assert not group.may_take_fresh(OUTSTANDING_MAX + 1)


def test_a_purge_forgets_what_lies_below():
    group = new_group()
    grant(group, (0, 10, 1))
    group.purge(4)
    assert spans(group) == [(4, 10, 1)]
    group.purge(20)
    assert (spans(group), group.next) == ([], 20)


def test_the_floor_is_the_oldest_message_not_done():
    group = new_group()
    grant(group, (0, 10, 1))
    assert group.floor() == 0
    group.apply(Ack(((0, 9),), 1))
    assert group.floor() == 9
    group.apply(Ack(((9, 10),), 1))
    assert group.floor() == 10


def test_the_next_wakeup_is_the_earliest_end_of_a_lease_or_back_off():
    group = new_group()
    assert group.next_wakeup_ms() is None
    grant(group, (0, 1, 1), lease=100)
    grant(group, (1, 2, 1), lease=50)
    assert group.next_wakeup_ms() == 50
    group.apply(Ack(((1, 2),), 1))
    assert group.next_wakeup_ms() == 100


def test_a_new_leader_shortens_leases_that_its_clock_would_prolong():
    group = new_group()
    grant(group, (0, 1, 1), now=1_000_000, lease=100)
    group.take_over(now_ms=500)
    assert group.next_wakeup_ms() == 600


def test_a_group_that_starts_again_forgets_everything():
    group = new_group()
    grant(group, (0, 10, 1), attempt_id="a")
    group.apply(GroupStart(3, 1))
    assert (spans(group), group.next, group.attempts) == ([], 3, {})


def test_a_snapshot_goes_on_where_it_was_taken():
    group = new_group()
    grant(group, (0, 10, 1), attempt_id="a")
    group.apply(Nack(((2, 3, 60),), 10))
    group.apply(Ack(((0, 1),), 20))
    twin = GroupDelivery(group.snapshot())
    assert twin.snapshot() == group.snapshot()
    assert twin.plan(60, 10) == group.plan(60, 10)
    twin.apply(Ack(((2, 3),), 30))
    assert twin.snapshot() != group.snapshot(), "a snapshot shares nothing with what it was taken from"


def test_ranges_of_joins_neighbours_and_drops_repeats():
    assert ranges_of([5, 1, 2, 2, 9]) == ((1, 3), (5, 6), (9, 10))
    assert ranges_of([]) == ()
