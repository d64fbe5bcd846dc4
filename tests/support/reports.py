"""Throughput reports made by hand: one like the demo's, an empty one, and one of the largest possible size."""

from __future__ import annotations

import math
from random import Random

import msgspec

from portalmq.spark.report import model
from portalmq.spark.report.model import (
    Deliveries,
    FailOver,
    GroupFigures,
    LagFigures,
    LatencyBucket,
    LatencyPoint,
    PartitionFigures,
    PartitionThroughput,
    ProducerFigures,
    Quantiles,
    Report,
    SizeBucket,
    Throughput,
    TopicFigures,
    Totals,
)

BEGAN_MS = 1_795_306_907_000  # 22 Nov 2026, 00:21:47 UTC
EVEN = Quantiles(mean=188, p50=187, p90=196, p99=204, max=211)


def nothing() -> Report:
    totals = Totals(0, 0, 0, 0, 0, 0, None, None, 0.0, 0.0, 0.0)
    return Report(1, BEGAN_MS, ["data/broker-1"], 1_000, totals)


def made(
    topics: dict[str, int],
    *,
    seconds: int = 36,
    bucket_ms: int = 1_000,
    rate: float = 290.0,
    groups: dict[str, str] | None = None,
    leader_dies: bool = True,
    left_out: dict[str, int] | None = None,
) -> Report:
    """`topics`: name -> partitions. Rates vary, the first half of the topics loses its leader half way, partitions are
    uneven. The same arguments give the same report."""
    report = Report(
        1, BEGAN_MS + 61_000, [f"data/broker-{n}" for n in (1, 2, 3)], bucket_ms,
        Totals(0, 0, 0, 0, 0, 0, None, None, 0.0, 0.0, 0.0), left_out=left_out or {},
    )  # fmt: skip
    random = Random(7)
    dies_at = seconds // 2 if leader_dies else None
    for index, (topic, count) in enumerate(topics.items()):
        _add_topic(report, random, index, topic, count, seconds, rate, dies_at)
    report.producers.extend(
        ProducerFigures(
            17 + n, one.messages, one.bytes, one.messages // 12 + 1, 1, BEGAN_MS + 120, BEGAN_MS + seconds * 900
        )
        for n, one in enumerate(report.topics[: model.PRODUCERS_SHOWN])
    )
    for number, (group, mode) in enumerate((groups if groups is not None else {"controllers": "queue"}).items()):
        _add_group(report, random, number, group, mode, seconds, dies_at)
    messages = sum(one.messages for one in report.topics)
    span_s = seconds * bucket_ms / 1000
    peak = max(
        sum(t.messages for t in report.throughput if t.at_ms == BEGAN_MS + at * bucket_ms) for at in range(seconds)
    )
    totals = Totals(
        messages, messages * 188, len(report.topics), len(report.partitions), len(report.producers),
        len({g.group for g in report.groups}), BEGAN_MS, BEGAN_MS + seconds * bucket_ms - 100,
        messages / span_s, messages * 188 / span_s, peak * 1000 / bucket_ms,
    )  # fmt: skip
    return msgspec.structs.replace(report, totals=totals)


def _add_topic(
    report: Report, random: Random, index: int, topic: str, count: int, seconds: int, rate: float, dies_at: int | None
) -> None:
    bucket_ms = report.bucket_ms
    weights = [random.uniform(0.6, 1.4) for _ in range(count)]
    stored = [0] * count
    course = []
    for at in range(seconds):
        wave = rate * (1 + 0.25 * math.sin(index + at / 7)) * random.uniform(0.9, 1.1) * (1 + index % 5) / 3
        hit = dies_at is not None and index % 2 == 0
        messages = 0 if hit and at == dies_at else round(wave * (2.1 if hit and at == (dies_at or 0) + 1 else 1))
        course.append(messages)
        for partition, weight in enumerate(weights):
            part = round(messages * weight / sum(weights))
            stored[partition] += part
            if part:
                at_ms = BEGAN_MS + at * bucket_ms
                report.partition_throughput.append(PartitionThroughput(topic, partition, at_ms, part))
        if messages:
            report.throughput.append(Throughput(topic, BEGAN_MS + at * bucket_ms, messages, messages * 188))
    total = sum(stored)
    for partition, messages in enumerate(stored):
        share = messages / max(total, 1)
        report.partitions.append(PartitionFigures(topic, partition, messages, messages * 188, 0, messages + 2, share))
        report.fail_overs.append(FailOver(topic, partition, 1, BEGAN_MS - 3_000, None))
        if dies_at is not None and index % 2 == 0:
            at_ms = BEGAN_MS + dies_at * bucket_ms + 40 * index
            report.fail_overs.append(FailOver(topic, partition, 2, at_ms, 560 + index))
    for low, part in ((64, 0.02), (128, 0.9), (256, 0.07), (512, 0.01)):
        report.sizes.append(SizeBucket(topic, low, 2 * low, round(total * part * (1 + index % 3 / 4))))
    per_s = 1000 / bucket_ms
    report.topics.append(
        TopicFigures(
            topic, count, total, total * 188, total, BEGAN_MS, BEGAN_MS + (seconds - 1) * bucket_ms + 900,
            total / seconds * per_s, max(course) * per_s, EVEN, max(stored) * count / max(total, 1),
        )
    )  # fmt: skip


def _add_group(
    report: Report, random: Random, number: int, group: str, mode: str, seconds: int, dies_at: int | None
) -> None:
    figures = report.topics
    messages = sum(one.messages for one in figures)
    slower = 2 ** min(number, 5)
    again = 0 if mode == "stream" else messages // 900
    for one in figures:
        report.groups.append(
            GroupFigures(
                group, one.topic, mode, one.messages,
                Quantiles(6.2 * slower, 4.1 * slower, 9.8 * slower, 42.0 * slower, 5_210.0),
                again // len(figures), again // len(figures), 0, one.messages, number,
            )
        )  # fmt: skip
        for partition in range(min(one.partitions, 8)):
            waiting = 0 if number == 0 else 37 * partition
            oldest_ms = 4_200 * partition if waiting else None
            report.lag.append(LagFigures(group, one.topic, partition, mode, waiting, oldest_ms))
    for low, part in ((0, 0.002), (1, 0.06), (2, 0.31), (4, 0.39), (8, 0.16), (16, 0.05), (32, 0.02), (512, 0.008)):
        report.latencies.append(
            LatencyBucket(group, low * slower if low else 0, max(2 * low, 1) * slower, round(messages * part))
        )
    for at in range(seconds):
        wild = 130 if dies_at is not None and abs(at - dies_at) < 2 else 1
        p50 = 4.1 * slower * random.uniform(0.8, 1.3) * (1 + wild / 20)
        at_ms = BEGAN_MS + at * report.bucket_ms
        report.latency_over_time.append(LatencyPoint(group, at_ms, messages // seconds, p50, p50 * (9 + wild / 4)))
    if mode == "queue":
        topic = figures[0].topic
        for delivery, count in ((1, messages), (2, again), (3, again // 6), (5, 1)):
            report.deliveries.append(Deliveries(group, topic, delivery, count))


def demo() -> Report:
    """Twelve sensors' topics, read by one group."""
    return made({f"{kind}_{n}": 1 for kind in ("humidity", "pressure", "temp", "wind") for n in (1, 2, 3)})


def biggest() -> Report:
    """50 topics, 200 partitions, 240 buckets over five days, 14 groups."""
    topics = {f"orders.eu-west.{n:02}": 4 for n in range(model.TOPICS_SHOWN)}
    groups = {f"billing-{n}": "queue" if n % 3 else "stream" for n in range(14)}
    left_out = {"topics": 31, "partitions": 1_200, "producers": 77}
    found = made(
        topics, seconds=model.SERIES_POINTS, bucket_ms=1_800_000, rate=90_000, groups=groups, left_out=left_out
    )
    others = [
        Throughput(model.OTHERS, BEGAN_MS + n * 1_800_000, 900_000, 9_000_000) for n in range(model.SERIES_POINTS)
    ]
    throughput = [*found.throughput, *others]
    return msgspec.structs.replace(
        found, throughput=throughput, sizes=[*found.sizes, SizeBucket(model.OTHERS, 128, 256, 9_000_000)]
    )
