"""The leases of one channel in one queue group, and the keeper that renews them.

receive --> held (in the inbox, or in a task) --ack--> pending acks --with the next receive, or after 0.1 s--> acked
             |  ^                         `-requeue, close--> given back, without counting a delivery
             `--'  renewed every third of the visibility timeout, as long as it is held
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable

from portalmq import wire
from portalmq.consumers.acks import PendingAcks
from portalmq.consumers.lease_calls import LeaseCalls
from portalmq.errors import PortalMQError
from portalmq.network.either import THREADS, finish
from portalmq.transport.retries import may_repeat
from portalmq.transport.transport import Transport

_log = logging.getLogger("portalmq.kombu")

ACK_DELAY_S_MAX = 0.1
CLOSE_TIMEOUT_S = 5.0
RETRY_S = 1.0


class GroupLeases:
    """Thread-safe."""

    def __init__(
        self,
        transport: Transport,
        group: str,
        visibility_timeout_s: float,
        wake_keeper: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.group = group
        self._calls = LeaseCalls(transport, group, visibility_timeout_s)
        self._visibility_s = visibility_timeout_s
        self._wake_keeper = wake_keeper
        self._clock = clock
        self._lock = threading.RLock()
        # When each lease ends by this clock, at the latest moment that is certain.
        self._held: dict[str, float] = {}
        self._renew_at = math.inf
        self.acks = PendingAcks(
            self._lock, THREADS.mutex(), lambda receipts: self._calls.settle("ack", receipts, {}), clock
        )

    def hold(self, receipts: Iterable[str], leased_at: float) -> None:
        """Keep the leases of a receive that was answered at `leased_at`."""
        with self._lock:
            self._held.update(dict.fromkeys(receipts, leased_at + self._visibility_s))
            if self._held and self._renew_at == math.inf:
                self._renew_at = leased_at + self._visibility_s / 3
        self._wake_keeper(self._renew_at)

    def is_held(self, receipt: str) -> bool:
        """Return whether the message is this channel's for certain; its lease is forgotten if not."""
        with self._lock:
            if self._held.get(receipt, -math.inf) > self._clock():
                return True
            if self._held.pop(receipt, None) is not None:
                _log.warning("a message waited longer than its lease of %g s, and goes to others", self._visibility_s)
            return False

    def ack(self, receipt: str) -> None:
        """Ack with the next receive, or soon. An ack of a lost lease counts, as long as nobody else has the message."""
        with self._lock:
            self._held.pop(receipt, None)
            is_first = self.acks.add([receipt])
        if is_first:
            self._wake_keeper(self.acks.since + ACK_DELAY_S_MAX)

    def give_back(self, receipts: list[str], reason: str, timeout_s: float | None = None) -> None:
        """Return messages as if they had not been delivered. After a failure their leases expire."""
        with self._lock:
            for receipt in receipts:
                self._held.pop(receipt, None)
        self._calls.timeout_s = timeout_s
        finish(self._calls.give_back_unseen(receipts, reason))

    def requeue(self, receipt: str) -> None:
        """Return a message that a task refused. This counts as a delivery."""
        with self._lock:
            self._held.pop(receipt, None)
        finish(self._calls.give_back([receipt], {"reason": "the task was requeued", "delay_ms": 0}))

    def arrived(self, received: wire.PackReceived) -> None:
        self.acks.arrived(received)
        self._warn_of_stale(len(received.stale_receipts))

    def receive_failed(self) -> None:
        """Leave the acks of a failed receive to the keeper. Acking twice does no harm."""
        if self.acks.keep_apart():
            self._wake_keeper(self.acks.since + ACK_DELAY_S_MAX)

    # --- the keeper's thread -----------------------------------------------------------------------------------------

    def due_at(self) -> float:
        with self._lock:
            return min(self.acks.due_at(ACK_DELAY_S_MAX), self._renew_at if self._held else math.inf)

    def keep(self) -> None:
        """Send acks and renew leases that are due."""
        now = self._clock()
        if now >= self.acks.due_at(ACK_DELAY_S_MAX):
            self.flush()
        if now >= self._renew_at:
            self._renew(now)

    def flush(self) -> None:
        try:
            self._warn_of_stale(len(finish(self._send_acks())))
        except PortalMQError as error:
            _log.warning(
                "acks could not be sent%s: %s", "" if may_repeat(error, repeatable=True) else ", for good", error
            )

    async def _send_acks(self) -> list[str]:
        async with self.acks.sending:
            return await self.acks.flush()

    def _renew(self, now: float) -> None:
        with self._lock:
            receipts = list(self._held)
            self._renew_at = now + self._visibility_s / 3 if receipts else math.inf
        for start in range(0, len(receipts), wire.RECEIVE_MESSAGES_MAX):
            some = receipts[start : start + wire.RECEIVE_MESSAGES_MAX]
            try:
                gone = finish(self._calls.extend(some, self._visibility_s / 3))
            except PortalMQError as error:
                _log.warning("%d leases could not be renewed, trying again: %s", len(some), error)
                self._renew_at = min(self._renew_at, self._clock() + min(RETRY_S, self._visibility_s / 6))
                continue
            with self._lock:
                for receipt in some:
                    if receipt in self._held:
                        if receipt in gone:
                            del self._held[receipt]
                        else:
                            self._held[receipt] = now + self._visibility_s
            self._warn_of_stale(len(gone))

    def _warn_of_stale(self, count: int) -> None:
        if count:
            _log.warning("%d messages lost their lease while this process had them: they are delivered again", count)

    def close(self) -> None:
        """Send the last acks and return what is held."""
        with self._lock:
            held = list(self._held)
            self.acks.gather_all()
        self._calls.timeout_s = CLOSE_TIMEOUT_S
        self.flush()
        self.give_back(held, "the channel closed", CLOSE_TIMEOUT_S)


class Keeper:
    """A thread that keeps the leases of a connection. It starts with the first of them."""

    def __init__(self, also: Callable[[], object], every_s: float) -> None:
        """`also` is called about every `every_s` seconds."""
        self._also, self._every_s = also, every_s
        self._changed = threading.Condition()
        self._kept: list[GroupLeases] = []
        self._wakes_at = math.inf
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, leases: GroupLeases) -> None:
        with self._changed:
            self._kept.append(leases)
        self.start()

    def start(self) -> None:
        with self._changed:
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="portalmq-kombu-keeper", daemon=True)
                self._thread.start()

    def remove(self, leases: GroupLeases) -> None:
        with self._changed:
            if leases in self._kept:
                self._kept.remove(leases)

    def wake(self, at: float) -> None:
        """Have the thread look at the time `at`, at the latest."""
        with self._changed:
            if at < self._wakes_at:
                self._wakes_at = at
                self._changed.notify_all()

    def _run(self) -> None:
        also_at = time.monotonic() + self._every_s
        while True:
            with self._changed:
                now = time.monotonic()
                self._wakes_at = min([also_at, *(leases.due_at() for leases in self._kept)])
                if now < self._wakes_at and not self._is_closed:
                    self._changed.wait(min(self._wakes_at - now, self._every_s))
                if self._is_closed:
                    return
                kept = list(self._kept)
            if time.monotonic() >= also_at:
                also_at = time.monotonic() + self._every_s
                self._guarded(self._also)
            for leases in kept:
                self._guarded(leases.keep)

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except PortalMQError as error:
            _log.warning("%s", error)
        except Exception:  # noqa: BLE001 - other leases would end unseen
            _log.exception("the keeper of leases goes on")

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CLOSE_TIMEOUT_S)
