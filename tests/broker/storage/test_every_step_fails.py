"""A change of a log that fails at any step leaves a log that continues and reopens with every acknowledged record."""

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import apsw
import pytest
from support.compressed import with_compressed_values
from support.failing_disk import KINDS, unsynced_disk
from support.log_files import IDENTITY, Writer, everything, open_log, three_segments

from portalmq.broker.storage.compaction import Compaction, CompactionOrder
from portalmq.broker.storage.errors import Shortage, StorageFault
from portalmq.broker.storage.segment import Segment

LATER_MS = 9_000


def appended(log):
    Writer(log, at_ms=LATER_MS).put(b"more")


def compressed(log):
    log.append([with_compressed_values(Writer(log, at_ms=LATER_MS).messages_batch([b"more"] * 20))])


def appended_to_a_new_segment(log):
    log.segment_bytes = 1
    appended(log)


def compacted(log):
    log.roll_below(90)
    log.seal(90)
    work = Compaction(log, CompactionOrder(90, LATER_MS, LATER_MS))
    try:
        while work.step():
            pass
    finally:
        work.close()


# name -> (the change, the offset below which no record may be missing)
CHANGES = {
    "open": (None, 90),
    "append": (appended, 90),
    "append compressed values": (compressed, 90),
    "append compressed values and truncate them": (lambda log: (compressed(log), log.truncate(90)), 90),
    "append after a rest": (lambda log: (log.park(), appended(log)), 90),
    "append to a new segment": (appended_to_a_new_segment, 90),
    "roll": (lambda log: log.roll(), 90),
    "checkpoint": (lambda log: log.checkpoint(), 90),
    "seal": (lambda log: log.seal(90), 90),
    "seal and drop": (lambda log: (log.seal(60), log.drop_segments_below(60)), 90),
    "truncate": (lambda log: log.truncate(70), 70),
    "truncate what is sealed": (lambda log: (log.seal(60), log.truncate(10)), 10),
    "truncate to a border of segments": (lambda log: log.truncate(60), 60),
    "reset": (lambda log: log.reset(1_000, 1_000, 5_000), 0),
    "reset to the beginning": (lambda log: log.reset(0, 0, 0), 0),
    "reset to a border of segments": (lambda log: log.reset(60, 60, 5_000), 0),
    "reset what is sealed": (lambda log: (log.seal(60), log.reset(45, 45, 5_000)), 0),
    "advance the log start": (lambda log: log.advance_log_start(45), 90),
    "compact": (compacted, 90),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A log in the state that a kill leaves, and its content."""
    directory = tmp_path_factory.mktemp("log") / "before"
    log, sent = three_segments(directory)
    shutil.copytree(directory, directory.with_name("image"))
    log.close()
    return directory.with_name("image"), sent


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_that_fails_at_any_step_leaves_a_usable_log(tmp_path, monkeypatch, before, name, kind):
    image, sent = before
    change, keeps = CHANGES[name]
    with unsynced_disk(monkeypatch) as disk:
        for at in range(1, 1_000):
            directory = tmp_path / str(at)
            shutil.copytree(image, directory)
            log = open_log(directory) if change else None
            failed = None
            with disk.failing(at, kind):
                try:
                    if change:
                        change(log)
                    else:
                        log = open_log(directory)
                except (Shortage, StorageFault) as error:
                    failed = error
            assert kind == "broken" or not isinstance(failed, StorageFault), (at, failed)
            if isinstance(failed, StorageFault) and log is not None:
                log.close()
            if isinstance(failed, StorageFault) or log is None:
                log = open_log(directory)
            goes_on_and_opens(log, directory, sent, keeps)
            shutil.rmtree(directory)
            if disk.steps < at:
                assert failed is None
                return
        raise AssertionError("the change never completed")


@pytest.mark.parametrize("name", ["truncate", "truncate to a border of segments", "truncate more than that", "reset"])
def test_readers_do_not_wait_for_files_that_a_truncation_syncs_or_removes(tmp_path, monkeypatch, before, name):
    image, sent = before
    directory = tmp_path / "log"
    shutil.copytree(image, directory)
    change = {**CHANGES, "truncate more than that": (lambda log: log.truncate(10), 10)}[name][0]
    found, waited = [], []
    with unsynced_disk(monkeypatch) as disk:
        log = open_log(directory)
        everything(log)  # the readers' files are open

        def read(code=None):
            if not log._reading.try_acquire():
                waited.append(code)
                return
            log._reading.__exit__()
            found.append(offsets(everything(log)))

        seen = seen_at_steps(disk, read)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "sqlite_step", seen)
            patch.setattr(disk, "step", seen)
            change(log)
        assert found
        assert all(batches == offsets(sent)[: len(batches)] for batches in found)
        assert set(waited) <= {apsw.SQLITE_IOERR_WRITE}, waited
        log.close()


def seen_at_steps(disk, see):
    """Return a substitute for a step of the disk, which first calls `see`, except in steps of `see` itself."""
    inside = []

    def step(code=None, *, takes_room=True):
        if not inside:
            inside.append(True)
            try:
                see(code)
            finally:
                inside.clear()

    return step


NAMESPACES = (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"])


def own_mounts(place):
    """Return the command that runs another one with mounts of its own; None if this user may not mount."""
    mounts = ["mount", "-t", "tmpfs", "-o", "size=1m", "test", place]
    for command in NAMESPACES:
        try:
            if subprocess.run([*command, *mounts], capture_output=True, check=False).returncode == 0:
                return command
        except FileNotFoundError:
            break
    return None


def test_a_change_on_a_full_disk_is_refused_and_can_be_repeated(tmp_path):
    command = own_mounts(tmp_path)
    if command is None:
        pytest.skip("this user may not mount a small disk")
    ran = subprocess.run(
        [*command, sys.executable, Path(__file__).with_name("on_small_disk.py"), tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_an_empty_segment_left_by_an_earlier_release_is_removed(tmp_path):
    log, sent = three_segments(tmp_path)
    stray = Segment.create(
        tmp_path, IDENTITY, base_offset=90, messages_before=90, timestamp_before_ms=0, log_start_offset=0
    )
    stray.close()
    sent.append(Writer(log).put(b"in the old segment"))
    log.close()
    log = open_log(tmp_path)
    assert everything(log) == sent
    assert not stray.path.exists()
    sent.append(Writer(log).put(b"more"))
    assert everything(log) == sent


def goes_on_and_opens(log, directory, sent, keeps):
    log.segment_bytes = 1 << 30
    kept = everything(log)
    holds = [batch for batch in sent if log.log_start_offset < batch.end_offset <= keeps]
    assert offsets(kept)[: len(holds)] == offsets(holds)
    writer = Writer(log, at_ms=LATER_MS + 1)
    kept += [writer.put(b"one"), writer.put(b"two")]
    log.truncate(kept[-2].base_offset)  # as after a fail-over: the new leader did not have these records
    writer = Writer(log, at_ms=LATER_MS + 2)
    kept[-2:] = [writer.put(b"another")]
    assert everything(log) == kept
    log.close()
    log = open_log(directory)
    assert everything(log) == kept
    assert log.end_offset == kept[-1].end_offset
    log.roll()
    assert log.seal(log.end_offset) >= 0
    log.close()
    for file in directory.glob("*.sqlite"):
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        with closing(apsw.Connection(f"file:{file}?immutable=1", flags=flags)) as connection:
            assert connection.execute("PRAGMA integrity_check").get == "ok"
    log = open_log(directory)
    assert everything(log) == kept
    log.close()


def offsets(batches):
    return [(batch.base_offset, batch.end_offset) for batch in batches]
