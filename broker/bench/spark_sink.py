"""How fast Spark writes: `python -m portalmq.spark.bench --sink`.

By turns, into a broker of its own each round, so that none of them finds the files of those before: a Producer, which
numbers its own messages; Spark's sink, whose rows each carry an identity; and the same rows again, which the broker
knows and does not append. What is in the topic at the end is counted.
"""

from __future__ import annotations

import os
import statistics
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from portalmq import Admin
from portalmq.broker.bench.harness import broker
from portalmq.broker.bench.spark_harness import MESSAGE_BYTES, PARTITIONS, fill, session
from portalmq.spark.http_api.brokers import Brokers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASKS = 2
TOPIC = "rows"
KINDS = ("producer", "sink", "sink again")


def written(spark: SparkSession, url: str, rows: int) -> float:
    """Rows a second of one batch write. Its name is always the same: a second one writes nothing new."""
    numbers = spark.range(0, rows, 1, TASKS)
    frame = numbers.selectExpr(f"cast(lpad(cast(id AS string), {MESSAGE_BYTES}, 'x') AS binary) AS value")
    began = time.monotonic()
    frame.write.format("portalmq").options(bootstrap=url, topic=TOPIC, query="bench").mode("append").save()
    return rows / (time.monotonic() - began)


def stored(url: str) -> int:
    """How many messages the topic has; those of the leaders themselves are left out."""
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
                if not number:  # Spark's own start, and that of its workers, is not what is measured
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
