"""`make mutants`: plant each mutant of syntax_mutants.py, and look for what notices it: a unit test of the function,
then a seed of the simulator. What nothing notices must be in syntax_equivalents.txt, with the reason.

    python -m simulation.syntax_hunt                              all
    python -m simulation.syntax_hunt --only IsrTracker            those with this text in their name
    python -m simulation.syntax_hunt --seconds 60                 as many as fit

A mutant is planted in a forked process, after all imports. Tests that never call its function are not run; of the
others the shortest come first, and of the seeds those that found most so far. What found a mutant in the last run is
tried before all. An interrupted run continues where it was, unless a source has changed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings
from simulation.group_options import EVERY, has_groups
from simulation.run import error_of
from simulation.syntax_mutants import SyntaxMutant, all_mutants, function_of, plant

TESTS = Path(__file__).parents[1]
TABLE = TESTS / "simulation/syntax_equivalents.txt"
RESULTS = TESTS.parent / "build/syntax_mutants.jsonl"
# The unit tests that may notice a mutant, by the beginning of its module's name.
UNIT_TESTS = {
    "portalmq.broker.core": ("broker/core",),
    "portalmq.control_plane.controller": (
        "control_plane/test_controller.py",
        "control_plane/test_controller_guards.py",
        "control_plane/test_plan.py",
    ),
    "portalmq.control_plane.cluster": (
        "control_plane/test_cluster.py",
        "control_plane/test_cluster_guards.py",
    ),
    "portalmq.control_plane.stream_groups": ("control_plane/test_stream_groups.py",),
    "portalmq.control_plane.mirror": (
        "control_plane/test_mirror.py",
        "control_plane/test_mirror_guards.py",
    ),
    "portalmq.control_plane.locks": ("control_plane/test_locks.py", "control_plane/test_lock_guards.py"),
}
# The simulator drives these; it has a simulated ZooKeeper in place of the others.
SIMULATED = ("portalmq.broker.core", "portalmq.control_plane.controller")
HAS_GROUPS = ("portalmq.broker.core.queue", "portalmq.broker.core.stream", "portalmq.broker.core.fold")
SEEDS_MAX = 2_000
SEEDS_OF_LISTED = 40
BEST_SEEDS = 30
# A mutant may loop for ever, or fill the memory.
TEST_S, SEED_S, MEMORY_BYTES = 30, 120, 3 << 30


@dataclass(slots=True)
class Result:
    """`killer` is a test's id or "seed N", and "" if there was none; `seeds` is how many were tried then."""

    name: str
    killer: str
    seeds: int
    sources: str
    failure: str = ""


@dataclass(slots=True)
class UnitTest:
    item: Any
    seconds: float = 0.0
    codes: set[CodeType] = field(default_factory=set)


def equivalents(table: Path = TABLE) -> dict[str, str]:
    """Return the listed mutants and their reasons: a name on a line of its own, the reason indented below it."""
    found: dict[str, str] = {}
    name = ""
    for line in table.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found[name] = f"{found[name]} {line.strip()}".strip()
        elif line and not line.startswith("#"):
            name = line
            assert name not in found, f"listed twice: {name}"
            found[name] = ""
    return found


def digest_of_sources() -> str:
    """Return a digest of what decides a result: the product, its unit tests and the simulator."""
    digest = hashlib.sha256()
    for folder in ("../broker", "../control_plane", "broker/core", "control_plane", "simulation"):
        for path in sorted((TESTS / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


# --- in the process of a mutant ---------------------------------------------------------------------------------------


def _hunt(mutant: SyntaxMutant, attempts: Iterable[UnitTest | int], report: Connection) -> None:
    """Send what is tried, and at last what found the mutant, and how. A process that ends without that was killed, by
    its own time limit."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    plant(mutant)
    for attempt in attempts:
        report.send(("trying", _name_of(attempt)))
        signal.setitimer(signal.ITIMER_PROF, SEED_S if isinstance(attempt, int) else TEST_S + 20 * attempt.seconds)
        if failure := _failure_of(attempt):
            report.send(("killer", _name_of(attempt), failure))
            os._exit(0)
    report.send(("killer", "", ""))
    os._exit(0)


def _name_of(attempt: UnitTest | int) -> str:
    return f"seed {attempt}" if isinstance(attempt, int) else attempt.item.nodeid


def _failure_of(attempt: UnitTest | int) -> str:
    """Run a test or a seed; return its failure, "" if it holds."""
    if isinstance(attempt, int):
        error, _ = error_of(attempt)
        return "" if error is None else f"{type(error).__name__} {error}"[:200]
    failed = [each for each in runtestprotocol(attempt.item, log=False, nextitem=None) if each.failed]
    return failed[0].longreprtext.strip().rpartition("\n")[2] or "failed" if failed else ""


@dataclass(slots=True)
class _Hunt:
    """A process that hunts one mutant."""

    mutant: SyntaxMutant
    process: Any
    reports: Connection
    trying: str = ""
    seeds: int = 0
    killer: str | None = None
    failure: str = ""

    def take(self) -> bool:
        """Take a report; False when there are no more."""
        try:
            kind, what, *failure = self.reports.recv()
        except EOFError:
            self.process.join()
            if self.killer is None:
                self.killer, self.failure = self.trying, f"the process ended with {self.process.exitcode}"
            return False
        if kind == "killer":
            self.killer, self.failure = what, failure[0]
        else:
            self.trying = what
            self.seeds += what.startswith("seed ")
        return True


# --- the hunt ---------------------------------------------------------------------------------------------------------


class Hunter:
    """A pytest plugin: when the tests are collected, it hunts instead of running them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        self.began = time.monotonic()
        self.sources = digest_of_sources()
        self.earlier = {result.name: result for result in self._read()}
        self.listed = equivalents()
        self.mutants = all_mutants()
        self.wanted = [mutant for mutant in self.mutants if arguments.only in mutant.name]
        self.wrong = [
            f"{name}: is listed, and is no mutant"
            for name in self.listed.keys() - {mutant.name for mutant in self.mutants}
        ]
        self.results: dict[str, Result] = {}
        self.found_by: Counter[int] = Counter()

    def _read(self) -> Iterator[Result]:
        if RESULTS.exists():
            for line in RESULTS.read_text(encoding="utf-8").splitlines():
                yield Result(**json.loads(line))

    def pytest_collection(self) -> None:
        """Examples are the same in each run, and a failing one is not made smaller."""
        quick = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", settings.default, phases=quick, derandomize=True, database=None)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        wanted = self.wanted
        tests = self._measured(session.items, {function_of(mutant).__code__ for mutant in wanted})
        for result in self.earlier.values():
            self._count(result)
        waiting = [mutant for mutant in wanted if not self._is_known(mutant)]
        self.out.write(f"{len(wanted)} mutants, {len(wanted) - len(waiting)} known, {len(tests)} unit tests\n")
        hunts: dict[Connection, _Hunt] = {}
        while waiting or hunts:
            while waiting and len(hunts) < self.arguments.processes and not self._is_over():
                hunt = self._begin(waiting.pop(0), tests)
                hunts[hunt.reports] = hunt
            if not hunts:
                break
            for ready in connection.wait(list(hunts)):
                hunt = hunts[ready]  # type: ignore[index]
                if not hunt.take():
                    self._end(hunts.pop(hunt.reports))
        self._summarise(wanted)
        return True

    def unit_tests(self) -> list[str]:
        """Return the paths of the tests that concern the wanted mutants."""
        modules = [mutant.module for mutant in self.wanted]
        return [
            str(TESTS / path)
            for module, paths in UNIT_TESTS.items()
            if any(each.startswith(module) for each in modules)
            for path in paths
        ]

    def _is_over(self) -> bool:
        return bool(self.arguments.seconds) and time.monotonic() - self.began > self.arguments.seconds

    def _measured(self, items: list[Any], codes: set[CodeType]) -> list[UnitTest]:
        """Run each test, and note its time and which of the functions it calls."""
        tests = [UnitTest(item) for item in items]
        for test in tests:

            def note(frame: FrameType, event: str, _: Any, called: set[CodeType] = test.codes) -> None:
                if event == "call" and frame.f_code in codes:
                    called.add(frame.f_code)

            began = time.process_time()
            sys.setprofile(note)
            threading.setprofile(note)
            reports = runtestprotocol(test.item, log=False, nextitem=None)
            sys.setprofile(None)
            threading.setprofile(None)
            test.seconds = time.process_time() - began
            failed = [report.longreprtext for report in reports if report.failed]
            if failed:
                raise AssertionError(f"{test.item.nodeid} fails without a mutant:\n{failed[0]}")
        return sorted((test for test in tests if test.codes), key=lambda test: test.seconds)

    def _is_known(self, mutant: SyntaxMutant) -> bool:
        before = self.earlier.get(mutant.name)
        if before is None or before.sources != self.sources:
            return False
        if not before.killer and before.seeds < self._seeds_max(mutant):
            return False
        self.results[mutant.name] = before
        self._judge(before)
        return True

    def _seeds_max(self, mutant: SyntaxMutant) -> int:
        if not mutant.module.startswith(SIMULATED):
            return 0
        return min(self.arguments.seeds, SEEDS_OF_LISTED) if mutant.name in self.listed else self.arguments.seeds

    def _begin(self, mutant: SyntaxMutant, tests: list[UnitTest]) -> _Hunt:
        context = get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_hunt, args=(mutant, self._attempts(mutant, tests), sender))
        process.start()
        sender.close()
        return _Hunt(mutant, process, receiver)

    def _attempts(self, mutant: SyntaxMutant, tests: list[UnitTest]) -> list[UnitTest | int]:
        """Return what may find the mutant: first what found it before, then the tests, then the seeds."""
        code = function_of(mutant).__code__
        step = EVERY if mutant.module.startswith(HAS_GROUPS) else 1
        best = [seed for seed, _ in self.found_by.most_common() if step == 1 or has_groups(seed)][:BEST_SEEDS]
        most = self._seeds_max(mutant)
        before = self.earlier.get(mutant.name)
        is_past_tests = before is not None and before.sources == self.sources
        attempts: list[UnitTest | int] = [] if is_past_tests else [test for test in tests if code in test.codes]
        attempts += list(dict.fromkeys(chain(best, range(step - 1, step * most, step))))[:most]
        hint = before.killer if before is not None else ""
        if hint.startswith("seed "):
            attempts.insert(0, int(hint.removeprefix("seed ")))
        return sorted(attempts, key=lambda attempt: _name_of(attempt) != hint)

    def _end(self, hunt: _Hunt) -> None:
        assert hunt.killer is not None
        result = Result(hunt.mutant.name, hunt.killer, hunt.seeds, self.sources, hunt.failure)
        self.results[result.name] = self.earlier[result.name] = result
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        self._count(result)
        self._judge(result)
        known = "listed" if result.name in self.listed else "SURVIVES"
        self.out.write(f"{result.name}: {result.killer or known}; {result.failure or f'{result.seeds} seeds'}\n")

    def _count(self, result: Result) -> None:
        if result.killer.startswith("seed "):
            self.found_by[int(result.killer.removeprefix("seed "))] += 1

    def _judge(self, result: Result) -> None:
        if not result.killer and result.name not in self.listed:
            self.wrong.append(f"{result.name}: nothing notices it, and syntax_equivalents.txt does not list it")
        if result.killer and result.name in self.listed:
            self.wrong.append(f"{result.name}: is listed as equivalent, and {result.killer} notices it")

    def _summarise(self, wanted: list[SyntaxMutant]) -> None:
        killers = [result.killer for result in self.results.values()]
        seeds = sum(killer.startswith("seed ") for killer in killers)
        tests = sum(bool(killer) for killer in killers) - seeds
        missed = f", {len(wanted) - len(killers)} not tried" if len(killers) < len(wanted) else ""
        self.out.write("\n".join(["", *sorted(self.wrong)]).lstrip("\n") + "\n")
        self.out.write(
            f"{len(wanted)} mutants: {tests} noticed by unit tests, {seeds} by seeds, {len(killers) - tests - seeds} by"
            f" nothing, of these {len(self.listed.keys() & self.results.keys())} listed{missed};"
            f" {time.monotonic() - self.began:.0f} s\n"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names")
    parser.add_argument("--seconds", type=int, default=0, help="begin no mutant after this time")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if not any(arguments.only in mutant.name for mutant in all_mutants()):
        parser.error(f"no mutant has {arguments.only!r} in its name")
    hunter = Hunter(arguments)
    options = "-q -q --disable-warnings -p no:cacheprovider -p no:xdist -o timeout=0 -m unit"
    status = pytest.main([*options.split(), *hunter.unit_tests()], plugins=[hunter])
    return 1 if hunter.wrong or status != pytest.ExitCode.OK else 0


if __name__ == "__main__":
    sys.exit(main())
