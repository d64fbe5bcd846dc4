"""A log opens its own files and no others."""

import sqlite3

import pytest
from support.log_files import IDENTITY, Writer, numbered, open_log, three_segments

from portalmq.broker.storage.errors import StorageFault, WrongLog
from portalmq.broker.storage.schema import LogIdentity


@pytest.mark.parametrize("other", [
    LogIdentity("cluster-2", "orders", "topic-id-1", 0),
    LogIdentity("cluster-1", "orders", "topic-id-2", 0),
    LogIdentity("cluster-1", "orders", "topic-id-1", 1),
])  # fmt: skip
def test_another_logs_files_are_not_opened(tmp_path, other):
    log, _ = three_segments(tmp_path)
    log.seal(90)
    log.close()
    with pytest.raises(WrongLog, match="belongs to"):
        open_log(tmp_path, identity=other)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(WrongLog, match="belongs to"):
        open_log(tmp_path, identity=other)


def test_a_sealed_file_of_another_log_is_found_when_it_is_read(tmp_path):
    for name, identity in (("a", IDENTITY), ("b", LogIdentity("cluster-1", "orders", "topic-id-2", 0))):
        log = open_log(tmp_path / name, identity=identity)
        writer = Writer(log)
        writer.put(*numbered(5))
        log.roll()
        log.seal(5)
        log.close()
    first = f"{0:020d}.sqlite"
    (tmp_path / "b" / first).replace(tmp_path / "a" / first)
    log = open_log(tmp_path / "a")
    with pytest.raises(WrongLog):
        log.read(0)


def test_a_newer_schema_is_left_alone(tmp_path):
    open_log(tmp_path).close()
    connection = sqlite3.connect(tmp_path / f"{0:020d}.sqlite")
    with connection:
        connection.execute("UPDATE meta SET value = 99 WHERE key = 'schema_version'")
    connection.close()
    with pytest.raises(WrongLog, match="schema version 99"):
        open_log(tmp_path)


def test_a_file_that_is_no_database_is_a_fault_that_names_it(tmp_path):
    (tmp_path / f"{0:020d}.sqlite").write_bytes(b"not a database" * 500)
    with pytest.raises(StorageFault, match=str(tmp_path)):
        open_log(tmp_path)


def test_another_database_is_not_a_segment(tmp_path):
    connection = sqlite3.connect(tmp_path / f"{0:020d}.sqlite")
    connection.execute("CREATE TABLE something (x)")
    connection.close()
    with pytest.raises(WrongLog, match="not a segment"):
        open_log(tmp_path)
