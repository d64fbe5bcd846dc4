"""A batch read: its planned offsets, the files it opens, and the rows that Spark returns."""

from __future__ import annotations

import pickle
import random
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    StringContains,
)
from support.data_directory import START_MS, numbered, written

from portalmq.broker.storage.batch import Record
from portalmq.spark.columns import COLUMNS
from portalmq.spark.errors import BadOption, DataLoss, NothingThere
from portalmq.spark.files import segment
from portalmq.spark.options import batch_options
from portalmq.spark.reading.batch import FilteringReader, MessagesReader

OFFSET, TIME = ("offset",), ("timestamp",)


def moment(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=START_MS + ms)


def reader_of(path: Path, *filters, columns=("partition", "offset", "value"), **options) -> FilteringReader:
    reader = FilteringReader(batch_options({"path": str(path), "topic": "t"} | options), columns)
    assert list(reader.pushFilters(list(filters))) == []
    return reader


def rows_of(reader: MessagesReader) -> list[dict]:
    return [row for span in reader.partitions() for batch in reader.read(span) for row in batch.to_pylist()]


def values(path: Path, *filters, **options) -> list[bytes]:
    return [row["value"] for row in rows_of(reader_of(path, *filters, **options))]


@pytest.fixture
def one(tmp_path) -> Path:
    """Topic `t`, one partition, 10 messages a second apart at offsets 1 to 10 (its leader's epoch began at 0)."""
    with written(tmp_path / "one") as directory:
        directory.topic("t")
        for value in numbered(10):
            assert directory.put("t", value) == [int(value) + 1]
            directory.later(1_000)
    return tmp_path / "one"


# --- the beginning and the end of a read ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({}, range(10)),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, range(10)),
        ({"startingOffsets": "latest"}, range(0)),
        ({"startingOffsets": '{"t": {"0": 4}}'}, range(3, 10)),
        ({"endingOffsets": '{"t": {"0": 4}}'}, range(3)),
        ({"startingOffsets": '{"t": {"0": 4}}', "endingOffsets": '{"t": {"0": 6}}'}, range(3, 5)),
        ({"startingOffsets": '{"t": {"0": 4}}', "endingOffsets": '{"t": {"0": 4}}'}, range(0)),
        ({"startingOffsets": '{"t": {"0": -2}}', "endingOffsets": '{"t": {"0": -1}}'}, range(10)),
        ({"startingOffsets": '{"t": {"0": 11}}'}, range(0)),
        ({"startingTimestamp": str(START_MS + 3_000)}, range(3, 10)),
        ({"startingTimestamp": str(START_MS + 3_001)}, range(4, 10)),
        ({"endingTimestamp": str(START_MS + 3_000)}, range(3)),
        ({"endingTimestamp": str(START_MS + 3_001)}, range(4)),
        ({"startingTimestamp": "2023-11-14T22:00:02Z", "endingTimestamp": "2023-11-15T00:00:04+02:00"}, range(2, 4)),
        ({"startingTimestamp": "9999-12-31T00:00:00Z"}, range(0)),
        ({"startingTimestamp": str(START_MS + 3_000), "endingOffsets": '{"t": {"0": 2}}'}, range(0)),
        ({"startingTimestamp": str(START_MS + 3_000), "startingOffsets": "latest"}, range(3, 10)),
    ],
)
def test_a_read_begins_and_ends_where_the_options_say(one, options, read):
    assert values(one, **options) == [b"%d" % number for number in read]


def test_the_end_of_a_read_is_fixed_when_it_is_planned(one):
    reader = reader_of(one)
    spans = reader.partitions()
    with written(one) as directory:
        directory.put("t", b"afterwards")
    assert [row["value"] for span in spans for batch in reader.read(span) for row in batch.to_pylist()] == numbered(10)


@pytest.mark.parametrize(
    ("options", "fault", "sentence"),
    [
        ({"startingOffsets": '{"t": {"0": 12}}'}, BadOption, r"startingOffsets: 12 for 't', partition 0, .* up to 11"),
        ({"endingOffsets": '{"t": {"0": 99}}'}, BadOption, "endingOffsets: 99 .* name an offset up to that, or -1"),
        (
            {"startingOffsets": '{"t": {"0": 6}}', "endingOffsets": '{"t": {"0": 5}}'},
            BadOption,
            "from offset 6 up to 5: the start is behind the end",
        ),
        (
            {"startingOffsets": "latest", "endingOffsets": '{"t": {"0": 5}}'},
            BadOption,
            "from offset 11 up to 5: the start is behind the end",
        ),
        ({"startingOffsets": '{"t": {"1": 0}}'}, NothingThere, "names partition 1 of 't': it has 0 to 0"),
        ({"endingOffsets": '{"x": {"0": 0}}'}, NothingThere, "partition 0 of 'x': it is not among the topics"),
    ],
)
def test_offsets_out_of_range_are_reported(one, options, fault, sentence):
    with pytest.raises(fault, match=sentence):
        reader_of(one, **options).partitions()


@pytest.mark.parametrize(
    ("options", "read"),
    [
        ({"startingOffsets": '{"t": {"0": 2}}'}, range(4, 10)),
        ({"startingOffsets": '{"t": {"0": 2}}', "endingOffsets": '{"t": {"0": 7}}'}, range(4, 6)),
        ({"endingOffsets": '{"t": {"0": 3}}'}, range(0)),
    ],
)
def test_purged_offsets_are_reported_unless_data_loss_is_allowed(one, options, read):
    with written(one) as directory:
        directory.fixture.broker.browser.purge("t", partition=0, before_offset=5)
    with pytest.raises(DataLoss, match=r"begins at offset 5 now: \d is gone .*With failOnDataLoss=false"):
        reader_of(one, **options).partitions()
    assert values(one, failOnDataLoss="false", **options) == [b"%d" % number for number in read]
    assert values(one) == numbered(6, start=4)


def test_a_file_removed_during_its_read_is_reported_unless_data_loss_is_allowed(data):
    readers = [reader_of(data, failOnDataLoss=minds) for minds in ("true", "false")]
    plans = [reader.partitions() for reader in readers]
    for path in data.glob("partitions/t@*/0/0*0.sqlite"):
        path.unlink()
    with pytest.raises(DataLoss, match="were removed while they were read"):
        list(readers[0].read(plans[0][0]))
    assert list(readers[1].read(plans[1][0])) == []


# --- opened files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hour(tmp_path_factory) -> Path:
    """Topic `t`: two partitions of 60 segments, one a minute, each with a message every 10 seconds. And `u`."""
    path = tmp_path_factory.mktemp("hour") / "data"
    with written(path) as directory:
        directory.topic("t", partitions=2)
        directory.topic("u")
        directory.put("u", b"elsewhere")
        for minute in range(60):
            for second in range(0, 60, 10):
                for number in range(2):
                    directory.put("t", b"%d:%d" % (minute, second), partition=number)
                directory.later(10_000)
            if minute < 59:
                directory.roll("t", 0)
                directory.roll("t", 1)
    assert len(list(path.glob("partitions/t@*/0/0*.sqlite"))) == 60
    return path


@pytest.fixture
def connected(monkeypatch) -> list[str]:
    """The files that SQLite opens in this process."""
    found: list[str] = []

    def noted(connect):
        def opened(where, *arguments, **more):
            found.append(re.sub(r"^.*/partitions/(\w+)@\w+/", r"\1/", unquote(where).partition("?")[0]))
            return connect(where, *arguments, **more)

        return opened

    monkeypatch.setattr(segment.sqlite3, "connect", noted(segment.sqlite3.connect))
    monkeypatch.setattr(segment.adbc, "connect", noted(segment.adbc.connect))
    return found


MINUTE = (GreaterThanOrEqual(TIME, moment(30 * 60_000)), LessThan(TIME, moment(31 * 60_000)))


def test_a_minute_of_an_hour_reads_the_segments_that_hold_it(hour, connected):
    reader = reader_of(hour, *MINUTE)
    spans = reader.partitions()
    assert [(span.log.partition, span.path.name) for span in spans] == [
        (number, sorted((hour / "partitions").glob(f"t@*/{number}/0*.sqlite"))[30].name) for number in range(2)
    ]
    # Planning reads the state, the newest file's metadata, and the files in which the minute begins and ends: of 60
    # files a partition, it does not open 57.
    assert {name for name in connected if name.startswith("t/0/0")} == {
        f"t/0/{sorted((hour / 'partitions').glob('t@*/0/0*.sqlite'))[index].name}" for index in (30, 31, 59)
    }
    del connected[:]
    rows = [row for span in spans for batch in reader.read(span) for row in batch.to_pylist()]
    assert [row["value"] for row in rows] == [b"30:%d" % second for second in range(0, 60, 10)] * 2
    assert set(connected) == {f"t/{span.log.partition}/{span.path.name}" for span in spans}


def test_times_in_options_read_equally_few_files(hour, connected):
    times = {"startingTimestamp": str(START_MS + 1_800_000), "endingTimestamp": str(START_MS + 1_860_000)}
    assert len(values(hour, **times)) == 12
    assert len({name for name in connected if re.match(r"t/\d/0", name)}) == 6


def test_an_offset_is_read_from_one_file(hour, connected):
    reader = reader_of(hour, EqualTo(OFFSET, 100), EqualTo(("partition",), 1))
    (span,) = reader.partitions()
    del connected[:]
    assert [(row["partition"], row["offset"]) for row in rows_of_span(reader, span)] == [(1, 100)]
    assert set(connected) == {f"t/1/{span.path.name}"}


def rows_of_span(reader, span):
    return [row for batch in reader.read(span) for row in batch.to_pylist()]


def test_a_filter_that_no_row_passes_reads_nothing(hour, connected):
    for filters in (
        [GreaterThan(OFFSET, 5), LessThan(OFFSET, 3)],
        [EqualTo(("topic",), "u")],
        [EqualTo(("partition",), 7)],
        [LessThan(TIME, moment(0))],
        [GreaterThanOrEqual(TIME, moment(3_600_000))],
        [EqualTo(TIME, moment(5))],
    ):
        reader = reader_of(hour, *filters)
        assert reader.partitions() == []
        assert list(reader.read(InputPartition(None))) == []


def test_a_pickled_reader_is_small(hour):
    reader = reader_of(hour)
    reader.partitions()
    assert len(pickle.dumps(reader)) < 2_000
    assert len(pickle.dumps(reader.partitions()[0])) < 1_000


def test_unsupported_filters_are_handed_back(hour):
    reader = FilteringReader(batch_options({"path": str(hour)}), tuple(COLUMNS))
    contains = StringContains(("content_type",), "json")
    assert list(reader.pushFilters([contains, EqualTo(OFFSET, 5)])) == [contains]


# --- through Spark ----------------------------------------------------------------------------------------------------


def loaded(spark, path, **options):
    return spark.read.format("portalmq").options(**options).load(str(path))


@pytest.mark.spark
def test_every_message_is_a_row_once(spark, data):
    rows = loaded(spark, data).collect()
    assert sorted((row.topic, row.partition, bytes(row.value)) for row in rows) == sorted(
        ("t", number, b"%d" % value) for number in range(2) for value in range(30)
    )


@pytest.mark.spark
def test_every_column_holds_what_was_sent(spark, tmp_path):
    due = START_MS + 60_000
    with written(tmp_path) as directory:
        directory.topic("t")
        directory.put("t", Record(b"plain"))
        directory.put(
            "t",
            Record(
                b"{}",
                key=b"k",
                content_type="application/json",
                headers={"a": "1", "b": "2"},
                deliver_at_ms=due,
                expires_at_ms=due + 1,
                priority=3,
            ),
        )
    plain, rich = loaded(spark, tmp_path).orderBy("offset").collect()
    assert (plain.topic, plain.partition, plain.offset, plain.value) == ("t", 0, 1, bytearray(b"plain"))
    assert (plain.timestamp, plain.appended_at) == (local(START_MS), local(START_MS))
    assert (plain.content_type, plain.priority, plain.leader_epoch) == ("application/octet-stream", 0, 1)
    unused = ("key", "headers", "deliver_at", "expires_at", "producer_id", "sequence")
    assert [plain[name] for name in unused] == [None] * len(unused)
    assert set(plain.asDict()) == set(COLUMNS)
    assert (bytes(rich.key), bytes(rich.value), rich.content_type) == (b"k", b"{}", "application/json")
    assert (rich.headers, rich.priority) == ({"a": "1", "b": "2"}, 3)
    assert (rich.deliver_at, rich.expires_at) == (local(due), local(due + 1))


def local(ms: int) -> datetime:
    """Return the time as PySpark shows a timestamp: naive, in the zone of this machine."""
    return datetime.fromtimestamp(ms // 1000) + timedelta(milliseconds=ms % 1000)


@pytest.mark.spark
def test_unneeded_columns_are_not_read(spark, data):
    narrow = loaded(spark, data, columns="value,offset")
    assert narrow.columns == ["value", "offset"]
    assert narrow.count() == 60
    by_schema = spark.read.format("portalmq").schema("offset long, topic string").load(str(data))
    assert by_schema.filter("offset < 5").agg({"offset": "sum"}).first()[0] == 2 * sum(range(1, 5))


# SQL filters of one column each; the test fills in {…}.
CONDITIONS = [
    "offset {compare} {offset}",
    "offset in ({offset}, {other})",
    "offset not in ({offset}, {other})",
    "offset between {offset} and {other}",
    "offset <=> {offset}",
    "offset <> {offset}",
    "offset = {offset} or offset = {other}",
    "partition {compare} {partition}",
    "partition in ({partition}, 5)",
    "topic like '{letter}%'",
    "topic <> '{letter}'",
    "topic = '{letter}'",
    "timestamp {compare} timestamp_millis({ms})",
    "timestamp {compare} timestamp_micros({ms}500)",
    "appended_at {compare} timestamp_millis({ms})",
    "not (timestamp {compare} timestamp_millis({ms}))",
    "length(value) = 1",
    "timestamp {compare} timestamp'{day} {clock}'",
    "date_trunc('minute', timestamp) = timestamp'{day} {minute}'",
    "key is null",
    "key is not null",
    "value > x'32'",
]


def condition(chance: random.Random, zone: timedelta) -> str:
    ms = START_MS + chance.choice([0, 60_000, 120_000, 180_000]) + chance.choice([-1, 0, 1])
    seen = datetime(1970, 1, 1) + timedelta(milliseconds=ms) + zone
    return chance.choice(CONDITIONS).format(
        compare=chance.choice(["=", "<", "<=", ">", ">=", "<>"]),
        offset=chance.randrange(-1, 36),
        other=chance.randrange(-1, 36),
        partition=chance.randrange(3),
        letter=chance.choice("tux"),
        ms=ms,
        day=seen.date(),
        clock=seen.time().isoformat("milliseconds"),
        minute=seen.time().isoformat("minutes") + ":00",
    )


@pytest.mark.spark
@pytest.mark.parametrize(
    ("zone", "ahead_h"), [("Asia/Tokyo", 9), pytest.param("America/New_York", -5, marks=pytest.mark.prove)]
)
def test_pushed_filters_pass_the_same_rows_as_spark(spark, data, zone, ahead_h):
    with written(data) as directory:
        directory.topic("u")
        directory.put("u", *[Record(b"%d" % number, key=b"k") for number in range(5)])
    columns = "topic, partition, offset, key, value, timestamp, appended_at"
    found = loaded(spark, data).selectExpr(*columns.split(", "))
    alone = spark.createDataFrame(found.collect(), found.schema)  # Spark has no source to push a filter to
    spark.conf.set("spark.sql.session.timeZone", zone)
    try:
        chance = random.Random(zone)
        counts = set()
        for _ in range(8):
            wanted = " and ".join(
                f"({condition(chance, timedelta(hours=ahead_h))})" for _ in range(chance.choice([1, 1, 2]))
            )
            expected, plain, pushed = (
                sorted(frame.filter(wanted).select("topic", "partition", "offset").collect())
                for frame in (alone, found, loaded(spark, data, pushdown="true"))
            )
            assert plain == expected, wanted
            assert pushed == expected, wanted
            counts.add(len(expected))
        assert len(counts) > 2  # the counts differ, so the test is meaningful
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")


@pytest.mark.spark
def test_one_data_frame_may_be_filtered_in_many_ways(spark, data):
    """Spark returns wrong rows here if a reader takes filters: so readers take none by default."""
    whole = loaded(spark, data)
    few, others = whole.filter("offset <= 3"), whole.filter("offset > 27 and offset < 30")
    assert [few.count(), whole.count(), others.count(), whole.count()] == [6, 60, 4, 60]
    assert sorted(row.offset for row in few.union(others).collect()) == [1, 1, 2, 2, 3, 3, 28, 28, 29, 29]
    assert few.join(others, ["partition", "offset"]).count() == 0


def plan_of(frame) -> str:
    """Return the last plan, without the scan's description."""
    return frame._jdf.queryExecution().executedPlan().toString().replace("RuntimeFilters", "")


@pytest.mark.spark
def test_spark_does_not_evaluate_pushed_filters_again(spark, hour):
    def plan(wanted: str) -> str:
        return plan_of(loaded(spark, hour, topic="t", pushdown="true").filter(wanted))

    assert "Filter" not in plan("timestamp >= '2023-11-14 22:30:00' and timestamp < '2023-11-14 22:31:00'")
    assert "Filter" not in plan("topic = 't' and partition in (0, 1) and offset > 5")
    assert "Filter" in plan("length(value) = 5")


@pytest.mark.spark
def test_a_minute_of_an_hour_is_a_task_a_partition(spark, hour):
    whole = loaded(spark, hour, topic="t", pushdown="true")
    minute = whole.filter("timestamp >= '2023-11-14 22:30:00' and timestamp < '2023-11-14 22:31:00'")
    assert (minute.rdd.getNumPartitions(), minute.count()) == (2, 12)
    times = {"startingTimestamp": "2023-11-14T22:30:00Z", "endingTimestamp": "2023-11-14T22:31:00Z"}
    by_options = loaded(spark, hour, topic="t", **times)
    assert (by_options.rdd.getNumPartitions(), by_options.count()) == (2, 12)
    assert loaded(spark, hour, topic="t").rdd.getNumPartitions() == 120


@pytest.mark.spark
def test_a_topic_is_a_view_in_sql(spark, data):
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW messages USING portalmq OPTIONS (path '{data}', topic 't')")
    found = spark.sql("SELECT partition, count(*) AS n FROM messages WHERE offset <= 10 GROUP BY 1 ORDER BY 1")
    assert [tuple(row) for row in found.collect()] == [(0, 10), (1, 10)]


@pytest.mark.spark
def test_an_error_reaches_the_user_as_a_sentence(spark, data, tmp_path):
    def told(path: Path, schema: str = "", **options: str) -> str:
        reader = spark.read.format("portalmq").options(**options)
        with pytest.raises((AnalysisException, PySparkException)) as raised:
            (reader.schema(schema) if schema else reader).load(str(path)).count()
        return str(raised.value)

    assert "there is no option 'topics': did you mean topic?" in told(data, topics="t")
    assert "there is no directory" in told(tmp_path / "nowhere")
    assert "there is no topic 'x' in" in told(data, topic="x")
    assert "no column 'values' in table messages: its columns are topic" in told(data, columns="values")
    assert "column 'offset' is bigint, not int" in told(data, schema="offset int")
    path = sorted(data.glob("partitions/t@*/0/0*.sqlite"))[1]
    path.chmod(0o644)
    path.write_bytes(b"torn")
    sentence = told(data)
    assert str(path) in sentence
    assert "It was left as it is. Name the data directory of another replica as well" in sentence


@pytest.mark.spark
def test_the_document_s_examples_run(spark, data, capsys):
    document = (Path(__file__).parents[2] / "docs/SPARK.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", document, re.S) if "data/5000" in block]
    blocks = [block for block in blocks if "readStream" not in block and "writeStream" not in block]
    assert len(blocks) >= 4
    names = {"spark": spark}
    for block in blocks:
        exec(block.replace("data/5000", str(data)).replace("'temp_1'", "'t'"), names)
    shown = capsys.readouterr().out
    assert "|    t|        0|   30|" in shown
    assert "|2023-11-14 22:01:00|      20|" in shown
