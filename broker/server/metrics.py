"""What the broker counts, in Prometheus' form (https://prometheus.io/docs/practices/naming/).

Counters are raised where the thing happens; what is a state (lag, size, leadership) is read from the domain when
Prometheus asks. Label values are topics, groups and route templates, never a raw path, so that a stranger's requests
make no new series. A labelled child is looked up once and kept: `labels()` costs more than the count itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from gevent.lock import BoundedSemaphore
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from portalmq.broker.partition.yielding import give_way, in_turns

REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SAMPLES_A_TURN = 200
# State of so many groups and partitions is not read anew for each who asks: it is kept for a moment.
MANY_LAGS = 1_000
KEPT_S = 1.0
COMMIT_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True, slots=True)
class GroupLag:
    """How far a group is behind on one partition: messages not yet done, and the age of the oldest of them."""

    topic: str
    partition: int
    group: str
    lag: int
    oldest_unacked_age_s: float


@dataclass(frozen=True, slots=True)
class PartitionGauge:
    """A replica on this broker. `backlog`: offsets that are on its disk, and wait for followers to be committed."""

    topic: str
    partition: int
    leading: bool
    log_start_offset: int
    high_watermark: int
    under_replicated: bool = False
    quarantined: bool = False
    backlog: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    """The state of the domain at one moment. `storage_bytes` goes by the kind of file ("db", "wal");
    `offline_partitions` are those of the whole cluster that have no leader."""

    group_lags: list[GroupLag] = field(default_factory=list)
    partitions: list[PartitionGauge] = field(default_factory=list)
    storage_bytes: dict[str, int] = field(default_factory=dict)
    coordinator_connected: bool = False
    is_controller: bool = False
    offline_partitions: int = 0
    # Commits and dead letters of partitions led here whose outputs are still to be appended.
    open_orders: int = 0
    # How far the machine's time of day is ahead of the one that the brokers agree on, where that is too far.
    clock_off_ms: int = 0
    clocks_differ: bool = False
    # Of the process and of the disk under its data directory; None where the system does not tell.
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    disk_free_bytes: int | None = None
    disk_low_water_bytes: int | None = None
    # Processor time of this process since it began: all of it, in seconds.
    cpu_seconds: float = 0.0


class Metrics:
    """The counters of one broker. The methods are called on the hot path: each is a dictionary look-up and an add."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, version: str, *, broker_id: int | None = None) -> None:
        self.registry = CollectorRegistry()
        self._published = self._counter("messages_published", "Messages appended", "topic")
        self._bytes = self._counter("bytes_published", "Bytes of the payloads appended", "topic")
        self._delivered = self._counter("messages_delivered", "Messages handed out under a lease", "topic", "group")
        self._redelivered = self._counter("messages_redelivered", "Messages handed out again", "topic", "group")
        self._dead = self._counter("messages_dead", "Messages given up", "topic", "group")
        self._expired = self._counter("messages_expired", "Messages that a group passed over", "topic", "group")
        self._acked = self._counter("messages_acked", "Messages acknowledged", "topic", "group")
        self._compacted = self._counter("messages_compacted", "Messages that compaction removed from the files here")
        self._elections = self._counter("leader_elections", "Times that this broker began to lead a partition")
        self._shrinks = self._counter("isr_shrinks", "Replicas that fell out of sync with a leader on this broker")
        self._expands = self._counter("isr_expands", "Replicas that came in sync with a leader on this broker")
        self._requests = Histogram(
            "portalmq_request_duration_seconds",
            "Duration of HTTP requests, waiting included",
            ("route", "method", "status"),
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self._commits = Histogram(
            "portalmq_storage_commit_duration_seconds",
            "Duration of a durable commit to disk",
            buckets=COMMIT_BUCKETS_S,
            registry=self.registry,
        )
        self._of_topic: dict[str, tuple[Counter, Counter]] = {}
        self._of_group: dict[tuple[str, str], tuple[Counter, ...]] = {}
        self._of_route: dict[tuple[str, str, int], Histogram] = {}
        # How many calls wait now; the HTTP room knows.
        self.waiting: Callable[[], int] = lambda: 0
        labels = {"version": version} | ({} if broker_id is None else {"broker_id": str(broker_id)})
        self.registry.register(_Constant("portalmq_build_info", "Version of this broker", labels))

    def published(self, topic: str, messages: int, size_bytes: int) -> None:
        """`messages` with payloads of `size_bytes` together were appended to `topic`."""
        children = self._of_topic.get(topic)
        if children is None:
            children = self._of_topic[topic] = (self._published.labels(topic), self._bytes.labels(topic))
        children[0].inc(messages)
        children[1].inc(size_bytes)

    def delivered(self, topic: str, group: str, messages: int, redelivered: int = 0) -> None:
        """`messages` of `topic` were leased to `group`; `redelivered` of them not for the first time."""
        children = self._group_children(topic, group)
        children[0].inc(messages)
        if redelivered:
            children[1].inc(redelivered)

    def dead(self, topic: str, group: str, messages: int) -> None:
        """`group` has given up `messages` of `topic`."""
        self._group_children(topic, group)[3].inc(messages)

    def expired(self, topic: str, group: str, messages: int) -> None:
        """`group` was not given `messages` of `topic`, since they had expired."""
        self._group_children(topic, group)[4].inc(messages)

    def acked(self, topic: str, group: str, messages: int) -> None:
        """`group` is done with `messages` of `topic`."""
        self._group_children(topic, group)[2].inc(messages)

    def committed(self, seconds: float) -> None:
        """A transaction was written and fsynced."""
        self._commits.observe(seconds)

    def compacted(self, messages: int) -> None:
        """So many messages were superseded, and are gone from this broker's files."""
        self._compacted.inc(messages)

    def elected(self) -> None:
        """This broker leads a partition from now on."""
        self._elections.inc()

    def in_sync_changed(self, left: int, joined: int) -> None:
        """Of a partition that is led here: how many replicas left the ISR, how many came in."""
        self._shrinks.inc(left)
        self._expands.inc(joined)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        key = (route, method, status)
        child = self._of_route.get(key)
        if child is None:
            child = self._of_route[key] = self._requests.labels(route, method, str(status))
        child.observe(seconds)

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted: its series end."""
        if self._of_topic.pop(topic, None) is not None:
            self._published.remove(topic)
            self._bytes.remove(topic)
        self._forget([key for key in self._of_group if key[0] == topic])

    def forget_group(self, group: str) -> None:
        """The group was deleted: its series end."""
        self._forget([key for key in self._of_group if key[1] == group])

    def _forget(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            del self._of_group[key]
            for counter in (self._delivered, self._redelivered, self._acked, self._dead, self._expired):
                counter.remove(*key)

    def observe(self, gauges: Callable[[], Gauges], clock: Callable[[], float] = time.monotonic) -> None:
        """Show the domain's state from now on."""
        self.registry.register(_Gauges(gauges, lambda: self.waiting(), clock))

    def exposition(self) -> bytes:
        """All of it as Prometheus reads it. There may be very many series: others have their turn in between."""
        return generate_latest(_Paused(self.registry))

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"portalmq_{name}", meaning, labels, registry=self.registry)

    def _group_children(self, topic: str, group: str) -> tuple[Counter, ...]:
        key = (topic, group)
        children = self._of_group.get(key)
        if children is None:
            children = self._of_group[key] = (
                self._delivered.labels(*key),
                self._redelivered.labels(*key),
                self._acked.labels(*key),
                self._dead.labels(*key),
                self._expired.labels(*key),
            )
        return children


class _Paused(Collector):
    """What a registry holds, with a pause after each family and each few hundred series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if len(metric.samples) > SAMPLES_A_TURN:
                give_way()
                metric.samples = in_turns(metric.samples, SAMPLES_A_TURN)  # type: ignore[assignment]  # only iterated over, once
            yield metric


class _Constant(Collector):
    def __init__(self, name: str, meaning: str, labels: dict[str, str]) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels

    def collect(self) -> Iterator[Metric]:
        yield _gauge(self._name, self._meaning, tuple(self._labels), [(tuple(self._labels.values()), 1)])


class _Gauges(Collector):
    """Reads the domain's state when Prometheus scrapes; that of very many groups once a second at the most."""

    def __init__(self, read: Callable[[], Gauges], waiting: Callable[[], int], clock: Callable[[], float]) -> None:
        self._read = read
        self._waiting = waiting
        self._clock = clock
        self._turn = BoundedSemaphore()
        self._kept: tuple[float, Gauges] | None = None

    def _state(self) -> Gauges:
        with self._turn:  # who comes while it is read gets the same
            if self._kept is not None and self._clock() < self._kept[0]:
                return self._kept[1]
            state = self._read()
            is_much = len(state.group_lags) > MANY_LAGS
            self._kept = (self._clock() + KEPT_S, state) if is_much else None
            return state

    def describe(self) -> list[Metric]:
        return []  # without this, registering would read the domain at once

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        of_lag, of_partition = ("topic", "partition", "group"), ("topic", "partition")
        yield _gauge(
            "portalmq_group_lag_messages",
            "Messages of the partition that the group has not done",
            of_lag,
            [((each.topic, str(each.partition), each.group), each.lag) for each in state.group_lags],
        )
        yield _gauge(
            "portalmq_oldest_unacked_age_seconds",
            "Age of the oldest message that the group has not done",
            of_lag,
            [((each.topic, str(each.partition), each.group), each.oldest_unacked_age_s) for each in state.group_lags],
        )
        yield _gauge(
            "portalmq_partition_leader",
            "1 while this broker leads the partition",
            of_partition,
            [((each.topic, str(each.partition)), int(each.leading)) for each in state.partitions],
        )
        yield _gauge(
            "portalmq_partition_log_start_offset",
            "First offset that is still there",
            of_partition,
            [((each.topic, str(each.partition)), each.log_start_offset) for each in state.partitions],
        )
        yield _gauge(
            "portalmq_partition_high_watermark",
            "First offset that is not yet readable",
            of_partition,
            [((each.topic, str(each.partition)), each.high_watermark) for each in state.partitions],
        )
        yield _gauge(
            "portalmq_storage_bytes",
            "Bytes on disk, by kind of file",
            ("file",),
            [((kind,), size) for kind, size in sorted(state.storage_bytes.items())],
        )
        yield _gauge(
            "portalmq_coordinator_connected",
            "1 while the control plane answers",
            (),
            [((), int(state.coordinator_connected))],
        )
        yield _gauge(
            "portalmq_partition_backlog_offsets",
            "Offsets on the leader's disk that wait for followers to be committed",
            of_partition,
            [((each.topic, str(each.partition)), each.backlog) for each in state.partitions if each.leading],
        )
        for name, meaning, count in (
            (
                "under_replicated_partitions",
                "Partitions led here of which a replica is not in sync",
                sum(each.under_replicated for each in state.partitions if each.leading),
            ),
            (
                "quarantined_partitions",
                "Replicas here that contradict their leader, and do nothing until an operator looks",
                sum(each.quarantined for each in state.partitions),
            ),
            ("offline_partitions", "Partitions of the cluster that have no leader", state.offline_partitions),
            ("outbox_orders", "Commits and dead letters whose outputs are still to be appended", state.open_orders),
            (
                "clock_off_seconds",
                "How far this machine is ahead of the time that brokers agree on",
                state.clock_off_ms / 1000,
            ),
            ("clocks_differ", "1 while this broker finds that the clocks do not agree", int(state.clocks_differ)),
            ("is_controller", "1 while this broker is the controller", int(state.is_controller)),
        ):
            yield _gauge(f"portalmq_{name}", meaning, (), [((), count)])
        for name, meaning, size in (
            ("memory_bytes", "Main memory that this broker takes", state.memory_bytes),
            (
                "memory_limit_bytes",
                "What it may take: a container's limit, or the machine's",
                state.memory_limit_bytes,
            ),
            ("disk_free_bytes", "Room on the disk of the data directory", state.disk_free_bytes),
            ("disk_low_water_bytes", "With less room, messages are refused with 507", state.disk_low_water_bytes),
        ):
            if size is not None:
                yield _gauge(f"portalmq_{name}", meaning, (), [((), size)])
        yield CounterMetricFamily("portalmq_cpu_seconds", "Processor time that this broker took", state.cpu_seconds)
        yield _gauge("portalmq_waiting_calls", "Calls that wait for messages", (), [((), self._waiting())])


def _gauge(
    name: str, meaning: str, labels: tuple[str, ...], samples: Iterable[tuple[tuple[str, ...], float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, meaning, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
