"""What is handed out and given up, in the pieces that records and receipts are made of."""

from __future__ import annotations

from portalmq.broker.partition.reader import BatchSlice
from portalmq.wire import GroupConfig

# Messages that are given up by one record.
DEAD_A_RECORD = 1_000
NAMES_MAX = 190

# Neighbouring pieces with their delivery number and lane, the same in all of a run: they share a range and a receipt's
# head.
Run = list[tuple[BatchSlice, int, int]]


def runs_of(pieces: list[tuple[BatchSlice, int, int]]) -> list[Run]:
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
