"""The reading half of a segment: queries on one file. Whole batches are verified by their checksums."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import apsw
import msgspec

from portalmq.broker.storage.batch import HOLE, Batch, BatchKind, Record, checksum
from portalmq.broker.storage.compressed_values import compressed_at, value_at
from portalmq.broker.storage.errors import CorruptBatch, integers
from portalmq.broker.storage.holes import removed_below
from portalmq.broker.storage.rows import BATCH_COLUMNS, MESSAGE_COLUMNS, batch_of, content_types_of, record_of
from portalmq.broker.storage.wal import connect_beside, connect_locking

# (message id, offset, body hash, time)
_decode_ids = msgspec.json.Decoder(list[tuple[str, int, str | None, int | None]]).decode


class ReadableSegment(ABC):
    """The queries on one file with offsets [base_offset, end_offset). Compaction has removed `removed` of its
    messages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base_offset = self.end_offset = int(path.name[:20])
        self.messages_before = 0
        self.removed = 0
        self._content_type_names: dict[int, str] = {}

    @property
    @abstractmethod
    def reader(self) -> apsw.Connection:
        """The connection to read with, opened if necessary."""

    def batches(self, offset: int, below: int) -> Generator[Batch]:
        """Yield whole, verified batches in order, from the one that contains `offset` to the last that starts below
        `below`. Lazy: rows are read as batches are taken. No batch may be missing between them: no checksum tells."""
        start = following = max(offset, self.base_offset)
        with contextlib.ExitStack() as cursors:  # an open cursor would pin the WAL
            headers = cursors.enter_context(contextlib.closing(self._headers(offset, below)))
            messages: Iterator[Any] | None = None
            for row in headers:
                base_offset, count = row[0], row[1]
                if type(count) is not int or base_offset > following or base_offset + count <= start:
                    raise CorruptBatch(self.path, following, "it is missing, or its header is damaged")
                following = base_offset + count
                if row[3] != BatchKind.MESSAGES:
                    yield self._control_batch(row)
                    continue
                if messages is None:
                    messages = cursors.enter_context(contextlib.closing(self._messages(row[0])))
                yield self._message_batch(row, messages)
        self._check_reaches(min(below, self.end_offset), following)

    def _check_reaches(self, offset: int, end: int) -> None:
        """Raise CorruptBatch where batches up to `end` do not reach `offset`."""
        if end < offset:
            raise CorruptBatch(self.path, end, "it is missing")

    def _headers(self, offset: int, below: int) -> apsw.Cursor:
        reader = self.reader
        removed, holes = "0", ""
        if self.removed:
            removed, holes = "coalesce(h.removed, 0)", " LEFT JOIN holes AS h ON h.base_offset = b.base_offset"
        return reader.execute(
            f"SELECT {BATCH_COLUMNS}, crc, {removed} FROM batches AS b{holes}"
            " WHERE b.base_offset >= coalesce((SELECT max(base_offset) FROM batches WHERE base_offset <= ?1), ?1)"
            " AND b.base_offset < ?2 ORDER BY b.base_offset",
            (offset, below),
        )

    def _messages(self, offset: int) -> apsw.Cursor:
        return self.reader.execute(
            f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE offset >= ? ORDER BY offset", (offset,)
        )

    def _control_batch(self, row: Sequence[Any]) -> Batch:
        if row[3] == BatchKind.BLANK:
            return self._checked(batch_of(row[:9], row[9]))
        record = self.reader.execute("SELECT group_name, body FROM records WHERE offset = ?", (row[0],)).fetchone()
        if record is None:
            raise CorruptBatch(self.path, row[0], "its record is missing")
        return self._checked(batch_of(row[:9], row[9], group=record[0], body=record[1]))

    def _message_batch(self, row: Sequence[Any], messages: Iterator[Any]) -> Batch:
        base_offset, count, removed = row[0], row[1], row[10]
        names = self._content_type_names
        records: list[Record] = []
        compressed = b""
        try:
            rows = list(islice(messages, count - removed))
            first, last = (rows[0][-1], rows[-1][-1]) if rows else (base_offset - 1, base_offset - 1)
            if removed:  # the checksum verifies which offsets are holes
                complete = count == removed or (first >= base_offset and last < base_offset + count)
            else:
                complete = (first, last) == (base_offset, base_offset + count - 1)
            if not complete or len(rows) != count - removed:
                raise CorruptBatch(self.path, base_offset, "messages are missing")
            try:
                records = [record_of(message, names) for message in rows]
            except KeyError:  # a content type added after this connection
                names = self._content_type_names = content_types_of(self.reader)
                records = [record_of(message, names) for message in rows]
            if rows and rows[0][0] is None:
                compressed = compressed_at(self.reader, base_offset)
        except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
            raise CorruptBatch(self.path, base_offset, f"unreadable: {error}") from error
        if removed:
            there = dict(zip([message[-1] for message in rows], records, strict=True))
            records = [there.get(offset, HOLE) for offset in range(base_offset, base_offset + count)]
        return self._checked(batch_of(row[:9], row[9], tuple(records), holes=removed, compressed=compressed))

    def _checked(self, batch: Batch) -> Batch:
        try:
            found = checksum(batch)
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise CorruptBatch(self.path, batch.base_offset, f"unreadable: {error}") from error
        if found != batch.crc:
            raise CorruptBatch(self.path, batch.base_offset, f"its checksum is {found}, not {batch.crc}")
        return batch

    def forget_pages(self) -> None:
        """Read from the file again what is read next."""
        self.reader.execute("PRAGMA shrink_memory")

    def check_structure(self) -> None:
        """Check that pages and indexes are well-formed and complete, on a connection of its own: readers do not wait.
        Raise CorruptBatch."""
        with contextlib.suppress(apsw.CorruptError, apsw.NotADBError):
            if _integrity_of(connect_beside(self.path)) == "ok":
                return
        # Nobody may have had it open, and a writer come while it was read without locks.
        found = _integrity_of(connect_locking(self.path))
        if found != "ok":
            raise CorruptBatch(self.path, self.base_offset, found)

    def check_columns(self, start: int, end: int) -> None:
        """Check the columns of the rows in [start, end) that repeat their batch's, which its checksum does not cover.
        Raise CorruptBatch."""
        found: Any = self.reader.execute(
            "SELECT min(offset) FROM (SELECT m.offset FROM batches AS b CROSS JOIN messages AS m"
            " ON m.offset >= b.base_offset AND m.offset < b.base_offset + b.count"
            " WHERE b.base_offset >= ?1 AND b.base_offset < ?2 AND m.timestamp_ms IS NOT b.appended_at_ms"
            " UNION ALL SELECT r.offset FROM batches AS b CROSS JOIN records AS r ON r.offset = b.base_offset"
            " WHERE b.base_offset >= ?1 AND b.base_offset < ?2 AND r.kind IS NOT b.kind)",
            (start, end),
        ).get
        if found is not None:
            raise CorruptBatch(self.path, found, "a row contradicts its batch")

    def message(self, offset: int) -> tuple[int, int, Record] | None:
        """Return (base offset of its batch, append time, record) of one message, not verified; None if there is
        none."""
        row = self.reader.execute(
            f"SELECT {MESSAGE_COLUMNS}, timestamp_ms,"
            " (SELECT max(base_offset) FROM batches WHERE base_offset <= ?1) FROM messages WHERE offset = ?1",
            (offset,),
        ).fetchone()
        if row is None:
            return None
        try:
            if row[1] not in self._content_type_names:
                self._content_type_names = content_types_of(self.reader)
            record = record_of(row[:-2], self._content_type_names)
            if row[0] is None:
                record = msgspec.structs.replace(record, value=value_at(self.reader, row[-1], offset))
            return row[-1], row[-2], record
        except (KeyError, ValueError, TypeError, msgspec.MsgspecError) as error:
            raise CorruptBatch(self.path, offset, f"unreadable: {error}") from error

    def control_batches(self, offset: int, limit: int) -> list[Batch]:
        """Return up to `limit` verified control records from `offset` on, without reading the messages between them.
        None may be missing: offsets without a message have one, unless compaction has emptied it. Of those that it has
        emptied, only a copy that was replicated so has a row here."""
        offset, end = max(offset, self.base_offset), self.end_offset
        rows: Any = self.reader.execute(
            f"SELECT {BATCH_COLUMNS}, b.crc, r.group_name, r.body FROM records AS r CROSS JOIN batches AS b"
            " ON b.base_offset = r.offset WHERE r.offset >= ? AND r.offset < ? ORDER BY r.offset LIMIT ?",
            (offset, end, limit),
        ).fetchall()
        if len(rows) == limit:
            end = rows[-1][0] + 1
        without_message = end - offset - (self.messages_below(end) - self.messages_below(offset))
        full = sum(row[3] != BatchKind.BLANK for row in rows)
        if without_message != full and without_message != full + self._blanks(offset, end):
            raise CorruptBatch(self.path, offset, f"control records below {end} are missing")
        return [self._checked(batch_of(row[:9], row[9], group=row[10], body=row[11])) for row in rows]

    def group_batches(self, group: str, start: int, end: int) -> list[Batch]:
        """Return the verified control records in [start, end) of one group, and those of no group."""
        rows = self.reader.execute(
            f"SELECT {BATCH_COLUMNS}, b.crc, r.group_name, r.body FROM records AS r CROSS JOIN batches AS b"
            " ON b.base_offset = r.offset WHERE r.offset >= ? AND r.offset < ? AND r.group_name IN ('', ?)"
            " ORDER BY r.offset",
            (start, end, group),
        )
        return [self._checked(batch_of(row[:9], row[9], group=row[10], body=row[11])) for row in rows]

    def has_blank(self, start: int, end: int) -> bool:
        found: Any = self.reader.execute(
            "SELECT 1 FROM batches WHERE base_offset >= ? AND base_offset < ? AND kind = ? LIMIT 1",
            (start, end, BatchKind.BLANK),
        ).get
        return found is not None

    def _blanks(self, start: int, end: int) -> int:
        found: Any = self.reader.execute(
            "SELECT count(*) FROM batches WHERE base_offset >= ? AND base_offset < ? AND kind = ?",
            (start, end, BatchKind.BLANK),
        ).get
        return int(found)

    def newest_control(self, kind: int, below: int) -> Batch | None:
        row = self.reader.execute(
            "SELECT offset FROM records WHERE kind = ? AND offset < ? ORDER BY offset DESC LIMIT 1", (kind, below)
        ).fetchone()
        if row is None:
            return None
        found = self.control_batches(row[0], 1)
        if [(batch.base_offset, batch.kind) for batch in found] != [(row[0], kind)]:
            raise CorruptBatch(self.path, row[0], "its record contradicts it")
        return found[0]

    def producer_headers(self, offset: int, limit: int) -> list[Batch]:
        """Return up to `limit` batches of idempotent producers from `offset` on, without their records."""
        rows = self.reader.execute(
            f"SELECT {BATCH_COLUMNS}, crc FROM batches AS b"
            " WHERE base_offset >= ? AND kind = 0 AND producer_id IS NOT NULL ORDER BY base_offset LIMIT ?",
            (offset, limit),
        )
        return [batch_of(integers(self.path, row)[:-1], row[-1]) for row in rows]

    def next_message(self, start: int, end: int) -> int | None:
        """Return the offset of the first message in [start, end); None without any. Control records are skipped by the
        index: after many acks it can be far after `start`."""
        found: Any = self.reader.execute(
            "SELECT offset FROM messages WHERE offset >= ? ORDER BY offset LIMIT 1", (start,)
        ).get
        return found if found is not None and found < end else None

    def removed_below(self, offset: int) -> int:
        """Return how many messages below `offset` compaction has removed from this segment."""
        return removed_below(self.reader, offset, self.path) if self.removed else 0

    def messages_below(self, offset: int) -> int:
        """Return how many messages were ever appended below `offset`, which is in this segment."""
        row = self.reader.execute(
            "SELECT base_offset, count, messages_before, kind FROM batches WHERE base_offset <= ?"
            " ORDER BY base_offset DESC LIMIT 1",
            (offset,),
        ).fetchone()
        if row is None:
            self._check_reaches(offset, self.base_offset)
            return self.messages_before
        base_offset, count, messages_before, kind = integers(self.path, row)
        self._check_reaches(offset, base_offset + count)
        return messages_before + (min(offset - base_offset, count) if kind == BatchKind.MESSAGES else 0)

    def batch_start(self, offset: int) -> tuple[int, int, int]:
        """Return (base offset, messages before, time of the batch before) of the batch that holds `offset`, or
        would."""
        row = self.reader.execute(
            "SELECT base_offset, messages_before FROM batches WHERE base_offset <= ?1 AND base_offset + count > ?1"
            " ORDER BY base_offset DESC LIMIT 1",
            (offset,),
        ).fetchone()
        base_offset, messages_before = row or (offset, self.messages_below(min(offset, self.end_offset)))
        before_ms: Any = self.reader.execute(
            "SELECT appended_at_ms FROM batches WHERE base_offset < ? ORDER BY base_offset DESC LIMIT 1", (base_offset,)
        ).get
        if before_ms is None:
            before_ms = self.reader.execute("SELECT value FROM meta WHERE key = 'timestamp_before_ms'").get
        integers(self.path, (base_offset, messages_before, before_ms))
        return base_offset, messages_before, before_ms

    def is_batch_boundary(self, offset: int) -> bool:
        """Return whether no batch of this segment straddles `offset`."""
        row = self.reader.execute(
            "SELECT base_offset, count FROM batches WHERE base_offset < ? ORDER BY base_offset DESC LIMIT 1", (offset,)
        ).fetchone()
        return row is None or sum(integers(self.path, row)) <= offset

    def message_of_id(self, message_id: bytes, since_ms: int) -> tuple[int, bytes | None, int] | None:
        row = self.reader.execute(
            "SELECT offset, body_hash, timestamp_ms FROM messages WHERE message_id = ? ORDER BY offset DESC LIMIT 1",
            (message_id,),
        ).fetchone()
        if row is None:
            return None
        offset, timestamp_ms = integers(self.path, row[::2])
        return (offset, row[1], timestamp_ms) if timestamp_ms >= since_ms else None

    def messages_of_ids(
        self, message_ids: Sequence[bytes], since_ms: int
    ) -> dict[bytes, tuple[int, bytes | None, int]]:
        """Do the same as message_of_id for many ids; return those found.

        One query for a thousand sorted ids takes 2 to 6 ms, or 0.2 ms if none of their families is here; one query for
        each id takes 8 to 15 ms. The result comes in one row, as each row waits for the interpreter's lock.
        """
        found: dict[bytes, tuple[int, bytes | None, int]] = {}
        rows: Any = self.reader.execute(
            "SELECT json_group_array(json_array(hex(m.message_id), m.offset, iif(m.body_hash IS NULL, NULL,"
            " hex(m.body_hash)), iif(typeof(m.timestamp_ms) = 'integer', m.timestamp_ms, NULL)))"
            " FROM carray(?) AS sought"
            " CROSS JOIN messages AS m INDEXED BY messages_by_message_id ON m.message_id = sought.value",
            (apsw.carray(tuple(message_ids)),),
        ).get
        for id_hex, offset, hash_hex, timestamp_ms in _decode_ids(rows):
            message_id = bytes.fromhex(id_hex)
            (at_ms,) = integers(self.path, (timestamp_ms,))
            if at_ms >= since_ms and (message_id not in found or offset > found[message_id][0]):
                found[message_id] = (offset, None if hash_hex is None else bytes.fromhex(hash_hex), at_ms)
        return found

    def offset_for_time(self, timestamp_ms: int) -> int:
        """Return the first offset of the first batch appended at or after that time, or the end. Times never fall, so
        bisect."""
        low, high = self.base_offset, self.end_offset
        while low < high:  # the answer is in [low, high]
            middle = (low + high) // 2
            row = self.reader.execute(
                "SELECT base_offset, count, appended_at_ms FROM batches WHERE base_offset <= ?"
                " ORDER BY base_offset DESC LIMIT 1",
                (middle,),
            ).fetchone()
            if row is None:
                raise CorruptBatch(self.path, middle, "its header is missing")
            base_offset, count, appended_at_ms = integers(self.path, row)
            self._check_reaches(middle + 1, base_offset + count)
            if appended_at_ms >= timestamp_ms:
                high = base_offset
            else:
                low = base_offset + count
        return low


def _integrity_of(connection: apsw.Connection) -> str:
    with contextlib.closing(connection):
        return str(connection.execute("PRAGMA integrity_check(1)").get)
