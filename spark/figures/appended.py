"""Figures of appended messages by topic, partition, producer, size and time, from the table `batches`.

They derive from two small aggregates of one scan: the volume by partition, producer and time bucket, and the number of
messages of each size by topic.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from portalmq.spark.figures.distribution import coarse, power_from, power_to, quantiles


@dataclass(frozen=True)
class AppendedFigures:
    """The aggregates. `logs`: topic, partition, start_offset, end_offset, empty partitions included. `batches` has the
    table's columns, and the append time as `at_ms`. `volume` and `sizes` are persisted; the caller releases them."""

    logs: DataFrame
    batches: DataFrame
    volume: DataFrame
    sizes: DataFrame
    bucket_ms: int


def appended(logs: DataFrame, batches: DataFrame, bucket_ms: int) -> AppendedFigures:
    messages = batches.where("kind = 'messages' AND messages > 0")
    volume = (
        messages.groupBy("topic", "partition", "producer_id", _bucket(bucket_ms).alias("bucket_ms"))
        .agg(
            *(f.sum(name).alias(name) for name in ("messages", "bytes", "keyed")),
            f.count("*").alias("batches"),
            f.min("at_ms").alias("first_ms"),
            f.max("at_ms").alias("last_ms"),
        )
        .coalesce(1)  # few rows: later aggregates need no shuffle
        .persist()
    )
    sizes = (
        messages.select("topic", f.explode("sizes").alias("size", "messages"))
        .groupBy("topic", coarse(f.col("size")).alias("size"), power_from(f.col("size")).alias("from_bytes"))
        .agg(f.sum("messages").alias("messages"), f.sum(_times()).alias("bytes"), f.max("size").alias("biggest"))
        .coalesce(1)  # few rows: later aggregates need no shuffle
        .persist()
    )
    return AppendedFigures(logs, batches, volume, sizes, bucket_ms)


def _times() -> Column:
    return f.col("size") * f.col("messages")


def _bucket(bucket_ms: int) -> Column:
    return f.floor(f.col("at_ms") / bucket_ms) * bucket_ms


def per_second(amount: str) -> Column:
    """Return the amount per second between the first and the last time, at least one second."""
    seconds = f.greatest(f.lit(1.0), (f.col("last_ms") - f.col("first_ms")) / 1000.0)
    return f.coalesce(f.col(amount) / seconds, f.lit(0.0))


def _sums() -> list[Column]:
    return [
        *(f.sum(name).alias(name) for name in ("messages", "bytes", "keyed")),
        f.min("first_ms").alias("first_ms"),
        f.max("last_ms").alias("last_ms"),
    ]


def totals(found: AppendedFigures) -> DataFrame:
    """Return the totals in one row."""
    peak = found.volume.groupBy("bucket_ms").agg(f.sum("messages").alias("messages"))
    # One row from each, aggregated into one: no join is needed.
    rows = (
        found.volume.agg(*_sums(), f.count_distinct("producer_id").alias("producers"))
        .unionByName(peak.agg(f.max("messages").alias("peak")), allowMissingColumns=True)
        .unionByName(
            found.logs.agg(f.count_distinct("topic").alias("topics"), f.count("*").alias("partitions")),
            allowMissingColumns=True,
        )
        .coalesce(1)
    )
    whole = rows.agg(*(f.max(name).alias(name) for name in rows.columns))
    return whole.select(
        *(f.coalesce(name, f.lit(0)).alias(name) for name in ("messages", "bytes", "topics", "partitions")),
        "producers",
        "first_ms",
        "last_ms",
        per_second("messages").alias("messages_per_s"),
        per_second("bytes").alias("bytes_per_s"),
        f.coalesce(f.col("peak") * 1000 / found.bucket_ms, f.lit(0.0)).alias("peak_messages_per_s"),
    )


def _by_partition(found: AppendedFigures) -> DataFrame:
    """Return all partitions, empty ones included. Each side is one partition, so the merge join shuffles nothing."""
    volume = found.volume.groupBy("topic", "partition").agg(*_sums())
    return found.logs.join(volume.hint("merge"), ["topic", "partition"], "left").fillna(
        0, ["messages", "bytes", "keyed"]
    )


def topics(found: AppendedFigures) -> DataFrame:
    peaks = (
        found.volume.groupBy("topic", "bucket_ms")
        .agg(f.sum("messages").alias("messages"))
        .groupBy("topic")
        .agg((f.max("messages") * 1000 / found.bucket_ms).alias("peak_messages_per_s"))
    )
    volume = (
        _by_partition(found)
        .groupBy("topic")
        .agg(
            *_sums(),
            f.count("*").alias("partitions"),
            f.coalesce(f.max("messages") / f.nullif(f.avg("messages"), f.lit(0.0)), f.lit(1.0)).alias("skew"),
        )
    )
    size = found.sizes.groupBy("topic").agg(
        quantiles(f.col("size"), f.col("messages"), f.col("bytes"), f.col("biggest")).alias("size")
    )
    return (
        volume.join(peaks.hint("merge"), "topic", "left")
        .join(size.hint("merge"), "topic", "left")
        .select(
            "topic",
            "partitions",
            *("messages", "bytes", "keyed"),
            "first_ms",
            "last_ms",
            per_second("messages").alias("messages_per_s"),
            f.coalesce("peak_messages_per_s", f.lit(0.0)).alias("peak_messages_per_s"),
            "size",
            "skew",
        )
    )


def partitions(found: AppendedFigures) -> DataFrame:
    of_topic = f.sum("messages").over(Window.partitionBy("topic"))
    share = f.coalesce(f.try_divide("messages", of_topic), f.lit(0.0)).alias("share")
    return _by_partition(found).select("topic", "partition", "messages", "bytes", "start_offset", "end_offset", share)


def throughput(found: AppendedFigures) -> DataFrame:
    return found.volume.groupBy("topic", f.col("bucket_ms").alias("at_ms")).agg(
        f.sum("messages").alias("messages"), f.sum("bytes").alias("bytes")
    )


def partition_throughput(found: AppendedFigures) -> DataFrame:
    return found.volume.groupBy("topic", "partition", f.col("bucket_ms").alias("at_ms")).agg(
        f.sum("messages").alias("messages")
    )


def sizes(found: AppendedFigures) -> DataFrame:
    return (
        found.sizes.groupBy("topic", "from_bytes")
        .agg(f.sum("messages").alias("messages"))
        .select("topic", "from_bytes", power_to(f.col("from_bytes")).alias("to_bytes"), "messages")
    )


def producers(found: AppendedFigures) -> DataFrame:
    return found.volume.groupBy("producer_id").agg(
        *(f.sum(name).alias(name) for name in ("messages", "bytes", "batches")),
        f.count_distinct("topic").alias("topics"),
        f.min("first_ms").alias("first_ms"),
        f.max("last_ms").alias("last_ms"),
    )


def fail_overs(found: AppendedFigures) -> DataFrame:
    """Return the epochs. The gap runs from the last message of earlier epochs to the first of this or a later one."""
    is_start, is_messages = f.col("kind") == "epoch", f.col("kind") == "messages"
    epochs = found.batches.groupBy("topic", "partition", "leader_epoch").agg(
        f.min(f.when(is_start, f.col("at_ms"))).alias("at_ms"),
        f.min(f.when(is_messages, f.col("at_ms"))).alias("first_ms"),
        f.max(f.when(is_messages, f.col("at_ms"))).alias("last_ms"),
    )
    of_partition = Window.partitionBy("topic", "partition").orderBy("leader_epoch")
    before = f.max("last_ms").over(of_partition.rowsBetween(Window.unboundedPreceding, -1))
    after = f.min("first_ms").over(of_partition.rowsBetween(0, Window.unboundedFollowing))
    return (
        epochs.withColumn("gap_ms", after - before)
        .where("at_ms IS NOT NULL")
        .select("topic", "partition", "leader_epoch", "at_ms", "gap_ms")
    )
