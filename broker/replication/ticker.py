"""The ticks of all partitions: they move the time, renew leases, and check for overdue followers.

One greenlet serves all partitions, a few at a time, so that hundreds cost little and delay no other work. Partitions in
their normal state (a leader with all replicas in sync, a follower whose fetch waits) get only every third tick, and a
leader without other replicas none: it has no lease, and nobody to wait for.

A follower whose fetch is overdue is gone, slow, or cannot reach this broker. A connection to its port detects the first
(nothing is requested: only a refusal is evidence); the controller detects the last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic
from typing import Protocol
from urllib.parse import urlsplit

import gevent
from gevent import socket

from portalmq.broker.core.replica.events import FollowerRefused, LeaseRenewed, Tick
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import give_way
from portalmq.control_plane.state import BrokerState

log = logging.getLogger(__name__)

TICK_S = 0.1
PARTITIONS_AT_A_TIME = 64
QUIET_EVERY_TICKS = 3
# Which partitions need ticks is found out anew for so many a tick: to look at thousands takes its time.
LOOKED_AT_A_TICK = 1_000
LOOK_EVERY_TICKS_MAX = 10
PROBE_TIMEOUT_S = 0.5
# The pauses of the scrubber: between two replicas, and between two parts of one, where it rests many times as long as
# the part took, and no shorter than this after what is read again in every round.
SCRUB_EVERY_S = 1.0
SCRUB_PART_S = 0.125
SCRUB_REST = 20


class LiveBrokers(Protocol):
    @property
    def brokers(self) -> Mapping[int, BrokerState]: ...


class TickerMembership(Protocol):
    @property
    def mirror(self) -> LiveBrokers: ...

    def answered_ms(self) -> int: ...
    def suspect(self, broker_id: int, incarnation: int, *, refused: bool) -> None: ...


class TickerHost(Protocol):
    clock: Clock

    @property
    def membership(self) -> TickerMembership: ...


def refuses(url: str) -> bool:
    """Whether no process listens at the address of this broker."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


class Ticker:
    """`partitions` returns all open ones; `polls` says whether a fetch of a broker is parked here right now."""

    def __init__(
        self,
        host: TickerHost,
        partitions: Callable[[], Sequence[Partition]],
        *,
        polls: Callable[[int], bool] = lambda broker_id: False,
        refuses: Callable[[str], bool] = refuses,
    ) -> None:
        self.polls = polls
        self._host = host
        self._partitions = partitions
        self._refuses = refuses
        self._answered_ms = 0
        self._ticks = 0
        self._ticked: list[Partition] = []
        self._look_at_tick = 0
        self._probing: set[int] = set()
        self._greenlets: list[gevent.Greenlet] = []

    def start(self) -> None:
        self._greenlets = [gevent.spawn(self._beat), gevent.spawn(self._scrub)]

    def close(self) -> None:
        gevent.killall(self._greenlets)

    def _beat(self) -> None:
        while True:
            gevent.sleep(TICK_S)
            try:
                self.tick()
                if self._ticks % QUIET_EVERY_TICKS == 0:
                    self.probe_overdue_followers()
            except Exception:  # the next tick must come
                log.exception("a tick of the partitions failed")

    def tick(self) -> None:
        self._ticks += 1
        answered_ms = self._host.membership.answered_ms()
        renewed = LeaseRenewed(answered_ms) if answered_ms > self._answered_ms else None
        self._answered_ms = max(answered_ms, self._answered_ms)
        tick = Tick()
        notified = 0
        for index, partition in enumerate(self._with_ticks(), self._ticks):
            if partition.closed:
                continue
            try:
                if renewed is not None:
                    partition.step(renewed)
                if index % QUIET_EVERY_TICKS == 0 or not partition.is_quiet:
                    partition.step(tick)
                    notified += 1
            except Exception:  # the other partitions need their leases
                log.exception("%s: its tick failed", partition)
            if notified >= PARTITIONS_AT_A_TIME:
                notified = 0
                give_way()

    def _with_ticks(self) -> list[Partition]:
        """Return the partitions that need ticks, as they were a moment ago."""
        if self._ticks >= self._look_at_tick:
            partitions = self._partitions()
            self._ticked = [partition for partition in partitions if partition.needs_ticks]
            pause = min(len(partitions) // LOOKED_AT_A_TICK, LOOK_EVERY_TICKS_MAX)
            self._look_at_tick = self._ticks + max(QUIET_EVERY_TICKS, pause)
        return self._ticked

    def probe_overdue_followers(self) -> None:
        """Probe each broker whose fetch is overdue on some partition, all at once."""
        now_ms = self._host.clock.now_ms()
        overdue: dict[int, list[Partition]] = {}
        for partition in self._with_ticks():
            isr_tracker = partition.replica.in_sync
            if isr_tracker is not None:
                for broker_id in isr_tracker.overdue(now_ms):
                    overdue.setdefault(broker_id, []).append(partition)
        for broker_id, partitions in overdue.items():
            if broker_id not in self._probing and not self.polls(broker_id):
                self._probing.add(broker_id)
                gevent.spawn(self._probe, broker_id, partitions)

    def _probe(self, broker_id: int, partitions: list[Partition]) -> None:
        membership = self._host.membership
        try:
            broker = membership.mirror.brokers.get(broker_id)
            if broker is not None:  # one that has left the cluster, and does not fetch, needs no probe
                refused = self._refuses(broker.url)
                membership.suspect(broker_id, broker.incarnation, refused=refused)
                if not refused:
                    return
            for partition in partitions:
                if not partition.closed:
                    partition.step(FollowerRefused(broker_id))
        finally:
            self._probing.discard(broker_id)

    def _scrub(self) -> None:
        """Check all files, a replica after the other, at a bounded rate: so damage is found that no reader meets, while
        other replicas are whole."""
        while True:
            for partition in self._partitions():
                gevent.sleep(SCRUB_EVERY_S)
                self._scrub_one(partition)
            gevent.sleep(SCRUB_EVERY_S)

    def _scrub_one(self, partition: Partition) -> None:
        try:
            while not partition.closed and not partition.rebuild_reason:
                began_s, least_s = monotonic(), 0.0 if partition.retention.scrubs_sealed else SCRUB_PART_S
                if not partition.retention.scrub():
                    return
                gevent.sleep(max(least_s, SCRUB_REST * (monotonic() - began_s)))
        except Exception:  # the other replicas are checked too
            log.exception("%s: its scrub failed", partition)
