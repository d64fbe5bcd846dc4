"""A progress line on stderr while Spark works: the stage and its tasks. Quick runs print nothing."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SILENT_S = 3.0
EVERY_S = 1.0
# Where lines stay (in a log), they are few.
EVERY_IN_A_LOG_S = 15.0
# Java may be slow to report; the end of the block waits this long, and drops later reports.
END_WITHIN_S = 5.0


class Progress:
    """Watches a session's jobs in a thread of its own, until its block ends."""

    def __init__(self, spark: SparkSession, to: TextIO | None = None) -> None:
        self._context = spark.sparkContext
        self._tracker = self._context.statusTracker()
        self._to = to or sys.stderr
        self._is_terminal = self._to.isatty()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)
        self._done = 0
        self._seen: dict[int, int] = {}
        self._width = 0

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(END_WITHIN_S)
        if self._width:
            self._to.write("\r" + " " * self._width + "\r")
            self._to.flush()

    def _watch(self) -> None:
        wait_s = SILENT_S if self._is_terminal else EVERY_IN_A_LOG_S
        while not self._ended.wait(wait_s):
            line = self._line()
            if line and not self._ended.is_set():
                self._say(line)
            wait_s = EVERY_S if self._is_terminal else EVERY_IN_A_LOG_S

    def _line(self) -> str:
        """Return the tasks of the running stages; empty while none runs."""
        running = total = 0
        for number in self._tracker.getActiveStageIds():
            stage = self._tracker.getStageInfo(number)
            if stage is not None:
                running += stage.numCompletedTasks
                total += stage.numTasks
        if not total:
            return ""
        seconds = f"{time.monotonic() - self._began:.0f} s"
        if not running and self._has_no_executor():
            return f"portalmq report: waiting for {self._context.master} to give this application a worker, {seconds}"
        return f"portalmq report: {running} of {total} tasks, {seconds}"

    def _has_no_executor(self) -> bool:
        """True while the cluster has given no executor. Spark waits for ever for a cluster without a worker, or without
        one with enough memory and cores. The driver counts as one executor; a local session has no other."""
        if str(self._context.master).startswith("local"):
            return False
        infos = self._context._jsc.sc().statusTracker().getExecutorInfos()
        return len(infos) <= 1

    def _say(self, line: str) -> None:
        if self._is_terminal:
            self._to.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._to.write(line + "\n")
        self._to.flush()
