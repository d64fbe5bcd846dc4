"""A log can be reset to any offset and is valid at every step, and a replica can begin where another log begins."""

from __future__ import annotations

import os
import shutil
from threading import Event, Thread

import apsw
import pytest
from support.killer import Killed, Killer
from support.log_files import Writer, everything, open_log, three_segments

from portalmq.broker.storage import log as log_module
from portalmq.broker.storage import reading, segment_reading
from portalmq.broker.storage.errors import CorruptBatch, OffsetPurged
from portalmq.broker.storage.reading import ReplicaStart


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("base", [0, 30, 45, 60, 65, 90, 1_000])
def test_a_reset_log_is_empty_and_continues_from_its_base(tmp_path, base, sealed):
    log, _ = three_segments(tmp_path)
    if sealed:
        log.seal(90)
    log.reset(base, 77, 5_000)
    assert (log.base_offset, log.log_start_offset, log.end_offset) == (base, base, base)
    assert (log.message_count_total, log.last_timestamp_ms) == (77, 5_000)
    assert everything(log) == []
    assert [name for name in os.listdir(tmp_path) if name.endswith(".sqlite")] == [f"{base:020d}.sqlite"]
    again = Writer(log, at_ms=6_000).put(b"again")
    assert (again.base_offset, again.messages_before) == (base, 77)
    log.close()
    log = open_log(tmp_path)
    assert everything(log) == [again]
    log.roll()
    assert log.seal(log.end_offset) == 1
    assert log.reset(base + 5, 80, 6_000) is None
    assert everything(log) == []


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("base", [0, 30, 45, 90, 1_000])
def test_a_kill_at_every_step_of_a_reset_leaves_a_log_that_can_be_reset(tmp_path, monkeypatch, base, sealed):
    log, sent = three_segments(tmp_path / "before")
    if sealed:
        log.seal(90)
    log.close()
    for at in range(1, 200):
        directory, image = tmp_path / f"log-{at}", tmp_path / f"image-{at}"
        shutil.copytree(tmp_path / "before", directory)
        log = open_log(directory)
        with monkeypatch.context() as patch:
            killer = Killer(patch, directory, image, at)
            try:
                log.reset(base, 77, 5_000)
            except Killed:
                check_what_is_found(image, sent, base)
            else:
                break
    assert killer.steps == at - 1 > 3


def check_what_is_found(image, sent, base):
    """Check for a prefix of the old log or for the new one, never a mixture."""
    log = open_log(image)
    found = everything(log)
    if log.log_start_offset == base and (log.end_offset, base) != (0, 0) and not found:
        assert log.message_count_total == 77
    else:
        assert found == sent[: len(found)]
    log.reset(base, 77, 5_000)
    last = Writer(log, at_ms=6_000).put(b"after")
    log.close()
    assert everything(open_log(image)) == [last]


def test_a_replica_begins_at_the_border_of_the_batch_that_holds_the_log_start(tmp_path):
    log, _ = three_segments(tmp_path)
    assert log.replica_start() == ReplicaStart(0, 0, 0)
    for start, offset, before_ms in ((40, 40, 1_300), (45, 40, 1_300), (60, 60, 1_500), (90, 90, 1_800)):
        log.advance_log_start(start)
        assert log.replica_start() == ReplicaStart(offset, offset, before_ms)
    log.close()
    assert open_log(tmp_path).replica_start() == ReplicaStart(90, 90, 1_800)


def test_a_log_copied_from_a_log_start_equals_the_original_from_there(tmp_path):
    log, sent = three_segments(tmp_path / "leader")
    log.advance_log_start(45)
    with pytest.raises(OffsetPurged):
        log.read(40)
    start = log.replica_start()
    other = open_log(tmp_path / "follower")
    Writer(other).put(b"of an older time")
    other.reset(*start)
    other.append(log.read_to_copy(start.offset, max_bytes=1 << 20, below=log.end_offset))
    assert everything(other) == sent[4:]
    assert other.messages_before(70) == log.messages_before(70)


def test_after_a_drop_a_replica_begins_at_the_first_file(tmp_path):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    log.drop_segments_below(60)
    assert log.replica_start() == ReplicaStart(60, 60, 1_500)
    with pytest.raises(OffsetPurged):
        log.read_to_copy(30, max_bytes=1, below=90)


# --- scrubbing --------------------------------------------------------------------------------------------------------


def scrubbed(log) -> list[int]:
    places, at = [], 0
    while True:
        following = log.scrub(at, 1)
        if following <= at:
            return places
        places.append(following)
        at = following


def test_the_scrub_passes_every_part_of_an_intact_log_once(tmp_path):
    log, _ = three_segments(tmp_path)
    assert scrubbed(log) == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    log.seal(90)
    assert scrubbed(log) == [10, 20, 30, 40, 50, 60, 70, 80, 90]  # the batches of sealed files too, once
    assert scrubbed(log) == [30, 60, 70, 80, 90]
    log.close()
    log = open_log(tmp_path)
    assert scrubbed(log) == [30, 60, 70, 80, 90]
    log.advance_log_start(65)
    assert scrubbed(log)[-1] == 90


def test_a_flipped_bit_in_a_sealed_segment_is_found(tmp_path):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    scrubbed(log)
    file = tmp_path / f"{30:020d}.sqlite"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    os.chmod(file, 0o640)
    file.write_bytes(content)
    assert log.scrub(0, 1) == 30
    with pytest.raises(CorruptBatch, match="SHA-256"):
        log.scrub(30, 1)


def test_a_sealed_segment_that_is_gone_is_found(tmp_path):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    (tmp_path / f"{30:020d}.sqlite").unlink()
    with pytest.raises(CorruptBatch):
        log.scrub(30, 1)


def test_a_changed_row_in_a_live_segment_is_found(tmp_path):
    log, _ = three_segments(tmp_path)
    log.park()
    connection = apsw.Connection(str(tmp_path / f"{60:020d}.sqlite"))
    connection.execute("UPDATE messages SET value = CAST('spoilt' AS BLOB) WHERE offset = 75")
    connection.close()
    assert log.scrub(60, 1) == 70
    with pytest.raises(CorruptBatch, match="checksum"):
        log.scrub(70, 1)


def test_a_log_that_begins_again_at_dropped_offsets_opens_although_the_drop_was_interrupted(tmp_path):
    """The power failed before the manifest was replaced: it lists the dropped segments, where new ones may begin."""
    log, _ = three_segments(tmp_path)
    log.seal(90)
    listed = (tmp_path / "manifest.json").read_bytes()
    log.drop_segments_below(60)
    log.close()
    (tmp_path / "manifest.json").write_bytes(listed)
    log = open_log(tmp_path)
    log.reset(0, 0, 0)
    sent = [Writer(log, at_ms=9_000).put(b"again")]
    log.close()
    assert everything(open_log(tmp_path)) == sent


@pytest.mark.parametrize("name", ["scrub", "check_file"])
@pytest.mark.parametrize("change", ["drop_segments_below", "reset", "truncate"])
def test_a_segment_that_is_removed_while_it_is_hashed_is_neither_damaged_nor_a_fault(
    tmp_path, monkeypatch, change, name
):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    hashed = reading.sha256_of

    def removed_then(path, *, from_disk):
        found = hashed(path, from_disk=from_disk)
        arguments = {"drop_segments_below": (60,), "reset": (1_000, 1_000, 9_000), "truncate": (10,)}[change]
        getattr(log, change)(*arguments)
        return found

    monkeypatch.setattr(reading, "sha256_of", removed_then)
    if name == "scrub":
        with pytest.raises(OffsetPurged):
            log.scrub(30, 1)
    else:
        assert log.check_file(30) == 60
    Writer(log, at_ms=9_000).put(b"the log is usable")


@pytest.mark.parametrize("name", ["scrub", "check_file"])
def test_a_log_that_begins_anew_before_its_active_segment_is_checked_has_no_fault(tmp_path, monkeypatch, name):
    log, _ = three_segments(tmp_path)

    def begun_anew(base_offset):
        monkeypatch.undo()
        log.reset(1_000, 1_000, 9_000)

    monkeypatch.setattr(log._manifest, "get", begun_anew)
    with pytest.raises(OffsetPurged):
        log.scrub(60, 1) if name == "scrub" else log.check_file(60)
    Writer(log, at_ms=9_000).put(b"the log is usable")


def test_a_dropped_file_that_the_manifest_still_names_is_not_damaged(tmp_path, monkeypatch):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    unlinked, compared = Event(), Event()
    drop = Thread(target=log.drop_segments_below, args=(60,))
    sync, hashed = log_module.sync_directory, reading.sha256_of

    def sync_late(directory):
        unlinked.set()
        compared.wait(60)
        sync(directory)

    def hash_late(path, *, from_disk):
        drop.start()
        unlinked.wait(60)
        return hashed(path, from_disk=from_disk)

    monkeypatch.setattr(log_module, "sync_directory", sync_late)
    monkeypatch.setattr(reading, "sha256_of", hash_late)
    try:
        assert log.check_file(30) == 60
        assert 30 in log._manifest
    finally:
        compared.set()
        drop.join()


def test_a_file_that_changes_while_it_is_read_without_locks_is_not_damaged(tmp_path, monkeypatch):
    log, _ = three_segments(tmp_path)
    torn = tmp_path / "torn"
    torn.write_bytes(b"spoilt" * 10_000)
    monkeypatch.setattr(segment_reading, "connect_beside", lambda path: apsw.Connection(str(torn)))
    assert log.check_file(60) == 90
