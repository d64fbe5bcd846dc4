"""Mutants made from the syntax tree are what they say, and the table of those that change nothing is true to them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from simulation.syntax_hunt import equivalents, main
from simulation.syntax_mutants import SyntaxMutant, all_mutants, function_of, mutants_of

from portalmq.broker.core.replica.epochs import Epochs

EPOCHS = "portalmq.broker.core.replica.epochs"
SOURCE = '''
class Replica:
    def take(self, event):
        """A guard with two alternatives."""
        if event.epoch < self.epoch or not self.ask(event):
            return []
        for each in event:
            if each.old:
                continue
        return [event]

    def may(self) -> bool:
        return self.known is not None and self.version == 3 and self.ready


def same(a, b):
    return [each for each in b if (each.epoch, each.offset) != (a.epoch, a.offset)]
'''


@pytest.fixture
def mutants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SyntaxMutant]:
    (tmp_path / "replica_of_test.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "replica_of_test", raising=False)
    return mutants_of("replica_of_test")


def test_guards_and_comparisons_have_mutants(mutants: list[SyntaxMutant]) -> None:
    assert [mutant.name.removeprefix("replica_of_test ") for mutant in mutants] == [
        "Replica.take: event.epoch < self.epoch or not self.ask(event) -> False",
        "Replica.take: event.epoch < self.epoch -> False",
        "Replica.take: not self.ask(event) -> False",
        "Replica.take: event.epoch < self.epoch -> event.epoch <= self.epoch",
        "Replica.take: each.old -> False",
        "Replica.may: self.version == 3 -> True",
        "Replica.may: self.ready -> True",
        "Replica.may: self.version == 3 -> self.version >= 3",
        "Replica.may: self.version == 3 -> self.version <= 3",
        "same: (each.epoch, each.offset) != (a.epoch, a.offset) -> True",
        "same: (each.epoch, each.offset) != (a.epoch, a.offset) -> (each.offset,) != (a.offset,)",
        "same: (each.epoch, each.offset) != (a.epoch, a.offset) -> (each.epoch,) != (a.epoch,)",
    ]


def test_what_a_mutant_leaves_out_is_still_asked(mutants: list[SyntaxMutant]) -> None:
    """Its effects stay: only the answer is not heeded."""
    asked = []

    class Event(list):  # type: ignore[type-arg]
        epoch = 1

    mutant = next(mutant for mutant in mutants if "not self.ask(event) -> False" in mutant.name)
    take = function_of(mutant)
    replica = type("Replica", (), {"epoch": 1, "ask": lambda self, event: asked.append(event)})()
    event = Event()
    assert take(replica, event) == []
    take.__code__ = mutant.code()
    assert take(replica, event) == [event]
    assert asked == [event, event]


def test_a_mutant_is_planted_into_a_running_process() -> None:
    mutant = next(mutant for mutant in mutants_of(EPOCHS) if mutant.name.endswith("start < end -> True"))
    epochs = Epochs([(1, 0), (2, 7)])
    if (child := os.fork()) == 0:
        function_of(mutant).__code__ = mutant.code()
        epochs.truncate(7)
        os._exit(len(epochs.entries))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    epochs.truncate(7)
    assert epochs.entries == [(1, 0)]


def test_each_mutant_has_a_name_of_its_own_and_other_code() -> None:
    mutants = all_mutants()
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        before, after = function_of(mutant).__code__, mutant.code()
        assert after.co_freevars == before.co_freevars, mutant.name
        assert (after.co_code, after.co_consts) != (before.co_code, before.co_consts), mutant.name


def test_the_table_lists_mutants_that_exist_each_with_its_reason() -> None:
    listed = equivalents()
    assert listed.keys() - {mutant.name for mutant in all_mutants()} == set()
    assert [name for name, reason in listed.items() if not reason.endswith(".")] == []


def test_a_name_that_no_mutant_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["syntax_hunt", "--only", "Nowhere."])
    with pytest.raises(SystemExit):
        main()
    assert "no mutant has 'Nowhere.' in its name" in capsys.readouterr().err
