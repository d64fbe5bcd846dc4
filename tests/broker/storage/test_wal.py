"""A write-ahead log that another process reads while its file is opened."""

from __future__ import annotations

import os
from pathlib import Path

import apsw
import pytest

from portalmq.broker.storage import wal


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
