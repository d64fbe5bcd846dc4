"""The throughput analysis: data directories -> OUT/report.json, OUT/report.html and OUT/parquet.

    portalmq report --data-dir data/5000 --out report
    spark-submit spark/throughput.py --data-dir data/5000 --out report

Both are the same command; under spark-submit its session is used, whatever cluster that is of.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from portalmq.spark import errors
from portalmq.spark.errors import SourceError
from portalmq.spark.report import model

JSON, PAGE, PARQUET = "report.json", "report.html", "parquet"
_OURS = {JSON, PAGE, PARQUET}
_MAKING = ".making"
_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


class OutputTaken(Exception):
    """The report cannot be put there. The sentence says why; usage (2) or the file system (73) is at fault."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


def analyse(
    paths: Sequence[Path], out: Path, *, topics: Sequence[str] | None = None, master: str | None = None
) -> model.Report:
    """Makes the report of all that is committed in the brokers' data directories.

    A report that stands in `out` is replaced when the new one is whole. Raises OutputTaken, SparkMissing, SourceError.
    """
    from portalmq.spark.progress import Progress
    from portalmq.spark.session import beside, session

    _check(paths, topics)
    with _place(out) as making:
        with session(master, name="portalmq report") as spark, Progress(spark), _told_plainly():
            import portalmq.spark
            from portalmq.spark import figures

            def make() -> model.Report:
                portalmq.spark.register(spark)
                return figures.report(spark, paths, topics, making / PARQUET, made_at_ms=time.time_ns() // 1_000_000)

            report = beside(make)
        from portalmq.spark.report import page

        (making / JSON).write_bytes(model.to_json(report))
        page.write(report, making / PAGE)
        _put(making, out)
    return report


def _check(paths: Sequence[Path], topics: Sequence[str] | None) -> None:
    """What is wrong with the directories is said before Spark is started."""
    from portalmq.spark.directories import Directories

    Directories([str(path) for path in paths], topics).logs()


# --- where it goes ---------------------------------------------------------------------------------------------------


@contextmanager
def _place(out: Path) -> Iterator[Path]:
    """A directory to make the report in, gone at the end."""
    if out.exists() and not out.is_dir():
        raise OutputTaken(f"{out} is a file: name a directory with --out", 2)
    foreign = sorted(path.name for path in out.iterdir() if path.name not in _OURS | {_MAKING}) if out.is_dir() else []
    if foreign:
        raise OutputTaken(
            f"{out} holds {', '.join(foreign[:3])}{' and more' if len(foreign) > 3 else ''}, which is no report's: name"
            " another directory with --out, or a new one in it",
            2,
        )
    making = out / _MAKING
    try:
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
    except OSError as fault:
        raise OutputTaken(
            f"{out} cannot be written to ({fault.strerror}): name another directory with --out", 73
        ) from (fault)
    try:
        yield making.absolute()
    except OSError as fault:
        is_ours = str(fault.filename).startswith(str(out.absolute()))
        if is_ours or (fault.filename is None and fault.errno in _DISK_FAULTS):  # Arrow does not name the file
            raise OutputTaken(f"{out} cannot be written to ({fault.strerror})", 73) from fault
        raise
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _put(making: Path, out: Path) -> None:
    shutil.rmtree(out / PARQUET, ignore_errors=True)
    for name in (PARQUET, PAGE, JSON):
        os.replace(making / name, out / name)


# --- what went wrong in a worker -------------------------------------------------------------------------------------

_FAULT = re.compile(r"portalmq\.spark\.errors\.(\w+): (.+)")
# What Spark says of a machine whose Python is not the one that is meant: it lacks a package, is not there, is another.
_FOREIGN_PYTHON = re.compile(
    r"ModuleNotFoundError: (No module named '(?:portalmq|pyspark|pyarrow|adbc_driver\w*|numpy|msgspec)[\w.]*')"
    r"|(Cannot run program \".+\")"
    r"|(Python in worker has different version: \S+ than that in driver: [\d.]*\d)"
)


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Our own sentence instead of Spark's pages around it."""
    from pyspark.errors import PySparkException

    from portalmq.spark.session import SparkMissing

    try:
        yield
    except Exception as fault:  # an executor's last words may come as Py4J's
        if not isinstance(fault, PySparkException) and not type(fault).__module__.startswith("py4j."):
            raise
        said = _FAULT.search(str(fault))
        foreign = _FOREIGN_PYTHON.search(str(fault))
        if said is None and foreign is not None:
            raise SparkMissing(
                f"Spark's workers do not run in a Python that has portalmq ({next(filter(None, foreign.groups()))})",
                "Install portalmq[spark] on each of their machines, for the same version of Python as here, and set"
                " PYSPARK_PYTHON to that Python's path, which has to be the same on all of them and here",
            ) from fault
        if said is None:
            raise
        kind: type[SourceError] = getattr(errors, said[1], SourceError)
        told = kind.__new__(kind)
        told.args = (said[2].strip(),)  # the sentence is whole: it is not to be made again
        raise told from fault


if __name__ == "__main__":
    from portalmq.spark.commands import report

    report()
