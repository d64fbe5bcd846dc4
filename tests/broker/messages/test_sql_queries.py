"""SQL at a broker: in a process of its own, which its limits end."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest
from support.domain import Fixture, records, running

from portalmq import wire
from portalmq.broker.messages import sql_queries
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.errors import Backpressure, InvalidRequest, QueryLimit

FOREVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    with running(tmp_path_factory.mktemp("data")) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        for number in range(2):
            fixture.broker.produce("t", ProduceRequest(records("a", "b", "c"), partition=number))
        yield fixture


def rows(fixture: Fixture, query: str) -> list[list[object]]:
    return fixture.broker.sql_queries.run(query, limit=100, timeout_ms=60_000).rows


def test_a_query_reads_the_files_that_the_broker_writes(fixture: Fixture) -> None:
    assert rows(fixture, "SELECT topic, partition, count(*) FROM messages GROUP BY 1, 2") == [["t", 0, 3], ["t", 1, 3]]


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


def test_a_process_that_does_not_stop_is_killed(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []
    spawn = os.posix_spawn

    def spawned(program, arguments, environment, **more):  # type: ignore[no-untyped-def]
        pids.append(spawn(program, [sys.executable, "-c", "import time; time.sleep(600)"], environment, **more))
        return pids[-1]

    monkeypatch.setattr(os, "posix_spawn", spawned)
    monkeypatch.setattr(sql_queries, "GRACE_S", 0.0)
    with pytest.raises(QueryLimit):
        fixture.broker.sql_queries.run("SELECT 1", limit=1, timeout_ms=50)
    with pytest.raises(ChildProcessError):
        os.waitpid(pids[0], os.WNOHANG)


def test_one_that_dies_is_a_query_that_takes_too_much(fixture: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_queries, "PROGRAM", "portalmq.nothing")
    with pytest.raises(QueryLimit, match="too much"):
        rows(fixture, "SELECT 1")


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
