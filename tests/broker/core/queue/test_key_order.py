"""The order of the messages of a key: cases that the simulator found."""

from __future__ import annotations

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_order import KeyQueues
from portalmq.broker.core.queue.records import Ack


def test_a_delayed_message_before_a_leased_one_is_checked_again():
    """Otherwise it would wait for the later one, whose lease has ended, and the later one for it."""
    queues = KeyQueues()
    queues.add(32, key=2)
    queues.mark_delivered(32)
    assert queues.freed == []
    queues.add(17, key=2)
    assert queues.is_among_first(17)
    assert queues.freed == [17]


def test_a_message_behind_others_of_its_key_is_not_checked():
    queues = KeyQueues()
    queues.add(17, key=2)
    queues.add(32, key=2)
    assert queues.freed == []


def test_an_ack_whose_grant_was_lost_holds_all_keys_back_until_it_is_committed():
    """The message is in no key queue: the next one must not be delivered while the ack may be lost."""
    group = GroupDelivery(GroupFold("g", 0, 0, []))
    group.keys = queues = KeyQueues()
    group.apply(Ack((), 1, ahead=((0, 0, 5),)), offset=9)
    queues.settle(committed=9)
    assert not queues.knows_turns
    queues.settle(committed=10)
    assert queues.knows_turns


def test_queues_being_read_count_messages_finished_during_the_reading():
    """The next message of the key waits for the commit of its end, whether the message was read or not."""
    for finished in (0, 7):
        queues = KeyQueues([(0, 100)])
        queues.add(0, key=1)
        queues.add(1, key=1)
        queues.read_to(5)
        queues.finish(finished, finished + 1, record=50)
        assert not queues.is_whole
        queues.read_to(100)
        queues.settle(committed=50)
        assert (queues.is_whole, queues.is_settled, queues.knows_turns) == (True, False, False)
        queues.settle(committed=51)
        assert (queues.is_settled, queues.knows_turns) == (True, True)
        assert queues.is_among_first(1) == (finished == 0)


def test_a_redriven_message_is_not_removed_by_its_earlier_end():
    queues = KeyQueues()
    queues.add(3, key=1)
    queues.finish(3, 4, record=50)
    queues.read_later(3, 4)
    assert not queues.is_whole
    queues.add(3, key=1)
    queues.read_to(4)
    queues.settle(committed=50)
    assert not queues.knows_turns, "the end, and the redrive with it, may still be lost"
    queues.settle(committed=51)
    assert queues.knows_turns
    assert queues.unfinished(1)
