"""A streaming query from a topic into Parquet files, in a driver process of its own that can be killed at any moment.

    job = StreamJob(tmp_path)
    job.start({"path": data_dir, "topic": "t", "maxRowsPerTrigger": "500"})
    job.wait_for_batches(2)     two more have been planned than the earlier starts had planned
    job.kill()                  SIGKILL to the driver, its JVM and its workers, all at once
    job.start(...)
    job.rows()                  what the sink's log says that the folder holds

Run as a script it is that driver: `python stream_job.py <folder> <options as JSON>`, until it is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

BATCHES_WITHIN_S = 90.0
POLL_S = 0.02


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


class StreamJob:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def __enter__(self) -> StreamJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

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

    def kill(self) -> None:
        """SIGKILL to the whole family, and wait until it is gone. Nothing when it does not run."""
        if self._process is None:
            return
        try:
            family = psutil.Process(self._process.pid).children(recursive=True)
            os.killpg(self._process.pid, signal.SIGKILL)
        except (psutil.NoSuchProcess, ProcessLookupError):
            family = []
        self._process.wait(30)
        self._process = None
        for process in family:  # Spark puts its workers in process groups of their own
            if process.is_running():
                process.kill()
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left, left

    def batches(self) -> int:
        """How many have been planned, since ever."""
        numbers = [
            int(path.name) for path in (self.folder / "checkpoint" / "offsets").glob("*") if path.name.isdecimal()
        ]
        return max(numbers, default=-1) + 1

    def wait_for_batches(self, more: int) -> None:
        """Until so many more were planned than are by now."""
        wanted, deadline = self.batches() + more, time.monotonic() + BATCHES_WITHIN_S
        while self.batches() < wanted:
            assert self._process is not None
            assert self._process.poll() is None, f"the driver has ended:\n{self.said()}"
            assert time.monotonic() < deadline, f"{wanted} batches: not within {BATCHES_WITHIN_S:g} s\n{self.said()}"
            time.sleep(POLL_S)

    def said(self) -> str:
        """What the latest start has said so far, the end of it."""
        return self._said().read_text("utf-8", "replace")[-4_000:]

    def _said(self) -> Path:
        return self.folder / f"driver-{self._starts}"

    def rows(self) -> list[dict[str, Any]]:
        """As any reader of the sink's own log sees them: files that a killed driver left behind do not count."""
        import pyarrow.parquet as parquet

        rows: list[dict[str, Any]] = []
        for path in self._files():
            rows += parquet.read_table(path).to_pylist()
        return rows

    def _files(self) -> list[str]:
        """A compacted log file repeats those before it."""
        found: dict[str, str] = {}
        for log in (self.folder / "rows" / "_spark_metadata").glob("[0-9]*"):
            _version, *entries = log.read_text().splitlines()
            for entry in map(json.loads, entries):
                found[entry["path"]] = entry["action"]
        assert set(found.values()) <= {"add"}, found
        return [path.removeprefix("file://") for path in sorted(found)]


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
        .appName("stream")
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


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), json.loads(sys.argv[2]))
