"""The tables beside the messages: batches, deliveries and groups, read without a Spark session."""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter
from pathlib import Path
from typing import Any

import gevent
import msgspec
import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType
from support.data_directory import START_MS, DataDirectory, locked_by_another, numbered, written
from support.outputs import give_up
from support.plain_figures import logs_in, told
from support.story import busy

from portalmq import stream_wire, wire
from portalmq.broker.core.queue import records as written_bodies
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.spark import options
from portalmq.spark.errors import BadOption, DamagedFile, NothingThere, SourceError
from portalmq.spark.files import segment
from portalmq.spark.tables import batches, bodies, deliveries, groups
from portalmq.spark.tables.availability import Availability

TABLES = {"batches": batches, "deliveries": deliveries, "groups": groups}


def rows(table: str, *paths: Path, columns: tuple[str, ...] | None = None, **more: str) -> list[dict[str, Any]]:
    """Return the table's rows as its reader gives them to Spark."""
    module: Any = TABLES[table]
    reading = options.batch_options({"path": ",".join(map(str, paths)), "table": table, **more})
    reader = module.READER(reading, module.TABLE.schema_of(columns))
    return [row for task in reader.partitions() for batch in reader.read(task) for row in batch.to_pylist()]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busy(tmp_path_factory.mktemp("story") / "data")


def receive(data: DataDirectory, count: int = 100, topic: str = "t", group: str = "g") -> list[Any]:
    request = wire.ReceiveRequest(topics=[topic], max_messages=count, wait_ms=0)
    return data.fixture.broker.receive_handler.receive(group, request, None)


def ack(data: DataDirectory, messages: list[Any], group: str = "g") -> None:
    data.fixture.broker.settlement.settle(group, [message.receipt for message in messages])


# --- batches ---------------------------------------------------------------------------------------------------------


def test_a_batch_is_a_row_with_its_messages_sizes_and_producer(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        who = data.fixture.broker.new_producer(None)
        stamp = wire.ProducerStamp(who.id, who.epoch, 0)
        sent = [Record(b"abc", key=b"k"), Record(b""), Record(b"xyz")]
        data.fixture.broker.produce("t", ProduceRequest(sent, partition=0, producer=stamp))
    epoch, batch = rows("batches", tmp_path / "data")
    assert (epoch["kind"], epoch["messages"], epoch["sizes"]) == ("epoch", 0, [])
    assert batch["kind"] == "messages"
    assert (batch["messages"], batch["bytes"], batch["keyed"], dict(batch["sizes"])) == (3, 6, 1, {0: 1, 3: 2})
    assert (batch["producer_id"], batch["producer_epoch"], batch["sequence"]) == (who.id, who.epoch, 0)
    assert batch["appended_at"].timestamp() * 1000 == START_MS


def test_batches_of_a_purged_log_count_only_remaining_messages(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        offsets = data.put("t", *numbered(10, size=5))
        data.fixture.broker.browser.purge("t", partition=0, before_offset=offsets[4])
    (batch,) = [row for row in rows("batches", tmp_path / "data") if row["kind"] == "messages"]
    assert (batch["base_offset"], batch["messages"], batch["bytes"]) == (offsets[0], 6, 30)


def test_only_headers_are_read_if_no_body_is_needed(story: Path) -> None:
    whole = [row["messages"] for row in rows("batches", story)]
    assert [row["messages"] for row in rows("batches", story, columns=("messages", "kind"))] == whole
    assert sum(whole) == sum(len(log.messages) for log in logs_in(story))


def test_many_small_tasks_find_the_same_batches(story: Path) -> None:
    assert rows("batches", story, maxRowsPerPartition="7") == rows("batches", story)


def test_a_batch_that_lost_a_message_is_a_damaged_file(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        offsets = data.put("t", *numbered(10))
    (path,) = data.directory("t").glob("[0-9]*.sqlite")
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM messages WHERE offset = ?", (offsets[3],))
    connection.close()
    with pytest.raises(DamagedFile, match=r"holds 9 messages .* not 10"):
        rows("batches", tmp_path / "data")


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        data.put("t", *numbered(2_000, size=100))
        data.roll("t")
    path = min(data.directory("t").glob("[0-9]*.sqlite"))
    os.chmod(path, 0o644)
    with path.open("r+b") as file:
        file.seek(8_192)
        file.write(b"\xff" * 65_536)
    for table in ("batches", "deliveries"):
        with pytest.raises(DamagedFile, match=path.name):
            rows(table, tmp_path / "data")


@pytest.mark.parametrize("table", ["batches", "deliveries"])
def test_a_locked_file_is_waited_for_and_not_called_damaged(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        data.put("t", *numbered(10))
        ack(data, receive(data))
    (path,) = data.directory("t").glob("[0-9]*.sqlite")
    reader: Any = TABLES[table].READER(
        options.batch_options({"path": str(tmp_path / "data"), "table": table}), TABLES[table].TABLE.schema_of(None)
    )
    tasks = reader.partitions()
    monkeypatch.setattr(segment, "BUSY_TIMEOUT_MS", 300)
    with locked_by_another(path):
        began = time.monotonic()
        with pytest.raises(SourceError, match=r"was kept locked for 300 ms"):
            list(reader.read(tasks[0]))
        assert time.monotonic() - began >= 0.3
    assert [row for batch in reader.read(tasks[0]) for row in batch.to_pylist()]


# --- deliveries ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["GroupStart", "Grant", "Ack", "Nack", "Extend", "Dead", "Redrive", "Drop", "Commit", "Claim", "Seek"]
)
def test_the_bodies_are_read_as_the_broker_writes_them(name: str) -> None:
    ours, theirs = getattr(bodies, f"{name}Body"), getattr(written_bodies, name)
    names = [field.name for field in msgspec.structs.fields(ours)]
    assert names == [field.name for field in msgspec.structs.fields(theirs)][: len(names)]


def test_every_kind_of_group_record_about_messages_is_known() -> None:
    left_out = {BatchKind.DONE, BatchKind.PAUSE}  # they say nothing of messages
    written = {kind.value: f"{kind.name.title().replace('_', '')}Body" for kind in BatchKind if kind >= 10}
    read = {kind: body.__name__ for kind, body in bodies.KINDS.items()}
    assert read == {kind: name for kind, name in written.items() if kind not in left_out}


def test_deliveries_are_reported_in_order(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        data.put("t", b"a", b"b")
        data.later(1_000)
        data.put("t", b"c")
        data.later(500)
        first = receive(data)
        ack(data, first[:1])
        data.fixture.broker.settlement.settle("g", [first[1].receipt], SettleRequest("nack", 0, "bad day"))
        data.fixture.broker.settlement.settle("g", [first[2].receipt], SettleRequest("release", 0))
        second = receive(data)
        give_up(data.fixture, [message for message in second if message.offset == first[1].offset], topic="")
        data.fixture.broker.dead_letters.redrive("g", "t", ids=None, where=None, rate_per_s=None, dry_run=False)
    found = rows("deliveries", tmp_path / "data")
    events = [(row["event"], row["first_offset"], row["messages"], row["delivery"]) for row in found]
    a, b, c = (message.offset for message in first)
    assert events == [
        ("started", 0, 0, None),
        ("granted", a, 2, 1),
        ("granted", c, 1, 1),
        ("acked", a, 1, None),
        ("nacked", b, 1, None),
        ("returned", c, 1, None),
        ("granted", b, 1, 2),
        ("granted", c, 1, 1),
        ("dead", b, 1, 2),
        ("redriven", b, 1, None),
    ]
    granted = [row for row in found if row["event"] == "granted"]
    waits = [(row["at"] - row["available_at"]).total_seconds() for row in granted[:2]]
    assert waits == [1.5, 0.5], "two batches with two times"
    assert {row["mode"] for row in found} == {"queue"}
    assert [row["reason"] for row in found if row["event"] == "nacked"] == ["bad day"]


@pytest.mark.parametrize("kind", [written_bodies.Ack, written_bodies.Commit])
def test_messages_delivered_without_a_record_are_acked_with_delivery_0(kind: Any, tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        offsets = data.put("t", b"a", b"b", b"c")
        receive(data, 1)
        first = {"commit_id": b"c", "outputs": ()} if kind is written_bodies.Commit else {}
        body = kind(ranges=((offsets[0], offsets[0] + 1),), at_ms=START_MS, ahead=((0, 0, offsets[2]),), **first)
        data.partition("t").append_group_record("g", body).wait()
    acked = [row for row in rows("deliveries", tmp_path / "data") if row["event"] == "acked"]
    events = [(row["first_offset"], row["messages"], row["delivery"]) for row in acked]
    assert events == [(offsets[0], 1, None), (offsets[2], 1, 0)]


def test_a_delayed_message_could_be_delivered_from_its_time_on(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        now = data.fixture.clock.wall_ms()
        data.put("t", *(Record(b"x", deliver_at_ms=now + ms) for ms in (2_000, 2_000, 3_000)), Record(b"now"))
        data.later(5_000)
        receive(data)
    granted = [row for row in rows("deliveries", tmp_path / "data") if row["event"] == "granted"]
    waits = Counter[float]()
    for row in granted:
        waits[(row["at"] - row["available_at"]).total_seconds()] += row["messages"]
    assert waits == {5.0: 1, 3.0: 2, 2.0: 1}


def test_messages_whose_file_is_gone_have_no_time(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t", segment_bytes=1_048_576)
        data.put("t", *(bytes(100_000) for _ in range(12)))
        data.roll("t")
        first = receive(data, 5)
        data.put("t", b"last")
        data.roll("t")
    first_file, *_ = sorted(data.directory("t").glob("[0-9]*.sqlite"))
    moments = Availability([data.directory("t")])
    offset = first[0].offset
    assert moments.granted(offset, offset + 5, 0) == [(offset, 5, START_MS)]
    first_file.unlink()
    assert Availability([data.directory("t")]).granted(offset, offset + 5, 0) == [(offset, 5, None)]


def test_a_stream_group_commits_the_messages_between_two_offsets(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        first = data.put("t", b"a", b"b", b"c")
        data.later(100)
        data.put("t", b"d")
        data.later(100)
        streams, offsets = data.fixture.broker.group_coordinators, data.fixture.broker.offsets
        member = streams.join("g", stream_wire.JoinRequest(["t"], "m"))
        for offset in (first[0] + 2, data.partition("t").high_watermark):
            asked = stream_wire.PartitionOffset("t", 0, offset)
            offsets.commit("g", stream_wire.CommitOffsetsRequest("m", member.generation, [asked]))
            data.later(100)
    found = rows("deliveries", tmp_path / "data")
    committed = [(row["first_offset"] - first[0], row["messages"]) for row in found if row["event"] == "committed"]
    assert committed == [(0, 2), (2, 1), (3, 1)]
    assert [(row["at"] - row["available_at"]).total_seconds() for row in found if row["event"] == "committed"] == [
        0.2,
        0.3,
        0.2,
    ]
    assert {row["consumer"] for row in found} == {"m"}


@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_messages_that_a_seek_skipped_are_first_committed_later(tmp_path: Path, start: str) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        first, *_, last = data.put("t", *numbered(10))
        broker = data.fixture.broker
        broker.put_group("g", {"mode": "stream", "start": start})
        member = broker.group_coordinators.join("g", stream_wire.JoinRequest(["t"], "m"))

        def commit(offset: int) -> None:
            nonlocal member
            with gevent.Timeout(60):
                member = broker.group_coordinators.heartbeat("g", "m", member.generation)
                while not member.assignment:
                    gevent.sleep(0.01)
                    member = broker.group_coordinators.heartbeat("g", "m", member.generation)
            asked = stream_wire.PartitionOffset("t", 0, offset)
            broker.offsets.commit("g", stream_wire.CommitOffsetsRequest("m", member.generation, [asked]))

        for goal, upto in (({"offset": first + 6}, first + 8), ("earliest", first + 7), ("earliest", last + 1)):
            broker.group_coordinators.seek("g", "t", goal, partition=None, dry_run=False)
            commit(upto)
    found = [row for row in rows("deliveries", tmp_path / "data") if row["event"] == "committed"]
    events = [(row["first_offset"] - first, row["messages"], row["delivery"]) for row in found]
    assert events == [(6, 2, 1), (0, 6, 1), (6, 1, 2), (0, 8, 2), (8, 2, 1)]


def test_a_group_that_was_deleted_ended_and_its_name_begins_again(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        data.put("t", b"a", b"b")
        receive(data)
        data.fixture.broker.group_admin.delete("g")
        ack(data, receive(data))
        streams, offsets = data.fixture.broker.group_coordinators, data.fixture.broker.offsets
        member = streams.join("s", stream_wire.JoinRequest(["t"], "m"))
        asked = stream_wire.PartitionOffset("t", 0, data.partition("t").high_watermark)
        offsets.commit("s", stream_wire.CommitOffsetsRequest("m", member.generation, [asked]))
        data.fixture.broker.group_admin.delete("s")
    found = [(row["group"], row["event"], row["messages"], row["delivery"]) for row in rows("deliveries", data.path)]
    assert [each[1:] for each in found if each[0] == "g"] == [
        ("started", 0, None),
        ("granted", 2, 1),
        ("ended", 0, None),
        ("started", 0, None),
        ("granted", 2, 1),
        ("acked", 2, None),
    ]
    assert {each[1:] for each in found if each[0] == "s"} == {
        ("claimed", 0, None),
        ("committed", 2, 1),
        ("ended", 0, None),
    }


def test_deliveries_of_purged_messages_are_left_out(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        first, *_ = data.put("t", *numbered(6))
        given = receive(data, 4)
        data.fixture.broker.browser.purge("t", partition=0, before_offset=first + 3)
        ack(data, given)
    events = [
        (row["event"], row["first_offset"] - first, row["messages"])
        for row in rows("deliveries", tmp_path / "data")
        if row["messages"]
    ]
    assert events == [("granted", 3, 1), ("acked", 3, 1)]


def test_many_small_tasks_find_the_same_deliveries(story: Path) -> None:
    def in_order(found: list[dict[str, Any]]) -> list[str]:
        return sorted(map(repr, found))

    assert in_order(rows("deliveries", story, maxRowsPerPartition="9")) == in_order(rows("deliveries", story))


# --- groups ----------------------------------------------------------------------------------------------------------


def test_lag_counts_unfinished_messages(story: Path) -> None:
    _, left = told(logs_in(story))
    found = {(row["group"], row["topic"], row["partition"]): row for row in rows("groups", story)}
    assert {name: row["lag"] for name, row in found.items()} == {name: len(offsets) for name, offsets in left.items()}


def test_lag_over_priorities_and_delays_agrees_with_the_broker(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        now = data.fixture.clock.wall_ms()
        receive(data)
        data.put("t", *(Record(b"p", priority=number % 3) for number in range(30)))
        data.put("t", *(Record(b"d", priority=number % 2, deliver_at_ms=now + 500 * number) for number in range(20)))
        data.put("t", *numbered(10))
        data.later(3_000)
        ack(data, receive(data, 25)[5:20])
        data.fixture.broker.scheduled_messages.cancel("t", 0, data.partition("t").high_watermark - 11 - 3)
        expected = data.fixture.broker.describe_group("g")
    (row,) = rows("groups", tmp_path / "data")
    assert (row["lag"], row["mode"]) == (expected.lag, "queue")
    assert row["in_flight"] == 10


def test_a_group_that_has_read_nothing_lags_by_every_message(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        receive(data)
        data.later(50)
        data.put("t", b"a", b"b")
    (row,) = rows("groups", tmp_path / "data")
    assert (row["lag"], row["in_flight"], row["dead"], row["member"]) == (2, 0, 0, None)
    assert row["oldest"].timestamp() * 1000 == START_MS + 50


def test_topics_without_messages_or_groups_have_no_rows(tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t", partitions=3)
    assert rows("batches", tmp_path / "data") == []  # an epoch begins with its first record
    assert rows("deliveries", tmp_path / "data") == []
    assert rows("groups", tmp_path / "data") == []


@pytest.mark.parametrize("table", TABLES)
def test_a_machine_that_does_not_see_the_directory_has_no_empty_table(tmp_path: Path, table: str) -> None:
    """An executor of a cluster reads the spans that the driver planned."""
    home = tmp_path / "data"
    with written(home) as data:
        data.topic("t")
        receive(data)
        data.put("t", b"a", b"b")
        ack(data, receive(data))
    module: Any = TABLES[table]
    reader = module.READER(options.batch_options({"path": str(home), "table": table}), module.TABLE.schema_of(None))
    tasks = reader.partitions()
    home.rename(tmp_path / "elsewhere")
    with pytest.raises(NothingThere, match=rf"{home} is not there on this machine .*option bootstrap"):
        print([list(reader.read(task)) for task in tasks])


# --- options ---------------------------------------------------------------------------------------------------------


def test_tables_are_read_whole_and_from_files_only(story: Path) -> None:
    for given, match in (
        ({"bootstrap": "http://localhost:1"}, "name their data directories as path"),
        ({"path": str(story), "startingOffsets": '{"orders": {"0": 3}}'}, "leave the starting and ending options out"),
        ({"path": str(story), "endingTimestamp": "5"}, "leave the starting and ending options out"),
    ):
        reading = options.batch_options({"table": "batches", **given})
        with pytest.raises(BadOption, match=match):
            batches.READER(reading, batches.TABLE.schema_of(None)).partitions()


def test_a_table_names_its_columns() -> None:
    with pytest.raises(BadOption, match="no column 'value' in table groups: its columns are topic, "):
        groups.TABLE.schema_of(["value"])
    with pytest.raises(BadOption, match="'lag' is bigint, not string"):
        groups.TABLE.columns_of(StructType([StructField("lag", StringType())]))
    assert groups.TABLE.columns_of(StructType([StructField("lag", LongType())])) == ("lag",)
