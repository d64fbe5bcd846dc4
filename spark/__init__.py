"""PortalMQ in Spark: topics as DataFrames, batch and streaming, and a sink.

    from pyspark.sql import SparkSession
    import portalmq.spark

    spark = SparkSession.builder.getOrCreate()
    portalmq.spark.register(spark)
    messages = spark.read.format("portalmq").option("path", "data/5000").option("topic", "temp_1").load()

The rows come from the brokers' data directories (option `path`), read while the brokers write to them, or from their
HTTP interface (option `bootstrap`). Only committed messages appear, each once, whatever the number of replicas. This
package depends on the public description of the files alone (broker/storage/SCHEMA.md) and imports nothing of the
broker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["register"]


def register(spark: SparkSession) -> None:
    """Register the format "portalmq" in this session, and allow Spark to push filters down to it."""
    from portalmq.spark.source import PortalMQ

    spark.dataSource.register(PortalMQ)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
