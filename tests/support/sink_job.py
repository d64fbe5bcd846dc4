"""A streaming query from a topic through a shuffle into another, in a driver process that can be killed at any moment.

    job = SinkJob(folder)
    job.start({"path": data_dir, "topic": "t", "maxRowsPerTrigger": "300", "into": urls, "to": "out"})

as support.stream_job has it; it ends by itself when all is read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# As a script its folder is on the path, and tests/ is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.stream_job import StreamJob

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


class SinkJob(StreamJob):
    def start(self, options: dict[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        with self._said().open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.folder), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """All is written. Raises AssertionError for a driver that failed."""
        assert self._process is not None
        code = self._process.poll()
        assert code in {None, 0}, f"the driver ended with {code}:\n{self.said()}"
        return code == 0

    def committed(self) -> int:
        """How many batches Spark has noted as done."""
        return sum(path.name.isdecimal() for path in (self.folder / "checkpoint" / "commits").glob("*"))

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


def _drive(folder: Path, options: dict[str, str]) -> None:
    os.environ.update(
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_SUBMIT_ARGS="--driver-memory 512m --driver-java-options -XX:TieredStopAtLevel=1 pyspark-shell",
    )
    from pyspark.sql import SparkSession

    import portalmq.spark

    spark = (
        SparkSession.builder.master("local[2]")
        .appName("sink")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    portalmq.spark.register(spark)
    started(spark, folder, options).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), json.loads(sys.argv[2]))
