"""Compare a throughput report, figure by figure, with plain Python's results from the same files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from support.plain_figures import PlainLog, by, grouped, quantile, size_border, told

from portalmq.spark.report.model import Report

NEAR = 0.0011  # the precision of distributions above 1,023


def agrees(report: Report, logs: Sequence[PlainLog]) -> None:
    """Assert that every list of the report, none of which was cut, agrees with the logs."""
    assert report.left_out == {}
    _appended(report, logs)
    _series(report, logs)
    _producers(report, logs)
    _fail_overs(report, logs)
    _groups(report, logs)


def _appended(report: Report, logs: Sequence[PlainLog]) -> None:
    messages = [message for log in logs for message in log.messages.values()]
    totals = report.totals
    assert (totals.messages, totals.bytes) == (len(messages), sum(message.size for message in messages))
    assert (totals.topics, totals.partitions) == (len({log.topic for log in logs}), len(logs))
    assert totals.producers == len({message.producer for message in messages} - {None})
    assert totals.first_ms == min((message.at for message in messages), default=None)
    assert totals.last_ms == max((message.at for message in messages), default=None)
    partitions = by(report.partitions, "topic", "partition")
    assert set(partitions) == {(log.topic, log.partition) for log in logs}
    topics = by(report.topics, "topic")
    for topic, of_topic in grouped((log.topic, log) for log in logs).items():
        mine = [message for log in of_topic for message in log.messages.values()]
        figures = topics.pop(topic)
        assert figures.partitions == len(of_topic)
        assert (figures.messages, figures.bytes) == (len(mine), sum(message.size for message in mine))
        assert figures.keyed == sum(message.keyed for message in mine)
        counts = [len(log.messages) for log in of_topic]
        assert figures.skew == pytest.approx(max(counts) * len(counts) / sum(counts) if mine else 1.0)
        _distribution(figures.size, [message.size for message in mine])
        if mine:
            first, last = min(message.at for message in mine), max(message.at for message in mine)
            assert (figures.first_ms, figures.last_ms) == (first, last)
            assert figures.messages_per_s == pytest.approx(len(mine) / max(1.0, (last - first) / 1000))
            peak = max(Counter(message.at // report.bucket_ms for message in mine).values())
            assert figures.peak_messages_per_s == pytest.approx(peak * 1000 / report.bucket_ms)
        for log in of_topic:
            place = partitions[topic, log.partition]
            assert (place.messages, place.start_offset, place.end_offset) == (len(log.messages), log.start, log.end)
            assert place.bytes == sum(message.size for message in log.messages.values())
            assert place.share == pytest.approx(len(log.messages) / len(mine) if mine else 0.0)
    assert topics == {}


def _distribution(found: Any, values: Sequence[int]) -> None:
    if not values:
        assert found is None
        return
    assert found.mean == pytest.approx(sum(values) / len(values))
    assert found.max == max(values)
    for rank, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
        assert getattr(found, name) == pytest.approx(quantile(values, rank), rel=NEAR), name


def _series(report: Report, logs: Sequence[PlainLog]) -> None:
    width = report.bucket_ms
    bucket, bucket_bytes, of_partition, sizes = Counter[Any](), Counter[Any](), Counter[Any](), Counter[Any]()
    for log in logs:
        for message in log.messages.values():
            at = message.at // width * width
            bucket[log.topic, at] += 1
            bucket_bytes[log.topic, at] += message.size
            of_partition[log.topic, log.partition, at] += 1
            sizes[log.topic, size_border(message.size)] += 1
    found = by(report.throughput, "topic", "at_ms")
    assert {key: row.messages for key, row in found.items()} == bucket
    assert {key: row.bytes for key, row in found.items()} == dict(bucket_bytes)
    course = by(report.partition_throughput, "topic", "partition", "at_ms")
    assert {key: row.messages for key, row in course.items()} == of_partition
    buckets = by(report.sizes, "topic", "from_bytes")
    assert {key: row.messages for key, row in buckets.items()} == sizes
    assert all(row.to_bytes == max(1, 2 * row.from_bytes) for row in report.sizes)


def _producers(report: Report, logs: Sequence[PlainLog]) -> None:
    found = by(report.producers, "producer_id")
    rows = [(log.topic, message) for log in logs for message in log.messages.values()]
    for producer, mine in grouped((message.producer, (topic, message)) for topic, message in rows).items():
        figures = found.pop(producer)
        assert figures.messages == len(mine)
        assert figures.bytes == sum(message.size for _, message in mine)
        assert figures.topics == len({topic for topic, _ in mine})
        assert figures.first_ms == min(message.at for _, message in mine)
        assert figures.last_ms == max(message.at for _, message in mine)
        batches = [row for log in logs for row in log.batches if row[1] == 0 and row[4] == producer]
        assert figures.batches == len(batches)
    assert found == {}


def _fail_overs(report: Report, logs: Sequence[PlainLog]) -> None:
    expected = {}
    for log in logs:
        for _, kind, epoch, at, _ in log.batches:
            if kind == 1:
                before = [row[3] for row in log.batches if row[1] == 0 and row[2] < epoch]
                after = [row[3] for row in log.batches if row[1] == 0 and row[2] >= epoch]
                gap = min(after) - max(before) if before and after else None
                expected[log.topic, log.partition, epoch] = (at, gap)
    found = by(report.fail_overs, "topic", "partition", "leader_epoch")
    assert {key: (row.at_ms, row.gap_ms) for key, row in found.items()} == expected


def _groups(report: Report, logs: Sequence[PlainLog]) -> None:
    expected, left = told(logs)
    found = by(report.groups, "group", "topic")
    assert set(found) == set(expected)
    assert report.totals.groups == len({group for group, _ in expected})
    for name, each in expected.items():
        figures = found[name]
        assert figures.mode == each.mode
        assert figures.delivered == len(each.first) + each.unrecorded, name
        assert figures.redelivered == len(each.again), name
        assert figures.redeliveries == sum(count for number, count in each.counts.items() if number > 1), name
        assert (figures.nacked, figures.acked, figures.dead) == (each.nacked, each.acked, each.dead), name
        _distribution(figures.latency_ms, [waited for _, waited in each.first.values()])
    counts = by(report.deliveries, "group", "topic", "delivery")
    assert {key: row.messages for key, row in counts.items()} == {
        (*name, number): count for name, each in expected.items() for number, count in each.counts.items()
    }
    _latencies(report, expected)
    _lag(report, logs, left)


def _latencies(report: Report, expected: dict[tuple[str, str], Any]) -> None:
    width = report.bucket_ms
    borders, waits = Counter[Any](), {}
    for (group, _), each in expected.items():
        for at, waited in each.first.values():
            borders[group, size_border(waited)] += 1
            waits.setdefault((group, at // width * width), []).append(waited)
    found = by(report.latencies, "group", "from_ms")
    assert {key: row.messages for key, row in found.items()} == borders
    points = by(report.latency_over_time, "group", "at_ms")
    assert {key: row.delivered for key, row in points.items()} == {key: len(values) for key, values in waits.items()}
    for key, values in waits.items():
        assert points[key].p50_ms == pytest.approx(quantile(values, 0.5), rel=NEAR)
        assert points[key].p99_ms == pytest.approx(quantile(values, 0.99), rel=NEAR)


def _lag(report: Report, logs: Sequence[PlainLog], left: dict[tuple[str, str, int], set[int]]) -> None:
    places = {(log.topic, log.partition): log for log in logs}
    # The control records about messages: the start of an epoch, and the records of groups.
    kinds = (0, 1, *range(10, 20), 21, 22, 23)
    as_of = max((row[3] for log in logs for row in log.batches if row[1] in kinds), default=0)
    found = by(report.lag, "group", "topic", "partition")
    assert set(found) == set(left)
    for (group, topic, partition), offsets in left.items():
        figures = found[group, topic, partition]
        assert figures.lag == len(offsets), (group, topic, partition)
        messages = places[topic, partition].messages
        since = [messages[offset].at if figures.mode == "stream" else messages[offset].due for offset in offsets]
        assert figures.oldest_ms == (max(0, as_of - min(since)) if since else None), (group, topic, partition)
