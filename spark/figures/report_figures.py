"""Computes the figures of a throughput report in Spark: data directories -> Parquet, and a bounded model.Report.

    table batches     -- one scan of all files -> AppendedFigures   volume by partition, producer and time; sizes
    table deliveries  -- the groups' records ---> DeliveredFigures  first deliveries by group, time and latency
    table groups      -- state.sqlite ----------> DeliveredFigures  lag

It takes two queries: the first reads the tables, persists them, and finds the range of times; the second computes all
lists from these aggregates. Everything goes to Parquet; the collected lists are cut to the limits of report/model.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from portalmq.spark.figures import appended, delivered, lists
from portalmq.spark.figures.appended import AppendedFigures
from portalmq.spark.figures.delivered import DeliveredFigures
from portalmq.spark.figures.lists import Series, Top
from portalmq.spark.files.directories import Directories
from portalmq.spark.report import model
from portalmq.spark.report.model import Report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from portalmq.spark.origin import PartitionLog

VERSION = 1
_S, _MIN, _H = 1_000, 60_000, 3_600_000
WIDTHS_MS = (
    *(_S * n for n in (1, 2, 5, 10, 15, 30)),
    *(_MIN * n for n in (1, 2, 5, 10, 15, 30)),
    *(_H * n for n in (1, 2, 3, 6, 12)),
)
_DAY = 24 * _H

# The columns that the report uses, and its times as Unix ms. Other columns are not read.
_TABLES = {
    "batches": (
        ("topic", "partition", "kind", "messages", "bytes", "keyed", "sizes", "leader_epoch", "producer_id"),
        {"appended_at": "at_ms"},
    ),
    "deliveries": (
        ("topic", "partition", "group", "mode", "event", "record_offset", "first_offset", "messages", "delivery"),
        {"at": "at_ms", "available_at": "available_ms"},
    ),
    "groups": (("topic", "partition", "group", "mode", "lag"), {"oldest": "oldest_ms"}),
}
_BY_TIME = attrgetter("at_ms", "topic", "partition")
_SHOWN_IN_SERIES = ("messages", "epoch", "granted", "committed")


def bucket_width_ms(first_ms: int, last_ms: int, points_max: int = model.SERIES_POINTS) -> int:
    """Return the narrowest round width at which `points_max` buckets, aligned to its multiples, cover both times."""
    days = 1
    widths = iter(WIDTHS_MS)
    while True:
        width = next(widths, None)
        if width is None:
            width, days = days * _DAY, days * 2
        if last_ms // width - first_ms // width < points_max:
            return width


def compute(
    spark: SparkSession, paths: Sequence[Path], topics: Sequence[str] | None, parquet: Path, *, made_at_ms: int
) -> Report:
    """Compute all figures, write them below `parquet`, and return them cut to their limits for display.

    Raises SourceError for faults in the directories that are visible before Spark starts.
    """
    sources = [str(path) for path in paths]
    logs = Directories(sources, topics).logs()
    with ExitStack() as kept:
        read = {table: _read(spark, table, sources, topics) for table in _TABLES}
        for frame in read.values():
            kept.callback(frame.unpersist)
        found_range = _time_range(read)
        bucket_ms = bucket_width_ms(found_range.first_ms or 0, found_range.last_ms or 0)
        appended_figures = appended.appended(_logs(spark, logs), read["batches"], bucket_ms)
        delivered_figures = delivered.delivered(
            read["deliveries"],
            read["groups"],
            bucket_ms,
            found_range.as_of_ms or 0,
            has_again=bool(found_range.has_again),
            has_ended=bool(found_range.has_ended),
        )
        for frame in (appended_figures.volume, appended_figures.sizes, delivered_figures.latency):
            kept.callback(frame.unpersist)
        tops, series = _tops(appended_figures, delivered_figures), _series(appended_figures, delivered_figures)
        totals = {
            "totals": appended.totals(appended_figures),
            "groups_total": delivered.number_of_groups(delivered_figures),
        }
        found = lists.tables({**totals, **lists.queries([*tops, *series])})
        made = lists.collected(tops, series, found, parquet)
        return Report(
            version=VERSION,
            made_at_ms=made_at_ms,
            sources=sources,
            bucket_ms=bucket_ms,
            totals=msgspec.convert(
                {name: value for each in totals for name, value in found[each].to_pylist()[0].items()}, model.Totals
            ),
            **{
                **made.lists,
                "fail_overs": sorted(made.lists["fail_overs"], key=attrgetter("at_ms", "topic", "partition")),
            },
            left_out=dict(made.left_out),
        )


# --- input -----------------------------------------------------------------------------------------------------------


def _read(spark: SparkSession, table: str, paths: Sequence[str], topics: Sequence[str] | None) -> DataFrame:
    """Return a persisted table of the data directories, its times as Unix ms."""
    columns, times = _TABLES[table]
    options = {"topic": ",".join(topics)} if topics else {}
    reader = spark.read.format("portalmq").options(table=table, columns=",".join((*columns, *times)), **options)
    as_ms = [f.unix_millis(name).alias(ms) for name, ms in times.items()]
    return reader.load(list(paths)).select(*columns, *as_ms).persist()


def _logs(spark: SparkSession, logs: Sequence[PartitionLog]) -> DataFrame:
    columns = ("topic", "partition", "start_offset", "end_offset")
    types = (pa.string(), pa.int32(), pa.int64(), pa.int64())
    table = pa.table(
        [pa.array([getattr(log, name) for log in logs], kind) for name, kind in zip(columns, types, strict=True)],
        names=list(columns),
    )
    return spark.createDataFrame(table).coalesce(1)


class _TimeRange(NamedTuple):
    """The times of the first and last row of a series, and of the last record of all; and whether there are repeated
    deliveries, or deleted groups. None without rows."""

    first_ms: int | None
    last_ms: int | None
    as_of_ms: int | None
    has_again: bool | None
    has_ended: bool | None


def _time_range(read: Mapping[str, DataFrame]) -> _TimeRange:
    nothing = (f.lit(None).cast(kind).alias(name) for name, kind in (("event", "string"), ("delivery", "int")))
    event, delivery = nothing
    rows = (
        read["batches"]
        .select(f.col("kind").alias("event"), delivery, "at_ms")
        .unionAll(read["deliveries"].select("event", "delivery", "at_ms"))
        # This needs nothing of the groups, but reads and persists them in the same query.
        .unionAll(read["groups"].select(event, delivery, f.lit(None).cast("long").alias("at_ms")))
    )
    at = f.when(f.col("event").isin(*_SHOWN_IN_SERIES), f.col("at_ms"))
    is_again, is_end = f.expr(delivered.AGAIN), f.col("event") == "ended"
    return _TimeRange(
        *rows.agg(f.min(at), f.max(at), f.max("at_ms"), f.bool_or(is_again), f.bool_or(is_end)).collect()[0]
    )


# --- output ----------------------------------------------------------------------------------------------------------


def _tops(stored: AppendedFigures, read: DeliveredFigures) -> list[Top]:
    most, place = "-messages", ("topic", "partition")
    return [
        Top("topics", appended.topics(stored), model.TopicFigures, (most, "topic"), model.TOPICS_SHOWN),
        Top("partitions", appended.partitions(stored), model.PartitionFigures, (most, *place), model.PARTITIONS_SHOWN),
        Top(
            "producers", appended.producers(stored), model.ProducerFigures, (most, "producer_id"), model.PRODUCERS_SHOWN
        ),
        Top("groups", delivered.groups(read), model.GroupFigures, ("-delivered", "group", "topic"), model.GROUPS_SHOWN),
        Top(
            "deliveries",
            delivered.deliveries(read),
            model.Deliveries,
            ("delivery", most, "group", "topic"),
            model.DELIVERIES_SHOWN,
        ),
        Top("lag", delivered.lag(read), model.LagFigures, ("-lag", "group", *place), model.LAG_SHOWN),
        Top(
            "fail_overs",
            appended.fail_overs(stored),
            model.FailOver,
            ("-gap_ms", "at_ms", *place),
            model.FAIL_OVERS_SHOWN,
        ),
    ]


def _series(stored: AppendedFigures, read: DeliveredFigures) -> list[Series]:
    shares = appended.partition_throughput(stored)
    sizes = ("from_bytes", "to_bytes", "topic")
    return [
        Series(
            "throughput", appended.throughput(stored), model.Throughput, ("at_ms", "topic"), "topics", has_others=True
        ),
        Series(
            "partition_throughput", shares, model.PartitionThroughput, ("at_ms", "topic", "partition"), "partitions"
        ),
        Series("sizes", appended.sizes(stored), model.SizeBucket, sizes, "topics", has_others=True),
        Series("latencies", delivered.latencies(read), model.LatencyBucket, ("group", "from_ms"), "groups"),
        Series(
            "latency_over_time", delivered.latency_over_time(read), model.LatencyPoint, ("at_ms", "group"), "groups"
        ),
    ]
