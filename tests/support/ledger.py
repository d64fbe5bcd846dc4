"""The ledger of the proof, tests/LEDGER.jsonl: a line for each run that was asked to write one.

    python -m support.ledger                 the sums of all runs, kind by kind
    python -m support.ledger --since DATE    of those from this day on (YYYY-MM-DD)

A run that names no first seed continues where the runs of its kind in the ledger end: its seeds are new, and sums grow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

LEDGER = Path(__file__).parents[1] / "LEDGER.jsonl"
KINDS = ("core", "shell", "mutants", "crashes", "chaos")
Kind = Literal["core", "shell", "mutants", "crashes", "chaos"]


@dataclass
class Entry:
    """One run. `failed` has the seeds, or the names of planted bugs that survived."""

    date: str
    commit: str  # "+" at its end: with changes that were not committed
    kind: str
    first: int
    seeds: int = 0
    failed: list[int | str] = field(default_factory=list)
    seconds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    note: str = ""


def entries() -> list[Entry]:
    lines = LEDGER.read_text("utf-8").splitlines() if LEDGER.exists() else []
    found = [Entry(**json.loads(line)) for line in lines]
    for entry in found:
        entry.counts = Counter(entry.counts)
    return found


def next_seed(kind: Kind) -> int:
    """Return the first seed above all that a run of this kind has used."""
    return max((entry.first + entry.seeds for entry in entries() if entry.kind == kind), default=0)


class Run:
    """The entry of a run that is under way: the `with` block's end writes it, after an interrupt too. `first` is None
    where the caller named none; without `writes` nothing is read or written, and the first seed is `otherwise`."""

    def __init__(self, kind: Kind, first: int | None, *, writes: bool, otherwise: int = 0) -> None:
        if first is None:
            first = next_seed(kind) if writes else otherwise
        self.first = first
        self._writes = writes
        self._entry = Entry(datetime.now(UTC).strftime("%Y-%m-%d"), _commit() if writes else "", kind, first)
        self._done: set[int] = set()
        self._began = time.perf_counter()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self._entry.seconds = round(time.perf_counter() - self._began)
        if self._writes and (self._entry.seeds or self._entry.counts):
            with LEDGER.open("a", encoding="utf-8") as file:
                file.write(json.dumps(vars(self._entry)) + "\n")

    def add(self, seed: int, counts: dict[str, int], *, failed: bool) -> None:
        """A seed's run ended. Seeds may end in any order; those count before which none is missing."""
        self._done.add(seed)
        while self.first + self._entry.seeds in self._done:
            self._done.remove(self.first + self._entry.seeds)
            self._entry.seeds += 1
        self._entry.counts.update(counts)
        if failed:
            self.fail(seed)

    def fail(self, what: int | str) -> None:
        self._entry.failed.append(what)

    def count(self, counts: dict[str, int]) -> None:
        self._entry.counts.update(counts)


def _commit() -> str:
    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=LEDGER.parent, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short=12", "HEAD")
    if head.returncode:
        return "unknown"
    changed = git("diff", "--quiet", "HEAD", "--", ":/", f":(exclude){LEDGER.name}").returncode
    return head.stdout.strip() + ("+" if changed else "")


def sums(runs: list[Entry]) -> str:
    lines = []
    for kind in KINDS:
        of_kind = [run for run in runs if run.kind == kind]
        if not of_kind:
            continue
        counts = sum((run.counts for run in of_kind), start=Counter())
        seeds, failed = sum(run.seeds for run in of_kind), sum(len(run.failed) for run in of_kind)
        hours = sum(run.seconds for run in of_kind) / 3_600
        lines.append(
            f"{kind:<8} {len(of_kind)} runs, {seeds:,} seeds, {failed} failed, {hours:.1f} h, "
            f"{of_kind[0].date} to {max(run.date for run in of_kind)}"
        )
        if counts:
            lines.append(" " * 9 + ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items())))
        lines += [f"{' ' * 9}failed at {run.commit}: {run.failed} {run.note}" for run in of_kind if run.failed]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", default="", help="YYYY-MM-DD")
    since = parser.parse_args().since
    print(sums([entry for entry in entries() if entry.date >= since]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
