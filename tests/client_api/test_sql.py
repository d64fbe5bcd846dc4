"""SQL on files with compressed values shows the values that were sent."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.compressed import reading_records, readings, with_compressed_values
from support.log_files import Writer, open_log

from portalmq import sql
from portalmq.broker.storage.batch import Record


def file_of(directory: Path, *batches: list[Record], are_compressed: bool = True) -> Path:
    log = open_log(directory)
    writer = Writer(log)
    writer.put(Record(b"plain", "text/plain"))
    for records in batches:
        batch = writer.messages_batch(records)
        log.append([with_compressed_values(batch) if are_compressed else batch])
    writer.put(Record(b"\xff\0"))
    log.close()
    return directory / f"{0:020d}.sqlite"


def connect(path: Path):
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    return closing(connection)


def test_the_documented_queries_work_on_compressed_values(tmp_path):
    with connect(file_of(tmp_path, reading_records(20), reading_records(30, 100))) as log:
        assert log.execute("SELECT count(*) FROM messages WHERE value IS NULL").fetchall() == [(50,)]
        sql.register(log)
        sent = [b"plain", *readings(20), *readings(30, 100), b"\xff\0"]
        found = log.execute("SELECT offset, CAST(value AS BLOB) FROM messages ORDER BY offset").fetchall()
        assert [value for _, value in found] == sent
        average = log.execute("SELECT avg(json_extract(value, '$.celsius')) FROM messages WHERE content_type = 1")
        assert average.fetchall() == [(21.5,)]
        newest = log.execute("SELECT value, content_type FROM messages_with_type ORDER BY offset DESC LIMIT 1 OFFSET 1")
        assert newest.fetchall() == [(readings(1, 129)[0].decode(), "application/json")]


def test_the_view_has_every_column_of_the_table(tmp_path):
    with connect(file_of(tmp_path, reading_records(20))) as log:
        before = [row[0] for row in log.execute("SELECT * FROM messages").description]
        sql.register(log)
        assert [row[0] for row in log.execute("SELECT * FROM messages").description] == before


def test_a_value_has_the_storage_class_that_it_has_in_plain_files(tmp_path):
    texts = [Record(value, "text/plain") for value in (b"text", b"\xff", b"a\0b")]
    records = [*texts, Record(b"bytes")]
    classes = []
    for name, are_compressed in (("plain", False), ("compressed", True)):
        with connect(file_of(tmp_path / name, records, are_compressed=are_compressed)) as log:
            sql.register(log)
            classes.append(log.execute("SELECT typeof(value), value FROM messages").fetchall())
    assert classes[0] == classes[1]


def test_a_file_without_compressed_values_needs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(sql, "HAS_ZSTD", False)
    with connect(file_of(tmp_path)) as log:
        sql.register(log)
        assert log.execute("SELECT count(value) FROM messages").fetchall() == [(2,)]


def test_without_zstd_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(sql, "HAS_ZSTD", False)
    with connect(file_of(tmp_path, reading_records(20))) as log, pytest.raises(RuntimeError, match=r"portalmq\[zstd\]"):
        sql.register(log)
