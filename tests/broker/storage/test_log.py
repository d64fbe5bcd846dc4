"""A log: appends, reads, and queries of its metadata."""

import os
import shutil
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from support.log_files import Writer, everything, numbered, open_log, three_segments

from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.broker.storage.errors import CorruptBatch, CorruptFile, DiskFull, LogClosed, OffsetPurged, StorageFault
from portalmq.broker.storage.log import COMMITS_DUE


def offsets(batches):
    return [batch.base_offset for batch in batches]


# --- appending --------------------------------------------------------------------------------------------------------


def test_a_new_log_is_empty(tmp_path):
    log = open_log(tmp_path / "topics" / "t" / "0")
    assert (log.log_start_offset, log.end_offset, log.message_count_total, log.last_timestamp_ms) == (0, 0, 0, 0)
    assert log.read(0) == []
    assert log.newest_state() is None
    assert log.offset_for_time(0) == 0


def test_appended_batches_are_there_after_reopening(tmp_path):
    log = open_log(tmp_path)
    sent = Writer(log, at_ms=5_000).put(*numbered(3))
    log.close()
    log = open_log(tmp_path)
    assert everything(log) == [sent]
    assert (log.end_offset, log.message_count_total, log.last_timestamp_ms) == (3, 3, 5_000)


def test_the_writer_syncs_every_commit(tmp_path):
    log = open_log(tmp_path)
    writer = log._segments[-1].writer
    names = ("journal_mode", "synchronous", "fullfsync", "wal_autocheckpoint")
    assert [writer.execute(f"PRAGMA {name}").get for name in names] == ["wal", 2, 1, 0]


def test_appending_nothing_changes_nothing(tmp_path):
    log = open_log(tmp_path)
    log.append([])
    assert log.end_offset == 0


@pytest.mark.parametrize("wrong", ["hole", "overlap", "messages", "time", "count"])
def test_a_batch_that_does_not_continue_the_log_is_refused_whole(tmp_path, wrong):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(*numbered(5))
    good = writer.messages_batch(numbered(2))
    writer.offset += {"hole": 1, "overlap": -1}.get(wrong, 0)
    writer.messages += wrong == "messages"
    writer.at_ms -= wrong == "time"
    bad = writer.messages_batch(numbered(2)) if wrong != "count" else writer._sealed(2, BatchKind.GRANT)
    with pytest.raises(ValueError):
        log.append([good, bad])
    assert log.end_offset == 5
    log.append([good])
    assert log.end_offset == 7


def test_a_value_that_sqlite_cannot_hold_leaves_nothing_behind(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    first = writer.put(b"1")
    bad = writer.messages_batch([Record(b"x", "image/new"), Record(b"x", deliver_at_ms=1 << 63)])
    with pytest.raises(OverflowError):
        log.append([bad])
    writer = Writer(log)
    second = writer.put(Record(b"y", "image/new"))
    assert everything(log) == [first, second]


def test_a_full_disk_applies_nothing_and_the_log_continues(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    first = writer.put(b"1")
    connection = log._segments[-1].writer
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').get + 2}")
    with pytest.raises(DiskFull):
        Writer(log).put(*[Record(b"x" * 5_000, "image/new")] * 20)
    assert (log.end_offset, everything(log)) == (1, [first])
    connection.execute("PRAGMA max_page_count = 100000")
    second = Writer(log).put(*[Record(b"x" * 5_000, "image/new")] * 20)
    log.close()
    assert everything(open_log(tmp_path)) == [first, second]


def test_after_a_fault_nothing_is_written(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    writer = Writer(log)
    first = writer.put(b"1")

    def fail(self, batches, *, waits):
        raise apsw.IOError("fsync said no")

    with monkeypatch.context() as patch:
        patch.setattr("portalmq.broker.storage.segment.Segment.append", fail)
        with pytest.raises(StorageFault, match="fsync said no"):
            log.append([writer.messages_batch([b"2"])])
    with pytest.raises(StorageFault, match="restart"):
        Writer(log).put(b"2")
    assert everything(log) == [first]


def test_a_log_that_met_damage_closes_its_files_and_writes_nothing_more(tmp_path, monkeypatch):
    log = open_log(tmp_path)
    Writer(log).put(b"1")

    def fail(self, batches, *, waits):
        raise apsw.CorruptError("database disk image is malformed")

    with monkeypatch.context() as patch:
        patch.setattr("portalmq.broker.storage.segment.Segment.append", fail)
        with pytest.raises(CorruptFile):
            log.append([Writer(log).messages_batch([b"2"])])
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir() if not each.name.endswith("-shm")}
    log.close()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir() if not each.name.endswith("-shm")} == before
    assert any(name.endswith("-wal") for name in before)
    opened = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]


def test_a_closed_log_raises_log_closed(tmp_path):
    log = open_log(tmp_path)
    log.close()
    log.close()
    with pytest.raises(LogClosed):
        log.read(0)
    with pytest.raises(LogClosed):
        log.roll()


def test_a_read_that_waits_while_the_log_closes_opens_no_file(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(b"x")
    lock = log._reading

    class ClosesFirst:
        def __enter__(self):
            log._reading = lock
            log.close()
            return lock.__enter__()

        def __exit__(self, *fault):
            return lock.__exit__(*fault)

    log._reading = ClosesFirst()
    with pytest.raises(LogClosed):
        log.read(0)


def test_a_full_segment_is_followed_by_another(tmp_path):
    log = open_log(tmp_path, segment_bytes=50_000)
    writer = Writer(log)
    sent = [writer.put(*[b"x" * 1_000] * 10) for _ in range(20)]
    assert len(list(tmp_path.glob("0*.sqlite"))) >= 3
    assert everything(log) == sent
    log.close()
    assert everything(open_log(tmp_path)) == sent


def test_an_empty_segment_is_not_rolled(tmp_path):
    log = open_log(tmp_path)
    log.roll()
    Writer(log).put(b"1")
    log.roll()
    log.roll()
    assert len(list(tmp_path.glob("0*.sqlite"))) == 2


def test_a_rolled_log_remembers_time_and_count_in_its_empty_segment(tmp_path):
    log, _ = three_segments(tmp_path)
    log.roll()
    log.close()
    log = open_log(tmp_path)
    assert (log.end_offset, log.message_count_total, log.last_timestamp_ms) == (90, 90, 1_800)


def test_a_checkpoint_is_due_when_the_wal_is_large(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    assert not log.checkpoint_due
    while not log.checkpoint_due:
        writer.put(*[b"x" * 100_000] * 20)
    log.checkpoint()
    assert not log.checkpoint_due
    wal_bytes = (tmp_path / f"{0:020d}.sqlite-wal").stat().st_size
    writer.put(b"1")
    assert (tmp_path / f"{0:020d}.sqlite-wal").stat().st_size == wal_bytes


def test_small_commits_overwrite_the_wal_after_a_checkpoint(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    wal = tmp_path / f"{0:020d}.sqlite-wal"
    while not log.checkpoint_due:
        writer.put(b"1")
    log.checkpoint()
    assert not log.checkpoint_due
    size = wal.stat().st_size
    assert size < 4 * 1024 * 1024
    for _ in range(COMMITS_DUE - 1):
        writer.put(b"1")
    assert not log.checkpoint_due
    assert wal.stat().st_size == size


def test_a_reader_that_blocks_a_checkpoint_does_not_make_each_commit_try_again(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(b"1")
    with closing(apsw.Connection(str(tmp_path / f"{0:020d}.sqlite"), flags=apsw.SQLITE_OPEN_READONLY)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM messages").get  # noqa: B018
        while not log.checkpoint_due:
            writer.put(b"1")
        log.checkpoint()
        assert not log.checkpoint_due


def test_the_wal_is_bounded_without_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setattr("portalmq.broker.storage.log.WAL_BYTES_MAX", 1_000_000)
    log = open_log(tmp_path)
    writer = Writer(log)
    for _ in range(40):
        writer.put(*[b"x" * 10_000] * 10)
    assert (tmp_path / f"{0:020d}.sqlite-wal").stat().st_size < 2_000_000


# --- reading ----------------------------------------------------------------------------------------------------------


def test_a_read_begins_with_the_batch_that_contains_the_offset(tmp_path):
    log, sent = three_segments(tmp_path)
    assert log.read(0) == sent
    assert log.read(25) == sent[2:]
    assert log.read(30) == sent[3:]
    assert log.read(89) == sent[8:]
    assert log.read(90) == log.read(900) == []


def test_a_read_stops_at_its_limits_with_at_least_one_batch(tmp_path):
    log, sent = three_segments(tmp_path)
    assert log.read(0, max_messages=1) == sent[:1]
    assert log.read(0, max_messages=11) == sent[:2]
    assert log.read(0, max_messages=45) == sent[:5]
    assert log.read(0, max_bytes=1) == sent[:1]
    assert log.read(0, max_bytes=len(b"message 0") * 10 + 1) == sent[:2]


def test_a_read_stays_below_the_high_watermark(tmp_path):
    log, sent = three_segments(tmp_path)
    assert log.read(0, below=60) == sent[:6]
    assert log.read(0, below=61) == sent[:7]
    assert log.read(60, below=60) == []


def test_control_records_are_read_between_the_messages(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    sent = [
        writer.put_control(BatchKind.EPOCH_START),
        writer.put(*numbered(2)),
        writer.put_control(BatchKind.GRANT, b"\x00\xffbody", "gruppe-ü"),
        writer.put(*numbered(2)),
        writer.put_control(BatchKind.STATE, b""),
    ]
    assert everything(log) == sent
    assert log.message_count_total == 4


def test_a_flipped_bit_in_a_value_is_found(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    good = writer.put(b"good")
    writer.put(Record(b"flip me please", "application/json"))
    log.close()
    file = tmp_path / f"{0:020d}.sqlite"
    file.write_bytes(file.read_bytes().replace(b"flip me please", b"flip me pleasd"))
    log = open_log(tmp_path)
    assert log.read(0, max_messages=1) == [good]
    with pytest.raises(CorruptBatch) as caught:
        log.read(0)
    assert (caught.value.path, caught.value.offset) == (file, 1)
    assert str(file) in str(caught.value)
    assert "offset 1" in str(caught.value)


@pytest.mark.parametrize("damage", [
    "DELETE FROM messages WHERE offset = 1",
    "DELETE FROM messages WHERE offset = 4",
    "DELETE FROM messages",
    "DELETE FROM records",
    "UPDATE messages SET headers = 'no json' WHERE offset = 1",
    "UPDATE messages SET headers = x'ff' WHERE offset = 1",
    "UPDATE messages SET content_type = 77 WHERE offset = 1",
    "UPDATE messages SET key = 12 WHERE offset = 1",
    "UPDATE messages SET priority = 'high' WHERE offset = 1",
    "UPDATE batches SET leader_epoch = 5 WHERE base_offset = 0",
    "UPDATE batches SET count = 4 WHERE base_offset = 0",
    "UPDATE batches SET crc = 'x' WHERE base_offset = 0",
    "UPDATE records SET body = x'00'",
])  # fmt: skip
def test_damage_to_any_part_of_a_batch_is_found(tmp_path, damage):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(*numbered(5))
    writer.put_control(BatchKind.ACK, b"body", "g")
    log.close()
    connection = sqlite3.connect(tmp_path / f"{0:020d}.sqlite")
    with connection:
        connection.execute(damage)
    connection.close()
    log = open_log(tmp_path)
    with pytest.raises(CorruptBatch):
        log.read(0)


def test_damage_to_the_file_itself_is_a_fault(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(*[b"x" * 1_000] * 100)
    log.close()
    file = tmp_path / f"{0:020d}.sqlite"
    content = bytearray(file.read_bytes())
    for page in range(16, len(content) // 4_096):
        content[page * 4_096 : page * 4_096 + 16] = b"\xee" * 16
    file.write_bytes(content)
    log = open_log(tmp_path)
    with pytest.raises((StorageFault, CorruptBatch)):
        log.read(0)


def test_reads_go_on_while_another_thread_appends(tmp_path):
    log = open_log(tmp_path, segment_bytes=100_000)
    writer = Writer(log)

    def append():
        for _ in range(150):
            writer.put(*[b"x" * 100] * 20)

    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(append)
        while not appending.done():
            end = log.end_offset
            assert sum(batch.count for batch in log.read(max(0, end - 200), below=end)) >= min(end, 200)
            assert log.messages_before(end) == end
        appending.result()
    assert sum(batch.count for batch in everything(log)) == 3_000


# --- queries ----------------------------------------------------------------------------------------------------------


def log_with_controls(directory):
    """Offsets: 0 control, 1-3 messages, 4-5 controls, 6-7 messages, 8-9 messages | 10 control, 11 message."""
    log = open_log(directory)
    writer = Writer(log)
    writer.put_control(BatchKind.EPOCH_START)
    writer.put(*numbered(3))
    writer.put_control(BatchKind.STATE, b"state 4")
    writer.put_control(BatchKind.GRANT, b"grant", "g")
    writer.put(*numbered(2))
    writer.put(*numbered(2))
    log.roll()
    writer.put_control(BatchKind.STATE, b"state 10")
    writer.put(b"last")
    return log


@pytest.mark.parametrize(
    "read",
    [
        lambda log: log.read(60),
        lambda log: log.read_to_copy(60, max_bytes=1_000, below=100),
        lambda log: log.next_message(60, 100),
        lambda log: log.messages_before(60),
        lambda log: log.replica_start(60),
        lambda log: list(log.control_records(60)),
        lambda log: log.newest_state(100),
        lambda log: log.scrub(60, 1_000),
    ],
)
@pytest.mark.parametrize("to_offset", [50, 60])
def test_a_read_beside_a_truncation_finds_no_damage(tmp_path, read, to_offset):
    log = open_log(tmp_path)
    writer = Writer(log)
    for _ in range(10):
        writer.put(*numbered(10))
    before = log._read

    def truncated_first():
        log._read = before
        log.truncate(to_offset)
        return before()

    log._read = truncated_first
    read(log)
    assert log.end_offset == to_offset


def test_the_next_message_is_found_behind_control_records(tmp_path):
    log = log_with_controls(tmp_path)
    next_messages = [log.next_message(offset, 12) for offset in range(13)]
    assert next_messages == [1, 1, 2, 3, 6, 6, 6, 7, 8, 9, 11, 11, None]
    assert log.next_message(4, 6) is log.next_message(12, 99) is log.next_message(3, 3) is None
    assert log.next_message(5, 999) == 6
    log.advance_log_start(7)
    assert log.next_message(0, 12) == 7


def test_messages_before_is_exact_at_every_offset(tmp_path):
    log = log_with_controls(tmp_path)
    assert [log.messages_before(offset) for offset in range(14)] == [0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 7, 8, 8]


def test_control_records_come_in_order_from_any_offset(tmp_path):
    log = log_with_controls(tmp_path)
    assert offsets(log.control_records(0)) == offsets(log.control_records()) == [0, 4, 5, 10]
    assert offsets(log.control_records(5)) == [5, 10]
    assert offsets(log.control_records(11)) == []
    assert [(batch.kind, batch.group, batch.body) for batch in log.control_records(5)] == [
        (BatchKind.GRANT, "g", b"grant"), (BatchKind.STATE, "", b"state 10"),
    ]  # fmt: skip


def test_a_long_scan_continues_over_steps_and_segments(tmp_path, monkeypatch):
    monkeypatch.setattr("portalmq.broker.storage.reading.SCAN_BATCHES", 3)
    log = open_log(tmp_path)
    writer = Writer(log)
    for number in range(20):
        if number in (6, 7, 13):
            log.roll()
        log.append(
            [writer.control_batch(BatchKind.ACK, b"%d" % number), writer.messages_batch([b"m"], stamp=(1, 0, number))]
        )
    assert [int(batch.body) for batch in log.control_records(0)] == list(range(20))
    assert [batch.sequence for batch in log.producer_batches(0)] == list(range(20))


def test_the_newest_state_is_found_over_segments_and_below_an_offset(tmp_path):
    log = log_with_controls(tmp_path)
    assert log.newest_state().body == b"state 10"
    assert log.newest_state(below=10).body == b"state 4"
    assert log.newest_state(below=4) is None


def test_producers_batches_come_without_their_records(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    writer.put(b"anonymous")
    log.append([writer.messages_batch(numbered(3), stamp=(9, 2, 40)), writer.messages_batch([b"x"], stamp=(9, 2, 43))])
    found = [(b.base_offset, b.count, b.producer_id, b.producer_epoch, b.sequence) for b in log.producer_batches()]
    assert found == [(1, 3, 9, 2, 40), (4, 1, 9, 2, 43)]
    assert [batch.records for batch in log.producer_batches(2)] == [()]


def test_a_message_id_is_found_newest_first_and_within_its_window(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log, at_ms=1_000)
    one, two = b"1" * 16, b"2" * 16
    writer.put(Record(b"a", message_id=one, body_hash=b"old"))
    log.roll()
    writer.at_ms = 2_000
    writer.put(Record(b"b"), Record(b"b", message_id=two))
    writer.at_ms = 3_000
    writer.put(Record(b"c", message_id=two, body_hash=b"new"))
    assert log.find_message_id(one, 0) == (0, b"old", 1_000)
    assert log.find_message_id(one, 1_001) is None
    assert log.find_message_id(two, 0) == (3, b"new", 3_000)
    assert log.find_message_id(b"3" * 16, 0) is None


def test_a_message_id_is_looked_up_in_its_index(tmp_path):
    log = open_log(tmp_path)
    plan = log._segments[-1].reader.execute(
        "EXPLAIN QUERY PLAN SELECT offset FROM messages WHERE message_id = ? AND timestamp_ms >= ?", (b"1", 0)
    )
    assert "messages_by_message_id" in str(plan.fetchall())


def test_an_offset_is_found_by_time(tmp_path):
    log, _ = three_segments(tmp_path)  # ten messages each 100 ms from 1,000 on
    assert [log.offset_for_time(at_ms) for at_ms in (0, 1_000, 1_001, 1_100, 1_299, 1_300, 1_301, 1_800, 1_801)] == [
        0, 0, 10, 10, 30, 30, 40, 80, 90,
    ]  # fmt: skip
    log.advance_log_start(25)
    assert log.offset_for_time(0) == 25


def test_of_batches_with_the_same_time_the_first_is_found(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    for at_ms in (10, 20, 20, 20, 30):
        writer.at_ms = at_ms
        writer.put(b"x", b"y")
    assert [log.offset_for_time(at_ms) for at_ms in (10, 11, 20, 21, 31)] == [0, 2, 2, 8, 10]


# --- idling -----------------------------------------------------------------------------------------------------------


def test_a_parked_log_holds_no_file_and_reopens_by_itself(tmp_path):
    log, sent = three_segments(tmp_path)
    log.seal(30)
    log.read(0)
    log.park()
    log.park()
    assert list(tmp_path.glob("*-wal")) == []
    assert log.end_offset == 90
    assert log.read(85) == sent[8:]
    log.park()
    Writer(log).put(b"awake")
    log.park()
    assert log.messages_before(50) == 50
    log.park()
    log.close()
    assert open_log(tmp_path).end_offset == 91


def test_a_closed_log_is_recovered_without_files_beside_it_and_opened_by_the_first_change(tmp_path):
    log = open_log(tmp_path)
    sent = [Writer(log).put(b"1")]
    log.close()
    log = open_log(tmp_path)
    assert (log.end_offset, everything(log)) == (1, sent)
    assert suffixes(tmp_path) == [".sqlite"]
    sent.append(Writer(log).put(b"2"))
    assert everything(log) == sent
    assert suffixes(tmp_path) == [".sqlite", ".sqlite-shm", ".sqlite-wal"]


def test_a_log_that_was_not_closed_is_checkpointed_at_the_open(tmp_path):
    log = open_log(tmp_path / "log")
    sent = [Writer(log).put(b"1")]
    shutil.copytree(tmp_path / "log", tmp_path / "killed")
    killed = open_log(tmp_path / "killed")
    assert [file.stat().st_size for file in (tmp_path / "killed").glob("*-wal")] == [0]
    assert everything(killed) == sent


def suffixes(directory):
    return sorted(file.name[20:] for file in directory.glob("*.sqlite*"))


def test_only_a_few_sealed_segments_stay_open(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    for number in range(12):
        writer.put(b"%d" % number)
        log.roll()
    log.seal(12)
    assert [batch.records[0].value for batch in log.read(0)] == [b"%d" % number for number in range(12)]
    for number in (3, 11, 0, 7, 5, 3):
        assert log.read(number, max_messages=1)[0].base_offset == number
    assert sum(segment._reader is not None for segment in log._segments) <= 5


def test_purged_offsets_are_refused(tmp_path):
    log, sent = three_segments(tmp_path)
    log.advance_log_start(25)
    log.advance_log_start(20)
    with pytest.raises(OffsetPurged):
        log.read(24)
    assert log.read(25) == sent[2:]
    with pytest.raises(ValueError):
        log.advance_log_start(91)
    log.close()
    assert open_log(tmp_path).log_start_offset == 25
