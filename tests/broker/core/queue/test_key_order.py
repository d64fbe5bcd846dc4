"""Whose turn it is among the messages of a key: what the simulator has found there."""

from __future__ import annotations

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_order import KeyQueues
from portalmq.broker.core.queue.records import Ack


def test_a_delayed_message_that_comes_before_one_that_is_out_is_looked_at_again():
    """Else it waited for the later one, whose lease had ended, and that one waited for it."""
    book = KeyQueues()
    book.add(32, key=2)
    book.handed_out(32)
    assert book.freed == []
    book.add(17, key=2)
    assert book.is_first(17)
    assert book.freed == [17]


def test_a_message_behind_others_of_its_key_is_not_looked_at():
    book = KeyQueues()
    book.add(17, key=2)
    book.add(32, key=2)
    assert book.freed == []


def test_an_ack_whose_grant_was_lost_holds_all_keys_back_until_it_is_committed():
    """The message is in no queue of its key: what comes after it must not go while the ack may yet be lost."""
    group = GroupDelivery(GroupFold("g", 0, 0, []))
    group.keys = book = KeyQueues()
    group.apply(Ack((), 1, ahead=((0, 0, 5),)), offset=9)
    book.settle(committed=9)
    assert not book.knows_turns
    book.settle(committed=10)
    assert book.knows_turns


def test_a_book_that_is_being_built_counts_what_is_finished_meanwhile():
    """Whether it has read the message already or will find it gone: the next of the key waits for the end's commit."""
    for finished in (0, 7):
        book = KeyQueues([(0, 100)])
        book.add(0, key=1)
        book.add(1, key=1)
        book.read_to(5)
        book.finish(finished, finished + 1, record=50)
        assert not book.is_whole
        book.read_to(100)
        book.settle(committed=50)
        assert (book.is_whole, book.is_settled, book.knows_turns) == (True, False, False)
        book.settle(committed=51)
        assert (book.is_settled, book.knows_turns) == (True, True)
        assert book.is_first(1) == (finished == 0)


def test_what_is_unfinished_again_is_not_taken_out_by_the_end_that_it_had_before():
    book = KeyQueues()
    book.add(3, key=1)
    book.finish(3, 4, record=50)
    book.read_later(3, 4)
    assert not book.is_whole
    book.add(3, key=1)
    book.read_to(4)
    book.settle(committed=50)
    assert not book.knows_turns, "the end may yet be lost, and the redrive with it"
    book.settle(committed=51)
    assert book.knows_turns
    assert book.is_busy(1)
