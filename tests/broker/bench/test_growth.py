"""How cost grows: the answers that a connection waits for, the points, failures, and a small run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from portalmq.broker.bench import growth
from portalmq.broker.bench.growth import GrowthCase, answer_is_whole, grown
from portalmq.broker.bench.single import bench

ANSWER = b"HTTP/1.1 201 CREATED\r\nDate: today\r\nContent-Length: 5\r\n\r\nhello"


def test_an_answer_is_whole_with_the_last_byte_of_its_body() -> None:
    assert [size for size in range(len(ANSWER) + 1) if answer_is_whole(ANSWER[:size])] == [len(ANSWER)]
    assert answer_is_whole(ANSWER.replace(b"Content-Length", b"content-length"))


def test_a_refusal_is_not_measured() -> None:
    with pytest.raises(ConnectionError, match="429"):
        answer_is_whole(b"HTTP/1.1 429 TOO MANY REQUESTS\r\n")


def test_a_case_that_fails_keeps_its_points_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(directory: Path, points: Sequence[int], seconds: float) -> Iterator[dict[str, float]]:
        for point in points:
            if point > 2:
                raise click.ClickException("too many")
            yield {"point": point, "per_s": seconds / point}

    cases = {
        "a": GrowthCase(measure, (2, 1), 9),
        "b": GrowthCase(measure, (1, 3), 9),
        "c": GrowthCase(measure, (3,), 2),
    }
    monkeypatch.setattr(growth, "CASES", cases)
    figures, failures = grown(list(cases), [], 1.0, tmp_path, lambda line: None)
    assert figures == {"a": [{"point": 1, "per_s": 1.0}, {"point": 2, "per_s": 0.5}], "b": [{"point": 1, "per_s": 1.0}]}
    assert failures == {"b": "too many after 1 of 2 points"}


@pytest.mark.parametrize("arguments", [["--cases", "gap"], ["--points", "1,2"], ["--points", "x", "--cases", "size"]])
def test_what_cannot_grow_is_a_usage_error(arguments: list[str]) -> None:
    assert CliRunner().invoke(bench, ["--growth", *arguments]).exit_code == 2


@pytest.mark.cluster
def test_connections_are_measured_and_plotted(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "growth.json"), "--plots", str(tmp_path / "plots")]
    chosen = ["--cases", "connections", "--points", "1,8", "--seconds", "0.3"]
    run = CliRunner().invoke(bench, ["--growth", *chosen, *files])
    assert run.exit_code == 0, run.output
    points = json.loads((tmp_path / "growth.json").read_text())["cases"]["connections"]
    assert [each["connections"] for each in points] == [1, 8]
    assert all(each["per_s"] > 0 and 0 < each["p50_ms"] <= each["p99_ms"] for each in points)
    assert (tmp_path / "plots" / "growth-connections.svg").read_text().startswith("<svg")
