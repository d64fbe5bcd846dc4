"""`portalmq report`: its arguments, its output, and its errors."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from support.data_directory import numbered, written

from portalmq.spark import analysis, commands, session
from portalmq.spark.errors import DamagedFile, SourceError
from portalmq.spark.progress import Progress
from portalmq.spark.report import model, output
from portalmq.spark.report.view import ReportView

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
WITHIN_S = 240
_PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(commands.report, [str(argument) for argument in arguments])


# --- refusals before Spark starts ------------------------------------------------------------------------------------


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("Spark is started too early")

    monkeypatch.setattr("portalmq.spark.session.session", refuse)


@pytest.mark.usefixtures("no_spark")
class TestRefused:
    def test_a_directory_that_is_not_there(self, tmp_path: Path) -> None:
        said = run("--data-dir", tmp_path / "none", "--out", tmp_path / "out")
        assert said.exit_code == 2
        assert f"there is no directory {tmp_path / 'none'}" in said.output
        assert not (tmp_path / "out").exists()

    def test_a_directory_without_topics(self, tmp_path: Path) -> None:
        with written(tmp_path / "data"):
            pass
        (tmp_path / "data" / "partitions").mkdir(exist_ok=True)
        said = run("--data-dir", tmp_path / "data", "--out", tmp_path / "out")
        assert (said.exit_code, "there are no topics in" in said.output) == (2, True)

    def test_a_topic_that_is_not_there(self, tmp_path: Path, data: Path) -> None:
        said = run("--data-dir", data, "--out", tmp_path / "out", "--topic", "orders")
        assert (said.exit_code, "there is no topic 'orders'" in said.output) == (2, True)

    def test_an_out_with_something_else_in_it(self, tmp_path: Path, data: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "thesis.tex").write_text("ten years")
        said = run("--data-dir", data, "--out", out)
        assert said.exit_code == 2
        assert "holds thesis.tex, which is no report's" in said.output
        assert [path.name for path in out.iterdir()] == ["thesis.tex"]

    def test_an_out_that_is_a_file(self, tmp_path: Path, data: Path) -> None:
        (tmp_path / "out").write_text("")
        said = run("--data-dir", data, "--out", tmp_path / "out")
        assert (said.exit_code, "is a file" in said.output) == (2, True)

    def test_an_out_that_cannot_be_made(self, data: Path) -> None:
        said = run("--data-dir", data, "--out", "/proc/report")
        assert (said.exit_code, "cannot be written to" in said.output) == (73, True)

    def test_neither_data_nor_out(self) -> None:
        assert run().exit_code == 2


def test_a_full_disk_is_reported_for_out_and_leaves_nothing(tmp_path: Path) -> None:
    full = pytest.raises(output.OutputUnusable, match=r"out cannot be written to \(No space left on device\)")
    with full as told, output.workspace(tmp_path / "out"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert told.value.exit_code == 73
    assert list((tmp_path / "out").iterdir()) == []


def test_a_fault_in_a_worker_is_reported_in_one_sentence() -> None:
    from pyspark.errors import PySparkException

    pages = (
        'Job aborted:\n  File "x.py"\nportalmq.spark.errors.DamagedFile: /a.sqlite: is torn. Do this\n\tat org.apache'
    )
    with pytest.raises(SourceError, match=r"^/a.sqlite: is torn. Do this$") as told, analysis._plain_faults():
        raise PySparkException(pages)
    assert isinstance(told.value, DamagedFile)
    with pytest.raises(PySparkException, match="out of memory"), analysis._plain_faults():
        raise PySparkException("out of memory")


@pytest.mark.parametrize(
    "said",
    [
        "  File x\nModuleNotFoundError: No module named 'portalmq'\n SQLSTATE: 38000",
        'java.io.IOException: Cannot run program "/nowhere/python": error=2, No such file or directory',
        "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than that in driver: 3.11, PySpark",
    ],
)
def test_a_cluster_whose_python_lacks_portalmq_is_reported_in_one_sentence(said: str) -> None:
    from pyspark.errors import PySparkException

    refused = pytest.raises(session.SparkMissing, match=r"do not run in .*PYSPARK_PYTHON")
    with refused as told, analysis._plain_faults():
        raise PySparkException(said)
    assert "File" not in str(told.value)
    assert told.value.exit_code == 2


def test_the_summary_is_always_five_lines() -> None:
    nothing = model.Totals(0, 0, 0, 0, 0, 0, None, None, 0.0, 0.0, 0.0)
    lines = commands.summary(model.Report(1, 1, ["x"], 1_000, nothing))
    assert len(lines) == 5
    assert lines[0] == "messages    0 (0 B) in 0 topics, 0 partitions, by 0 producers"


def test_the_summary_counts_the_fail_overs_that_the_page_shows() -> None:
    nothing = model.Totals(0, 0, 0, 0, 0, 0, None, None, 0.0, 0.0, 0.0)
    epochs = [model.FailOver("t", 0, epoch, 10 * epoch, gap) for epoch, gap in [(1, None), (2, 7), (3, None)]]
    made = model.Report(1, 1, ["x"], 1_000, nothing, fail_overs=epochs)
    assert commands.summary(made)[4] == "fail-overs  2, at most 7 ms without an append"
    assert len(ReportView.of(made).changes) == 2


# --- progress --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_progress_of_spark_and_is_left_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.spark.progress.SILENT_S", 0.001)
    monkeypatch.setattr("portalmq.spark.progress.EVERY_S", 0.001)
    monkeypatch.setattr("portalmq.spark.progress.END_WITHIN_S", WITHIN_S)
    stage = SimpleNamespace(numCompletedTasks=3, numTasks=12)
    tracker = SimpleNamespace(getActiveStageIds=lambda: [1, 2], getStageInfo={1: stage, 2: None}.get)
    session = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker, master="local[2]"))
    screen = Terminal()
    with Progress(session, screen) as progress:  # type: ignore[arg-type]
        _until(lambda: "3 of 12 tasks" in screen.getvalue())
    assert screen.getvalue().endswith("\r")
    assert not progress._thread.is_alive()


def test_output_of_java_after_the_end_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENT_S", "EVERY_S", "END_WITHIN_S"):
        monkeypatch.setattr(f"portalmq.spark.progress.{name}", 0.001)
    asked, answers = Event(), Event()

    def stages() -> list[int]:
        asked.set()
        answers.wait(WITHIN_S)
        return [1]

    stage = SimpleNamespace(numCompletedTasks=3, numTasks=12)
    tracker = SimpleNamespace(getActiveStageIds=stages, getStageInfo={1: stage}.get)
    session = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: tracker, master="local[2]"))
    screen = Terminal()
    with Progress(session, screen) as progress:  # type: ignore[arg-type]
        assert asked.wait(WITHIN_S)
    answers.set()
    progress._thread.join(WITHIN_S)
    assert not progress._thread.is_alive()
    assert screen.getvalue() == ""


@pytest.mark.parametrize(("executors", "said"), [(1, "waiting for spark://h:1"), (2, "0 of 12 tasks")])
def test_a_cluster_that_gives_no_worker_is_named(executors: int, said: str) -> None:
    stage = SimpleNamespace(numCompletedTasks=0, numTasks=12)
    tracker = SimpleNamespace(getActiveStageIds=lambda: [1], getStageInfo={1: stage}.get)
    java = SimpleNamespace(statusTracker=lambda: SimpleNamespace(getExecutorInfos=lambda: [None] * executors))
    context = SimpleNamespace(
        statusTracker=lambda: tracker, master="spark://h:1", _jsc=SimpleNamespace(sc=lambda: java)
    )
    progress = Progress(SimpleNamespace(sparkContext=context), io.StringIO())  # type: ignore[arg-type]
    progress._began = 0.0
    assert said in progress._line()


def _until(holds: Callable[[], bool]) -> None:
    import time

    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.timeout(300)
class TestRuns:
    def test_the_report_is_written_and_written_again(self, spark: SparkSession, tmp_path: Path, data: Path) -> None:
        out = tmp_path / "out"
        said = run("--data-dir", data, "--out", out)
        assert said.exit_code == 0, said.output
        assert said.output.splitlines()[-1] == f"report: {out / 'report.html'}"
        assert {path.name for path in out.iterdir()} == {"report.json", "report.html", "parquet"}
        first = model.from_json((out / "report.json").read_bytes())
        assert (first.totals.messages, first.totals.topics) == (60, 2)
        written_rows = spark.read.parquet(str(out / "parquet" / "throughput"))
        assert {row.topic: row.messages for row in written_rows.groupBy("topic").sum("messages").withColumnRenamed(
            "sum(messages)", "messages").collect()} == {"t": 60}  # fmt: skip
        again = run("--data-dir", data, "--out", out, "--topic", "empty", "-o", "json")
        assert again.exit_code == 0, again.output
        second = model.from_json((out / "report.json").read_bytes())
        assert (second.totals.messages, second.totals.topics) == (0, 1)
        assert '"messages": 0' in again.output

    def test_a_torn_file_leaves_the_last_report_as_it_was(
        self, spark: SparkSession, tmp_path: Path, data: Path
    ) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "report.json").write_text("the last one")
        first = min(data.glob("partitions/t@*/0/[0-9]*.sqlite"))
        os.chmod(first, 0o644)
        with first.open("r+b") as file:
            file.seek(4_096)
            file.write(b"\xff" * (first.stat().st_size - 4_096))
        said = run("--data-dir", data, "--out", out)
        assert said.exit_code == 1, said.output
        assert first.name in said.output
        assert "Traceback" not in said.output
        assert (out / "report.json").read_text() == "the last one"
        assert [path.name for path in out.iterdir()] == ["report.json"]


@pytest.mark.spark
@pytest.mark.timeout(WITHIN_S + 60)
class TestProcesses:
    """Reports in a process and a session of their own."""

    def check(self, *command: object, out: Path) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK", "PYSPARK"))}
        environment |= {"PATH": _PATH, "SPARK_LOCAL_IP": "127.0.0.1"}  # spark-submit finds Spark by `python`
        said = subprocess.run(
            [*map(str, command), "--out", str(out)],
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        assert said.returncode == 0, said.stderr
        assert model.from_json((out / "report.json").read_bytes()).totals.messages == 5
        assert said.stdout.splitlines()[-1] == f"report: {out / 'report.html'}"
        return said

    @pytest.fixture
    def small(self, tmp_path: Path) -> Path:
        with written(tmp_path / "data") as directory:
            directory.topic("t")
            directory.put("t", *numbered(5))
        return tmp_path / "data"

    @pytest.mark.prove
    def test_the_command_starts_and_ends_spark_and_says_nothing_else(
        self, tmp_path: Path, small: Path, given_java_home: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if given_java_home is None:
            monkeypatch.delenv("JAVA_HOME", raising=False)  # the command finds a Java itself
        command = (sys.executable, "-m", "portalmq.cli.main", "report", "--master", "local[2]", "--data-dir", small)
        said = self.check(*command, out=tmp_path / "out")
        assert said.stderr == "" or all(line.startswith("portalmq report: ") for line in said.stderr.splitlines())

    @pytest.mark.prove  # the command above starts and ends the same job
    def test_spark_submit_runs_the_same(self, tmp_path: Path, small: Path) -> None:
        submit = shutil.which("spark-submit", path=_PATH)
        assert submit is not None
        # As small as the command's own session: Spark's defaults (200 parts, compiled queries) take minutes.
        confs = {**session.settings("local[2]"), "spark.pyspark.python": session.workers_python()}
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        confs["spark.driver.extraJavaOptions"] += f" -Djava.io.tmpdir={temporary}"
        settings = tuple(word for name, value in confs.items() for word in ("--conf", f"{name}={value}"))
        script = ROOT / "spark" / "throughput.py"
        self.check(submit, "--master", "local[2]", *settings, script, "--data-dir", small, out=tmp_path / "out")
        assert list(temporary.iterdir()) == [], "Java has left files"
