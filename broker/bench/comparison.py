"""Comparison of systems in one run, round by round and case by case.

produce  batches, each acknowledged before the next is sent; a batch of one is a synchronous send
consume  a queue group that drains a backlog, batch by batch, each acknowledged
wake     from a send to a consumer that was waiting, a message every 5 ms
gap      the leader's node is killed or stopped: how long nothing is acknowledged, and nothing delivered
"""

from __future__ import annotations

import itertools
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from portalmq.broker.bench.harness import family_of
from portalmq.broker.bench.measure import Figures, Timed, calibration, cause, combined, in_workers, spread, summary
from portalmq.broker.bench.report import number as number_of
from portalmq.broker.bench.systems import BenchClient, Site, System, running

CASES = ("produce", "consume", "wake", "gap")
KEYS = ("system", "nodes", "case", "size", "batch", "processes", "signal")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
EVERY_S = 0.005
BEFORE_SIGNAL_S = 3.0
DRAIN_S = 5.0
SILENT_S = 2.0
REOPEN_S = 0.02
WAKE_BYTES = 100
FILL_BATCH = 1_000
SINGLES_PER_S = 20_000
STAMP = struct.Struct("<Qd")

Begin = Callable[[], object]
UnderWay = Callable[[Figures], Figures]
T = TypeVar("T")


@dataclass(frozen=True)
class CasePlan:
    """The cases to measure; `seconds` is the length of each, `after_s` the time after the signal in `gap`."""

    cases: Sequence[str]
    sizes: Sequence[int]
    batches: Sequence[int]
    processes: Sequence[int]
    seconds: float
    rounds: int
    kills: int
    after_s: float


# --- roles of workers ------------------------------------------------------------------------------------------------


def producing(
    begin: Begin, system: System, topic: str, size: int, batch: int, seconds: float, most: float = float("inf")
) -> Timed:
    client, messages = system.client(topic), [os.urandom(size) for _ in range(batch)]
    calls_s: list[float] = []
    client.send(messages[:1])  # some clients connect by this
    begin()
    began = now = time.monotonic()
    while now < began + seconds and len(calls_s) * batch < most:
        client.send(messages)
        was, now = now, time.monotonic()
        calls_s.append(now - was)
    client.close()
    return Timed(len(calls_s) * batch, began, now, calls_s)


def consuming(begin: Begin, system: System, topic: str, batch: int, seconds: float) -> Timed:
    client, messages, is_empty = system.client(topic, batch), 0, False
    calls_s: list[float] = []
    begin()
    began = now = end = time.monotonic()
    while now < began + seconds and not is_empty:
        got = len(client.receive())
        was, now = now, time.monotonic()
        is_empty = got == 0
        if got:
            messages, end = messages + got, now
            calls_s.append(now - was)
    client.close()
    return Timed(messages, began, end, calls_s)


def _stamped(number: int) -> bytes:
    return STAMP.pack(number, time.monotonic()).ljust(WAKE_BYTES, b".")


def _stamp_of(message: bytes) -> tuple[int, float]:
    number, sent = STAMP.unpack(message[: STAMP.size])
    return number, sent


def _sending_now_and_then(begin: Begin, system: System, topic: str, times: int) -> list[float]:
    client = system.client(topic)
    begin()
    time.sleep(1)  # until the consumer waits
    for number in range(times):
        client.send([_stamped(number)])
        time.sleep(EVERY_S)
    client.close()
    return []


def _waking(begin: Begin, system: System, topic: str, times: int) -> list[float]:
    client = system.client(topic, batch=1)
    took_s: list[float] = []
    begin()
    while len(took_s) < times:  # the first is left out: some clients connect by it
        took_s += [time.monotonic() - _stamp_of(each)[1] for each in client.receive()]
    client.close()
    return took_s[1:]


# --- cases -----------------------------------------------------------------------------------------------------------


def measured(system: System, site: Site, plan: CasePlan, under_way: UnderWay) -> Iterator[Figures]:
    """Measure all cases but `gap` on a running system. Each is told before it begins."""
    which = {"system": system.name, "nodes": system.nodes}
    numbers = itertools.count()
    cases = system.cases.intersection(plan.cases)
    for size, batch, processes in itertools.product(plan.sizes, plan.batches, plan.processes):
        if not cases & {"produce", "consume"} or batch > system.batch_max or processes > system.processes_max:
            continue
        topic, what = f"bench-{next(numbers)}", {"size": size, "batch": batch, "processes": processes}
        system.create(topic)
        if "produce" in cases:
            case = under_way({**which, "case": "produce", **what})
            sends = (system, topic, size, batch, plan.seconds)
            yield {**case, **traffic(site, [producing] * processes, sends, plan.seconds)}
        if "consume" in cases:
            case = under_way({**which, "case": "consume", **what})
            most = SINGLES_PER_S * plan.seconds if batch == 1 else float("inf")
            fill = (system, topic, size, FILL_BATCH, plan.seconds, most)
            in_workers([producing], *fill, within_s=plan.seconds + 60)
            takes = (system, topic, batch, plan.seconds)
            yield {**case, **traffic(site, [consuming] * processes, takes, plan.seconds)}
        system.drop(topic)
    if "wake" in cases:
        case = under_way({**which, "case": "wake", "size": WAKE_BYTES})
        system.create("wake")
        times = max(20, int(plan.seconds / EVERY_S / 2))
        took = in_workers([_sending_now_and_then, _waking], system, "wake", times, within_s=60 + times)
        yield {**case, "messages": times, **spread(took[1])}
        system.drop("wake")


def traffic(site: Site, roles: Sequence[Callable[..., Timed]], arguments: tuple[Any, ...], seconds: float) -> Figures:
    """Return the summary of workers in these roles, which take about these seconds."""
    before_s = site.cpu_s()
    results = in_workers(roles, *arguments, within_s=seconds + 60)
    return summary(results, site.cpu_s() - before_s)


# --- the gap after a signal ------------------------------------------------------------------------------------------

Log = list[tuple[int, float]]


def gap(system: System, site: Site, sent: signal.Signals, after_s: float) -> Iterator[Figures]:
    """Send the leader's node a signal under light traffic, and yield the longest times without an acknowledgement and
    without a delivery. A gap that lasts to the end counts too: one of `after_s` means that nothing came back."""
    topic, seconds = "gap", BEFORE_SIGNAL_S + after_s
    system.create(topic)
    leader = system.leader(topic)
    arguments = (system, topic, leader, family_of(system.node_pid(site, leader)), sent, seconds)
    within_s = seconds + DRAIN_S + 2 * system.gives_up_after_s
    (began, acked), (_, delivered) = in_workers([_publishing, _taking], *arguments, within_s=within_s)
    numbers = [number for number, _ in delivered]
    yield {
        **gap_case(system, sent),
        "publish_gap_s": longest_gap(acked, began, began + seconds),
        "delivery_gap_s": longest_gap(delivered, began, began + seconds),
        "acked": len(acked),
        "lost": len({number for number, _ in acked}.difference(numbers)),
        "duplicates": len(numbers) - len(set(numbers)),
    }


def gap_case(system: System, sent: signal.Signals) -> Figures:
    return {"system": system.name, "nodes": system.nodes, "case": "gap", "signal": sent.name}


def longest_gap(log: Log, begin: float, end: float) -> float:
    times = [begin, *(at for _, at in log if at < end), end]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


class _Roaming:
    """A client that goes to the next node after an error, and tries again."""

    def __init__(self, connect: Callable[[int], BenchClient], node: int, nodes: int) -> None:
        self._connect, self._node, self._nodes = connect, node, nodes
        self._client: BenchClient | None = connect(node)

    def call(self, use: Callable[[BenchClient], T]) -> T | None:
        """Return the result of `use`; None after an error."""
        try:
            if self._client is None:
                self._client = self._connect(self._node)
            return use(self._client)
        except Exception:  # noqa: BLE001 - each client library has errors of its own
            if self._client is not None:  # its close may hang as the server does
                threading.Thread(target=_closed, args=(self._client,), daemon=True).start()
            self._client, self._node = None, (self._node + 1) % self._nodes
            time.sleep(REOPEN_S)
            return None


def _closed(client: BenchClient) -> None:
    with suppress(Exception):
        client.close()


def _publishing(
    begin: Begin, system: System, topic: str, leader: int, pids: Sequence[int], sent: signal.Signals, seconds: float
) -> tuple[float, Log]:
    client = _Roaming(lambda node: system.client(topic, 0, node, system.gives_up_after_s), leader, system.nodes)
    acked: Log = []
    begin()
    began, number, to_strike = time.monotonic(), 0, list(pids)

    def send(each: BenchClient) -> bool:
        each.send([_stamped(number)])
        return True

    while time.monotonic() < began + seconds:
        if to_strike and time.monotonic() > began + BEFORE_SIGNAL_S:
            while to_strike:
                os.kill(to_strike.pop(), sent)
        number += 1
        if client.call(send):
            acked.append((number, time.monotonic()))
        time.sleep(EVERY_S)
    return began, acked


def _taking(
    begin: Begin, system: System, topic: str, leader: int, pids: Sequence[int], sent: signal.Signals, seconds: float
) -> tuple[float, Log]:
    client = _Roaming(lambda node: system.client(topic, 10, node, system.gives_up_after_s), leader, system.nodes)
    delivered: Log = []
    begin()
    began = heard = time.monotonic()
    silent_s = max(SILENT_S, system.gives_up_after_s)

    def take(each: BenchClient) -> list[bytes]:
        messages = each.receive()
        if not messages and time.monotonic() > heard + silent_s:
            raise TimeoutError("a node that hangs delivers nothing")
        return messages

    while time.monotonic() < began + seconds + DRAIN_S:
        messages = client.call(take)
        if messages or messages is None:
            heard = time.monotonic()
        delivered += [(_stamp_of(each)[0], time.monotonic()) for each in messages or ()]
    return began, delivered


# --- the run ---------------------------------------------------------------------------------------------------------


def compared(
    systems: Sequence[System], plan: CasePlan, directory: Path, tell: Callable[[str], None]
) -> tuple[list[Figures], list[Figures], dict[str, str]]:
    """Measure every system in each round, until the end or an interruption. Return the results, the calibrations, and
    by case why it failed or was cut off, and after how many repetitions."""
    run = _Run(directory, tell)
    rounds = 0 if set(plan.cases) == {"gap"} else plan.rounds
    able = [system for system in systems if system.nodes > 1 and "gap" in system.cases.intersection(plan.cases)]
    try:
        for number, system in itertools.product(range(rounds), systems):
            tell(f"round {number + 1} of {rounds}: {system.name}")
            run.calibrate(system.name, number)
            run.measure({"system": system.name}, system, rounds, partial(measured, plan=plan, under_way=run.under_way))
        for number, system, sent in itertools.product(range(plan.kills), able, SIGNALS):
            tell(f"{sent.name} {number + 1} of {plan.kills}: {system.name}")
            one = partial(gap, sent=sent, after_s=plan.after_s)
            for figures in run.measure(gap_case(system, sent), system, plan.kills, one):
                tell("  " + ", ".join(f"{name} {number_of(figures[name])}" for name in figures if name not in KEYS))
        run.calibrate("the end", plan.rounds - 1)
    except KeyboardInterrupt:
        run.failures = run.failures or {"the run": "interrupted"}
    return combined(run.results, KEYS), run.calibrations, run.failures


class _Run:
    """What a run has measured so far."""

    def __init__(self, directory: Path, tell: Callable[[str], None]) -> None:
        self.results: list[Figures] = []
        self.calibrations: list[Figures] = []
        self.failures: dict[str, str] = {}
        self._directory = directory
        self._tell = tell
        self._case: Figures = {}

    def under_way(self, case: Figures) -> Figures:
        """Note which case begins."""
        self._case = case
        return case

    def calibrate(self, before: str, number: int) -> None:
        with self._noting({"system": before}, 1):
            self.calibrations.append({"before": before, "round": number, **calibration(self._directory)})

    def measure(
        self, case: Figures, system: System, repetitions: int, measurement: Callable[[System, Site], Iterable[Figures]]
    ) -> list[Figures]:
        """Start the system, measure, and return the new results. `case` is under way until the measurement names
        another. After an error the other systems and rounds go on, not after an interruption."""
        had = len(self.results)
        with self._noting(case, repetitions), running(system, self._directory) as site:
            for figures in measurement(system, site):
                self.results.append(figures)
        return self.results[had:]

    @contextmanager
    def _noting(self, case: Figures, repetitions: int) -> Iterator[None]:
        self.under_way(case)
        try:
            yield
        except (Exception, KeyboardInterrupt) as error:
            done = sum(all(each.get(key) == self._case.get(key) for key in KEYS) for each in self.results)
            when = f" after {done} of {repetitions} repetitions" if "case" in self._case else ""
            name = case_name(self._case)
            self.failures[name] = f"{cause(error)}{when}"
            self._tell(f"  {name}: {self.failures[name]}")
            if isinstance(error, KeyboardInterrupt):
                raise


def case_name(case: Figures) -> str:
    """Return the name of a case in lists of failures."""
    units = {"size": "B", "batch": "a batch", "processes": "proc."}
    named = [str(case[key]) for key in ("case", "signal") if key in case]
    return ", ".join([case["system"], *named, *(f"{case[key]} {unit}" for key, unit in units.items() if key in case)])
