"""The time of day that the brokers of a cluster agree on: one machine's wrong clock stamps nothing.

Every broker asks the others for their machines' time of day, and places it between the moments at which it asked and
was answered, by its own steady clock. So a slow answer widens what is known, and makes nobody wrong.

    its own clock agrees with that of most      it goes by its machine
    most agree with each other, not with it     it goes by them, and says so: log, metric, health
    there is no majority                        it goes by what was agreed on before, and says so
    nobody else is registered                   it goes by its machine

A jump is not followed before others confirm it: in between the clock goes on from what was agreed on
(partition/clock.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from statistics import median_low
from typing import Protocol, TypeVar

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.partition.clock import TOLERANCE_MS, Clock
from portalmq.control_plane.state import BrokerState
from portalmq.errors import PortalMQError

log = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
ASK_WITHIN_S = 1.0

T = TypeVar("T")
# A time of day, as an offset from the steady clock of who asked: the least and the most that it can be.
Span = tuple[int, int]


class TimeAsked(msgspec.Struct, frozen=True):
    """What is your machine's time of day?"""


class TimeTold(msgspec.Struct, frozen=True):
    machine_ms: int


class PeerClocks(Protocol):
    def call(self, broker_id: int, name: str, request: msgspec.Struct, kind: type[T], *, timeout_s: float) -> T: ...


def agreed_with(one: Span, other: Span) -> bool:
    return one[0] - TOLERANCE_MS <= other[1] and other[0] - TOLERANCE_MS <= one[1]


def agreement(own: Span, others: Collection[Span]) -> int | None:
    """The offset of the time of day that most of these agree on; the own one if it is among them. None: there is no
    majority."""
    clocks = [own, *others]
    for clock in clocks:  # the own one comes first
        alike = [other for other in clocks if agreed_with(clock, other)]
        if 2 * len(alike) > len(clocks):
            return own[0] if clock is own else median_low([(least + most) // 2 for least, most in alike])
    return None


class Timekeeping:
    """`off_ms` is how far the machine's time of day is ahead of the agreed one; `differs` that brokers do not agree."""

    def __init__(
        self, clock: Clock, broker_id: int, brokers: Callable[[], Mapping[int, BrokerState]], peers: PeerClocks
    ) -> None:
        self.off_ms = 0
        self.differs = False
        self._clock = clock
        self._broker_id = broker_id
        self._brokers = brokers
        self._peers = peers
        self._closing = Event()
        self._greenlet: gevent.Greenlet | None = None

    def start(self) -> None:
        """Compare at once, then every few seconds."""
        self.compare()
        self._greenlet = gevent.spawn(self._run)

    def close(self) -> None:
        self._closing.set()
        if self._greenlet is not None:
            self._greenlet.kill()

    def serve(self, body: bytes) -> bytes:
        """Another broker asks."""
        return msgspec.msgpack.encode(TimeTold(self._clock.machine_ms()))

    def _run(self) -> None:
        while not self._closing.wait(ASK_EVERY_S):
            try:
                self.compare()
            except Exception:
                log.exception("the clocks could not be compared")

    def compare(self) -> None:
        """Ask all that are registered, and go by what most of those that answer agree on."""
        others = [broker_id for broker_id in self._brokers() if broker_id != self._broker_id]
        asked = [gevent.spawn(self._ask, broker_id) for broker_id in others]
        gevent.joinall(asked)
        told = [greenlet.value for greenlet in asked if greenlet.value is not None]
        own = self._own()
        if own is not None and (told or not others):
            agreed = agreement(own, told)
            # None: what was agreed on before goes on.
            self._clock.agreed_ms = agreed if agreed is not None else self._before(own)
            self._note(own, is_split=agreed is None)

    def _before(self, own: Span) -> int:
        return own[0] if self._clock.agreed_ms is None else self._clock.agreed_ms

    def _ask(self, broker_id: int) -> Span | None:
        asked_ms = self._clock.now_ms()
        try:
            told = self._peers.call(broker_id, "time", TimeAsked(), TimeTold, timeout_s=ASK_WITHIN_S)
        except PortalMQError:
            return None  # away, or of a version that cannot tell
        least, most = told.machine_ms - self._clock.now_ms(), told.machine_ms - asked_ms
        return (least, most) if most - least <= TOLERANCE_MS else None  # so slow an answer tells too little

    def _own(self) -> Span | None:
        """None when this process stood still in between."""
        asked_ms = self._clock.now_ms()
        machine_ms = self._clock.machine_ms()
        least, most = machine_ms - self._clock.now_ms(), machine_ms - asked_ms
        return (least, most) if most - least <= TOLERANCE_MS // 10 else None

    def _note(self, own: Span, *, is_split: bool) -> None:
        assert self._clock.agreed_ms is not None
        off_ms = own[0] - self._clock.agreed_ms
        differs = is_split or not agreed_with(own, (self._clock.agreed_ms, self._clock.agreed_ms))
        if differs and not self.differs:
            log.critical(
                "the clocks of the brokers do not agree: this machine's is %+.1f s from the time that this broker goes"
                " by%s. Is NTP running on all of them?",
                *(off_ms / 1_000, ", and no majority says which one is right" if is_split else ""),
            )
        elif self.differs and not differs:
            log.warning("the clocks of the brokers agree again")
        self.off_ms, self.differs = off_ms, differs
