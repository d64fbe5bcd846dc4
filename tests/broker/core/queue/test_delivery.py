"""A group's fold on one partition: messages that it delivers, takes back and forgets."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.supply import ListSupply, chosen, offsets_of

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue.delivery import (
    ATTEMPTS_MAX,
    OUTSTANDING_MAX,
    GroupDelivery,
)
from portalmq.broker.core.queue.key_order import KeyQueues
from portalmq.broker.core.queue.records import Ack, Dead, Extend, Grant, GroupStart, Nack, Redrive, ranges_of
from portalmq.broker.core.queue.spans import STALE_WAKEUPS_MAX, SWEPT_AT_ONCE
from portalmq.broker.partition.folding import GroupsFold


def new_group(start: int = 0) -> GroupDelivery:
    return GroupDelivery(GroupFold("g", start, start, []))


def grant(group: GroupDelivery, *ranges: tuple[int, int, int], now: int = 0, lease: int = 100, **more) -> None:
    end = max((end for _, end, _ in ranges), default=0)
    group.apply(Grant(ranges, max(end, group.next), now, now + lease, **more))


def handed(group: GroupDelivery, now: int, max_messages: int = 100, *, end: int = 0) -> list[int]:
    """Return the offsets that would be delivered from a log of `end` messages."""
    supply = ListSupply()
    supply.add(max(end, group.next))
    return offsets_of(chosen(group, supply, now, max_messages))


def spans(group: GroupDelivery) -> list[tuple[int, int, int]]:
    return [(span.start, span.end, span.deliveries) for span in group.spans()]


def test_a_new_group_delivers_from_its_start():
    assert handed(new_group(start=7), now=0, end=10) == [7, 8, 9]


def test_granted_messages_are_not_delivered_again_under_their_lease():
    group = new_group()
    grant(group, (0, 10, 1))
    assert handed(group, now=99, end=12) == [10, 11]


def test_an_expired_lease_returns_its_messages_with_their_count():
    group = new_group()
    grant(group, (0, 10, 1), lease=100)
    (span,) = group.available(100)
    assert (span.start, span.end, span.deliveries, span.expiries) == (0, 10, 1, 0)


def test_at_most_the_requested_number_is_delivered_oldest_first():
    group = new_group()
    grant(group, (0, 3, 1), now=5, lease=10)
    grant(group, (3, 6, 1), now=0, lease=1)
    assert handed(group, now=50, max_messages=4, end=10) == [0, 1, 2, 3]


def test_selecting_changes_nothing():
    group = new_group()
    grant(group, (0, 4, 1), lease=1)
    before = group.snapshot()
    assert handed(group, 10, 2) == handed(group, 10, 2) == [0, 1]
    assert group.snapshot() == before


def test_acked_messages_are_done_for_good():
    group = new_group()
    grant(group, (0, 10, 1), lease=10)
    group.apply(Ack(((0, 10),), 5))
    assert spans(group) == []
    assert handed(group, 1_000) == []
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
    assert handed(group, 1_000) == [0, 1, 2, 5, 6, 7]


def test_a_nacked_message_comes_back_after_its_delay():
    group = new_group()
    grant(group, (0, 4, 1))
    group.apply(Nack(((1, 2, 50),), 10, "no"))
    assert list(group.available(49)) == []
    (span,) = group.available(50)
    assert (span.start, span.end, span.deliveries) == (1, 2, 1)


def test_an_extended_lease_ends_later():
    group = new_group()
    grant(group, (0, 4, 1), lease=100)
    group.apply(Extend(((0, 2),), 300, 90))
    assert handed(group, 150) == [2, 3]
    assert handed(group, 300) == [0, 1, 2, 3]


def test_a_message_whose_lease_expired_twice_is_delivered_alone():
    group = new_group()
    grant(group, (0, 3, 1), now=0, lease=10)
    assert handed(group, 10, end=5) == [0, 1, 2, 3, 4]
    grant(group, (0, 3, 2), now=10, lease=10)
    assert handed(group, 20, end=5) == [0]


def test_a_suspect_does_not_join_a_batch_that_has_begun():
    group = new_group()
    grant(group, (1, 2, 1), now=0, lease=10)
    grant(group, (1, 2, 2), now=10, lease=10)
    grant(group, (0, 1, 1), now=20, lease=5)
    assert handed(group, 40) == [0]


def test_nacks_do_not_make_a_message_suspect():
    group = new_group()
    for delivery in range(1, 6):
        grant(group, (0, 2, delivery), now=delivery * 10, lease=100)
        group.apply(Nack(((0, 2, delivery * 10),), delivery * 10))
    assert handed(group, 1_000) == [0, 1]


def test_acking_twice_is_fine():
    group = new_group()
    grant(group, (0, 1, 1))
    group.apply(Ack(((0, 1),), 1))
    assert group.ackable([0], delivery=1)[0] == [True]


def test_an_ack_of_a_delayed_message_whose_grant_was_lost_is_recorded():
    """Found by the simulator: lane 0 is past the message, and the cursor of its own lane was lost with the grant."""
    group = new_group()
    grant(group, (20, 21, 1))
    assert (group.next, group.cursors) == (21, {})
    assert group.ackable([11], delivery=1) == ([True], [11])
    group.apply(Ack((), 2, ahead=((32, 5_000, 11),)))
    assert group.is_ahead(11)


def test_a_receipt_counts_until_a_later_delivery():
    group = new_group()
    grant(group, (0, 1, 1), now=0, lease=10)
    assert group.ackable([0], delivery=1) == ([True], [0])
    grant(group, (0, 1, 2), now=50, lease=10)
    assert group.ackable([0], delivery=1) == ([False], [])
    assert group.ackable([0], delivery=2) == ([True], [0])


def test_a_refused_receipt_stays_refused():
    group = new_group()
    grant(group, (0, 1, 1), now=0, lease=10)
    grant(group, (0, 1, 2), now=10, lease=10)
    group.apply(Nack(((0, 1, 12),), 12))
    assert group.ackable([0], delivery=1) == ([False], []), "the later delivery was returned"
    assert group.ackable([0], delivery=2) == ([True], [0]), "a consumer may ack after its own nack"
    group.apply(Dead(((0, 1, 2),), 20))
    assert group.ackable([0], delivery=2) == ([False], [])
    group.apply(Redrive(((0, 1, 30),), 30))
    assert group.ackable([0], delivery=2) == ([False], []), "the redrive began another life of the message"
    assert group.ackable([0], delivery=1) == ([False], [])


def test_a_receipt_whose_grant_a_full_disk_refused_counts_after_a_redrive():
    """Found by the simulator: the receipt was refused while the log held only the redrive. The leader then reused its
    number in the same epoch."""
    group = new_group()
    group.apply(Grant(((0, 1, 1),), 1, 0, 10), 0, leader_epoch=1)
    group.apply(Dead(((0, 1, 1),), 20), 1, leader_epoch=1)
    group.apply(Redrive(((0, 1, 30),), 30), 2, leader_epoch=3)
    cut = GroupDelivery(group.snapshot())
    group.apply(Grant(((0, 1, 1),), 1, 40, 50), 3, leader_epoch=3)
    assert group.ackable([0], 2, leader_epoch=3) == ([True], [0])
    assert cut.ackable([0], 2, leader_epoch=3) == ([True], [0])
    assert cut.ackable([0], 2, leader_epoch=4) == ([True], [0]), "the receipt is of a later leader"
    cut.apply(Grant(((0, 1, 1),), 1, 60, 70), 3, leader_epoch=3)
    assert cut.ackable([0], 2, leader_epoch=3) == ([True], [0])


def test_no_receipt_from_before_a_redrive_counts_after_it_even_with_a_higher_number():
    """Leader 1 granted leases whose records its successor does not have."""
    group = new_group()
    group.apply(Grant(((0, 1, 1),), 1, 0, 10), 0, leader_epoch=2)
    assert group.ackable([0], 5, leader_epoch=1) == ([False], [])
    group.apply(Dead(((0, 1, 1),), 20), 1, leader_epoch=2)
    assert group.ackable([0], 5, leader_epoch=1) == ([False], [])
    group.apply(Redrive(((0, 1, 30),), 30), 2, leader_epoch=2)
    assert group.ackable([0], 5, leader_epoch=1) == ([False], [])
    assert group.ackable([0], 1, leader_epoch=2) == ([False], [])
    assert GroupDelivery(group.snapshot()).ackable([0], 5, leader_epoch=1) == ([False], [])


def test_the_receipt_of_a_lease_after_a_redrive_counts_when_the_message_was_given_back():
    group = new_group()
    group.apply(Grant(((0, 1, 1),), 1, 0, 10), 0, leader_epoch=1)
    group.apply(Dead(((0, 1, 1),), 20), 1, leader_epoch=1)
    group.apply(Redrive(((0, 1, 30),), 30), 2, leader_epoch=1)
    group.apply(Grant(((0, 1, 1),), 1, 30, 40), 3, leader_epoch=1)
    group.apply(Nack(((0, 1, 35),), 35), 4, leader_epoch=1)
    assert group.ackable([0], 2, leader_epoch=1) == ([True], [0])
    assert group.ackable([0], 1, leader_epoch=1) == ([False], [])


def test_a_receipt_whose_grant_was_lost_counts_after_an_unseen_return_of_the_lease_before():
    group = new_group()
    group.apply(Grant(((0, 1, 1),), 1, 0, 10), 0, leader_epoch=1)
    group.apply(Nack(((0, 1, 5),), 5, unseen=True), 1, leader_epoch=1)
    assert group.ackable([0], 1, leader_epoch=1) == ([False], [])
    assert group.ackable([0], 2, leader_epoch=1) == ([True], [0])


def test_a_lease_that_is_no_delivery_has_a_number_of_its_own():
    group = new_group()
    group.apply(Grant(((0, 1, 0),), 1, 0, 10, leases_above=1), 0, leader_epoch=1)
    assert (group.last_lease([(0, 1)]), group.last_lease([(1, 9)])) == (2, 0)
    assert group.holds(0, 2, leader_epoch=1)
    assert group.ackable([0], 2, leader_epoch=1) == ([True], [0])
    assert group.overdue(11, 1, 100) == []
    group.apply(Grant(((0, 1, 1),), 1, 20, 30), 1, leader_epoch=1)
    assert (group.last_lease([(0, 1)]), group.at(0).deliveries) == (3, 1)
    assert group.ackable([0], 2, leader_epoch=1) == ([False], [])
    assert group.ackable([0], 3, leader_epoch=1) == ([True], [0])


def test_a_receipt_of_an_earlier_epoch_does_not_count_against_a_lease_of_a_later_one():
    """The number alone proves nothing: a fail-over may lose the grant, and the next leader reuses its number."""
    group = new_group()
    group.apply(Grant(((0, 1, 1),), 1, 0, 10), 0, leader_epoch=5)
    assert not group.holds(0, 1, leader_epoch=4)
    assert not group.may_extend(0, 1, 5, leader_epoch=4, by_key=False)
    assert group.ackable([0], 1, leader_epoch=4) == ([False], [])
    assert group.holds(0, 1, leader_epoch=5)
    assert group.holds(0, 1, leader_epoch=6), "its own grant was lost, and is the later of the two"
    again = GroupDelivery(group.snapshot())
    assert not again.holds(0, 1, leader_epoch=4)


def test_a_span_stored_by_an_older_version_is_compared_by_its_number():
    group = new_group()
    grant(group, (0, 1, 2))
    assert group.holds(0, 2, leader_epoch=4)
    assert not group.holds(0, 1, leader_epoch=4)


def test_receipts_of_several_spans_are_judged_one_by_one():
    group = new_group()
    grant(group, (0, 2, 1), (4, 6, 1), now=0, lease=10)
    group.apply(Ack(((1, 2),), 1))
    grant(group, (5, 6, 2), now=10, lease=10)
    assert group.ackable([0, 1, 4, 5, 9], delivery=1) == (
        [True, True, True, False, True],
        [0, 1, 4, 9],
    )


def test_a_nack_or_extend_needs_the_latest_delivery():
    group = new_group()
    grant(group, (0, 1, 1), now=0, lease=10)
    grant(group, (0, 1, 2), now=10, lease=10)
    assert not group.holds(0, delivery=1)
    assert group.holds(0, delivery=2)
    group.apply(Nack(((0, 1, 12),), 12))
    assert not group.holds(0, delivery=2)


def test_an_ack_whose_grant_was_lost_leaves_the_rest_to_be_delivered():
    group = new_group()
    group.apply(Ack((), 1, ahead=((0, 0, 5),)))
    assert (group.next, spans(group), group.is_ahead(5)) == (0, [], True)
    assert handed(group, 1, end=8) == [0, 1, 2, 3, 4, 6, 7]
    assert group.ackable([5], delivery=1)[0] == [True]
    grant(group, (0, 5, 1), (6, 8, 1))
    assert not group.is_ahead(5), "the cursor has passed it: it is done like any other message"
    assert spans(group) == [(0, 5, 1), (6, 8, 1)]


def test_a_repeated_attempt_finds_its_messages_while_the_lease_lasts():
    group = new_group()
    grant(group, (0, 5, 1), lease=100, attempt_id="a")
    group.apply(Ack(((1, 2),), 10))
    found = group.replay("a", now_ms=50)
    assert found is not None
    assert [(span.start, span.end) for span in found] == [(0, 1), (2, 5)]
    assert group.replay("a", now_ms=100) is None
    assert group.replay("other", now_ms=50) is None


def test_a_repeated_attempt_gets_nothing_that_another_consumer_holds():
    group = new_group()
    grant(group, (0, 2, 1), (2, 3, 1), lease=100, attempt_id="a")
    group.apply(Nack(((0, 1, 10), (2, 3, 10)), 10))
    grant(group, (0, 1, 2), now=20, attempt_id="b")
    for again in (group, GroupDelivery(group.snapshot())):
        assert [(span.start, span.end) for span in again.replay("a", now_ms=50) or []] == [(1, 2)]
        assert [(span.start, span.end) for span in again.replay("b", now_ms=50) or []] == [(0, 1)]


def test_a_repeated_attempt_gets_nothing_under_a_lease_number_reused_by_a_later_leader():
    group = new_group()
    group.apply(Grant(((0, 1, 1),), 1, 0, 100, attempt_id="a"), 0, leader_epoch=4)
    group.apply(Nack(((0, 1, 5),), 5, unseen=True))
    group.apply(Grant(((0, 1, 1),), 1, 10, 100), 2, leader_epoch=5)
    assert group.replay("a", now_ms=50) == []


def test_an_attempt_stored_by_an_older_version_repeats_nothing():
    group = new_group()
    grant(group, (0, 1, 1), lease=100, attempt_id="a")
    fold = group.snapshot()
    fold.attempt_leases = {}
    assert GroupDelivery(fold).replay("a", now_ms=50) == []


def test_the_fold_knows_a_holder_however_many_receives_follow():
    group = new_group()
    grant(group, (0, 2, 1), lease=100, attempt_id="7:one")
    for number in range(2, ATTEMPTS_MAX + 10):
        grant(group, (number, number + 1, 1), lease=100, attempt_id=f"8:{number}")
    assert "7:one" not in group.attempts
    group = GroupDelivery(group.snapshot())
    assert [group.is_delivered_to(1, holder, 99) for holder in ("7", "8", "70", "7:one", "")] == [True, *[False] * 4]
    assert not group.is_delivered_to(1, "7", 100), "its lease has ended"


def test_a_holder_keeps_what_it_extends_and_loses_what_is_returned():
    group = new_group()
    grant(group, (0, 4, 1), lease=100, attempt_id="7:one")
    group.apply(Extend(((0, 1),), 200, 50))
    group.apply(Nack(((1, 2, 60),), 50))
    assert [group.is_delivered_to(offset, "7", 60) for offset in range(4)] == [True, False, True, True]
    assert group.is_delivered_to(0, "7", 150), "its lease was extended"
    grant(group, (2, 3, 2), now=110, lease=100, attempt_id="8:two")
    grant(group, (3, 4, 2), now=110, lease=100)
    assert [group.is_delivered_to(2, holder, 120) for holder in "78"] == [False, True]
    assert not group.is_delivered_to(3, "7", 120), "it has no named holder"
    assert [span.holder for span in group.spans()] == ["7", "", "8", ""]


def test_a_receive_without_a_name_has_no_holder():
    group = new_group()
    grant(group, (0, 1, 1), attempt_id="just an id")
    grant(group, (1, 2, 1), consumer="printer")
    assert [span.holder for span in group.spans()] == ["", ""]


def test_attempts_are_bounded():
    group = new_group()
    for number in range(ATTEMPTS_MAX + 10):
        grant(group, (number, number + 1, 1), now=0, lease=100, attempt_id=str(number))
    assert len(group.attempts) <= ATTEMPTS_MAX


def test_no_more_is_delivered_than_the_bound():
    group = new_group()
    grant(group, (0, OUTSTANDING_MAX, 1))
    supply = ListSupply(pieces=True)
    supply.add(OUTSTANDING_MAX + 10)
    assert offsets_of(chosen(group, supply, 1)) == []


def test_a_purge_drops_everything_below():
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


def test_a_loaded_group_has_in_flight_what_is_under_a_lease():
    group = new_group()
    grant(group, (0, 5, 1), lease=100)
    group.apply(Nack(((0, 2, 200),), 10))
    for each in (group, GroupDelivery(group.snapshot())):
        assert [each.in_flight(now_ms) for now_ms in (99, 100)] == [3, 0]


def test_a_new_leader_shortens_leases_that_its_clock_would_prolong():
    group = new_group()
    grant(group, (0, 1, 1), now=1_000_000, lease=100)
    group.take_over(now_ms=500)
    assert group.next_wakeup_ms() == 600


def test_an_ended_lease_is_not_extended_in_order_by_key():
    """Found by the simulator: an earlier message of the key, redriven, had been delivered since."""
    group = new_group()
    grant(group, (0, 1, 1), now=0, lease=10)
    assert group.may_extend(0, delivery=1, now_ms=50, by_key=False), "no other consumer has it"
    assert not group.may_extend(0, delivery=1, now_ms=50, by_key=True)
    assert group.may_extend(0, delivery=1, now_ms=9, by_key=True)


def test_a_leader_elected_again_reads_the_keys_again():
    """Found by the simulator: key queues do not contain replicated records."""
    group = new_group()
    group.keys = KeyQueues()
    group.take_over(now_ms=500)
    assert group.keys is None


def test_a_new_leader_shortens_back_offs_that_its_clock_would_prolong():
    """Found by the simulator: a clock that was an hour ahead kept a nacked message back for an hour."""
    group = new_group()
    grant(group, (0, 1, 1), now=0, lease=100)
    group.apply(Nack(((0, 1, 1_000_300),), 1_000_000))
    group.take_over(now_ms=500)
    assert group.next_wakeup_ms() == 800


def test_a_group_that_starts_again_forgets_everything():
    group = new_group()
    grant(group, (0, 10, 1), attempt_id="a")
    group.apply(GroupStart(3, 1))
    assert (spans(group), group.next, group.attempts) == ([], 3, {})


def test_a_restored_snapshot_continues_where_it_was_taken():
    group = new_group()
    grant(group, (0, 10, 1), attempt_id="a")
    group.apply(Nack(((2, 3, 60),), 10))
    group.apply(Ack(((0, 1),), 20))
    twin = GroupDelivery(group.snapshot())
    assert twin.snapshot() == group.snapshot()
    assert handed(twin, 60, end=12) == handed(group, 60, end=12) == [2, 10, 11]
    twin.apply(Ack(((2, 3),), 30))
    assert twin.snapshot() != group.snapshot(), "a snapshot shares nothing with what it was taken from"


def test_ranges_of_joins_neighbours_and_drops_repeats():
    assert ranges_of([5, 1, 2, 2, 9]) == ((1, 3), (5, 6), (9, 10))
    assert ranges_of([]) == ()


def test_a_span_returned_unchanged_is_stored_and_counted_once():
    group = new_group()
    grant(group, (0, 1, 1), (2, 5, 1), (7, 8, 1))
    group.apply(Extend(((2, 5),), 200, 10))
    assert spans(group) == [(0, 1, 1), (2, 5, 1), (7, 8, 1)]
    assert group.outstanding == 5
    group.apply(Nack(((2, 5, 60),), 20, None, unseen=True))
    assert spans(group) == [(0, 1, 1), (2, 5, 0), (7, 8, 1)]
    assert [span.start for span in group.available(60)] == [2]
    assert group.next_wakeup_ms() == 100
    group.apply(Ack(((0, 8),), 70))
    assert (spans(group), group.outstanding) == ([], 0)


def test_a_new_leader_leaves_leases_as_they_are_where_the_clocks_agree():
    group = new_group()
    grant(group, (0, 2, 1), (5, 6, 1), now=400, lease=100)
    group.apply(Nack(((5, 6, 700),), 450))
    group.take_over(now_ms=500)
    assert [(span.start, span.granted_at_ms, span.available_at_ms) for span in group.spans()] == [
        (0, 400, 500),
        (5, 450, 700),
    ]
    assert [span.start for span in group.available(500)] == [0]
    assert group.next_wakeup_ms() == 700


def test_wakeups_of_repeatedly_extended_leases_do_not_pile_up():
    group = new_group()
    grant(group, (0, 1, 1), (2, 3, 1))
    for now in range(3 * STALE_WAKEUPS_MAX):
        group.apply(Extend(((0, 1), (2, 3)), 1_000 + now, now))
        assert len(group._wakeups) + len(group._unswept) <= STALE_WAKEUPS_MAX + 8
    assert group.next_wakeup_ms() == 1_000 + 3 * STALE_WAKEUPS_MAX - 1


def test_stale_wakeups_are_checked_a_few_at_a_time():
    group = new_group()
    messages = 2 * STALE_WAKEUPS_MAX
    grant(group, *((offset, offset + 1, 1) for offset in range(0, 2 * messages, 2)))
    for now in range(1, 4 * messages):
        unswept = len(group._unswept)
        offset = now % messages * 2
        group.apply(Extend(((offset, offset + 1),), 1_000 + now, now))
        assert len(group._unswept) >= unswept - SWEPT_AT_ONCE
        assert len(group._wakeups) + len(group._unswept) <= 1.5 * (2 * messages + STALE_WAKEUPS_MAX)


@given(st.lists(st.integers(0, 30), max_size=60))
def test_one_query_finds_the_messages_with_a_span_that_single_queries_find(offsets):
    group = new_group()
    grant(group, (2, 9, 1), (9, 12, 2), (20, 25, 1))
    group.apply(Ack(((4, 6), (21, 22)), 1))
    assert group.with_span(offsets) == [offset for offset in offsets if group.has_span(offset)]


def test_the_next_wakeup_is_known_while_stale_ones_are_checked(monkeypatch):
    monkeypatch.setattr("portalmq.broker.core.queue.spans.STALE_WAKEUPS_MAX", 5)
    chance = random.Random(7)
    group = new_group()
    grant(group, *((offset, offset + 3, 1) for offset in range(0, 60, 3)))
    for now in range(2_000):
        start = chance.randrange(60)
        if not group.has_span(start):
            grant(group, (start, start + 1, 1), now=now, lease=chance.randrange(1, 50))
        elif chance.random() < 0.3:
            group.apply(Ack(((start, start + 1),), now))
        else:
            group.apply(Nack(((start, start + 1, now + chance.randrange(50)),), now))
        if chance.random() < 0.1:
            assert [span.start for span in group.available(now)] == [
                span.start for span in group.spans() if span.available_at_ms <= now
            ]
        returned = {start for starts in group._available.values() for start in starts}
        waits = [span.available_at_ms for span in group.spans() if span.start not in returned]
        if waits:
            assert group.next_wakeup_ms() <= min(waits)


def test_a_lease_does_not_reuse_the_number_of_a_lost_grant():
    before = GroupsFold()
    before.apply("g", GroupStart(0, 0), 0, 5)
    before.apply("g", Grant(((0, 2, 1),), 2, 0, 100), 1, 5)
    before.apply("g", Nack(((0, 2, 0),), 1), 2, 5)
    before.apply("g", Grant(((0, 1, 2),), 2, 2, 100), 3, 5)
    before.apply("g", Grant(((1, 2, 2),), 2, 2, 100, attempt_id="a-1"), 4, 5)
    before.end("g")
    after = GroupsFold()
    after.go_on_after(before)
    after.apply("g", GroupStart(0, 0), 0, 5)
    after.apply("g", Grant(((0, 2, 1),), 2, 3, 100, leases_above=after.leases_above), 1, 5)
    group = after.delivery["g"]
    assert spans(group) == [(0, 2, 1)]
    assert [span.lease for span in group.spans()] == [3]
    for lost in (1, 2):
        assert group.ackable([0], lost, 5) == ([False], [])
    assert group.ackable([0], 3, 5) == ([True], [0])
    again = GroupsFold()
    again.go_on_after(after)
    assert again.leases_above == 3


def test_receipts_of_one_span_count_as_if_checked_singly():
    group = new_group()
    grant(group, (0, 6, 1), (8, 10, 1))
    group.apply(Ack(((2, 3),), 0))
    lists = ([0, 1], [1, 0, 1], [3, 5, 4], [0, 3], [2], [2, 3], [5, 8], [9, 8], [20], [])
    ranges = [range(start, end) for start in range(12) for end in range(start, 12)]
    for offsets in (*lists, *ranges):
        for delivery in (0, 1, 2):
            each = [group.ackable([offset], delivery) for offset in offsets]
            verdicts, unfinished = group.ackable(offsets, delivery)
            assert verdicts == [verdict for verdicts, _ in each for verdict in verdicts]
            assert list(unfinished) == [offset for _, more in each for offset in more]
        assert list(group.with_span(offsets)) == [offset for offset in offsets if group.has_span(offset)]
        assert ranges_of(offsets) == ranges_of(list(offsets))


offsets_of_sixty = st.lists(st.integers(0, 60), max_size=40)


@given(offsets_of_sixty, offsets_of_sixty, st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=12))
def test_many_ranges_are_cut_in_one_pass_as_one_by_one(first, second, ranges):
    """Ranges may be in any order and overlap, although records have them sorted and disjoint."""
    for done in (ranges_of(second), tuple((start, start + length) for start, length in ranges)):
        folds = []
        for at_once in (1, 1_000):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("portalmq.broker.core.queue.spans.RANGES_IN_A_PASS", at_once)
                group = new_group()
                grant(group, (0, 20, 1), (20, 21, 2), (21, 22, 2), (22, 40, 1), (45, 60, 3))
                group.apply(Ack(ranges_of(first), 1))
                group.apply(Grant((), 60, 1, 1, gone=done))
                folds.append((group.snapshot(), group.outstanding, group.next_wakeup_ms()))
        assert folds[0] == folds[1]


def test_a_snapshot_stays_as_it_was_taken():
    group = new_group()
    grant(group, (0, 4, 1), (4, 8, 1), (8, 12, 1))
    group.apply(Dead(((8, 10, 1),), 1, "x"))
    before = group.snapshot()
    again = GroupDelivery(before)
    kept = msgspec.msgpack.encode(before)
    for each in (group, again):
        each.apply(Extend(((0, 4),), 500, 2))
        each.apply(Nack(((1, 2, 300), (4, 8, 300)), 3, unseen=True))
        each.apply(Redrive(((8, 9, 4),), 4), leader_epoch=7)
        grant(each, (4, 8, 2), now=400)
        each.take_over(now_ms=1)
        each.apply(Ack(((0, 6),), 5))
    assert msgspec.msgpack.encode(before) == kept
    assert again.snapshot() == group.snapshot()


def test_one_query_notes_a_few_of_very_many_leases_that_end_at_once(monkeypatch):
    monkeypatch.setattr("portalmq.broker.core.queue.spans.RETURNED_AT_ONCE", 10)
    monkeypatch.setattr("portalmq.broker.core.queue.spans.RANGES_IN_A_PASS", 5)
    group = new_group()
    grant(group, *((offset, offset + 1, 1 + offset % 2) for offset in range(100)))
    group.apply(Ack(ranges_of(list(range(15))), 1))
    assert group.has_returned(100), "the first ten rows are done, but there are more"
    looks, found = 0, set()
    group.overdue(100, 2, 4)
    while group.may_be_overdue:
        looks += 1
        overdue = group.overdue(100, 2, 4)
        assert len(overdue) <= 4
        assert sum(len(starts) for starts in group._available.values()) <= 10 * (looks + 2)
        found.update(start for start, _, _ in overdue)
        group.apply(Dead(tuple(overdue), 100, "x"))
    assert found == set(range(15, 100, 2))
    assert [span.start for span in group.available(100)] == list(range(16, 100, 2))
    assert looks >= 10


@given(st.sets(st.integers(0, 30)), st.integers(0, 31), st.integers(0, 31))
def test_the_count_of_dead_messages_in_a_range_matches_each_offset(offsets: set[int], one: int, other: int):
    group = new_group()
    grant(group, (0, 31, 1))
    group.apply(Dead(tuple((start, end, 1) for start, end in ranges_of(list(offsets))), 0))
    start, end = sorted((one, other))
    assert group.count_dead(start, end) == sum(map(group.is_dead, range(start, end)))
    assert group.dead_from(start) == [dead for dead in group.dead if dead.end > start]
