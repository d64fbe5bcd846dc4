"""The schema is public: its document names every part, and common tools read the files."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import apsw
import pytest
from support.log_files import IDENTITY, Writer, open_log

import portalmq.broker.storage.schema as schema_module
from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.broker.storage.fold_tables import STATE_DDL
from portalmq.broker.storage.holes import HOLES_DDL
from portalmq.broker.storage.schema import SEGMENT_DDL
from portalmq.broker.storage.state import StateFile

DOCUMENT = Path(schema_module.__file__).with_name("SCHEMA.md").read_text()


def tables_of(ddl):
    connection = apsw.Connection(":memory:")
    connection.execute(ddl)
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")]
    return {name: [row[1] for row in connection.execute(f"PRAGMA table_info({name})")] for name in names}


@pytest.mark.parametrize("ddl", [SEGMENT_DDL, f"{SEGMENT_DDL}{HOLES_DDL}", STATE_DDL])
def test_the_document_names_every_table_view_and_column(ddl):
    for table, columns in tables_of(ddl).items():
        assert table in DOCUMENT
        assert [column for column in columns if f"`{column}`" not in DOCUMENT] == [], table


def test_a_live_file_is_read_with_nothing_but_pythons_sqlite3(tmp_path):
    """In another process, as users do: two SQLite libraries in one process would break each other's locks."""
    log = open_log(tmp_path)
    writer = Writer(log, at_ms=1_700_000_000_000)
    writer.put_control(BatchKind.EPOCH_START)
    writer.put(Record(b'{"t": 21.5}', "application/json", b"sensor", {"site": "roof"}))
    log.append([writer.messages_batch([b"\0\1", Record(b"hi", "text/csv")], stamp=(7, 1, 40))])
    code = """
import json, sqlite3, sys
log = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
log.row_factory = sqlite3.Row
rows = [dict(row) for row in log.execute("SELECT * FROM messages_with_type ORDER BY offset")]
for row in rows: row["value"] = row["value"] if isinstance(row["value"], str) else row["value"].hex()
extracted = log.execute("SELECT json_extract(value, '$.t'), json_extract(headers, '$.site') FROM messages"
                        " WHERE content_type = 1").fetchone()
print(json.dumps([rows, list(extracted), log.execute("PRAGMA integrity_check").fetchone()[0]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, next(tmp_path.glob("0*.sqlite"))], capture_output=True, check=True, timeout=100
    )
    rows, extracted, check = json.loads(done.stdout)
    assert check == "ok"
    assert extracted == [21.5, "roof"]
    assert [(row["offset"], row["key"], row["value"], row["content_type"]) for row in rows] == [
        (1, "sensor", '{"t": 21.5}', "application/json"),
        (2, None, "0001", "application/octet-stream"),
        (3, None, "hi", "text/csv"),
    ]
    assert [(row["base_offset"], row["producer_id"], row["sequence"]) for row in rows] == [
        (1, None, None), (2, 7, 40), (2, 7, 41),
    ]  # fmt: skip


def test_every_query_of_the_document_runs(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(Record(b'{"temperature": 20}', "application/json"))
    StateFile(tmp_path, identity=IDENTITY).save(PartitionFold(applied=1), 1)
    connection = apsw.Connection(str(next(tmp_path.glob("0*.sqlite"))), flags=apsw.SQLITE_OPEN_READONLY)
    block = DOCUMENT.partition("With the shell:")[2].partition("With Python's own")[0]
    queries = block.partition("\n\n    -- ")[2].split("\n\n    -- ")
    assert len(queries) == 4
    for query in queries:
        connection.execute("-- " + query).fetchall()
    state = apsw.Connection(str(tmp_path / "state.sqlite"), flags=apsw.SQLITE_OPEN_READONLY)
    for view in ("ready", "in_flight", "scheduled", "dead", "lag"):
        state.execute(f"SELECT * FROM {view}").fetchall()


def test_the_schema_changes_only_with_its_version():
    """Users have files of this version: a change needs a new SCHEMA_VERSION and a way to read the old files."""
    words = " ".join(SEGMENT_DDL.split())
    assert (schema_module.SCHEMA_VERSION, hashlib.sha256(words.encode()).hexdigest()[:16]) == (1, "f49a3fb1a53b5efc")
