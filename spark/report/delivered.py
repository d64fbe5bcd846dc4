"""The page's sections about deliveries: latency, redeliveries, lag; and changes of leaders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from portalmq.spark.report import plots, words
from portalmq.spark.report.axes import Times
from portalmq.spark.report.markup import Markup, element
from portalmq.spark.report.model import GroupFigures, LagFigures, LatencyBucket, Report
from portalmq.spark.report.plots import PlotSeries
from portalmq.spark.report.view import (
    ROWS_MAX,
    Column,
    ReportView,
    figure,
    framed,
    named,
    note,
    nothing,
    section,
    table,
)

# Later deliveries share one column.
ATTEMPTS_SHOWN = 24


def latency(view: ReportView) -> Markup:
    by_group: dict[str, list[LatencyBucket]] = defaultdict(list)
    for bucket in view.report.latencies:
        by_group[bucket.group].append(bucket)
    if not any(bucket.messages for bucket in view.report.latencies):
        text = (
            "No group has read yet, so there is no latency to show."
            if not view.report.groups
            else ("The groups that there are have been given no message yet, so there is no latency to show.")
        )
        return section("latency", "Delivery latency", nothing(text))
    shown = [group for group in view.groups if by_group.get(group)]
    low = min(bucket.from_ms for bucket in view.report.latencies if bucket.messages)
    high = max(bucket.to_ms for bucket in view.report.latencies if bucket.messages)
    cards = [_distribution(view, group, by_group[group], low, high) for group in shown]
    hidden = len(by_group) - len(shown)
    return section(
        "latency",
        "Delivery latency",
        figure(
            _sentence(view.report),
            "From the moment a message could be delivered to when it was first handed out (queue groups), or to the "
            "commit behind it (stream groups). Messages by latency; the borders are powers of two.",
            element("div", cards, class_="multiples" if len(cards) > 1 else None),
            note(f"The {len(shown)} busiest of {len(by_group)} groups; the table has them all.") if hidden else None,
            table=_distribution_table(by_group),
        ),
        _over_time(view),
        _quantiles(view),
    )


def usual(report: Report) -> tuple[str, float, float]:
    """Return the group with the most deliveries, and bounds for its median and 99th percentile (ms).

    A group on several topics has quantiles for each. The quantile of all together does not exceed the greatest of them,
    so that is a bound; the border of a histogram class is one as well.
    """
    found = report.latencies
    by_group: dict[str, list[LatencyBucket]] = defaultdict(list)
    for bucket in found:
        by_group[bucket.group].append(bucket)
    group = max(by_group, key=lambda name: sum(bucket.messages for bucket in by_group[name]))
    topics = [each.latency_ms for each in report.groups if each.group == group and each.latency_ms is not None]
    half, most = float(_within(by_group[group], 0.5)), float(_within(by_group[group], 0.99))
    if topics and "groups" not in report.left_out:
        half, most = min(half, max(each.p50 for each in topics)), min(most, max(each.p99 for each in topics))
    return group, half, most


def _sentence(report: Report) -> str:
    group, half, most = usual(report)
    text = (
        f"99 % within {words.duration(most)}"
        if half == most
        else f"half within {words.duration(half)}, 99 % within {words.duration(most)}"
    )
    return f"{group} got {text}"


def _within(buckets: Sequence[LatencyBucket], part: float) -> int:
    """Return the border that this part of the deliveries stays below, whatever the values within a bucket."""
    ordered = sorted(buckets, key=lambda bucket: bucket.to_ms)
    missing = part * sum(bucket.messages for bucket in ordered)
    for bucket in ordered:
        missing -= bucket.messages
        if missing <= 1e-9:
            return bucket.to_ms
    return ordered[-1].to_ms


def _distribution(view: ReportView, group: str, buckets: list[LatencyBucket], low: int, high: int) -> Markup:
    """Return one group's histogram. All groups use the same classes, so that they compare."""
    borders = [low]
    while borders[-1] < high:
        borders.append(max(2 * borders[-1], 1))
    counts = dict.fromkeys(borders[:-1], 0)
    for bucket in buckets:
        if bucket.from_ms in counts:
            counts[bucket.from_ms] += bucket.messages
    labels = [f"{words.duration(a)} to {words.duration(b)}" for a, b in pairwise(borders)]
    colour = view.colour_of_group(group)
    made = plots.histogram(
        labels,
        list(counts.values()),
        unit="messages",
        colour=colour,
        borders=[words.duration(border) for border in borders],
        describe=f"Columns: messages of {group} by delivery latency",
        short=len(view.groups) > 1,
    )
    text = f"{words.count(sum(counts.values()))} messages"
    return element("div", element("h4", named(colour, group), element("small", text)), made, class_="multiple")


def _distribution_table(by_group: dict[str, list[LatencyBucket]]) -> Markup:
    columns = [Column("Group", is_text=True), Column("From"), Column("To"), Column("Messages"), Column("Share")]
    rows = (
        [
            group,
            words.duration(bucket.from_ms),
            words.duration(bucket.to_ms),
            words.count(bucket.messages),
            words.share(bucket.messages / max(sum(one.messages for one in buckets), 1)),
        ]
        for group, buckets in sorted(by_group.items())
        for bucket in sorted(buckets, key=lambda bucket: bucket.from_ms)
    )
    return table(columns, rows, "Deliveries by latency")


def _over_time(view: ReportView) -> Markup | None:
    times = view.times
    points = [point for point in view.report.latency_over_time if point.group in view.groups]
    if times is None or not points:
        return None
    groups = [group for group in view.groups if any(point.group == group for point in points)]
    p50: dict[str, list[float | None]] = {group: [None] * times.columns for group in groups}
    p99: dict[str, list[float | None]] = {group: [None] * times.columns for group in groups}
    for point in points:
        if (column := times.column(point.at_ms)) is not None:
            # The worst of the buckets in one column counts.
            p50[point.group][column] = max(point.p50_ms, p50[point.group][column] or 0)
            p99[point.group][column] = max(point.p99_ms, p99[point.group][column] or 0)
    series = [
        PlotSeries(f"{group} {name}", values[group], view.colour_of_group(group))
        for group in groups
        for name, values in (("p50", p50), ("p99", p99))
    ]
    worst = max(points, key=lambda point: point.p99_ms)
    return figure(
        f"The slowest hundredth took {words.duration(worst.p99_ms)} at worst, at {_label(times, worst.at_ms)}",
        "Latency of what was first delivered in each column of time: the strong line is p99, the quiet one the median.",
        plots.legend(
            [PlotSeries(group, [], view.colour_of_group(group)) for group in groups], thin="strong p99, quiet p50"
        ),
        plots.lines(
            series,
            times,
            unit="ms",
            label=words.decade,
            thin=frozenset(range(0, len(series), 2)),
            marks=view.marks,
            describe=f"Lines over time: median and 99th percentile of latency of {words.plural(len(groups), 'group')}",
        ),
        table=table(
            [Column("UTC", is_text=True), *(Column(one.name) for one in series)],
            (
                [
                    times.label(at),
                    *(words.NONE if (ms := one.values[at]) is None else words.duration(ms) for one in series),
                ]
                for at in range(times.columns)
            ),
            "Latency over time",
        ),
    )


def _label(times: Times, at_ms: int) -> str:
    column = times.column(at_ms)
    return words.moment(at_ms) if column is None else times.label(column)


def _quantiles(view: ReportView) -> Markup | None:
    measured = [group for group in view.report.groups if group.latency_ms]
    if not measured:
        return None
    columns = [Column("Group", is_text=True), Column("Topic", is_text=True), Column("Mode", is_text=True)]
    columns += [Column(title) for title in ("Delivered", "Mean", "p50", "p90", "p99", "Max")]
    rows = (
        [
            named(view.colour_of_group(one.group), one.group),
            one.topic,
            one.mode,
            words.count(one.delivered),
            *(words.duration(value) for value in (it.mean, it.p50, it.p90, it.p99, it.max)),
        ]
        for one in _ordered(measured)
        if (it := one.latency_ms)
    )
    slowest = max(measured, key=lambda one: one.latency_ms.p99 if one.latency_ms else 0)
    worst = slowest.latency_ms.p99 if slowest.latency_ms else 0
    title = (
        f"{slowest.group} on {slowest.topic} waited longest: 1 in 100 messages over {words.duration(worst)}"
        if len(measured) > 1
        else f"1 in 100 messages took over {words.duration(worst)}"
    )
    made = framed(table(columns, rows, "Latency"))
    more = view.left_out("groups", "pair of group and topic", "pairs of group and topic")
    return figure(title, "Latency by group and topic.", made, more)


def _ordered(groups: list[GroupFigures]) -> list[GroupFigures]:
    """Sort by name; when not all can be shown, the busiest first."""
    return sorted(groups, key=lambda one: (-one.delivered if len(groups) > ROWS_MAX else 0, one.group, one.topic))


def redeliveries(view: ReportView) -> Markup:
    """Return the section. Only queue groups redeliver: a stream is read from its offset."""
    groups = [group for group in view.report.groups if group.mode == "queue"]
    if not groups:
        text = (
            "No group has read yet." if not view.report.groups else "Only stream groups have read: they lease nothing."
        )
        return section("redeliveries", "Redeliveries", nothing(text))
    delivered = sum(group.delivered for group in groups)
    again = sum(group.redelivered for group in groups)
    dead = sum(group.dead for group in groups)
    most = max((group.redeliveries / group.delivered for group in groups if group.delivered), default=0)
    titles = ("Delivered", "More than once", "Redeliveries", "Nacked", "Acked", "Dead letters")
    columns = [Column("Group", is_text=True), Column("Topic", is_text=True), Column("Redelivery rate", is_text=True)]
    rows = [
        [
            named(view.colour_of_group(one.group), one.group),
            one.topic,
            _bar(view, one, most),
            *(words.count(value) for value in (one.delivered, one.redelivered, one.redeliveries)),
            *(words.count(value) for value in (one.nacked, one.acked, one.dead)),
        ]
        for one in _ordered(groups)
    ]
    if not again:
        title = f"None of {words.plural(delivered, 'message')} had to be delivered twice"
    else:
        part = words.share(again / max(delivered, 1))
        title = f"{words.count(again)} of {words.plural(delivered, 'message')} ({part}) came again"
    if dead:
        title += f", {words.count(dead)} ended as dead letters"
    return section(
        "redeliveries",
        "Redeliveries",
        figure(
            title,
            "Deliveries beyond a message's first: after a nack, or when a lease ran out, as it does when a consumer or "
            "a leader dies. The bars compare them to what was delivered.",
            framed(table([*columns, *map(Column, titles)], rows, "Redeliveries by group and topic")),
        ),
        _attempts(view),
    )


def _bar(view: ReportView, one: GroupFigures, most: float) -> Markup | None:
    if not one.redeliveries or not one.delivered:
        return None
    return plots.bar(one.redeliveries / one.delivered / most, view.colour_of_group(one.group))


def _attempts(view: ReportView) -> Markup | None:
    """Return how many messages were delivered a second, third, n-th time."""
    attempts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    queues = {(group.group, group.topic) for group in view.report.groups if group.mode == "queue"}
    deliveries = [one for one in view.report.deliveries if (one.group, one.topic) in queues]
    for one in deliveries:
        attempts[one.delivery][one.group] += one.messages
    again = {number: sum(groups.values()) for number, groups in attempts.items() if number > 1}
    if not any(again.values()):
        return None
    groups = sorted({one.group for one in deliveries})
    numbers = range(2, min(max(again), ATTEMPTS_SHOWN) + 1)
    columns = [again.get(number, 0) for number in numbers]
    columns[-1] = sum(count for number, count in again.items() if number >= numbers[-1])
    labels = [words.ordinal(number) for number in numbers]
    if max(again) > ATTEMPTS_SHOWN:
        labels[-1] += " or later"
    least = "at least " if "deliveries" in view.report.left_out else ""
    rows = (
        [words.ordinal(number), *(words.count(attempts[number][group]) for group in groups)]
        for number in sorted(attempts)
    )
    return figure(
        f"The most stubborn message was handed out {least}{words.plural(max(again), 'time')}",
        "Messages that were handed out for the second time, the third, …, all queue groups together.",
        plots.histogram(
            [f"{label} delivery" for label in labels],
            columns,
            unit="messages",
            colour=plots.Colour(25),
            borders=labels,
            describe="Columns: messages by the number of their delivery",
            short=True,
            between=True,
        ),
        table=table([Column("Delivery", is_text=True), *map(Column, groups)], rows, "Messages by delivery"),
    )


def lag(view: ReportView) -> Markup:
    if not view.report.lag:
        return section("lag", "Lag", nothing("No group has read yet, so nothing waits for one."))
    by_group: dict[tuple[str, str], list[LagFigures]] = defaultdict(list)
    for one in view.report.lag:
        by_group[one.group, one.topic].append(one)
    waiting = sum(one.lag for one in view.report.lag)
    most = max(sum(one.lag for one in found) for found in by_group.values())
    columns = [Column("Group", is_text=True), Column("Topic", is_text=True), Column("", is_text=True)]
    columns += [Column("Lag"), Column("Oldest waits for"), Column("Partitions behind"), Column("Mode", is_text=True)]
    rows = []
    for (group, topic), found in sorted(by_group.items(), key=lambda item: -sum(one.lag for one in item[1])):
        total = sum(one.lag for one in found)
        colour = view.colour_of_group(group)
        rows.append(
            [
                named(colour, group),
                topic,
                plots.bar(total / most, colour) if total else "",
                words.count(total),
                _oldest(found),
                f"{sum(1 for one in found if one.lag)} of {len(found)}",
                found[0].mode,
            ]
        )
    worst = max(by_group, key=lambda key: sum(one.lag for one in by_group[key]))
    behind = words.plural(sum(one.lag for one in by_group[worst]), "message")
    title = (
        f"{worst[0]} is {behind} behind on {worst[1]}"
        if waiting
        else "Nothing waits: every group is done with all there is"
    )
    what = (
        "Messages that a group is not done with, and how long the oldest of them has waited, when the state was saved."
    )
    made = framed(table(columns, rows, "Lag by group and topic"))
    return section("lag", "Lag", figure(title, what, made, view.left_out("lag", "partition"), table=_lag_table(view)))


def _oldest(found: list[LagFigures]) -> str:
    ages = [one.oldest_ms for one in found if one.oldest_ms is not None]
    return words.duration(max(ages)) if ages else words.NONE


def _lag_table(view: ReportView) -> Markup:
    columns = [
        Column("Group", is_text=True),
        Column("Partition", is_text=True),
        Column("Lag"),
        Column("Oldest waits for"),
    ]
    rows = (
        [one.group, f"{one.topic}/{one.partition}", words.count(one.lag), _oldest([one])]
        for one in sorted(view.report.lag, key=lambda one: (-one.lag, one.group, one.topic, one.partition))
    )
    return table(columns, rows, "Lag by partition")


def leaders(view: ReportView) -> Markup:
    if not view.changes:
        text = "No partition changed its leader in what is stored here."
        return section("leaders", "Fail-overs", nothing(text))
    pauses = [change for change in view.changes if change.gap_ms is not None]
    longest = max((change.gap_ms or 0 for change in pauses), default=0)
    changes = f"{words.plural(len(view.changes), 'change')} of leaders"
    columns = [Column("Partition", is_text=True), Column("New leader's epoch"), Column("Began", is_text=True)]
    columns += [Column("Pause"), Column("", is_text=True)]
    rows = [
        [
            named(view.colour_of_topic(change.topic), f"{change.topic}/{change.partition}"),
            words.count(change.leader_epoch),
            words.moment(change.at_ms),
            words.NONE if change.gap_ms is None else words.duration(change.gap_ms),
            plots.bar((change.gap_ms or 0) / max(longest, 1), view.colour_of_topic(change.topic)),
        ]
        for change in view.changes
    ]
    return section(
        "leaders",
        "Fail-overs",
        figure(
            f"{changes}; the longest pause took {words.duration(longest)}" if pauses else changes,
            "Each time a partition got a new leader, because the one before died or handed over. The pause is the time "
            "without an append around it; there is none to tell when nothing was sent afterwards.",
            framed(table(columns, rows, "Changes of leaders")),
            view.left_out("fail_overs", "change"),
        ),
    )
