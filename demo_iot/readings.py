"""The data of the sensors: the hourly weather of 2013 at New York's three airports.

The file has a row for each hour and station; a sensor of one kind replays one column of one station. Gaps of the
measurement are sent as readings without a value, so that every row is counted.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "weather-2013.csv"
STATIONS = ("EWR", "JFK", "LGA")
GAPS = {"", "NA"}


@dataclass(frozen=True, slots=True)
class SensorKind:
    """A kind of sensor: its column, and the range of normal values."""

    column: str
    unit: str
    low: float
    high: float


KINDS = {
    "temp": SensorKind("temperature_f", "F", low=20.0, high=95.0),
    "humidity": SensorKind("relative_humidity_pct", "%", low=20.0, high=95.0),
    "pressure": SensorKind("pressure_hpa", "hPa", low=995.0, high=1035.0),
    "wind": SensorKind("wind_speed_mph", "mph", low=0.0, high=30.0),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement; `n` counts a sensor's readings from 1, so that each is unique."""

    sensor: str
    station: str
    kind: str
    unit: str
    value: float | None
    measured_at: str
    n: int

    def message(self) -> dict[str, Any]:
        """Return the reading as it is sent. A gap is marked."""
        message = asdict(self)
        if self.value is None:
            message["quality"] = "missing"
        return message


def topic_of(kind: str, sensor_id: int) -> str:
    return f"{kind}_{sensor_id}"


def station_of(sensor_id: int) -> str:
    """Return the station: sensors 1, 2 and 3 are at EWR, JFK and LGA, the fourth is at EWR again."""
    return STATIONS[(sensor_id - 1) % len(STATIONS)]


def year(kind: str, sensor_id: int, data: Path = DATA) -> Iterator[Reading]:
    """Yield the sensor's readings of the whole year, in order."""
    sensor, station, of = topic_of(kind, sensor_id), station_of(sensor_id), KINDS[kind]
    with data.open(newline="") as file:
        rows = (row for row in csv.DictReader(file) if row["station"] == station)
        for n, row in enumerate(rows, start=1):
            text = row[of.column]
            yield Reading(sensor, station, kind, of.unit, None if text in GAPS else float(text), row["measured_at"], n)


def replay(kind: str, sensor_id: int, data: Path = DATA) -> Iterator[Reading]:
    """Yield the year over and over, for a sensor that runs until it is stopped; `n` continues."""
    readings = list(year(kind, sensor_id, data))
    for n in itertools.count(1):
        first = readings[(n - 1) % len(readings)]
        yield Reading(first.sensor, first.station, first.kind, first.unit, first.value, first.measured_at, n)
