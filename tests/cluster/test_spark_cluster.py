"""Reading, writing and reporting on a real Spark cluster: master, workers and executors are processes, and so are the
brokers, which require a token, and their ZooKeeper.

One application reads and writes, and the tests check its results; the report is another application. Tasks run twice on
purpose: by speculation, and after their executor is killed. PORTALMQ_SPARK_SUBMIT=1 makes the report by spark-submit as
well.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.broker_process import REPOSITORY
from support.cluster import Cluster, wait_until
from support.cluster_query import ROW_BYTES, ROWS, ClusterQuery
from support.spark_cluster import SparkCluster

from portalmq import Admin, Producer
from portalmq.spark.report import model

pytestmark = [pytest.mark.prove, pytest.mark.cluster, pytest.mark.spark, pytest.mark.timeout(900)]

TOKEN = "7oWmFhQ2xVbNcRt9"
CHROOT = "/mq"
MESSAGES = 1_000
PARTITIONS = 2
REPORT_WITHIN_S = 600.0


@dataclass(frozen=True)
class Queue:
    """Two brokers with a topic `numbers` in both, and empty ones to write to."""

    cluster: Cluster
    bootstrap: str
    admin: Admin

    @property
    def paths(self) -> list[str]:
        return [str(broker.data_dir) for broker in self.cluster.brokers.values()]

    def values(self, topic: str) -> Counter[str]:
        """Count the values of all messages in the topic."""
        found: Counter[str] = Counter()
        for partition in self.admin.describe(topic).partitions:
            offset = 0
            while offset < partition.high_watermark:
                page = self.admin.browse(topic, partition.partition, offset=offset, limit=1_000)
                found.update(bytes(message.value).decode() for message in page.messages)
                offset = page.next_offset
        return found


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Queue]:
    folder = tmp_path_factory.mktemp("queue")
    (folder / "tokens").write_text(f"{TOKEN}\n")
    with Cluster(folder, brokers=0) as cluster:
        place = f"{cluster.zookeeper.hosts}{CHROOT}"
        for number in (1, 2):
            cluster.add(number, "--zookeeper", place, "--token-file", str(folder / "tokens"))
        cluster.start(1, 2)
        with Admin(f"zk://{place}", token=TOKEN) as admin:
            for topic, partitions in (("numbers", PARTITIONS), ("copy", PARTITIONS), ("rivals", 1), ("orphans", 1)):
                admin.create_topic(topic, partitions=partitions, replication_factor=2)
            with Producer(f"zk://{place}", token=TOKEN) as producer:
                for number in range(MESSAGES):
                    producer.send("numbers", str(number), partition=number % PARTITIONS)
            yield Queue(cluster, f"zk://{place}", admin)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("spark")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def answers(queue: Queue, spark: SparkCluster) -> dict[str, Any]:
    given = {"master": spark.master, "bootstrap": queue.bootstrap, "paths": queue.paths, "token": TOKEN}
    return ClusterQuery(spark.directory / "query", spark.environment).run(given | {"topic": "numbers"})


def answer(answers: dict[str, Any], step: str) -> Any:
    found = answers[step]
    if isinstance(found, dict) and "fault" in found:
        pytest.fail(f"{step}:\n{found['fault']}")
    return found


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", ["HTTP", "path"])
def test_executors_read_each_message_once(answers: dict[str, Any], door: str):
    numbers = [range(partition, MESSAGES, PARTITIONS) for partition in range(PARTITIONS)]
    wanted = [[partition, len(each), sum(each)] for partition, each in enumerate(numbers)]
    assert answer(answers, f"batch by {door}") == wanted


def test_a_stream_by_http_writes_each_message_to_parquet_once(answers: dict[str, Any]):
    found = answer(answers, "stream by HTTP into Parquet")
    assert found["rows"] == [MESSAGES, MESSAGES, sum(range(MESSAGES))]


def test_the_work_was_done_by_executors_on_both_workers(answers: dict[str, Any]):
    tasks = answer(answers, "executors")
    assert tasks.keys() == {"127.0.0.1", "127.0.0.2"}, tasks
    assert all(tasks.values()), tasks


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_stream_from_files_writes_each_row_to_the_sink_once(answers: dict[str, Any], queue: Queue):
    answer(answers, "stream by path into the sink")
    assert queue.values("copy") == Counter(str(number) for number in range(MESSAGES))


@pytest.mark.parametrize(
    ("step", "topic"), [("two attempts side by side", "rivals"), ("an executor that is killed", "orphans")]
)
def test_rows_of_a_task_that_ran_twice_are_there_once(answers: dict[str, Any], queue: Queue, step: str, topic: str):
    attempts = answer(answers, step)
    assert {"attempt-0.0", "attempt-0.1"} <= set(attempts), "the task ran once, so the test shows nothing"
    assert queue.values(topic) == Counter(f"{number:0{ROW_BYTES}}" for number in range(ROWS))


# --- the token -------------------------------------------------------------------------------------------------------


def test_the_token_is_in_nothing_that_spark_shows_or_writes(answers: dict[str, Any], spark: SparkCluster):
    shown = {"plans": answer(answers, "explained"), "the UI": answer(answers, "shown by the UI")}
    shown |= {step: answer(answers, step)["told"] for step in answers if step.startswith("stream by")}
    assert "numbers" in shown["the UI"] or "portalmq" in shown["the UI"], "the output includes the queries"
    shown["what is said of a wrong one"] = answer(answers, "a wrong token")
    assert "give the option token" in shown["what is said of a wrong one"]
    assert answer(answers, "a view in SQL") == MESSAGES
    assert [what for what, text in shown.items() if TOKEN in text] == []
    files = contents(spark.directory)
    assert any("events" in path.parts for path in files)
    assert any(path.name == "stderr" for path in files), "the executors' logs are among them"
    assert [path for path, content in files.items() if TOKEN.encode() in content] == []


def contents(directory: Path) -> dict[Path, bytes]:
    """Return the content of all files, except for those that an ending executor removes during the reading."""
    found: dict[Path, bytes] = {}
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):
                if path.is_file():
                    found[path] = path.read_bytes()
    return found


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("portalmq", id="portalmq report"),
        pytest.param(
            "spark-submit",
            marks=pytest.mark.skipif(not os.environ.get("PORTALMQ_SPARK_SUBMIT"), reason="asked for by a variable"),
        ),
    ],
)
def test_the_report_runs_on_the_cluster(queue: Queue, spark: SparkCluster, tmp_path: Path, program: str):
    """`portalmq report` finds the right Python without a setting."""
    state = spark.state()
    before = {app["id"] for app in (*state["activeapps"], *state["completedapps"])}
    directories = [argument for path in queue.paths for argument in ("--data-dir", path)]
    arguments = [*directories, "--out", str(tmp_path / "out"), "--topic", "numbers"]
    place = Path(sys.executable).parent / program
    if program == "portalmq":
        command, python = [place, "report", "--master", spark.master], {}
    else:
        command = [place, "--master", spark.master, REPOSITORY / "spark" / "throughput.py"]
        python = {"PYSPARK_PYTHON": sys.executable}
    said = subprocess.run(
        [*map(str, command), *arguments],
        env=spark.environment | python,
        capture_output=True,
        text=True,
        timeout=REPORT_WITHIN_S,
    )
    assert said.returncode == 0, said.stderr[-4_000:]
    made = model.from_json((tmp_path / "out" / "report.json").read_bytes())
    assert (made.totals.messages, made.totals.partitions) == (MESSAGES, PARTITIONS)
    wait_until(lambda: {app["id"] for app in spark.state()["completedapps"]} - before, "the master has seen it")
