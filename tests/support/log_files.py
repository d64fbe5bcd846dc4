"""Batches and logs for tests of the storage."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import apsw
import msgspec

from portalmq.broker.storage.batch import Batch, BatchKind, Record, checksum
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.schema import LogIdentity

IDENTITY = LogIdentity("cluster-1", "orders", "topic-id-1", 0)


def open_log(directory: Path, *, segment_bytes: int = 1 << 30, identity: LogIdentity = IDENTITY) -> Log:
    return Log.open(directory, identity=identity, segment_bytes=segment_bytes)


class Writer:
    """Builds batches that continue a log's end, or each other."""

    def __init__(self, log: Log, *, at_ms: int = 1_000) -> None:
        self.log = log
        self.offset = log.end_offset
        self.messages = log.message_count_total
        self.at_ms = max(at_ms, log.last_timestamp_ms)

    def messages_batch(self, records: Iterable[Record | bytes], *, stamp: tuple[int, int, int] = (-1, -1, -1)) -> Batch:
        rows = tuple(record if isinstance(record, Record) else Record(record) for record in records)
        batch = self._sealed(len(rows), BatchKind.MESSAGES, stamp=stamp, records=rows)
        self.messages += len(rows)
        return batch

    def control_batch(self, kind: BatchKind, body: bytes = b"", group: str = "") -> Batch:
        return self._sealed(1, kind, body=body, group=group)

    def _sealed(
        self,
        count: int,
        kind: BatchKind,
        *,
        stamp: tuple[int, int, int] = (-1, -1, -1),
        records: tuple[Record, ...] = (),
        body: bytes = b"",
        group: str = "",
    ) -> Batch:
        batch = Batch(self.offset, count, self.messages, kind, 1, self.at_ms, *stamp, group, records, body)
        self.offset += count
        return msgspec.structs.replace(batch, crc=checksum(batch))

    def put(self, *records: Record | bytes) -> Batch:
        """Append one batch of `records`."""
        batch = self.messages_batch(records)
        self.log.append([batch])
        return batch

    def put_control(self, kind: BatchKind, body: bytes = b"", group: str = "") -> Batch:
        batch = self.control_batch(kind, body, group)
        self.log.append([batch])
        return batch


def numbered(count: int, start: int = 0) -> list[bytes]:
    return [b"message %d" % number for number in range(start, start + count)]


def three_segments(directory: Path) -> tuple[Log, list[Batch]]:
    """A log of nine batches of ten in three segments, the first two rolled."""
    log = open_log(directory)
    writer = Writer(log)
    batches = []
    for number in range(9):
        if number in (3, 6):
            log.roll()
        writer.at_ms = 1_000 + 100 * number
        batches.append(writer.put(*numbered(10, 10 * number)))
    return log, batches


def crash_image(directory: Path, target: Path) -> Path:
    """Copy the files as a kill at this moment leaves them. The log in `directory` must not be used afterwards."""
    shutil.copytree(directory, target)
    return target


def reading_from(file: Path) -> apsw.Connection:
    """Open a reader in the middle of a live file. It uses apsw: two SQLite libraries in one process share no locks."""
    connection = apsw.Connection(f"file:{file}?mode=ro", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    connection.execute("BEGIN")
    connection.execute("SELECT count(*) FROM messages").fetchall()
    return connection


def everything(log: Log) -> list[Batch]:
    """Every batch, checked."""
    return log.read(log.log_start_offset)
