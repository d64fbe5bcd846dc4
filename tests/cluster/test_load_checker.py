"""The checker of the kill tests detects each violation that it claims to detect."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
from support.load import Acked, Load, check


class Past(Load):
    """The notes of a finished load: `sent` in this order, all of it acknowledged at the offsets 1, 2, …"""

    def __init__(self, *sent: str) -> None:
        self.name, self.topic, self.partitions = "a", "t", 1
        self.sent = defaultdict(list, {0: list(sent)})
        self.acked = [Acked(value, 0, offset, float(offset)) for offset, value in enumerate(sent, start=1)]
        self.failures = []


GOOD = {0: [(1, "a-0"), (2, "a-1"), (3, "a-2")]}


def history() -> list[Load]:
    return [Past("a-0", "a-1", "a-2")]


def test_a_good_history_passes():
    check(history(), GOOD)


def test_what_was_sent_and_not_acked_may_be_there_or_not():
    load = Past("a-0", "a-1", "a-2")
    load.acked.pop()
    check([load], GOOD)
    check([load], {0: GOOD[0][:2]})


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ({0: [(1, "a-0"), (3, "a-2")]}, "1 acked and lost"),
        ({}, "3 acked and lost"),
        ({0: [*GOOD[0], (4, "a-1")]}, "there twice"),
        ({0: GOOD[0], 1: [(1, "a-1")]}, "there twice"),
        ({0: [*GOOD[0], (4, "b-0")]}, "nobody sent"),
        ({0: [(1, "a-1"), (2, "a-0"), (3, "a-2")]}, "acked at another place"),
        ({0: [(1, "a-0"), (2, "a-1"), (4, "a-2")]}, "acked at another place"),
        ({0: [(2, "a-0"), (1, "a-1"), (3, "a-2")]}, "offsets rise"),
    ],
)
def test_a_bad_history_is_caught(found, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check(history(), found)


def test_another_order_is_caught_though_nothing_was_acked():
    load = Past("a-0", "a-1")
    load.acked = [Acked("a-1", 0, 1, 0.0)]
    with pytest.raises(AssertionError, match="order of sending"):
        check([load], {0: [(1, "a-1"), (2, "a-0")]})


def test_a_load_that_failed_or_sent_nothing_does_not_pass():
    idle, failed = Past(), Past("a-0")
    failed.failures.append(OSError("gone"))
    with pytest.raises(AssertionError, match="sent nothing"):
        check([idle], {})
    with pytest.raises(AssertionError, match="gone"):
        check([failed], GOOD)


def test_the_longest_gap_is_of_the_acknowledgements_that_end_after_a_moment():
    load = Past()
    load.acked = [Acked(str(at), partition, 0, at) for at, partition in [(0, 0), (5, 0), (6, 0), (6.5, 1), (9, 0)]]
    load._progress = threading.Condition()
    assert load.longest_gap_s(since=0) == 5
    assert load.longest_gap_s(since=5.5) == 2.5
    assert load.longest_gap_s(since=5.5, partition=0) == 3
    assert load.longest_gap_s(since=10) == 0
