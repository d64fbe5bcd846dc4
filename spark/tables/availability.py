"""Looks up, in Spark's workers, the times from which ranges of a partition's messages could be delivered.

A message could be delivered from its append time, or from its deliver_at. A batch has one append time, so a range of
offsets falls into few runs. Headers are cached by blocks of offsets: callers advance along the log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from portalmq.spark.errors import DamagedFile
from portalmq.spark.files.segment import opened

BLOCK_OFFSETS = 65_536
BLOCKS_KEPT = 16
DELAYED = 32  # lanes from here on hold delayed messages


class AvailableRun(NamedTuple):
    """Messages from the offset `first` on that could be delivered from `available_ms`; None when their file is gone."""

    first: int
    messages: int
    available_ms: int | None


class _Block(NamedTuple):
    """The message batches that overlap a block."""

    base: list[int]
    end: list[int]
    appended_ms: list[int]
    holes: frozenset[int]


class Availability:
    """Times of one partition, from the first of its replicas' `directories` that can be read."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self._directories = tuple(directories)
        self._block = lru_cache(BLOCKS_KEPT)(self._load)
        self._delays = lru_cache(BLOCKS_KEPT)(self._load_delays)

    def granted(self, start: int, end: int, lane: int) -> list[AvailableRun]:
        """Return the runs of a delivered range, which holds messages only, perhaps compacted since."""
        if lane < DELAYED:
            return _merged(self._plain(start, end))
        return _merged(
            AvailableRun(run.first + at, 1, _later(run.available_ms, self._due_ms(run.first + at)))
            for run in self._plain(start, end)
            for at in range(run.messages)
        )

    def committed(self, start: int, end: int) -> list[AvailableRun]:
        """Return the runs of messages in a range with control records. Messages whose file is gone are left out."""
        return _merged(
            AvailableRun(run.first, self._present(run), run.available_ms)
            for run in self._plain(start, end)
            if run.available_ms is not None
        )

    def _plain(self, start: int, end: int) -> Iterator[AvailableRun]:
        """Yield [start, end) by batches; offsets in no batch come with `available_ms` None."""
        at = start
        while at < end:
            block = self._block(at // BLOCK_OFFSETS)
            stop = min(end, (at // BLOCK_OFFSETS + 1) * BLOCK_OFFSETS)
            index = bisect_right(block.base, at) - 1
            while at < stop:
                if index >= 0 and at < block.end[index]:
                    upto = min(stop, block.end[index])
                    yield AvailableRun(at, upto - at, block.appended_ms[index])
                else:
                    upto = min(stop, block.base[index + 1]) if index + 1 < len(block.base) else stop
                    yield AvailableRun(at, upto - at, None)
                at = upto
                if index + 1 < len(block.base) and at >= block.base[index + 1]:
                    index += 1

    def _due_ms(self, offset: int) -> int:
        return self._delays(offset // BLOCK_OFFSETS).get(offset, 0)

    def _present(self, run: AvailableRun) -> int:
        """Return how many messages of a run compaction has kept."""
        block = self._block(run.first // BLOCK_OFFSETS)
        if block.base[bisect_right(block.base, run.first) - 1] not in block.holes:
            return run.messages
        query = "SELECT count(*) FROM messages WHERE offset >= ? AND offset < ?"
        return sum(int(row[0]) for row in self._ask(query, run.first, run.first + run.messages))

    def _load(self, number: int) -> _Block:
        low, high = number * BLOCK_OFFSETS, (number + 1) * BLOCK_OFFSETS
        rows = sorted(
            row for row in self._ask(_BATCHES_SQL, low, high, covering=True) if row[0] < high and row[0] + row[1] > low
        )
        holes = frozenset(int(row[0]) for row in self._ask(_HOLES_SQL, low, high, covering=True, table="holes"))
        return _Block(
            [row[0] for row in rows], [row[0] + row[1] for row in rows], [row[2] for row in rows], frozenset(holes)
        )

    def _load_delays(self, number: int) -> dict[int, int]:
        low, high = number * BLOCK_OFFSETS, (number + 1) * BLOCK_OFFSETS
        return {row[0]: row[1] for row in self._ask(_DELAYS_SQL, low, high)}

    def _ask(
        self, query: str, low: int, high: int, *, covering: bool = False, table: str | None = None
    ) -> list[tuple[int, ...]]:
        """Return the rows of all files that overlap [low, high), from the first readable replica; none when all have
        removed the files. Raises DamagedFile."""
        fault: DamagedFile | None = None
        for directory in self._directories:
            try:
                return [row for path in _files(directory, low, high) for row in _rows(path, query, low, high, table)]
            except FileNotFoundError:
                continue
            except DamagedFile as error:
                fault = error
        if fault is not None:
            raise fault
        return []


def _files(directory: Path, low: int, high: int) -> list[Path]:
    paths = sorted(path for path in directory.glob("*.sqlite") if path.stem.isdecimal())
    bases = [int(path.stem) for path in paths]
    return paths[max(0, bisect_right(bases, low) - 1) : bisect_right(bases, high - 1)]


def _rows(path: Path, query: str, low: int, high: int, table: str | None) -> list[tuple[int, ...]]:
    with opened(path) as connection:
        if table is not None:
            there = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
            if not there:
                return []
        return connection.execute(query, (low, high)).fetchall()


def _later(appended_ms: int | None, due_ms: int) -> int | None:
    return None if appended_ms is None else max(appended_ms, due_ms)


def _merged(runs: Iterator[AvailableRun]) -> list[AvailableRun]:
    """Merge adjacent runs with one time."""
    found: list[AvailableRun] = []
    for run in runs:
        if not run.messages:
            continue
        last = found[-1] if found else None
        if last is not None and last.available_ms == run.available_ms and last.first + last.messages == run.first:
            found[-1] = AvailableRun(last.first, last.messages + run.messages, run.available_ms)
        else:
            found.append(run)
    return found


_BATCHES_SQL = """
SELECT base_offset, count, appended_at_ms FROM batches
WHERE kind = 0 AND base_offset < ?2
      AND base_offset >= coalesce((SELECT max(base_offset) FROM batches WHERE base_offset <= ?1), ?1)"""

_HOLES_SQL = """
SELECT base_offset FROM holes
WHERE base_offset < ?2
      AND base_offset >= coalesce((SELECT max(base_offset) FROM batches WHERE base_offset <= ?1), ?1)"""

_DELAYS_SQL = """
SELECT offset, deliver_at_ms FROM messages WHERE offset >= ?1 AND offset < ?2 AND deliver_at_ms > timestamp_ms"""
