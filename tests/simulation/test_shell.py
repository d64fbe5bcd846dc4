"""The real brokers under faults, over a few seeds; many more run with `make simulate-shell` and `make prove`.

A failing seed is shown, shrunk, by `make simulate-shell SEED=n`. Runs replace clocks, disks and the event loop of their
process, so they have processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SEEDS = 10


def simulated(*arguments: str) -> str:
    command = [sys.executable, "-m", "simulation.shell.run", "--processes", "1", *arguments]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4_000:] + run.stderr[-4_000:]
    return run.stdout


def test_no_fault_breaks_an_invariant_of_real_brokers() -> None:
    assert f"0 of {SEEDS} seeds failed" in simulated("--seeds", str(SEEDS))


def test_a_seed_is_the_same_run_in_every_process() -> None:
    """The traces hash every event of the loop with its time."""
    first = simulated("--first", "9", "--seeds", "4", "--hash").splitlines()[:4]
    second = simulated("--first", "10", "--seeds", "3", "--hash").splitlines()[:3]
    assert [line.split()[:3] for line in first[1:]] == [line.split()[:3] for line in second]


def test_each_tick_is_published_once_whatever_fails() -> None:
    assert "0 of 8 seeds failed" in simulated("--seeds", "8", "--schedules", "5")


@pytest.mark.prove
def test_each_tick_is_published_once_over_many_seeds() -> None:
    assert "0 of 1000 seeds failed" in simulated("--first", "1000", "--seeds", "1000", "--schedules", "6")


def test_an_adoption_does_not_count_on_replicas_that_were_never_in_sync() -> None:
    """One replica alone had what was committed, and was damaged before the next adoption."""
    assert ": held" in simulated("--seed", "78685")


def test_a_trace_tells_what_happens() -> None:
    trace = simulated("--seed", "2")
    for part in ("starts", "is ready", "all faults end", "faults_s:", ": held"):
        assert part in trace
