"""Compaction: the last message of each key survives, offsets stay, and a kill at any moment leaves a valid log."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import apsw
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.killer import Killed, Killer
from support.log_files import IDENTITY, Writer, everything, numbered, open_log

from portalmq.broker.storage import compaction as compaction_module
from portalmq.broker.storage.batch import (
    HOLE,
    BatchKind,
    Record,
    batch_of_frame,
    checksum,
    frame_of,
    is_all_holes,
    verified_header,
)
from portalmq.broker.storage.compaction import Compaction, CompactionOrder
from portalmq.broker.storage.errors import CorruptBatch, CorruptFile, DiskFull, LogClosed
from portalmq.broker.storage.log import Log

NOW_MS = 1_000_000


def order(upto, tombstones_before_ms=0, at_ms=NOW_MS, cancelled=()):
    return CompactionOrder(upto, tombstones_before_ms, at_ms, cancelled)


def run(work):
    while work.step():
        pass


def compact(log, wanted):
    """Seal the segments that can be sealed, and carry out the order."""
    log.seal(log.end_offset)
    work = Compaction(log, wanted)
    try:
        run(work)
    finally:
        work.close()
    assert log.is_compacted(wanted.upto, wanted.tombstones_before_ms)
    return work


def put(log, *messages, at_ms=1_000, **more):
    """Append one batch of (key, value) messages; a key of None means no key."""
    writer = Writer(log, at_ms=at_ms)
    return writer.put(*[Record(value, key=key, **more) for key, value in messages])


def found(log):
    """Return offset -> (key, value) of all messages in the log."""
    return {
        offset: (record.key, record.value)
        for batch in everything(log)
        for offset, record in enumerate(batch.records, batch.base_offset)
        if record is not HOLE
    }


def three_values(directory) -> Log:
    """Return a log of two rolled segments and an active one: a and b in the first, a in the second, b in the third."""
    log = open_log(directory)
    put(log, (b"a", b"1"), (b"b", b"2"), (b"c", b"3"))
    Writer(log).put_control(BatchKind.ACK, b"body", "g")
    put(log, (b"a", b"4"), (None, b"keyless"))
    log.roll()
    put(log, (b"a", b"5"), (b"d", b"6"))
    log.roll()
    put(log, (b"b", b"7"))
    return log


SURVIVORS = {
    1: (b"b", b"2"), 2: (b"c", b"3"), 5: (None, b"keyless"), 6: (b"a", b"5"), 7: (b"d", b"6"), 8: (b"b", b"7"),
}  # fmt: skip


def test_below_the_offset_the_last_message_of_each_key_stays_at_its_offset(tmp_path):
    log = three_values(tmp_path)
    work = compact(log, order(8))
    assert found(log) == SURVIVORS
    assert (work.removed, log.end_offset) == (2, 9)
    log.close()
    log = open_log(tmp_path)
    assert found(log) == SURVIVORS
    assert log.is_compacted(8, 0)


def test_a_second_compaction_changes_nothing(tmp_path):
    log = three_values(tmp_path)
    compact(log, order(8))
    entries = log.sealed_segments
    assert compact(log, order(8)).removed == 0
    assert log.sealed_segments == entries


def test_a_later_compaction_judges_what_an_earlier_one_left(tmp_path):
    log = three_values(tmp_path)
    compact(log, order(6))
    log.roll()
    compact(log, order(9))
    assert found(log) == {n: message for n, message in SURVIVORS.items() if n != 1}


def test_the_border_may_lie_within_a_segment_and_within_a_batch(tmp_path):
    """Each replica has segments of its own: the border of another one may be anywhere in its files."""
    log = open_log(tmp_path)
    put(log, *[(b"k", b"%d" % n) for n in range(10)])
    log.roll()
    put(log, (b"k", b"10"))
    compact(log, order(4))
    assert sorted(found(log)) == [3, 4, 5, 6, 7, 8, 9, 10]
    compact(log, order(7))
    assert sorted(found(log)) == [6, 7, 8, 9, 10]


def test_an_old_tombstone_is_removed_with_its_key(tmp_path):
    log = open_log(tmp_path)
    put(log, (b"a", b"1"), (b"b", b"2"))
    put(log, (b"a", b""), at_ms=2_000)
    log.roll()
    compact(log, order(3, tombstones_before_ms=2_000))
    assert found(log) == {1: (b"b", b"2"), 2: (b"a", b"")}
    compact(log, order(3, tombstones_before_ms=2_001))
    assert found(log) == {1: (b"b", b"2")}


def test_a_tombstone_that_was_followed_by_a_value_is_superseded(tmp_path):
    log = open_log(tmp_path)
    put(log, (b"a", b"1"), (b"a", b""), (b"a", b"2"))
    log.roll()
    compact(log, order(3))
    assert found(log) == {2: (b"a", b"2")}


def test_a_message_that_is_not_due_stays_and_supersedes_nothing(tmp_path):
    log = open_log(tmp_path)
    put(log, (b"a", b"now"))
    put(log, (b"a", b"tomorrow"), deliver_at_ms=NOW_MS + 1)
    put(log, (b"a", b"was scheduled"), deliver_at_ms=NOW_MS - 1)
    put(log, (b"b", b"1"), deliver_at_ms=NOW_MS + 1)
    log.roll()
    compact(log, order(4))
    assert sorted(found(log)) == [1, 2, 3]
    put(log, (b"c", b"1"))
    log.roll()
    compact(log, order(5, at_ms=NOW_MS + 5))
    assert sorted(found(log)) == [2, 3, 4]


def test_a_cancelled_message_supersedes_nothing(tmp_path):
    log = open_log(tmp_path)
    put(log, (b"a", b"1"), (b"b", b"2"), (b"a", b"cancelled"), (b"b", b"3"))
    log.roll()
    compact(log, order(4, cancelled=((2, 3),)))
    assert sorted(found(log)) == [0, 2, 3]


def test_a_superseded_message_with_an_id_stays_while_it_may_be_repeated(tmp_path):
    log = open_log(tmp_path)
    for number in range(3):
        put(log, (b"a", b"1"), at_ms=1_000 + number, message_id=bytes([number]) * 16, body_hash=b"h")
    log.roll()
    compact(log, order(3, tombstones_before_ms=1_001))
    assert sorted(found(log)) == [1, 2]
    assert log.find_message_id(b"\1" * 16, 0) == (1, b"h", 1_001)


def test_equal_text_and_bytes_are_one_key(tmp_path):
    log = open_log(tmp_path)
    put(log, ("ä".encode(), b"1"), (b"\xff", b"2"), (b"", b"3"), (b"a\0", b"4"))
    put(log, ("ä".encode(), b"5"), (b"\xff", b"6"), (b"", b"7"), (b"a\0", b"8"))
    log.roll()
    compact(log, order(8))
    assert sorted(found(log)) == [4, 5, 6, 7]


# --- readers ----------------------------------------------------------------------------------------------------------


def test_counts_runs_and_times_are_right_with_holes(tmp_path):
    log = three_values(tmp_path)
    compact(log, order(8))
    assert [log.next_message(offset, 9) for offset in range(10)] == [1, 1, 2, 5, 5, 5, 6, 7, 8, None]
    assert [log.messages_before(offset) - log.messages_before(0) for offset in range(10)] == [
        0, 0, 1, 2, 2, 2, 3, 4, 5, 6,
    ]  # fmt: skip
    assert log.message_count_total == 8
    assert log.offset_for_time(1_000) == 0
    assert log.scrub(0, 1 << 20) == 6


def test_a_copied_replica_has_the_same_batches(tmp_path):
    """A replica that begins late gets batches with holes; one that compacts its own log gets the same batches."""
    log = three_values(tmp_path / "leader")
    complete = open_log(tmp_path / "complete")
    complete.append(log.read(0))
    compact(log, order(8))
    late = open_log(tmp_path / "late")
    frames = [frame_of(batch) for batch in log.read_to_copy(0, max_bytes=1 << 20, below=9)]
    late.append([batch_of_frame(frame, verified_header(frame)) for frame in frames])
    for replica in (late, complete):
        replica.roll()
        put(replica, (None, b"active"))
        compact(replica, order(8))
        assert everything(replica)[:-1] == everything(log)
        assert replica.messages_before(9) == log.messages_before(9)


def test_a_batch_without_messages_keeps_its_offsets_and_its_producer(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    log.append([writer.messages_batch([Record(b"1", key=b"a")] * 3, stamp=(7, 0, 0))])
    put(log, (b"a", b"2"))
    log.roll()
    put(log, (b"a", b"3"))
    compact(log, order(4))
    first = everything(log)[0]
    assert (first.count, first.holes, first.records) == (3, 3, (HOLE,) * 3)
    assert checksum(first) == first.crc
    assert [(batch.producer_id, batch.sequence, batch.count) for batch in log.producer_batches()] == [(7, 0, 3)]
    assert list(log.control_records()) == []


def test_a_truncated_segment_with_holes_can_be_appended_to(tmp_path):
    log = open_log(tmp_path)
    put(log, (b"a", b"1"), (b"b", b"2"))
    put(log, (b"a", b"3"), (b"b", b"4"))
    put(log, (b"a", b"5"))
    log.roll()
    put(log, (b"c", b"6"))
    compact(log, order(5))
    assert sorted(found(log)) == [3, 4, 5]
    log.truncate(4)
    assert sorted(found(log)) == [3]
    assert not log.is_compacted(5, 0)
    put(log, (b"b", b"7"))
    log.roll()
    compact(log, order(5))
    assert found(log) == {4: (b"b", b"7")}
    assert log.messages_before(5) - log.messages_before(0) == 1


def test_messages_superseded_by_truncated_ones_are_judged_again(tmp_path):
    log = open_log(tmp_path)
    for number in range(3):
        put(log, (b"%d" % number, b"old"))
        log.roll()
    compact(log, order(3))
    log.truncate(2)
    put(log, (b"0", b"new"))
    log.roll()
    compact(log, order(3))
    assert found(log) == {1: (b"1", b"old"), 2: (b"0", b"new")}


def test_compacted_files_are_sealed_smaller_and_as_the_manifest_says(tmp_path):
    log = open_log(tmp_path)
    for number in range(20):
        put(log, *[(b"key %d" % n, b"x" * 500 + b"%d" % number) for n in range(50)])
        if number % 5 == 4:
            log.roll()
    log.seal(log.end_offset)
    before = log.size_bytes
    work = compact(log, order(1_000))
    assert log.size_bytes < before / 2
    assert work.freed_bytes == before - log.size_bytes
    assert work.removed == 950
    for entry in log.sealed_segments:
        path = tmp_path / entry.file
        assert path.stat().st_mode & 0o777 == 0o444
        assert (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()) == (entry.bytes, entry.sha256)
        connection = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        indexes = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'index'")}
        assert {"messages_by_message_id", "messages_by_time"} <= indexes
        assert connection.execute("SELECT count(*) FROM messages_with_type").fetchone()[0] in (0, 50)
        connection.close()
    assert {path.suffix.partition("-")[0] for path in tmp_path.iterdir()} == {".sqlite", ".json"}


def test_readers_of_the_old_file_continue(tmp_path):
    log = three_values(tmp_path)
    log.seal(9)
    reader = apsw.Connection(f"file:{tmp_path}/{0:020d}.sqlite?immutable=1", flags=apsw.SQLITE_OPEN_READONLY | 64)
    rows = reader.execute("SELECT value FROM messages")
    assert next(rows)
    assert len(found(log)) == 8
    compact(log, order(8))
    assert len(list(rows)) == 4
    assert found(log) == SURVIVORS


def test_appends_reads_and_drops_go_on_between_the_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction_module, "STEP_OFFSETS_MAX", 16)
    log = open_log(tmp_path)
    for number in range(6):
        for _ in range(10):
            put(log, *[(b"key %d" % n, b"%d" % number) for n in range(10)])
        log.roll()
    log.seal(600)
    work = Compaction(log, order(600))
    steps, before = 0, None
    while work.step():
        steps += 1
        put(log, (b"key 1", b"new"))
        there = found(log)
        assert {key for key, _ in there.values()} >= {b"key %d" % n for n in range(10)}
        assert before is None or len(there) <= len(before) + 1
        before = there
        if steps == 40:
            log.drop_segments_below(200)
    work.close()
    assert steps > 40
    compact(log, order(600))
    assert log.is_compacted(600, 0)
    assert [offset for offset in found(log) if offset < 600] == list(range(590, 600))


def test_reading_empty_batches_is_bounded(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    log.append([writer.messages_batch([Record(b"v", key=b"k")]) for _ in range(500)])
    put(log, (b"k", b"last"))
    log.roll()
    compact(log, order(501))
    assert len(log.read(0, max_messages=100)) == 100
    assert log.next_message(0, 501) == 500
    frames = [frame_of(batch) for batch in log.read(0)]
    assert [is_all_holes(frame, verified_header(frame)) for frame in frames] == [True] * 500 + [False]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 200, 70_000])
def test_a_batch_is_all_holes_when_nothing_is_left_of_it(tmp_path, count):
    batch = Writer(open_log(tmp_path)).messages_batch([Record(b"", "")] * count)
    hollow = msgspec.structs.replace(batch, records=(HOLE,) * count, holes=count)
    almost = msgspec.structs.replace(batch, records=(*hollow.records[1:], Record(b"", "")), holes=count - 1)
    for each, expected in ((batch, False), (almost, False), (hollow, True)):
        frame = frame_of(each)
        assert is_all_holes(frame, verified_header(frame)) is expected


def test_sealing_continues_during_compaction_and_the_manifest_stays_true(tmp_path):
    log = open_log(tmp_path)
    for number in range(30):
        put(log, *[(b"key %d" % n, b"%d" % number) for n in range(20)])
        log.roll()
    log.seal(300)
    work = Compaction(log, order(300))
    stop = threading.Event()

    def seal():
        while not stop.is_set():
            log.seal(log.end_offset)
            put(log, (b"live", b"1"))
            log.roll()

    with ThreadPoolExecutor(2) as pool:
        sealing = pool.submit(seal)
        run(work)
        stop.set()
        sealing.result()
    assert log.is_compacted(300, 0)
    for entry in log.sealed_segments:
        content = (tmp_path / entry.file).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.bytes, entry.sha256)
    log.close()
    assert sorted(found(open_log(tmp_path)))[:20] == list(range(280, 300))


# --- faults -----------------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_not_given_a_new_checksum(tmp_path):
    log = three_values(tmp_path)
    log.seal(9)
    path = tmp_path / f"{0:020d}.sqlite"
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)
    work = Compaction(log, order(8))
    with pytest.raises((CorruptBatch, CorruptFile), match="SHA-256"):
        run(work)
    work.close()
    assert path.read_bytes() == content


def test_a_file_that_was_damaged_before_it_was_sealed_is_not_given_new_checksums(tmp_path):
    log = three_values(tmp_path)
    log.park()
    connection = apsw.Connection(str(tmp_path / f"{0:020d}.sqlite"))
    connection.execute("UPDATE messages SET value = 'spoilt' WHERE offset = 2")
    connection.close()
    log.seal(9)
    work = Compaction(log, order(8))
    with pytest.raises(CorruptBatch, match="checksum"):
        run(work)
    work.close()
    assert not log.is_compacted(8, 0)


def test_a_row_that_vanishes_from_a_batch_with_holes_is_found(tmp_path):
    log = three_values(tmp_path)
    compact(log, order(8))
    log.close()
    (tmp_path / "manifest.json").unlink()
    for statement in ("DELETE FROM messages WHERE offset = 2", "UPDATE messages SET offset = 0 WHERE offset = 1"):
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path, copy, ignore=shutil.ignore_patterns("copy"))
        path = copy / f"{0:020d}.sqlite"
        path.chmod(0o644)
        connection = apsw.Connection(str(path))
        connection.execute(statement)
        connection.close()
        with pytest.raises(CorruptBatch):
            everything(open_log(copy))
        shutil.rmtree(copy)


def test_unsealed_segments_are_not_compacted(tmp_path):
    log = three_values(tmp_path)
    work = Compaction(log, order(8))
    assert not work.step()
    assert len(found(log)) == 8
    assert not log.is_compacted(8, 0)


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    log = three_values(tmp_path)
    log.seal(9)
    work = Compaction(log, order(8))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Compaction, "_fill", full)
        with pytest.raises(DiskFull):
            run(work)
    work.close()
    assert len(found(log)) == 8
    put(log, (b"a", b"it goes on"))
    compact(log, order(8))
    assert len(found(log)) == 7


@pytest.mark.parametrize("change", [("truncate", 0), ("reset", 0, 0, 0)], ids=["truncated", "begun anew"])
def test_a_log_cut_while_a_compaction_verifies_its_batches_ends_the_compaction(tmp_path, monkeypatch, change):
    log = three_values(tmp_path)
    log.seal(9)
    read = log.read_to_copy

    def cut_then(offset, **limits):
        monkeypatch.undo()
        name, *arguments = change
        getattr(log, name)(*arguments)
        return read(offset, **limits)

    work = Compaction(log, order(8))
    assert work.step()
    monkeypatch.setattr(log, "read_to_copy", cut_then)
    run(work)
    work.close()
    put(log, (b"a", b"the log is usable"))
    assert not log.is_compacted(8, 0)


def test_closing_the_log_ends_a_compaction_without_leftovers(tmp_path):
    log = three_values(tmp_path)
    log.seal(9)
    work = Compaction(log, order(8))
    assert work.step()
    assert work.step()
    log.close()
    with pytest.raises(LogClosed):
        run(work)
    work.close()
    assert {path.suffix for path in tmp_path.iterdir()} == {".sqlite", ".json"}
    assert len(found(open_log(tmp_path))) == 8


def test_a_kill_at_every_step_leaves_a_log_that_compacts_to_the_same(tmp_path, monkeypatch):
    log = three_values(tmp_path / "before")
    put(log, (b"a", b""), at_ms=2_000)
    put(log, (b"d", b""), at_ms=2_500)
    log.roll()
    put(log, (b"z", b"active"))
    log.seal(11)
    log.close()
    wanted = order(11, tombstones_before_ms=2_400)
    whole = open_log(tmp_path / "before")
    everyone = found(whole)
    whole.close()
    shutil.copytree(tmp_path / "before", tmp_path / "clean")
    clean = open_log(tmp_path / "clean")
    compact(clean, wanted)
    expected = found(clean)
    assert sorted(expected) == [2, 5, 8, 10, 11]
    for at in range(1, 300):
        directory, image = tmp_path / f"log-{at}", tmp_path / f"image-{at}"
        shutil.copytree(tmp_path / "before", directory)
        log = open_log(directory)
        with monkeypatch.context() as patch:
            killer = Killer(patch, directory, image, at)
            work = Compaction(log, wanted)
            try:
                while work.step():
                    pass
            except Killed:
                survivor = open_log(image)
                there = found(survivor)
                assert expected.items() <= there.items() <= everyone.items()
                assert {path.suffix.partition("-")[0] for path in image.iterdir()} == {".sqlite", ".json"}
                compact(survivor, wanted)
                assert found(survivor) == expected
                survivor.close()
                assert found(open_log(image)) == expected
            else:
                break
    assert killer.steps == at - 1 > 20


# --- random logs ------------------------------------------------------------------------------------------------------

keys = st.sampled_from([b"a", b"b", b"c", b"\xff", None])
messages = st.lists(st.tuples(keys, st.sampled_from([b"", b"v"]), st.booleans()), min_size=1, max_size=6)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("put"), messages),
        st.tuples(st.just("roll"), st.none()),
        st.tuples(st.just("compact"), st.tuples(st.floats(0, 1), st.integers(0, 3_000))),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=25,
)


class Model:
    """The expected content of a compacted log: offset -> (key, value, time, due). The last record counts."""

    def __init__(self):
        self.there = {}

    def tombstones_before_ms_max(self, upto, now_ms):
        """Return the latest time that an order may have: that of the first message which it has to keep."""
        kept = [
            at_ms
            for offset, (key, _, at_ms, due_ms) in self.there.items()
            if offset >= upto or (key is not None and due_ms > now_ms)
        ]
        return min(kept, default=now_ms)

    def compact(self, wanted):
        last = {}
        judged = [
            (offset, message) for offset, message in sorted(self.there.items())
            if offset < wanted.upto and message[0] is not None and message[3] <= wanted.at_ms
        ]  # fmt: skip
        for offset, message in judged:
            last[message[0]] = offset
        for offset, (key, value, at_ms, due_ms) in judged:
            old = value == b"" and max(at_ms, due_ms) < wanted.tombstones_before_ms
            if last[key] > offset or old:
                del self.there[offset]


@settings(max_examples=50, deadline=None)
@given(actions)
def test_any_compacted_log_agrees_with_the_model(tmp_path_factory, todo):
    """A replica that carries out only the last order has the same messages, although its files differ."""
    directory = tmp_path_factory.mktemp("log")
    late = open_log(tmp_path_factory.mktemp("late"))
    log, model, at_ms, number, last = open_log(directory), Model(), 1_000, 0, order(0, 0, 0)
    for action, what in todo:
        if action == "put":
            at_ms += 100
            rows = []
            for key, value, later in what:
                number += 1
                due_ms = at_ms + 250 if later else 0
                payload = value and value + b"%d" % number
                rows.append(Record(payload, key=key, deliver_at_ms=due_ms or None))
            batch = Writer(log, at_ms=at_ms).put(*rows)
            late.append([batch])
            for offset, row in enumerate(rows, batch.base_offset):
                model.there[offset] = (row.key, row.value, at_ms, row.deliver_at_ms or 0)
        elif action == "roll":
            log.roll()
        elif action == "compact":
            log.roll()
            share, tombstones_before_ms = what
            if last.upto >= log.end_offset:
                continue
            upto = max(last.upto + 1, int(share * log.end_offset))
            latest_ms = model.tombstones_before_ms_max(upto, at_ms)
            last = order(upto, max(last.tombstones_before_ms, min(tombstones_before_ms, latest_ms)), at_ms)
            model.compact(last)
            compact(log, last)
        else:
            log.close()
            log = open_log(directory)
        assert found(log) == {offset: message[:2] for offset, message in model.there.items()}
        assert log.messages_before(log.end_offset) - log.messages_before(0) == len(model.there)
        assert {
            each for each in range(log.end_offset) if log.next_message(each, each + 1) == each
        } == model.there.keys()
    if last.upto:
        late.roll()
        compact(late, last)
        assert everything(late) == everything(log)
    late.close()
    log.close()


def test_a_manifest_of_an_earlier_release_is_read(tmp_path):
    log = three_values(tmp_path)
    log.seal(9)
    log.close()
    path = tmp_path / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes())
    for entry in manifest["segments"]:
        for name in ("removed", "compacted_upto", "tombstones_before_ms", "compacted_at_ms"):
            del entry[name]
    del manifest["crc"]
    path.write_bytes(msgspec.json.encode(manifest))
    log = Log.open(tmp_path, identity=IDENTITY)
    compact(log, order(8))
    assert found(log) == SURVIVORS


def test_files_of_an_earlier_release_without_the_table_of_holes_are_compacted(tmp_path):
    log = three_values(tmp_path)
    log.close()
    for path in tmp_path.glob("*.sqlite"):
        connection = apsw.Connection(str(path))
        connection.execute("DROP TABLE holes")
        connection.close()
    log = open_log(tmp_path)
    compact(log, order(8))
    assert found(log) == SURVIVORS
    put(log, *[(None, value) for value in numbered(3)])
    assert len(found(log)) == 9
