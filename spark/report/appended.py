"""The page's sections about appended messages: throughput, partitions, sizes, producers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from portalmq.spark.report import plots, words
from portalmq.spark.report.axes import AxisTick, Times
from portalmq.spark.report.markup import Markup, join
from portalmq.spark.report.model import OTHERS, PartitionFigures, Throughput, TopicFigures
from portalmq.spark.report.plots import PlotSeries
from portalmq.spark.report.view import Column, ReportView, figure, framed, named, note, nothing, section, table

HEAT_ROWS_MAX = 60
# The count of a throughput point, and the formatting of a figure.
_Value = Callable[[Throughput], int]
_Words = Callable[[float], str]

# A topic or partition with this many times an even share is reported in a title.
UNEVEN = 1.25


def throughput(view: ReportView) -> Markup:
    if view.times is None:
        return section(
            "throughput", "Throughput", nothing("No message has been stored yet, so there is no rate to show.")
        )
    messages = _by_topic(view, view.times, lambda point: point.messages)
    sizes = _by_topic(view, view.times, lambda point: point.bytes)
    peak = _peak(messages, view.times, words.rate, "messages")
    peak_of_data = _peak(sizes, view.times, lambda value: f"{words.size(value)}/s", "data")
    every = f"by topic; each column is the mean over {words.duration(view.times.width_ms)}."
    return section(
        "throughput",
        "Throughput",
        _rates(
            view,
            view.times,
            messages,
            "messages",
            words.brief,
            peak,
            f"Messages appended per second, {every} Times are UTC.",
        ),
        _rates(
            view,
            view.times,
            sizes,
            "bytes",
            words.size,
            peak_of_data,
            f"Bytes of messages' values appended per second, {every}",
        ),
        _topics(view, view.times),
    )


def _rates(
    view: ReportView, times: Times, series: list[PlotSeries], noun: str, label: _Words, title: str, what: str
) -> Markup:
    """Return the figure of the rates of `noun`, which is "messages" or "bytes"."""
    return figure(
        title,
        what,
        plots.legend(series) if len(series) > 1 else None,
        plots.stacked(
            series,
            times,
            unit="/s" if noun == "messages" else "B/s",
            label=label,
            marks=view.marks,
            describe=f"Stacked columns over time: {noun} per second of {words.plural(len(series), 'topic')}",
        ),
        table=_over_time(series, times, label, f"{noun.capitalize()} per second"),
    )


def _by_topic(view: ReportView, times: Times, value_of: _Value) -> list[PlotSeries]:
    """Return the rate of each column by topic; topics without a colour of their own are one series."""
    values: dict[str | None, list[float | None]] = {topic: [0.0] * times.columns for topic in view.topics}
    # OTHERS stands for the topics that the report itself leaves out.
    rest = set[str]()
    for point in view.report.throughput:
        column = times.column(point.at_ms)
        if column is None:
            continue
        name = point.topic if point.topic in view.topics else None
        if name is None:
            rest.add(point.topic)
        row = values.setdefault(name, [0.0] * times.columns)
        row[column] = (row[column] or 0.0) + value_of(point) / times.seconds
    others = len(rest) if OTHERS not in rest else len(rest) - 1 + view.report.left_out.get("topics", 1)
    return [
        PlotSeries(words.plural(others, "other") if name is None else name, row, view.colour_of_topic(name or ""))
        for name, row in values.items()
    ]


def _peak(series: list[PlotSeries], times: Times, rate: _Words, what: str) -> str:
    totals = [sum(one.values[column] or 0 for one in series) for column in range(times.columns)]
    best = max(range(times.columns), key=totals.__getitem__)
    if times.columns == 1:
        return f"All {what} came within {words.duration(times.width_ms)}, at {times.label(best)}"
    return f"{what.capitalize()} peaked at {rate(totals[best])}, at {times.label(best)}"


def _over_time(series: list[PlotSeries], times: Times, say: _Words, caption: str) -> Markup:
    columns = [Column("UTC", is_text=True), Column("All"), *(Column(one.name) for one in series if len(series) > 1)]
    rows = (
        [times.label(at), say(sum(one.values[at] or 0 for one in series))]
        + [say(one.values[at] or 0) for one in series if len(series) > 1]
        for at in range(times.columns)
    )
    return table(columns, rows, caption)


def _topics(view: ReportView, times: Times) -> Markup:
    courses: dict[str, list[float | None]] = defaultdict(lambda: [0.0] * times.columns)
    for point in view.report.throughput:
        if (column := times.column(point.at_ms)) is not None:
            courses[point.topic][column] = (courses[point.topic][column] or 0) + point.messages
    most = max((value or 0 for course in courses.values() for value in course), default=0.0)
    topics = sorted(view.report.topics, key=lambda topic: (-topic.messages, topic.topic))
    rows = [_topic_row(view, topic, courses.get(topic.topic, [0]), most) for topic in topics]
    titles = ("Messages", "Data", "Mean", "Peak", "Size p50", "Size p99", "With a key", "Partitions")
    columns = [Column("Topic", is_text=True), Column("Over time", is_text=True), *(Column(title) for title in titles)]
    busiest = topics[0]
    number = view.report.totals.topics
    of_all = busiest.messages / max(view.report.totals.messages, 1)
    if number == 1:
        title = f"One topic, {busiest.topic}, has it all"
    elif of_all * number < UNEVEN:
        title = f"{words.count(number)} topics, about {words.share(1 / number)} of the messages each"
    else:
        title = f"{busiest.topic} has {words.share(of_all)} of the messages, the most of {words.count(number)} topics"
    what = "Every topic, the busiest first. The curves share one scale; a mean runs from the first message to the last."
    return figure(title, what, framed(table(columns, rows, "Topics")), view.left_out("topics", "topic"))


def _topic_row(view: ReportView, topic: TopicFigures, course: list[float | None], most: float) -> list[str | Markup]:
    colour = view.colour_of_topic(topic.topic)
    return [
        named(colour, topic.topic),
        plots.spark_line(course, most, colour),
        words.count(topic.messages),
        words.size(topic.bytes),
        words.rate(topic.messages_per_s),
        words.rate(topic.peak_messages_per_s),
        words.size(topic.size.p50) if topic.size else words.NONE,
        words.size(topic.size.p99) if topic.size else words.NONE,
        words.share(topic.keyed / topic.messages) if topic.messages else words.NONE,
        words.count(topic.partitions),
    ]


def partitions(view: ReportView) -> Markup:
    found = sorted(view.report.partitions, key=lambda one: (one.topic, one.partition))
    if not found:
        return section("partitions", "Partitions", nothing("No topic has a partition with messages yet."))
    columns = [Column("Partition", is_text=True)]
    columns += [Column(title) for title in ("Messages", "Share of the topic", "Data", "First offset", "Next offset")]
    rows = [
        [
            named(view.colour_of_topic(one.topic), f"{one.topic}/{one.partition}"),
            words.count(one.messages),
            words.share(one.share),
            words.size(one.bytes),
            words.count(one.start_offset),
            words.count(one.end_offset),
        ]
        for one in found
    ]
    return section(
        "partitions",
        "Partitions",
        figure(
            _skew(view.report.topics, found),
            "Messages per second of each partition over time: the stronger the colour, the more. Times are UTC.",
            _heat(view, found),
            view.left_out("partitions", "partition"),
            table=table(columns, rows, "Partitions"),
        ),
    )


def _skew(topics: list[TopicFigures], found: list[PartitionFigures]) -> str:
    several = [topic for topic in topics if topic.partitions > 1 and topic.messages]
    if not several:
        return "Every topic has a single partition" if len(topics) > 1 else f"{words.plural(len(found), 'partition')}"
    worst = max(several, key=lambda topic: topic.skew)
    if worst.skew < UNEVEN:
        return f"Evenly spread: no partition has more than {words.brief(worst.skew)} times its topic's mean"
    busiest = max((one for one in found if one.topic == worst.topic), key=lambda one: one.share, default=None)
    where = f"{busiest.topic}/{busiest.partition} holds {words.share(busiest.share)} of its topic, " if busiest else ""
    return f"{where or worst.topic + ' is uneven: '}{words.brief(worst.skew)} times the mean of its partitions"


def _heat(view: ReportView, found: list[PartitionFigures]) -> Markup:
    if view.times is None or not view.report.partition_throughput:
        return nothing("No message has been stored yet, so there is nothing to colour.")
    busiest = sorted(found, key=lambda one: -one.messages)[:HEAT_ROWS_MAX]
    shown = sorted((one.topic, one.partition) for one in busiest)
    rows = {partition: [0.0] * view.times.columns for partition in shown}
    for point in view.report.partition_throughput:
        row, column = rows.get((point.topic, point.partition)), view.times.column(point.at_ms)
        if row is not None and column is not None:
            row[column] += point.messages / view.times.seconds
    made = plots.heat_map(
        [f"{topic}/{partition}" for topic, partition in shown],
        list(rows.values()),
        [view.times.label(column) for column in range(view.times.columns)],
        view.times.ticks,
        unit="/s",
        label=words.brief,
        marks=view.marks,
        describe=f"Heat map over time: messages per second of {words.plural(len(shown), 'partition')}",
    )
    hidden = len(found) - len(shown)
    return join(
        made, note(f"The {len(shown)} busiest of {len(found)} partitions; the table has them all.") if hidden else None
    )


def sizes(view: ReportView) -> Markup:
    by_class: dict[tuple[int, int], int] = defaultdict(int)
    by_topic: dict[str, dict[int, int]] = defaultdict(dict)
    for one in view.report.sizes:
        by_class[one.from_bytes, one.to_bytes] += one.messages
        by_topic[one.topic][one.from_bytes] = by_topic[one.topic].get(one.from_bytes, 0) + one.messages
    if not sum(by_class.values()):
        return section(
            "sizes", "Message sizes", nothing("No message has been stored yet, so there is no size to show.")
        )
    classes = _classes(by_class)
    values = [by_class.get(borders, 0) for borders in classes]
    names = [words.size_class(*borders) for borders in classes]
    usual = max(range(len(values)), key=values.__getitem__)
    part = values[usual] / sum(values)
    columns = [Column("Size", is_text=True), Column("Messages"), Column("Share")]
    rows = (
        [name, words.count(value), words.share(value / sum(values))] for name, value in zip(names, values, strict=True)
    )
    overall = figure(
        f"{words.share(part)} of the messages have {names[usual]}" if part < 1 else f"All messages have {names[usual]}",
        "Messages by the size of their value, all topics together; the borders are powers of two.",
        plots.histogram(
            names,
            values,
            unit="messages",
            colour=plots.plain(),
            borders=[words.size_border(low) for low, _ in classes] + [words.size_border(classes[-1][1])],
            describe="Columns: messages by size",
        ),
        table=table(columns, rows, "Messages by size"),
    )
    return section("sizes", "Message sizes", overall, _sizes_by_topic(by_topic, classes, names))


def _classes(found: dict[tuple[int, int], int]) -> list[tuple[int, int]]:
    """Return every class from the first with messages to the last, empty ones between them included."""
    used = sorted(borders for borders, messages in found.items() if messages)
    classes = [used[0]]
    while classes[-1] < used[-1]:
        low = classes[-1][1]
        classes.append((low, max(2 * low, 1)))
    return classes


def _sizes_by_topic(
    by_topic: dict[str, dict[int, int]], classes: list[tuple[int, int]], names: list[str]
) -> Markup | None:
    if len(by_topic) < 2 or len(classes) < 2:
        return None
    topics = sorted(by_topic, key=lambda topic: (-sum(by_topic[topic].values()), topic))[:HEAT_ROWS_MAX]
    topics.sort(key=lambda topic: (topic == OTHERS, topic))
    shares = [
        [by_topic[topic].get(low, 0) / max(sum(by_topic[topic].values()), 1) for low, _ in classes] for topic in topics
    ]
    columns = [Column("Topic", is_text=True), *(Column(name) for name in names)]
    rows = ([topic, *(words.share(part) for part in row)] for topic, row in zip(topics, shares, strict=True))
    ticks = [AxisTick(100 * at / len(classes), words.size_border(low)) for at, (low, _) in enumerate(classes)]
    return figure(
        "The same by topic",
        "How a topic's messages spread over the sizes: the stronger the colour, the greater the share.",
        plots.heat_map(
            topics,
            [[100 * part for part in row] for row in shares],
            names,
            ticks,
            unit="%",
            label=words.brief,
            describe=f"Heat map: shares of message sizes of {words.plural(len(topics), 'topic')}",
        ),
        table=table(columns, rows, "Shares of message sizes by topic"),
    )


def producers(view: ReportView) -> Markup:
    found = sorted(view.report.producers, key=lambda one: -one.messages)
    if not found:
        return section("producers", "Producers", nothing("Nobody has produced yet."))
    total = max(view.report.totals.messages, 1)
    titles = ("Messages", "Data", "Batches", "Messages a batch", "Topics", "First", "Last")
    columns = [Column("Producer", is_text=True), Column("Share", is_text=True), *(Column(title) for title in titles)]
    day_matters = view.times is not None and view.times.crosses_days
    say_when = words.moment if day_matters else words.clock
    rows = [
        [
            "without an id" if one.producer_id is None else f"producer {one.producer_id}",
            join(plots.bar(one.messages / max(found[0].messages, 1), plots.plain()), words.share(one.messages / total)),
            words.count(one.messages),
            words.size(one.bytes),
            words.count(one.batches),
            words.brief(one.messages / one.batches) if one.batches else words.NONE,
            words.count(one.topics),
            say_when(one.first_ms),
            say_when(one.last_ms),
        ]
        for one in found
    ]
    known = [one for one in found if one.producer_id is not None]
    batches = sum(one.batches for one in found)
    what = "Idempotent producers by what they wrote, the busiest first. A batch is what was appended in one step."
    title = (
        f"{words.plural(view.report.totals.producers, 'producer')}; the busiest sent "
        f"{words.share(known[0].messages / total)}, and a batch has {_mean(total, batches)} on average"
        if known
        else "All messages came without a producer id: a repeated send would be stored twice"
    )
    made = framed(table(columns, rows, "Producers"))
    return section("producers", "Producers", figure(title, what, made, view.left_out("producers", "producer")))


def _mean(messages: int, batches: int) -> str:
    mean = messages / max(batches, 1)
    return f"{words.brief(mean)} message{'' if words.brief(mean) == '1' else 's'}"
