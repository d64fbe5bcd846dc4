"""Figures of deliveries by group, from the tables `deliveries` and `groups`.

Latency is that of first deliveries. A message with delivery count 1 may have been delivered before, when it was
redriven, or returned unseen. Such messages are few, and are examined one by one; all others are counted by runs. A
message that was acked without a record of its delivery, which died with its leader, was delivered at an unknown time:
it counts, without a latency.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from portalmq.spark.figures.distribution import coarse, power_from, power_to, quantiles

_WHERE = ["group", "topic", "partition", "mode"]
# Events of messages that may be delivered for the first time again.
AGAIN = "event IN ('redriven', 'returned') OR (event = 'committed' AND delivery > 1)"
# Runs are cut at multiples of this many offsets, to find those near repeated deliveries.
_BLOCK = 1024


@dataclass(frozen=True)
class DeliveredFigures:
    """The aggregates. `deliveries` and `groups` have the tables' columns, with times as `at_ms`, `available_ms` and
    `oldest_ms`; `latency` counts first deliveries by group, topic, mode, time bucket and latency, `redelivered` the
    messages that were delivered again. The first three are persisted."""

    deliveries: DataFrame
    groups: DataFrame
    latency: DataFrame
    redelivered: DataFrame
    as_of_ms: int


def delivered(
    deliveries: DataFrame, groups: DataFrame, bucket_ms: int, as_of_ms: int, *, has_again: bool, has_ended: bool
) -> DeliveredFigures:
    """Aggregate the tables. `has_again`: some rows match AGAIN; `has_ended`: some groups were deleted."""
    again, ends = deliveries.where(AGAIN), deliveries.where("event = 'ended'")
    handed_out = deliveries.where("event IN ('granted', 'committed')")
    once, twice = (
        _first_time(_lives(rows, ends, has_ended), _lives(again, ends, has_ended)) if has_again else rows
        for rows in (handed_out.where("delivery = 1"), handed_out.where("delivery = 2"))
    )
    waited = f.greatest(f.lit(0), f.col("at_ms") - f.col("available_ms"))
    latency = (
        once.withColumn("waited_ms", waited)
        .groupBy(
            "group",
            "topic",
            "mode",
            (f.floor(f.col("at_ms") / bucket_ms) * bucket_ms).alias("bucket_ms"),
            coarse(f.col("waited_ms")).alias("latency_ms"),
            power_from(f.col("waited_ms")).alias("from_ms"),
        )
        .agg(
            f.sum("messages").alias("messages"),
            f.sum(f.col("waited_ms") * f.col("messages")).alias("total_ms"),
            f.max("waited_ms").alias("longest_ms"),
        )
        .coalesce(1)  # few rows: later aggregates need no shuffle
        .persist()
    )
    redelivered = twice.groupBy("group", "topic", "mode").agg(f.sum("messages").alias("redelivered")).coalesce(1)
    return DeliveredFigures(deliveries, groups, latency, redelivered, as_of_ms)


def _lives(rows: DataFrame, ends: DataFrame, has_ended: bool) -> DataFrame:
    """Add `life`, which tells a group from a deleted one with its name."""
    if not has_ended:
        return rows.withColumn("life", f.lit(0))
    keys = ["group", "topic", "partition"]
    known = ends.groupBy(*keys).agg(f.collect_list("record_offset").alias("ends"))
    before = f.filter("ends", lambda end: end < f.col("record_offset"))
    return rows.join(known, keys, "left").withColumn("life", f.coalesce(f.size(before), f.lit(0))).drop("ends")


def _first_time(rows: DataFrame, again: DataFrame) -> DataFrame:
    """Return the first delivery of each message. `again` has messages that may occur more than once in the rows."""
    keys = [*_WHERE, "life", "block"]
    marked = _blocks(again).select(*keys).distinct()
    pieces = _blocks(rows)
    order = Window.partitionBy(*_WHERE, "life", "offset").orderBy("record_offset")
    single = (
        pieces.join(marked, keys, "left_semi")
        .withColumn("offset", f.explode(f.expr("sequence(first_offset, first_offset + messages - 1)")))
        .withColumn("turn", f.row_number().over(order))
        .where("turn = 1")
        .withColumn("messages", f.lit(1).cast("long"))
    )
    columns = [*_WHERE, "at_ms", "available_ms", "messages"]
    return pieces.join(marked, keys, "left_anti").select(*columns).unionByName(single.select(*columns))


def _blocks(rows: DataFrame) -> DataFrame:
    """Return the same messages with runs cut at multiples of _BLOCK."""
    end = f.col("first_offset") + f.col("messages")
    low, high = f.greatest(f.col("first_offset"), f.col("block") * _BLOCK), f.least(end, (f.col("block") + 1) * _BLOCK)
    return (
        rows.where("messages > 0")
        .withColumn("block", f.explode(f.sequence(_block(f.col("first_offset")), _block(end - 1))))
        .withColumns({"first_offset": low, "messages": high - low})
    )


def _block(offset: Column) -> Column:
    return f.floor(offset / _BLOCK).cast("long")


def groups(found: DeliveredFigures) -> DataFrame:
    keys = ["group", "topic", "mode"]
    is_again = "event IN ('granted', 'committed') AND delivery > 1"
    is_done = "event = 'acked' OR (event = 'committed' AND delivery = 1)"
    # A group without an event counts as well: it gets a row without one.
    events = (
        found.deliveries.where("mode IS NOT NULL")
        .select(*keys, "event", "delivery", "messages")
        .unionByName(found.groups.select(*keys), allowMissingColumns=True)
        .groupBy(*keys)
        .agg(
            *(
                f.coalesce(f.sum(f.when(f.expr(which), f.col("messages"))), f.lit(0)).alias(name)
                for name, which in {
                    "redeliveries": is_again,
                    "nacked": "event = 'nacked'",
                    "acked": is_done,
                    "dead": "event = 'dead'",
                    "unrecorded": "event = 'acked' AND delivery = 0",
                }.items()
            )
        )
        .coalesce(1)
    )
    is_known = f.col("latency_ms").isNotNull()
    first = found.latency.groupBy(*keys).agg(
        f.sum("messages").alias("recorded"),
        f.when(f.count("latency_ms") > 0, _latency(f.when(is_known, f.col("messages")))).alias("latency_ms"),
    )
    counts = ("delivered", "redelivered", "redeliveries", "nacked", "acked", "dead")
    return (
        events.join(first.hint("merge"), keys, "left")
        .join(found.redelivered.hint("merge"), keys, "left")
        .fillna(0)
        .withColumn("delivered", f.col("recorded") + f.col("unrecorded"))
        .select("group", "topic", "mode", "latency_ms", *counts)
    )


def number_of_groups(found: DeliveredFigures) -> DataFrame:
    """Return the number of groups in one row. Groups with one name on several topics count once."""
    names = found.groups.select("group").unionAll(found.deliveries.where("mode IS NOT NULL").select("group"))
    return names.agg(f.count_distinct("group").alias("groups"))


def _latency(messages: Column) -> Column:
    return quantiles(f.col("latency_ms"), messages, f.col("total_ms"), f.col("longest_ms"))


def latencies(found: DeliveredFigures) -> DataFrame:
    return (
        found.latency.where("latency_ms IS NOT NULL")
        .groupBy("group", "from_ms")
        .agg(f.sum("messages").alias("messages"))
        .select("group", "from_ms", power_to(f.col("from_ms")).alias("to_ms"), "messages")
    )


def latency_over_time(found: DeliveredFigures) -> DataFrame:
    return (
        found.latency.where("latency_ms IS NOT NULL")
        .groupBy("group", f.col("bucket_ms").alias("at_ms"))
        .agg(f.sum("messages").alias("delivered"), _latency(f.col("messages")).alias("latency"))
        .select(
            "group", "at_ms", "delivered", f.col("latency.p50").alias("p50_ms"), f.col("latency.p99").alias("p99_ms")
        )
    )


def deliveries(found: DeliveredFigures) -> DataFrame:
    return (
        found.deliveries.where("event IN ('granted', 'committed')")
        .groupBy("group", "topic", "delivery")
        .agg(f.sum("messages").alias("messages"))
    )


def lag(found: DeliveredFigures) -> DataFrame:
    age = f.greatest(f.lit(0), f.lit(found.as_of_ms) - f.col("oldest_ms"))
    return found.groups.select(
        "group",
        "topic",
        "partition",
        "mode",
        "lag",
        f.when(f.col("oldest_ms").isNotNull(), age).alias("oldest_ms"),
    )
