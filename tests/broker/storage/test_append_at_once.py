"""Appends that must not wait for anything but their own commit."""

from pathlib import Path

import apsw
import pytest
from support.compressed import with_compressed_values
from support.log_files import Writer, everything, open_log

from portalmq.broker.storage.errors import DiskFull, LogClosed, StorageFault
from portalmq.broker.storage.log import Log


def appended(log: Log, value: bytes = b"2") -> bool:
    return log.append_at_once([Writer(log).messages_batch([value])])


def test_a_batch_is_there_after_reopening(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    assert appended(log, b"1")
    assert log.commit_s > 0
    assert log.end_offset == 1
    log.close()
    (batch,) = everything(open_log(tmp_path))
    assert batch.records[0].value == b"1"


def locked(log: Log, patch: pytest.MonkeyPatch) -> None:
    assert log._writing.try_acquire()


def parked(log: Log, patch: pytest.MonkeyPatch) -> None:
    log.park()


def roll_due(log: Log, patch: pytest.MonkeyPatch) -> None:
    log.segment_bytes = 1


def checkpoint_due(log: Log, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("portalmq.broker.storage.log.WAL_BYTES_DUE", 1)


def written_by_another(log: Log, patch: pytest.MonkeyPatch) -> None:
    other = apsw.Connection(str(log._active.path))
    other.execute("BEGIN IMMEDIATE")
    patch.setattr(log, "other", other, raising=False)


@pytest.mark.parametrize("due", [locked, parked, roll_due, checkpoint_due, written_by_another])
def test_a_log_that_needs_more_than_a_commit_is_left_as_it_is(tmp_path, monkeypatch, due) -> None:
    log = open_log(tmp_path)
    Writer(log).put(b"1")
    with monkeypatch.context() as patch:
        due(log, patch)
        assert not appended(log)
        if due is written_by_another:
            log.other.close()  # type: ignore[attr-defined]
        elif due is locked:
            log._writing.__exit__()
    assert log.end_offset == 1
    Writer(log).put(b"2")
    assert [batch.records[0].value for batch in everything(log)] == [b"1", b"2"]


def test_the_first_compressed_batch_changes_the_schema_on_a_native_thread(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    Writer(log).put(b"1")
    first = with_compressed_values(Writer(log).messages_batch([b"more"] * 20))
    assert not log.append_at_once([first])
    log.append([first])
    assert log.append_at_once([with_compressed_values(Writer(log).messages_batch([b"more"] * 20))])
    assert log.end_offset == 41


def test_a_closed_log_raises_log_closed(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.close()
    with pytest.raises(LogClosed):
        appended(log)


def test_a_full_disk_applies_nothing_and_the_log_continues(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    Writer(log).put(b"1")
    connection = log._active.writer
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').get + 2}")
    with pytest.raises(DiskFull):
        appended(log, b"x" * 60_000)
    assert log.end_offset == 1
    connection.execute("PRAGMA max_page_count = 100000")
    assert appended(log)
    assert log.end_offset == 2


def test_after_a_fault_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = open_log(tmp_path)

    def fail(self, batches, *, waits):
        raise apsw.IOError("fsync said no")

    with monkeypatch.context() as patch:
        patch.setattr("portalmq.broker.storage.segment.Segment.append", fail)
        with pytest.raises(StorageFault, match="fsync said no"):
            appended(log)
    with pytest.raises(StorageFault, match="restart"):
        appended(log)
    assert log.end_offset == 0
