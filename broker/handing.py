"""What is handed out and given up, in the pieces that records and receipts are made of."""

from __future__ import annotations

from bisect import bisect_right

from portalmq.broker.reader import Piece
from portalmq.wire import GroupConfig

# Messages that are given up by one record.
DEAD_A_RECORD = 1_000
NAMES_MAX = 190

# Neighbouring pieces with their delivery number and lane, the same in all of a run: they share a range and a receipt's
# head.
Run = list[tuple[Piece, int, int]]


class HandedOut:
    """The offsets that were handed out here, in the epoch that goes on. Invariant: sorted, disjoint, not adjacent."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        at = bisect_right(self._starts, start)
        if at and self._ends[at - 1] >= start:
            at -= 1
            start = self._starts[at]
        last = at
        while last < len(self._starts) and self._starts[last] <= end:
            end = max(end, self._ends[last])
            last += 1
        self._starts[at:last] = [start]
        self._ends[at:last] = [end]

    def __contains__(self, offset: int) -> bool:
        at = bisect_right(self._starts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def __len__(self) -> int:
        return len(self._starts)

    def forget_below(self, offset: int) -> None:
        gone = bisect_right(self._ends, offset)
        del self._starts[:gone], self._ends[:gone]


def runs_of(pieces: list[tuple[Piece, int, int]]) -> list[Run]:
    runs: list[Run] = []
    end, last, last_lane = -1, 0, 0
    for each in pieces:
        piece, deliveries, lane = each
        if piece.start == end and deliveries == last and lane == last_lane:
            runs[-1].append(each)
        else:
            runs.append([each])
        end, last, last_lane = piece.end, deliveries, lane
    return runs


def parts_of(ranges: list[tuple[int, int, int]]) -> list[tuple[tuple[int, int, int], ...]]:
    """The ranges in parts of no more messages than a record gives up."""
    parts: list[list[tuple[int, int, int]]] = [[]]
    room = DEAD_A_RECORD
    for start, end, deliveries in ranges:
        while start < end:
            if room == 0:
                parts.append([])
                room = DEAD_A_RECORD
            upto = min(end, start + room)
            parts[-1].append((start, upto, deliveries))
            room -= upto - start
            start = upto
    return [tuple(part) for part in parts]


def backoff_ms(config: GroupConfig, delivery: int) -> int:
    """What a message waits after its `delivery`-th delivery; after the last one named it stays the same."""
    return config.retry_backoff_ms[min(max(1, delivery), len(config.retry_backoff_ms)) - 1]


def dead_letter_topic(config: GroupConfig, topic: str) -> str:
    """Where copies of what is given up go; "" for nowhere. A long topic name is cut so that the whole is a name."""
    pattern = config.dead_letter_topic
    return pattern.replace("{topic}", topic[: max(1, NAMES_MAX - len(pattern) + len("{topic}"))])
