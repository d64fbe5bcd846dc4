"""A benchmark that is interrupted, or fails late: what it has measured is kept, and nothing runs on."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from portalmq import NotEnoughReplicas
from portalmq.broker.bench import comparison, growth, peers, protocols, systems
from portalmq.broker.bench.growth import GrowthCase
from portalmq.broker.bench.measure import Figures
from portalmq.broker.bench.single import bench
from portalmq.broker.bench.systems import Site, System
from portalmq.system import start_of

GAPS = {"publish_gap_s": 0.25, "delivery_gap_s": 0.5, "acked": 1_234, "lost": 0, "duplicates": 0}
PLACES = {"size": 100, "batch": 1, "processes": 1}
NOISE = {"spin_ms": 1.0, "fdatasync_p50_ms": 0.1, "fdatasync_p99_ms": 0.2, "load": 0.0}


class Fake(System):
    """Runs a shell that sleeps, and another in it."""

    name, nodes = "fake", 3
    started: list[int]

    def start(self, site: Site) -> None:
        site.spawn("sh", "-c", "sleep 600 & echo $! >child; wait")
        child = site.until(lambda: (site.directory / "child").read_text().strip())
        self.started += [*site.pids(), int(child)]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes of the fake system, which is the only one."""
    Fake.started = []
    monkeypatch.setattr(systems, "SYSTEMS", (Fake,))
    monkeypatch.setattr(peers, "PEERS", ())
    monkeypatch.setattr(comparison, "calibration", lambda directory: NOISE)
    monkeypatch.setattr("portalmq.broker.bench.measure.calibration", lambda directory: NOISE)
    return Fake.started


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)  # the signal ends it


def refuse() -> None:
    raise NotEnoughReplicas("only 1 of 2 are in sync")


def give_up() -> None:
    raise click.ClickException("a server is not ready")


def run(tmp_path: Path, *arguments: str) -> tuple[Result, dict[str, Any], str]:
    """Return what was printed, and the files."""
    files = [tmp_path / "bench.json", tmp_path / "bench.md"]
    result = CliRunner().invoke(bench, ["--json", str(files[0]), "--markdown", str(files[1]), *arguments])
    assert result.exit_code == 1, result.output
    return result, json.loads(files[0].read_text()), files[1].read_text()


def have_ended(pids: Sequence[int]) -> bool:
    while any(start_of(pid) is not None for pid in pids):  # init reaps the children
        time.sleep(0.01)
    return bool(pids)


@pytest.mark.parametrize("option", ["--json", "--markdown"])
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(comparison, "compared", lambda *_, **__: pytest.fail("it measures"))
    result = CliRunner().invoke(bench, [option, str(tmp_path / "nowhere" / "bench")])
    assert result.exit_code == 2, result.exception
    assert f"there is no folder {tmp_path / 'nowhere'}" in result.stderr


@pytest.mark.parametrize(
    ("fault", "why"), [(interrupt, "interrupted"), (refuse, "NotEnoughReplicas: only 1 of 2 are in sync")]
)
def test_kills_before_the_end_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[int], fault: Callable[[], None], why: str
) -> None:
    done: list[str] = []

    def gap(system: System, site: Site, sent: signal.Signals, after_s: float) -> Iterator[Figures]:
        done.append(sent.name)
        if len(done) == 5:
            fault()
        yield {**comparison.gap_case(system, sent), **GAPS, "publish_gap_s": len(done) / 4}

    monkeypatch.setattr(comparison, "gap", gap)
    result, report, markdown = run(tmp_path, "--cases", "gap", "--kills", "3")
    cut = {"fake, gap, SIGKILL": f"{why} after 2 of 3 repetitions"}
    assert report["failed"] == cut
    stops = 2 if fault is interrupt else 3
    assert [(each["signal"], each["rounds"]) for each in report["results"]] == [("SIGKILL", 2), ("SIGSTOP", stops)]
    assert "| fake | SIGKILL | 2 | 0.500 | 0.750 | 0.500 | 0.500 | 0 | 0 |" in markdown
    assert f"| fake, gap, SIGKILL | {cut['fake, gap, SIGKILL']} |" in markdown
    assert "publish_gap_s 0.250, delivery_gap_s 0.500, acked 1,234, lost 0" in result.stderr
    assert "Gap after the leader's node gets a signal" in result.stdout
    assert have_ended(started)


@pytest.mark.parametrize(("fault", "why"), [(interrupt, "interrupted"), (give_up, "a server is not ready")])
def test_cases_before_the_end_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[int], fault: Callable[[], None], why: str
) -> None:
    done: list[str] = []

    def measured(
        system: System, site: Site, plan: comparison.CasePlan, under_way: comparison.UnderWay
    ) -> Iterator[Figures]:
        for case in ("produce", "consume"):
            under_way({"system": system.name, "nodes": system.nodes, "case": case, **PLACES})
            if done == ["produce", "consume", "produce"]:
                fault()
            done.append(case)
            yield {"system": system.name, "nodes": system.nodes, "case": case, **PLACES, "per_s": 7, "p50_ms": 1.0}

    monkeypatch.setattr(comparison, "measured", measured)
    result, report, _ = run(tmp_path, "--cases", "produce,consume", "--rounds", "2")
    assert report["failed"] == {"fake, consume, 100 B, 1 a batch, 1 proc.": f"{why} after 1 of 2 repetitions"}
    assert [(each["case"], each["rounds"]) for each in report["results"]] == [("produce", 2), ("consume", 1)]
    assert "Consume: messages/s" in result.stdout
    assert have_ended(started)


def test_a_run_that_is_interrupted_while_a_system_starts_names_the_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fake, "start", lambda self, site: interrupt())
    _, report, _ = run(tmp_path, "--cases", "gap", "--kills", "3")
    assert report["failed"] == {"fake, gap, SIGKILL": "interrupted after 0 of 3 repetitions"}


@pytest.mark.parametrize(("fault", "why"), [(interrupt, "interrupted"), (refuse, "NotEnoughReplicas: only 1 of 2")])
def test_points_before_the_end_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[], None], why: str
) -> None:
    def measure(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
        yield {"point": points[0], "per_s": 1.0}
        yield {"point": points[1], "per_s": 2.0}
        fault()

    later = GrowthCase(lambda directory, points, seconds: iter([{"point": 1, "per_s": 3.0}]), (1,), 9)
    monkeypatch.setattr(growth, "CASES", {"first": GrowthCase(measure, (1, 2, 3), 9), "later": later})
    plots = tmp_path / "plots"
    result, report, markdown = run(tmp_path, "--growth", "--plots", str(plots))
    assert report["failed"]["first"].startswith(why)
    assert report["failed"]["first"].endswith("after 2 of 3 points")
    assert len(report["cases"]["first"]) == 2
    assert ("later" in report["cases"]) == (fault is refuse), "an interruption ends all"
    assert "## first" in markdown
    assert "first: " in result.stderr
    assert (plots / "growth-first.svg").exists()


@pytest.mark.parametrize("rounds_done", [0, 1])
def test_rounds_of_the_older_protocols_before_the_end_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds_done: int
) -> None:
    names = [
        f"{verb}_{role}_{clients}" for verb in ("put", "take") for role in protocols.DOORS for clients in (1, 16, 64)
    ]
    figures = {f"{name}_{each}": 2.0 for name in names for each in ("per_s", "p50_ms", "to_message")}
    rounds = iter([figures] * rounds_done)

    def one_round(directory: Path) -> Figures:
        return next(rounds, None) or interrupt() or {}

    monkeypatch.setattr(protocols, "_round", one_round)
    result, report, _ = run(tmp_path, "--seeds", "--rounds", "3")
    assert report["failed"] == {"seeds": f"interrupted after {rounds_done} of 3 rounds"}
    assert ("A message in, stored" in result.stdout) == bool(rounds_done)
