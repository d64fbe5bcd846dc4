"""SQL at a broker: in a process of its own, which its limits end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gevent
import msgspec
import pytest
from support.domain import FakePeer, Fixture, records, running

from portalmq import wire
from portalmq.broker.api.app import create_app
from portalmq.broker.messages import sql_queries
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.storage.batch import Record
from portalmq.errors import Backpressure, InvalidRequest, QueryLimit, Unavailable

FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    with running(tmp_path_factory.mktemp("data")) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        for number in range(2):
            fixture.broker.produce("t", ProduceRequest(records("a", "b", "c"), partition=number))
        yield fixture


def rows(fixture: Fixture, query: str) -> list[list[object]]:
    found = fixture.broker.sql_queries.run(query, limit=100, timeout_ms=60_000)
    return msgspec.json.decode(found.rows, type=list[list[object]])


def test_a_query_reads_the_files_that_the_broker_writes(fixture: Fixture) -> None:
    assert rows(fixture, "SELECT topic, partition, count(*) FROM messages GROUP BY 1, 2") == [["t", 0, 3], ["t", 1, 3]]


def test_text_of_another_content_type_is_found_by_a_cast(tmp_path: Path) -> None:
    """As docs/DASHBOARD.md tells those who send with `curl -d`."""
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic())
        sent = [Record(b"at once", "application/x-www-form-urlencoded"), Record(b"at once", "text/plain")]
        fixture.broker.produce("t", ProduceRequest(sent))
        assert rows(fixture, "SELECT count(*) FROM messages WHERE value = 'at once'") == [[1]]
        assert rows(fixture, "SELECT count(*) FROM messages WHERE CAST(value AS TEXT) = 'at once'") == [[2]]


def test_what_is_refused_is_an_error_of_the_caller(fixture: Fixture) -> None:
    with pytest.raises(InvalidRequest, match="no such table: nowhere"):
        rows(fixture, "SELECT * FROM nowhere")
    with pytest.raises(InvalidRequest, match="may not be modified"):
        rows(fixture, "DELETE FROM messages")


def test_a_long_query_ends_in_time_and_keeps_nobody_waiting(fixture: Fixture) -> None:
    turns = 0

    def others() -> None:
        nonlocal turns
        while True:
            gevent.sleep(0.001)
            turns += 1

    beside = gevent.spawn(others)
    with pytest.raises(QueryLimit, match="took longer than 100 ms"):
        fixture.broker.sql_queries.run(FOREVER, limit=1, timeout_ms=100)
    beside.kill()
    assert turns > 5


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[int]]:
    """Run a program in place of the query. The ids of its processes are in the list."""
    spawn = os.posix_spawn

    def begin(program: str) -> list[int]:
        pids: list[int] = []

        def spawned(path, arguments, environment, **more):  # type: ignore[no-untyped-def]
            pids.append(spawn(path, [sys.executable, "-c", program], environment, **more))
            return pids[-1]

        monkeypatch.setattr(os, "posix_spawn", spawned)
        return pids

    return begin


def has_ended(pid: int) -> bool:
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


def test_a_process_that_does_not_stop_is_killed(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, instead: Callable[[str], list[int]]
) -> None:
    pids = instead("import time; time.sleep(600)")
    monkeypatch.setattr(sql_queries, "GRACE_S", 0.0)
    with pytest.raises(QueryLimit):
        fixture.broker.sql_queries.run("SELECT 1", limit=1, timeout_ms=50)
    assert has_ended(pids[0])


def test_a_query_whose_client_is_gone_is_killed(fixture: Fixture, instead: Callable[[str], list[int]]) -> None:
    pids = instead("import time; time.sleep(600)")
    peer = FakePeer()
    queries = fixture.broker.sql_queries
    with gevent.Timeout(60):
        asked = gevent.spawn(queries.run, "SELECT 1", limit=1, timeout_ms=600_000, peer=peer)
        while not pids:
            gevent.sleep(0.001)
        peer.leave()
        with pytest.raises(Unavailable, match="gone"):
            asked.get()
    assert has_ended(pids[0])


def test_an_answer_has_a_limit_also_when_the_process_knows_none(
    fixture: Fixture, monkeypatch: pytest.MonkeyPatch, instead: Callable[[str], list[int]]
) -> None:
    pids = instead("import os\nwhile True: os.write(1, bytes(1 << 16))")
    monkeypatch.setattr(sql_queries, "ANSWER_BYTES_MAX", 1 << 20)
    with pytest.raises(QueryLimit, match="over 1048576 bytes"):
        fixture.broker.sql_queries.run("SELECT 1", limit=1, timeout_ms=600_000)
    assert has_ended(pids[0])


def test_an_answer_takes_room_before_it_is_decoded(fixture: Fixture) -> None:
    def full(size: int) -> None:
        assert size > 10
        raise Backpressure("no room")

    with pytest.raises(Backpressure, match="no room"):
        fixture.broker.sql_queries.run("SELECT 1", limit=1, timeout_ms=60_000, make_room=full)


def test_one_that_dies_is_a_query_that_takes_too_much(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_queries, "PROGRAM", "portalmq.nothing")
    with pytest.raises(QueryLimit, match="too much"):
        rows(fixture, "SELECT 1")


def test_a_file_that_cannot_be_read_now_is_tried_again_later(
    fixture: Fixture, instead: Callable[[str], list[int]]
) -> None:
    instead("""print('{"refused": "unreadable", "detail": "no space left"}')""")
    with pytest.raises(Unavailable, match="no space left") as caught:
        rows(fixture, "SELECT 1")
    assert caught.value.retryable


def test_few_run_at_a_time(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    queries = fixture.broker.sql_queries
    for _ in range(sql_queries.QUERIES_MAX):
        assert queries._slots.acquire(blocking=False)
    try:
        with pytest.raises(Backpressure):
            rows(fixture, "SELECT 1")
    finally:
        for _ in range(sql_queries.QUERIES_MAX):
            queries._slots.release()
    assert rows(fixture, "SELECT 1") == [[1]]


def pipes() -> int:
    names = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(name.startswith("pipe:") for name in names)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="/proc lists the open descriptors")
def test_no_pipe_is_left_open(fixture: Fixture) -> None:
    before = pipes()
    for _ in range(3):
        rows(fixture, "SELECT 1")
    assert pipes() == before


def test_an_answer_keeps_its_room_until_it_is_sent(fixture: Fixture) -> None:
    config = BrokerConfig(answer_bytes_in_flight_max=65_536)
    client = create_app(fixture.broker, config, fixture.broker.metrics, Auth()).test_client()
    asked = {"json": {"query": "SELECT hex(zeroblob(25000)) AS text"}}
    first = client.post("/v1/sql", **asked)
    assert first.get_json()["rows"] == [["0" * 50_000]]
    refused = client.post("/v1/sql", **asked)
    assert (refused.status_code, refused.get_json()["code"]) == (429, "backpressure")
    first.close()
    assert client.post("/v1/sql", **asked).status_code == 200
