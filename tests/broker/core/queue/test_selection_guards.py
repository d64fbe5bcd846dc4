"""What a selection passes over, holds back or leaves alone: each guard on its own, with what only it keeps out."""

from __future__ import annotations

from support.supply import ListSupply, chosen, granted, offsets_of

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue.delivery import OUTSTANDING_MAX, GroupDelivery
from portalmq.broker.core.queue.key_order import KeyQueues
from portalmq.broker.core.queue.records import Ack, Grant, Nack
from portalmq.broker.core.queue.selection import Selection, has_turn, select


def new_group(start: int = 0) -> GroupDelivery:
    return GroupDelivery(GroupFold("g", start, start, []))


def receive(
    group: GroupDelivery, supply: ListSupply, now_ms: int, max_messages: int = 100, **more: object
) -> Selection:
    choice = chosen(group, supply, now_ms, max_messages, **more)  # type: ignore[arg-type]
    granted(group, choice, now_ms, now_ms + 100)
    return choice


# --- whether somebody has a turn -------------------------------------------------------------------------------------


def test_before_the_keys_are_read_any_returned_or_held_message_may_have_a_turn() -> None:
    group = new_group()
    assert not has_turn(group, 0, committed=0)
    group.apply(Grant(((0, 1, 1),), 1, 0, 100))
    assert not has_turn(group, 99, committed=0)
    assert has_turn(group, 100, committed=0)
    group.apply(Grant((), 2, 0, 100, held=((1, 2, 0),)))
    assert has_turn(group, 0, committed=0)
    group.keys = KeyQueues([(0, 10)])
    assert has_turn(group, 0, committed=0), "some keys are not read yet"


def test_nobody_has_a_turn_while_the_end_of_an_unknown_message_may_be_lost() -> None:
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(2, key=1)
    receive(group, supply, 0, committed=0)
    group.apply(Ack((), 1, ahead=((0, 0, 5),)), offset=9)
    assert not has_turn(group, 200, committed=9)
    assert has_turn(group, 200, committed=10)


def test_many_leases_that_have_ended_may_have_turns_before_they_are_noted() -> None:
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(3_000, key=1)
    group.keys = KeyQueues()
    group.apply(Grant(tuple((offset, offset + 1, 1) for offset in range(3_000)), 3_000, 0, 100))
    for offset in range(2_999, -1, -1):
        group.keys.add(offset, 1)
    group.keys.mark_delivered(0)
    group.apply(Nack(((0, 1, 500),), 10))
    assert has_turn(group, 100, committed=0), "of very many only some are noted at once"


def test_without_known_turns_nothing_is_delivered_in_order_by_key() -> None:
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(2, key=1)
    times = {"now_ms": 0, "wall_ms": 0, "due_by_ms": 0}
    choice = select(group, supply, **times, max_messages=5, max_deliveries=9, by_key=True)
    assert (offsets_of(choice), choice.held, choice.next) == ([], [], 0)


# --- room ------------------------------------------------------------------------------------------------------------


def test_returned_messages_beyond_the_size_of_the_answer_stay_as_they_are() -> None:
    group, supply = new_group(), ListSupply()
    supply.add(3, size=100)
    group.apply(Grant(((0, 3, 1),), 3, 0, 100))
    choice = chosen(group, supply, 200, max_bytes=150)
    assert (offsets_of(choice), choice.gone) == ([0, 1], [])


def test_messages_that_do_not_fit_are_not_passed_in_order_by_key() -> None:
    """Neither those without a key nor those with one: a later one that is held moves the cursor."""
    for keys in ((0, 0, 1, 2), (3, 4, 1, 2), (0, 4, 1, 2)):
        group, supply = new_group(), ListSupply(by_key=True)
        supply.add(key=1)
        receive(group, supply, 0)
        for key in keys:
            supply.add(key=key)
        choice = receive(group, supply, 1, 1)
        assert (offsets_of(choice), choice.next, choice.held) == ([1], 2, [])
        assert [offset for offset, _ in choice.keys] == ([1] if keys[0] else [])


def test_looking_only_holds_nothing_back() -> None:
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(2, key=1)
    choice = chosen(group, supply, 0, 0)
    assert (choice.held, choice.keys, choice.next) == ([], [], 0)


def test_a_full_group_holds_nothing_more_back() -> None:
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(4, key=1)
    receive(group, supply, 0, 1)
    held = group.outstanding - 1
    group.outstanding = OUTSTANDING_MAX - 1
    choice = chosen(group, supply, 1)
    assert (choice.delivered, choice.held, choice.next) == ([], [(1 + held, 2 + held, 0)], 2 + held)


# --- lanes -----------------------------------------------------------------------------------------------------------


def test_a_group_gets_no_delayed_message_from_before_its_start() -> None:
    group, supply = new_group(start=2), ListSupply()
    supply.add(4, deliver_at_ms=50)
    assert offsets_of(chosen(group, supply, 50)) == [2, 3]


def test_in_order_by_key_priorities_do_not_count_and_their_lanes_move_along() -> None:
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(2)
    supply.add(2, priority=5, key=1)
    choice = chosen(group, supply, 0)
    assert offsets_of(choice) == [0, 1, 2]
    assert choice.held == [(3, 4, 0)]
    assert choice.cursors == {5: (0, 4)}
    granted(group, choice, 0, 100)
    assert group.has_passed((5, 0, 3))


# --- the queues of keys ----------------------------------------------------------------------------------------------


def test_messages_without_a_key_and_those_known_already_are_in_no_queue_twice() -> None:
    queues = KeyQueues()
    queues.add(1, 0)
    assert len(queues) == 0
    queues.add(3, 7)
    queues.add(3, 7)
    queues.done(3, 4)
    assert not queues.unfinished(7)
    assert queues.is_among_first(3), "a message in no queue waits for none"


def test_only_messages_of_the_range_are_done() -> None:
    queues = KeyQueues()
    queues.add(3, 1)
    queues.add(50, 2)
    queues.done(0, 10)
    assert (queues.unfinished(1), queues.unfinished(2)) == (0, 1)


def test_turns_are_known_when_all_keys_are_read_and_all_ends_are_committed() -> None:
    queues = KeyQueues([(0, 10)])
    assert not queues.knows_turns
    queues.read_to(10)
    assert queues.knows_turns
    queues.add(3, 1)
    queues.finish(3, 4, record=20)
    assert queues.knows_turns
    assert not queues.is_settled
    queues.settle(21)
    assert queues.is_settled
