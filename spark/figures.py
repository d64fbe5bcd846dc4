"""The figures of a throughput report, computed in Spark: data directories -> Parquet, and a bounded model.Report.

    table batches     -- one scan of all files --> Appended    volume by partition, producer and time; sizes by topic
    table deliveries  -- the groups' records ----> Delivered   first hand-outs by group, time and latency
    table groups      -- state.sqlite -----------> Delivered   lag

Each figure is a DataFrame made of these aggregates. All of it goes to Parquet; what is collected is cut to the limits
of report/model.py before it leaves Spark.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from portalmq.spark import appended, delivered
from portalmq.spark.appended import Appended
from portalmq.spark.delivered import Delivered
from portalmq.spark.directories import Directories
from portalmq.spark.report import model
from portalmq.spark.report.model import OTHERS, Report

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from portalmq.spark.origin import Log

VERSION = 1
_S, _MIN, _H = 1_000, 60_000, 3_600_000
WIDTHS_MS = (
    *(_S * n for n in (1, 2, 5, 10, 15, 30)),
    *(_MIN * n for n in (1, 2, 5, 10, 15, 30)),
    *(_H * n for n in (1, 2, 3, 6, 12)),
)
_DAY = 24 * _H
# Figures are small queries: some at a time keep the cores busy between them.
FIGURES_AT_A_TIME = 4
# A figure of so many rows, some MB, is collected; a longer one stays in Spark.
FEW_ROWS = 100_000

_TABLES = {
    "batches": {"appended_at": "at_ms"},
    "deliveries": {"at": "at_ms", "available_at": "available_ms"},
    "groups": {"oldest": "oldest_ms"},
}

Row = TypeVar("Row", bound=msgspec.Struct)


def bucket_width_ms(first_ms: int, last_ms: int, points_max: int = model.SERIES_POINTS) -> int:
    """The narrowest round width of which so many buckets, whose borders are its multiples, hold both moments."""
    days = 1
    widths = iter(WIDTHS_MS)
    while True:
        width = next(widths, None)
        if width is None:
            width, days = days * _DAY, days * 2
        if last_ms // width - first_ms // width < points_max:
            return width


def report(
    spark: SparkSession, paths: Sequence[Path], topics: Sequence[str] | None, parquet: Path, *, made_at_ms: int
) -> Report:
    """Computes all figures, writes them below `parquet`, and answers them cut to what a person looks at.

    Raises SourceError for what stands in the directories, as far as it is seen before Spark begins.
    """
    sources = [str(path) for path in paths]
    logs = Directories(sources, topics).logs()
    read = _Reader(spark, sources, topics)
    with ThreadPoolExecutor(FIGURES_AT_A_TIME) as pool, ExitStack() as kept:
        batch_rows, delivery_rows, group_rows = pool.map(read, *zip(*_TABLES.items(), strict=True))
        for frame in (batch_rows, delivery_rows, group_rows):
            kept.callback(frame.unpersist)
        of_batches, of_deliveries = pool.map(_span, (batch_rows, delivery_rows), ("kind", "event"))
        first, last = _union(of_batches.shown, of_deliveries.shown)
        as_of_ms = max(of_batches.end_ms, of_deliveries.end_ms)
        bucket_ms = bucket_width_ms(first, last)
        put_in = appended.appended(_logs(spark, logs), batch_rows, bucket_ms)
        taken_out = delivered.delivered(delivery_rows, group_rows, bucket_ms, as_of_ms)
        for frame in (put_in.volume, put_in.sizes, taken_out.latency):
            kept.callback(frame.unpersist)
        figures = _Figures(put_in, taken_out, parquet)
        return Report(
            version=VERSION,
            made_at_ms=made_at_ms,
            sources=sources,
            bucket_ms=bucket_ms,
            totals=_totals(put_in, taken_out),
            **figures.collected(pool),
            left_out=figures.left_out,
        )


class _Reader:
    """Reads a table of the data directories, its times as Unix ms."""

    def __init__(self, spark: SparkSession, paths: Sequence[str], topics: Sequence[str] | None) -> None:
        self._spark = spark
        self._paths = list(paths)
        self._options = {"topic": ",".join(topics)} if topics else {}

    def __call__(self, table: str, times: dict[str, str]) -> DataFrame:
        frame = self._spark.read.format("portalmq").options(table=table, **self._options).load(self._paths)
        for name, as_ms in times.items():
            frame = frame.withColumn(as_ms, f.unix_millis(name)).drop(name)
        return frame.persist()


def _logs(spark: SparkSession, logs: Sequence[Log]) -> DataFrame:
    columns = ("topic", "partition", "start_offset", "end_offset")
    types = (pa.string(), pa.int32(), pa.int64(), pa.int64())
    table = pa.table(
        [pa.array([getattr(log, name) for log in logs], kind) for name, kind in zip(columns, types, strict=True)],
        names=list(columns),
    )
    return spark.createDataFrame(table).coalesce(1)


class _Span(NamedTuple):
    """`shown` is from the first to the last row that a series shows, `end_ms` when the last of all was written."""

    shown: tuple[int, int] | None
    end_ms: int


def _span(rows: DataFrame, what: str) -> _Span:
    at = f.when(f.col(what).isin("messages", "epoch", "granted", "committed"), f.col("at_ms"))
    first, last, end = rows.agg(f.min(at), f.max(at), f.max("at_ms")).collect()[0]
    return _Span(None if first is None else (first, last), end or 0)


def _union(*spans: tuple[int, int] | None) -> tuple[int, int]:
    known = [span for span in spans if span is not None]
    return (min(span[0] for span in known), max(span[1] for span in known)) if known else (0, 0)


def _totals(put_in: Appended, taken_out: Delivered) -> model.Totals:
    names = delivered.groups(taken_out).select("group").distinct()
    row = appended.totals(put_in).crossJoin(names.agg(f.count("*").alias("groups"))).collect()[0]
    return msgspec.convert(row.asDict(), model.Totals)


class _Figures:
    """The lists of the report. Each is written whole, then cut."""

    def __init__(self, put_in: Appended, taken_out: Delivered, parquet: Path) -> None:
        self._in, self._out = put_in, taken_out
        self._parquet = parquet
        self.left_out: dict[str, int] = {}

    def collected(self, pool: ThreadPoolExecutor) -> dict[str, Any]:
        most = f.desc("messages")
        # Those that say which topics, partitions and groups are shown come first.
        topics, partitions, groups_shown, *rest = self._all(
            pool,
            lambda: self._top(
                "topics", appended.topics(self._in), model.TopicFigures, model.TOPICS_SHOWN, most, f.asc("topic")
            ),
            lambda: self._top(
                "partitions",
                appended.partitions(self._in),
                model.PartitionFigures,
                model.PARTITIONS_SHOWN,
                *(most, f.asc("topic"), f.asc("partition")),
            ),
            lambda: self._top(
                "groups",
                delivered.groups(self._out),
                model.GroupFigures,
                model.GROUPS_SHOWN,
                *(f.desc("delivered"), f.asc("group"), f.asc("topic")),
            ),
            lambda: self._top(
                "producers",
                appended.producers(self._in),
                model.ProducerFigures,
                model.PRODUCERS_SHOWN,
                *(most, f.asc("producer_id")),
            ),
            lambda: self._top(
                "lag",
                delivered.lag(self._out),
                model.LagFigures,
                model.LAG_SHOWN,
                *(f.desc("lag"), f.asc("group"), f.asc("topic"), f.asc("partition")),
            ),
            lambda: self._top(
                "fail_overs",
                appended.fail_overs(self._in),
                model.FailOver,
                model.FAIL_OVERS_SHOWN,
                *(f.desc_nulls_last("gap_ms"), f.asc("at_ms"), f.asc("topic"), f.asc("partition")),
            ),
        )
        names = [figure.topic for figure in topics]
        places = [f"{figure.topic}/{figure.partition}" for figure in partitions]
        of_groups = sorted({figure.group for figure in groups_shown})
        in_place = f.concat_ws("/", "topic", f.col("partition").cast("string")).isin(places)
        in_groups = f.col("group").isin(of_groups)
        throughput, by_partition, sizes, latencies, over_time, counts = self._all(
            pool,
            lambda: self._few("throughput", appended.throughput(self._in), model.Throughput, ["at_ms"], others=names),
            lambda: self._few(
                "partition_throughput",
                appended.partition_throughput(self._in),
                model.PartitionThroughput,
                ["at_ms", "topic", "partition"],
                where=in_place,
            ),
            lambda: self._few(
                "sizes", appended.sizes(self._in), model.SizeBucket, ["from_bytes", "to_bytes"], others=names
            ),
            lambda: self._few(
                "latencies", delivered.latencies(self._out), model.LatencyBucket, ["group", "from_ms"], where=in_groups
            ),
            lambda: self._few(
                "latency_over_time",
                delivered.latency_over_time(self._out),
                model.LatencyPoint,
                ["at_ms", "group"],
                where=in_groups,
            ),
            lambda: self._top(
                "deliveries",
                delivered.deliveries(self._out),
                model.Deliveries,
                model.DELIVERIES_SHOWN,
                *(f.asc("delivery"), most, f.asc("group"), f.asc("topic")),
            ),
        )
        producers, lag, fail_overs = rest
        return {
            "topics": topics,
            "partitions": partitions,
            "throughput": throughput,
            "partition_throughput": by_partition,
            "sizes": sizes,
            "producers": producers,
            "groups": groups_shown,
            "latencies": latencies,
            "latency_over_time": over_time,
            "deliveries": counts,
            "lag": lag,
            "fail_overs": sorted(fail_overs, key=lambda each: (each.at_ms, each.topic, each.partition)),
        }

    @staticmethod
    def _all(pool: ThreadPoolExecutor, *figures: Callable[[], list[Any]]) -> list[list[Any]]:
        return [future.result() for future in [pool.submit(figure) for figure in figures]]

    def _written(self, name: str, frame: DataFrame, *order: Column) -> DataFrame | pa.Table:
        """All rows of a figure, in order, when they are in its Parquet file. Few rows come as one Arrow table and are
        written here: a query, and not three of them. What there may be any number of is written by Spark, and read
        again by whoever needs a part of it. One file, since every figure is an aggregate."""
        rows = frame.coalesce(1).orderBy(*order).limit(FEW_ROWS + 1).toArrow()
        path = self._parquet / name
        if rows.num_rows <= FEW_ROWS:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            pq.write_table(rows, path / "part-00000.parquet")
            return rows
        frame.coalesce(1).write.mode("overwrite").parquet(str(path))
        return frame.sparkSession.read.schema(frame.schema).parquet(str(path))

    def _top(self, name: str, frame: DataFrame, kind: type[Row], limit: int, *order: Column) -> list[Row]:
        written = self._written(name, frame, *order)
        if isinstance(written, pa.Table):
            rows, found = written.slice(0, limit), written.num_rows
        else:
            rows, found = written.orderBy(*order).limit(limit).toArrow(), written.count()
        if found > rows.num_rows:
            self.left_out[name] = found - rows.num_rows
        return [msgspec.convert(row, kind) for row in rows.to_pylist()]

    def _few(
        self,
        name: str,
        frame: DataFrame,
        kind: type[Row],
        order: list[str],
        *,
        where: Column | None = None,
        others: Sequence[str] | None = None,
    ) -> list[Row]:
        """A list that is bounded by what is shown. What belongs to other topics than `others` is summed up."""
        if others is not None:
            order = [*order, "topic"]
        written = self._written(name, frame, *map(f.asc, order))
        is_whole = not {"topics", "partitions", "groups"}.intersection(self.left_out)
        if isinstance(written, pa.Table):
            if is_whole:
                return [msgspec.convert(row, kind) for row in written.to_pylist()]
            written = frame.sparkSession.createDataFrame(written)
        if where is not None:
            written = written.where(where)
        if others is not None and "topics" in self.left_out:
            topic = f.when(f.col("topic").isin(list(others)), f.col("topic")).otherwise(f.lit(OTHERS))
            sums = [f.sum(column).alias(column) for column in ("messages", "bytes") if column in written.columns]
            written = written.withColumn("topic", topic).groupBy(*order).agg(*sums)
        return [msgspec.convert(row, kind) for row in written.orderBy(*order).toArrow().to_pylist()]
