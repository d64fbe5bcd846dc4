"""What a worker counts, as plain data that a supervisor can add to that of others, and as Prometheus's text format."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable

import msgspec

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
OUTCOMES = ("acked", "failed", "timeout", "retried", "rejected", "released", "lost")


class HandlerCounts(msgspec.Struct):
    """The counts of one handler in one process. `buckets` count the handled messages by their duration; the last one is
    of those longer than the longest bound. `fault` is why it receives nothing at the moment, "" for no reason."""

    handler: str
    group: str
    outcomes: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    buckets: list[int] = msgspec.field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    seconds: float = 0.0
    running: int = 0
    concurrency: int = 0
    stuck: int = 0
    fault: str = ""


class ProcessState(msgspec.Struct):
    """What a process of a worker tells. `is_ready`: all handlers receive, or may at any moment."""

    process: int
    is_ready: bool
    is_stopping: bool
    handlers: list[HandlerCounts]

    @property
    def faults(self) -> list[str]:
        return [f"{each.handler}: {each.fault}" for each in self.handlers if each.fault]


class Counter:
    """The counts of a handler while it runs. Thread-safe."""

    def __init__(self, handler: str, group: str, concurrency: int) -> None:
        self._lock = threading.Lock()
        self._counts = HandlerCounts(handler, group, concurrency=concurrency)

    def began(self) -> None:
        with self._lock:
            self._counts.running += 1

    def ended(self, seconds: float) -> None:
        with self._lock:
            self._counts.running -= 1
            self._counts.buckets[bisect_left(BUCKETS_S, seconds)] += 1
            self._counts.seconds += seconds

    def count(self, outcome: str, messages: int = 1) -> None:
        with self._lock:
            self._counts.outcomes[outcome] += messages

    def set_stuck(self, by: int) -> None:
        with self._lock:
            self._counts.stuck += by

    def set_fault(self, fault: str) -> None:
        with self._lock:
            self._counts.fault = fault

    def now(self) -> HandlerCounts:
        """Return a copy."""
        with self._lock:
            return msgspec.convert(msgspec.to_builtins(self._counts), HandlerCounts)


def prometheus(states: Iterable[ProcessState]) -> str:
    """Return the counts of the processes in Prometheus's text format 0.0.4."""
    rows = [(state.process, each) for state in states for each in state.handlers]
    lines: list[str] = []

    def family(name: str, kind: str, meaning: str) -> str:
        lines.extend((f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"))
        return name

    def labels(process: int, counts: HandlerCounts, **more: str) -> str:
        pairs = {"handler": counts.handler, "group": counts.group, "process": str(process), **more}
        return ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs.items())

    name = family("portalmq_worker_messages_total", "counter", "Messages by what became of them.")
    for process, counts in rows:
        for outcome, number in counts.outcomes.items():
            lines.append(f"{name}{{{labels(process, counts, outcome=outcome)}}} {number}")
    name = family("portalmq_worker_handling_seconds", "histogram", "How long handlers ran.")
    for process, counts in rows:
        below = 0
        for bound, number in zip((*map(repr, BUCKETS_S), "+Inf"), counts.buckets, strict=True):
            below += number
            lines.append(f"{name}_bucket{{{labels(process, counts, le=bound)}}} {below}")
        lines.append(f"{name}_sum{{{labels(process, counts)}}} {counts.seconds:.6f}")
        lines.append(f"{name}_count{{{labels(process, counts)}}} {below}")
    for gauge, meaning in (
        ("running", "Messages in a handler now."),
        ("concurrency", "The most messages of a handler at a time."),
        ("stuck", "Handlers that did not end after their timeout."),
    ):
        name = family(f"portalmq_worker_{gauge}", "gauge", meaning)
        for process, counts in rows:
            lines.append(f"{name}{{{labels(process, counts)}}} {getattr(counts, gauge)}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
