"""A streaming query from a topic through a shuffle into another, in a driver process that can be killed at any moment.

    job = SinkJob(folder)
    job.start({"path": data_dir, "topic": "t", "maxRowsPerTrigger": "300", "into": urls, "to": "out"})

as support.spark_job has it; it ends by itself when all is read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# As a script its folder is on the path, and tests/ is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.spark_job import SparkJob, drive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


class SinkJob(SparkJob):
    script = __file__

    def offsets(self, batches: int) -> int:
        """Up to where the first so many batches read, over all partitions together."""
        if not batches:
            return 0
        *_, source = (self.folder / "checkpoint" / "offsets" / str(batches - 1)).read_text().splitlines()
        return sum(json.loads(source).values())


def started(spark: SparkSession, folder: Path, options: dict[str, str]) -> StreamingQuery:
    reading = {name: value for name, value in options.items() if name not in {"into", "to"}}
    messages = spark.readStream.format("portalmq").options(**reading).load()
    rows = messages.selectExpr("cast(value AS string) AS value", "offset % 2 AS half").repartition(3, "value")
    # Every other row has a key: it goes where the key points, the rest where its identity does.
    shown = rows.selectExpr("value", "CASE half WHEN 0 THEN value END AS key")
    writer = shown.writeStream.format("portalmq").options(bootstrap=options["into"], topic=options["to"])
    return writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()


if __name__ == "__main__":
    drive(started)
