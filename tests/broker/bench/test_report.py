"""Tables, Markdown and plots of measurements."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from portalmq.broker.bench import report


def _result(system: str, per_s: float, p50_ms: float, **more: Any) -> dict[str, Any]:
    what = {"case": "produce", "nodes": 1, "size": 100, "batch": 1, "processes": 1, "rounds": 3}
    figures = {"per_s": per_s, "p50_ms": p50_ms, "p90_ms": 2.0, "p99_ms": 3.0, "max_ms": 4.0, "cpu_s_per_million": 50.0}
    return {"system": system, **what, **figures, **more}


def _report(*results: dict[str, Any]) -> dict[str, Any]:
    about = {each["system"]: {"nodes": each["nodes"], "ack": "on disk | kept", "version": "1.2"} for each in results}
    noise = {"before": "redis", "spin_ms": 10.0, "fdatasync_p50_ms": 0.2, "fdatasync_p99_ms": 0.9, "load": 0.1}
    return {
        "systems": about,
        "results": list(results),
        "left_out": {"nats": "no nats-server"},
        "failed": {},
        "calibrations": [noise],
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.8, "1,234,568"), (12.345, "12.3"), (0.04567, "0.0457"), (3, "3"), (0.0, "0"), (None, ""), ("a", "a")],
)
def test_a_number_has_three_digits(value: Any, text: str) -> None:
    assert report.number(value) == text


def test_ratios_compare_with_portalmq_of_as_many_nodes() -> None:
    found = _report(
        _result("portalmq", 500, 2.0),
        _result("redis", 1000, 1.0),
        _result("portalmq-3", 300, 4.0, nodes=3),
        _result("rabbitmq-3", 100, 8.0, nodes=3),
    )
    tables = {title.split(":")[0].split(",")[0]: rows for title, _, rows in report.comparison_tables(found)}
    assert [row[1] for row in tables["Produce"][::2]] == ["500", "1,000 (×0.50)", "300", "100 (×3.00)"]
    assert tables["Produce"][1] == ["  CPU s per million", "50"]
    assert [row[2] for row in tables["Synchronous send"]] == ["2", "1 (×2.00)", "4", "8 (×0.50)"]
    assert tables["Left out or failed"] == [["nats", "no nats-server"]]


def test_a_figure_that_portalmq_does_not_have_has_no_ratio() -> None:
    tables = report.comparison_tables(_report(_result("redis", 1000, 1.0)))
    assert tables[0][2][0] == ["redis", "1,000"]


def test_gaps_have_their_own_table() -> None:
    gap = {"system": "nats-3", "nodes": 3, "case": "gap", "signal": "SIGSTOP", "rounds": 3, "lost": 0}
    found = _report({**gap, "publish_gap_s": 4.5, "publish_gap_worst_s": 7.25})
    title, _, rows = report.comparison_tables(found)[0]
    assert title.startswith("Gap")
    assert rows == [["nats-3", "SIGSTOP", "3", "4.50", "7.25", "", "", "0", ""]]


def test_markdown_escapes_what_would_break_a_row() -> None:
    text = report.as_markdown([("Title", ["a", "b"], [["x | y", "two\nlines"]])])
    assert text == "## Title\n\n| a | b |\n|---|---|\n| x \\| y | two lines |\n"


def test_text_is_aligned() -> None:
    text = report.as_text([("Title", ["name", "figure"], [["a", "1"], ["longer", "1,000"]])])
    assert text.splitlines() == ["Title", "  name    figure", "  a            1", "  longer   1,000"]


def test_a_plot_has_a_panel_for_each_figure_and_a_dot_for_each_point() -> None:
    points = [{"batch": 10**n, "per_s": 1000.0 * n, "p50_ms": 5.0, "note": "text"} for n in range(3)]
    root = ElementTree.fromstring(report.plot("batch <size>", points))
    tags = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert tags.count("polyline") == 2
    assert tags.count("circle") == 6
    assert "per_s over batch" in "".join(root.itertext())


def test_a_plot_of_one_point_or_of_none_of_a_figure_is_drawn() -> None:
    ElementTree.fromstring(report.plot("one", [{"x": 1, "y": 0.0}]))
    ElementTree.fromstring(report.plot("gaps", [{"x": 1, "y": 1}, {"x": 2}]))
