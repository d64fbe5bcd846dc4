"""A real Spark cluster for tests: a standalone master and workers, each a process on loopback, always ended.

    with SparkCluster(directory) as spark:
        subprocess.run([..., "--master", spark.master], env=spark.environment)

It is the Spark that pip installed, started by its own `spark-class`. Worker n is at 127.0.0.n, so that Spark treats
each as a machine of its own; ports are free ones, and all files are below `directory`. The workers do not know this
test's Python: the application chooses the Python of its tasks.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import psutil
from support.cluster import wait_until

from portalmq.spark.session import java_home

WITHIN_S = 200.0
# Short queries: a JVM needs longer to optimize them than to run them.
JAVA_OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m"

_MASTER = re.compile(r"Starting Spark master at (spark://\S+)")
_WEB = re.compile(r"MasterWebUI to \S+, and started at (http://\S+)")


class SparkCluster:
    """`settings` are more lines of spark-defaults.conf, for the applications."""

    def __init__(
        self, directory: Path, *, workers: int = 2, cores: int = 2, settings: Mapping[str, str] | None = None
    ) -> None:
        self.directory = directory
        self.master = ""
        self._workers = workers
        self._cores = cores
        self._settings = dict(settings or {})
        self._web = ""
        self._processes: list[subprocess.Popen[bytes]] = []

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> SparkCluster:
        import pyspark

        self._home = Path(pyspark.__file__).parent
        self._configure()
        try:
            self._start("master", "master.Master", "127.0.0.1", "--webui-port", "0")
            self.master = self._said("master", _MASTER)
            self._web = self._said("master", _WEB)
            for number in range(1, self._workers + 1):
                host = f"127.0.0.{number}"
                self._start(
                    f"worker-{number}",
                    "worker.Worker",
                    host,
                    *("--webui-port", "0", "--cores", str(self._cores), "--memory", "2g"),
                    *("--work-dir", str(self.directory / f"work-{number}"), self.master),
                )
            wait_until(lambda: self._alive() == self._workers, "Spark's workers are there", WITHIN_S)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Send SIGKILL to all processes, including executors and their Python workers."""
        family: list[psutil.Process] = []
        for process in self._processes:
            if process.poll() is None:
                family += psutil.Process(process.pid).children(recursive=True)
                process.kill()
        for process in self._processes:
            process.wait(30)
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left, left
        self._processes.clear()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a driver: small defaults, and all that Spark shows of an application is kept in
        `events`."""
        return self._environment | {
            "HOME": os.environ.get("HOME", "/"),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_CONF_DIR": str(self.directory / "conf"),
        }

    def _configure(self) -> None:
        for folder in ("conf", "events"):
            (self.directory / folder).mkdir(parents=True)
        defaults = {
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": JAVA_OPTIONS,
            "spark.cores.max": str(self._cores),  # one executor, if the application does not ask for more
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": JAVA_OPTIONS,
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": f"file://{self.directory}/events",
            "spark.log.level": "INFO",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.execution.arrow.maxRecordsPerBatch": "1000",
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
            # A task that takes 1.5 times the median runs a second time in parallel.
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.multiplier": "1.5",
            "spark.speculation.quantile": "0.5",
        }
        lines = [f"{name} {value}\n" for name, value in (defaults | self._settings).items()]
        (self.directory / "conf" / "spark-defaults.conf").write_text("".join(lines))

    def _start(self, name: str, kind: str, host: str, *arguments: str) -> None:
        with self._log(name).open("wb") as said:
            process = subprocess.Popen(
                [
                    str(self._home / "bin" / "spark-class"),
                    f"org.apache.spark.deploy.{kind}",
                    *("--host", host, "--port", "0", *arguments),
                ],
                cwd=self.directory,
                env=self._environment | {"SPARK_LOCAL_IP": host},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        self._processes.append(process)

    @property
    def _environment(self) -> dict[str, str]:
        """The environment of a machine that has Spark and Java, without Python settings of this test or of the user."""
        home = java_home() or os.environ.get("JAVA_HOME")
        return {
            "PATH": os.defpath,
            **({"JAVA_HOME": home} if home else {}),
            "SPARK_HOME": str(self._home),
            "SPARK_LOCAL_DIRS": str(self.directory / "local"),
            "SPARK_LAUNCHER_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "SPARK_MASTER_OPTS": "-Dspark.deploy.spreadOutApps=false",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS,
        }

    # --- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict:
        """The master's state: `workers`, `activeapps`, `completedapps`."""
        with urllib.request.urlopen(f"{self._web}/json/", timeout=60) as answer:
            return json.load(answer)

    def _alive(self) -> int:
        return sum(worker["state"] == "ALIVE" for worker in self.state()["workers"])

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def _said(self, name: str, what: re.Pattern[str]) -> str:
        """The first group of a match in a daemon's output."""

        def found() -> re.Match[str] | None:
            said = self._log(name).read_text("utf-8", "replace")
            assert all(process.poll() is None for process in self._processes), f"{name} ended:\n{said}"
            return what.search(said)

        return wait_until(found, f"{name} says {what.pattern}", WITHIN_S)[1]
