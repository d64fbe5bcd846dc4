"""A streaming query from a topic through a shuffle into another, in a driver process that can be killed at any moment.

    job = SinkJob(folder)
    job.hold(2)                 at most two batches are ever finished
    job.start({"path": data_dir, "topic": "t", "maxRowsPerTrigger": "300", "into": urls, "to": "out"})

The rest is as in support.spark_job; it ends by itself when all is read.

In a held batch a third of the rows waits: the task of the last of its three partitions reads them and passes none on,
while the others write theirs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# The folder of a script is on the path, but tests/ is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.spark_job import SparkJob, drive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


PARTITIONS = 3


class SinkJob(SparkJob):
    script = __file__

    def hold(self, batches: int | None) -> None:
        """Allow this number of finished batches in total, also of a running job; None: all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.folder / "hold.new"
        new.write_text(str(sys.maxsize if batches is None else batches))
        os.replace(new, self.folder / "hold")

    def offsets(self, batches: int) -> int:
        """The end of the first `batches` batches, summed over all partitions."""
        if not batches:
            return 0
        *_, source = (self.folder / "checkpoint" / "offsets" / str(batches - 1)).read_text().splitlines()
        return sum(json.loads(source).values())


def passed(value: str, hold: str) -> str:
    """Return the value, once its batch may finish. Runs in Spark's workers."""
    from pyspark import TaskContext

    task = TaskContext.get()
    assert task is not None
    if task.partitionId() == PARTITIONS - 1:
        while int(Path(hold).read_text()) <= int(task.getLocalProperty("streaming.sql.batchId") or 0):
            time.sleep(0.02)
    return value


def started(spark: SparkSession, folder: Path, options: dict[str, str]) -> StreamingQuery:
    reading = {name: value for name, value in options.items() if name not in {"into", "to"}}
    from pyspark.sql.functions import lit, udf

    messages = spark.readStream.format("portalmq").options(**reading).load()
    rows = messages.selectExpr("cast(value AS string) AS value", "offset % 2 AS half").repartition(PARTITIONS, "value")
    # Every other row has a key, which decides its partition; the identity of the others decides theirs.
    value = udf(passed).asNondeterministic()("value", lit(str(folder / "hold")))
    shown = rows.withColumn("value", value).selectExpr("value", "CASE half WHEN 0 THEN value END AS key")
    writer = shown.writeStream.format("portalmq").options(bootstrap=options["into"], topic=options["to"])
    return writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()


if __name__ == "__main__":
    drive(started)
