"""Plots as inline SVG: small, sharp in print, and coloured by the page's CSS for light and dark.

A plot fits a phone and a wide screen without a script. The SVG holds shapes only, and stretches to the available width
(strokes do not: vector-effect); its labels are HTML beside it, positioned in percent.

    figure .plot
      figcaption      the finding, and the unit
      .legend
      .chart          .ordinate (labels) | .canvas (grid, svg, marks, the cursor) | .abscissa (labels)
      details         the same as a table

page.js adds a cursor that names the values under the pointer, or, with the arrow keys, of one column after another. It
reads them from JSON in the figure; without a script only the cursor is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from portalmq.spark.report.axes import AxisTick, Linear, Logarithmic, Times
from portalmq.spark.report.markup import Markup, element, join

# Above this many columns there is no room for a gap between bars.
BARS_MAX = 120
# From this many columns on, a column TOWERING times higher than 95 percent of them is cut.
COLUMNS_TO_CUT_MIN = 20
TOWERING = 4
HEAT_LEVELS = 8
_COLUMNS_TO_FILL = 7
PLAIN_HUE = 287.0
# Marks closer to each other than this (percent of the width) are merged.
_MARKS_APART = 1.5


@dataclass(frozen=True, slots=True)
class Colour:
    """A hue of the page's colour wheel; None is the grey of the rest."""

    hue: float | None = None
    is_deep: bool = False

    @property
    def style(self) -> str | None:
        return None if self.hue is None else f"--h:{self.hue:.0f}"

    def css(self, *more: str) -> str:
        kind = "rest" if self.hue is None else "deep" if self.is_deep else "hue"
        return " ".join([kind, *more])


@dataclass(frozen=True, slots=True)
class PlotSeries:
    """One series of a plot: a value a column, None where there is none."""

    name: str
    values: Sequence[float | None]
    colour: Colour = field(default_factory=Colour)


@dataclass(frozen=True, slots=True)
class Mark:
    """A marked time, `percent` from the left."""

    percent: float
    label: str


def plain() -> Colour:
    """Return the colour of a plot with a single series."""
    return Colour(PLAIN_HUE, is_deep=True)


def colours(number: int, first_hue: float = 268.0) -> list[Colour]:
    """Return colours for neighbours: hues as far apart as possible, every second one deeper."""
    apart = min(360 / max(number, 1), 68.0)
    return [Colour((first_hue - apart * n) % 360, is_deep=n % 2 == 1) for n in range(number)]


def stacked(
    series: Sequence[PlotSeries],
    times: Times,
    *,
    unit: str,
    label: Callable[[float], str],
    marks: Sequence[Mark] = (),
    describe: str,
) -> Markup:
    """Return stacked columns. A burst that would flatten all others is cut, and labelled with its height."""
    totals = [sum(one.values[column] or 0 for one in series) for column in range(times.columns)]
    most = max(totals, default=0.0)
    axis = Linear.up_to(_usual_top(totals), label)
    if most > axis.top:
        middle = 100 * (totals.index(most) + 0.5) / times.columns
        marks = [*marks, Mark(middle, f"cut here: {label(most)}/s")]
    width = 0.84 if times.columns <= BARS_MAX else 1.0
    below = [0.0] * times.columns
    shapes = []
    for one in series:
        path = []
        for column, value in enumerate(one.values):
            if not value:
                continue
            bottom = round(axis.percent(below[column]), 1)
            below[column] += value
            height = round(axis.percent(below[column]), 1) - bottom
            path.append(f"M{_n(column + (1 - width) / 2)} {_n(100 - bottom)}v{_n(-height)}h{_n(width)}v{_n(height)}")
        shapes.append(element("path", d="".join(path), class_=one.colour.css("fill"), style=one.colour.style))
    drawing = _svg(f"0 0 {times.columns} 100", *shapes)
    hover = _hover([times.label(column) for column in range(times.columns)], series, unit, total=len(series) > 1)
    return chart(drawing, axis.ticks, times.ticks, marks=marks, describe=describe, hover=hover)


def _usual_top(totals: Sequence[float]) -> float:
    """Return the greatest value, or a little more than 95 percent of them when the greatest towers above these."""
    found = sorted(total for total in totals if total)
    if len(found) < COLUMNS_TO_CUT_MIN:
        return max(found, default=0.0)
    usual = found[int(0.95 * (len(found) - 1))]
    return 1.25 * usual if found[-1] > TOWERING * usual else found[-1]


def lines(
    series: Sequence[PlotSeries],
    times: Times,
    *,
    unit: str,
    label: Callable[[float], str],
    thin: frozenset[int] = frozenset(),
    marks: Sequence[Mark] = (),
    describe: str,
) -> Markup:
    """Return lines over a logarithmic axis; a missing value breaks them. `thin` has indexes of less prominent lines."""
    axis = Logarithmic.around((v for one in series for v in one.values if v is not None), label)
    shapes = [
        element(
            "path",
            d=_line([None if value is None else axis.percent(value) for value in one.values]),
            class_=one.colour.css("line", *(["thin"] if index in thin else [])),
            style=one.colour.style,
        )
        for index, one in enumerate(series)
    ]
    drawing = _svg(f"0 0 {times.columns} 100", *shapes)
    hover = _hover([times.label(column) for column in range(times.columns)], series, unit)
    return chart(drawing, axis.ticks, times.ticks, marks=marks, describe=describe, hover=hover)


def _line(percents: Sequence[float | None]) -> str:
    """Draw through the middles of the columns. A point between two gaps is a line of length 0, shown by round caps."""
    path, pen_is_down = [], False
    for column, percent in enumerate(percents):
        if percent is not None:
            path.append(f"{'L' if pen_is_down else 'M'}{_n(column + 0.5)} {_n(100 - percent)}")
            if not pen_is_down:
                path.append("h0")
        pen_is_down = percent is not None
    return "".join(path)


def histogram(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    unit: str,
    colour: Colour,
    borders: Sequence[str],
    describe: str,
    short: bool = False,
    between: bool = False,
) -> Markup:
    """Return one column a class. `borders` has the classes' lower borders and the upper border of the last; or, with
    `between`, the classes' names."""
    axis = Linear.up_to(max(values, default=0), ticks=2 if short else 4)
    path = [
        f"M{_n(column + 0.04)} 100v{_n(-max(axis.percent(value), 0.8))}h.92V100z"
        for column, value in enumerate(values)
        if value
    ]
    shape = element("path", d="".join(path), class_=colour.css("fill"), style=colour.style)
    every = -(-len(borders) // (5 if short else 9))  # several short ones are placed side by side
    ticks = [
        AxisTick(100 * (at + between / 2) / len(values), text) for at, text in enumerate(borders) if at % every == 0
    ]
    hover = _hover(labels, [PlotSeries("", values, colour)], unit)
    drawing = _svg(f"0 0 {max(len(values), 1)} 100", shape)
    # Without a limit two or three columns would be blocks.
    style = f"max-width:{60 + 150 * len(values)}px" if len(values) < _COLUMNS_TO_FILL else None
    size = "short" if short else ""
    return chart(drawing, axis.ticks, ticks, describe=describe, hover=hover, size=size, style=style)


def heat_map(
    names: Sequence[str],
    rows: Sequence[Sequence[float]],
    labels: Sequence[str],
    ticks: Sequence[AxisTick],
    *,
    unit: str,
    label: Callable[[float], str],
    marks: Sequence[Mark] = (),
    describe: str,
) -> Markup:
    """Return one row a name, one column a label: colour strength is linear up to the greatest value of all."""
    most = max((value for row in rows for value in row), default=0.0)
    columns = len(labels)
    shapes = [
        element("path", d=path, class_=f"heat{level}")
        for level in range(1, HEAT_LEVELS + 1)
        if (path := _runs([[_level(value, most) == level for value in row] for row in rows]))
    ]
    drawing = _svg(f"0 0 {columns} {len(rows)}", *shapes)
    every = -(-len(names) // 40)
    beside = [AxisTick(100 - 100 * (n + 0.5) / len(names), name) for n, name in enumerate(names) if n % every == 0]
    hover = {"at": list(labels), "rows": list(names), "values": [[_r(v) for v in row] for row in rows], "unit": unit}
    scale = element(
        "p",
        element("span", "few"),
        [element("i", class_=f"heat{level}") for level in range(1, HEAT_LEVELS + 1)],
        element("span", f"{label(most)} {unit}".strip()),
        class_="scale",
    )
    height = max(min(len(rows) * 20, 900), len(rows) * 6, 60)
    made = chart(
        drawing, beside, ticks, marks=marks, describe=describe, hover=hover, size="heat", style=f"--height:{height}px"
    )
    return join(made, scale)


def _level(value: float, most: float) -> int:
    """Return the colour level; 0 for no value. Linear: twice the level is twice the rate."""
    return 0 if value <= 0 else min(HEAT_LEVELS, 1 + int(HEAT_LEVELS * value / most - 1e-9))


def _runs(rows: Sequence[Sequence[bool]]) -> str:
    """Draw the true cells as horizontal strokes: 6 to 12 characters a run, whatever its length."""
    path = []
    for number, row in enumerate(rows):
        column, pen = 0, None
        while column < len(row):
            if not row[column]:
                column += 1
                continue
            end = column
            while end < len(row) and row[end]:
                end += 1
            path.append(f"M{column} {number}.5" if pen is None else f"m{column - pen} 0")
            path.append(f"h{end - column}")
            column = pen = end
    return "".join(path)


def spark_line(values: Sequence[float | None], most: float, colour: Colour) -> Markup:
    """Return a sparkline of a topic; `most` is the common height in one table."""
    path = ["M0 20"]
    for column, value in enumerate(values):
        path.append(f"V{_n(20 - 19 * (value or 0) / (most or 1))}H{column + 1}")
    path.append("V20z")
    shape = element("path", d="".join(path), class_=colour.css("fill"), style=colour.style)
    return _svg(f"0 0 {max(len(values), 1)} 20", shape, class_="spark")


def bar(part: float, colour: Colour) -> Markup:
    """Return a horizontal bar for a table cell, `part` of the cell long."""
    width = 100 * min(max(part, 0.0), 1.0)
    style = ";".join(filter(None, [f"width:{_n(width)}%", colour.style]))
    inner = element("span", class_=colour.css("bar"), style=style)
    return element("span", inner, class_="track", aria_hidden="true")


def legend(series: Iterable[PlotSeries], thin: str = "") -> Markup:
    items = [
        element("li", element("i", class_=one.colour.css("dot"), style=one.colour.style), one.name) for one in series
    ]
    return element("ul", items, element("li", thin, class_="note") if thin else None, class_="legend")


def joined(marks: Iterable[tuple[float, str]], several: Callable[[int], str]) -> list[Mark]:
    """Merge marks that would overlap into one, labelled by `several` with their number."""
    found: list[list[tuple[float, str]]] = []
    for percent, text in sorted(marks):
        if found and percent - found[-1][0][0] < _MARKS_APART:
            found[-1].append((percent, text))
        else:
            found.append([(percent, text)])
    return [Mark(one[0][0], one[0][1] if len(one) == 1 else several(len(one))) for one in found]


def chart(
    drawing: Markup,
    ordinate: Iterable[AxisTick],
    abscissa: Iterable[AxisTick],
    *,
    describe: str,
    hover: dict[str, object],
    marks: Sequence[Mark] = (),
    size: str = "",
    style: str | None = None,
) -> Markup:
    # The end of a long name says more than its start: CSS cuts row names in front, and bdi keeps their order.
    beside = [element("span", element("bdi", tick.label), style=f"bottom:{_n(tick.percent)}%") for tick in ordinate]
    rules = [element("i", style=f"bottom:{_n(tick.percent)}%") for tick in ordinate] if size != "heat" else []
    below = [
        element("span", tick.label, class_=_label_class(tick.percent, number), style=f"left:{_n(tick.percent)}%")
        for number, tick in enumerate(abscissa)
    ]
    flags = [
        element(
            "span",
            element("b", mark.label),
            class_="end" if mark.percent > 65 else None,
            style=f"left:{_n(mark.percent)}%",
        )
        for mark in marks
    ]
    return element(
        "div",
        element("div", beside, class_="ordinate", aria_hidden="true"),
        element(
            "div",
            element("div", rules, class_="rules", aria_hidden="true"),
            drawing,
            element("div", flags, class_="marks") if flags else None,
            class_="canvas",
            role="group",
            aria_roledescription="plot",
            aria_label=describe,
            tabindex="0",
        ),
        element("div", below, class_="abscissa", aria_hidden="true"),
        _data(hover),
        class_=f"chart {size}".strip(),
        style=style,
    )


def _hover(labels: Sequence[str], series: Sequence[PlotSeries], unit: str, *, total: bool = False) -> dict[str, object]:
    listed = [
        {
            "name": one.name,
            "class": one.colour.css(),
            "style": one.colour.style or "",
            "values": [None if value is None else _r(value) for value in one.values],
        }
        for one in series
    ]
    return {"at": list(labels), "series": listed, "unit": unit, "total": total}


def _data(hover: dict[str, object]) -> Markup:
    """Embed JSON in HTML: `<` is the only character by which a name could end the element."""
    text = json.dumps(hover, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return Markup(f'<script type="application/json">{text}</script>')


def _svg(view_box: str, *shapes: Markup, class_: str | None = None) -> Markup:
    return element("svg", *shapes, viewBox=view_box, preserveAspectRatio="none", aria_hidden="true", class_=class_)


def _label_class(percent: float, number: int) -> str | None:
    """Return the label's class: at the right end it is placed inside; on a phone every second label is hidden."""
    return " ".join(filter(None, ["end" if percent > 97 else "", "odd" if number % 2 else ""])) or None


def _n(number: float) -> str:
    """Format a coordinate: two decimals are less than a pixel."""
    text = f"{number:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _r(value: float) -> float | None:
    """Round to four significant digits."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded
