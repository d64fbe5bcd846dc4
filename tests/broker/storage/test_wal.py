"""A write-ahead log that another process reads while its file is opened."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from support.log_files import IDENTITY, Writer, open_log

from portalmq.broker.storage import wal
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import StorageFault
from portalmq.broker.storage.state import StateFile


def test_a_log_whose_checkpoint_a_reader_blocks_is_written_again_and_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an fsync that failed, the system takes pages for written that are not on the disk."""
    path = tmp_path / "a.sqlite"
    writer, reader = apsw.Connection(str(path)), apsw.Connection(str(path))
    writer.execute("PRAGMA journal_mode = WAL; CREATE TABLE t (value)").fetchall()
    writer.execute("INSERT INTO t VALUES (zeroblob(10000))")
    reader.execute("BEGIN; SELECT count(*) FROM t").fetchall()
    log = Path(f"{path}-wal")
    before, wrote_at = log.read_bytes(), log.stat().st_mtime_ns
    os.utime(log, ns=(0, 0))
    synced: list[int] = []
    monkeypatch.setattr(wal, "FOREIGN_READER_WAIT_MS", 0)
    monkeypatch.setattr(wal, "COPIED_BYTES", 5_000)
    monkeypatch.setattr(wal, "sync", lambda descriptor: synced.append(os.fstat(descriptor).st_mtime_ns))
    wal.make_durable(writer)
    assert log.read_bytes() == before
    assert len(synced) == 1
    assert synced[0] >= wrote_at, "it was written before the sync"
    reader.close()
    assert writer.execute("SELECT length(value) FROM t").get == 10_000
    wal.make_durable(writer)
    assert log.stat().st_size == 0


def of_a_log(directory: Path) -> Callable[[], object]:
    log = open_log(directory)
    Writer(log).put(b"a")
    return log.close


def of_a_state(directory: Path) -> Callable[[], object]:
    state = StateFile(directory, identity=IDENTITY)
    state.save_highest_epoch(7)
    return state.close


def of_epochs(directory: Path) -> Callable[[], object]:
    epochs = EpochFile(directory)
    epochs.save({("a", 0): 7})
    epochs.save({("a", 0): 8})
    return epochs.close


@pytest.mark.parametrize(
    ("written", "begin_again"),
    [
        (of_a_log, open_log),
        (of_a_state, lambda directory: StateFile(directory, identity=IDENTITY).load()),
        (of_epochs, lambda directory: EpochFile(directory).save({("a", 0): 9})),
    ],
)
def test_a_start_whose_fsync_fails_leaves_the_log_and_the_file_as_they_are(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: Callable[[Path], Callable[[], object]],
    begin_again: Callable[[Path], object],
) -> None:
    """Found by `make simulate-shell SEED=97507`: SQLite copied the log into the file when its connection was closed,
    and a power cut brought an earlier log back, whose pages did not belong to those in the file."""
    live, left = tmp_path / "live", tmp_path / "left"
    close = written(live)
    shutil.copytree(live, left)
    close()
    before = {path: path.read_bytes() for path in sorted(left.rglob("*.sqlite*")) if not path.name.endswith("-shm")}
    assert any(content for path, content in before.items() if path.name.endswith("-wal"))

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(wal, "sync", fail)
    with pytest.raises(StorageFault, match="Input/output error"):
        begin_again(left)
    assert {path: path.read_bytes() for path in before if path.exists()} == before
