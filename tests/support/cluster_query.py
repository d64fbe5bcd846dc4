"""The driver of an application on a Spark cluster, in a process of its own: it reads, streams, writes, and reports its
results.

    query = ClusterQuery(folder, environment)
    answers = query.run({"master": "spark://…", "bootstrap": "zk://…", "paths": […], "token": …, "topic": "t"})
    answers["batch by HTTP"]        the result of the step of this name, or {"fault": its traceback}

Run as a script it is that driver. A token is passed on stdin: only the broker's client may have it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portalmq.spark.writing.sender import REQUEST_BYTES_MAX

# The folder of a script is on the path, but tests/ is not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Hindered = Callable[[Iterator[int]], Iterator[tuple[str]]]

WITHIN_S = 600.0
STEP_S = 180.0
POLL_S = 0.02
# A written batch, in two Spark partitions; half of one of them is more than the sink sends at a time.
ROWS, ROW_BYTES = 8 * REQUEST_BYTES_MAX // 1_000, 1_000
PAGES = ("jobs", "environment", "SQL", "StreamingQuery")


class ClusterQuery:
    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self._environment = environment

    def run(self, given: dict[str, Any]) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True)
        ended = subprocess.run(
            [sys.executable, __file__, str(self.folder)],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            env=self._environment | {"PYSPARK_PYTHON": sys.executable},
            cwd=self.folder,
            timeout=WITHIN_S,
        )
        (self.folder / "driver.log").write_text(ended.stdout + ended.stderr)
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6_000:]
        answers: dict[str, Any] = json.loads((self.folder / "answers.json").read_text())
        return answers


class _Application:
    def __init__(self, spark: SparkSession, folder: Path, given: dict[str, Any]) -> None:
        self.spark = spark
        self.folder = folder
        self.topic = given["topic"]
        self.by_http = {"bootstrap": given["bootstrap"], "token": given["token"]}
        self.by_path = {"path": ",".join(given["paths"])}
        self.given = given

    def steps(self) -> dict[str, Callable[[], Any]]:
        return {
            "batch by HTTP": lambda: self.counted(self.by_http),
            "batch by path": lambda: self.counted(self.by_path),
            "stream by HTTP into Parquet": self.into_parquet,
            "stream by path into the sink": self.into_the_sink,
            "two attempts side by side": lambda: self.written_twice("rivals", _stall),
            "an executor that is killed": lambda: self.written_twice("orphans", _kill_executor),
            "a view in SQL": self.viewed,
            "a wrong token": self.refused,
            "explained": self.explained,
            "executors": self.tasks_by_host,
            "shown by the UI": self.shown,
        }

    # --- reading -----------------------------------------------------------------------------------------------------

    def read(self, door: dict[str, str]) -> DataFrame:
        return self.spark.read.format("portalmq").options(topic=self.topic, **door).load()

    def counted(self, door: dict[str, str]) -> list[list[int]]:
        """For each partition: its number, the number of rows, and the sum of their values."""
        from pyspark.sql import functions as f

        rows = self.read(door).selectExpr("partition", "cast(cast(value AS string) AS bigint) AS number")
        return sorted([*row] for row in rows.groupBy("partition").agg(f.count("*"), f.sum("number")).collect())

    def viewed(self) -> int:
        options = ", ".join(f"{name} '{value}'" for name, value in {"topic": self.topic, **self.by_http}.items())
        self.spark.sql(f"CREATE TEMPORARY VIEW numbers USING portalmq OPTIONS ({options})")
        return self.spark.sql("SELECT count(*) FROM numbers").collect()[0][0]

    def refused(self) -> str:
        from pyspark.errors import PySparkException

        try:
            self.read(self.by_http | {"token": f"not-{self.by_http['token']}"}).count()
        except PySparkException as fault:
            return str(fault)
        return "nothing was refused"

    def streamed(self, door: dict[str, str]) -> DataFrame:
        options = {"topic": self.topic, "startingOffsets": "earliest", "maxRowsPerTrigger": "600", **door}
        rows = self.spark.readStream.format("portalmq").options(**options).load()
        return rows.selectExpr("partition", "offset", "cast(value AS string) AS value")

    def into_parquet(self) -> dict[str, Any]:
        writer = self.streamed(self.by_http).writeStream.format("parquet").trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(self.folder / "read-checkpoint")).start(
            str(self.folder / "read")
        )
        assert query.awaitTermination(STEP_S), "the stream has not ended"
        rows = self.spark.read.parquet(str(self.folder / "read"))
        found = rows.selectExpr("count(*)", "count(DISTINCT partition, offset)", "sum(cast(value AS bigint))")
        return {"rows": [*found.collect()[0]], "told": _told(query)}

    # --- writing -----------------------------------------------------------------------------------------------------

    def into_the_sink(self) -> dict[str, Any]:
        writer = self.streamed(self.by_path).select("value").writeStream.format("portalmq").trigger(availableNow=True)
        checkpoint = str(self.folder / "written-checkpoint")
        query = writer.options(checkpointLocation=checkpoint, topic="copy", **self.by_http).start()
        assert query.awaitTermination(STEP_S), "the stream has not ended"
        return {"told": _told(query)}

    def written_twice(self, topic: str, hinder: Callable[[Path], Hindered]) -> list[str]:
        """Write `ROWS` rows; `hinder` makes a task with some of them run twice. Return the attempts that began."""
        signs = self.folder / topic
        signs.mkdir()
        ended = threading.Event()
        threading.Thread(target=self._watch, args=(topic, signs / "some-are-there", ended), daemon=True).start()
        try:
            numbers = self.spark.sparkContext.parallelize(range(ROWS), 2)
            rows = self.spark.createDataFrame(numbers.mapPartitions(hinder(signs)), "value string")
            rows.write.format("portalmq").options(topic=topic, **self.by_http).mode("append").save()
        finally:
            ended.set()
        return sorted(path.name for path in signs.glob("attempt-*"))

    def _watch(self, topic: str, sign: Path, ended: threading.Event) -> None:
        """Give the sign once the topic has more rows than the second Spark partition: some are of the first one, whose
        second attempt waits for the sign."""
        from portalmq import Admin

        with Admin(self.by_http["bootstrap"], token=self.by_http["token"]) as admin:
            while not ended.wait(POLL_S):
                if sum(partition.high_watermark for partition in admin.describe(topic).partitions) > ROWS // 2 + 100:
                    sign.touch()
                    return

    # --- what Spark shows of the query -------------------------------------------------------------------------------

    def explained(self) -> str:
        told: list[str] = []
        for door in (self.by_http, self.by_path):
            frame = self.read(door).where("partition = 0")
            for mode in ("extended", "formatted"):
                told.append(frame._sc._jvm.PythonSQLUtils.explainString(frame._jdf.queryExecution(), mode))
            told += [repr(frame), str(frame.schema), str(frame._jdf.queryExecution().toString())]
        return "\n".join(told)

    def tasks_by_host(self) -> dict[str, int]:
        """The number of tasks that ended on each host, including those of executors that are gone."""
        hosts: Counter[str] = Counter()
        for executor in self.api("allexecutors"):
            if executor["id"] != "driver":
                hosts[executor["hostPort"].split(":")[0]] += executor["completedTasks"]
        return hosts

    def shown(self) -> str:
        address = self.spark.sparkContext.uiWebUrl
        numbers = [each["id"] for each in self.api("sql?details=true&planDescription=true&length=1000")]
        pages = [f"{page}/" for page in PAGES] + [f"SQL/execution/?id={number}" for number in numbers]
        told = [json.dumps(self.api("sql?details=true&planDescription=true&length=1000"))]
        told += [json.dumps(self.api(name)) for name in ("environment", "stages?details=true", "jobs")]
        for page in pages:
            with urllib.request.urlopen(f"{address}/{page}", timeout=60) as answer:
                told.append(answer.read().decode("utf-8", "replace"))
        return "\n".join(told)

    def api(self, what: str) -> Any:
        context = self.spark.sparkContext
        address = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/{what}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return json.load(answer)


def _told(query: Any) -> str:
    """All that a streaming query shows of itself."""
    plan = query._jsq.streamingQuery().explainInternal(True)
    return "\n".join([plan, json.dumps(query.status), *(progress.json for progress in query.recentProgress)])


# --- faults in the first attempt of the first partition --------------------------------------------------------------


def _stall(signs: Path) -> Hindered:
    """The task stops in the middle, with some of its rows in the topic, until another attempt is as far."""
    return _hindered(signs, "middle-0.1", kills=False)


def _kill_executor(signs: Path) -> Hindered:
    """The task's executor dies in the middle, with some of its rows in the topic."""
    return _hindered(signs, "some-are-there", kills=True)


def _hindered(signs: Path, awaited: str, *, kills: bool) -> Hindered:
    # Names of this module are not available in the executors.
    middle, size, bound_s, pause_s = ROWS // 4, ROW_BYTES, STEP_S, POLL_S

    def wait_for(sign: str) -> None:
        import time

        deadline = time.monotonic() + bound_s
        while not (signs / sign).exists():
            assert time.monotonic() < deadline, f"{sign}: not within {bound_s:g} s"
            time.sleep(pause_s)

    def rows(numbers: Iterator[int]) -> Iterator[tuple[str]]:
        import psutil
        from pyspark import TaskContext

        context = TaskContext.get()
        name = f"{context.partitionId()}.{context.attemptNumber()}"
        (signs / f"attempt-{name}").touch()
        if name == "0.1":
            wait_for("some-are-there")
        for count, number in enumerate(numbers):
            yield (f"{number:0{size}}",)
            if count == middle:
                (signs / f"middle-{name}").touch()
                if name == "0.0":
                    wait_for("some-are-there")
                    wait_for(awaited)
                    if kills:
                        next(parent for parent in psutil.Process().parents() if "java" in parent.name()).kill()

    return rows


def _drive(folder: Path, given: dict[str, Any]) -> None:
    from pyspark.sql import SparkSession

    import portalmq.spark

    builder = SparkSession.builder.master(given["master"]).appName("query")
    spark = builder.config("spark.cores.max", "4").getOrCreate()  # on both workers
    portalmq.spark.register(spark)
    answers: dict[str, Any] = {}
    for name, step in _Application(spark, folder, given).steps().items():
        began = time.monotonic()
        try:
            answers[name] = step()
        except Exception:  # noqa: BLE001 - the other steps run as well
            answers[name] = {"fault": traceback.format_exc()}
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    spark.stop()
    (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), json.load(sys.stdin))
