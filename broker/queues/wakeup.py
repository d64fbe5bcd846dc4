"""Waiting receives of a queue group on a partition that is led here, and their wake-up.

    a message becomes readable, returns, or is due  -->  notify  -->  wakes one waiter, which takes what it can
                                                                      and notifies again if something is left

A timer fires when the next lease or back-off ends, with or without waiters: exhausted messages are given up even if no
consumer asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import gevent

from portalmq.broker.core.queue.delivery import OUTSTANDING_MAX, GroupDelivery
from portalmq.broker.core.queue.key_order import HELD_MAX
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.limits import key_limits_of
from portalmq.broker.core.queue.selection import has_turn
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.long_poll import Waiter
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.ready_messages import ReadyMessages
from portalmq.broker.storage.errors import DAMAGE, Shortage, StorageError
from portalmq.wire import GroupConfig

# The longest delay, without waiters, between the end of a lease and its processing: several are processed together.
SWEEP_MS = 1_000
# A wait for the wall clock is checked this often, as that clock may jump.
LOOK_AGAIN_MS = 1_000
SOON_MS = 20


@dataclass(eq=False, repr=False)
class Wakeup:
    """Wakes waiters. `on_timer` is called when the timer fires, before a wake-up. Invariant: no timer runs after
    close."""

    partition: Partition
    group: str
    _ready_messages: ReadyMessages
    _clock: Clock
    settings: Callable[[], GroupConfig]
    on_timer: Callable[[], None]
    is_paused: Callable[[], bool]
    # How many messages the group's limits allow now, and in how many ms the rate allows one.
    allowed: Callable[[], int]
    token_in_ms: Callable[[], int | None]

    def __post_init__(self) -> None:
        self.closed = False
        self._waiters: dict[Waiter, None] = {}
        self._timer: gevent.Greenlet | None = None
        self._timer_at_ms = 0
        self.partition.on_readable.append(self.notify)

    @property
    def delivery(self) -> GroupDelivery | None:
        """Return the group's fold; None when the group has ended here."""
        return None if self.closed else self.partition.delivery.get(self.group)

    def close(self) -> None:
        """Close; the waiters look for the partition again."""
        self.closed = True
        self.partition.on_readable.remove(self.notify)
        self._disarm()
        self.move()

    def move(self) -> None:
        """Let all waiters look for their sources again."""
        for waiter in tuple(self._waiters):
            waiter.move()

    def end_waits(self) -> None:
        for waiter in tuple(self._waiters):
            waiter.cancel()

    # --- waiters -----------------------------------------------------------------------------------------------------

    def park(self, waiter: Waiter) -> None:
        if self.closed:  # closed on the way here: nothing would wake it
            waiter.move()
            return
        self._waiters[waiter] = None
        self.arm()

    def leave(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        if not self._waiters:
            self._disarm()

    def notify(self) -> None:
        """Wake one waiter, unless it is awake already: messages may be available."""
        try:
            self._notify()
        except (Shortage, *DAMAGE) as fault:
            self._look_again(fault)

    def _notify(self) -> None:
        if not self._waiters or not self.has_messages():
            self.arm()
            return
        first = next(iter(self._waiters))
        if not first.woken:
            first.wake()

    def _look_again(self, fault: StorageError) -> None:
        """Try later: a log at rest cannot be opened now, and a receive would be told why; or a file is damaged."""
        if not isinstance(fault, Shortage):
            self.partition.report_damage(str(fault))
        is_sooner = self._timer is not None and self._timer_at_ms <= self._clock.now_ms() + LOOK_AGAIN_MS
        if not self.closed and not is_sooner:
            self._set_timer(LOOK_AGAIN_MS)

    def has_messages(self) -> bool:
        return self.has_available() and not self.is_paused() and self.allowed() > 0

    def has_available(self) -> bool:
        """Return whether messages may be available, if the group is not paused and its limits allow them."""
        delivery = self.delivery
        if delivery is None:
            return False
        now_ms = self._clock.now_ms()
        if self.has_fresh(delivery):
            return True
        config = self.settings()
        if config.is_keyed:
            return has_turn(delivery, now_ms, self.partition.high_watermark, key_limits_of(config))
        return delivery.has_returned(now_ms)

    def has_fresh(self, delivery: GroupDelivery) -> bool:
        """Return True when a message may be available for its first delivery."""
        if delivery.outstanding >= OUTSTANDING_MAX or delivery.held >= HELD_MAX:
            return False
        end = self.partition.readable_end
        if self._ready_messages.place(delivery.next) < end:
            return True
        lanes = self._ready_messages.lanes()
        return bool(lanes) and self._has_in_lanes(delivery, lanes)

    def _has_in_lanes(self, delivery: GroupDelivery, lanes: Collection[int]) -> bool:
        by_key = self.settings().is_keyed
        for lane in lanes:
            if lane >= DELAYED or by_key:
                continue
            _, offset = delivery.cursors.get(lane, (0, 0))
            if next(self._ready_messages.fresh(lane, 0, max(offset, delivery.start)), None) is not None:
                return True
        due_ms = self._next_due_ms(delivery)
        return due_ms is not None and due_ms <= self.partition.readable_by_ms(self._clock.wall_ms())

    def _next_due_ms(self, delivery: GroupDelivery) -> int | None:
        """Return the wall-clock time at which the next delayed message is due."""
        lanes = [lane for lane in self._ready_messages.lanes() if lane >= DELAYED]
        firsts = [next(self._ready_messages.fresh(lane, *delivery.cursors.get(lane, (0, 0))), None) for lane in lanes]
        return min([run.due_ms for run in firsts if run is not None], default=None)

    # --- the timer ---------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Set the timer to the end of the next lease or back-off; with waiters, also to the next due message."""
        delivery = self.delivery
        if delivery is None:
            return
        wait_ms = self._wait_ms(delivery)
        if wait_ms is None:
            return
        at_ms = self._clock.now_ms() + wait_ms
        if self._timer is None or self._timer_at_ms > at_ms:
            self._set_timer(wait_ms)

    def _set_timer(self, wait_ms: int) -> None:
        self._disarm()
        self._timer_at_ms = self._clock.now_ms() + wait_ms
        self._timer = gevent.spawn_later(wait_ms / 1000, self._fire)

    def _wait_ms(self, delivery: GroupDelivery) -> int | None:
        now_ms = self._clock.now_ms()
        waits: list[int] = []
        ends_ms = delivery.next_wakeup_ms()
        if ends_ms is not None:
            waits.append(max(ends_ms - now_ms, 0 if self._waiters else SWEEP_MS))
        if self._waiters:
            if self._ready_messages.lanes():
                due_ms = self._next_due_ms(delivery)
                if due_ms is not None:
                    left_ms = due_ms - self._clock.wall_ms()
                    waits.append(min(left_ms, LOOK_AGAIN_MS) if left_ms > 0 else LOOK_AGAIN_MS)
            token_ms = self.token_in_ms()
            if token_ms is not None:
                waits.append(token_ms)
            if delivery.keys is not None:
                if not delivery.keys.is_settled:
                    waits.append(SOON_MS)
                key_at_ms = delivery.keys.rates.next_at_ms()
                if key_at_ms is not None:
                    waits.append(max(0, key_at_ms - now_ms))
        return min(waits, default=None)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.kill(block=False)
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self.delivery is None:
            return
        try:
            self.on_timer()
            self._notify()
        except (Shortage, *DAMAGE) as fault:
            self._look_again(fault)
