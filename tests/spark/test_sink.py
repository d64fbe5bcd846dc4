"""The sink: a row's message, its identity, and that it is written once."""

from __future__ import annotations

import datetime
import random
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import types
from support.broker_process import REPOSITORY, BrokerProcess
from support.cluster import wait_until

from portalmq import Admin, wire
from portalmq.errors import IdempotencyKeyReused, MessageTooLarge, Unavailable
from portalmq.spark.errors import BadOption, BadRow, NotWritten, SourceError, Unreachable
from portalmq.spark.options import WriteOptions
from portalmq.spark.writing import sender as sender_module
from portalmq.spark.writing import sink
from portalmq.spark.writing.identity import Counts, Identities
from portalmq.spark.writing.rows import check_columns, routed_rows
from portalmq.spark.writing.sender import Sender


def keys(contents: list[bytes], query="q", batch="1", partition=0) -> list[str]:
    identities = Identities(query, batch, partition)
    return identities.keys_of(contents)


# Spreads the counted values as a hash does.
SPREAD = 0x9E3779B97F4A7C15


# --- the identity of a row -------------------------------------------------------------------------------------------


def test_rows_have_the_same_keys_in_whatever_order_they_come():
    contents = [b"%d" % (number % 700) for number in range(2_000)]
    again = contents[:]
    random.Random(5).shuffle(again)
    assert sorted(keys(contents)) == sorted(keys(again))
    assert len(set(keys(contents))) == 2_000, "equal rows are separate rows"


@pytest.mark.parametrize("other", [{"query": "r"}, {"batch": "2"}, {"partition": 1}])
def test_another_query_batch_or_spark_partition_gives_other_keys(other):
    assert not set(keys([b"a", b"b"])) & set(keys([b"a", b"b"], **other))


def test_names_of_queries_and_batches_do_not_run_into_each_other():
    assert keys([b"a"], query="q/1", batch="") != keys([b"a"], query="q", batch="1")


def test_all_keys_of_a_task_are_neighbours_in_the_index():
    assert len({wire.message_id_of(key)[:4] for key in keys([b"%d" % n for n in range(100)])}) == 1


def test_counts_are_exact_while_the_table_grows():
    counts = Counts()
    chance = random.Random(3)
    seen: dict[int, int] = {}
    for _ in range(50_000):
        number = chance.choice((0, chance.randrange(1 << 64), chance.randrange(5_000) * SPREAD % 2**64))
        assert counts.add_all([number]) == [seen.get(number or 1, 0)]
        seen[number or 1] = seen.get(number or 1, 0) + 1


def test_a_million_rows_are_counted_in_a_few_dozen_megabytes():
    counts = Counts()
    counts.add_all(number * SPREAD % 2**64 for number in range(1, 1_000_000))
    assert sys.getsizeof(counts._numbers) + sys.getsizeof(counts._counts) < 40_000_000


# --- a row as a message ----------------------------------------------------------------------------------------------


KINDS = {
    "string": types.StringType(),
    "binary": types.BinaryType(),
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "double": types.DoubleType(),
    "timestamp": types.TimestampType(),
    "timestamp_ntz": types.TimestampNTZType(),
    "map<string,int>": types.MapType(types.StringType(), types.IntegerType()),
    "struct<a:int>": types.StructType([types.StructField("a", types.IntegerType())]),
}


def schema(text: str) -> types.StructType:
    """Return the schema of Spark's DDL, without a session."""
    named = [column.split(" ") for column in text.split(", ")]
    return types.StructType([types.StructField(name, KINDS[kind]) for name, kind in named])


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("value string, celsius double", "no use for the columns celsius"),
        ("offset bigint, timestamp timestamp, value string", "offset, timestamp"),
        ("key string", "no column value"),
        ("value struct<a:int>", "value is struct<a:int>, and has to be binary or string"),
        ("value string, key int", "key is int"),
        ("value string, headers map<string,int>", r"headers is map<string,int>, and has to be map<string,string>"),
        ("value string, headers string", "headers is string"),
        ("value string, partition string", "partition is string"),
        ("value string, deliver_at timestamp_ntz", "deliver_at is timestamp_ntz, and has to be timestamp"),
        ("value string, priority double", "priority is double"),
        ("value string, idempotency_key binary", "idempotency_key is binary"),
        ("value string, value binary", "twice"),
    ],
)
def test_columns_are_checked_before_anything_is_written(columns, said):
    with pytest.raises(BadOption, match=said):
        check_columns(schema(columns), "t")


def test_a_topic_is_an_option_or_a_column():
    check_columns(schema("value string, topic string"), None)
    with pytest.raises(BadOption, match="where to"):
        check_columns(schema("value string"), None)
    with pytest.raises(BadOption, match="cannot name a topic"):
        check_columns(schema("value string"), "no such/name")


def test_every_column_becomes_its_field_of_the_message():
    moment = datetime.datetime(2031, 1, 2, 3, 4, 5, 678_999, tzinfo=datetime.UTC)
    batch = pa.record_batch(
        {
            "value": pa.array([b"\x00v", b""]),
            "key": pa.array(["k\u00e9", None]),
            "headers": pa.array([[("b", "2"), ("a", "1")], None], pa.map_(pa.string(), pa.string())),
            "topic": pa.array(["one", "two"]),
            "partition": pa.array([3, None], pa.int32()),
            "content_type": pa.array(["image/png", None]),
            "deliver_at": pa.array([moment, None], pa.timestamp("us", "Europe/Berlin")),
            "ttl_ms": pa.array([5_000, None], pa.int64()),
            "priority": pa.array([31, None], pa.int8()),
            "idempotency_key": pa.array(["mine", None]),
        }
    )
    first, second = routed_rows(batch, None)
    assert (first.topic, first.partition, second.topic, second.partition) == ("one", 3, "two", None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(first.row), type=wire.PackMessage) == wire.PackMessage(
        value=b"\x00v",
        key="k\u00e9".encode(),
        headers={"a": "1", "b": "2"},
        content_type="image/png",
        deliver_at_ms=int(moment.timestamp() * 1000),
        ttl_ms=5_000,
        priority=31,
        idempotency_key="mine",
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(second.row)) == {"value": b""}


def test_text_is_text_and_bytes_are_bytes():
    (text,) = routed_rows(pa.record_batch({"value": pa.array(["\u00fc"])}), "t")
    (large,) = routed_rows(pa.record_batch({"value": pa.array(["\u00fc"], pa.large_string())}), "t")
    (binary,) = routed_rows(pa.record_batch({"value": pa.array([b"x"])}), "t")
    assert text.row == large.row
    assert (text.row.value, text.row.content_type) == ("\u00fc".encode(), wire.TEXT)
    assert binary.row.content_type is None


def test_the_option_topic_wins_over_the_column():
    batch = pa.record_batch({"value": pa.array(["a"]), "topic": pa.array(["column"])})
    assert [placed.topic for placed in routed_rows(batch, "option")] == ["option"]


def test_every_column_belongs_to_the_content():
    base = {"value": ["a"], "topic": ["t"], "key": ["k"], "priority": [1], "partition": [0], "content_type": ["x"]}
    others = [base] + [
        {**base, name: [other]}
        for name, other in (
            ("value", "b"),
            ("topic", "u"),
            ("key", None),
            ("priority", 2),
            ("partition", 1),
            ("content_type", "y"),
        )
    ]
    contents = {next(routed_rows(pa.record_batch(each), None)).content for each in others}
    assert len(contents) == len(others)


def test_headers_in_another_order_are_the_same_content():
    kind = pa.map_(pa.string(), pa.string())
    batch = pa.record_batch(
        {"value": ["a", "a"], "headers": pa.array([[("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")]], kind)}
    )
    first, second = routed_rows(batch, "t")
    assert first.content == second.content


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"value": None}, "value is null"),
        ({"topic": None}, "topic is null"),
        ({"priority": 32}, "priority is 32, and has to be 0 to 31"),
        ({"ttl_ms": 0}, "ttl_ms is 0"),
        ({"partition": -1}, "partition is -1"),
        ({"idempotency_key": ""}, "idempotency_key is ''"),
        ({"idempotency_key": "\u00e9"}, "printable"),
        ({"idempotency_key": "x" * 256}, "1 to 255"),
        ({"headers": [("a", None)]}, "a header is null"),
        ({"value": b"x" * wire.BODY_BYTES_MAX}, "a request takes"),
    ],
)
def test_an_invalid_row_is_reported(row, said):
    kinds = {"value": pa.binary(), "topic": pa.string(), "headers": pa.map_(pa.string(), pa.string())}
    given = {"value": b"v", "topic": "t", **row}
    batch = pa.record_batch({name: pa.array([value], kinds.get(name)) for name, value in given.items()})
    with pytest.raises(BadRow, match=said):
        list(routed_rows(batch, None))


@pytest.mark.parametrize("writer", [sink.BatchWriter, sink.StreamWriter])
def test_a_topic_is_never_overwritten(writer):
    with pytest.raises(BadOption, match="append"):
        writer(WriteOptions(("http://localhost:1",), None, "t", None), schema("value string"), True)


@pytest.mark.parametrize(("bootstrap", "token"), [("ftp://localhost", None), ("http://localhost:1", "a\nb")])
@pytest.mark.parametrize("writer", [sink.BatchWriter, sink.StreamWriter])
def test_an_invalid_address_or_token_is_reported_at_once(writer, bootstrap, token):
    with pytest.raises(BadOption, match="bootstrap, token or tls_"):
        writer(WriteOptions((bootstrap,), token, "t", None), schema("value string"), False)


def test_a_stream_is_named_by_its_checkpoint_alone():
    with pytest.raises(BadOption, match="checkpoint"):
        sink.StreamWriter(WriteOptions(("http://localhost:1",), None, "t", "mine"), schema("value string"), False)


def test_a_stream_that_does_not_know_its_query_writes_nothing():
    writer = sink.StreamWriter(WriteOptions(("http://localhost:1",), None, "t", None), schema("value string"), False)
    with pytest.raises(SourceError, match="foreachBatch"):
        writer.write(iter([]))


def test_a_batch_is_named_by_its_option_or_by_a_new_name(monkeypatch):
    monkeypatch.setattr(sink, "partitions_of", lambda transport, name: None)

    def name_of(query):
        return sink.BatchWriter(
            WriteOptions(("http://localhost:1",), None, "t", query), schema("value string"), False
        )._query

    assert name_of("mine") == name_of("mine")
    assert len({name_of("mine"), name_of("other"), name_of(None), name_of(None)}) == 4


# --- sending ---------------------------------------------------------------------------------------------------------


class Brokers:
    """A substitute for the cluster: accepts the requests of a Sender, and fails those that a test selects."""

    def __init__(self, partitions: int = 2) -> None:
        self.partitions = partitions
        self.requests: list[tuple[str, list[bytes]]] = []
        self.messages_max = 10_000
        self.failure: Exception | None = None

    def metadata(self, names):
        leaders = [wire.PartitionLeader(number, 1, 1, "u") for number in range(self.partitions)]
        return wire.Metadata([], [wire.TopicMetadata(name, leaders, 2) for name in names])

    def call(self, request):
        if self.failure is not None:
            raise self.failure
        messages = msgspec.msgpack.decode(request.body)["messages"]
        if len(messages) > self.messages_max:
            raise MessageTooLarge("too many")
        self.requests.append((request.path, [message["value"] for message in messages]))
        body = msgspec.json.encode({"results": [{"partition": 0, "offset": 1, "timestamp_ms": 2}] * len(messages)})
        return SimpleNamespace(body=body, headers={})

    def close(self):
        pass


@pytest.fixture
def brokers() -> Brokers:
    return Brokers()


@pytest.fixture
def sender(brokers) -> Iterator[Sender]:
    sender = Sender(["http://localhost:1"], None, delivery_timeout_s=5)
    sender._transport = brokers
    yield sender
    sender.close()


def put(sender, *values, **columns):
    batch = pa.record_batch(
        {"value": pa.array(values, pa.binary()), **{name: [each] * len(values) for name, each in columns.items()}}
    )
    identities = Identities("q", "1", 0)
    rows = list(routed_rows(batch, "t"))
    for placed, key in zip(rows, identities.keys_of([placed.content for placed in rows]), strict=True):
        placed.row.idempotency_key = key
    sender.put_all(rows)


def test_rows_of_a_partition_are_sent_in_order(brokers, sender, monkeypatch):
    monkeypatch.setattr(sender_module, "REQUEST_ROWS_MAX", 7)
    values = [b"%03d" % number for number in range(500)]
    put(sender, *values)
    sender.flush()
    for number in range(2):
        sent = [value for path, part in brokers.requests if f"partition={number}" in path for value in part]
        assert sent == sorted(sent)
    assert sorted(value for _, part in brokers.requests for value in part) == values


def test_the_first_rows_leave_at_once_and_larger_requests_are_collected_during_the_request(
    brokers, sender, monkeypatch
):
    monkeypatch.setattr(sender_module, "REQUEST_ROWS_MIN", 10)
    answered, call = Event(), brokers.call

    def waiting(request):
        assert answered.wait(60)
        return call(request)

    monkeypatch.setattr(brokers, "call", waiting)
    put(sender, *(b"%d" % number for number in range(10)), partition=0)
    assert sender._sent, "the request leaves before a flush"
    put(sender, *(b"%d" % number for number in range(10, 100)), partition=0)
    answered.set()
    sender.flush()
    assert [len(part) for _, part in brokers.requests] == [10, 90]


def test_rows_go_to_their_partition_or_that_of_their_key_or_identity(brokers, sender):
    brokers.partitions = 5
    put(sender, b"named", partition=4)
    put(sender, b"keyed", key="k")
    put(sender, b"neither")
    sender.flush()
    by_value = {part[0]: int(path.rpartition("=")[2]) for path, part in brokers.requests}
    (key,) = keys([next(routed_rows(pa.record_batch({"value": [b"neither"]}), "t")).content])
    assert by_value == {
        b"named": 4,
        b"keyed": zlib.crc32(b"k") % 5,
        b"neither": zlib.crc32(wire.message_id_of(key)) % 2,  # of the topic's initial partitions
    }


def test_a_missing_partition_is_reported(brokers, sender):
    with pytest.raises(BadRow, match="0 to 1"):
        put(sender, b"a", partition=2)
    brokers.partitions = 3
    put(sender, b"a", partition=2)


def test_waiting_rows_are_bounded_over_any_number_of_partitions(brokers, sender, monkeypatch):
    monkeypatch.setattr(sender_module, "BYTES_WAITING_MAX", 10_000)
    brokers.partitions = 500
    for number in range(500):
        put(sender, b"x" * 500, partition=number)
        assert sender._waiting <= 10_000
    sender.flush()
    assert sender._waiting == 0
    assert sum(len(part) for _, part in brokers.requests) == 500


def test_a_request_that_is_too_large_goes_in_halves(brokers, sender):
    brokers.messages_max = 3
    values = [b"%02d" % number for number in range(20)]
    put(sender, *values, partition=0)
    sender.flush()
    assert [value for _, part in brokers.requests for value in part] == values
    assert max(len(part) for _, part in brokers.requests) <= 3
    brokers.messages_max = 0
    put(sender, b"one")
    with pytest.raises(NotWritten, match="a message of 3 bytes"):
        sender.flush()


@pytest.mark.parametrize("failure", [Unavailable("away"), IdempotencyKeyReused("used")])
def test_a_request_that_brokers_refuse_fails_the_task_with_a_sentence(brokers, sender, failure):
    brokers.failure = failure
    put(sender, b"a")
    with pytest.raises(NotWritten, match=r"t, partition \d.*each is written once"):
        sender.flush()


def test_wide_rows_become_messages_a_few_at_a_time(monkeypatch):
    """Each message exists as an object and encoded: a thousand of a megabyte would take gigabytes."""
    made = []
    monkeypatch.setattr(
        sink, "routed_rows", lambda batch, topic: made.append(batch.num_rows) or routed_rows(batch, topic)
    )
    monkeypatch.setattr(sink.Sender, "put_all", lambda sender, rows: None)
    writing = WriteOptions(("http://127.0.0.1:9",), None, "t", None)
    for size, rows in ((10, 2_500), (1_000_000, 20)):
        batch = pa.record_batch({"value": pa.array([b"x" * size] * rows)})
        assert sink.write_rows(iter([batch]), writing, Identities("q", "1", 0)) == rows
    assert made == [1_000, 1_000, 500, 8, 8, 4]


def test_unreachable_brokers_are_reported_before_the_job_starts(monkeypatch):
    monkeypatch.setattr(sink, "PREFLIGHT_TIMEOUT_S", 0.2)
    with pytest.raises(Unreachable, match=r"no broker answers at http://127\.0\.0\.1:9"):
        sink.BatchWriter(WriteOptions(("http://127.0.0.1:9",), None, "t", None), schema("value string"), False)


# --- into a broker ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker(tmp_path_factory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("sink")) as broker:
        yield broker


def stored(broker: BrokerProcess, topic: str) -> list[dict]:
    answer = broker.request("GET", f"/v1/topics/{topic}/messages?limit=100000", headers={"Accept": wire.NDJSON})
    return [msgspec.json.decode(line) for line in answer.body.splitlines()]


def url(broker: BrokerProcess) -> str:
    return f"http://127.0.0.1:{broker.port}"


@pytest.mark.cluster
def test_no_topic_is_created_if_the_cluster_creates_none(tmp_path):
    with BrokerProcess(tmp_path / "strict", environment={"PORTALMQ_AUTO_CREATE_TOPICS": "false"}) as strict:
        sender = Sender([url(strict)], None, delivery_timeout_s=60)
        with Admin(url(strict)) as admin:
            with pytest.raises(NotWritten, match=r"there is no topic .t.*create it with PUT"):
                put(sender, b"a")
            assert admin.topics() == []
            admin.create_topic("t")
            put(sender, b"a")
            sender.flush()
        sender.close()
        assert [row["value"] for row in stored(strict, "t")] == ["a"]


def test_a_task_that_runs_again_in_another_order_writes_nothing_twice(broker):
    topic = "again"
    Admin(url(broker)).create_topic(topic, partitions=3)
    writing = WriteOptions((url(broker),), None, topic, None)
    values = [str(number % 900) for number in range(2_000)]

    def run(order):
        batch = pa.record_batch({"value": order})
        assert sink.write_rows(iter([batch.slice(0, 500), batch.slice(500)]), writing, Identities("q", "1", 4)) == 2_000

    run(values)
    random.Random(1).shuffle(values)
    run(values)
    assert sorted(message["value"] for message in stored(broker, topic)) == sorted(values)


@pytest.mark.cluster
def test_two_concurrent_attempts_of_a_task_write_each_row_once(broker, monkeypatch):
    """Speculation starts such attempts. Small requests make the two interleave often."""
    monkeypatch.setattr(sender_module, "REQUEST_ROWS_MAX", 50)
    Admin(url(broker)).create_topic("speculation", partitions=2)
    writing = WriteOptions((url(broker),), None, "speculation", None)
    values = [str(number % 900) for number in range(2_000)]

    def attempt(seed: int) -> int:
        order = random.Random(seed).sample(values, len(values)) if seed else values
        return sink.write_rows(iter([pa.record_batch({"value": order})]), writing, Identities("q", "1", 4))

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(attempt, (0, 0, 5))) == [2_000] * 3
    assert Counter(message["value"] for message in stored(broker, "speculation")) == Counter(values)


@pytest.mark.cluster
@pytest.mark.spark
def test_a_data_frame_becomes_messages_with_all_fields_of_its_columns(spark, broker):
    rows = spark.sql(
        "SELECT '{\"c\": 21.5}' AS value, 'application/json' AS content_type, 's-1' AS key, map('unit', 'C') AS"
        " headers, 'columns' AS topic, timestamp'2030-01-01 00:00:00' AS deliver_at, 60000L AS ttl_ms, 7 AS priority"
    )
    rows.write.format("portalmq").option("bootstrap", url(broker)).mode("append").save()
    (message,) = stored(broker, "columns")
    assert (message["value"], message["key"], message["headers"]) == ({"c": 21.5}, "s-1", {"unit": "C"})
    assert message["content_type"] == "application/json"
    assert (message["deliver_at_ms"], message["priority"]) == (1_893_456_000_000, 7)
    assert message["expires_at_ms"] == 1_893_456_060_000


@pytest.mark.cluster
@pytest.mark.spark
def test_a_batch_with_a_name_is_written_once_and_one_without_each_time(spark, broker):
    rows = spark.range(0, 1_000, numPartitions=3).selectExpr("cast(id % 100 AS string) AS value")
    for topic, options in (("named", {"query": "import of monday"}), ("unnamed", {})):
        for _ in range(2):
            writer = rows.write.format("portalmq").option("bootstrap", url(broker)).option("topic", topic)
            writer.options(**options).mode("append").save()
    assert len(stored(broker, "named")) == 1_000
    assert len(stored(broker, "unnamed")) == 2_000


@pytest.mark.cluster
@pytest.mark.spark
def test_rows_keep_their_order_in_a_partition(spark, broker):
    rows = spark.range(0, 3_000, numPartitions=1).selectExpr("cast(id AS string) AS value", "'k' AS key")
    rows.write.format("portalmq").options(bootstrap=url(broker), topic="order").mode("append").save()
    assert [message["value"] for message in stored(broker, "order")] == [str(number) for number in range(3_000)]


@pytest.mark.cluster
@pytest.mark.spark
@pytest.mark.parametrize(
    ("columns", "options", "mode", "said"),
    [
        ("id", {}, "append", "no use for the columns id"),
        ("cast(id AS string) AS value", {"tpoic": "x"}, "append", "did you mean topic"),
        ("cast(id AS string) AS value", {}, "overwrite", "only ever appended"),
        ("cast(null AS string) AS value", {}, "append", "value is null"),
        ("cast(id AS string) AS value, 99 AS partition", {}, "append", "partition is 99, and topic wrong has 0 to 0"),
    ],
)
def test_a_mistake_is_reported_by_spark(spark, broker, columns, options, mode, said):
    writer = spark.range(3).selectExpr(*columns.split(", ")).write.format("portalmq")
    with pytest.raises(Exception, match=said):
        writer.options(**{"bootstrap": url(broker), "topic": "wrong", **options}).mode(mode).save()


@pytest.mark.cluster
@pytest.mark.spark
def test_a_stream_resumes_from_its_checkpoint_and_repeats_no_row_of_its_last_batch(spark, broker, tmp_path: Path):
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"

    def arrive(start: int) -> None:
        rows = spark.range(start, start + 100, numPartitions=1).selectExpr("cast(id % 10 AS string) AS value")
        rows.write.mode("append").text(str(source))

    def run() -> None:
        lines = spark.readStream.format("text").load(str(source)).repartition(2, "value")
        query = lines.writeStream.format("portalmq").options(bootstrap=url(broker), topic="stream")
        started = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        assert started.awaitTermination(240), "it ends by itself"

    arrive(0)
    run()
    assert len(stored(broker, "stream")) == 100
    (checkpoint / "commits" / "0").unlink()  # as if the driver had died before it recorded the batch
    (checkpoint / "commits" / ".0.crc").unlink(missing_ok=True)
    run()
    assert len(stored(broker, "stream")) == 100
    arrive(100)
    run()
    assert len(stored(broker, "stream")) == 200


@pytest.mark.cluster
@pytest.mark.spark
def test_the_examples_of_the_document_do_what_it_says(spark, broker, tmp_path: Path):
    text = (REPOSITORY / "docs" / "SPARK.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition("\n## Writing\n")[2], flags=re.MULTILINE)[0]
    batch, stream, own_keys = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    readings = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
    names = {
        "spark": spark,
        "averages": readings.selectExpr("cast(value % 3 AS string) AS sensor", "value AS celsius"),
        "messages": spark.sql("SELECT 't' AS topic, 0 AS partition, 7L AS offset, 'x' AS value"),
    }

    def run(code: str) -> None:
        exec(code.replace("http://localhost:5000", url(broker)).replace("checkpoints", str(tmp_path)), names)

    run(batch)
    run(batch)
    (message,) = stored(broker, "temp_1")
    assert (message["key"], message["value"]) == ("sensor-1", {"celsius": 21.5})
    run(stream)
    try:
        wait_until(lambda: len(stored(broker, "averages")) >= 3, "some averages", 240)
    finally:
        names["query"].stop()
    assert {message["key"] for message in stored(broker, "averages")} <= {"0", "1", "2"}
    run(own_keys)
    for name in ("one", "another"):
        writer = names["copy"].write.format("portalmq").options(bootstrap=url(broker), topic="copied", query=name)
        writer.mode("append").save()
    assert [message["value"] for message in stored(broker, "copied")] == ["x"]
