"""The harness of Spark's benchmarks: a topic filled over HTTP, and a Spark session."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from portalmq import Admin, Producer
from portalmq.broker.bench.spark_rivals import Tuples

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 4
MESSAGE_BYTES = 100
BATCH_MESSAGES = 5_000


def fill(url: str, topic: str, values: Iterator[bytes], messages: int, **config: int) -> float:
    """Fill a topic over HTTP, each batch to the next partition; return messages per second."""
    with closing(Admin(url)) as admin:
        admin.create_topic(topic, partitions=PARTITIONS, replication_factor=1, config=config)
    began = time.monotonic()
    with Producer(url, batch_messages=BATCH_MESSAGES, linger_ms=20) as producer:
        for number, value in zip(range(messages), values, strict=False):
            producer.send(topic, value, partition=number // BATCH_MESSAGES % PARTITIONS)
        producer.flush(600)
    return messages / (time.monotonic() - began)


@contextmanager
def session(folder: Path) -> Iterator[SparkSession]:
    """Return a Spark session with default settings, at local[2]."""
    from pyspark.sql import SparkSession

    import portalmq.spark

    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=sys.executable)
    spark = (
        SparkSession.builder.master("local[2]")
        .appName("bench")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    portalmq.spark.register(spark)
    spark.dataSource.register(Tuples)
    try:
        yield spark
    finally:
        spark.stop()
