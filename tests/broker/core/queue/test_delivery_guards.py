"""What a group's fold ignores or refuses: each guard on its own, with what only it keeps out."""

from __future__ import annotations

from portalmq.broker.core.fold import HELD_MS, GroupFold, SpanFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.records import Ack, Dead, Extend, Grant, GroupStart, Nack, Pause, Redrive


def new_group(start: int = 0) -> GroupDelivery:
    return GroupDelivery(GroupFold("g", start, start, []))


def grant(group: GroupDelivery, *ranges: tuple[int, int, int], now: int = 0, lease: int = 100, **more: object) -> None:
    end = max((end for _, end, _ in ranges), default=0)
    group.apply(Grant(ranges, max(end, group.next), now, now + lease, **more))  # type: ignore[arg-type]


def test_an_unseen_return_takes_back_no_delivery_where_there_was_none() -> None:
    group = new_group()
    grant(group, (0, 1, 2))
    group.apply(Dead(((0, 1, 2),), 10))
    group.apply(Redrive(((0, 1, 20),), 20))
    group.apply(Nack(((0, 1, 30),), 30, unseen=True))
    (span,) = group.spans()
    assert (span.deliveries, span.lease) == (0, 2)


def test_a_lanes_messages_have_passed_below_its_cursor_and_below_the_groups_start() -> None:
    group = new_group(start=10)
    assert group.has_passed((3, 0, 9))
    assert not group.has_passed((3, 0, 10))
    group.apply(Grant((), 10, 0, 100, cursors=((3, 0, 20), (DELAYED, 50, 15))))
    assert group.has_passed((3, 0, 19))
    assert not group.has_passed((3, 0, 20))
    assert group.has_passed((DELAYED, 49, 30)), "due before the cursor"
    assert group.has_passed((DELAYED, 50, 14))
    assert not group.has_passed((DELAYED, 50, 15))
    assert not group.has_passed((4, 0, 19)), "a lane whose cursor has not moved"


def test_a_repeated_attempt_gets_nothing_that_was_returned_or_whose_own_lease_is_over() -> None:
    group = new_group()
    grant(group, (0, 3, 1), lease=100, attempt_id="a")
    group.apply(Nack(((0, 1, 90),), 10))
    group.apply(Extend(((1, 2),), 40, 10))
    found = group.replay("a", now_ms=50)
    assert found is not None
    assert [(span.start, span.end) for span in found] == [(2, 3)]


def test_a_message_without_a_named_holder_is_delivered_to_no_name() -> None:
    group = new_group()
    grant(group, (0, 1, 1), attempt_id="just an id")
    assert not group.is_delivered_to(0, "", 50)


def test_a_finished_message_is_known_by_the_attempt_of_its_holder() -> None:
    group = new_group()
    grant(group, (0, 2, 1), attempt_id="7:one")
    grant(group, (2, 3, 1), attempt_id="8:two")
    group.apply(Ack(((0, 3),), 10))
    assert [group.is_delivered_to(offset, "7", 50) for offset in range(4)] == [True, True, False, False]
    assert [group.is_delivered_to(offset, "8", 50) for offset in range(4)] == [False, False, True, False]


def test_held_messages_of_a_snapshot_wake_nobody() -> None:
    held = SpanFold(0, 1, 0, 0, False, 0, HELD_MS)
    group = GroupDelivery(GroupFold("g", 0, 1, [held]))
    assert group.next_wakeup_ms() is None
    assert group.held == 1


def test_attempts_of_an_earlier_group_are_forgotten_when_it_starts_again() -> None:
    group = new_group()
    grant(group, (0, 1, 1), attempt_id="7:one")
    group.apply(GroupStart(0, 10))
    assert group.replay("7:one", 20) is None
    assert not group.is_delivered_to(0, "7", 20)


def test_a_repeated_attempt_gets_no_part_of_a_message_before_it() -> None:
    group = new_group()
    grant(group, (0, 3, 1), (5, 6, 1), attempt_id="a")
    group.apply(Ack(((5, 6),), 10))
    found = group.replay("a", now_ms=50)
    assert found is not None
    assert [(span.start, span.end) for span in found] == [(0, 3)]


def test_parts_of_a_range_end_with_it() -> None:
    group = new_group()
    grant(group, (0, 3, 1), (5, 8, 1), (9, 10, 1))
    assert [(start, end) for start, end, _ in group.parts_within(1, 6)] == [(1, 3), (5, 6)]


def test_spans_are_unchanged_until_a_record_changes_them() -> None:
    group = new_group()
    grant(group, (0, 3, 1), (5, 8, 1))
    found = group.spans_of([0, 6])
    assert group.are_unchanged(found)
    group.apply(Extend(((5, 8),), 200, 10))
    assert not group.are_unchanged(found)


def test_a_message_is_free_when_its_lease_is_over_or_it_waits_for_its_turn() -> None:
    group = new_group()
    grant(group, (0, 1, 1), held=((1, 2, 0),))
    leased, held = group.spans()
    assert [group.is_free(leased, now_ms) for now_ms in (99, 100)] == [False, True]
    assert group.is_free(held, 0)


def test_a_group_is_paused_as_the_latest_change_says_in_whatever_order_they_come() -> None:
    group = new_group()
    assert not group.is_paused()
    assert group.is_paused(1, paused=True), "the control plane knows of a later change"
    group.apply(Pause(2, 10, paused=True))
    group.apply(Pause(1, 20, paused=False))
    assert group.is_paused()
    assert group.is_paused(2, paused=False)
    assert not group.is_paused(3, paused=False)
    group.apply(Pause(3, 30, paused=False))
    assert not group.is_paused()
