"""Epochs: where two logs may diverge."""

from __future__ import annotations

import pytest

from portalmq.broker.core.replica.epochs import Epochs

#   (1, 0)      (3, 57)          (4, 90)
#   |---- 1 ----|------- 3 ------|--- 4 --> 120
KNOWN = [(1, 0), (3, 57), (4, 90)]


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (4, (4, 120)),  # the last one ends with the log
        (9, (4, 120)),  # an unknown later epoch: the last one before it
        (3, (3, 90)),
        (2, (1, 57)),  # a gap: an epoch without records in this log
        (1, (1, 57)),
        (0, (0, 0)),  # a log without records
    ],
)
def test_the_end_of_an_epoch_is_where_the_next_one_begins(asked, answer):
    assert Epochs(KNOWN).end_of(asked, 120) == answer


def test_below_the_first_epoch_logs_share_only_the_start():
    assert Epochs([(3, 57)]).end_of(2, 120) == (0, 57)


def test_without_epochs_the_end_is_the_end_of_the_log():
    empty = Epochs()
    assert empty.last == 0
    assert empty.end_of(7, 5) == (0, 5)


def test_a_truncation_drops_the_epochs_that_began_there():
    epochs = Epochs(KNOWN)
    epochs.truncate(90)
    assert epochs.entries == [(1, 0), (3, 57)]
    assert epochs.last == 3
    epochs.truncate(0)
    assert epochs.entries == []


def test_the_start_of_an_epoch_is_known_or_not():
    assert Epochs(KNOWN).start_of(3) == 57
    assert Epochs(KNOWN).start_of(2) is None


@pytest.mark.parametrize("added", [(4, 130), (3, 130), (5, 90), (5, 80)])
def test_both_columns_rise(added):
    with pytest.raises(AssertionError):
        Epochs(KNOWN).add(*added)
