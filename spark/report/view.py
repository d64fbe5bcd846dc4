"""What the sections of a page share: one time axis, one colour a topic and a group, the moments worth a mark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from portalmq.spark.report import words
from portalmq.spark.report.axes import Times
from portalmq.spark.report.markup import Child, Markup, element, join
from portalmq.spark.report.model import FailOver, Report
from portalmq.spark.report.plots import Colour, Mark, colours, joined

# So many can be told apart by colour, at best; what is above is summed up.
TOPICS_COLOURED = 12
GROUPS_COLOURED = 6
ROWS_MAX = 250


@dataclass(frozen=True, slots=True)
class ReportView:
    """`times` is None when there is no message. `topics` and `groups` are the ones with a colour of their own, in the
    order in which they are shown."""

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
        """The sentence about what a list of the report does not show."""
        number = self.report.left_out.get(name, 0)
        if not number:
            return None
        return note(f"{words.plural(number, what, many)} more: all are in the Parquet files beside this page.")


def changes_of_leaders(epochs: Iterable[FailOver]) -> list[FailOver]:
    """Epochs that followed another one. The first that a partition has here began its life, or what is left of it."""
    found, known = [], set()
    for epoch in sorted(epochs, key=lambda epoch: (epoch.leader_epoch, epoch.at_ms)):
        partition = epoch.topic, epoch.partition
        if partition in known or epoch.gap_ms is not None:
            found.append(epoch)
        known.add(partition)
    return sorted(found, key=lambda epoch: (epoch.at_ms, epoch.topic, epoch.partition))


def _coloured(weights: dict[str, int] | Counter[str], at_most: int, hue: float) -> dict[str, Colour]:
    """The heaviest, by name."""
    names = sorted(weights, key=lambda name: (-weights[name], name))
    # One colour is kept back for the rest.
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
    """`title` says what is seen, `what` is what the plot shows, and its unit."""
    numbers = element("details", element("summary", "The same as a table"), framed(table)) if table else None
    caption = element("figcaption", element("h3", title), element("p", what))
    return element("figure", caption, *body, numbers, class_="plot")


def nothing(sentence: str) -> Markup:
    return element("p", sentence, class_="nothing")


def note(sentence: str) -> Markup:
    return element("p", sentence, class_="note")


@dataclass(frozen=True, slots=True)
class Column:
    """`is_text` stands left, figures right."""

    title: str
    is_text: bool = False


def table(columns: Sequence[Column], rows: Iterable[Sequence[Child]], caption: str) -> Markup:
    """The first column is what a row is about. Rows come with what matters most first: a page that should open on a
    phone shows ROWS_MAX of them, and says how many there are."""
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
    """A table that may be wider than a phone scrolls by itself, and not the page."""
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label="Table, may be scrolled")


def named(colour: Colour, name: str) -> Markup:
    return join(element("i", class_=colour.css("dot"), style=colour.style), element("span", name, class_="name"))
