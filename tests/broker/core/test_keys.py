"""Whose turn it is among the messages of a key: what the simulator has found there."""

from __future__ import annotations

from portalmq.broker.core.delivery import GroupDelivery
from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.keys import KeyBook
from portalmq.broker.core.records import Ack


def test_a_delayed_message_that_comes_before_one_that_is_out_is_looked_at_again():
    """Else it waited for the later one, whose lease had ended, and that one waited for it."""
    book = KeyBook()
    book.add(32, key=2)
    book.handed_out(32)
    assert book.freed == []
    book.add(17, key=2)
    assert book.is_first(17)
    assert book.freed == [17]


def test_a_message_behind_others_of_its_key_is_not_looked_at():
    book = KeyBook()
    book.add(17, key=2)
    book.add(32, key=2)
    assert book.freed == []


def test_an_ack_whose_grant_was_lost_holds_all_keys_back_until_it_is_committed():
    """The message is in no queue of its key: what comes after it must not go while the ack may yet be lost."""
    group = GroupDelivery(GroupFold("g", 0, 0, []))
    group.keys = KeyBook()
    group.apply(Ack((), 1, ahead=((0, 0, 5),)), offset=9)
    assert group.keys is None
    assert group.finished_at == 9
