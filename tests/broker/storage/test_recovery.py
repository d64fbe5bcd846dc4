"""A kill at any moment leaves a valid log with every acknowledged record."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.killer import Killed, Killer
from support.log_files import Writer, crash_image, everything, open_log, reading_from, three_segments

from portalmq.broker.storage import files as files_module
from portalmq.broker.storage.errors import CorruptFile


def roll(log):
    log.roll()
    Writer(log).put(b"more")


# name -> (the change, whether the rolled segments are sealed before, the offset below which no record may be missing)
CHANGES = {
    "roll": (roll, False, 90),
    "seal": (lambda log: log.seal(90), False, 90),
    "drop": (lambda log: log.drop_segments_below(90), True, 90),
    "truncate far": (lambda log: log.truncate(10), False, 10),
    "truncate to a border of segments": (lambda log: log.truncate(60), False, 60),
    "truncate sealed": (lambda log: log.truncate(10), True, 10),
    "advance": (lambda log: log.advance_log_start(45), False, 90),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_at_every_step_of_a_change_leaves_a_valid_log(tmp_path, monkeypatch, name):
    change, sealed, keeps = CHANGES[name]
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
                change(log)
            except Killed:
                check_what_is_found(image, sent, keeps, change)
            else:
                break
    assert killer.steps == at - 1 > 0


def check_what_is_found(image, sent, keeps, change):
    log = open_log(image)
    found, start = everything(log), log.log_start_offset
    assert [batch for batch in found if batch.base_offset < keeps] == [
        batch for batch in sent if start <= batch.end_offset - 1 and batch.base_offset < keeps
    ]
    assert log.end_offset >= keeps
    assert start in (0, 45, 60)
    assert {path.suffix.partition("-")[0] for path in image.iterdir()} <= {".sqlite", ".json"}
    if log.end_offset == 90 and start == 0:  # the interrupted change can be made now
        change(log)
    last = Writer(log).put(b"after")
    log.close()
    assert everything(open_log(image))[-1] == last


def test_frames_that_only_the_wal_holds_are_found_after_a_kill(tmp_path):
    log, sent = three_segments(tmp_path / "log")
    image = crash_image(tmp_path / "log", tmp_path / "image")
    assert list(image.glob("*-wal"))
    log = open_log(image)
    assert everything(log) == sent
    assert {wal.stat().st_size for wal in image.glob("*-wal")} == {0}


def test_a_torn_end_of_the_wal_is_ignored(tmp_path):
    log = open_log(tmp_path / "log")
    writer = Writer(log)
    first = writer.put(b"first")
    size = next((tmp_path / "log").glob("*-wal")).stat().st_size
    writer.put(b"second")
    image = crash_image(tmp_path / "log", tmp_path / "image")
    os.truncate(next(image.glob("*-wal")), size + 5_000)
    log = open_log(image)
    assert everything(log) == [first]
    assert log.end_offset == 1


def test_open_makes_recovered_frames_durable_even_when_a_reader_blocks_the_checkpoint(tmp_path):
    log = open_log(tmp_path / "log")
    writer = Writer(log)
    sent = [writer.put(b"1")]
    image = crash_image(tmp_path / "log", tmp_path / "image")
    wal = next(image.glob("*-wal"))
    os.utime(wal, ns=(0, 0))
    reader = reading_from(next(image.glob("0*.sqlite")))
    log = open_log(image)
    assert everything(log) == sent
    assert wal.stat().st_mtime_ns > 0, "in place of the checkpoint it was written again"
    reader.close()


def test_a_log_that_a_power_cut_brings_back_changes_nothing(tmp_path, monkeypatch):
    """Open syncs the write-ahead log before it empties it, not after."""
    log = open_log(tmp_path / "log")
    sent = [Writer(log).put(b"1")]
    image = crash_image(tmp_path / "log", tmp_path / "image")
    (wal,) = image.glob("*-wal")
    found, on_disk = wal.read_bytes(), []

    def note(descriptor: int) -> None:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == str(wal)
        on_disk.append(wal.read_bytes())

    with monkeypatch.context() as patch:
        patch.setattr("portalmq.broker.storage.wal.sync", note)
        open_log(image)
    assert wal.stat().st_size == 0
    assert on_disk == [found]
    cut = crash_image(image, tmp_path / "cut")
    (cut / wal.name).write_bytes(on_disk.pop())
    log = open_log(cut)
    assert everything(log) == sent
    sent.append(Writer(log).put(b"2"))
    log.close()
    assert everything(open_log(cut)) == sent


def test_a_directory_that_a_kill_left_empty_is_synced_before_it_is_used(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(files_module, "sync_directory", synced.append)
    (tmp_path / "topic" / "0").mkdir(parents=True)
    files_module.make_directory(tmp_path / "topic" / "0")
    assert synced == [tmp_path / "topic"]
    (tmp_path / "topic" / "0" / "file").touch()
    files_module.make_directory(tmp_path / "topic" / "0")
    assert synced == [tmp_path / "topic"]
    files_module.make_directory(tmp_path / "other" / "0")
    assert synced[1:] == [tmp_path, tmp_path / "other"]


def test_leftovers_are_removed_and_unknown_files_stay(tmp_path):
    log, sent = three_segments(tmp_path)
    log.close()
    leftovers = [
        f"{90:020d}.sqlite.creating",
        "manifest.json.new",
        f"{90:020d}.sqlite-wal",
        f"{90:020d}.sqlite-shm",
        f"{90:020d}.sqlite-journal",
    ]
    strangers = ["state.sqlite-wal", "notes.txt", "1.sqlite"]
    for name in leftovers + strangers:
        (tmp_path / name).write_bytes(b"rubbish")
    log = open_log(tmp_path)
    assert everything(log) == sent
    assert not any((tmp_path / name).exists() for name in leftovers)
    assert all((tmp_path / name).exists() for name in strangers)


@pytest.mark.parametrize("suffix", ["-journal", "-wal", "-shm"])
def test_nothing_stays_beside_a_sealed_segment(tmp_path, suffix):
    """Found by a crash image: the manifest was on disk, and the removal of the journal was not."""
    log, sent = three_segments(tmp_path)
    log.seal(90)
    log.close()
    leftover = tmp_path / f"{0:020d}.sqlite{suffix}"
    leftover.write_bytes(b"rubbish")
    log = open_log(tmp_path)
    assert everything(log) == sent
    assert not leftover.exists()


def test_a_new_segment_never_meets_an_old_wal_of_its_name(tmp_path):
    log, sent = three_segments(tmp_path)
    crash_image(tmp_path, tmp_path.with_name("other"))
    log.truncate(60)
    log.close()
    shutil.copy(tmp_path.with_name("other") / f"{60:020d}.sqlite-wal", tmp_path / f"{90:020d}.sqlite-wal")
    log = open_log(tmp_path)
    writer = Writer(log, at_ms=9_000)
    fresh = [writer.put(*[b"%d" % n] * 10) for n in range(3)]
    log.roll()
    fresh.append(writer.put(b"in the new file"))
    log.close()
    assert everything(open_log(tmp_path)) == [*sent[:6], *fresh]


def test_an_interrupted_drop_that_left_a_hole_below_the_log_start_is_finished(tmp_path):
    log, sent = three_segments(tmp_path)
    log.seal(90)
    log.advance_log_start(60)
    log.close()
    (tmp_path / f"{30:020d}.sqlite").unlink()
    log = open_log(tmp_path)
    assert everything(log) == sent[6:]
    assert not (tmp_path / f"{0:020d}.sqlite").exists()


# --- kill -9 ----------------------------------------------------------------------------------------------------------

CHILD = Path(__file__).with_name("killed_writer.py")
KILLS = 18


def run_until_killed(directory, seed, words, after_s):
    """Run the writer and kill it `after_s` seconds after so many lines; return its last (log start, acknowledged
    end)."""
    with subprocess.Popen(
        [sys.executable, str(CHILD), str(directory), str(seed)], stdout=subprocess.PIPE, cwd=CHILD.parents[2]
    ) as child:
        said = bytearray()
        while said.count(b"\n") < words and (chunk := os.read(child.stdout.fileno(), 1 << 16)):
            said += chunk
        time.sleep(after_s)  # the kill hits any step
        child.send_signal(signal.SIGKILL)
        said += child.stdout.read()
        child.wait()
    assert child.returncode == -signal.SIGKILL, said[-500:]
    return [tuple(map(int, line.split())) for line in said.decode().splitlines(keepends=True) if line.endswith("\n")]


def test_everything_acknowledged_survives_kill_9(tmp_path):
    """The writer prints `start floor end` after every change: messages [start, floor) are safe; the current change may
    truncate [floor, end)."""
    directory = tmp_path / "log"
    chance = random.Random(20_240_607)
    for kill in range(KILLS):
        said = run_until_killed(directory, kill, chance.randint(1, 60), chance.uniform(0.0, 0.01))
        start, floor, _ = said[-1]
        log = open_log(directory, segment_bytes=60_000)
        assert log.log_start_offset >= start
        assert log.end_offset >= floor
        for batch in everything(log):
            for offset, record in enumerate(batch.records, batch.base_offset):
                assert record.value.split(b"/")[0] == b"%d" % offset
        assert log.messages_before(log.end_offset) == log.message_count_total
        log.close()


@pytest.mark.parametrize("name", ["meta", "content_types"])
def test_text_that_is_no_longer_utf_8_is_damage(tmp_path, name):
    """Found by the simulated shell: a flipped bit in a name ended the broker at each start."""
    log = open_log(tmp_path / "log")
    Writer(log).put(b"1")
    log.close()
    path = next((tmp_path / "log").glob("0*.sqlite"))
    found = {"meta": log.identity.topic_id.encode(), "content_types": b"application/octet-stream"}[name]
    content = path.read_bytes()
    assert found in content
    path.write_bytes(content.replace(found, b"\xf4" + found[1:]))
    with pytest.raises(CorruptFile):
        everything(open_log(tmp_path / "log"))


@pytest.mark.parametrize("column", [b"base_offset", b"kind", b"crc"])
def test_a_column_that_has_another_name_is_damage(tmp_path, column):
    """Found by the simulated shell: a flipped bit in the schema ended the broker at each start."""
    log = open_log(tmp_path / "log")
    Writer(log).put(b"1")
    log.close()
    path = next((tmp_path / "log").glob("0*.sqlite"))
    content = path.read_bytes()
    begin = content.index(column, content.index(b"CREATE TABLE batches"))
    path.write_bytes(content[:begin] + bytes([column[0] ^ 1]) + content[begin + 1 :])
    with pytest.raises(CorruptFile):
        everything(open_log(tmp_path / "log"))


def test_content_types_without_ids_are_damage(tmp_path):
    """Found by the simulated shell: in a schema without "INTEGER PRIMARY KEY" each append ended the broker."""
    log = open_log(tmp_path / "log")
    Writer(log).put(b"1")
    log.close()
    path = next((tmp_path / "log").glob("0*.sqlite"))
    content = path.read_bytes()
    begin = content.index(b"INTEGER", content.index(b"CREATE TABLE content_types"))
    path.write_bytes(content[:begin] + b"H" + content[begin + 1 :])
    with pytest.raises(CorruptFile):
        open_log(tmp_path / "log")
