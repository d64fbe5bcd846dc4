"""Ledgers of sent and of delivered messages, and their comparison.

A ledger is a file of JSON lines that outlives its writer: each line is flushed before the next step (a sensor's after
the acknowledgement, a controller's before its own ack). Messages are compared by their content.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

EXAMPLES_MAX = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """One message as one side saw it, `at` seconds of the machine's monotonic clock. `id` is its position in
    `topic`."""

    at: float
    topic: str
    id: str
    message: dict[str, Any]

    @property
    def content(self) -> str:
        return json.dumps(self.message, sort_keys=True)


class Ledger:
    """An append-only file of entries."""

    def __init__(self, path: Path | None) -> None:
        """Append to the file; without a path, write nothing."""
        self._file: TextIO | None = path.open("a", encoding="utf-8") if path else None

    def write(self, entry: Entry) -> None:
        if self._file:
            line = {"at": entry.at, "topic": entry.topic, "id": entry.id, "message": entry.message}
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()


def read(paths: Iterable[Path]) -> Iterator[Entry]:
    """Yield all entries of some ledgers. An unfinished last line is no entry."""
    for path in paths:
        with path.open(encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):
                    yield Entry(**json.loads(line))


class EntryCount:
    """The number of entries of growing ledgers; each byte is read once."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._read_up_to = dict.fromkeys(paths, 0)
        self._entries = 0

    def count(self) -> int:
        for path, start in self._read_up_to.items():
            if path.exists():
                with path.open("rb") as file:
                    file.seek(start)
                    grown = file.read()
                self._read_up_to[path] = start + len(grown)
                self._entries += grown.count(b"\n")
        return self._entries


@dataclass(slots=True)
class Comparison:
    """The result of a comparison. It is clean if no message was lost, unexpected, or stored twice; a duplicate is a
    message that was delivered again, which at-least-once allows."""

    sent: int = 0
    delivered: int = 0
    duplicates: int = 0
    lost: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    stored_twice: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return self.sent == self.delivered > 0 and not (self.lost or self.unexpected or self.stored_twice)

    def faults(self) -> list[str]:
        """Return sentences for people, each with a few examples."""
        lines = []
        for what, messages in (
            ("acknowledged and never delivered", self.lost),
            ("delivered and never acknowledged", self.unexpected),
            ("stored at two places", self.stored_twice),
        ):
            if messages:
                lines.append(f"{len(messages)} messages were {what}, for instance:")
                lines.extend(f"    {message}" for message in messages[:EXAMPLES_MAX])
        if not self.sent:
            lines.append("nothing was sent")
        return lines


def compare(sent: Iterable[Entry], delivered: Iterable[Entry]) -> Comparison:
    """Compare acknowledged messages with delivered ones, by content."""
    acknowledged = Counter(entry.content for entry in sent)
    places: dict[str, set[tuple[str, str]]] = defaultdict(set)
    deliveries: Counter[str] = Counter()
    for entry in delivered:
        deliveries[entry.content] += 1
        places[entry.content].add((entry.topic, entry.id))
    return Comparison(
        sent=len(acknowledged),
        delivered=len(deliveries),
        duplicates=deliveries.total() - len(deliveries),
        lost=sorted(acknowledged.keys() - deliveries.keys()),
        unexpected=sorted(deliveries.keys() - acknowledged.keys()),
        stored_twice=sorted(content for content, found in places.items() if len(found) > 1),
    )


def longest_gap_ms(times: Iterable[float], *, around: float, within_s: float = 10.0) -> int:
    """Return the longest time without an acknowledgement, in ms, of those that ended after `around` and began at most
    `within_s` later. 0 if nothing was acknowledged after it."""
    gaps = (
        later - earlier
        for earlier, later in pairwise(sorted(times))
        if later >= around and earlier <= around + within_s
    )
    return round(1000 * max(gaps, default=0.0))
