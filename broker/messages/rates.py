"""What happened lately on this broker, second by second: rates, lag, and marks such as a fail-over.

    seconds   SECONDS_KEPT rows, one a second      minutes   MINUTES_KEPT rows, one a minute
    marks     the last MARKS_KEPT events           lags      of the groups on partitions led here, every few seconds
    registered   the last changes of which brokers there are: who sums rows has to know whose are missing

All is kept in rings of bounded size, whether somebody looks or not, so a page that is opened after an event shows it.
Counters are read, not counted again. Reading the lags of many groups takes long, so it is done the more rarely the
longer it takes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import gevent
import msgspec

from portalmq.broker.cluster.rpc.brokers import (
    ClusterMark,
    GroupLagNow,
    Rate,
    RatesAnswer,
    RatesRequest,
    Registered,
    TopicRate,
)
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import in_turns
from portalmq.broker.storage.errors import StorageError
from portalmq.control_plane.mirror import Changes, Mirror, PartitionKey

SECONDS_KEPT = 900
MINUTES_KEPT = 1_440
MARKS_KEPT = 200
REGISTERED_KEPT = 100
# Groups whose lag is kept as a series; the others have their present lag alone.
SERIES_MAX = 200
SERIES_KEPT = 360
# Changes of partitions within this time are one mark.
GATHERED_MS = 3_000
LAGS_EVERY_S = 5.0
TOPICS_EVERY_S = 5.0
# The lags may take this part of a processor.
LAGS_SHARE = 0.01
TOPICS_A_TURN = 500


class GroupsHere(Protocol):
    """The groups on the partitions led here: queues.groups.Groups."""

    def all_attached(self) -> Iterable[Any]: ...


class RatesHost(Protocol):
    """The broker, as this module sees it."""

    broker_id: int
    incarnation: int
    metrics: Metrics
    clock: Clock

    @property
    def groups(self) -> GroupsHere: ...
    @property
    def mirror(self) -> Mirror: ...
    def disk_is_full(self) -> bool: ...
    def disk_free_bytes(self) -> int: ...
    def partitions_here(self) -> tuple[Partition, ...]: ...


class _Totals(NamedTuple):
    published: int
    bytes_published: int
    delivered: int
    acked: int
    dead: int


class Rates:
    """The rings of one broker."""

    def __init__(self, host: RatesHost) -> None:
        self._host = host
        self.seconds: deque[Rate] = deque(maxlen=SECONDS_KEPT)
        self.minutes: deque[Rate] = deque(maxlen=MINUTES_KEPT)
        self.marks: deque[ClusterMark] = deque(maxlen=MARKS_KEPT)
        self.registered: deque[Registered] = deque(maxlen=REGISTERED_KEPT)
        self.groups: dict[str, GroupLagNow] = {}
        self.series: dict[str, deque[tuple[int, int]]] = {}
        self.topics: dict[str, TopicRate] = {}
        self._counted: dict[str, tuple[int, int, int]] = {}
        self._topics_at = perf_counter()
        self._last = self._totals()
        self._last_ms = host.clock.wall_ms()
        self._minute = (self._last_ms // 60_000, self._last)
        self._leaders: dict[PartitionKey, int] = {}
        self._isr: dict[PartitionKey, int] = {}
        self._live: frozenset[int] | None = None
        self._was_full = False
        # Changes that are not marked yet, since when: partitions that a broker leads now, and ISRs that shrank.
        self._began_ms = 0
        self._moved: Counter[int] = Counter()
        self._shrunk = 0
        self._greenlets: list[gevent.Greenlet] = []

    def start(self) -> None:
        self._greenlets = [
            gevent.spawn(self._each_second),
            gevent.spawn(self._every, LAGS_EVERY_S, self.read_lags),
            gevent.spawn(self._every, TOPICS_EVERY_S, self.read_topics),
        ]

    def close(self) -> None:
        gevent.killall(self._greenlets)

    # --- each second -------------------------------------------------------------------------------------------------

    def _each_second(self) -> None:
        while True:
            gevent.sleep(1.0 - self._host.clock.wall_ms() % 1_000 / 1_000)
            self.sample()

    def sample(self) -> None:
        """Take a row for each second since the last one: what was counted since then, per second."""
        now_ms, totals = self._host.clock.wall_ms(), self._totals()
        elapsed_s = (now_ms - self._last_ms) / 1_000
        if elapsed_s < 0.2:
            return  # the clock was put back
        row = self._row(now_ms // 1_000, self._last, totals, elapsed_s)
        self.seconds.extend(_repeated(row, self._last_ms // 1_000, 1, SECONDS_KEPT))
        self._last, self._last_ms = totals, now_ms
        minute, before = self._minute
        if now_ms // 60_000 > minute:
            row = self._row(now_ms // 60_000 * 60, before, totals, 60.0 * (now_ms // 60_000 - minute))
            self.minutes.extend(_repeated(row, 60 * minute, 60, MINUTES_KEPT))
            self._minute = (now_ms // 60_000, totals)
        self._mark_disk(now_ms)
        self._mark_changes(now_ms)

    def _row(self, second: int, before: _Totals, after: _Totals, elapsed_s: float) -> Rate:
        published, size, delivered, acked, dead = (
            round((new - old) / elapsed_s, 2) for old, new in zip(before, after, strict=True)
        )
        lags = self.groups.values()
        lag, oldest_ms = sum([each.lag for each in lags]), max([each.oldest_ms for each in lags], default=0)
        return Rate(second, published, size, delivered, acked, dead, lag, oldest_ms)

    def _totals(self) -> _Totals:
        totals = self._host.metrics.totals
        return _Totals(totals.published, totals.bytes_published, totals.delivered, totals.acked, totals.dead)

    # --- marks -------------------------------------------------------------------------------------------------------

    def mark(self, kind: str, text: str, at_ms: int | None = None) -> None:
        at_ms = self._host.clock.wall_ms() if at_ms is None else at_ms
        self.marks.append(ClusterMark(at_ms, kind, text, self._host.broker_id))

    def _mark_disk(self, now_ms: int) -> None:
        try:
            is_full = self._host.disk_is_full()
        except StorageError:
            return
        if is_full != self._was_full:
            self._was_full = is_full
            name = f"broker {self._host.broker_id}"
            self.mark("disk", f"the disk of {name} is full" if is_full else f"{name} has room on its disk again")

    def on_cluster_changed(self, changes: Changes) -> None:
        """Mark brokers that came or went, partitions that have another leader, and ISRs that shrank."""
        mirror = self._host.mirror
        if changes.brokers or changes.everything:
            live = frozenset(mirror.brokers)
            brokers = sorted((each, state.incarnation) for each, state in mirror.brokers.items())
            if not self.registered or self.registered[-1].brokers != brokers:
                self.registered.append(Registered(self._host.clock.wall_ms() // 1_000, brokers))
            for gone in sorted((self._live or live) - live):
                self.mark("gone", f"broker {gone} is gone")
            for back in sorted(live - (live if self._live is None else self._live)):
                self.mark("joined", f"broker {back} has joined")
            self._live = live
        moved: Counter[int] = Counter()
        shrunk = 0
        for key in changes.partitions:
            held = mirror.partitions.get(key)
            if held is None:
                self._leaders.pop(key, None)
                self._isr.pop(key, None)
                continue
            in_sync, leader = len(held.value.isr), held.value.leader
            shrunk += in_sync < self._isr.get(key, 0)
            self._isr[key] = in_sync
            if leader is not None:
                if self._leaders.get(key, leader) != leader:
                    moved[leader] += 1
                self._leaders[key] = leader
        if moved or shrunk:
            self._moved.update(moved)
            self._shrunk += shrunk
            self._began_ms = self._began_ms or self._host.clock.wall_ms()

    def _mark_changes(self, now_ms: int) -> None:
        """Mark what began a while ago: a fail-over of many partitions is seen in several parts."""
        if not self._began_ms or now_ms - self._began_ms < GATHERED_MS:
            return
        for leader, count in sorted(self._moved.items()):
            self.mark("fail-over", f"broker {leader} leads {_counted(count, 'more partition')}", self._began_ms)
        if self._shrunk:
            self.mark("isr", f"{_counted(self._shrunk, 'partition')} with fewer replicas in sync", self._began_ms)
        self._moved.clear()
        self._shrunk = self._began_ms = 0

    # --- lags and topics ---------------------------------------------------------------------------------------------

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        """Run `work` again and again, at most LAGS_SHARE of the time."""
        pause_s = 1.0
        while True:
            gevent.sleep(pause_s)
            started = perf_counter()
            work()
            pause_s = max(seconds, (perf_counter() - started) / LAGS_SHARE)

    def read_lags(self) -> None:
        """Read the lag of each queue group on the partitions led here."""
        found: dict[str, list[int]] = {}
        for attached in self._host.groups.all_attached():
            counts = attached.counts()
            sums = found.setdefault(attached.group, [0, 0, 0, 0])
            for at, name in enumerate(("lag", "in_flight", "dead")):
                sums[at] += counts[name]
            sums[3] = max(sums[3], counts["oldest_unacked_ms"])
        self.groups = {name: GroupLagNow(name, *numbers) for name, numbers in found.items()}
        second = self._host.clock.wall_ms() // 1_000
        for gone in self.series.keys() - found.keys():
            del self.series[gone]
        for name, now in self.groups.items():
            series = self.series.get(name)
            if series is None:
                if len(self.series) >= SERIES_MAX:
                    continue
                series = self.series[name] = deque(maxlen=SERIES_KEPT)
            series.append((second, now.lag))

    def read_topics(self) -> None:
        """Compute the rates of each topic since the last time."""
        now_s, counted, rates = perf_counter(), self._host.metrics.by_topic(), {}
        elapsed_s, self._topics_at = now_s - self._topics_at, now_s
        for name, numbers in in_turns(list(counted.items()), TOPICS_A_TURN):
            before = self._counted.get(name, (0, 0, 0) if self._counted else numbers)
            if numbers != before:
                rates[name] = TopicRate(
                    name, *(round((new - old) / elapsed_s, 1) for old, new in zip(before, numbers, strict=True))
                )
        self.topics, self._counted = rates, counted

    # --- for those who look ------------------------------------------------------------------------------------------

    def answer(self, request: RatesRequest) -> RatesAnswer:
        """Return what a broker with an open page asks for."""
        rows = self.minutes if request.minutes else self.seconds
        led = followed = under_replicated = 0
        for partition in in_turns(self._host.partitions_here(), TOPICS_A_TURN):
            replica = partition.replica
            led += replica.leading
            followed += not replica.leading
            state = replica.state
            under_replicated += bool(replica.leading and state is not None and len(state.isr) < len(state.replicas))
        try:
            free_bytes, is_full = self._host.disk_free_bytes(), self._host.disk_is_full()
        except StorageError:
            free_bytes, is_full = 0, True
        return RatesAnswer(
            self._host.broker_id,
            [row for row in rows if row.second > request.after],
            [mark for mark in self.marks if mark.at_ms > request.marks_after_ms],
            _largest(self.groups, request.groups, lambda each: each.lag, request.top),
            _largest(self.topics, request.topics, lambda each: each.published + each.delivered, request.top),
            list(self.series.get(request.series, ())),
            led,
            followed,
            under_replicated,
            free_bytes,
            is_full,
            self._host.incarnation,
            list(self.registered),
        )


def _repeated(row: Rate, after: int, step: int, most: int) -> list[Rate]:
    """Return the row for each `step` of seconds later than `after`, up to its own: the last ones."""
    first = max(after + step, row.second - (most - 1) * step)
    return [msgspec.structs.replace(row, second=second) for second in range(first, row.second + 1, step)]


def _largest(found: Mapping[str, Any], named: list[str], size: Callable[[Any], float], top: int) -> list[Any]:
    """Return the largest ones, and those that are named."""
    largest = sorted(found.values(), key=size, reverse=True)[:top]
    shown = {each.name for each in largest}
    return largest + [found[name] for name in named if name in found and name not in shown]


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")
