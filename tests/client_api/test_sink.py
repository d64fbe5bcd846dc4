"""A transactional sink: the effect of a message is applied once, however often the message is delivered."""

from __future__ import annotations

import importlib.util
import sqlite3
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from support.scripted_broker import ScriptedBroker

from portalmq import Message, sink, wire
from portalmq.sink import TransactionalSink

ROOT = Path(__file__).parents[2]


def message(offset: int = 0, *, partition: int = 0, topic: str = "t", timestamp_ms: int = 1) -> Message:
    return Message(topic, partition, offset, None, b"%d" % offset, {}, wire.BYTES, timestamp_ms)


@pytest.fixture
def database(tmp_path: Path):
    connection = sqlite3.connect(tmp_path / "sink.db")
    connection.execute("CREATE TABLE effects (value TEXT)")
    connection.commit()
    yield connection
    connection.close()


def handle(sink: TransactionalSink, *messages: Message) -> list[bool]:
    """Apply each message's effect if it is new; return the new ones."""
    new = []
    for each in messages:
        with sink.handle(each) as cursor:
            new.append(cursor is not None)
            if cursor is not None:
                cursor.execute("INSERT INTO effects VALUES (?)", (each.value.decode(),))
    return new


def effects(database: sqlite3.Connection) -> list[str]:
    return [row[0] for row in database.execute("SELECT value FROM effects ORDER BY rowid")]


def test_a_repeated_message_has_no_effect(database) -> None:
    mine = TransactionalSink(database)
    assert handle(mine, message(1), message(2), message(1)) == [True, True, False]
    assert effects(database) == ["1", "2"]
    again = TransactionalSink(database)
    assert handle(again, message(2), message(0)) == [False, True], "a queue delivers in any order"


def test_a_failed_effect_leaves_no_record(database) -> None:
    mine = TransactionalSink(database)

    def fails() -> None:
        with mine.handle(message(1)) as cursor:
            cursor.execute("INSERT INTO effects VALUES ('half')")
            raise OSError("no")

    with pytest.raises(OSError, match="no"):
        fails()
    assert effects(database) == []
    assert handle(mine, message(1)) == [True]


def test_groups_topics_partitions_and_recreated_topics_are_distinguished(database) -> None:
    mine, other = TransactionalSink(database, group="a"), TransactionalSink(database, group="b")
    assert handle(mine, message(1), message(1, partition=1), message(1, topic="u")) == [True] * 3
    assert handle(other, message(1)) == [True]
    assert handle(mine, message(1, timestamp_ms=2)) == [True], "the topic was deleted and created again"


def test_two_transactions_that_handle_one_message_apply_it_once(tmp_path: Path, database) -> None:
    rival = sqlite3.connect(tmp_path / "sink.db", timeout=0.05)
    mine, theirs = TransactionalSink(database), TransactionalSink(rival)
    with mine.handle(message(1)) as cursor:
        cursor.execute("INSERT INTO effects VALUES ('1')")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            handle(theirs, message(1))
    assert handle(theirs, message(1)) == [False]
    assert effects(database) == ["1"]
    rival.close()


def test_old_handled_messages_are_pruned_in_the_order_of_handling(database, monkeypatch) -> None:
    monkeypatch.setattr(sink, "PRUNED_EVERY", 10)
    mine = TransactionalSink(database, handled_kept=20)
    handle(mine, *(message(offset) for offset in range(1_000, 1_050)))
    handle(mine, message(1))  # a long delay: the smallest offset, handled last
    (rows,) = database.execute("SELECT count(*) FROM portalmq_handled").fetchone()
    assert rows <= 31
    assert handle(mine, message(1), message(1_049)) == [False, False]


def test_a_client_whose_clock_is_behind_is_not_pruned_before_others(database, monkeypatch) -> None:
    monkeypatch.setattr(sink, "PRUNED_EVERY", 10)
    mine = TransactionalSink(database, handled_kept=20)
    handle(mine, *(message(offset) for offset in range(1_000, 1_050)))
    monkeypatch.setattr(sink.time, "time_ns", lambda: 1_000)
    handle(mine, message(1))
    monkeypatch.undo()
    monkeypatch.setattr(sink, "PRUNED_EVERY", 10)
    handle(mine, *(message(offset) for offset in range(1_050, 1_065)))
    assert handle(mine, message(1)) == [False]


def test_a_stream_group_stores_one_offset_for_each_partition(database) -> None:
    mine = TransactionalSink(database, mode="stream")
    assert mine.next_offset("t", 0) is None
    assert handle(mine, message(1), message(5), message(5), message(2), message(0, partition=1)) == [
        True, True, False, False, True,
    ]  # fmt: skip
    assert (mine.next_offset("t", 0), mine.next_offset("t", 1)) == (6, 1)
    assert database.execute("SELECT count(*) FROM portalmq_handled").fetchone() == (0,)
    mine.forget("t")
    assert mine.next_offset("t", 0) is None
    assert handle(mine, message(1)) == [True]


class Recorder:
    """A DB-API connection that records statements, in another paramstyle."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, object]] = []

    def cursor(self) -> Recorder:
        return self

    rowcount = 1

    def execute(self, statement: str, parameters: object = ()) -> None:
        self.asked.append((statement, parameters))

    def fetchone(self) -> None:
        return None

    def close(self) -> None: ...
    def commit(self) -> None: ...
    def rollback(self) -> None: ...


@pytest.mark.parametrize(
    ("style", "mark", "by_name"),
    [("qmark", "?", False), ("format", "%s", False), ("numeric", ":4", False), ("named", ":p3", True),
     ("pyformat", "%(p3)s", True)],
)  # fmt: skip
def test_every_paramstyle(style, mark, by_name) -> None:
    recorder = Recorder()
    with TransactionalSink(recorder, mode="stream", paramstyle=style, group="g").handle(message(7)) as cursor:
        assert cursor is recorder
    statement, parameters = recorder.asked[-1]
    assert mark in statement
    assert "{" not in statement
    expected = ("g", "t", 0, 8)
    assert parameters == ({f"p{n}": value for n, value in enumerate(expected)} if by_name else expected)


def test_a_driver_without_a_paramstyle_needs_the_argument() -> None:
    with pytest.raises(ValueError, match="give paramstyle"):
        TransactionalSink(Recorder())
    with pytest.raises(ValueError, match="use one of"):
        TransactionalSink(Recorder(), paramstyle="nonsense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="handled_kept"):
        TransactionalSink(Recorder(), handled_kept=0)


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sink_sqlite", ROOT / "docs/examples/sink_sqlite.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_worked_example_counts_a_redelivered_message_once(tmp_path: Path) -> None:
    with ScriptedBroker() as broker:
        readings = [msgspec.json.encode({"sensor": f"s{n % 2}", "value": n}) for n in range(10)]
        broker.fill("readings", readings)
        file = str(tmp_path / "readings.db")
        count = example().count
        expected = {"s0": 20, "s1": 25}
        assert count(broker.url, file) == expected
        broker.done.clear()  # no ack has taken effect: all messages are delivered again
        assert count(broker.url, file) == expected
        assert all(number == 2 for number in broker.deliveries.values())
