"""The figures of a throughput report computed directly: every row of every file into Python, and dictionaries.

Shares nothing with portalmq.spark: SQLite files are read as SCHEMA.md describes them, message by message.
"""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from typing import Any

import msgspec

STARTED, GRANT, ACK, NACK, ENDED, DEAD, REDRIVE, DROP, COMMIT = 10, 11, 12, 13, 15, 16, 17, 18, 19
CLAIM, COMMIT_OFFSET, SEEK, CANCEL = 21, 22, 23, 4


@dataclass
class Message:
    offset: int
    size: int
    keyed: bool
    at: int
    due: int
    producer: int | None


@dataclass
class PlainLog:
    topic: str
    partition: int
    start: int
    end: int
    messages: dict[int, Message] = field(default_factory=dict)
    batches: list[tuple[int, int, int, int, int | None]] = field(
        default_factory=list
    )  # offset, kind, epoch, at, producer
    records: list[tuple[int, int, str, Any, int]] = field(default_factory=list)  # offset, kind, group, body, at


def logs_in(*directories: Path) -> list[PlainLog]:
    """Of several replicas, the one with the most committed offsets."""
    best: dict[tuple[str, int], PlainLog] = {}
    for directory in directories:
        for place in sorted(directory.glob("partitions/*/*")):
            if place.is_dir() and not place.parent.name.startswith("__"):
                log = _log(place)
                name = (log.topic, log.partition)
                if name not in best or log.end > best[name].end:
                    best[name] = log
    return [best[name] for name in sorted(best)]


def _log(place: Path) -> PlainLog:
    meta = dict(_rows(place / "state.sqlite", "SELECT key, value FROM meta"))
    # A replica whose groups are being reread has saved nothing: it knows of no committed offset.
    log = PlainLog(
        place.parent.name.split("@")[0], int(place.name), meta.get("log_start_offset", 0), meta.get("high_watermark", 0)
    )
    inside = f"BETWEEN {log.start} AND {log.end - 1}"
    for path in sorted(place.glob("[0-9]*.sqlite")):
        for row in _rows(
            path,
            "SELECT m.offset, length(CAST(m.value AS BLOB)), m.key IS NOT NULL, b.appended_at_ms, m.deliver_at_ms,"
            " b.producer_id FROM messages AS m JOIN batches AS b"
            f" ON b.base_offset = (SELECT max(base_offset) FROM batches WHERE base_offset <= m.offset)"
            f" WHERE m.offset {inside}",
        ):
            offset, size, keyed, at, due, producer = row
            log.messages[offset] = Message(offset, size, bool(keyed), at, max(at, due or 0), producer)
        log.batches += _rows(
            path,
            "SELECT base_offset, kind, leader_epoch, appended_at_ms, producer_id FROM batches"
            f" WHERE base_offset + count > {log.start} AND base_offset < {log.end}",
        )
        log.records += [
            (offset, kind, group, msgspec.msgpack.decode(body) if body else [], at)
            for offset, kind, group, body, at in _rows(
                path,
                "SELECT r.offset, r.kind, r.group_name, r.body, b.appended_at_ms FROM records AS r"
                f" JOIN batches AS b ON b.base_offset = r.offset WHERE r.offset {inside} AND r.kind <> 2",
            )
        ]
    return log


def _rows(path: Path, query: str) -> list[Any]:
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def quantile(values: Iterable[int], rank: float) -> float:
    ordered = sorted(values)
    at = (len(ordered) - 1) * rank
    low = floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass
class Told:
    """The deliveries and settlements of one group on one topic."""

    mode: str
    # Message -> (at, waited). A message is (partition, offset, how many groups of the name were deleted before).
    first: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    counts: Counter[int] = field(default_factory=Counter)  # delivery count -> hand-outs
    again: set[tuple[int, int, int]] = field(default_factory=set)
    nacked: int = 0
    acked: int = 0
    dead: int = 0
    unrecorded: int = 0  # acked, without a recorded delivery in the log


def told(logs: Sequence[PlainLog]) -> tuple[dict[tuple[str, str], Told], dict[tuple[str, str, int], set[int]]]:
    """The outcomes of messages by (group, topic), and the unfinished ones by (group, topic, partition)."""
    found: dict[tuple[str, str], Told] = {}
    left: dict[tuple[str, str, int], set[int]] = {}
    for log in logs:
        positions: dict[str, int] = {}
        lives = Counter[str]()
        cancelled = {
            offset for _, kind, _, body, _ in log.records if kind == CANCEL for start, end in body[0]
            for offset in range(start, end)
        }  # fmt: skip
        for _, kind, group, body, at in log.records:
            if not group:
                continue
            if kind == ENDED:
                lives[group] += 1
                positions.pop(group, None)
                left.pop((group, log.topic, log.partition), None)
                continue
            life = lives[group]
            mode = "stream" if kind in (CLAIM, COMMIT_OFFSET, SEEK) else "queue"
            each = found.setdefault((group, log.topic), Told(mode))
            unfinished = left.setdefault((group, log.topic, log.partition), set())
            if kind == STARTED:
                unfinished.clear()
                unfinished |= {offset for offset in log.messages if offset >= body[0]} - cancelled
            elif kind == GRANT:
                for start, end, delivery in body[0]:
                    for offset in range(start, end):
                        message = log.messages.get(offset)
                        if message is None:
                            continue  # purged in the meantime
                        each.first.setdefault((log.partition, offset, life), (at, max(0, at - message.due)))
                        each.counts[delivery] += 1
                        if delivery > 1:
                            each.again.add((log.partition, offset, life))
            elif kind in (ACK, DEAD):
                offsets = _there(log, body[0])
                unfinished -= offsets
                each.acked += len(offsets) if kind == ACK else 0
                each.dead += len(offsets) if kind == DEAD else 0
                if kind == ACK and len(body) > 2:
                    unfinished -= {offset for *_, offset in body[2]}
                    each.acked += len(body[2])
                    each.unrecorded += len(body[2])
            elif kind == NACK and not (len(body) > 3 and body[3]):
                each.nacked += len(_there(log, body[0]))
            elif kind == REDRIVE:
                unfinished |= _there(log, body[0])
            elif kind == CLAIM and group not in positions:
                positions[group] = body[2]
                unfinished |= {offset for offset in log.messages if offset >= body[2]}
            elif kind == SEEK:
                positions[group] = body[0]
                unfinished.clear()
                unfinished |= {offset for offset in log.messages if offset >= body[0]}
            elif kind == COMMIT_OFFSET and body[0] > positions.setdefault(group, log.start):
                for offset in range(positions[group], body[0]):
                    if offset in log.messages:
                        where = (log.partition, offset, life)
                        is_again = where in each.first
                        each.counts[2 if is_again else 1] += 1
                        each.first.setdefault(where, (at, max(0, at - log.messages[offset].at)))
                        if is_again:
                            each.again.add(where)
                        else:
                            each.acked += 1
                        unfinished.discard(offset)
                positions[group] = body[0]
    return found, left


def _there(log: PlainLog, ranges: Iterable[Any]) -> set[int]:
    """The offsets of ranges, except for purged messages."""
    return {offset for start, end, *_ in ranges for offset in range(start, end) if offset in log.messages}


def size_border(value: int) -> int:
    return 0 if value < 1 else 1 << (value.bit_length() - 1)


def by(rows: Iterable[Any], *names: str) -> dict[Any, Any]:
    """The rows of a report by their keys, each once."""
    made: dict[Any, Any] = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in names)
        assert key not in made, key
        made[key[0] if len(key) == 1 else key] = row
    return made


def grouped(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)
