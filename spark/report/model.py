"""The figures of a throughput report: the content of report.json. All times are Unix ms, all sizes bytes.

Lists are bounded, so that a report of a billion messages is as small as one of a thousand: series have at most
SERIES_POINTS points, and the longest lists are cut to their busiest entries (`left_out` has the number of the others;
in `throughput` and `sizes` the topic OTHERS has their sum). The Parquet files beside it hold everything.
"""

from __future__ import annotations

import msgspec

SERIES_POINTS = 240
TOPICS_SHOWN = 50
PARTITIONS_SHOWN = 200
PRODUCERS_SHOWN = 50
GROUPS_SHOWN = 50
DELIVERIES_SHOWN = 500
LAG_SHOWN = 5_000  # a group is summed up over its partitions
FAIL_OVERS_SHOWN = 200
# Not a valid topic name, because of its brackets.
OTHERS = "(others)"


class Quantiles(msgspec.Struct, frozen=True):
    """Quantiles of a distribution, interpolated between neighbouring values. Mean and maximum are exact; the others are
    exact below 1,024, and within 0.1 percent above."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Totals(msgspec.Struct, frozen=True):
    """The totals. `messages_per_s` is the mean from the first message to the last, over at least a second;
    `peak_messages_per_s` that of the best bucket."""

    messages: int
    bytes: int
    topics: int
    partitions: int
    producers: int
    groups: int
    first_ms: int | None
    last_ms: int | None
    messages_per_s: float
    bytes_per_s: float
    peak_messages_per_s: float


class TopicFigures(msgspec.Struct, frozen=True):
    """A topic. `skew` is the biggest partition's messages over the mean of the partitions: 1 is even."""

    topic: str
    partitions: int
    messages: int
    bytes: int
    keyed: int
    first_ms: int | None
    last_ms: int | None
    messages_per_s: float
    peak_messages_per_s: float
    size: Quantiles | None
    skew: float


class PartitionFigures(msgspec.Struct, frozen=True):
    """A partition. `share` is the part of its topic's messages."""

    topic: str
    partition: int
    messages: int
    bytes: int
    start_offset: int
    end_offset: int
    share: float


class Throughput(msgspec.Struct, frozen=True):
    """Messages appended in the bucket that begins at `at_ms`; only buckets with messages are listed."""

    topic: str
    at_ms: int
    messages: int
    bytes: int


class PartitionThroughput(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    at_ms: int
    messages: int


class SizeBucket(msgspec.Struct, frozen=True):
    """Messages from `from_bytes` up to, but excluding, `to_bytes`; borders are powers of two, the first is 0 to 1."""

    topic: str
    from_bytes: int
    to_bytes: int
    messages: int


class ProducerFigures(msgspec.Struct, frozen=True):
    """A producer. `producer_id` None is for all messages without an idempotent producer."""

    producer_id: int | None
    messages: int
    bytes: int
    batches: int
    topics: int
    first_ms: int
    last_ms: int


class GroupFigures(msgspec.Struct, frozen=True):
    """A group on a topic. Latency (ms) runs from the time a message could be delivered (append time or deliver_at) to
    its first delivery in a queue group, to its commit in a stream group.

    `delivered` counts messages delivered (committed) at least once, `redelivered` those delivered more than once,
    `redeliveries` their further deliveries. A message that was redriven, or returned unseen, counts as delivered once;
    after its group was deleted and created again it counts again. `acked` counts messages that are done, `nacked` and
    `dead` the times that a message was given back, or given up.
    """

    group: str
    topic: str
    mode: str
    delivered: int
    latency_ms: Quantiles | None
    redelivered: int
    redeliveries: int
    nacked: int
    acked: int
    dead: int


class LatencyBucket(msgspec.Struct, frozen=True):
    """First deliveries from `from_ms` up to, but excluding, `to_ms`; borders are powers of two."""

    group: str
    from_ms: int
    to_ms: int
    messages: int


class LatencyPoint(msgspec.Struct, frozen=True):
    """First deliveries in the bucket that begins at `at_ms`."""

    group: str
    at_ms: int
    delivered: int
    p50_ms: float
    p99_ms: float


class Deliveries(msgspec.Struct, frozen=True):
    """Messages delivered with the delivery count `delivery`, which restarts for redriven messages."""

    group: str
    topic: str
    delivery: int
    messages: int


class LagFigures(msgspec.Struct, frozen=True):
    """Messages that are not done, and the age of the oldest (None without any): from the time it could be delivered to
    the last record of all data."""

    group: str
    topic: str
    partition: int
    mode: str
    lag: int
    oldest_ms: int | None


class FailOver(msgspec.Struct, frozen=True):
    """The start of a leader epoch. `gap_ms` is the time without an append around it, None for a partition's first epoch
    or when nothing was appended afterwards."""

    topic: str
    partition: int
    leader_epoch: int
    at_ms: int
    gap_ms: int | None


class Report(msgspec.Struct, frozen=True):
    """report.json. `bucket_ms` is the width of every time bucket in it."""

    version: int
    made_at_ms: int
    sources: list[str]
    bucket_ms: int
    totals: Totals
    topics: list[TopicFigures] = []
    partitions: list[PartitionFigures] = []
    throughput: list[Throughput] = []
    partition_throughput: list[PartitionThroughput] = []
    sizes: list[SizeBucket] = []
    producers: list[ProducerFigures] = []
    groups: list[GroupFigures] = []
    latencies: list[LatencyBucket] = []
    latency_over_time: list[LatencyPoint] = []
    deliveries: list[Deliveries] = []
    lag: list[LagFigures] = []
    fail_overs: list[FailOver] = []
    # Entries that the cut lists leave out: name of the list -> number.
    left_out: dict[str, int] = {}


def to_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def from_json(text: bytes) -> Report:
    """Decode a report. Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=Report)
