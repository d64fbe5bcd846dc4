"""Benchmark of Spark's sink: `python -m portalmq.spark.bench --sink`.

These run alternately, each round with a new broker: a Producer, which numbers its own messages; Spark's sink, whose
rows carry identities; and the same rows again, which the broker recognizes and does not append. The messages in the
topic are counted at the end.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from portalmq import Admin
from portalmq.broker.bench.spark_harness import MESSAGE_BYTES, PARTITIONS, fill, session
from portalmq.broker.bench.systems import broker
from portalmq.spark.http_api.brokers import Brokers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS = 2
TOPIC = "rows"
KINDS = ("producer", "sink", "sink again")


def written(spark: SparkSession, url: str, rows: int) -> float:
    """Return rows per second of one batch write. Its name is always the same: a second write appends nothing."""
    numbers = spark.range(0, rows, 1, TASKS)
    frame = numbers.selectExpr(f"cast(lpad(cast(id AS string), {MESSAGE_BYTES}, 'x') AS binary) AS value")
    began = time.monotonic()
    frame.write.format("portalmq").options(bootstrap=url, topic=TOPIC, query="bench").mode("append").save()
    return rows / (time.monotonic() - began)


def stored(url: str) -> int:
    """Return the number of messages in the topic, without the leaders' own records."""
    origin = Brokers([url], [TOPIC])
    spans = [span for log in origin.logs() for span in origin.spans(log, log.start_offset, log.end_offset)]
    return sum(batch.num_rows for span in spans for batch in span.batches(("offset",)))


def run(rows: int, rounds: int, folder: Path) -> dict[str, float]:
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    payload = os.urandom(MESSAGE_BYTES // 2).hex().encode()
    with session(folder / "spark") as spark:
        for number in range(rounds):
            with broker(folder / f"round-{number}") as (url, _):
                rates["producer"].append(fill(url, "bench", iter(lambda: payload, None), rows))
                with closing(Admin(url)) as admin:
                    admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=1)
                if not number:  # excludes the start of Spark and its workers
                    spark.range(TASKS).selectExpr("'warm' AS value").write.format("portalmq").options(
                        bootstrap=url, topic="warm"
                    ).mode("append").save()
                for kind in KINDS[1:]:
                    rates[kind].append(written(spark, url, rows))
                    found = stored(url)
                    assert found == rows, f"{kind}: {found} messages of {rows}"
            for kind in KINDS:
                print(f"  round {number + 1}: {kind:12} {rates[kind][-1]:12,.0f} rows/s", flush=True)
    rate = {kind: statistics.median(measured) for kind, measured in rates.items()}
    figures: dict[str, float] = {f"{kind} rows/s": round(rate[kind]) for kind in KINDS}
    return figures | {"sink / producer": round(rate["sink"] / rate["producer"], 2)}
