"""Benchmark of Spark's reader: `python -m portalmq.spark.bench [--messages 10000000] [--live | --sink]`.

A new broker (`portalmq dev`, a free port, a temporary directory) is filled over HTTP and stopped. Then these run
alternately in one Spark session at local[2], so that other load affects all of them alike:

    spark     spark.read.format("portalmq"), a count and a sum over all rows, with all columns and with two
    tuples    the same by a reader that yields Python tuples from sqlite3 (over a part of the rows: it is slow)
    plain     the same columns by ADBC, without Spark, in one process and in two

The output has the medians of `--rounds`, the ratios, the peak memory of Spark's Python workers, and how many segment
files a query for a sixtieth of the time reads. `--live` measures the cost of reading for a broker that is written to
(spark_live.py), `--sink` the speed of writing (spark_sink.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from portalmq.broker.bench.harness import family_of
from portalmq.broker.bench.spark_harness import MESSAGE_BYTES, PARTITIONS, fill, session
from portalmq.broker.bench.spark_rivals import ALL, TWO, pieces, plain_rows
from portalmq.broker.bench.systems import broker
from portalmq.system import cores, peak_resident_bytes

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The part of each segment file for the slow tuple reader.
TUPLE_OFFSETS = 250_000
SEGMENT_BYTES = 1024 * 1024
LARGE_BYTES = 1024 * 1024 - 1024


def aggregate(spark: SparkSession, name: str, columns: Sequence[str], **options: str) -> tuple[int, int]:
    """Return the number of messages and the bytes of their values, from every row."""
    from pyspark.sql import functions

    frame = spark.read.format(name).options(columns=",".join(columns), **options).load()
    row = frame.agg(functions.count("*"), functions.sum(functions.length("value"))).collect()[0]
    return row[0], row[1] or 0


def plain(directory: Path, columns: tuple[str, ...], pool: ProcessPoolExecutor, processes: int) -> tuple[int, int]:
    """Scan the files with ADBC, in several processes."""
    found = [(piece.path, piece.start, piece.end) for piece in pieces(directory)]
    shares = [found[number::processes] for number in range(processes)]
    counted = list(pool.map(plain_rows, shares, [columns] * processes))
    return sum(rows for rows, _ in counted), sum(size for _, size in counted)


@dataclass(frozen=True)
class Contestant:
    name: str
    run: Callable[[], tuple[int, int]]


def contest(contestants: Sequence[Contestant], rounds: int, expected: tuple[int, int]) -> dict[str, float]:
    """Return rows per second: medians over rounds in which each reader runs once. Their counts are checked."""
    rates: dict[str, list[float]] = {each.name: [] for each in contestants}
    for number in range(rounds):
        for each in contestants:
            began = time.monotonic()
            rows, size = each.run()
            rates[each.name].append(rows / (time.monotonic() - began))
            if each.name.startswith("tuples"):
                assert size == rows * MESSAGE_BYTES
            else:
                assert (rows, size) == expected, f"{each.name} found {rows} messages of {size} bytes, not {expected}"
            print(f"  round {number + 1}: {each.name:24} {rates[each.name][-1]:12,.0f} rows/s", flush=True)
    return {name: statistics.median(measured) for name, measured in rates.items()}


def workers_peak_mb(spark: SparkSession) -> float:
    """Return the peak resident memory of one of Spark's Python workers (Linux)."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None
    java = gateway.proc.pid
    return max(((peak_resident_bytes(pid) or 0) / 1024**2 for pid in family_of(java)[1:]), default=0.0)


@dataclass(frozen=True)
class Selected:
    segments: int
    read: int
    rows: int


def sixtieth(spark: SparkSession, directory: Path, topic: str) -> Selected:
    """Query a sixtieth of the topic's time span. Return how many segment files its tasks open, and whether the result
    equals that of a full scan."""
    from pyspark.sql import functions
    from pyspark.sql.datasource import GreaterThanOrEqual, LessThan

    from portalmq.spark.options import batch_options
    from portalmq.spark.origin import spans_of
    from portalmq.spark.reading.batch import FilteringReader

    frame = spark.read.format("portalmq").options(path=str(directory), topic=topic, columns="timestamp").load()
    first, last = frame.agg(functions.min("timestamp"), functions.max("timestamp")).collect()[0]
    first, last = first.astimezone(UTC), last.astimezone(UTC)
    start = first + (last - first) / 2
    end = start + max((last - first) / 60, timedelta(milliseconds=1))
    reader = FilteringReader(batch_options({"path": str(directory), "topic": topic}), ALL)
    list(reader.pushFilters([GreaterThanOrEqual(("timestamp",), start), LessThan(("timestamp",), end)]))
    read = {str(span.path) for task in reader.partitions() for span in spans_of(task) if hasattr(span, "path")}
    pushed = spark.read.format("portalmq").options(path=str(directory), topic=topic, pushdown="true").load()
    rows = pushed.where((functions.col("timestamp") >= start) & (functions.col("timestamp") < end)).count()
    in_range = functions.col("timestamp").cast("double").between(start.timestamp(), end.timestamp() - 1e-6)
    assert rows == frame.where(in_range).count()
    return Selected(len(list(directory.glob(f"partitions/{topic}@*/*/0*.sqlite"))), len(read), rows)


def run(messages: int, rounds: int, folder: Path) -> dict[str, float]:
    data, mixed, minutes = folder / "data", folder / "mixed", folder / "minutes"
    payload = os.urandom(MESSAGE_BYTES // 2).hex().encode()
    with broker(data) as (url, _):
        rate = fill(url, "bench", iter(lambda: payload, None), messages)
    print(f"{messages:,} messages in {PARTITIONS} partitions, sent at {rate:,.0f} a second", flush=True)
    large = b"x" * LARGE_BYTES
    with broker(mixed) as (url, _):
        values = (large if number % 1000 == 0 else payload for number in range(300_000))
        fill(url, "mixed", values, 300_000)
    with broker(minutes) as (url, _):
        fill(url, "minutes", iter(lambda: payload, None), 1_000_000, segment_bytes=SEGMENT_BYTES)
    context = get_context("spawn")
    with session(folder / "spark") as spark, ProcessPoolExecutor(2, context) as pool:
        scan = {"path": str(data)}
        aggregate(spark, "portalmq", ALL, **scan)
        memory = {"scan": workers_peak_mb(spark)}
        aggregate(spark, "portalmq", ALL, path=str(mixed))
        memory["1 MiB among 100 B"] = workers_peak_mb(spark)
        contestants = []
        for name, columns in (("all", ALL), ("two", TWO)):
            tuples = {**scan, "offsets_max": str(TUPLE_OFFSETS)}
            contestants += [
                Contestant(f"spark {name}", partial(aggregate, spark, "portalmq", columns, **scan)),
                Contestant(f"tuples {name}", partial(aggregate, spark, "portalmq_tuples", columns, **tuples)),
                Contestant(f"plain {name}, 1 process", partial(plain, data, columns, pool, 1)),
                Contestant(f"plain {name}, 2 processes", partial(plain, data, columns, pool, 2)),
            ]
        plain(minutes, TWO, pool, 2)  # both processes have started
        rates = contest(contestants, rounds, (messages, messages * MESSAGE_BYTES))
        selected = sixtieth(spark, minutes, "minutes")
    return report(rates, memory, selected)


def report(rates: dict[str, float], memory: dict[str, float], selected: Selected) -> dict[str, float]:
    found = {f"{name} rows/s": round(rate) for name, rate in rates.items()}
    figures: dict[str, float] = {**found}
    for name in ("all", "two"):
        spark = rates[f"spark {name}"]
        figures[f"{name}: spark / tuples"] = round(spark / rates[f"tuples {name}"], 2)
        figures[f"{name}: spark / plain, 1 process"] = round(spark / rates[f"plain {name}, 1 process"], 2)
        figures[f"{name}: spark / plain, 2 processes"] = round(spark / rates[f"plain {name}, 2 processes"], 2)
    for name, peak_mb in memory.items():
        figures[f"peak of a Python worker, {name}, MB"] = round(peak_mb)
    figures["a sixtieth of the time: segment files there are"] = selected.segments
    figures["a sixtieth of the time: segment files read"] = selected.read
    figures["a sixtieth of the time: messages found"] = selected.rows
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m portalmq.spark.bench", description="How fast Spark reads here.")
    parser.add_argument("--messages", type=int, help="default: 10,000,000; with --sink 1,000,000")
    parser.add_argument("--rounds", type=int, default=3)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--live", action="store_true", help="the cost of reading for a broker that is written to")
    kind.add_argument("--sink", action="store_true", help="the speed of Spark's sink")
    parser.add_argument("--seconds", type=float, default=5.0, help="of one window of --live")
    parser.add_argument("--folder", type=Path, help="where to put the data (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="portalmq-bench-", dir=asked.folder) as folder:
        began = datetime.now(UTC)
        load = os.getloadavg()[0]
        if asked.live:
            from portalmq.broker.bench import spark_live as bench_live

            figures = bench_live.run(asked.rounds, asked.seconds, Path(folder))
        elif asked.sink:
            from portalmq.broker.bench import spark_sink as bench_sink

            figures = bench_sink.run(asked.messages or 1_000_000, asked.rounds, Path(folder))
        else:
            figures = run(asked.messages or 10_000_000, asked.rounds, Path(folder))
    figures["cores"] = len(cores())
    figures["load average before and after"] = load
    print(f"\n{began:%Y-%m-%d %H:%M} UTC, load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    for name, value in figures.items():
        print(f"{name:52} {value:>14,}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
