"""Statistics, workers and calibration of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest

from portalmq.broker.bench import measure
from portalmq.broker.bench.measure import Timed, combined, in_workers, percentile, spread, summary


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7
    assert percentile([1.0, 2.0], 50) == 1


def test_a_spread_is_in_milliseconds_and_needs_no_order() -> None:
    assert spread([0.003, 0.001, 0.002]) == {"p50_ms": 2, "p90_ms": 3, "p99_ms": 3, "max_ms": 3}
    assert spread([]) == {}


def test_a_rate_goes_from_the_first_begin_to_the_last_end() -> None:
    figures = summary([Timed(10, 1.0, 3.0, [0.1]), Timed(30, 2.0, 5.0, [0.3])], cpu_s=2)
    assert figures["per_s"] == 10
    assert figures["seconds"] == 4
    assert figures["messages"] == 40
    assert figures["cpu_s_per_million"] == 50_000
    assert figures["max_ms"] == 300


def test_nothing_done_is_no_rate() -> None:
    with pytest.raises(click.ClickException, match="nothing was done"):
        summary([Timed(0, 1.0, 1.0, [])], cpu_s=1)


def test_rounds_are_merged_by_median_and_the_worst_of_each_maximum() -> None:
    rounds = [{"system": "a", "per_s": n, "max_ms": n, "publish_gap_s": n} for n in (1, 9, 2)]
    (merged,) = combined(rounds, ["system"])
    assert merged == {
        "system": "a",
        "per_s": 2,
        "max_ms": 9,
        "publish_gap_s": 2,
        "publish_gap_worst_s": 9,
        "rounds": 3,
    }
    assert len(combined([{"system": "a"}, {"system": "b"}], ["system"])) == 2


def test_calibration_measures_the_processor_and_the_disk(tmp_path: Path) -> None:
    taken = measure.calibration(tmp_path)
    assert taken["spin_ms"] > 0
    assert 0 < taken["fdatasync_p50_ms"] <= taken["fdatasync_p99_ms"]
    assert list(tmp_path.iterdir()) == []


def _first(begin: Callable[[], object], text: str) -> str:
    begin()
    return f"first {text}"


def _second(begin: Callable[[], object], text: str) -> str:
    begin()
    return f"second {text}"


def _failing(begin: Callable[[], object], text: str) -> str:
    raise ValueError(f"cannot {text}")


@pytest.mark.cluster
def test_workers_answer_in_the_order_of_their_roles() -> None:
    assert in_workers([_first, _second], "role", within_s=60) == ["first role", "second role"]


@pytest.mark.cluster
def test_the_cause_is_reported_when_a_worker_fails() -> None:
    with pytest.raises(click.ClickException, match="ValueError: cannot connect"):
        in_workers([_first, _failing], "connect", within_s=60)
