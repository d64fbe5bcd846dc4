"""The throughput analysis: data directories -> OUT/report.json, OUT/report.html and OUT/parquet."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from portalmq.spark import errors
from portalmq.spark.errors import SourceError
from portalmq.spark.report import model, output


def analyse(
    paths: Sequence[Path], out: Path, *, topics: Sequence[str] | None = None, master: str | None = None
) -> model.Report:
    """Make the report of all committed messages in the brokers' data directories.

    A complete report replaces the one in `out`; of several concurrent ones the last remains.

    Raises OutputUnusable, SparkMissing, SourceError.
    """
    from portalmq.spark.progress import Progress
    from portalmq.spark.session import in_thread, session

    _check(paths, topics)
    with output.workspace(out) as making:
        with session(master, name="portalmq report") as spark, Progress(spark), _plain_faults():
            import portalmq.spark
            from portalmq.spark.figures import report_figures

            def make() -> model.Report:
                portalmq.spark.register(spark)
                return report_figures.compute(
                    spark, paths, topics, making / output.PARQUET, made_at_ms=time.time_ns() // 1_000_000
                )

            report = in_thread(make)
        from portalmq.spark.report import page

        (making / output.JSON).write_bytes(model.to_json(report))
        page.write(report, making / output.PAGE)
        output.publish(making, out)
    return report


def _check(paths: Sequence[Path], topics: Sequence[str] | None) -> None:
    """Report faults of the directories before Spark starts."""
    from portalmq.spark.files.directories import Directories

    Directories([str(path) for path in paths], topics).logs()


# --- errors of workers -----------------------------------------------------------------------------------------------

_FAULT = re.compile(r"portalmq\.spark\.errors\.(\w+): (.+)")
# Spark's messages about a worker whose Python lacks a package, does not exist, or has another version.
_FOREIGN_PYTHON = re.compile(
    r"ModuleNotFoundError: (No module named '(?:portalmq|pyspark|pyarrow|adbc_driver\w*|numpy|msgspec)[\w.]*')"
    r"|(Cannot run program \".+\")"
    r"|(Python in worker has different version: \S+ than that in driver: [\d.]*\d)"
)


@contextmanager
def _plain_faults() -> Iterator[None]:
    """Raise our own error instead of Spark's, which wraps it in pages of text."""
    from pyspark.errors import PySparkException

    from portalmq.spark.session import SparkMissing

    try:
        yield
    except Exception as fault:  # an executor's last error may come from Py4J
        if not isinstance(fault, PySparkException) and not type(fault).__module__.startswith("py4j."):
            raise
        ours = _FAULT.search(str(fault))
        foreign = _FOREIGN_PYTHON.search(str(fault))
        if ours is None and foreign is not None:
            raise SparkMissing(
                f"Spark's workers do not run in a Python that has portalmq ({next(filter(None, foreign.groups()))})",
                "Install portalmq[spark] on each of their machines, for the same version of Python as here, and set"
                " PYSPARK_PYTHON to that Python's path, which has to be the same on all of them and here",
            ) from fault
        if ours is None:
            raise
        kind: type[SourceError] = getattr(errors, ours[1], SourceError)
        plain = kind.__new__(kind)
        plain.args = (ours[2].strip(),)  # the text is complete, so the constructor must not run again
        raise plain from fault
