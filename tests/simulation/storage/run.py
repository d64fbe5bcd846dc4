"""`make crashes`: crash images, failing disks and planted bugs of storage; the counts are in build/crashes.json.

python -m simulation.storage.run                      all
python -m simulation.storage.run --seed 7 --each 4    other images, and more of them
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from simulation.storage.bugs import BUGS, killer_of
from simulation.storage.crashes import crash
from simulation.storage.failures import failures
from simulation.storage.subjects import SUBJECTS
from support import ledger

SHOWN = 20
MEMORY = Path("/dev/shm")


def _collected(name: str, outcomes: Iterable[tuple[str, str | None]]) -> tuple[str, Counter[str], list[str]]:
    tried: Counter[str] = Counter()
    broken = []
    for kind, failure in outcomes:
        tried[kind] += 1
        if failure is not None:
            broken.append(failure)
    return name, tried, broken


def work(job: tuple[str, str, int, int, str]) -> tuple[str, Counter[str], list[str]]:
    """Do one job, in a directory of its own: (what, whose or which bug, seed, how many, stage)."""
    what, name, seed, number, stage = job
    root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None)).resolve()
    try:
        if what == "planted bugs":
            killer = killer_of(name, root)
            return what, Counter({f"{name}: {killer}"[:200]: 1}), [] if killer else [f"{name} SURVIVES"]
        subject = next(subject for subject in SUBJECTS if subject.name == name)
        call: Any = (
            partial(crash, seed=seed, each=number)
            if what == "crash images"
            else partial(failures, every=number, only=[stage])
        )
        return _collected(f"{what} of a {name}", call(subject, root))
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("--seed", type=int, help="default: 1, or the next one of the ledger")
    options.add_argument("--ledger", action="store_true", help="enter the run")
    options.add_argument("--each", type=int, default=2, help="crash images before each change")
    options.add_argument("--every", type=int, default=2, help="let every so many steps fail")
    options.add_argument("--report", type=Path, default=Path("build/crashes.json"))
    chosen = options.parse_args()
    began = time.monotonic()
    run = ledger.Run("crashes", chosen.seed, writes=chosen.ledger, otherwise=1)
    jobs = [("crash images", subject.name, run.first, chosen.each, "") for subject in SUBJECTS]
    jobs += [("faults", each.name, run.first, chosen.every, stage) for each in SUBJECTS for stage in each.stages]
    jobs += [("planted bugs", name, run.first, 1, "") for name in BUGS]
    counts: dict[str, Counter[str]] = {}
    broken: list[str] = []
    with run, Pool() as pool:
        for name, tried, failed in pool.imap_unordered(work, jobs):
            counts.setdefault(name, Counter()).update(tried)
            broken += failed
            run.count({name.partition(" of a ")[0]: tried.total()})
        run.add(run.first, {}, failed=bool(broken))
    report = {name: {"total": tried.total(), **tried} for name, tried in sorted(counts.items())}
    chosen.report.parent.mkdir(parents=True, exist_ok=True)
    chosen.report.write_text(json.dumps({**report, "failed": broken}, indent=2) + "\n")
    for name, tried in sorted(counts.items()):
        print(f"{name}: {tried.total()}")
    print(f"{len(broken)} failed, {time.monotonic() - began:.0f} s; {chosen.report}")
    print("\n".join(broken[:SHOWN]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
