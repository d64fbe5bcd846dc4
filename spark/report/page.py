"""The report as one HTML file that opens from disk, needs no network, and prints.

appended.py and delivered.py have the sections, view.py their common parts. The page's Content-Security-Policy allows
one script, by its hash, and nothing from elsewhere: even a name that evaded the escaping in markup.py could not run.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from importlib import resources
from pathlib import Path

from portalmq.spark.report import appended, delivered, words
from portalmq.spark.report.markup import Markup, element, join
from portalmq.spark.report.model import Report
from portalmq.spark.report.view import ReportView

_SECTIONS: tuple[tuple[str, str, Callable[[ReportView], Markup]], ...] = (
    ("throughput", "Throughput", appended.throughput),
    ("partitions", "Partitions", appended.partitions),
    ("sizes", "Sizes", appended.sizes),
    ("producers", "Producers", appended.producers),
    ("latency", "Latency", delivered.latency),
    ("redeliveries", "Redeliveries", delivered.redeliveries),
    ("lag", "Lag", delivered.lag),
    ("leaders", "Fail-overs", delivered.leaders),
)
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Cpath fill='%235b3fd6' "
    "d='M2 14V9h3v5zM6.5 14V2h3v12zM11 14V6h3v8z'/%3E%3C/svg%3E"
)


def write(report: Report, path: Path) -> None:
    """Write the page atomically: an existing one is replaced in one step. Raises OSError."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(html(report), encoding="utf-8", errors="replace")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def html(report: Report) -> str:
    view = ReportView.of(report)
    script, style = _shipped("page.js"), _shipped("page.css")
    trusted = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{trusted}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{words.plural(report.totals.messages, 'message')} · PortalMQ throughput report"),
        element("link", rel="icon", href=_ICON),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "To the figures", href="#throughput", class_="skip"),
        _masthead(report),
        element("main", _tiles(view), [make(view) for _, _, make in _SECTIONS]),
        _foot(report),
        element("script", Markup(script)),
    )
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _shipped(name: str) -> str:
    return (resources.files(__package__ or "") / name).read_text(encoding="utf-8")


def _masthead(report: Report) -> Markup:
    links = [element("a", name, href=f"#{anchor}") for anchor, name, _ in _SECTIONS]
    return element(
        "header",
        element("p", "PortalMQ throughput report", class_="kicker"),
        element("h1", _headline(report)),
        element("p", _when(report), class_="when"),
        element("nav", links, aria_label="Sections"),
    )


def _headline(report: Report) -> str:
    totals = report.totals
    if not totals.messages:
        return "No messages yet"
    span = _span_ms(report)
    return (
        f"{words.plural(totals.messages, 'message')} in {words.duration(span)}"
        if span
        else (f"{words.plural(totals.messages, 'message')} at once")
    )


def _span_ms(report: Report) -> int:
    first, last = report.totals.first_ms, report.totals.last_ms
    return last - first if first is not None and last is not None else 0


def _when(report: Report) -> str:
    totals = report.totals
    if totals.first_ms is None or totals.last_ms is None:
        return f"There is nothing to measure in what was read. Made {words.moment(report.made_at_ms)}."
    if words.moment(totals.first_ms) == words.moment(totals.last_ms):
        return f"{words.moment(totals.first_ms)}. Made {words.moment(report.made_at_ms)}."
    first, last = words.moment(totals.first_ms).removesuffix(" UTC"), words.moment(totals.last_ms)
    last = last.removeprefix(f"{words.day(totals.first_ms)}, ")
    return f"{first} to {last}. Made {words.moment(report.made_at_ms)}."


def _tiles(view: ReportView) -> Markup | None:
    report, totals = view.report, view.report.totals
    if not totals.messages:
        return None
    tiles = [
        _tile("Mean rate", words.rate(totals.messages_per_s), f"{words.size(totals.bytes_per_s)}/s"),
        _tile("Peak rate", words.rate(totals.peak_messages_per_s), f"in {words.duration(report.bucket_ms)}"),
        _tile("Data", words.size(totals.bytes), f"{words.size(totals.bytes / totals.messages)} a message"),
        _tile("Topics", words.count(totals.topics), words.plural(totals.partitions, "partition")),
        _tile("Producers", words.count(totals.producers), "with an id"),
        _latency_tile(view),
        _redelivery_tile(view),
        _change_tile(view),
    ]
    return element("dl", tiles, class_="tiles")


def _tile(name: str, figure: str, more: str) -> Markup:
    return element("div", element("dt", name), element("dd", element("b", figure), element("span", more)))


def _latency_tile(view: ReportView) -> Markup:
    if not any(bucket.messages for bucket in view.report.latencies):
        return _tile("Half delivered within", words.NONE, "no group has read yet")
    group, half, most = delivered.usual(view.report)
    whose = f", {group}" if view.report.totals.groups > 1 else ""
    return _tile("Half delivered within", words.duration(half), f"99 % within {words.duration(most)}{whose}")


def _redelivery_tile(view: ReportView) -> Markup:
    groups = [group for group in view.report.groups if group.mode == "queue"]
    delivered, again = sum(group.delivered for group in groups), sum(group.redelivered for group in groups)
    if not delivered:
        return _tile("Redelivered", words.NONE, "no queue group has read yet")
    return _tile("Redelivered", words.share(again / delivered), f"{words.count(again)} of {words.count(delivered)}")


def _change_tile(view: ReportView) -> Markup:
    pauses = [change.gap_ms for change in view.changes if change.gap_ms is not None]
    more = f"longest pause {words.duration(max(pauses))}" if pauses else "no pause"
    return _tile("Fail-overs", words.count(len(view.changes)), more if view.changes else "every leader stayed")


def _foot(report: Report) -> Markup:
    sources = [element("li", element("code", source)) for source in report.sources]
    text = (
        "Read from the brokers' own files: committed messages, each counted once though every replica holds it. Sizes "
        "are those of values, without keys and headers; 1 kB is 1,000 bytes, 1 KiB is 1,024. Times are UTC. The same "
        "figures stand in report.json beside this page, and in full as Parquet files."
    )
    return element(
        "footer", element("p", text), join(element("p", "Read:"), element("ul", sources)) if sources else None
    )
