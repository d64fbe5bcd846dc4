from __future__ import annotations

import csv
import json
from itertools import islice
from pathlib import Path

import pytest

from portalmq.demo_iot.readings import DATA, KINDS, STATIONS, replay, station_of, topic_of, year


def test_every_row_is_replayed_once_for_each_kind() -> None:
    rows = sum(1 for _ in csv.reader(DATA.open())) - 1
    assert rows == 26_115
    for kind in KINDS:
        assert sum(1 for number in (1, 2, 3) for _ in year(kind, number)) == rows


def test_a_reading_is_what_the_file_says() -> None:
    reading = next(year("wind", 2))
    assert reading.message() == {
        "sensor": "wind_2",
        "station": "JFK",
        "kind": "wind",
        "unit": "mph",
        "value": 12.66,
        "measured_at": "2013-01-01T06:00:00Z",
        "n": 1,
    }


def test_gaps_of_the_measurement_are_sent_as_gaps() -> None:
    gaps = [reading for number in (1, 2, 3) for reading in year("pressure", number) if reading.value is None]
    assert len(gaps) == 2_729
    message = gaps[0].message()
    assert (message["value"], message["quality"]) == (None, "missing")
    assert "null" in json.dumps(message)


def test_an_empty_field_is_a_gap_as_well_as_na(tmp_path: Path) -> None:
    data = tmp_path / "weather.csv"
    head = "measured_at,station,temperature_f,relative_humidity_pct,pressure_hpa,wind_speed_mph\n"
    data.write_text(head + "t1,EWR,39,60,NA,\nt2,EWR,,61,1012,0\n")
    assert [reading.value for reading in year("wind", 1, data)] == [None, 0.0]
    assert [reading.value for reading in year("temp", 1, data)] == [39.0, None]
    assert [reading.value for reading in year("pressure", 1, data)] == [None, 1012.0]


@pytest.mark.parametrize(("sensor_id", "station"), [(1, "EWR"), (2, "JFK"), (3, "LGA"), (4, "EWR"), (300, "LGA")])
def test_sensors_are_at_the_stations_in_rotation(sensor_id: int, station: str) -> None:
    assert station_of(sensor_id) == station
    assert next(year("temp", sensor_id)).station == station


def test_a_sensor_restarts_the_year_and_continues_its_count() -> None:
    length = sum(1 for _ in year("temp", 1))
    readings = list(islice(replay("temp", 1), length + 2))
    assert [reading.n for reading in readings] == list(range(1, length + 3))
    assert readings[length].measured_at == readings[0].measured_at
    assert len({json.dumps(reading.message()) for reading in readings}) == len(readings)


def test_topics_are_named_after_kind_and_number() -> None:
    assert topic_of("temp", 1) == "temp_1"
    assert len(STATIONS) == 3
