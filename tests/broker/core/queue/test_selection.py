"""The messages that a receive selects, case by case. test_delivery_model.py compares all of it with a model."""

from __future__ import annotations

import pytest
from support.supply import ListSupply, Message, chosen, granted, offsets_of

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_order import HELD_MAX, KeyQueues
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.records import Ack, Dead, Grant, Nack, Redrive
from portalmq.broker.core.queue.selection import KEYS_PER_STEP, has_turn, read_keys, select


def new_group(start: int = 0) -> GroupDelivery:
    return GroupDelivery(GroupFold("g", start, start, []))


def receive(group: GroupDelivery, supply: ListSupply, now: int, max_messages: int = 100, **more) -> list[int]:
    choice = chosen(group, supply, now, max_messages, **more)
    granted(group, choice, now, now + 100)
    return offsets_of(choice)


def choose_now(group: GroupDelivery, supply: ListSupply, now: int):
    """Select without reading keys."""
    return select(group, supply, now_ms=now, wall_ms=now, due_by_ms=now, max_messages=10, max_deliveries=5, by_key=True)


def test_a_cursor_that_passes_a_time_asks_for_a_later_record():
    group, supply = new_group(), ListSupply()
    supply.add(deliver_at_ms=500)
    supply.add()
    choice = chosen(group, supply, 600)
    assert offsets_of(choice) == [0, 1]
    assert choice.not_before_ms == 500
    assert choice.lane_positions() == ((DELAYED, 500, 1),)


def test_due_messages_wait_until_all_due_by_then_are_readable():
    """An append in flight may hold a message that is due earlier: passing its due time would lose it."""
    group, supply = new_group(), ListSupply()
    supply.add(deliver_at_ms=500)
    choice = select(
        group, supply, now_ms=600, wall_ms=600, due_by_ms=499, max_messages=10, max_deliveries=5, by_key=False
    )
    assert offsets_of(choice) == []
    assert choice.cursors == {}


def test_a_message_on_its_last_delivery_after_an_expired_lease_is_delivered_alone():
    group, supply = new_group(), ListSupply()
    supply.add(3)
    assert receive(group, supply, 0, max_deliveries=2) == [0, 1, 2]
    assert receive(group, supply, 100, max_deliveries=2) == [0]
    assert receive(group, supply, 101, max_deliveries=2) == [1]


def test_a_message_without_deliveries_left_is_overdue_and_not_delivered():
    group, supply = new_group(), ListSupply(pieces=True)
    supply.add(2)
    receive(group, supply, 0, max_deliveries=1)
    assert group.overdue(99, 1, 10) == []
    assert receive(group, supply, 100, max_deliveries=1) == []
    assert group.overdue(100, 1, 10) == [(0, 2, 1)]
    assert group.overdue(100, 1, 1) == [(0, 1, 1)], "at most the requested number"
    assert group.overdue(100, 2, 10) == [], "the group's settings have changed"
    assert group.overdue(100, 1, 10) == [(0, 2, 1)]


def test_messages_gone_from_the_log_are_finished():
    group, supply = new_group(), ListSupply()
    supply.add(4)
    receive(group, supply, 0)
    del supply.messages[1:3]
    choice = chosen(group, supply, 200)
    assert offsets_of(choice) == [0, 3]
    assert choice.gone == [(1, 3)]


def test_selecting_none_moves_cursors_over_expired_messages():
    group, supply = new_group(), ListSupply()
    supply.add(2, expires_at_ms=50)
    supply.add(priority=4, expires_at_ms=50)
    supply.add()
    choice = chosen(group, supply, 60, 0)
    assert (offsets_of(choice), choice.next, choice.expired) == ([], 2, 3)
    assert choice.cursors == {4: (0, 3)}


def test_the_next_of_a_key_waits_until_the_end_of_the_one_before_is_committed():
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(3, key=1)
    assert receive(group, supply, 0, committed=0) == [0]
    group.apply(Ack(((0, 1),), 1), offset=7)
    assert not has_turn(group, 1, committed=7)
    assert receive(group, supply, 1, committed=7) == []
    assert has_turn(group, 1, committed=8)
    assert receive(group, supply, 1, committed=8) == [1]


def test_rebuilt_queues_wait_for_the_same_record():
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(2, key=1)
    receive(group, supply, 0)
    group.apply(Ack(((0, 1),), 1), offset=7)
    group.keys = None
    assert receive(group, supply, 1, committed=7) == []
    assert receive(group, supply, 1, committed=8) == [1]


def test_after_a_purge_the_next_of_a_key_waits_for_the_commit_of_its_predecessors_end():
    """A fail-over may lose the purge and an ack before it: the earlier message would come after the later one."""
    for is_acked in (True, False):
        group, supply = new_group(), ListSupply(by_key=True)
        supply.add(3, key=1)
        receive(group, supply, 0)
        if is_acked:
            group.apply(Ack(((0, 1),), 1), offset=8)
        group.purge(1, 9)
        assert receive(group, supply, 1, committed=8 if is_acked else 9) == []
        assert receive(group, supply, 1, committed=9 if is_acked else 10) == [1]


def test_a_leader_elected_again_knows_what_another_delivered_and_held():
    """The queues of an earlier leadership do not contain replicated grants."""
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(key=1)
    assert receive(group, supply, 0) == [0]
    supply.add(3, key=2)
    group.apply(Grant(((1, 2, 1),), 3, 10, 110, held=((2, 3, 0),)), offset=20)
    group.take_over(20)
    assert receive(group, supply, 20) == [], "one message of the key is leased, and one waits for it"
    group.apply(Ack(((1, 2),), 30), offset=21)
    assert receive(group, supply, 30, committed=22) == [2], "the held message is next"


def test_keys_are_read_a_few_at_a_time():
    """The number of reads in a step does not depend on the backlog, so other work runs between steps."""
    group, supply, steps = new_group(), ListSupply(by_key=True), [0]
    supply.add(1_200, key=1)
    receive(group, supply, 0)
    group.keys = None
    read = supply.returned

    def counted(start: int, end: int):
        steps[-1] += end - start
        return read(start, end)

    supply.returned = counted
    while not read_keys(group, supply, 1):
        assert offsets_of(choose_now(group, supply, 1)) == [], "an incomplete queue selects no message"
        steps.append(0)
    assert sum(steps) == 1_200
    assert max(steps) == KEYS_PER_STEP
    assert receive(group, supply, 1) == []
    group.apply(Ack(((0, 1),), 1), offset=1_300)
    assert receive(group, supply, 1) == [1]


def test_fewer_large_or_scattered_messages_are_read_at_a_time():
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(50, key=1, size=200_000)
    supply.add(50, key=2)
    receive(group, supply, 0)
    group.keys = None
    read_keys(group, supply, 1)
    assert len(group.keys) == 6
    spread, supply = new_group(), ListSupply(by_key=True)
    supply.messages = [Message(number * 5_000, key=1) for number in range(20)]
    receive(spread, supply, 0)
    spread.keys = None
    read_keys(spread, supply, 1)
    assert len(spread.keys) == 6


def test_a_span_of_very_many_messages_is_read_in_parts():
    """For example a span that was leased before the group was ordered by key."""
    group, supply = new_group(), ListSupply(pieces=True)
    supply.add(1_200, key=1)
    receive(group, supply, 0, 1_200)
    supply.by_key = True
    assert not read_keys(group, supply, 1)
    assert len(group.keys) == KEYS_PER_STEP


def test_a_redriven_message_takes_its_place_in_the_queues():
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(3, key=1)
    supply.add(600, key=2)
    receive(group, supply, 0)
    group.apply(Dead(((0, 1, 1),), 1, "often enough", ""), offset=610)
    group.apply(Redrive(((0, 1, 5),), 2), offset=611)
    assert receive(group, supply, 5, committed=610) == []
    assert receive(group, supply, 5, committed=611) == [0], "it comes before the later ones of its key"
    group.apply(Ack(((0, 1),), 6), offset=612)
    assert receive(group, supply, 6, committed=613) == [1]


def test_no_more_are_held_than_the_window():
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(HELD_MAX + 50, key=1)
    supply.add(key=2)
    assert receive(group, supply, 0) == [0]
    assert group.held == HELD_MAX
    assert receive(group, supply, 0) == [], "key 2 is behind the window"
    group.apply(Ack(((0, 1),), 1), offset=1)
    assert receive(group, supply, 1) == [1]


def test_a_back_off_keeps_the_key_and_not_the_others():
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(2, key=1)
    supply.add(key=2)
    assert receive(group, supply, 0) == [0, 2]
    group.apply(Nack(((0, 1, 50), (2, 3, 10)), 5))
    assert receive(group, supply, 20) == [2]
    assert receive(group, supply, 50) == [0]


def test_queues_forget_finished_messages():
    queues = KeyQueues()
    for offset in range(10):
        queues.add(offset, 1 + offset % 2)
    queues.done(0, 9)
    assert len(queues) == 1
    assert not queues.unfinished(1)
    assert 9 in queues.freed
    queues.done(0, 1 << 40)
    assert len(queues) == 0


@pytest.mark.parametrize("by_key", [False, True])
def test_messages_without_room_in_the_answer_stay_unchanged(by_key):
    """An unread message is neither passed over nor taken for gone."""
    group, supply = new_group(), ListSupply(by_key=by_key)
    supply.add(5, size=40)
    assert receive(group, supply, 0, max_bytes=100) == [0, 1, 2]
    assert receive(group, supply, 0, max_bytes=1) == [3]
    assert receive(group, supply, 0, max_bytes=1_000) == [4]
    group.apply(Nack(((0, 5, 10),), 10))
    assert receive(group, supply, 10, max_bytes=100) == [0, 1, 2]
    assert receive(group, supply, 10, max_bytes=100) == [3, 4]
    assert group.outstanding == 5


def test_selecting_stops_when_the_answer_is_full():
    group, supply = new_group(), ListSupply(pieces=True)
    supply.add(4, size=40)
    supply.add(1, size=1, expires_at_ms=1_000)
    assert receive(group, supply, 0, 2, max_bytes=100) == [0, 1]
    assert receive(group, supply, 0, max_bytes=70) == [2, 3]
