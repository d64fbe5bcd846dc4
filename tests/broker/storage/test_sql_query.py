"""SQL over the segment files of a broker: what it shows, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import apsw
import msgspec
import pytest
from support.log_files import Writer, open_log

from portalmq.broker.storage import sql_query
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.sql_query import PartitionFiles, SqlAnswer, SqlOrder, run

Ask = Callable[..., SqlAnswer]
NACK = msgspec.msgpack.encode([[[0, 1, 5]], 9, "a timeout"])


@pytest.fixture(scope="module")
def partitions(tmp_path_factory: pytest.TempPathFactory) -> list[PartitionFiles]:
    """Two partitions: one of five small files with JSON, of which the last message is not committed; one of text."""
    root = tmp_path_factory.mktemp("logs")
    found = []
    for number in range(2):
        identity = LogIdentity("cluster-1", "orders", "topic-id-1", number)
        log = open_log(root / str(number), identity=identity, segment_bytes=8_000)
        writer = Writer(log)
        for n in range(100):
            writer.at_ms += 10
            value = b'{"n": %d, "pad": "%s"}' % (n, b"x" * 300)
            writer.put(Record(value, "application/json", key=b"k%d" % (n % 3), headers={"trace": str(n)}))
        log.append([writer.control_batch(BatchKind.NACK, NACK, "g")])
        found.append(PartitionFiles("orders", number, str(root / str(number)), 2, log.end_offset))
        log.close()
    found[0].end = 99
    return found


@pytest.fixture
def ask(partitions: list[PartitionFiles]) -> Ask:
    def asked(query: str, limit: int = 1_000, timeout_ms: int = 30_000) -> SqlAnswer:
        return run(SqlOrder(query, limit, timeout_ms, partitions))

    return asked


def test_messages_of_all_partitions_are_one_table(ask: Ask) -> None:
    answer = ask("SELECT topic, partition, count(*) AS messages, min(offset), max(offset) FROM messages GROUP BY 1, 2")
    assert answer.columns == ["topic", "partition", "messages", "min(offset)", "max(offset)"]
    assert answer.rows == [["orders", 0, 97, 2, 98], ["orders", 1, 98, 2, 99]]


def test_values_are_json(ask: Ask) -> None:
    query = "SELECT json_extract(value, '$.n'), key, json_extract(headers, '$.trace'), content_type FROM messages"
    assert ask(f"{query} WHERE partition = 0 AND offset = 7").rows == [[7, "k1", "7", "application/json"]]


@pytest.mark.parametrize("order", ["offset", "offset DESC", "timestamp_ms DESC", "timestamp_ms"])
def test_an_order_that_the_log_has_anyway(ask: Ask, order: str) -> None:
    found = ask(f"SELECT offset FROM messages WHERE topic = 'orders' AND partition = 1 ORDER BY {order} LIMIT 3")
    assert [row[0] for row in found.rows] == ([99, 98, 97] if "DESC" in order else [2, 3, 4])


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("offset > 90 AND partition = 1", 9),
        ("offset >= 90.5 AND partition = 1", 9),
        ("offset < 5", 6),
        ("offset BETWEEN 40 AND 49", 20),
        ("offset = 50 OR offset = 51", 4),
        ("offset IN (3, 4, 200)", 4),
        ("timestamp_ms > 1900 AND partition = 1", 10),
        ("offset = 'text'", 0),
        ("topic = 'other'", 0),
        ("partition = NULL", 0),
        ("topic LIKE 'ord%' AND key = 'k0'", 65),
    ],
)
def test_conditions_choose_rows(ask: Ask, condition: str, count: int) -> None:
    assert ask(f"SELECT count(*) FROM messages WHERE {condition}").rows == [[count]]


def test_joins_of_the_tables(ask: Ask) -> None:
    query = """SELECT count(*) FROM messages AS m JOIN batches AS b
               ON b.topic = m.topic AND b.partition = m.partition AND b.base_offset = m.offset"""
    assert ask(query).rows == [[195]]


def test_records_of_groups_are_readable(ask: Ask) -> None:
    answer = ask("SELECT group_name, name, json_extract(body, '$[2]') FROM group_records WHERE partition = 1")
    assert answer.rows == [["g", "nack", "a timeout"]]


def test_columns_of_a_result_without_rows(ask: Ask) -> None:
    answer = ask("SELECT offset, key AS k FROM messages WHERE offset > 1000")
    assert (answer.columns, answer.rows) == (["offset", "k"], [])


def test_more_rows_than_the_limit_are_cut_off(ask: Ask) -> None:
    assert len(ask("SELECT offset FROM messages", limit=10).rows) == 10
    assert ask("SELECT offset FROM messages", limit=10).truncated
    assert not ask("SELECT offset FROM messages LIMIT 10", limit=10).truncated


def test_bytes_are_shown_as_base64(ask: Ask) -> None:
    assert ask("SELECT x'00ff', 1.5, NULL").rows == [[{"base64": "AP8="}, 1.5, None]]


@pytest.mark.parametrize(
    "query",
    [
        "",
        "-- nothing",
        "SELECT 1; SELECT 2",
        "DELETE FROM messages",
        "INSERT INTO messages (offset) VALUES (1)",
        "CREATE TABLE t (x)",
        "CREATE TEMP TABLE t (x)",
        "ATTACH 'file.sqlite' AS a",
        "PRAGMA database_list",
        "BEGIN",
        "VACUUM INTO 'copy'",
        "EXPLAIN SELECT 1",
        "SELECT load_extension('x')",
        "SELECT * FROM nothing",
        "SELECT writefile('a', 'b')",
        "SELECT 1 FROM pragma_database_list",
        "nonsense",
        "SELECT 'a\0b",
    ],
)
def test_anything_but_one_select_is_refused(ask: Ask, query: str) -> None:
    answer = ask(query)
    assert answer.refused == "invalid", answer
    assert answer.detail


FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def test_a_query_that_takes_too_long_is_stopped(ask: Ask) -> None:
    assert ask(FOREVER, timeout_ms=50).refused == "limit"
    assert ask("SELECT count(*) FROM messages a, messages b, messages c, messages d", timeout_ms=50).refused == "limit"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT length(hex(randomblob(1000000000)))",
        """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 400)
           SELECT group_concat(hex(randomblob(1000000)) || i) FROM n""",
        """WITH RECURSIVE n(i, t) AS
           (SELECT 1, randomblob(1000000) UNION ALL SELECT i + 1, randomblob(1000000) FROM n LIMIT 1000)
           SELECT i FROM n ORDER BY t""",
    ],
)
def test_a_query_that_takes_too_much_memory_is_stopped(partitions: list[PartitionFiles], query: str) -> None:
    request = msgspec.json.encode(SqlOrder(query, 10, 30_000, partitions))
    command = [sys.executable, "-m", "portalmq.broker.storage.sql_query"]
    ran = subprocess.run(command, input=request, capture_output=True, check=True)
    assert msgspec.json.decode(ran.stdout, type=SqlAnswer).refused == "limit", ran


def test_a_file_that_retention_removes_meanwhile_is_left_out(tmp_path: Path) -> None:
    log = open_log(tmp_path, segment_bytes=4_000)
    writer = Writer(log)
    for _ in range(30):
        writer.put(Record(b"x" * 400, "text/plain"))
    end = log.end_offset
    log.close()
    first = min(tmp_path.glob("*.sqlite"))
    first.unlink()
    first.symlink_to(tmp_path / "gone")
    left = run(SqlOrder("SELECT count(*) FROM messages", 1, 5_000, [PartitionFiles("t", 0, str(tmp_path), 0, end)]))
    assert 0 < left.rows[0][0] < 30


@pytest.mark.parametrize(
    "condition",
    [
        "topic = 'orders' OR partition = 1",
        "topic = 'orders' AND (offset = 5 OR timestamp_ms > 0)",
        "offset < 10 OR offset < 20 OR partition = 0",
    ],
)
@pytest.mark.parametrize("table", ["messages", "batches"])
def test_conditions_joined_by_or_count_each_row_once(ask: Ask, table: str, condition: str) -> None:
    shown = (
        condition if table == "messages" else condition.replace("offset", "base_offset").replace("timestamp_ms", "1")
    )
    plain = shown.replace("topic ", "+topic ").replace("partition ", "+partition ").replace("offset <", "offset+0 <")
    plain = plain.replace("offset =", "offset+0 =").replace("timestamp_ms >", "timestamp_ms+0 >")
    assert (
        ask(f"SELECT count(*) FROM {table} WHERE {shown}").rows
        == ask(f"SELECT count(*) FROM {table} WHERE {plain}").rows
    )


def test_a_collation_is_obeyed(ask: Ask) -> None:
    assert ask("SELECT count(*) > 0 FROM messages WHERE topic = 'ORDERS' COLLATE NOCASE").rows == [[1]]


def test_a_row_that_is_too_large_is_refused(ask: Ask) -> None:
    wide = ", ".join(["x"] * 40)
    assert (
        ask(f"WITH t AS MATERIALIZED (SELECT printf('%.*c', 1000000, 'x') AS x) SELECT {wide} FROM t").refused
        == "limit"
    )


def test_a_file_that_cannot_be_read_now_is_no_fault_of_the_query(
    partitions: list[PartitionFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by `make simulate-shell SEED=2881`, on a full disk."""

    def full(path: Path) -> None:
        raise apsw.FullError("no space left")

    monkeypatch.setattr(sql_query, "_reading", full)
    answer = run(SqlOrder("SELECT count(*) FROM messages", 1, 60_000, partitions))
    assert (answer.refused, answer.detail) == ("unreadable", "a file cannot be read now: no space left")


@pytest.mark.parametrize("text", [b"messages_with_type AS", b"SELECT m.offset", b"group_name TEXT", b"TABLE meta"])
def test_a_damaged_file_is_no_fault_of_the_query(tmp_path: Path, text: bytes) -> None:
    """Found by `make simulate-shell SEED=18827`: a flipped bit in the schema."""
    log = open_log(tmp_path)
    log.append([Writer(log).control_batch(BatchKind.NACK, NACK, "g")])
    found = PartitionFiles("t", 0, str(tmp_path), 0, log.end_offset)
    log.close()
    (file,) = tmp_path.glob("0*.sqlite")
    content = bytearray(file.read_bytes())
    content[content.index(text) + 2] ^= 1
    file.write_bytes(content)
    tables = ("messages", "batches", "group_records")
    answers = [run(SqlOrder(f"SELECT * FROM {table}", 1, 60_000, [found])) for table in tables]
    assert answers[2].refused == "unreadable", answers[2]
    assert {answer.refused for answer in answers} <= {"", "unreadable"}


@pytest.mark.parametrize("is_there", [True, False])
def test_only_a_file_that_is_gone_is_left_out(
    partitions: list[PartitionFiles], monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    connection = apsw.Connection

    def refused(name: str, **more: int) -> apsw.Connection:
        if name == ":memory:":
            return connection(name, **more)
        raise apsw.CantOpenError("too many open files")

    monkeypatch.setattr(apsw, "Connection", refused)
    monkeypatch.setattr(Path, "exists", lambda path: is_there)
    answer = run(SqlOrder("SELECT count(*) FROM messages", 1, 60_000, partitions))
    assert (answer.refused, answer.rows) == (("unreadable", []) if is_there else ("", [[0]]))
