"""A streaming query in a driver process of its own that can be killed at any moment.

    class SomeJob(SparkJob):
        script = __file__

    job = SomeJob(folder)
    job.start({"path": data_dir, "topic": "t"})
    job.wait_for_batches(2)     two more have been planned than the earlier starts had planned
    job.kill()                  SIGKILL to the driver, its JVM and its workers, all at once
    job.start(...)

    if __name__ == "__main__":
        drive(started)

Run as a script the module is that driver: `python some_job.py <folder> <options as JSON>`. `started` gives it its
query, whose checkpoint is <folder>/checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import psutil

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StreamingQuery

BATCHES_WITHIN_S = 200.0
POLL_S = 0.02


class SparkJob:
    script: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, options: dict[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        with self._said().open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, self.script, str(self.folder), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Send SIGKILL to all its processes, and wait until they have ended. Do nothing when it does not run."""
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
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left, left

    def has_ended(self) -> bool:
        """Return whether the job is done. Raise AssertionError if the driver failed."""
        assert self._process is not None
        code = self._process.poll()
        assert code in {None, 0}, f"the driver ended with {code}:\n{self.said()}"
        return code == 0

    def batches(self) -> int:
        """The number of batches ever planned."""
        numbers = [
            int(path.name) for path in (self.folder / "checkpoint" / "offsets").glob("*") if path.name.isdecimal()
        ]
        return max(numbers, default=-1) + 1

    def committed(self) -> int:
        """The number of batches that Spark has recorded as done."""
        return sum(path.name.isdecimal() for path in (self.folder / "checkpoint" / "commits").glob("*"))

    def wait_for_batches(self, more: int) -> None:
        """Wait until `more` further batches are planned."""
        wanted, deadline = self.batches() + more, time.monotonic() + BATCHES_WITHIN_S
        while self.batches() < wanted:
            assert not self.has_ended(), f"the driver has ended:\n{self.said()}"
            assert time.monotonic() < deadline, f"{wanted} batches: not within {BATCHES_WITHIN_S:g} s\n{self.said()}"
            time.sleep(POLL_S)

    def said(self) -> str:
        """The end of the output since the latest start."""
        return self._said().read_text("utf-8", "replace")[-4_000:]

    def _said(self) -> Path:
        return self.folder / f"driver-{self._starts}"


def drive(started: Callable[[SparkSession, Path, dict[str, str]], StreamingQuery]) -> None:
    """The driver: run the query of `started`, until it ends or this process is killed.

    A killed JVM leaves its temporary files behind, so they are below the job's folder too.
    """
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)

    from pyspark.sql import SparkSession

    import portalmq.spark
    from portalmq.spark.session import settings, workers_python

    given = settings("local[2]")
    given |= {
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": f"{given['spark.driver.extraJavaOptions']} -Djava.io.tmpdir={temporary}",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=workers_python())
    builder = SparkSession.builder.master("local[2]").appName(Path(sys.argv[0]).stem)
    for name, value in given.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    portalmq.spark.register(spark)
    started(spark, folder, options).awaitTermination()
    spark.stop()
