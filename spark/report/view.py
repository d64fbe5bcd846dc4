"""The common parts of a page's sections: the time axis, the colours of topics and groups, and the marks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portalmq.spark.report import words
from portalmq.spark.report.axes import Times
from portalmq.spark.report.markup import Child, Markup, element, join
from portalmq.spark.report.model import FailOver, Report
from portalmq.spark.report.plots import Colour, Mark, colours, joined

# The number of colours that can be told apart; further topics or groups are summed up.
TOPICS_COLOURED = 12
GROUPS_COLOURED = 6
ROWS_MAX = 250


@dataclass(frozen=True, slots=True)
class ReportView:
    """A report with its display choices. `times` is None without messages. `topics` and `groups` have those with a
    colour of their own, in display order."""

    report: Report
    times: Times | None
    topics: dict[str, Colour]
    groups: dict[str, Colour]
    changes: list[FailOver]
    marks: list[Mark]

    @classmethod
    def of(cls, report: Report) -> ReportView:
        moments = [point.at_ms for point in report.throughput]
        moments += [point.at_ms for point in report.partition_throughput]
        moments += [point.at_ms for point in report.latency_over_time]
        times = Times.over(moments, max(report.bucket_ms, 1))
        changes = changes_of_leaders(report.fail_overs)
        groups = Counter[str]()
        for group in report.groups:
            groups[group.group] += group.delivered
        return cls(
            report,
            times,
            _coloured({topic.topic: topic.messages for topic in report.topics}, TOPICS_COLOURED, 268),
            _coloured(groups, GROUPS_COLOURED, 215),
            changes,
            _marks(changes, times) if times else [],
        )

    def colour_of_topic(self, topic: str) -> Colour:
        return self.topics.get(topic, Colour())

    def colour_of_group(self, group: str) -> Colour:
        return self.groups.get(group, Colour())

    def left_out(self, name: str, what: str, many: str = "") -> Markup | None:
        """Return the note about entries that a list leaves out."""
        number = self.report.left_out.get(name, 0)
        if not number:
            return None
        return note(f"{words.plural(number, what, many)} more: all are in the Parquet files beside this page.")


def changes_of_leaders(epochs: Iterable[FailOver]) -> list[FailOver]:
    """Return the epochs that followed another. A partition's first known epoch is not a change of leaders."""
    found, known = [], set()
    for epoch in sorted(epochs, key=lambda epoch: (epoch.leader_epoch, epoch.at_ms)):
        partition = epoch.topic, epoch.partition
        if partition in known or epoch.gap_ms is not None:
            found.append(epoch)
        known.add(partition)
    return sorted(found, key=lambda epoch: (epoch.at_ms, epoch.topic, epoch.partition))


def _coloured(weights: dict[str, int] | Counter[str], at_most: int, hue: float) -> dict[str, Colour]:
    """Return colours for the heaviest names, by name."""
    names = sorted(weights, key=lambda name: (-weights[name], name))
    # One colour is reserved for the rest.
    names = sorted(names if len(names) <= at_most else names[: at_most - 1])
    return dict(zip(names, colours(len(names), hue), strict=True))


def _marks(changes: Sequence[FailOver], times: Times) -> list[Mark]:
    seen = ((times.percent(change.at_ms), "new leader") for change in changes)
    within = ((percent, label) for percent, label in seen if 0 <= percent <= 100)
    return joined(within, lambda number: f"{number} new leaders")


def section(anchor: str, title: str, *body: Child) -> Markup:
    return element(
        "section", element("h2", title, id=f"{anchor}-title"), *body, id=anchor, aria_labelledby=f"{anchor}-title"
    )


def figure(title: str, what: str, *body: Child, table: Markup | None = None) -> Markup:
    """Return a figure. `title` is its finding, `what` says what it shows, and the unit."""
    numbers = element("details", element("summary", "The same as a table"), framed(table)) if table else None
    caption = element("figcaption", element("h3", title), element("p", what))
    return element("figure", caption, *body, numbers, class_="plot")


def nothing(sentence: str) -> Markup:
    return element("p", sentence, class_="nothing")


def note(sentence: str) -> Markup:
    return element("p", sentence, class_="note")


@dataclass(frozen=True, slots=True)
class Column:
    """A table column. Text is aligned left, figures right."""

    title: str
    is_text: bool = False


def table(columns: Sequence[Column], rows: Iterable[Sequence[Child]], caption: str) -> Markup:
    """Return a table whose first column is the row header. Rows come in order of importance: to open on a phone, the
    page shows ROWS_MAX of them and the number of the others."""
    shown = list(rows)
    hidden = len(shown) - ROWS_MAX
    more = element(
        "p", f"{words.plural(hidden, 'row')} more: all are in the Parquet files beside this page.", class_="note"
    )
    head = [element("th", column.title, scope="col", class_="text" if column.is_text else None) for column in columns]
    body = [
        element(
            "tr",
            [
                element(
                    "td" if number else "th",
                    cell,
                    scope=None if number else "row",
                    class_="text" if column.is_text else None,
                )
                for number, (column, cell) in enumerate(zip(columns, row, strict=True))
            ],
        )
        for row in shown[:ROWS_MAX]
    ]
    made = element("table", element("caption", caption), element("thead", element("tr", head)), element("tbody", body))
    return join(made, more) if hidden > 0 else made


def framed(made: Markup) -> Markup:
    """Put a table into a scrollable frame, for screens narrower than the table."""
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label="Table, may be scrolled")


def named(colour: Colour, name: str) -> Markup:
    return join(element("i", class_=colour.css("dot"), style=colour.style), element("span", name, class_="name"))
