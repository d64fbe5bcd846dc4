"""Measurement in worker processes: their results, percentiles, the state of the machine, medians of rounds.

Workers are processes, so that one interpreter's lock is not the limit. They connect first and begin together. Durations
of one call are taken in the worker; rates go from the first begin to the last end.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from queue import Empty
from statistics import median
from typing import Any, NamedTuple

import click

from portalmq.system import cores, die_with, sync_data

PERCENTILES = (50, 90, 99)
BEGIN_WITHIN_S = 120.0
SPINS = 1_000_000
SYNCS = 200
SYNC_BYTES = 4096

Figures = dict[str, Any]


class Timed(NamedTuple):
    """The messages of one worker, when it began and ended on the monotonic clock, and the seconds of each call."""

    messages: int
    begin: float
    end: float
    calls_s: list[float]


# --- statistics ------------------------------------------------------------------------------------------------------


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile of sorted values."""
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def spread(calls_s: Iterable[float]) -> Figures:
    """Return p50, p90, p99 and the maximum in milliseconds; nothing without values."""
    ordered = sorted(calls_s)
    if not ordered:
        return {}
    ranks = {f"p{percent}_ms": 1000 * percentile(ordered, percent) for percent in PERCENTILES}
    return ranks | {"max_ms": 1000 * ordered[-1]}


def summary(results: Sequence[Timed], cpu_s: float) -> Figures:
    """Return rate, percentiles of a call, and the servers' processor seconds for a million messages."""
    messages = sum(each.messages for each in results)
    seconds = max(each.end for each in results) - min(each.begin for each in results)
    if not messages or seconds <= 0:
        raise click.ClickException("nothing was done in the time of the measurement")
    figures = {"messages": messages, "seconds": seconds, "per_s": messages / seconds}
    figures |= spread(each for one in results for each in one.calls_s)
    return figures | ({"cpu_s_per_million": cpu_s * 1e6 / messages} if cpu_s else {})  # a floor may have no server


def combined(rounds: Sequence[Figures], keys: Sequence[str]) -> list[Figures]:
    """Merge results with the same `keys`: the median of each number, with the worst of each maximum and of each gap."""
    merged: dict[tuple[Any, ...], list[Figures]] = {}
    for each in rounds:
        merged.setdefault(tuple(each.get(key) for key in keys), []).append(each)
    return [_merged(several, keys) for several in merged.values()]


def _merged(several: list[Figures], keys: Sequence[str]) -> Figures:
    first = several[0]
    figures: Figures = {key: first[key] for key in keys if key in first}
    for name in [name for name in first if name not in keys]:
        values = [each[name] for each in several if name in each]
        figures[name] = max(values) if name in {"max_ms", "lost"} else median(values)
        if name.endswith("_gap_s"):
            figures[name.removesuffix("_s") + "_worst_s"] = max(values)
    return figures | {"rounds": len(several)}


def cause(error: BaseException) -> str:
    """Return why a measurement ended before its time."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, click.ClickException) else f"{type(error).__name__}: {error}"


# --- the machine -----------------------------------------------------------------------------------------------------


def machine() -> Figures:
    return {"system": platform.platform(), "python": platform.python_version(), "cores": len(cores())}


def calibration(directory: Path) -> Figures:
    """Return how fast Python and the disk are now: other load on the machine shows here."""
    begin = time.perf_counter()
    for _ in range(SPINS):
        pass
    spin_s = time.perf_counter() - begin
    syncs_s: list[float] = []
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(SYNCS):
            os.write(file.fileno(), bytes(SYNC_BYTES))
            begin = time.perf_counter()
            sync_data(file.fileno())
            syncs_s.append(time.perf_counter() - begin)
    sync = spread(syncs_s)
    return {
        "spin_ms": 1000 * spin_s,
        "fdatasync_p50_ms": sync["p50_ms"],
        "fdatasync_p99_ms": sync["p99_ms"],
        "load": os.getloadavg()[0],
    }


# --- workers ---------------------------------------------------------------------------------------------------------


def in_workers(roles: Sequence[Callable[..., Any]], *arguments: Any, within_s: float) -> list[Any]:
    """Call each role in a process of its own with (begin, *arguments) and return the results in order. A role connects,
    calls `begin()`, which returns when all have, and works. They end with this call, whatever ends it."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(len(roles)), context.Queue()
    running = [
        context.Process(target=_work, args=(number, role, arguments, os.getpid(), barrier, results), daemon=True)
        for number, role in enumerate(roles)
    ]
    taken: dict[int, Any] = {}
    deadline = time.monotonic() + BEGIN_WITHIN_S + within_s
    try:
        for process in running:
            process.start()
        while len(taken) < len(roles):
            try:
                number, result, fault = results.get(timeout=1)
            except Empty:
                ended = [n for n, process in enumerate(running) if process.exitcode and n not in taken]
                if ended or time.monotonic() > deadline:
                    raise click.ClickException(f"workers {ended or 'still run and'} gave no result") from None
                continue
            if fault:
                raise click.ClickException(f"a worker failed: {fault}")
            taken[number] = result
    finally:
        for process in running:
            if process.pid is not None:
                process.join(1 if len(taken) == len(roles) else 0)
                process.kill()
                process.join()
    return [taken[number] for number in range(len(roles))]


def _work(number: int, role: Callable[..., Any], arguments: Any, parent: int, barrier: Any, results: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends its workers
    die_with(parent)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # client libraries log each lost connection
    try:
        answer = (number, role(lambda: barrier.wait(BEGIN_WITHIN_S), *arguments), "")
    except BaseException as fault:  # noqa: BLE001 - reported by the parent
        answer = (number, None, f"{type(fault).__name__}: {str(fault)[-500:]}")
    results.put(answer)
    results.close()
    results.join_thread()
    if answer[2]:  # after the cause is reported, as the others report a broken barrier
        barrier.abort()
    os._exit(0)  # connections to a server that was stopped may not delay the end
