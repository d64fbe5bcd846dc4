"""The topics that an option selects."""

from __future__ import annotations

import pytest

from portalmq.spark.topics import is_wanted, not_found

TOPICS = ["temp_1", "temp_2", "temp_10", "wind_1", "__offsets"]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, ["temp_1", "temp_2", "temp_10", "wind_1"]),
        (["temp_1"], ["temp_1"]),
        (["wind_1", "temp_2"], ["temp_2", "wind_1"]),
        (["temp_?"], ["temp_1", "temp_2"]),
        (["temp_*", "wind_1"], ["temp_1", "temp_2", "temp_10", "wind_1"]),
        (["*"], ["temp_1", "temp_2", "temp_10", "wind_1"]),
        (["__offsets"], ["__offsets"]),
        (["__*"], ["__offsets"]),
        (["TEMP_*", "temp"], []),
    ],
)
def test_names_patterns_and_all(asked: list[str] | None, found: list[str]) -> None:
    assert [topic for topic in TOPICS if is_wanted(topic, asked)] == found


def test_a_missing_topic_is_named() -> None:
    assert not_found(["temp_*", "rain_*", "temp_1", "temp_3"], TOPICS) == ["rain_*", "temp_3"]
    assert not_found(None, []) == []
    assert not_found(["*"], ["__offsets"]) == ["*"]
