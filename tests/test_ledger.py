"""The ledger of the proof: what runs enter, where they go on, and what the entries add up to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import ledger


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(ledger, "LEDGER", tmp_path / "LEDGER.jsonl")
    return tmp_path / "LEDGER.jsonl"


def run(kind: ledger.Kind, seeds: list[int], *, first: int | None = None, failed: int | None = None) -> int:
    with ledger.Run(kind, first, writes=True) as entry:
        for number in seeds:
            entry.add(entry.first + number, {"faults": 2}, failed=number == failed)
    return entry.first


def test_the_ledger_is_valid() -> None:
    for entry in ledger.entries():
        assert entry.kind in ledger.KINDS
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", entry.date)
        assert entry.first >= 0
        assert entry.seeds >= 0
        assert all(count >= 0 for count in entry.counts.values())


def test_a_run_goes_on_where_those_of_its_kind_end(empty: Path) -> None:
    assert run("core", [0, 1, 2]) == 0
    assert run("shell", [0]) == 0
    assert run("core", [0, 1]) == 3
    assert run("core", [0], first=100) == 100
    assert run("core", [0]) == 101


def test_a_run_that_was_not_asked_to_writes_nothing(empty: Path) -> None:
    with ledger.Run("core", None, writes=False, otherwise=1) as entry:
        entry.add(entry.first, {"faults": 1}, failed=False)
    assert entry.first == 1
    assert not empty.exists()


def test_an_interrupted_run_enters_the_seeds_before_which_none_is_missing(empty: Path) -> None:
    def interrupted() -> None:
        with ledger.Run("core", 10, writes=True) as entry:
            for seed in (11, 10, 14):
                entry.add(seed, {}, failed=False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [(each.first, each.seeds) for each in ledger.entries()] == [(10, 2)]


def test_failures_are_entered_and_counts_add_up(empty: Path) -> None:
    run("core", [0, 1, 2], failed=1)
    run("core", [0])
    assert [each.failed for each in ledger.entries()] == [[1], []]
    text = ledger.sums(ledger.entries())
    assert text.startswith("core     2 runs, 4 seeds, 1 failed")
    assert "8 faults" in text
