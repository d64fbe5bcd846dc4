"""Reports of measurements: tables on screen and in Markdown, JSON, and plots as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from portalmq.broker.bench.measure import Figures

YARDSTICKS = ("portalmq", "portalmq-3")

Table = tuple[str, list[str], list[list[str]]]


def number(value: Any) -> str:
    """Return a number with three significant digits, and with commas from a thousand on."""
    if not isinstance(value, (int, float)):
        return "" if value is None else str(value)
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


# --- tables ----------------------------------------------------------------------------------------------------------


def comparison_tables(report: Figures) -> list[Table]:
    """Return the tables of a comparison. A figure is followed by PortalMQ's divided by it, with as many nodes."""
    systems = report["systems"]
    tables = [_rates(report, case) for case in ("produce", "consume")]
    tables += [
        _latencies(report, "synchronous send", "produce"),
        _latencies(report, "send to waiting consumer", "wake"),
    ]
    columns = ["publish_gap_s", "publish_gap_worst_s", "delivery_gap_s", "delivery_gap_worst_s", "lost", "duplicates"]
    tables.append(
        (
            "Gap after the leader's node gets a signal: median and worst, seconds",
            ["system", "signal", "rounds", *columns],
            [
                [each["system"], each["signal"], number(each["rounds"]), *(number(each.get(name)) for name in columns)]
                for each in report["results"]
                if each["case"] == "gap"
            ],
        )
    )
    about = [[name, str(each["nodes"]), each["ack"], each["version"]] for name, each in systems.items()]
    tables.append(("Systems", ["system", "nodes", "an acknowledged message is", "version"], about))
    return [table for table in (*tables, *_circumstances(report)) if table[2]]


def _circumstances(report: Figures) -> list[Table]:
    names = ["before", "spin_ms", "fdatasync_p50_ms", "fdatasync_p99_ms", "load"]
    rows = [[number(each[name]) for name in names] for each in report["calibrations"]]
    missing = [list(each) for each in (report["left_out"] | report["failed"]).items()]
    return [
        ("Left out or failed", ["what", "why"], missing),
        ("Noise: the speed of Python and of the disk meanwhile", names, rows),
    ]


def _rates(report: Figures, case: str) -> Table:
    taken = [each for each in report["results"] if each["case"] == case]
    columns = list(dict.fromkeys((each["size"], each["batch"], each["processes"]) for each in taken))
    rows = []
    for name in report["systems"]:
        of = {(each["size"], each["batch"], each["processes"]): each for each in taken if each["system"] == name}
        if of:
            cells = [_with_ratio(report, of.get(column), "per_s") for column in columns]
            cpu = [number(of.get(column, {}).get("cpu_s_per_million")) for column in columns]
            rows += [[name, *cells], ["  CPU s per million", *cpu]]
    heads = [f"{size} B, {batch} a batch, {processes} proc." for size, batch, processes in columns]
    return f"{case.capitalize()}: messages/s (PortalMQ's divided by it)", ["system", *heads], rows


def _latencies(report: Figures, title: str, case: str) -> Table:
    taken = [each for each in report["results"] if each["case"] == case]
    if case == "produce":
        taken = [each for each in taken if each["batch"] == 1 and each["processes"] == 1]
    names = ["p50_ms", "p90_ms", "p99_ms", "max_ms"]
    rows = []
    for each in taken:
        cells = [_with_ratio(report, each, "p50_ms"), *(number(each.get(name)) for name in names[1:])]
        rows.append([each["system"], number(each["size"]), *cells])
    return f"{title.capitalize()}, ms (PortalMQ's p50 divided by it)", ["system", "bytes", *names], rows


def _with_ratio(report: Figures, figures: Figures | None, name: str) -> str:
    if figures is None or name not in figures:
        return ""
    same = ("nodes", "case", "size", "batch", "processes")
    for each in report["results"]:
        if each["system"] in YARDSTICKS and all(each.get(key) == figures.get(key) for key in same):
            if each["system"] == figures["system"] or name not in each:
                break
            return f"{number(figures[name])} (×{each[name] / figures[name]:.2f})"
    return number(figures[name])


def growth_tables(report: Figures) -> list[Table]:
    """Return a table for each case, a row for each of its points."""
    tables: list[Table] = []
    for case, points in report["cases"].items():
        names = list(dict.fromkeys(name for each in points for name in each))
        tables.append((case, names, [[number(each.get(name)) for name in names] for each in points]))
    return [table for table in (*tables, *_circumstances(report)) if table[2]]


# --- forms -----------------------------------------------------------------------------------------------------------


def as_text(tables: Iterable[Table]) -> str:
    lines = []
    for title, heads, rows in tables:
        widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
        lines.append(title)
        for row in [heads, *rows]:
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            lines.append("  " + "  ".join(cells).rstrip())
        lines.append("")
    return "\n".join(lines)


def as_markdown(tables: Iterable[Table]) -> str:
    lines = []
    for title, heads, rows in tables:
        lines += [f"## {title}", "", _row(heads), "|---" * len(heads) + "|", *map(_row, rows), ""]
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.strip().replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# --- plots -----------------------------------------------------------------------------------------------------------

PANEL_WIDTH, PANEL_HEIGHT, MARGIN, TITLE_HEIGHT = 240, 150, 35, 20
PANELS_IN_A_ROW = 4
# An axis of figures spans this factor at least, so that a figure that hardly changes is drawn flat.
SPAN_MIN = 10.0


def write_plots(report: Figures, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, points in report["cases"].items():
        (folder / f"growth-{name}.svg").write_text(plot(name, points), "utf-8")


def plot(title: str, points: Sequence[Figures]) -> str:
    """Return an SVG with a panel for each figure over the first one; axes are logarithmic where all values permit."""
    over, *names = [name for name in points[0] if isinstance(points[0][name], (int, float))]
    panels = []
    for index, name in enumerate(names):
        row, column = divmod(index, PANELS_IN_A_ROW)
        shift = f"translate({column * PANEL_WIDTH} {row * PANEL_HEIGHT + TITLE_HEIGHT})"
        panels.append(f'<g transform="{shift}">{_panel(over, name, points)}</g>')
    width = PANEL_WIDTH * PANELS_IN_A_ROW
    height = PANEL_HEIGHT * math.ceil(len(names) / PANELS_IN_A_ROW) + TITLE_HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="10"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{MARGIN}" y="14" font-size="13">{escape(title)}</text>{"".join(panels)}</svg>\n'
    )


def _panel(over: str, name: str, points: Sequence[Figures]) -> str:
    known = [(each[over], each[name]) for each in points if each.get(name) is not None]
    if not known:
        return ""
    across = _scale([x for x, _ in known], MARGIN, PANEL_WIDTH - 25)
    heights = [y for _, y in known]
    up = _scale([0.0, *heights] if min(heights) <= 0 else heights, PANEL_HEIGHT - 32, 38, SPAN_MIN)
    dots = [(across(x), up(y), x, y) for x, y in known]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y, _, _ in dots)
    parts = [
        f'<text x="{MARGIN}" y="16">{escape(name)} over {escape(over)}</text>',
        f'<polyline points="{line}" fill="none" stroke="#2266aa" stroke-width="1.5"/>',
    ]
    for x, y, at, value in dots:
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#2266aa"/>')
        parts.append(f'<text x="{x:.1f}" y="{y - 5:.1f}" text-anchor="middle">{number(value)}</text>')
        parts.append(f'<text x="{x:.1f}" y="{PANEL_HEIGHT - 14}" text-anchor="middle" fill="#666">{_short(at)}</text>')
    return "".join(parts)


def _short(value: float) -> str:
    for unit, name in ((1_000_000, "M"), (1_000, "k")):
        if value >= unit and value % (unit / 10) == 0:
            return f"{value / unit:g}{name}"
    return number(value)


def _scale(values: Sequence[float], begin: float, end: float, span_min: float = 1.0) -> Callable[[float], float]:
    """Return the map from values to coordinates: logarithmic if all are above 0, and then over `span_min` at least."""
    is_logarithmic = min(values) > 0
    bend: Callable[[float], float] = math.log if is_logarithmic else float
    low, high = bend(min(values)), bend(max(values))
    if is_logarithmic:
        more = max(0.0, math.log(span_min) - (high - low)) / 2
        low, high = low - more, high + more
    if math.isclose(low, high):
        return lambda value: (begin + end) / 2
    return lambda value: begin + (end - begin) * (bend(value) - low) / (high - low)
