"""Segments are sealed, truncated and dropped."""

import hashlib
import json
import os
import shutil
import sqlite3
import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import apsw
import pytest
from support.log_files import Writer, everything, numbered, open_log, reading_from, three_segments

from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.broker.storage.errors import CorruptFile, DiskFull, OffsetPurged, StorageFault, faults_of
from portalmq.broker.storage.schema import LogIdentity


def file_of(directory, base_offset):
    return directory / f"{base_offset:020d}.sqlite"


def manifest(directory):
    return {entry["file"]: entry for entry in json.loads((directory / "manifest.json").read_text())["segments"]}


@pytest.mark.parametrize("name", ["messages_before", "timestamp_before_ms", "log_start_offset"])
@pytest.mark.parametrize("change", ["key = 'other'", "value = 'x'"])
def test_a_segment_that_lacks_a_fact_about_itself_is_damaged(tmp_path, name, change):
    """Found by `make simulate-shell SEED=3061`: a flipped bit in the name of one."""
    log = open_log(tmp_path)
    log.close()
    connection = apsw.Connection(str(file_of(tmp_path, 0)))
    connection.execute(f"UPDATE meta SET {change} WHERE key = ?", (name,))
    connection.close()
    with pytest.raises(CorruptFile, match=f"has no '{name}'"):
        open_log(tmp_path)


@pytest.mark.parametrize("change", ["key = 'topic_if'", "value = 'c' || substr(value, 2)"])
def test_a_segment_whose_identity_has_a_flipped_bit_is_damaged(tmp_path, change):
    """Found by `make simulate-shell SEED=1917`, where it ended the broker at each start."""
    identity = LogIdentity("cluster", "t", "a" * 32, 0)
    open_log(tmp_path, identity=identity).close()
    connection = apsw.Connection(str(file_of(tmp_path, 0)))
    connection.execute(f"UPDATE meta SET {change} WHERE key = 'topic_id'")
    connection.close()
    with pytest.raises(CorruptFile, match="rebuild it from a clean replica"):
        open_log(tmp_path, identity=identity)


@pytest.mark.parametrize(
    "text", [b"headers       TEXT", b"value NOT NULL", b"INTEGER PRIMARY KEY,\n    count", b"body_hash "]
)
def test_a_segment_with_a_flipped_bit_in_its_schema_is_damaged(tmp_path, text):
    """Found by `make simulate-shell SEED=8747`: the file could be opened, and each append to it ended the broker."""
    open_log(tmp_path).close()
    file = file_of(tmp_path, 0)
    content = bytearray(file.read_bytes())
    content[content.index(text)] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptFile, match=r"its schema is damaged.*rebuild it from a clean replica"):
        open_log(tmp_path)


@pytest.mark.parametrize("version", [0, -1, "x"])
def test_a_segment_of_no_version_is_damaged(tmp_path, version):
    """Found by `make simulate-shell SEED=3178`, where a flipped bit ended the broker at each start."""
    open_log(tmp_path).close()
    connection = apsw.Connection(str(file_of(tmp_path, 0)))
    connection.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (version,))
    connection.close()
    with pytest.raises(CorruptFile, match="no version wrote this"):
        open_log(tmp_path)


def test_no_flipped_bit_of_its_header_is_a_fault_of_the_disk(tmp_path):
    """A file that looks as if a later SQLite wrote it, or read-only, ended the broker at each start."""
    log = open_log(tmp_path / "whole")
    Writer(log).put(b"1")
    log.close()
    whole = file_of(tmp_path / "whole", 0).read_bytes()
    damaged = 0
    for at, bit in product(range(16, 64), (1, 6)):
        directory = tmp_path / "flipped"
        directory.mkdir()
        content = bytearray(whole)
        content[at] ^= 1 << bit
        file_of(directory, 0).write_bytes(content)
        try:
            log = open_log(directory)
            Writer(log).put(b"2")
            log.close()
        except CorruptFile:
            damaged += 1
        shutil.rmtree(directory)
    assert damaged > 20


# --- sealing ----------------------------------------------------------------------------------------------------------


def test_only_rolled_segments_below_the_offset_are_sealed(tmp_path):
    log, _ = three_segments(tmp_path)
    assert log.seal(29) == 0
    assert log.seal(59) == 1
    assert log.seal(90) == 1
    assert log.seal(90) == 0
    assert list(manifest(tmp_path)) == [file_of(tmp_path, 0).name, file_of(tmp_path, 30).name]


def test_a_sealed_file_is_final_and_its_hash_is_in_the_manifest(tmp_path):
    log, sent = three_segments(tmp_path)
    log.seal(90)
    for base_offset in (0, 30):
        file = file_of(tmp_path, base_offset)
        assert stat.S_IMODE(file.stat().st_mode) == 0o444
        assert hashlib.sha256(file.read_bytes()).hexdigest() == manifest(tmp_path)[file.name]["sha256"]
        assert not file.with_name(file.name + "-wal").exists()
        connection = sqlite3.connect(f"file:{file}?immutable=1", uri=True)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        assert connection.execute("SELECT count(*) FROM messages").fetchone() == (30,)
        connection.close()
    assert everything(log) == sent


def test_sealed_segments_are_known_after_reopening_without_opening_them(tmp_path):
    log, sent = three_segments(tmp_path)
    log.seal(90)
    entries = log.sealed_segments
    log.close()
    log = open_log(tmp_path)
    assert log.sealed_segments == entries
    assert not any(segment._reader is not None for segment in log._segments[:-1])
    assert everything(log) == sent


def test_a_segment_read_by_another_process_is_sealed_later(tmp_path):
    log, sent = three_segments(tmp_path)
    reader = reading_from(file_of(tmp_path, 0))
    assert log.seal(90) == 0
    assert everything(log) == sent
    reader.close()
    assert log.seal(90) == 2
    assert everything(log) == sent


def test_a_sealed_file_of_another_size_is_a_fault(tmp_path):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    log.close()
    os.chmod(file_of(tmp_path, 0), 0o644)
    with open(file_of(tmp_path, 0), "ab") as file:
        file.write(b"\0" * 4_096)
    with pytest.raises(StorageFault, match="manifest"):
        open_log(tmp_path)


def test_the_fault_of_a_damaged_manifest_names_the_remedy(tmp_path):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    log.close()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StorageFault, match="delete it"):
        open_log(tmp_path)


def test_without_its_manifest_a_log_is_complete_and_is_sealed_again(tmp_path):
    log, sent = three_segments(tmp_path)
    log.seal(90)
    before = manifest(tmp_path)
    log.close()
    (tmp_path / "manifest.json").unlink()
    log = open_log(tmp_path)
    assert everything(log) == sent
    assert log.seal(90) == 2
    assert manifest(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("missing", [30, 60])
def test_a_missing_segment_is_a_fault_and_changes_nothing(tmp_path, missing):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    log.close()
    file_of(tmp_path, missing).unlink()
    names = sorted(os.listdir(tmp_path))
    with pytest.raises(StorageFault, match="put"):
        open_log(tmp_path)
    assert sorted(os.listdir(tmp_path)) == names


# --- truncating -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("to_offset", [0, 10, 30, 40, 60, 80, 90])
def test_a_truncated_log_equals_the_log_at_that_offset(tmp_path, to_offset, sealed):
    log, sent = three_segments(tmp_path)
    if sealed:
        log.seal(90)
    log.truncate(to_offset)
    kept = [batch for batch in sent if batch.end_offset <= to_offset]
    assert everything(log) == kept
    assert (log.end_offset, log.message_count_total) == (to_offset, to_offset)
    assert log.last_timestamp_ms == (kept[-1].appended_at_ms if kept else 0)
    again = Writer(log, at_ms=9_000).put(b"again")
    log.close()
    log = open_log(tmp_path)
    assert everything(log) == [*kept, again]
    log.seal(to_offset)
    assert everything(log) == [*kept, again]


def test_a_batch_is_never_split(tmp_path):
    log, sent = three_segments(tmp_path)
    for offset in (1, 35, 89):
        with pytest.raises(ValueError, match="inside a batch"):
            log.truncate(offset)
    assert everything(log) == sent
    Writer(log).put(b"it goes on")


def test_a_log_is_not_truncated_outside_its_offsets(tmp_path):
    log, _ = three_segments(tmp_path)
    log.advance_log_start(30)
    for offset in (29, 91):
        with pytest.raises(ValueError, match="cannot truncate"):
            log.truncate(offset)


def test_the_log_start_survives_a_truncation_that_takes_its_segment(tmp_path):
    log, _ = three_segments(tmp_path)
    log.advance_log_start(20)
    log.truncate(40)
    assert log.log_start_offset == 20
    log.close()
    assert open_log(tmp_path).log_start_offset == 20


def test_a_truncation_removes_control_records(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put_control(BatchKind.STATE, b"1")
    writer.put_control(BatchKind.STATE, b"2")
    log.truncate(1)
    assert [batch.body for batch in log.control_records()] == [b"1"]
    assert log.newest_state().body == b"1"


# --- dropping ---------------------------------------------------------------------------------------------------------


def test_only_whole_sealed_segments_are_dropped(tmp_path):
    log, sent = three_segments(tmp_path)
    assert log.drop_segments_below(90) == 0
    log.seal(90)
    size = log.size_bytes
    assert log.drop_segments_below(59) == 1
    assert not file_of(tmp_path, 0).exists()
    assert list(manifest(tmp_path)) == [file_of(tmp_path, 30).name]
    assert (log.log_start_offset, log.base_offset) == (30, 30)
    assert log.size_bytes < size
    assert everything(log) == sent[3:]
    log.close()
    log = open_log(tmp_path)
    assert everything(log) == sent[3:]
    assert log.messages_before(45) == 45
    assert log.drop_segments_below(90) == 1
    assert (log.log_start_offset, log.end_offset, log.message_count_total) == (60, 90, 90)


def test_everything_can_be_purged_and_offsets_continue(tmp_path):
    log, _ = three_segments(tmp_path)
    log.advance_log_start(90)
    log.roll()
    log.seal(90)
    log.drop_segments_below(90)
    log.close()
    log = open_log(tmp_path)
    assert (log.log_start_offset, log.end_offset, log.message_count_total, log.last_timestamp_ms) == (90, 90, 90, 1_800)
    assert len(list(tmp_path.glob("0*.sqlite"))) == 1
    assert Writer(log).put(b"new").base_offset == 90


def test_the_log_start_is_copied_into_new_segments(tmp_path):
    log, _ = three_segments(tmp_path)
    log.advance_log_start(15)
    log.roll()
    log.close()
    assert open_log(tmp_path).log_start_offset == 15


def test_old_segments_may_be_dropped(tmp_path):
    log, _ = three_segments(tmp_path)  # the segments' last batches are of 1,200, 1,500 and 1,800 ms
    assert log.retention_candidate(10_000, 1, None) == 0
    log.seal(90)
    assert log.retention_candidate(2_200, 1_000, None) == 0
    assert log.retention_candidate(2_201, 1_000, None) == 30
    assert log.retention_candidate(99_999, 1_000, None) == 60
    assert log.retention_candidate(99_999, None, None) == 0


def test_segments_beyond_the_size_limit_may_be_dropped(tmp_path):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    sizes = [entry.bytes for entry in log.sealed_segments]
    assert log.retention_candidate(0, None, log.size_bytes) == 0
    assert log.retention_candidate(0, None, log.size_bytes - 1) == 30
    assert log.retention_candidate(0, None, log.size_bytes - sizes[0] - 1) == 60
    assert log.retention_candidate(0, None, 0) == 60


def test_a_message_to_be_delivered_later_keeps_its_segment(tmp_path):
    log = open_log(tmp_path)
    Writer(log, at_ms=1_000).put(Record(b"now"), Record(b"later", deliver_at_ms=5_000))
    log.roll()
    log.seal(2)
    assert log.retention_candidate(3_000, 1_000, None) == 0
    assert log.retention_candidate(6_001, 1_000, None) == 2


def test_reads_go_on_while_segments_are_sealed_dropped_and_parked(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(*numbered(10))

    def change():
        for number in range(1, 60):
            writer.put(*numbered(10, 10 * number))
            log.roll()
            log.seal(log.end_offset - 20)
            if number % 4 == 0:
                log.drop_segments_below(log.end_offset - 50)
            if number % 5 == 0:
                log.park()

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        while not changing.done():
            try:
                batches = log.read(log.log_start_offset)
            except OffsetPurged:
                continue
            values = [record.value for batch in batches for record in batch.records]
            assert values == numbered(len(values), batches[0].base_offset)
            assert log.messages_before(log.end_offset - 5) >= batches[-1].end_offset - 5
        changing.result()
    assert log.end_offset == 600


# --- errors of the file system ----------------------------------------------------------------------------------------


def fail_with(error):
    def fail(*arguments, **keywords):
        raise error

    return fail


def test_no_room_for_a_new_segment_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    log, sent = three_segments(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_with(OSError(28, "No space left on device")))
        with pytest.raises(DiskFull):
            log.roll()
    assert everything(log) == sent
    assert list(tmp_path.glob("*.creating")) == []
    log.roll()
    Writer(log).put(*numbered(1))


@pytest.mark.parametrize(("function", "change"), [
    ("rename", lambda log: log.roll()),
    ("chmod", lambda log: log.seal(90)),
    ("replace", lambda log: log.seal(90)),
    ("unlink", lambda log: log.truncate(30)),
    ("fsync", lambda log: log.truncate(30)),
])  # fmt: skip
def test_an_error_during_a_change_stops_the_log_until_it_is_reopened(tmp_path, monkeypatch, function, change):
    log, _ = three_segments(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail_with(OSError(5, "Input/output error")))
        with pytest.raises(StorageFault, match="Input/output error"):
            change(log)
    with pytest.raises(StorageFault, match="restart"):
        Writer(log).put(b"x")
    log.close()


def test_a_full_disk_in_the_middle_of_a_drop_refuses_the_rest_of_it(tmp_path, monkeypatch):
    log, sent = three_segments(tmp_path)
    log.seal(90)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_with(OSError(28, "No space left on device")))
        with pytest.raises(DiskFull):
            log.drop_segments_below(30)
    assert everything(log) == sent[3:]
    sent.append(Writer(log).put(b"the log goes on"))
    assert log.drop_segments_below(60) == 1
    assert everything(log) == sent[6:]


def test_every_error_of_sqlite_has_its_class(tmp_path):
    for error, expected in (
        (apsw.FullError("full"), DiskFull),
        (apsw.IOError("io"), StorageFault),
        (apsw.CorruptError("corrupt"), CorruptFile),
        (apsw.ConstraintError("UNIQUE constraint failed: messages.offset"), CorruptFile),
        (apsw.NotADBError("not a db"), StorageFault),
        (OSError(28, "no space"), DiskFull),
        (OSError(122, "quota"), DiskFull),
        (OSError(5, "io"), StorageFault),
    ):
        with pytest.raises(expected, match=str(tmp_path)), faults_of(tmp_path):
            raise error
