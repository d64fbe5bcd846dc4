"""A streaming query from a topic into Parquet files, in a driver process that can be killed at any moment.

    job = StreamJob(tmp_path)
    job.start({"path": data_dir, "topic": "t", "maxRowsPerTrigger": "500"})
    job.rows()                  the rows of the folder according to the sink's log

The rest is as in support.spark_job; it runs until it is killed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The folder of a script is on the path, but tests/ is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.spark_job import SparkJob, drive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery


def started(
    spark: SparkSession, folder: Path, options: dict[str, str], *, available_now: bool = False
) -> StreamingQuery:
    """The query, in this session."""
    messages = spark.readStream.format("portalmq").options(**options).load()
    rows = messages.selectExpr("topic", "partition", "offset", "cast(value as string) value")
    writer = rows.writeStream.format("parquet").option("checkpointLocation", str(folder / "checkpoint"))
    if available_now:
        writer = writer.trigger(availableNow=True)
    return writer.start(str(folder / "rows"))


class StreamJob(SparkJob):
    script = __file__

    def rows(self) -> list[dict[str, Any]]:
        """The rows as any reader of the sink's own log sees them: files left by a killed driver do not count."""
        import pyarrow.parquet as parquet

        rows: list[dict[str, Any]] = []
        for path in self._files():
            rows += parquet.read_table(path).to_pylist()
        return rows

    def _files(self) -> list[str]:
        """The files of the sink's log. A compacted log file repeats those before it."""
        found: dict[str, str] = {}
        for log in (self.folder / "rows" / "_spark_metadata").glob("[0-9]*"):
            _version, *entries = log.read_text().splitlines()
            for entry in map(json.loads, entries):
                found[entry["path"]] = entry["action"]
        assert set(found.values()) <= {"add"}, found
        return [path.removeprefix("file://") for path in sorted(found)]


if __name__ == "__main__":
    drive(started)
