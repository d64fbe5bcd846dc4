"""The figures of a throughput report, as they stand in report.json. All times are Unix ms, all sizes bytes.

Lists are bounded, so that a report of a billion messages is as big as one of a thousand: series have at most
SERIES_POINTS points, and the longest lists are cut to their busiest entries (`left_out` says how many are missing; in
`throughput` and `sizes` the topic OTHERS holds their sum). The Parquet files beside it hold everything.
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
# Not a topic: their names have no brackets.
OTHERS = "(others)"


class Quantiles(msgspec.Struct, frozen=True):
    """Of a distribution, interpolated between the two values that a rank lies between. Mean and maximum are exact, and
    so are the others below 1,024; above they are right to within 0.1 percent."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Totals(msgspec.Struct, frozen=True):
    """`messages_per_s` is the mean from the first message to the last, over a second at the least;
    `peak_messages_per_s` the best bucket's."""

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
    """`skew` is the biggest partition's messages over the mean of the partitions: 1 is even."""

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
    """`share` is of its topic's messages."""

    topic: str
    partition: int
    messages: int
    bytes: int
    start_offset: int
    end_offset: int
    share: float


class Throughput(msgspec.Struct, frozen=True):
    """What was appended in the bucket that begins at `at_ms`; only buckets with messages are listed."""

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
    """Messages of `from_bytes` up to, and without, `to_bytes`; borders are powers of two, the first is 0 to 1."""

    topic: str
    from_bytes: int
    to_bytes: int
    messages: int


class ProducerFigures(msgspec.Struct, frozen=True):
    """`producer_id` None stands for all that came without an idempotent producer."""

    producer_id: int | None
    messages: int
    bytes: int
    batches: int
    topics: int
    first_ms: int
    last_ms: int


class GroupFigures(msgspec.Struct, frozen=True):
    """A group on a topic. Latency runs from when a message could be delivered (appended, or its deliver_at) to its
    first hand-out in a queue group, to the commit behind it in a stream group (ms).

    `delivered` counts messages that were handed out (committed) at least once, `redelivered` those of them that were
    more than once, `redeliveries` their further hand-outs. A message that was redriven, or given back by a consumer
    that had not looked at it, is delivered once all the same; one of a group that was deleted and made again anew.
    `acked` are messages that were done, `nacked` and `dead` how many times one was given back, or given up.
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
    """First deliveries that took `from_ms` up to, and without, `to_ms`; borders are powers of two."""

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
    """How many messages were handed out with the delivery count `delivery`, which begins anew for what is redriven."""

    group: str
    topic: str
    delivery: int
    messages: int


class LagFigures(msgspec.Struct, frozen=True):
    """Messages that are not done, and the age of the oldest of them (None without any): since it could be delivered,
    until the last record of the whole data."""

    group: str
    topic: str
    partition: int
    mode: str
    lag: int
    oldest_ms: int | None


class FailOver(msgspec.Struct, frozen=True):
    """A leader's epoch began. `gap_ms` is the time without an append around it, None for a partition's first epoch or
    when nothing was appended afterwards."""

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
    # What the cut lists leave out: name of the list -> number of entries.
    left_out: dict[str, int] = {}


def to_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def from_json(text: bytes) -> Report:
    """Raises msgspec.ValidationError."""
    return msgspec.json.decode(text, type=Report)
