"""The time of day that the brokers of a cluster agree on, so that one wrong clock stamps no record.

Every broker asks the others for the time of day of their machines. It places each answer between its own request and
the answer's arrival, on its own steady clock. So a slow answer only widens the range of what is known.

    its own clock agrees with the majority      the broker uses the clock of its machine
    a majority agrees, without its own clock    the broker uses theirs, and reports it: log, metric, health
    there is no majority                        the broker keeps the last agreed time, and reports it
    no other broker is registered               the broker uses the clock of its machine

A jump is not followed before others confirm it: until then the clock continues from the agreed time
(partition/clock.py).

The same answers tell for how long the cluster has been up. A broker that answers is up now, so a broker that asks it
counts that one's time to its own: the time since when some broker was always up outlasts each of them. A broker that
has just started does not know it before the others that were registered then have answered, or are registered no more,
or could not be asked for half a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from statistics import median_low

import gevent
from gevent.event import Event

from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.brokers import TIME, TimeAnswer, TimeRequest
from portalmq.broker.partition.clock import TOLERANCE_MS, Clock
from portalmq.control_plane.state import BrokerState
from portalmq.errors import PortalMQError

log = logging.getLogger(__name__)

ASK_EVERY_S = 2.0
ASK_AGAIN_S = 0.25
# A registered broker that cannot be asked for longer is no longer waited for.
UNHEARD_MAX_MS = 30_000

# A time of day as an offset from the steady clock of this broker: its least and its greatest possible value.
OffsetRange = tuple[int, int]


def agreed_with(one: OffsetRange, other: OffsetRange) -> bool:
    return one[0] - TOLERANCE_MS <= other[1] and other[0] - TOLERANCE_MS <= one[1]


def agreement(own: OffsetRange, others: Collection[OffsetRange]) -> int | None:
    """Return the offset of the time of day that a majority agrees on; the own one if it is among them; None without a
    majority."""
    clocks = [own, *others]
    for clock in clocks:  # the own one is first
        alike = [other for other in clocks if agreed_with(clock, other)]
        if 2 * len(alike) > len(clocks):
            return own[0] if clock is own else median_low([(least + most) // 2 for least, most in alike])
    return None


class ClockAgreement:
    """`off_ms` is how far the machine's clock is ahead of the agreed time; `differs` says that brokers disagree."""

    def __init__(
        self, clock: Clock, broker_id: int, brokers: Callable[[], Mapping[int, BrokerState]], peers: PeerCaller
    ) -> None:
        self.off_ms = 0
        self.differs = False
        # On this broker's steady clock: since when some broker was always up.
        self._up_since_ms = self._asked_since_ms = clock.now_ms()
        # Those that were registered when this broker started, and have not answered since.
        self._unheard: set[int] | None = None
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

    def tell(self, request: TimeRequest) -> TimeAnswer:
        """Answer another broker's question."""
        return TimeAnswer(self._clock.machine_ms(), self.up_ms())

    def up_ms(self) -> int:
        """Return for how long some broker was always up, as far as this one knows."""
        return self._clock.now_ms() - self._up_since_ms

    @property
    def is_up_time_known(self) -> bool:
        """False while another broker may know of a longer time."""
        return self._unheard is not None and not self._unheard

    def _run(self) -> None:
        while not self._closing.wait(ASK_EVERY_S if self.is_up_time_known else ASK_AGAIN_S):
            try:
                self.compare()
            except Exception:
                log.exception("the clocks could not be compared")

    def compare(self) -> None:
        """Ask all registered brokers, and set the clock to the time that a majority of those that answer agree on."""
        others = [broker_id for broker_id in self._brokers() if broker_id != self._broker_id]
        if self._unheard is None:
            self._unheard, self._asked_since_ms = set(others), self._clock.now_ms()
        asked = [gevent.spawn(self._ask, broker_id) for broker_id in others]
        gevent.joinall(asked)
        is_over = self._clock.now_ms() > self._asked_since_ms + UNHEARD_MAX_MS
        self._unheard = self._unheard & self._brokers().keys() if not is_over else set()
        answers = [greenlet.value for greenlet in asked if greenlet.value is not None]
        own = self._own()
        if own is not None and (answers or not others):
            agreed = agreement(own, answers)
            # Without an agreement the last agreed time is kept.
            self._clock.agreed_ms = agreed if agreed is not None else self._before(own)
            self._note(own, is_split=agreed is None)

    def _before(self, own: OffsetRange) -> int:
        return own[0] if self._clock.agreed_ms is None else self._clock.agreed_ms

    def _ask(self, broker_id: int) -> OffsetRange | None:
        asked_ms = self._clock.now_ms()
        try:
            answer = TIME.ask(self._peers, broker_id, TimeRequest())
        except PortalMQError:
            return None  # unavailable, or of a version without this call
        self._up_since_ms = min(self._up_since_ms, self._clock.now_ms() - answer.up_ms)
        if self._unheard:
            self._unheard.discard(broker_id)
        least, most = answer.machine_ms - self._clock.now_ms(), answer.machine_ms - asked_ms
        return (least, most) if most - least <= TOLERANCE_MS else None  # so slow an answer says too little

    def _own(self) -> OffsetRange | None:
        """Return the range of the own clock; None when this process was paused between the readings."""
        asked_ms = self._clock.now_ms()
        machine_ms = self._clock.machine_ms()
        least, most = machine_ms - self._clock.now_ms(), machine_ms - asked_ms
        return (least, most) if most - least <= TOLERANCE_MS // 10 else None

    def _note(self, own: OffsetRange, *, is_split: bool) -> None:
        assert self._clock.agreed_ms is not None
        off_ms = own[0] - self._clock.agreed_ms
        differs = is_split or not agreed_with(own, (self._clock.agreed_ms, self._clock.agreed_ms))
        if differs and not self.differs:
            log.critical(
                "the clocks of the brokers do not agree: this machine's is %+.1f s from the time that this broker"
                " uses%s. Is NTP running on all of them?",
                *(off_ms / 1_000, ", and no majority says which one is right" if is_split else ""),
            )
        elif self.differs and not differs:
            log.warning("the clocks of the brokers agree again")
        self.off_ms, self.differs = off_ms, differs
