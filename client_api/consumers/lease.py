"""The messages that one consumer has leased from a queue group, and their settlement.

    receive --> waiting --take--> handed out --finish--> to be acked --take_acks, flush--> acked
       ^           |                  |
     ahead         `---- release (nack, at close) ----'

Messages wait here while the ones before them are handled, and their leases run during that time. So a keeper thread
extends the leases of waiting messages and of messages in hand, until the handling has taken `max_handling_s`. A
consumer that is stuck for longer returns the waiting messages to the group. Acks travel with the next receive; the
keeper sends those that no receive takes along in time. The next receive may be under way meanwhile (`ahead`). If the
consumer does not read its answer soon, the keeper does, so that its messages wait with the others.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from portalmq import wire
from portalmq.consumers.acks import PendingAcks, stale_among
from portalmq.consumers.lease_calls import LOOK_TIMEOUT_S, LeaseCalls, Verb
from portalmq.consumers.prefetch import Ahead
from portalmq.errors import LeaseLost, PortalMQError, StaleReceipt
from portalmq.network.either import THREADS, Waits, settled
from portalmq.transport.calls import EitherCalls

_log = logging.getLogger("portalmq.consumer")

ACK_DELAY_S_MAX = 0.1
RELEASE_TIMEOUT_S = 5.0
# Messages that wait this long behind a message in hand go back to the group, for consumers that may be idle.
HOLD_BACK_S_MAX = 5.0
# The keeper reads the answer to a receive that ran ahead after this time.
UNREAD_S_MAX = 1.0
# How long it waits for the answer. A broker that is only slow should not have to lease the messages again.
READ_S_MAX = 5.0
CLOSED_BEFORE_HANDLING = "the consumer closed before it handled the message"


class Leases:
    """Thread-safe. The lock is re-entrant because garbage collection may close a consumer in any thread."""

    def __init__(
        self,
        transport: EitherCalls,
        group: str,
        visibility_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        max_handling_s: float = 0.0,
        waits: Waits = THREADS,
    ) -> None:
        self._transport = transport
        self._calls = LeaseCalls(transport, group, visibility_timeout_s, clock)
        self._visibility_s = visibility_timeout_s
        self._clock = clock
        self._lock = threading.RLock()
        self._waits = waits
        self._changed = waits.condition(self._lock)
        self._waiting: deque[wire.PackMessageOut] = deque()
        # All waiting messages came in one answer or were extended in one call, so their leases end together.
        self._waiting_until = 0.0
        self._handed: dict[str, None] = {}
        self._handed_at = 0.0
        # The earliest end of a lease in hand; the keeper may extend the leases of waiting messages alone.
        self._handed_until = math.inf
        # When the latest message was handed out, or the waiting ones arrived.
        self._busy_since = 0.0
        self._max_handling_s = max_handling_s
        # Of the messages in hand: those that the user has extended, and those whose lease was lost.
        self._extended: set[str] = set()
        self._lost: set[str] = set()
        self._acks = PendingAcks(self._lock, waits.mutex(), lambda acks: self._calls.settle("ack", acks, {}), clock)
        # The thread of the current receive.
        self._receiving_thread: int | None = None
        self._failure: PortalMQError | None = None
        self._keeper: Any = None
        self._wakes_at = -math.inf
        self._was_called = False
        self._closed = self._is_releasing = False
        self._hold_back_s = HOLD_BACK_S_MAX
        # When it was last asked whether the group leases messages, without an answer.
        self._lookup_failed_at = -math.inf
        # True while the keeper returns waiting messages to the broker.
        self._is_giving_back = False
        # The receive that is under way while messages are handled. One thread takes it, and reads its answer.
        self._ahead: Ahead | None = None
        # The thread that reads its answer outside of a receive.
        self._reading_thread: int | None = None

    # --- the consumer's thread ---------------------------------------------------------------------------------------

    async def hold(self, messages: Sequence[wire.PackMessageOut], leased_at: float | None = None) -> None:
        """Keep the messages of a receive (`leased_at`: now, or earlier). Only called while none wait. After close()
        they go back at once."""
        with self._lock:
            assert not self._waiting
            self._busy_since = self._clock()
            self._received()  # from now on release() finds them
            is_late = self._closed
            self._add(messages, self._busy_since if leased_at is None else leased_at)
        if is_late:
            await self.read_ahead(LOOK_TIMEOUT_S)
            await self._give_back_waiting(CLOSED_BEFORE_HANDLING)
            self._transport.rest()

    def _add(self, messages: Sequence[wire.PackMessageOut], leased_at: float) -> None:
        until = leased_at + self._visibility_s
        self._waiting_until = min(self._waiting_until, until) if self._waiting or self._handed else until
        self._waiting.extend(messages)
        if messages and not self._closed:
            self._start_keeper()
            extend_at, spare_at = self._waiting_until - self._visibility_s / 2, self._busy_since + self._hold_back_s
            self._wake_keeper(min(extend_at, spare_at))

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def take(self, at_most: int = 1) -> list[wire.PackMessageOut]:
        """Return the next messages if their leases have time left; they are then in the user's hand."""
        with self._lock:
            now = self._clock()
            if self._waiting and now >= self._waiting_until and self._calls.group_leases is not False:
                _log.warning("%d messages waited longer than their lease and go to others", len(self._waiting))
                self._waiting.clear()
            if not self._waiting:
                return []
            if at_most >= len(self._waiting):
                messages = list(self._waiting)
                self._waiting.clear()
            else:
                messages = [self._waiting.popleft() for _ in range(at_most)]
            if not self._handed or self._handed_until > self._waiting_until:
                self._handed_until = self._waiting_until
            self._handed.update(dict.fromkeys(_receipts_of(messages)))
            self._handed_at = self._busy_since = now
            return messages

    async def finish_handed(self) -> None:
        """Mark the messages in hand as done: the next flush acks them. Raises LeaseLost for lost leases; the other
        messages are acked all the same."""
        if self._handed and self._clock() >= self._handed_until:
            with self._lock:
                in_hand = [receipt for receipt in self._handed if receipt not in self._extended]
            await self._renew_expired(in_hand)
        self._raise_failure()
        with self._lock:
            if not self._handed:
                return
            lost = [receipt for receipt in self._handed if receipt in self._lost] if self._lost else []
            for receipt in lost:
                del self._handed[receipt]
            if self._acks.add(self._handed):
                self._wake_keeper(self._acks.since + ACK_DELAY_S_MAX)
            self._handed = {}
            if self._extended or self._lost:
                self._extended, self._lost = set(), set()
        if lost:
            raise LeaseLost(
                f"{len(lost)} messages were handled for longer than their lease of {self._visibility_s:g} s, and others"
                " have or had them: raise visibility_timeout_s or max_handling_s, or fetch fewer at once",
                messages=len(lost),
            )

    def _raise_failure(self) -> None:
        """Raise what has failed since the last call, in the keeper perhaps."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def _renew_expired(self, receipts: list[str]) -> None:
        """Extend leases that have expired by this clock, where no other consumer has the messages."""
        try:
            await self._mark_lost(await self._calls.extend(receipts, LOOK_TIMEOUT_S))
        except PortalMQError as error:
            _log.debug("%d leases could not be checked: %s", len(receipts), error)

    async def _mark_lost(self, receipts: Collection[str]) -> None:
        """Mark these leases as lost to other consumers, unless the group has no leases."""
        if not receipts or await self._calls.group_has_leases() is False:
            return
        with self._lock:
            lost = [receipt for receipt in receipts if receipt in self._handed]
            self._lost.update(lost)
        self._warn_of_stale(len(lost))

    def ask_near(self, place: tuple[str, int] | None) -> None:
        """Ask the leader of this partition about the group, as receives do."""
        self._calls.near = place

    async def group_has_leases(self) -> bool | None:
        """Return what LeaseCalls.group_has_leases returns, for a receive that may go without."""
        return await self._calls.group_has_leases(hurried=True, rarely=True)

    async def begin_receive(self) -> bool:
        """Note that this thread begins a receive. Follow it by `take_ahead` and `take_acks`, or by `receive_failed`.
        Return False if there are messages by now, which another thread has read."""
        with self._lock:
            await self._wait_read_ahead()
            if self._waiting:
                return False
            self._receiving_thread = threading.get_ident()
            return True

    def run_ahead(self, ahead: Ahead) -> None:
        """Note that the next receive is under way. Only called during the one before."""
        with self._lock:
            self._ahead = ahead
            self._start_keeper()
            self._wake_keeper(self._read_ahead_at())

    def take_ahead(self) -> Ahead | None:
        """Return the receive that is under way, for the consumer's thread to read its answer."""
        ahead, self._ahead = self._ahead, None
        return ahead

    async def read_ahead(self, within_s: float) -> None:
        """Read the answer to the receive that is under way, and keep its messages with the waiting ones. After a
        failure the next receive repeats it."""
        with self._lock:
            await self._wait_read_ahead(within_s)
            if (self._receiving_thread or self._reading_thread) is not None or (ahead := self.take_ahead()) is None:
                return
            self._reading_thread = threading.get_ident()
        try:
            received = await settled(ahead.read(within_s))
        except BaseException as error:
            self.send_acks_apart()
            if not isinstance(error, PortalMQError):
                raise
            _log.debug("the receive that ran ahead has no answer: %s", error)
        else:
            self.arrived(received)
            with self._lock:
                self._add(received.messages, ahead.sent_at)
        finally:
            with self._lock:
                self._reading_thread = None
                self._changed.notify_all()
            if self._closed:
                await self._give_back_waiting(CLOSED_BEFORE_HANDLING)

    async def _wait_read_ahead(self, within_s: float | None = None) -> None:
        if self._reading_thread is not None:
            await self._changed.wait_for(lambda: self._reading_thread is None, within_s)

    def _read_ahead_at(self) -> float:
        if self._ahead is None or self._receiving_thread is not None:
            return math.inf
        return self._ahead.sent_at + min(UNREAD_S_MAX, self._visibility_s / 2)

    def take_acks(self, attempt_id: str) -> list[str]:
        """Return the acks that travel with the next receive. Follow it by `arrived` and `hold`, or by
        `receive_failed`."""
        return self._acks.take(attempt_id)

    def arrived(self, received: wire.PackReceived) -> None:
        """Confirm the acks that an answer says are committed, except the stale ones."""
        self._acks.arrived(received)
        self._warn_of_stale(len(received.stale_receipts))

    def receive_failed(self) -> None:
        """Note the end of a receive without an answer. Follow it by `begin_receive`."""
        with self._lock:
            self._received()
            self.send_acks_apart()

    def send_acks_apart(self) -> None:
        """Leave the acks of a failed receive to the keeper. Acking twice does no harm."""
        with self._lock:
            if self._acks.keep_apart():
                self._wake_keeper(self._acks.since + ACK_DELAY_S_MAX)

    def _received(self) -> None:
        self._receiving_thread = None
        if self._is_releasing:  # otherwise each receive would wake the keeper
            self._changed.notify_all()

    async def commit(self) -> None:
        """Send the pending acks, those that travel with the receive under way included, and those not confirmed."""
        if self._acks.are_in_receive:
            await self.read_ahead(READ_S_MAX)
        await self.flush()
        self._raise_failure()

    async def flush(self) -> None:
        """Send the pending acks, and note a failure. A stale one is logged: another consumer has its message."""
        async with self._acks.sending:  # a commit() that waits for it finds the failure
            await self._flush_now()

    async def _flush_now(self) -> None:
        try:
            self._warn_of_stale(len(await self._acks.flush()))
        except BaseException as error:
            with self._lock:
                self._wake_keeper(self._acks.due_at(ACK_DELAY_S_MAX))
                if not isinstance(error, PortalMQError):
                    raise
                self._failure = error

    def _warn_of_stale(self, count: int) -> None:
        if count:
            _log.warning(
                "%d messages were handled longer than their lease of %g s, or their broker failed: they are delivered"
                " again",
                count,
                self._visibility_s,
            )

    async def settle(
        self, verb: Verb, receipts: list[str], options: dict[str, object], calls: LeaseCalls | None = None
    ) -> None:
        """Ack, nack or extend by the user's order (`calls`: over another transport). Raises StaleReceipt after settling
        the other receipts."""
        try:
            await (calls or self._calls).settle(verb, receipts, options)
        except StaleReceipt as error:
            self.forget(stale_among(error, receipts) if verb == "extend" else receipts)
            raise
        if verb == "extend":
            with self._lock:
                self._extended.update(receipt for receipt in receipts if receipt in self._handed)
        else:
            self.forget(receipts)
        if self._closed and calls is None:
            self._transport.rest()

    def forget(self, receipts: Collection[str]) -> None:
        """Drop receipts in hand that the user settles: asking for more does not ack them."""
        with self._lock:
            for receipt in receipts:
                self._handed.pop(receipt, None)

    def forget_handed(self) -> None:
        """Leave the messages in hand to the user (manual_ack): closing must not return them."""
        with self._lock:
            self._handed = {}

    # --- the keeper --------------------------------------------------------------------------------------------------

    def _start_keeper(self) -> None:
        if self._keeper is None:
            self._keeper = self._waits.spawn("portalmq-lease-keeper", self._keep)

    async def _keep(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = self._clock()
                acks_at = self._acks.due_at(ACK_DELAY_S_MAX)
                is_kept = bool(self._waiting or self._renewable(now))
                extension_at = self._waiting_until - self._visibility_s / 2 if is_kept else math.inf
                spare_at = self._release_waiting_at()
                # While messages come and go it looks again by itself, as to wake it costs each call a thread switch.
                look_at = now + ACK_DELAY_S_MAX if self._was_called else math.inf
                self._was_called = False
                unread_at = self._read_ahead_at()
                self._wakes_at = min(acks_at, extension_at, spare_at, unread_at, look_at)
                if now < self._wakes_at:
                    await self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
                    continue
            try:
                if now >= acks_at:
                    await self.flush()
                if now >= unread_at:
                    await self.read_ahead(max(LOOK_TIMEOUT_S, min(READ_S_MAX, self._visibility_s / 4)))
                if now >= spare_at:
                    await self._release_waiting()
                if now >= extension_at:
                    await self._keep_waiting(now)
            except PortalMQError as error:
                with self._lock:
                    if not self._closed:
                        self._failure = error
                    if now >= extension_at:
                        # Without an extension they must not be handed out: their leases expire.
                        self._waiting.clear()
                        self._extended.update(self._handed)

    def _wake_keeper(self, at: float) -> None:
        """Wake the keeper if it would sleep beyond the time `at`."""
        self._was_called = True
        if at < self._wakes_at or at == -math.inf:
            self._changed.notify_all()

    def _release_waiting_at(self) -> float:
        """Return when waiting messages go back to the group; later again after a failed look-up of the group."""
        return max(self._busy_since, self._lookup_failed_at) + self._hold_back_s if self._waiting else math.inf

    async def _release_waiting(self) -> None:
        """Return the messages that wait behind a slow one to the group."""
        are_leased = await self._calls.group_has_leases()
        if are_leased:
            await self._give_back_waiting("the consumer is busy with another")
        elif are_leased is None:
            with self._lock:
                self._lookup_failed_at = self._clock()
        else:
            self._hold_back_s = math.inf  # acked at delivery: no other consumer would get them

    async def _give_back_waiting(self, reason: str) -> None:
        with self._lock:
            receipts = _receipts_of(self._waiting)
            self._waiting.clear()
            self._is_giving_back = True
        try:
            await self._calls.give_back_unseen(receipts, reason)
        finally:
            with self._lock:
                self._is_giving_back = False
                self._changed.notify_all()

    async def wait_given_back(self, within_s: float) -> bool:
        """Wait until the keeper has returned the messages that it is returning. Before that a receive may find nothing,
        as they still count as this consumer's."""
        with self._lock:
            return await self._changed.wait_for(lambda: not self._is_giving_back or self._closed, within_s)

    def _renewable(self, now: float) -> list[str]:
        """Return the receipts in hand whose leases the keeper renews."""
        if now >= self._handed_at + self._max_handling_s:
            return []
        return [each for each in self._handed if each not in self._extended and each not in self._lost]

    async def _keep_waiting(self, now: float) -> None:
        with self._lock:
            receipts = _receipts_of(self._waiting)
            stuck = bool(self._handed) and now >= self._handed_at + max(self._visibility_s, self._max_handling_s)
            in_hand = self._renewable(now)
            if in_hand and now + self._visibility_s / 2 >= self._handed_at + self._max_handling_s:
                _log.warning(
                    "a message has been handled for %.0f s: its lease is not renewed after max_handling_s=%g",
                    now - self._handed_at,
                    self._max_handling_s,
                )
        if stuck:
            _log.warning("the message in hand took longer than its lease: %d waiting ones are returned", len(receipts))
            await self._give_back_waiting("the consumer is stuck")
            return
        receipts += in_hand
        gone = await self._calls.extend(receipts)
        await self._mark_lost(gone)
        if self._calls.group_leases is False:
            gone = set()
        with self._lock:
            self._waiting = deque(message for message in self._waiting if message.receipt not in gone)
            # Messages may have come, and gone into the hand, meanwhile.
            extended = {*receipts, *self._extended, *self._lost}
            if extended.issuperset(_receipts_of(self._waiting)):
                self._waiting_until = now + self._visibility_s
            if in_hand and extended.issuperset(self._handed):
                self._handed_until = now + self._visibility_s

    async def renew_waiting(self) -> None:
        """Extend the leases of messages that may have been leased long ago, before they are handed out."""
        if await self._calls.group_has_leases(hurried=True):
            try:
                await self._keep_waiting(self._clock())
            except PortalMQError as error:
                _log.debug("leases of a repeated receive could not be renewed: %s", error)

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def is_receiving_in_this_thread(self) -> bool:
        """True if the current receive is this thread's own, which then runs a signal handler."""
        return threading.get_ident() in {self._receiving_thread, self._reading_thread}

    async def end_receives(self, within_s: float) -> None:
        """Wait until a receive in another thread has ended, and read the answer to the one that is under way, before
        their connections close."""
        with self._lock:
            self._is_releasing = True
            await self._changed.wait_for(self._has_received, within_s)
        await self.read_ahead(within_s)

    def _has_received(self) -> bool:
        return self._closed or (self._receiving_thread is None and self._reading_thread is None)

    async def release(self, received_within_s: float = 0.0) -> None:
        """Send the last acks and return unfinished messages, also those of a receive in another thread that ends within
        `received_within_s`. After a failure the leases expire by themselves."""
        with self._lock:
            self._is_releasing = True
            await self._changed.wait_for(self._has_received, received_within_s)
            if self._closed:
                return
            self._closed = True
            self._calls.timeout_s = RELEASE_TIMEOUT_S
            self._changed.notify_all()
            waiting = _receipts_of(self._waiting)
            handed = list(self._handed)
            self._waiting.clear()
            self._handed = {}
            self._acks.gather_all()
        # The keeper may take much longer to send acks than close() may: then it continues with them by itself.
        if await self._acks.sending.acquire(RELEASE_TIMEOUT_S):
            try:
                self._failure = None
                await self._flush_now()
                self._raise_failure()
            except PortalMQError as error:
                _log.warning("the last messages could not be acked and will be delivered again: %s", error)
            finally:
                self._acks.sending.release()
        else:
            _log.warning("acks have no answer: the last messages may be delivered again")
        await self._calls.give_back(handed, {"reason": "the consumer closed before it was done"})
        await self._calls.give_back_unseen(waiting, CLOSED_BEFORE_HANDLING)


def _receipts_of(messages: Iterable[wire.PackMessageOut]) -> list[str]:
    return [message.receipt for message in messages if message.receipt is not None]
