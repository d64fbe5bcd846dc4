"""The messages that one consumer has leased from a queue group, and their settlement.

    receive --> waiting --take--> handed out --finish--> to be acked --take_acks, flush--> acked
                   |                  |
                   `---- release (nack, at close) ----'

Messages wait here while the ones before them are handled, and their leases run during that time. So a keeper thread
extends the leases of waiting messages and of messages in hand, until the handling has taken `max_handling_s`. A
consumer that is stuck for longer returns the waiting messages to the group. Acks travel with the next receive; the
keeper sends those that no receive takes along in time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from portalmq import wire
from portalmq.errors import LeaseLost, PortalMQError, StaleReceipt
from portalmq.transport.request import json_request
from portalmq.transport.transport import Transport

_log = logging.getLogger("portalmq.consumer")

ACK_DELAY_S_MAX = 0.1
RELEASE_TIMEOUT_S = 5.0
LOOK_TIMEOUT_S = 1.0
# Messages that wait this long behind a message in hand go back to the group, for consumers that may be idle.
HOLD_BACK_S_MAX = 5.0
CLOSED_BEFORE_HANDLING = "the consumer closed before it handled the message"

Verb = Literal["ack", "nack", "extend"]


class Leases:
    """Thread-safe. The lock is re-entrant because garbage collection may close a consumer in any thread."""

    def __init__(
        self,
        transport: Transport,
        group: str,
        visibility_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        max_handling_s: float = 0.0,
    ) -> None:
        self._transport = transport
        self._group = group
        self._visibility_s = visibility_timeout_s
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
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
        # Whether the group leases messages at all (None: not known). With at_most_once they are acked at delivery.
        self._group_leases: bool | None = None
        self._to_ack: list[str] = []
        # Acks that travel with the current receive; they are confirmed by its answer, or sent again.
        self._acks_in_receive: list[str] = []
        # True from a failed receive until the keeper has sent its acks: until then no receive carries any.
        self._are_acks_apart = False
        # The thread of the current receive.
        self._receiving_thread: int | None = None
        self._to_ack_since = 0.0
        # Held while acks are sent, so that flush() also waits for those that the keeper sends.
        self._flushing = threading.RLock()
        self._failure: PortalMQError | None = None
        self._keeper: threading.Thread | None = None
        self._wakes_at = -math.inf
        self._was_called = False
        self._closed = self._is_releasing = False
        self._hold_back_s = HOLD_BACK_S_MAX
        # When it was last asked whether the group leases messages, without an answer.
        self._lookup_failed_at = -math.inf
        # True while the keeper returns waiting messages to the broker.
        self._is_giving_back = False

    # --- the consumer's thread ---------------------------------------------------------------------------------------

    def hold(self, messages: Sequence[wire.PackMessageOut]) -> None:
        """Keep the messages of a receive. Only called while none wait. After close() they go back at once."""
        with self._lock:
            assert not self._waiting
            self._waiting.extend(messages)
            now = self._busy_since = self._clock()
            self._waiting_until = now + self._visibility_s
            self._received()  # from now on release() finds them
            is_late = self._closed
            late = _receipts_of(self._waiting) if is_late else []
            if is_late:
                self._waiting.clear()
            elif messages:
                self._start_keeper()
                self._wake_keeper(min(self._waiting_until - self._visibility_s / 2, now + self._hold_back_s))
        if is_late:
            self.give_back_unseen(late, CLOSED_BEFORE_HANDLING)
            self._transport.rest()

    def take(self) -> wire.PackMessageOut | None:
        """Return the next message whose lease has time left; it is then in the user's hand."""
        with self._lock:
            now = self._clock()
            if self._waiting and now >= self._waiting_until and self._group_leases is not False:
                _log.warning("%d messages waited longer than their lease and go to others", len(self._waiting))
                self._waiting.clear()
            if not self._waiting:
                return None
            message = self._waiting.popleft()
            if message.receipt is not None:
                if not self._handed or self._handed_until > self._waiting_until:
                    self._handed_until = self._waiting_until
                self._handed[message.receipt] = None
                self._handed_at = self._busy_since = now
            return message

    def finish_handed(self) -> None:
        """Mark the messages in hand as done: the next flush acks them. Raises LeaseLost for lost leases; the other
        messages are acked all the same."""
        if self._handed and self._clock() >= self._handed_until:
            with self._lock:
                in_hand = [receipt for receipt in self._handed if receipt not in self._extended]
            self._renew_expired(in_hand)
        with self._lock:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            if not self._handed:
                return
            lost = [receipt for receipt in self._handed if receipt in self._lost] if self._lost else []
            for receipt in lost:
                del self._handed[receipt]
            if not self._to_ack:
                self._to_ack_since = self._clock()
                self._wake_keeper(self._to_ack_since + ACK_DELAY_S_MAX)
            self._to_ack += self._handed
            self._handed = {}
            if self._extended or self._lost:
                self._extended, self._lost = set(), set()
        if lost:
            raise LeaseLost(
                f"{len(lost)} messages were handled for longer than their lease of {self._visibility_s:g} s, and others"
                " have or had them: raise visibility_timeout_s or max_handling_s, or fetch fewer at once",
                messages=len(lost),
            )

    def _renew_expired(self, receipts: list[str]) -> None:
        """Extend leases that have expired by this clock, where no other consumer has the messages."""
        try:
            if receipts:
                self._settle("extend", receipts, self._extend_options(), LOOK_TIMEOUT_S)
        except StaleReceipt as error:
            self._mark_lost(_stale_among(error, receipts))
        except PortalMQError as error:
            _log.debug("%d leases could not be checked: %s", len(receipts), error)

    def _mark_lost(self, receipts: Collection[str]) -> None:
        """Mark these leases as lost to other consumers, unless the group has no leases."""
        if not receipts or self._group_has_leases() is False:
            return
        with self._lock:
            lost = [receipt for receipt in receipts if receipt in self._handed]
            self._lost.update(lost)
        self._warn_of_stale(len(lost))

    def _group_has_leases(self) -> bool | None:
        """Return whether the group leases messages; None if no broker can answer now."""
        if self._group_leases is None:
            try:
                group = self._transport.get(
                    wire.group_path(self._group), wire.GroupDescription, timeout_s=LOOK_TIMEOUT_S
                )
            except PortalMQError:
                return None
            self._group_leases = group.config.delivery != "at_most_once"
        return self._group_leases

    def begin_receive(self) -> None:
        """Note that this thread begins a receive. Follow it by `take_acks`, or by `receive_failed`."""
        self._receiving_thread = threading.get_ident()

    def take_acks(self) -> list[str]:
        """Return the acks that travel with the next receive. Follow it by `arrived` and `hold`, or by
        `receive_failed`."""
        with self._lock:
            assert not self._acks_in_receive
            if self._are_acks_apart:
                return []
            gathered = self._to_ack
            self._acks_in_receive, self._to_ack = (
                gathered[: wire.RECEIVE_MESSAGES_MAX],
                gathered[wire.RECEIVE_MESSAGES_MAX :],
            )
            return self._acks_in_receive

    def arrived(self, stale: Sequence[str]) -> None:
        """Confirm the acks that the answered receive carried, except the stale ones."""
        with self._lock:
            self._acks_in_receive = []
        self._warn_of_stale(len(stale))

    def receive_failed(self) -> None:
        """Note the end of a receive without an answer. Follow it by `begin_receive`."""
        with self._lock:
            self._received()
            self.send_acks_apart()

    def send_acks_apart(self) -> None:
        """Leave the acks of a failed receive to the keeper. Acking twice does no harm."""
        with self._lock:
            self._are_acks_apart = self._are_acks_apart or bool(self._acks_in_receive)
            self._to_ack, self._acks_in_receive = self._acks_in_receive + self._to_ack, []
            if self._to_ack:
                self._to_ack_since = self._clock()
                self._wake_keeper(self._to_ack_since + ACK_DELAY_S_MAX)

    def _received(self) -> None:
        self._receiving_thread = None
        if self._is_releasing:  # otherwise each receive would wake the keeper
            self._changed.notify_all()

    def flush(self) -> None:
        """Send the pending acks. A stale one is logged: another consumer has its message."""
        with self._flushing:
            with self._lock:
                gathered, self._to_ack = self._to_ack, []
            for start in range(0, len(gathered), wire.RECEIVE_MESSAGES_MAX):
                receipts = gathered[start : start + wire.RECEIVE_MESSAGES_MAX]
                try:
                    self._settle("ack", receipts, {})
                except StaleReceipt as error:
                    self._warn_of_stale(len(_stale_among(error, receipts)))
            with self._lock:
                self._are_acks_apart = False

    def _warn_of_stale(self, count: int) -> None:
        if count:
            _log.warning(
                "%d messages were handled longer than their lease of %g s and will be delivered again",
                count,
                self._visibility_s,
            )

    def settle(self, verb: Verb, receipts: list[str], options: dict[str, object]) -> None:
        """Ack, nack or extend by the user's order. Raises StaleReceipt after settling the other receipts."""
        try:
            self._settle(verb, receipts, options)
        except StaleReceipt as error:
            self.forget(_stale_among(error, receipts) if verb == "extend" else receipts)
            raise
        if verb == "extend":
            with self._lock:
                self._extended.update(receipt for receipt in receipts if receipt in self._handed)
        else:
            self.forget(receipts)
        if self._closed:
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
            self._keeper = threading.Thread(target=self._keep, name="portalmq-lease-keeper", daemon=True)
            self._keeper.start()

    def _keep(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                now = self._clock()
                acks_at = self._to_ack_since + ACK_DELAY_S_MAX if self._to_ack else math.inf
                is_kept = bool(self._waiting or self._renewable(now))
                extension_at = self._waiting_until - self._visibility_s / 2 if is_kept else math.inf
                spare_at = self._release_waiting_at()
                # While messages come and go it looks again by itself, as to wake it costs each call a thread switch.
                look_at = now + ACK_DELAY_S_MAX if self._was_called else math.inf
                self._was_called = False
                self._wakes_at = min(acks_at, extension_at, spare_at, look_at)
                if now < self._wakes_at:
                    self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)
                    continue
            try:
                if now >= acks_at:
                    self.flush()
                if now >= spare_at:
                    self._release_waiting()
                if now >= extension_at:
                    self._keep_waiting(now)
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

    def _release_waiting(self) -> None:
        """Return the messages that wait behind a slow one to the group."""
        are_leased = self._group_has_leases()
        if are_leased:
            self._give_back_waiting("the consumer is busy with another")
        elif are_leased is None:
            with self._lock:
                self._lookup_failed_at = self._clock()
        else:
            self._hold_back_s = math.inf  # acked at delivery: no other consumer would get them

    def _give_back_waiting(self, reason: str) -> None:
        with self._lock:
            receipts = _receipts_of(self._waiting)
            self._waiting.clear()
            self._is_giving_back = True
        try:
            self.give_back_unseen(receipts, reason)
        finally:
            with self._lock:
                self._is_giving_back = False
                self._changed.notify_all()

    def wait_given_back(self, within_s: float) -> bool:
        """Wait until the keeper has returned the messages that it is returning. Before that a receive may find nothing,
        as they still count as this consumer's."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._is_giving_back or self._closed, within_s)

    def _renewable(self, now: float) -> list[str]:
        """Return the receipts in hand whose leases the keeper renews."""
        if now >= self._handed_at + self._max_handling_s:
            return []
        return [each for each in self._handed if each not in self._extended and each not in self._lost]

    def _keep_waiting(self, now: float) -> None:
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
            self._give_back_waiting("the consumer is stuck")
            return
        gone: set[str] = set()
        receipts += in_hand
        try:
            self._settle("extend", receipts, self._extend_options())
        except StaleReceipt as error:
            gone = _stale_among(error, receipts)
            self._mark_lost(gone)
            if self._group_leases is False:
                gone = set()
        with self._lock:
            self._waiting = deque(message for message in self._waiting if message.receipt not in gone)
            self._waiting_until = now + self._visibility_s
            if in_hand:
                self._handed_until = self._waiting_until

    # --- the end -----------------------------------------------------------------------------------------------------

    @property
    def is_receiving_in_this_thread(self) -> bool:
        """True if the current receive is this thread's own, which then runs a signal handler."""
        return self._receiving_thread == threading.get_ident()

    def release(self, received_within_s: float = 0.0) -> None:
        """Send the last acks and return unfinished messages, also those of a receive in another thread that ends within
        `received_within_s`. After a failure the leases expire by themselves."""
        with self._lock:
            self._is_releasing = True
            self._changed.wait_for(lambda: self._receiving_thread is None or self._closed, received_within_s)
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            waiting = _receipts_of(self._waiting)
            handed = list(self._handed)
            self._waiting.clear()
            self._handed = {}
            self._to_ack = self._acks_in_receive + self._to_ack
        # The keeper may take much longer to send acks than close() may: then it continues with them by itself.
        if self._flushing.acquire(timeout=RELEASE_TIMEOUT_S):
            try:
                self.flush()
            except PortalMQError as error:
                _log.warning("the last messages could not be acked and will be delivered again: %s", error)
            finally:
                self._flushing.release()
        else:
            _log.warning("acks have no answer: the last messages may be delivered again")
        self._give_back(handed, {"reason": "the consumer closed before it was done"})
        self.give_back_unseen(waiting, CLOSED_BEFORE_HANDLING)

    def give_back_unseen(self, receipts: list[str], reason: str) -> None:
        """Return messages that were never handed out: this does not count as a delivery."""
        self._give_back(receipts, {"reason": reason, "delay_ms": 0, "unseen": True})

    def _give_back(self, receipts: list[str], options: dict[str, object]) -> None:
        if not receipts:
            return
        try:
            self._settle("nack", receipts, options)
        except PortalMQError as error:
            _log.debug("could not return %d messages: %s", len(receipts), error)

    def _extend_options(self) -> dict[str, object]:
        return {"visibility_timeout_ms": round(self._visibility_s * 1000)}

    def _settle(
        self, verb: Verb, receipts: list[str], options: dict[str, object], timeout_s: float | None = None
    ) -> None:
        request = json_request("POST", wire.group_path(self._group, verb), {"receipts": receipts, **options})
        self._transport.call(request, timeout_s=RELEASE_TIMEOUT_S if self._closed else timeout_s)


def _receipts_of(messages: Iterable[wire.PackMessageOut]) -> list[str]:
    return [message.receipt for message in messages if message.receipt is not None]


def _stale_among(error: StaleReceipt, receipts: list[str]) -> set[str]:
    """Return the receipts that an answer refused; all of them if it does not say."""
    results = error.extra.get("results")
    if not isinstance(results, list):
        return set(receipts)
    return {str(result.get("receipt")) for result in results if result.get("status") != "ok"}
