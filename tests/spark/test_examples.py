"""The notebooks of docs/examples: their commands run as shown, and their results are correct."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from support.broker_process import BrokerProcess
from support.cluster import wait_until

from portalmq import Admin, Producer
from portalmq.demo_iot.readings import Reading, replay, year
from portalmq.spark import options

pytestmark = [pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "docs" / "examples"
WINDOW_MS = 250


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path / "broker", command=("dev",)) as started:
        yield started


def run(name: str, spark: Any, monkeypatch: pytest.MonkeyPatch, **settings: str) -> dict[str, Any]:
    """Run the example as a program in the tests' session; return its variables."""
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    return runpy.run_path(str(EXAMPLES / name))


def commands_of(name: str) -> list[str]:
    """Return the commands in an example's header, except the broker's and the example's own."""
    head = (EXAMPLES / name).read_text().split('"""')[1]
    found = re.findall(r"^    (.+)$", head, re.MULTILINE)
    assert found[0] == "portalmq dev 5000 &"
    assert found[-1] == f"python docs/examples/{name}"
    return found[1:-1]


def typed(command: str, broker: BrokerProcess, directory: Path) -> None:
    command = command.replace("python demo_iot/", f"'{sys.executable}' '{REPOSITORY}'/demo_iot/")
    command = command.replace("portalmq consume", f"'{sys.executable}' -m portalmq.cli.main consume")
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env={**os.environ, "PORTALMQ_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- averages per minute, as a stream ---------------------------------------------------------------------------------


def sent_over(windows: int, broker: BrokerProcess, readings: Iterator[Reading]) -> None:
    """Send readings of a sensor as fast as they are acknowledged, until they lie in `windows` windows by the broker's
    clock. A window without a reading does not count."""
    met: set[int] = set()
    with Producer(broker.url) as producer:
        while len(met) < windows:
            reading = next(readings)
            sent = producer.send(reading.sensor, reading.message(), key=reading.sensor)
            met.add(sent.result(60).timestamp_ms // WINDOW_MS)


def expected_averages(broker: BrokerProcess) -> dict[tuple[int, str], tuple[float | None, int, int]]:
    """Return the average, all readings, and readings with a value, by window and sensor, except the last window's."""
    groups: dict[tuple[int, str], list[float | None]] = defaultdict(list)
    for message in Admin(broker.url).peek("temp_1", limit=None):
        reading = json.loads(message.value)
        groups[message.timestamp_ms // WINDOW_MS * WINDOW_MS, reading["sensor"]].append(reading["value"])
    last = max(window for window, _ in groups)
    measured = {place: [value for value in values if value is not None] for place, values in groups.items()}
    return {
        place: (fmean(measured[place]) if measured[place] else None, len(values), len(measured[place]))
        for place, values in groups.items()
        if place[0] < last
    }


@pytest.mark.prove
def test_each_finished_window_is_written_once_over_several_runs(
    spark: Any, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = replay("temp", 1)
    windows = []
    for _ in range(2):
        sent_over(5, broker, readings)
        ran = run(
            "spark_averages.py",
            spark,
            monkeypatch,
            PORTALMQ_URL=broker.url,
            OUT=str(tmp_path / "out"),
            WINDOW=f"{WINDOW_MS} milliseconds",
            LATE="0 seconds",
        )
        rows = ran["result"].collect()
        found = {
            (round(row.minute.timestamp() * 1000), row.sensor): (row.average, row.readings, row.measured)
            for row in rows
        }
        assert len(found) == len(rows), "a window was written twice"
        expected = expected_averages(broker)
        assert list(found) == sorted(expected)
        for place, row in found.items():
            assert row == pytest.approx(expected[place]), place
        assert {(row.station, row.unit) for row in rows} == {("EWR", "F")}
        windows.append(len(rows))
    assert 4 == windows[0] <= windows[1] - 4  # the last window of each run is not over


# --- a batch in SQL ---------------------------------------------------------------------------------------------------


def ends(**door: str) -> dict[tuple[str, int], int]:
    """Return the ends of the logs as this origin shows them."""
    logs = options.stream_options({"topic": "temp_*", **door}).origin().logs()
    return {(log.topic, log.partition): log.end_offset for log in logs}


def test_the_sql_example_agrees_with_a_year_of_weather(
    spark: Any, broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in commands_of("spark_sql.py"):
        assert "2000" in command
        typed(command.replace("2000", "300"), broker, tmp_path)
    assert len((tmp_path / "weather.txt").read_text().splitlines()) == 300
    # The files show commits up to a second late, and the example reads the outcome of the messages from them.
    wait_until(
        lambda: ends(path=str(broker.data_dir)) == ends(bootstrap=broker.url), "what was acked stands in the files"
    )
    ran = run("spark_sql.py", spark, monkeypatch, PORTALMQ_URL=broker.url, DATA=str(broker.data_dir))
    readings = {sensor: list(islice(year("temp", sensor), 300)) for sensor in (1, 2, 3)}
    stations = {row.station: row for row in ran["stations"].collect()}
    days = {row.station: row for row in ran["days"].collect()}
    assert list(stations) == list(days) == ["EWR", "JFK", "LGA"]
    for sensor, station in enumerate(stations.values(), start=1):
        values = [reading.value for reading in readings[sensor] if reading.value is not None]
        assert (station.readings, station.gaps) == (300, 300 - len(values))
        assert (station.coldest, station.warmest) == (round(min(values), 1), round(max(values), 1))
        assert station.average == pytest.approx(fmean(values), abs=0.06)
        assert station.median == pytest.approx(median(values))
        by_day: dict[str, list[float]] = defaultdict(list)
        for reading in readings[sensor]:
            if reading.value is not None:
                by_day[reading.measured_at[:10]].append(reading.value)
        coldest = min(by_day, key=lambda day: (fmean(by_day[day]), day))
        assert str(days[station.station].day) == coldest
        assert days[station.station].average == pytest.approx(fmean(by_day[coldest]), abs=0.06)
    queue = ran["queue"].collect()
    assert [(row.topic, row.partition, row.messages) for row in queue] == [(f"temp_{n}", 0, 300) for n in (1, 2, 3)]
    handled = {(row.topic, row.group, row.event): row.messages for row in ran["handled"].collect()}
    assert handled == {("temp_1", "weather", "granted"): 300, ("temp_1", "weather", "acked"): 300}


def test_the_sensor_command_of_the_averages_runs_as_shown(broker: BrokerProcess, tmp_path: Path) -> None:
    (command,) = commands_of("spark_averages.py")
    assert command.endswith(" 0.1 &")
    typed(command.replace(" 0.1 &", " 0.1 --count 3"), broker, tmp_path)
    assert [json.loads(message.value)["n"] for message in Admin(broker.url).peek("temp_1")] == [1, 2, 3]


def test_the_document_shows_the_same_commands_as_the_examples() -> None:
    document = (REPOSITORY / "docs" / "SPARK.md").read_text()
    for name in ("spark_averages.py", "spark_sql.py"):
        block = "".join(f"    {line}\n" for line in ["portalmq dev 5000 &", *commands_of(name)])
        assert f"{block}    python docs/examples/{name}\n" in document
