"""The table `groups`: the position of each group on each partition, as last saved by the broker (at most a second ago
while it runs).

    topic, partition, group, mode     mode: queue | stream
    next_offset, high_watermark       the next offset (of a queue group: of the plain messages), and the committed end
    lag              messages that are not done
    in_flight        the part of the lag that was delivered: leased, or given back and waiting
    dead             messages that the group has given up and keeps for a redrive
    oldest           the time from which the oldest message that is not done could be delivered; null without one
    member           the member that reads the partition in a stream group

It is exact for messages with priorities and delays too: those in other lanes are counted in the indexes of the segment
files, as a broker counts them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from portalmq.spark.columns import INT, LONG, TEXT, TIME, Table
from portalmq.spark.errors import DamagedFile, NothingThere
from portalmq.spark.files.directories import missing_file
from portalmq.spark.files.replica import STATE_NAME
from portalmq.spark.files.segment import opened
from portalmq.spark.origin import PartitionLog
from portalmq.spark.tables.availability import DELAYED, Availability
from portalmq.spark.tables.table import Piece, TableReader, pieces_of

TABLE = Table(
    "groups",
    {
        "topic": TEXT,
        "partition": INT,
        "group": TEXT,
        "mode": TEXT,
        "next_offset": LONG,
        "high_watermark": LONG,
        "lag": LONG,
        "in_flight": LONG,
        "dead": LONG,
        "oldest": TIME,
        "member": TEXT,
    },
)
LOGS_IN_A_TASK = 32
# The search for the oldest message skips at most this many that were cancelled, or done early.
LOOK_MAX = 10_000
_PRIORITY = "priority > 0 AND (deliver_at_ms IS NULL OR deliver_at_ms <= timestamp_ms)"
_DELAYED = "deliver_at_ms > timestamp_ms"

LanePosition = tuple[int, int]


class GroupsTask(InputPartition):
    """Logs whose groups one task reads: the log, its files, and its replicas' directories, the best first."""

    def __init__(self, logs: Sequence[tuple[PartitionLog, tuple[Piece, ...], tuple[Path, ...]]]) -> None:
        super().__init__(None)
        self.logs = tuple(logs)


class GroupsReader(TableReader):
    table = TABLE

    def partitions(self) -> Sequence[InputPartition]:
        origin = self.origin()
        logs = [(log, tuple(pieces_of(origin, log)), tuple(origin.directories(log))) for log in origin.logs()]
        return [GroupsTask(logs[at : at + LOGS_IN_A_TASK]) for at in range(0, len(logs), LOGS_IN_A_TASK)] or [
            GroupsTask(())
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, GroupsTask)
        schema = TABLE.arrow_schema(self.columns)
        for log, pieces, directories in partition.logs:
            rows = [position.row() for position in _positions(log, pieces, directories)]
            if rows:
                yield pa.RecordBatch.from_pylist([{name: row[name] for name in self.columns} for row in rows], schema)


READER = GroupsReader


class _Span(NamedTuple):
    start: int
    end: int
    lane: int


@dataclass
class _GroupPosition:
    """One group on one log. `cursors` are those of the lanes other than 0; `ahead` has offsets done out of order."""

    log: PartitionLog
    group: str
    mode: str
    start: int
    next: int
    cursors: dict[int, LanePosition] = field(default_factory=dict)
    spans: list[_Span] = field(default_factory=list)
    ahead: set[int] = field(default_factory=set)
    dead: int | None = None
    member: str | None = None
    fresh: int = 0
    oldest_ms: int | None = None

    def row(self) -> dict[str, Any]:
        is_queue = self.mode == "queue"
        in_flight = sum(span.end - span.start for span in self.spans)
        lag = max(0, self.fresh - len(self.ahead)) + in_flight
        return {
            "topic": self.log.topic,
            "partition": self.log.partition,
            "group": self.group,
            "mode": self.mode,
            "next_offset": self.next,
            "high_watermark": self.log.end_offset,
            "lag": lag,
            "in_flight": in_flight if is_queue else None,
            "dead": self.dead,
            "oldest": self.oldest_ms * 1000 if lag and self.oldest_ms is not None else None,
            "member": self.member,
        }

    def cursor(self, lane: int) -> LanePosition:
        """Return the lane's cursor: messages before it are done, or older than the group."""
        due_ms, offset = self.cursors.get(lane, (0, 0))
        return (due_ms, offset) if lane >= DELAYED else (0, max(offset, self.start))

    def is_waiting(self, lane: int, due_ms: int, offset: int) -> bool:
        return offset >= self.start and (due_ms if lane >= DELAYED else 0, offset) >= self.cursor(lane)

    def note(self, since_ms: int | None) -> None:
        if since_ms is not None and (self.oldest_ms is None or since_ms < self.oldest_ms):
            self.oldest_ms = since_ms


def _positions(log: PartitionLog, pieces: Sequence[Piece], directories: Sequence[Path]) -> list[_GroupPosition]:
    positions, cancelled = _saved(log, directories)
    if not positions:
        return []
    for path, pieces_of_it in _by_file(pieces).items():
        low, high = pieces_of_it[0].start, pieces_of_it[-1].end

        def read(path: Path, low: int, high: int) -> list[tuple[int, _PendingMessages]]:
            with opened(path) as connection:
                file = _File(connection, low, high, cancelled)
                return [(index, file.waiting(position)) for index, position in enumerate(positions)]

        for index, waiting in Piece(log, low, high, path, pieces_of_it[0].elsewhere).read(read):
            positions[index].fresh += waiting.messages
            positions[index].note(waiting.since_ms)
    availability = Availability(directories)
    for position in positions:
        _note_spans(position, availability)
    return positions


def _by_file(pieces: Sequence[Piece]) -> dict[Path, list[Piece]]:
    files: dict[Path, list[Piece]] = {}
    for piece in pieces:
        files.setdefault(piece.path, []).append(piece)
    return files


def _note_spans(position: _GroupPosition, availability: Availability) -> None:
    """Record the oldest span. The first plain one is the oldest; delayed ones are not in the order of their times."""
    plain = [span for span in position.spans if span.lane < DELAYED][:1]
    delayed = [span for span in position.spans if span.lane >= DELAYED][:LOOK_MAX]
    for start, end, lane in (*((span.start, span.start + 1, span.lane) for span in plain), *delayed):
        for run in availability.granted(start, end, lane):
            position.note(run.available_ms)


# --- the content of state.sqlite -------------------------------------------------------------------------------------


def _saved(log: PartitionLog, directories: Sequence[Path]) -> tuple[list[_GroupPosition], list[tuple[int, int]]]:
    """Return the groups and the ranges of cancelled messages, from the best replica that has saved them."""
    fault: DamagedFile | None = None
    for directory in directories:
        try:
            with opened(directory / STATE_NAME) as connection:
                cancelled = connection.execute("SELECT start_offset, end_offset FROM cancelled ORDER BY 1").fetchall()
                return [*_queues(connection, log), *_streams(connection, log)], cancelled
        except FileNotFoundError as error:
            reason = missing_file(directory / STATE_NAME, log, log.start_offset, log.end_offset)
            if isinstance(reason, NothingThere):  # this machine sees no directory, so it cannot know the groups
                raise reason from error
        except DamagedFile as error:
            fault = fault or error
    if fault is not None:
        raise fault
    return [], []


def _queues(connection: sqlite3.Connection, log: PartitionLog) -> Iterator[_GroupPosition]:
    for group, start, next_offset in connection.execute("SELECT group_name, start_offset, next_offset FROM groups"):
        mine = (group,)
        cursors = connection.execute("SELECT lane, due_ms, offset FROM cursors WHERE group_name = ?", mine)
        spans = connection.execute(
            "SELECT start_offset, end_offset, lane FROM spans WHERE group_name = ? ORDER BY start_offset", mine
        )
        ahead = connection.execute("SELECT offset FROM ahead WHERE group_name = ?", mine)
        dead = connection.execute(
            "SELECT coalesce(sum(end_offset - start_offset), 0) FROM dead_ranges WHERE group_name = ?", mine
        ).fetchone()[0]
        yield _GroupPosition(
            log,
            group,
            "queue",
            max(start, log.start_offset),
            next_offset,
            {lane: (due_ms, offset) for lane, due_ms, offset in cursors},
            [_Span(*row) for row in spans],
            {row[0] for row in ahead},
            dead,
        )


def _streams(connection: sqlite3.Connection, log: PartitionLog) -> Iterator[_GroupPosition]:
    for group, committed, member in connection.execute(
        "SELECT group_name, committed_offset, member FROM stream_offsets"
    ):
        yield _GroupPosition(log, group, "stream", committed, committed, member=member or None)


# --- the content of a segment file -----------------------------------------------------------------------------------


class _PendingMessages(NamedTuple):
    """A number of messages, and the time from which the oldest of them could be delivered."""

    messages: int
    since_ms: int | None


class _File:
    """Offsets [low, high) of one segment file. `cancelled` has sorted ranges of messages that no group receives."""

    def __init__(
        self, connection: sqlite3.Connection, low: int, high: int, cancelled: Sequence[tuple[int, int]]
    ) -> None:
        self._ask = connection.execute
        self._low, self._high = low, high
        indexes = "SELECT count(*) FROM sqlite_master WHERE name IN ('messages_by_priority', 'messages_by_time')"
        self._lanes = list(self._present()) if self._one(indexes) == 2 else []
        self._has_holes = bool(self._one("SELECT count(*) FROM sqlite_master WHERE name = 'holes'")) and bool(
            self._one("SELECT count(*) FROM holes")
        )
        self._cancelled = [each for each in cancelled if each[1] > low and each[0] < high]

    def _one(self, query: str, *values: Any) -> Any:
        return self._ask(query, values).fetchone()[0]

    def waiting(self, position: _GroupPosition) -> _PendingMessages:
        """Return the messages of this file that are pending and were never delivered to the group."""
        low = max(self._low, position.next)
        is_queue = position.mode == "queue"
        messages = 0
        moments: list[int | None] = []
        if low < self._high:
            messages += self._messages(low)
            if is_queue:
                messages -= sum(self._in_lane(lane, low) for lane in self._lanes)
            moments.append(self._first_plain(position, low))
        if is_queue:
            start = max(self._low, position.start)
            messages += sum(self._in_lane(lane, start, since=position.cursor(lane)) for lane in self._lanes)
            messages -= self._cancelled_messages(position)
            moments += [self._head(position, lane) for lane in self._lanes]
        return _PendingMessages(messages, min((moment for moment in moments if moment is not None), default=None))

    def _messages(self, low: int) -> int:
        """Return the number of messages in [low, high)."""
        if self._has_holes:
            return int(self._one("SELECT count(*) FROM messages WHERE offset >= ? AND offset < ?", low, self._high))
        return int(self._one(_MESSAGES_SQL, low, self._high))

    def _present(self) -> Iterator[int]:
        for first, index, which in ((0, "messages_by_priority", _PRIORITY), (DELAYED, "messages_by_time", _DELAYED)):
            query = (
                f"SELECT priority FROM messages INDEXED BY {index} WHERE {which} AND priority > ?"
                " ORDER BY priority LIMIT 1"
            )
            found = self._ask(query, (-1,)).fetchone()
            while found is not None:
                yield first + found[0]
                found = self._ask(query, found).fetchone()

    def _in_lane(self, lane: int, low: int, *, since: LanePosition = (0, 0)) -> int:
        """Return how many messages of a lane from `low` on are not before the cursor `since`."""
        query = f"SELECT count(*) FROM messages {_of(lane)} AND priority = ? AND offset >= ? AND offset < ?"
        if lane < DELAYED:
            return int(self._one(query, lane, max(low, since[1]), self._high))
        query += " AND (deliver_at_ms, offset) >= (?, ?)"
        return int(self._one(query, lane % DELAYED, low, self._high, *since))

    def _first_plain(self, position: _GroupPosition, low: int) -> int | None:
        plain = "" if position.mode == "stream" else f"AND priority = 0 AND coalesce(NOT ({_DELAYED}), 1)"
        rows = self._ask(
            f"SELECT offset, timestamp_ms FROM messages WHERE offset >= ? AND offset < ? {plain} ORDER BY offset"
            " LIMIT ?",
            (low, self._high, min(LOOK_MAX, len(position.ahead) + 1)),
        )
        return next((moment for offset, moment in rows if offset not in position.ahead), None)

    def _head(self, position: _GroupPosition, lane: int) -> int | None:
        due_ms, offset = position.cursor(lane)
        low = max(self._low, position.start)
        if lane < DELAYED:
            rows = self._ask(
                f"SELECT offset, timestamp_ms FROM messages {_of(lane)} AND priority = ? AND offset >= ? AND offset < ?"
                " ORDER BY offset LIMIT ?",
                (lane, max(low, offset), self._high, LOOK_MAX),
            )
        else:
            rows = self._ask(
                f"SELECT offset, deliver_at_ms FROM messages {_of(lane)} AND priority = ?"
                " AND (deliver_at_ms, offset) >= (?, ?) AND offset >= ? AND offset < ?"
                " ORDER BY deliver_at_ms, offset LIMIT ?",
                (lane % DELAYED, due_ms, offset, low, self._high, LOOK_MAX),
            )
        return next(
            (moment for at, moment in rows if at not in position.ahead and not self._is_cancelled(at)),
            None,
        )

    def _is_cancelled(self, offset: int) -> bool:
        return any(start <= offset < end for start, end in self._cancelled)

    def _cancelled_messages(self, position: _GroupPosition) -> int:
        """Return how many messages counted as pending are cancelled."""
        found = 0
        for start, end in self._cancelled:
            for offset, priority, due_ms in self._ask(
                f"SELECT offset, priority, deliver_at_ms FROM messages WHERE offset >= ? AND offset < ? AND {_DELAYED}",
                (max(start, self._low), min(end, self._high)),
            ):
                found += position.is_waiting(DELAYED + priority, due_ms, offset)
        return found


def _of(lane: int) -> str:
    if lane < DELAYED:
        return f"INDEXED BY messages_by_priority WHERE {_PRIORITY}"
    return f"INDEXED BY messages_by_time WHERE {_DELAYED}"


_MESSAGES_SQL = """
SELECT coalesce(sum(min(base_offset + count, ?2) - max(base_offset, ?1)), 0) FROM batches
WHERE kind = 0 AND base_offset < ?2 AND base_offset + count > ?1
      AND base_offset >= coalesce((SELECT max(base_offset) FROM batches WHERE base_offset <= ?1), ?1)"""
