"""The schedule of faults, and what the histories of a killed client still say."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

from chaos.history import OK, UNKNOWN, History, acts_in, identity_of, value_of
from chaos.schedule import DECK, LONGEST_PAUSE_S, SHORTEST_PAUSE_S, schedule


def test_the_seed_decides_the_schedule() -> None:
    assert schedule(7, 300) == schedule(7, 300)
    assert schedule(7, 300) != schedule(8, 300)


def test_a_long_run_has_every_kind_of_fault_as_often_as_the_deck_says() -> None:
    faults = schedule(7, 300)
    assert {fault.kind for fault in faults} == set(DECK)
    assert len(faults) > 40
    pauses = [after.at_s - before.at_s for before, after in pairwise(faults)]
    assert min(pauses) >= SHORTEST_PAUSE_S - 0.01
    assert max(pauses) <= LONGEST_PAUSE_S + 0.01


def test_one_kind_alone() -> None:
    assert {fault.kind for fault in schedule(7, 100, ("fill the disk",))} == {"fill the disk"}


def test_a_call_without_an_answer_is_unknown_and_half_a_line_is_nothing(tmp_path: Path) -> None:
    file = tmp_path / "history"
    history = History(file)
    first = history.call("a", "send", value="one")
    second = history.call("a", "send", value="two")
    history.answer("a", second, OK, offset=3)
    history.answer("a", first, OK, offset=4)
    file.write_bytes(file.read_bytes()[:-10])
    one, two = acts_in([file])
    assert (one.asked, one.outcome, one.ended) == ({"value": "one"}, UNKNOWN, math.inf)
    assert (two.asked, two.outcome, two.got) == ({"value": "two"}, OK, {"offset": 3})
    assert one.began <= two.began <= two.ended


def test_a_value_that_is_not_whole_is_damaged() -> None:
    whole = value_of("actor/7")
    assert identity_of(whole) == "actor/7"
    assert identity_of(whole[:-1]).startswith("damaged:")
    assert identity_of("").startswith("damaged:")
