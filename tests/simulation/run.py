"""`make simulate`: run seeds; a failing one is run again with its trace.

python -m simulation.run --seed 17             one seed, its options, its trace
python -m simulation.run --seeds 500           seeds 0 to 499
python -m simulation.run --seeds 500 --first 1000
python -m simulation.run --seeds 500 --coverage  keep which branches they reach (needs `coverage`)
python -m simulation.run --seeds 500 --ledger  the next 500 of the ledger, which gets a line
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from multiprocessing import Pool

from simulation import reach  # isort: skip

from simulation.options import FAULTS
from simulation.world import EVENTS, World
from support import ledger

LAST_LINES = 60


def failure_of(seed: int, events: int = EVENTS) -> tuple[str | None, Counter[str]]:
    """Return the failure of a run, None without one; and the states that it reached."""
    error, reached = error_of(seed, events)
    return None if error is None else f"{type(error).__name__} {error}", reached


def error_of(seed: int, events: int = EVENTS) -> tuple[Exception | None, Counter[str]]:
    """Return what ended a run, None when it held; and the states that it reached."""
    world = World(seed, events)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - a run that breaks is a failing seed like any other
        return error, world.reached
    finally:
        world.reached.update(events=world.events, acknowledged=world.acked)
    return None, world.reached


def _run(job: tuple[int, int]) -> tuple[int, str | None, Counter[str]]:
    seed, events = job
    return (seed, *failure_of(seed, events))


def counted(reached: Counter[str]) -> dict[str, int]:
    """Return what the ledger sums up."""
    faults = sum(reached[fault] for fault in FAULTS)
    return {"faults": faults, "acknowledged": reached["acknowledged"], "events": reached["events"]}


def replay(seed: int, events: int, lines: int | None) -> bool:
    """Print a run: its options, its trace (the last `lines`, or all), and how it ended. True when it held."""
    world = World(seed, events, tracing=True)
    error = ""
    try:
        world.run()
    except Exception:  # noqa: BLE001 - reported below
        error = traceback.format_exc(limit=-6)
    trace = list(world.trace)
    print("\n".join(trace if lines is None else trace[-lines:]))
    print("\n" + "\n".join(world.options.lines()))
    print(f"\nseed {seed}: {world.events} events, {world.now / 1000:.1f} s, {world.checker.high_watermark} committed")
    if error:
        print(error)
    return not error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this one, with its trace")
    parser.add_argument("--seeds", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, help="default: 0, or where the ledger ends")
    parser.add_argument("--ledger", action="store_true", help="enter the run; goes on after a failing seed")
    parser.add_argument("--events", type=int, default=EVENTS, help="of the time with faults, in each run")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--lines", type=int, help="of the trace, from its end (default: all)")
    parser.add_argument("--go-on", action="store_true", help="after a failing seed")
    parser.add_argument("--coverage", action="store_true", help="in one process; the shell's --coverage reports it")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        return 0 if replay(arguments.seed, arguments.events, arguments.lines) else 1
    began = time.monotonic()
    reached: Counter[str] = Counter()
    failed: list[int] = []
    run = ledger.Run("core", arguments.first, writes=arguments.ledger)
    jobs = ((run.first + number, arguments.events) for number in range(arguments.seeds))
    with run, Pool(arguments.processes) as pool:
        for seed, failure, found in map(_run, jobs) if arguments.coverage else pool.imap_unordered(_run, jobs, 5):
            reached += found
            run.add(seed, counted(found), failed=failure is not None)
            if failure is not None:
                failed.append(seed)
                print(f"seed {seed}: {failure}", flush=True)
                if not (arguments.go_on or arguments.ledger):
                    pool.terminate()
                    break
    reach.keep()
    if failed and not arguments.go_on:
        replay(failed[0], arguments.events, LAST_LINES)
    print(", ".join(f"{what} {count}" for what, count in sorted(reached.items())))
    print(f"{len(failed)} of {arguments.seeds} seeds failed, {time.monotonic() - began:.0f} s", sorted(failed)[:20])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
