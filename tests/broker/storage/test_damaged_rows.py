"""Rows that no checksum covers when they are read alone. A bit that flips in the header of one makes NULL, a text or a
blob of a number; one that flips in its key, or in a page, hides it. Each read has to say that the file is damaged."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import Any

import apsw
import pytest
from support.compressed import reading_records, with_compressed_values
from support.log_files import IDENTITY, Writer, open_log

from portalmq.broker.core.fold import PartitionFold, encode_fold
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.partition.folding import recover
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.broker.storage.compaction import Compaction, CompactionOrder, first_kept_ms
from portalmq.broker.storage.errors import DAMAGE
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.state import StateFile

COLUMNS = {
    "batches": ("count", "messages_before", "kind", "leader_epoch", "producer_id", "sequence", "appended_at_ms", "crc"),
    "messages": (
        *("key", "value", "content_type", "headers", "timestamp_ms", "deliver_at_ms", "expires_at_ms", "priority"),
        *("message_id", "body_hash"),
    ),
    "records": ("kind", "group_name", "body"),
    "content_types": ("name",),
    "holes": ("removed", "removed_before"),
    "compressed_values": ("codec", "size", "data"),
    "meta": ("value",),
}
VALUES = {"null": None, "text": "x", "blob": b"\xff", "real": 1.5}
IDS = [b"id-%d" % number for number in range(20)]
SECOND = 20

READS: dict[str, Callable[[Log, int], Any]] = {
    "read": lambda log, offset: log.read(offset, max_messages=4),
    "read to copy": lambda log, offset: log.read_to_copy(offset, max_bytes=100, below=1 << 40),
    "next message": lambda log, offset: log.next_message(offset, offset + 10),
    "replica start": lambda log, offset: log.replica_start(offset),
    "messages before": lambda log, offset: log.messages_before(offset),
    "message id": lambda log, offset: [log.find_message_id(each, 0) for each in IDS],
    "message ids": lambda log, offset: [log.find_message_ids(IDS, 0, below) for below in (None, SECOND)],
    "time": lambda log, offset: log.offset_for_time(1_000 + offset),
    "control records": lambda log, offset: list(log.control_records(offset)),
    "group records": lambda log, offset: list(log.group_records("g", offset, offset + 20)),
    "blank": lambda log, offset: log.has_blank(offset, offset + 20),
    "producers": lambda log, offset: list(log.producer_batches(offset)),
    "state": lambda log, offset: log.newest_state(offset),
    "message": lambda log, offset: log.lanes.message(offset),
    "lanes": lambda log, offset: log.lanes.present,
    "a lane": lambda log, offset: [list(log.lanes.after(each, 0, offset, 1 << 40)) for each in (3, DELAYED)],
    "counts": lambda log, offset: [log.lanes.count(each, 0, offset, 1 << 40) for each in (3, DELAYED)],
    "others": lambda log, offset: log.lanes.count_others(offset, offset + 20),
    "positions": lambda log, offset: log.lanes.lane_positions(range(offset, offset + 20)),
    "first segment": lambda log, offset: log.lanes.first_segment_after(DELAYED, 0, offset, 1 << 40),
    "next plain": lambda log, offset: log.lanes.next_plain(offset, 1 << 40, 100),
    "scrub": lambda log, offset: log.scrub(offset, 1 << 20),
    "first kept": lambda log, offset: first_kept_ms(log, log.active_base_offset, 1 << 50, 0),
    "retention": lambda log, offset: log.retention_candidate(1 << 50, 1, 1),
    "bytes": lambda log, offset: log.bytes_from(offset),
    "recovery": lambda log, offset: recover(log, StateFile(log.directory, identity=IDENTITY)) if not offset else None,
}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two segments, each with messages of all kinds, control records, and compressed values."""
    directory = tmp_path_factory.mktemp("log")
    log = open_log(directory)
    for segment in range(2):
        writer = Writer(log, at_ms=1_000 + log.end_offset)
        writer.put(Record(b"an older value", key=b"k"), Record(b"another", key=b"k"))
        writer.put(b"plain", Record(b"{}", "application/json", key=b"k", headers={"a": "b"}))
        numbered = [Record(b"v", message_id=IDS[10 * segment + each], body_hash=bytes(8)) for each in range(3)]
        log.append([writer.messages_batch(numbered, stamp=(7, 0, 0))])
        writer.put_control(BatchKind.STATE, encode_fold(PartitionFold()))
        writer.put(Record(b"due", deliver_at_ms=9_000), Record(b"p", priority=3), Record(b"e", expires_at_ms=9_000))
        log.append([with_compressed_values(writer.messages_batch(reading_records(4)))])
        writer.put_control(BatchKind.EPOCH_START)
        writer.put(b"last")
        if not segment:
            log.roll()
            log.seal(log.end_offset)
            with closing(Compaction(log, CompactionOrder(log.end_offset, 0, 1_000_000, ()))) as work:
                while work.step():
                    pass
    log.close()
    assert not _unexpected(directory)
    return directory


def spoil(file: Path, table: str, column: str, where: str, value: object) -> None:
    """Store a value of another type, as no statement of the broker could."""
    os.chmod(file, 0o640)
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA writable_schema = ON")
        before = connection.execute("SELECT rowid, sql FROM sqlite_schema WHERE sql IS NOT NULL").fetchall()
        connection.execute("UPDATE sqlite_schema SET sql = replace(sql, 'NOT NULL', '') WHERE type = 'table'")
    with closing(apsw.Connection(str(file))) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        rows = f"(SELECT {where} FROM {table} WHERE {column} IS NOT NULL)"
        key = "key" if table == "meta" else "rowid"
        connection.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = {rows}", (value,))
        assert connection.changes() or table == "holes", (table, column)
        connection.execute("PRAGMA writable_schema = ON")
        connection.executemany("UPDATE sqlite_schema SET sql = ? WHERE rowid = ?", [(sql, row) for row, sql in before])
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("table", "column"), [(table, each) for table, some in COLUMNS.items() for each in some])
def test_a_read_of_a_value_of_another_type_reports_damage(
    tmp_path: Path, filled: Path, table: str, column: str, value: str
) -> None:
    key = "key" if table == "meta" else "rowid"
    wrong: list[str] = []
    rows = [f"min({key})", f"max({key})"]
    if column in ("timestamp_ms", "body_hash"):
        rows.append("min(iif(message_id IS NULL, NULL, rowid))")
    for file in sorted(filled.glob("0*.sqlite")):
        for number, row in enumerate(rows):
            copy = shutil.copytree(filled, tmp_path / f"{file.stem}-{number}")
            spoil(copy / file.name, table, column, row, VALUES[value])
            wrong += [f"{row} of {file.name}: {what}" for what in _unexpected(copy)]
    assert not wrong, "\n".join(wrong)


def _unexpected(directory: Path) -> list[str]:
    """Return the errors of opening the log and of its reads that do not say that a file is damaged."""
    found: list[str] = []
    try:
        log = open_log(directory)
    except DAMAGE:
        return []
    except Exception as error:  # noqa: BLE001 - told
        return [f"opening: {error!r}"]
    with closing(log):
        for name, read in READS.items():
            for offset in range(0, log.end_offset, 5):
                try:
                    read(log, offset)
                except DAMAGE:
                    pass
                except Exception as error:  # noqa: BLE001 - told
                    found.append(f"{name} at {offset}: {error!r}")
    return found


@pytest.mark.parametrize("table", ["batches", "messages", "records"])
def test_what_is_missing_is_passed_over_by_no_read(tmp_path: Path, filled: Path, table: str) -> None:
    reads: tuple[Callable[[Log, int], Any], ...] = (
        lambda log, offset: log.read(offset),
        lambda log, offset: log.next_message(offset, log.end_offset),
        lambda log, offset: list(log.control_records(offset)),
    )
    with closing(open_log(shutil.copytree(filled, tmp_path / "whole"))) as log:
        end = log.end_offset
        whole = [[read(log, offset) for read in reads] for offset in range(end)]
    if table == "batches":  # without the last the log is shorter, of which the state file tells
        rows = {batch.base_offset for batch in whole[0][0][:-1]}
    else:
        rows = {each[1] for each in whole} if table == "messages" else {batch.base_offset for batch in whole[0][2]}
    noticed = 0
    for row in sorted(rows):
        copy = shutil.copytree(filled, tmp_path / str(row))
        file = max(each for each in copy.glob("0*.sqlite") if int(each.stem) <= row)
        os.chmod(file, 0o640)
        with closing(apsw.Connection(str(file))) as connection:
            connection.execute(f"DELETE FROM {table} WHERE {'base_' if table == 'batches' else ''}offset = ?", (row,))
            assert connection.changes()
        try:
            log = open_log(copy)
        except DAMAGE:
            noticed += 1
            continue
        with closing(log):
            for offset in range(min(end, log.end_offset)):
                for number, read in enumerate(reads):
                    try:
                        assert read(log, offset) == whole[offset][number], f"row {row} is missing, read at {offset}"
                    except DAMAGE:
                        noticed += 1
    assert noticed > len(rows)


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("key", ["highest_leader_epoch", "high_watermark", "applied", "digest", "age_ms", "age_crc"])
@pytest.mark.parametrize("loads", [True, False])
def test_a_state_file_with_a_value_of_another_type_is_written_anew(
    tmp_path: Path, key: str, value: str, loads: bool
) -> None:
    with closing(StateFile(tmp_path, identity=IDENTITY)) as state:
        state.save_highest_epoch(1)
        state.save(PartitionFold(), 5, lambda offset: 0, age=(1_000, 2_000))
    spoil(tmp_path / "state.sqlite", "meta", "value", f"max(iif(key = '{key}', key, NULL))", VALUES[value])
    with closing(StateFile(tmp_path, identity=IDENTITY)) as state:
        if loads:
            state.load()
            state.highest_epoch()
        state.save_high_watermark(7, lambda offset: 0)
        state.save(PartitionFold(), 8, lambda offset: 0)
        state.save_highest_epoch(3)
        assert state.highest_epoch() == 3
        saved = state.load()
        assert saved is not None
        assert saved[1] == 8


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_bit_changes_no_batch_that_is_read(tmp_path: Path, filled: Path, seed: int) -> None:
    reads = ("read", "read to copy", "control records")
    with closing(open_log(shutil.copytree(filled, tmp_path / "whole"))) as log:
        end = log.end_offset
        whole = {(name, offset): READS[name](log, offset) for name in reads for offset in range(0, end, 5)}
    chance = Random(seed)
    wrong: list[str] = []
    for number in range(25):
        copy = shutil.copytree(filled, tmp_path / str(number))
        file = chance.choice(sorted(copy.glob("0*.sqlite")))
        content = bytearray(file.read_bytes())
        at, bit = chance.choice([at for at, value in enumerate(content) if value]), chance.randrange(8)
        content[at] ^= 1 << bit
        os.chmod(file, 0o640)
        file.write_bytes(content)
        place = f"bit {bit} at {at} of {file.name}"
        wrong += [f"{place}: {what}" for what in _unexpected(copy)]
        try:
            log = open_log(copy)
        except DAMAGE:
            continue
        with closing(log):
            for (name, offset), right in whole.items() if log.end_offset == end else ():
                with suppress(*DAMAGE):
                    if READS[name](log, offset) != right:
                        wrong.append(f"{place}: {name} at {offset} differs")
    assert not wrong, "\n".join(wrong)
