"""The history of a run: every call of every client and its answer, as lines of JSON.

    {"call": 7, "actor": "plain", "kind": "send", "at": 12.25, "asked": {"topic": "orders", "value": "plain/7"}}
    {"answer": 7, "actor": "plain", "at": 12.5, "outcome": "ok", "got": {"partition": 0, "offset": 3}}

A call is on disk before it is sent, its answer before anything else is done with it. So a client that is killed leaves
calls without an answer, and no answer without its effect. Times are of the machine's monotonic clock.

Kinds: send; receive, ack, nack (queue groups); poll, commit, offsets (stream groups); transform (a commit call with
outputs); read (browse); lock, check. Outcomes: ok; refused (not applied); unknown.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, REFUSED, UNKNOWN = "ok", "refused", "unknown"
PADDING = 96


@dataclass(slots=True)
class Act:
    """One call. `ended` is infinite, and the outcome unknown, when no answer was recorded."""

    kind: str
    actor: str
    began: float
    asked: dict[str, Any]
    ended: float = math.inf
    outcome: str = UNKNOWN
    got: dict[str, Any] = field(default_factory=dict)


class History:
    """Writes one file, from any number of threads."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._numbers = itertools.count()

    def call(self, actor: str, kind: str, **asked: Any) -> int:
        """Record that a call begins. Return its number."""
        number = next(self._numbers)
        self._write({"call": number, "actor": actor, "kind": kind, "at": time.monotonic(), "asked": asked})
        return number

    def answer(self, actor: str, number: int, outcome: str, **got: Any) -> None:
        self._write({"answer": number, "actor": actor, "at": time.monotonic(), "outcome": outcome, "got": got})

    def note(self, actor: str, what: str) -> None:
        """Record something that is neither a call nor an answer, for a human reader."""
        self._write({"note": what, "actor": actor, "at": time.monotonic()})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._file, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def acts_in(files: Iterable[Path]) -> list[Act]:
    """Read files of one run, one for each process of clients, ordered by the begin of the calls."""
    acts = [act for file in files for act in _acts_of(file.read_bytes().splitlines())]
    return sorted(acts, key=lambda act: act.began)


def _acts_of(lines: Iterable[bytes]) -> Iterator[Act]:
    open_acts: dict[int, Act] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # a process that was killed may leave half a line
            continue
        if "call" in row:
            open_acts[row["call"]] = Act(row["kind"], row["actor"], row["at"], row["asked"])
        elif "answer" in row:
            act = open_acts.pop(row["answer"])
            act.ended, act.outcome, act.got = row["at"], row["outcome"], row["got"]
            yield act
    yield from open_acts.values()


def value_of(identity: str) -> str:
    """The value that is sent under an identity, which has no space: a reader can verify that it is whole."""
    return f"{identity} {(identity * (PADDING // len(identity) + 1))[:PADDING]}"


def identity_of(value: str) -> str:
    identity = value.partition(" ")[0]
    return identity if identity and value == value_of(identity) else f"damaged:{value[:80]!r}"
