"""Runs of delivered messages and parts of given-up ones, as records and receipts hold them."""

from __future__ import annotations

from portalmq.broker.partition.reader import BatchSlice
from portalmq.wire import GroupConfig

# The most messages of a DEAD record.
DEAD_A_RECORD = 1_000
NAMES_MAX = 190

# Adjacent pieces with one delivery number and one lane: they share a range and the head of their receipts.
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
    """Split the ranges into parts of at most DEAD_A_RECORD messages."""
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
    """Return the back-off after the `delivery`-th delivery; the last configured one applies to all further ones."""
    return config.retry_backoff_ms[min(max(1, delivery), len(config.retry_backoff_ms)) - 1]


def dead_letter_topic(config: GroupConfig, topic: str) -> str:
    """Return the dead-letter topic, "" for none. A long topic name is cut so that the result is a valid name. No topic
    is its own: its dead letters would be delivered again without an end."""
    pattern = config.dead_letter_topic
    room = NAMES_MAX - len(pattern.replace("{topic}", ""))
    named = pattern.replace("{topic}", topic[: max(1, room // max(1, pattern.count("{topic}")))])
    return "" if named == topic else named
