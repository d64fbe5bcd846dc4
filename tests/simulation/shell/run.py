"""`make simulate-shell`: run seeds of the real shell; a failing one is shrunk and shown with its trace.

python -m simulation.shell.run --seed 17             one seed, its options, its trace
python -m simulation.shell.run --seeds 500           seeds 0 to 499
python -m simulation.shell.run --seeds 500 --first 1000
python -m simulation.shell.run --seeds 500 --coverage   which branches of the shell they reach (needs `coverage`)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets is part of a run
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "simulation.shell.run", *sys.argv[1:]])

from simulation import reach  # isort: skip
from simulation.shell import patches  # isort: skip

import gc
import pickle
import resource
import select
import shutil
import signal
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

from simulation.shell import system_calls
from simulation.shell.defects import DEFECTS, plant
from simulation.shell.options import FAULTS, draw, wanted
from simulation.shell.world import World
from support import ledger

from portalmq import wire

HOME = Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp") / f"portalmq-shell-{os.getpid()}"


@dataclass
class Outcome:
    seed: int
    failure: str = ""
    rule: str = ""
    trace: str = ""
    reached: Counter[str] = field(default_factory=Counter)
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    faults: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    memory_mib: int = 0
    arcs: dict[str, list[tuple[int, int]]] = field(default_factory=dict)


def play(seed: int, *, left_out: Collection[int] = (), tells: bool = False) -> Outcome:
    (outcome,) = play_all([seed], processes=1, left_out=left_out, tells=tells)
    return outcome


def play_all(
    seeds: Iterable[int], *, processes: int, left_out: Collection[int] = (), tells: bool = False
) -> Iterator[Outcome]:
    """Run each seed in a process of its own: then nothing of it is left, and all runs begin in the same state."""
    running: dict[int, tuple[int, int]] = {}
    waiting = iter(seeds)
    try:
        while True:
            while len(running) < processes and (seed := next(waiting, None)) is not None:
                pid, pipe = _begin(seed, left_out, tells)
                running[pipe] = pid, seed
            if not running:
                return
            for pipe in select.select(list(running), [], [])[0]:
                with os.fdopen(pipe, "rb") as file:
                    data = file.read()
                pid, seed = running.pop(pipe)
                os.waitpid(pid, 0)
                yield pickle.loads(data) if data else Outcome(seed, "the run broke off", "broke off")
    finally:
        for pid, _ in running.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _begin(seed: int, left_out: Collection[int], tells: bool) -> tuple[int, int]:
    """Fork. Return the child, and the pipe with its outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            outcome = _play(seed, left_out, tells)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(outcome, pipe)
        except BaseException:  # noqa: BLE001 - the parent sees a broken pipe
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(writing)
    return child, reading


def _play(seed: int, left_out: Collection[int], tells: bool) -> Outcome:
    sys.unraisablehook = lambda _: None  # SQLite's last write to a full disk, when a connection is forgotten
    gc.disable()  # collections at other moments would make other runs
    home = HOME / str(seed)
    system_calls.install(home)
    began = patches.process_time()
    world = World(seed, home, left_out=left_out, tell=print if tells else None)
    failure = rule = ""
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 - a run that breaks is a failing seed like any other
        failure = f"{type(error).__name__}: {error}"
        rule = str(error).partition(":")[0]
        if tells:
            traceback.print_exc()
    return Outcome(
        seed,
        failure,
        rule,
        f"{world.loop.fingerprint:08x}{world.trace.hexdigest()}",
        world.reached,
        world.now_s,
        patches.process_time() - began,
        world.loop.steps,
        [f"{number}: {step}" for number, step in enumerate(world.steps)],
        world.options.lines(),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        reach.reached(),
    )


def shrink(seed: int, rule: str) -> list[int]:
    """Return the faults that can be left out, one after the other, with the same rule broken."""
    steps = len(play(seed).faults)
    left_out: list[int] = []
    for number in reversed(range(steps)):
        if play(seed, left_out=[*left_out, number]).rule == rule:
            left_out.append(number)
    return left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="run this one, with its trace")
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, help="default: 0, or where the ledger ends")
    parser.add_argument("--ledger", action="store_true", help="enter the run; goes on after a failing seed")
    parser.add_argument("--without", default="", help="numbers of faults that are left out, such as 0,3")
    parser.add_argument("--defect", default="", choices=["", *DEFECTS], help="put this one back before")
    parser.add_argument("--having", default="", choices=["", *FAULTS], help="only seeds with this fault")
    parser.add_argument("--schedules", type=int, default=0, help="recurring messages; makes other runs of the seeds")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--go-on", action="store_true", help="after a failing seed")
    parser.add_argument("--coverage", action="store_true", help="report which branches the runs reach")
    parser.add_argument("--hash", action="store_true", help="print the hash of each trace")
    arguments = parser.parse_args()
    wanted["schedules"] = arguments.schedules
    wire.prepare()  # once, and not in each of the processes
    if arguments.defect:
        plant(arguments.defect)
    if arguments.seed is not None:
        left_out = [int(each) for each in arguments.without.split(",") if each]
        return 0 if _show(arguments.seed, left_out) else 1
    reached: Counter[str] = Counter()
    failed: list[Outcome] = []
    arcs: dict[str, set[tuple[int, int]]] = {}
    began_s, cpu_s = patches.real_perf_counter(), 0.0
    run = ledger.Run("shell", arguments.first, writes=arguments.ledger)
    seeds = islice((seed for seed in count(run.first) if _has(seed, arguments.having)), arguments.seeds)
    done = 0
    with contextlib.suppress(KeyboardInterrupt), run:  # an interrupted run tells of the seeds that it finished
        for outcome in play_all(seeds, processes=arguments.processes):
            done += 1
            reached += outcome.reached
            cpu_s += outcome.cpu_s
            for file, found in outcome.arcs.items():
                arcs.setdefault(file, set()).update(found)
            counts = {"faults": len(outcome.faults), "acknowledged": outcome.reached["acked"], "steps": outcome.steps}
            run.add(outcome.seed, counts, failed=bool(outcome.failure))
            if arguments.hash:
                print(f"{outcome.seed} {outcome.trace} {outcome.steps} steps {outcome.cpu_s:.2f} s", flush=True)
            if outcome.failure:
                failed.append(outcome)
                print(f"seed {outcome.seed}: {outcome.failure[:600]}", flush=True)
                if not (arguments.go_on or arguments.ledger):
                    break
    if failed and not arguments.go_on:
        seed, rule = failed[0].seed, failed[0].rule
        left_out = shrink(seed, rule)
        _show(seed, left_out)
        print(f"make simulate-shell SEED={seed} WITHOUT={','.join(map(str, left_out))}", flush=True)
    print(", ".join(f"{what} {count}" for what, count in sorted(reached.items())))
    reach.report(arcs)
    took_s = patches.real_perf_counter() - began_s
    print(f"{len(failed)} of {done} seeds failed, {took_s:.0f} s, {cpu_s:.0f} s of processor time")
    return 1 if failed else 0


def _has(seed: int, fault: str) -> bool:
    return not fault or any(step.kind == fault for step in draw(seed)[1])


def _show(seed: int, left_out: Collection[int]) -> bool:
    """Run a seed with its trace. Return whether it held."""
    outcome = play(seed, left_out=left_out, tells=True)
    print("\n".join(["", *outcome.options, *outcome.faults]))
    took = f"{outcome.simulated_s:.1f} s in {outcome.cpu_s:.2f} s of processor time, trace {outcome.trace[:16]}"
    print(f"seed {outcome.seed}: {took}: {outcome.failure or 'held'}")
    return not outcome.failure


if __name__ == "__main__":
    try:
        sys.exit(main())
    finally:
        shutil.rmtree(HOME, ignore_errors=True)
