"""The broker's metrics in Prometheus' format (https://prometheus.io/docs/practices/naming/).

Counters are raised where an event happens. State (lag, size, leadership) is read when Prometheus scrapes: see
server/gauges.py. Label values are topics, groups and route templates, never a raw path, so requests of strangers create
no series. Labelled children are looked up once and kept: `labels()` costs more than the count itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from portalmq.broker.partition.yielding import TimeSlice, in_turns

REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
COMMIT_BUCKETS_S = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SAMPLES_A_TURN = 200


class _TopicCounters(NamedTuple):
    """The counters of a topic; of all topics before `labels()`."""

    published: Counter
    bytes_published: Counter


class _GroupCounters(NamedTuple):
    """The counters of a group on a topic; of all groups before `labels()`."""

    delivered: Counter
    redelivered: Counter
    acked: Counter
    dead: Counter
    expired: Counter


class MessageTotals:
    """The sums of some counters over all topics and groups, which rates are computed of."""

    __slots__ = ("acked", "bytes_published", "dead", "delivered", "published")

    def __init__(self) -> None:
        self.published = self.bytes_published = self.delivered = self.acked = self.dead = 0


class Metrics:
    """The counters of one broker. The methods are called on the hot path: each is a dictionary lookup and an add."""

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, version: str, *, broker_id: int | None = None) -> None:
        self.registry = CollectorRegistry()
        # How many calls wait now; set by the API.
        self.waiting: Callable[[], int] = lambda: 0
        self.totals = MessageTotals()
        self._topics = _TopicCounters(
            published=self._counter("messages_published", "Messages appended", "topic"),
            bytes_published=self._counter("bytes_published", "Bytes of the payloads appended", "topic"),
        )
        labels = ("topic", "group")
        self._groups = _GroupCounters(
            delivered=self._counter("messages_delivered", "Messages delivered under a lease", *labels),
            redelivered=self._counter("messages_redelivered", "Messages delivered more than once", *labels),
            acked=self._counter("messages_acked", "Messages acknowledged", *labels),
            dead=self._counter("messages_dead", "Messages that became dead letters", *labels),
            expired=self._counter("messages_expired", "Messages that expired before delivery", *labels),
        )
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
        self._gauge("waiting_calls", "Calls that wait for messages").set_function(lambda: self.waiting())
        build = {"version": version} | ({} if broker_id is None else {"broker_id": str(broker_id)})
        self._gauge("build_info", "Version of this broker", *build).labels(**build).set(1)
        self._of_topic: dict[str, _TopicCounters] = {}
        self._of_group: dict[tuple[str, str], _GroupCounters] = {}
        self._of_route: dict[tuple[str, str, int], Histogram] = {}

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return _LazyCounter(f"portalmq_{name}", meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> Gauge:
        return Gauge(f"portalmq_{name}", meaning, labels, registry=self.registry)

    def published(self, topic: str, messages: int, size_bytes: int) -> None:
        """Count messages appended to `topic`, with payloads of `size_bytes` together."""
        counters = self._of_topic.get(topic)
        if counters is None:
            counters = self._of_topic[topic] = _TopicCounters._make([each.labels(topic) for each in self._topics])
        counters.published.inc(messages)
        counters.bytes_published.inc(size_bytes)
        self.totals.published += messages
        self.totals.bytes_published += size_bytes

    def delivered(self, topic: str, group: str, messages: int, redelivered: int = 0) -> None:
        """Count messages leased to `group`; `redelivered` of them not for the first time."""
        counters = self._group(topic, group)
        counters.delivered.inc(messages)
        self.totals.delivered += messages
        if redelivered:
            counters.redelivered.inc(redelivered)

    def acked(self, topic: str, group: str, messages: int) -> None:
        """Count messages that `group` acknowledged."""
        self._group(topic, group).acked.inc(messages)
        self.totals.acked += messages

    def dead(self, topic: str, group: str, messages: int) -> None:
        """Count messages that became dead letters of `group`."""
        self._group(topic, group).dead.inc(messages)
        self.totals.dead += messages

    def expired(self, topic: str, group: str, messages: int) -> None:
        """Count messages that expired before `group` received them."""
        self._group(topic, group).expired.inc(messages)

    def _group(self, topic: str, group: str) -> _GroupCounters:
        key = (topic, group)
        counters = self._of_group.get(key)
        if counters is None:
            counters = self._of_group[key] = _GroupCounters._make([each.labels(*key) for each in self._groups])
        return counters

    def committed(self, seconds: float) -> None:
        """Observe the duration of a transaction, fsync included."""
        self._commits.observe(seconds)

    def compacted(self, messages: int) -> None:
        """Count superseded messages removed from this broker's files."""
        self._compacted.inc(messages)

    def elected(self) -> None:
        """Count an election of this broker as the leader of a partition."""
        self._elections.inc()

    def in_sync_changed(self, left: int, joined: int) -> None:
        """Count replicas that left or joined the ISR of a partition led here."""
        self._shrinks.inc(left)
        self._expands.inc(joined)

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Observe the duration of an HTTP request."""
        key = (route, method, status)
        child = self._of_route.get(key)
        if child is None:
            child = self._of_route[key] = self._requests.labels(route, method, str(status))
        child.observe(seconds)

    def forget_topic(self, topic: str) -> None:
        """End the series of a deleted topic."""
        if self._of_topic.pop(topic, None) is not None:
            for counter in self._topics:
                counter.remove(topic)
        self._forget([key for key in self._of_group if key[0] == topic])

    def forget_group(self, group: str) -> None:
        """End the series of a deleted group."""
        self._forget([key for key in self._of_group if key[1] == group])

    def _forget(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            del self._of_group[key]
            for counter in self._groups:
                counter.remove(*key)

    def by_topic(self) -> dict[str, tuple[int, int, int]]:
        """Return the messages published, delivered and acked of each topic that was used here."""
        topics = in_turns(list(self._of_topic.items()), SAMPLES_A_TURN)
        found = {name: (_value(each.published), 0, 0) for name, each in topics}
        for (topic, _), group in in_turns(list(self._of_group.items()), SAMPLES_A_TURN):
            published, delivered, acked = found.get(topic, (0, 0, 0))
            found[topic] = (published, delivered + _value(group.delivered), acked + _value(group.acked))
        return found

    def exposition(self) -> bytes:
        """Return all series in Prometheus' text format. Yields to other greenlets, since there may be very many."""
        return generate_latest(_Paused(self.registry))


def _value(counter: Counter) -> int:
    return int(counter._value.get())  # the library has no public way but to collect all samples


class _LazyCounter(Counter):
    """A counter whose samples are made when they are written: those of ten thousand topics take long."""

    def collect(self) -> list[Metric]:
        metric = Metric(self._name, self._documentation, self._type)
        made = (each._replace(name=self._name + each.name) for each in self._samples())
        metric.samples = made  # type: ignore[assignment]  # only iterated over, once
        return [metric]


class _Paused(Collector):
    """The families of a registry, with pauses for others between samples."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        turn = TimeSlice()
        for metric in self._registry.collect():
            metric.samples = turn.paced(metric.samples)  # type: ignore[assignment]  # only iterated over, once
            yield metric
