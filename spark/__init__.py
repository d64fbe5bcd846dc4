"""PortalMQ in Spark: topics as DataFrames, batch and streaming, and a sink.

    from pyspark.sql import SparkSession
    import portalmq.spark

    spark = SparkSession.builder.getOrCreate()
    portalmq.spark.register(spark)
    messages = spark.read.format("portalmq").option("path", "data/5000").option("topic", "temp_1").load()

Two doors lead to the same rows: the brokers' data directories (option `path`), read as they stand while the brokers
write, and their HTTP interface (option `bootstrap`). Only committed messages are shown, each once, whatever the number
of replicas. The room reads the storage by its public description alone (broker/storage/SCHEMA.md) and imports nothing
of the broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Make the format "portalmq" known to this session, and let Spark hand its filters down to it."""
    from portalmq.spark.source import PortalMQ

    spark.dataSource.register(PortalMQ)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
