"""Waiters for appended records: answered in order; acks wait until no earlier leader delivers."""

from __future__ import annotations

import copy

import pytest

from portalmq.broker.partition.uncommitted import SETTLEMENT_KINDS, Uncommitted
from portalmq.broker.partition.writer import NotCommittedYet, Pending
from portalmq.broker.storage.batch import Batch, BatchKind
from portalmq.broker.storage.errors import LogClosed
from portalmq.errors import NotLeader, PortalMQError


def appended(uncommitted: Uncommitted, offset: int, kind: BatchKind) -> Pending:
    pending = Pending(Batch(offset, 1, 0, kind, 1, 0))
    pending.base_offset = offset
    uncommitted.add(pending)
    return pending


@pytest.mark.parametrize("kind", sorted(SETTLEMENT_KINDS))
def test_a_record_that_settles_messages_is_answered_later_than_its_commit(kind):
    uncommitted = Uncommitted()
    message, taken_away = appended(uncommitted, 0, BatchKind.MESSAGES), appended(uncommitted, 1, kind)
    assert uncommitted.advance(2, 0, settles=False) == 1
    assert message.done.is_set(), "a produce does not wait"
    assert not taken_away.done.is_set()
    assert uncommitted.records == 0, "it does not hold up later requests"
    uncommitted.settle()
    assert taken_away.done.is_set()
    assert taken_away.error is None


def test_waiters_get_an_unknown_outcome_when_the_leadership_ends():
    uncommitted = Uncommitted()
    ack = appended(uncommitted, 0, BatchKind.ACK)
    uncommitted.advance(1, 0, settles=False)
    uncommitted.fail(NotLeader("moved", outcome="unknown"))
    assert ack.error is not None
    assert ack.error.outcome == "unknown"
    assert uncommitted.unsettled == []


def test_no_call_changes_the_outcome_that_another_one_is_told():
    uncommitted = Uncommitted()
    waiters = [appended(uncommitted, 0, BatchKind.MESSAGES), uncommitted.below(1)]
    uncommitted.fail(NotLeader("moved", outcome="unknown", leader=2))
    for waiter in waiters:
        with pytest.raises(NotLeader) as told:
            waiter.wait()
        assert (told.value.outcome, told.value.extra) == ("unknown", {"leader": 2})
        told.value.outcome = "not_applied"  # as a search does that comes before its append


@pytest.mark.parametrize(
    "error", [LogClosed(), NotCommittedYet("late"), NotLeader("moved", outcome="unknown", leader=2)], ids=repr
)
def test_a_copy_of_an_error_is_like_it_and_changes_alone(error: PortalMQError):
    another = copy.copy(error)
    assert (type(another), another.problem(), str(another)) == (type(error), error.problem(), str(error))
    another.extra["results"] = []
    assert "results" not in error.extra
