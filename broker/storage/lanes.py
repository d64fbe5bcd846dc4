"""The lanes of a log (core/queue/lanes.py) in its files: messages with a priority, and delayed ones.

Partial indexes of each segment hold them and nothing else. So a partition of plain messages pays nothing for them, and
none of a million delayed messages is in memory.

    messages_by_priority   (priority, offset)                  messages with a priority that were not delayed
    messages_by_time       (priority, deliver_at_ms, offset)   delayed ones
    messages_by_expiry     (expires_at_ms)                     those that expire

A segment holds the lanes that occur in it as bits; a settled one reads them from its indexes at the first query. A lane
is read over all segments that have it: one after the other by offset, merged by time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from heapq import merge
from typing import TYPE_CHECKING, Any, Protocol

import apsw

from portalmq.broker.core.queue.lanes import DELAYED, LANES, lane_position
from portalmq.broker.storage.errors import integers
from portalmq.broker.storage.lane_indexes import DELAYED_MESSAGES, EXPIRING, PRIORITY_MESSAGES, lanes_in
from portalmq.broker.storage.segment import Segment

if TYPE_CHECKING:
    from pathlib import Path

    from portalmq.broker.storage.batch import Record

# Rows read at a time: a receive of the usual size.
PAGE_ROWS = 256

# (due_ms, offset, expires_at_ms, key)
Row = tuple[int, int, int | None, bytes | None]
_ROW = "offset, expires_at_ms, CAST(key AS BLOB)"


class _Segments(Protocol):
    """The part of a log that lanes use."""

    _segments: tuple[Segment, ...]

    def _read(self) -> AbstractContextManager[None]: ...
    def _used(self, segment: Segment) -> Segment: ...


class Lanes:
    """The lanes of one log. Positions are (due_ms, offset); only messages below `end` are returned."""

    def __init__(self, log: _Segments) -> None:
        self._log = log

    @property
    def present(self) -> frozenset[int]:
        """The lanes, besides lane 0, that occur in the log."""
        return _lanes_of_bits(self._all_bits())

    @property
    def has_expiring(self) -> bool:
        """True if messages in the log expire, or have expired."""
        return bool(self._all_bits() & EXPIRING)

    @property
    def are_plain(self) -> bool:
        """True if all messages in the log are in lane 0 and never expire."""
        return not self._all_bits()

    def _all_bits(self) -> int:
        bits = 0
        for segment in self._log._segments:
            bits |= self._bits(segment)
        return bits

    def after(self, lane: int, due_ms: int, offset: int, end: int) -> Iterator[Row]:
        """Yield the messages of a lane from that position on, in lane order. Nothing is held open in between."""
        segments = self._having(lane)
        if lane < DELAYED:
            for segment in segments:
                if segment.end_offset > offset and segment.base_offset < end:
                    yield from self._paged(segment, lane, due_ms, offset, end)
            return
        streams = [self._paged(segment, lane, due_ms, offset, end) for segment in segments if segment.base_offset < end]
        yield from streams[0] if len(streams) == 1 else merge(*streams)

    def _paged(self, segment: Segment, lane: int, due_ms: int, offset: int, end: int) -> Iterator[Row]:
        rows = 16
        while True:
            with self._reader(segment) as reader:
                if reader is None:
                    return
                page = [_checked(segment.path, row) for row in rows_after(reader, lane, due_ms, offset, end, rows)]
            yield from page
            if len(page) < rows:
                return
            due_ms, offset, rows = page[-1][0], page[-1][1] + 1, PAGE_ROWS

    def count(
        self, lane: int, due_ms: int, offset: int, end: int, *, start: int = 0, until_ms: int | None = None
    ) -> int:
        """Return how many messages of a lane are at that position or after, at offset `start` or above, and (in a
        delayed lane) due by `until_ms`."""
        total = 0
        for segment in self._having(lane):
            if segment.base_offset < end and segment.end_offset > start:
                with self._reader(segment) as reader:
                    if reader is not None:
                        total += count_after(reader, lane, due_ms, offset, end, start, until_ms)
        return total

    def count_passed(self, lane: int, before: tuple[int, int], after: tuple[int, int], *, start: int, end: int) -> int:
        """Return how many messages of a delayed lane are at `before` or later, but not at `after` or later, and at
        offsets in [start, end)."""
        return self._counted(
            self._having(lane),
            (start, end),
            "SELECT count(*) FROM messages INDEXED BY messages_by_time"
            f" WHERE {DELAYED_MESSAGES} AND priority = ? AND (deliver_at_ms, offset) >= (?, ?)"
            " AND deliver_at_ms <= ? AND (deliver_at_ms, offset) < (?, ?) AND offset >= ? AND offset < ?",
            (lane % DELAYED, *before, after[0], *after, start, end),
        )

    def count_among(self, lane: int, position: tuple[int, int], *, start: int, end: int) -> int:
        """Return how many messages of a delayed lane are at that position or later, and at offsets in [start, end).
        Reads all messages at these offsets, with their values: about 1 us each."""
        return self._counted(
            self._having(lane),
            (start, end),
            f"SELECT count(*) FROM messages WHERE offset >= ? AND offset < ? AND coalesce({DELAYED_MESSAGES}, 0)"
            " AND priority = ? AND (deliver_at_ms, offset) >= (?, ?)",
            (start, end, lane % DELAYED, *position),
        )

    def count_others(self, start: int, end: int) -> int:
        """Return how many messages in [start, end) are not of lane 0. Reads all of them."""
        return self._counted(
            self._log._segments,
            (start, end),
            "SELECT count(*) FROM messages WHERE offset >= ? AND offset < ?"
            f" AND (({PRIORITY_MESSAGES}) OR coalesce({DELAYED_MESSAGES}, 0))",
            (start, end),
        )

    def _counted(
        self, segments: Iterable[Segment], offsets: tuple[int, int], query: str, values: tuple[int, ...]
    ) -> int:
        """Return the sum of a counting query over those of the segments that have some of the offsets."""
        total, (start, end) = 0, offsets
        for segment in segments:
            if segment.base_offset < end and segment.end_offset > start:
                with self._reader(segment) as reader:
                    if reader is not None:
                        found: Any = reader.execute(query, values).get
                        total += found
        return total

    def lane_positions(self, offsets: Iterable[int]) -> list[tuple[int, int, int]]:
        """Return the positions, (lane, due_ms, offset), of those messages that exist."""
        wanted = sorted(offsets)
        found: list[tuple[int, int, int]] = []
        for segment in self._log._segments:
            own = wanted[bisect_left(wanted, segment.base_offset) : bisect_left(wanted, segment.end_offset)]
            if not own:
                continue
            with self._reader(segment) as reader:
                if reader is not None:
                    rows: Any = reader.execute(
                        "SELECT offset, priority, deliver_at_ms, timestamp_ms FROM messages"
                        " WHERE offset IN (SELECT value FROM carray(?))",
                        (apsw.carray(array("q", own), flags=apsw.SQLITE_CARRAY_INT64),),
                    )
                    for row in rows:
                        integers(segment.path, row if row[2] is not None else (*row[:2], row[3]))
                        found.append(lane_position(*row))
        return found

    def message(self, offset: int) -> tuple[int, int, Record] | None:
        """Return (base offset of its batch, append time, record) of one message, not verified; None if there is
        none."""
        for segment in self._log._segments:
            if segment.base_offset <= offset < segment.end_offset:
                with self._log._read():
                    return self._log._used(segment).message(offset) if segment in self._log._segments else None
        return None

    def first_segment_after(self, lane: int, due_ms: int, offset: int, end: int, *, start: int = 0) -> int | None:
        """Return the base offset of the oldest segment with a message of the lane from that position on, at offset
        `start` or above."""
        for segment in self._having(lane):
            if segment.end_offset <= start or segment.base_offset >= end:
                continue
            with self._reader(segment) as reader:
                if reader is None:
                    continue
                if segment.base_offset >= start:
                    found = bool(rows_after(reader, lane, due_ms, offset, end, 1))
                else:
                    found = count_after(reader, lane, due_ms, offset, end, start, None) > 0
            if found:
                return segment.base_offset
        return None

    def next_plain(self, offset: int, end: int, rows_max: int, *, any_priority: bool = False) -> int:
        """Return the offset of the next message of lane 0 from `offset` on, or the end of `rows_max` offsets without
        one."""
        plain = "" if any_priority else " AND priority = 0"
        end = min(end, offset + rows_max)
        for segment in self._log._segments:
            if segment.end_offset <= offset or segment.base_offset >= end:
                continue
            with self._reader(segment) as reader:
                if reader is None:
                    continue
                found: Any = reader.execute(
                    "SELECT offset FROM messages WHERE offset >= ? AND offset < ?"
                    f"{plain} AND coalesce(NOT ({DELAYED_MESSAGES}), 1) ORDER BY offset LIMIT 1",
                    (offset, end),
                ).get
            if found is not None:
                return int(found)
        return end

    @contextmanager
    def _reader(self, segment: Segment) -> Iterator[apsw.Connection | None]:
        """Hold the read lock with the segment's connection; None if the segment was dropped."""
        with self._log._read():
            yield self._log._used(segment).reader if segment in self._log._segments else None

    def _having(self, lane: int) -> list[Segment]:
        return [segment for segment in self._log._segments if self._bits(segment) & (1 << lane)]

    def _bits(self, segment: Segment) -> int:
        bits = segment.lanes
        if bits is None:
            with self._reader(segment) as reader:
                if reader is None:
                    return 0
                segment.lanes_found = lanes_in(reader)
                bits = segment.lanes_found | segment.lanes_appended
        return bits


def _checked(path: Path, row: Row) -> Row:
    integers(path, row[:2] if row[2] is None else row[:3])
    return row


def rows_after(reader: apsw.Connection, lane: int, due_ms: int, offset: int, end: int, limit: int) -> list[Row]:
    priority = lane % DELAYED
    if lane < DELAYED:
        rows: Any = reader.execute(
            f"SELECT 0, {_ROW} FROM messages INDEXED BY messages_by_priority"
            f" WHERE {PRIORITY_MESSAGES} AND priority = ? AND offset >= ? AND offset < ? ORDER BY offset LIMIT ?",
            (priority, offset, end, limit),
        )
    else:
        rows = reader.execute(
            f"SELECT deliver_at_ms, {_ROW} FROM messages INDEXED BY messages_by_time"
            f" WHERE {DELAYED_MESSAGES} AND priority = ? AND (deliver_at_ms, offset) >= (?, ?) AND offset < ?"
            " ORDER BY deliver_at_ms, offset LIMIT ?",
            (priority, due_ms, offset, end, limit),
        )
    return list(rows)


def count_after(
    reader: apsw.Connection, lane: int, due_ms: int, offset: int, end: int, start: int, until_ms: int | None
) -> int:
    priority = lane % DELAYED
    if lane < DELAYED:
        found: Any = reader.execute(
            f"SELECT count(*) FROM messages INDEXED BY messages_by_priority"
            f" WHERE {PRIORITY_MESSAGES} AND priority = ? AND offset >= ? AND offset < ?",
            (priority, max(offset, start), end),
        ).get
    else:
        found = reader.execute(
            f"SELECT count(*) FROM messages INDEXED BY messages_by_time"
            f" WHERE {DELAYED_MESSAGES} AND priority = ? AND (deliver_at_ms, offset) >= (?, ?)"
            " AND deliver_at_ms <= ? AND offset >= ? AND offset < ?",
            (priority, due_ms, offset, (1 << 62) if until_ms is None else until_ms, start, end),
        ).get
    return int(found)


@lru_cache(maxsize=256)
def _lanes_of_bits(bits: int) -> frozenset[int]:
    return frozenset(lane for lane in range(1, LANES) if bits >> lane & 1)
