"""The messages of one handler in one process: received, handled under kept leases, settled.

    receiver --a message for each free place--> places: threads, or tasks of the event loop --> settler --> broker
                        keeper: extends the leases of all that is received and not settled

It fetches only what it has a place for, so no message waits here while another process is idle. A place is free again
when its handler returns: the settler acks several messages with one call. The number of verdicts that wait for it is
bounded.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from portalmq import wire
from portalmq.admin import Admin
from portalmq.consumer import Consumer
from portalmq.consumers.acks import stale_among
from portalmq.errors import Forbidden, GroupNotFound, PortalMQError, StaleReceipt
from portalmq.message import Message
from portalmq.worker.calls import ACK, LOST, Call, Verdict, call_async, call_in_thread
from portalmq.worker.counts import Counter
from portalmq.worker.handler import Handler

log = logging.getLogger("portalmq.worker")

RECEIVE_WAIT_S = 10.0
# The most verdicts that wait for the settler; beyond it nothing is received.
UNSETTLED_MAX = 1_000
# Pauses after a receive that failed.
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 15.0
# A handler that still runs so long after its timeout is stuck: its message goes back to the group.
STUCK_AFTER_S = 5.0


class Clients(Protocol):
    """Makes the clients of a handler: what a runner needs of an App."""

    def admin(self) -> Admin: ...
    def consumer(self, handler: Handler) -> Consumer: ...


class _Unsettled(NamedTuple):
    call: Call
    verdict: Verdict


class HandlerRunner:
    """Runs one handler from start() until stopped. Thread-safe."""

    def __init__(
        self,
        app: Clients,
        handler: Handler,
        concurrency: int,
        loop: Callable[[], asyncio.AbstractEventLoop],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.handler = handler
        self.concurrency = concurrency
        self.counter = Counter(handler.name, handler.group, concurrency)
        self._app = app
        self._loop = loop
        self._clock = clock
        self._consumer = app.consumer(handler)
        self._changed = threading.Condition()
        # Calls that hold a place, and verdicts that the settler has not brought to the broker; both under `_changed`.
        self._calls: dict[Call, None] = {}
        self._unsettled: deque[_Unsettled] = deque()
        self._in_settlement: list[_Unsettled] = []
        self._queue: deque[Call] = deque()
        self._idle = 0
        self._threads = 0
        self._has_leases = True
        self._is_prepared = False
        self._stopping = self._stopped = False
        self.is_receiving = False

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._spawn("receive", self._receive)
        self._spawn("settle", self._settle)
        self._spawn("keep", self._keep)

    def _spawn(self, what: str, run: Callable[[], None]) -> None:
        threading.Thread(target=run, name=f"portalmq-worker-{what}-{self.handler.name}", daemon=True).start()

    def take_no_more(self) -> None:
        """Begin no further message. Those that come from now on go back uncounted."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def stop_receiving(self) -> None:
        """Take no more, and end the receive that is under way."""
        self.take_no_more()
        self._consumer.close()

    def wait_handled(self, within_s: float) -> bool:
        """Return whether all handlers have ended."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running(), within_s)

    def give_back(self) -> int:
        """Return the messages of handlers that still run to the group, uncounted; their results no longer matter."""
        with self._changed:
            running = self._running()
            for call in running:
                self._abandon(call, Verdict("release", "released", reason="the worker ended before its handler"))
        return len(running)

    def wait_settled(self, within_s: float) -> bool:
        """Return whether the broker has all verdicts; then, or after that time, end the threads."""
        with self._changed:
            settled = self._changed.wait_for(lambda: not self._unsettled and not self._in_settlement, within_s)
            self._stopped = True
            self._changed.notify_all()
        return settled

    def _running(self) -> list[Call]:
        return [call for call in self._calls if not call.is_abandoned]

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        pause_s = PAUSE_FIRST_S
        while (free := self._wait_free()) > 0:
            try:
                self._prepare()
                self.is_receiving = True
                messages = self._consumer.poll(RECEIVE_WAIT_S, min(free, wire.RECEIVE_MESSAGES_MAX))
            except Exception as error:
                if self._stopping:
                    return
                self.is_receiving = False
                self.counter.set_fault(_shown(error))
                known = isinstance(error, PortalMQError)
                log.warning("handler %s receives nothing: %s", self.handler.name, error, exc_info=not known)
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, pause_s)
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            if pause_s > PAUSE_FIRST_S:
                log.info("handler %s receives again", self.handler.name)
            pause_s = PAUSE_FIRST_S
            self.counter.set_fault("")
            self._begin(messages)

    def _wait_free(self) -> int:
        """Return the number of free places once there are some, 0 when no more is to be received."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._free() > 0)
            return 0 if self._stopping else self._free()

    def _free(self) -> int:
        return 0 if len(self._unsettled) >= UNSETTLED_MAX else self.concurrency - len(self._calls)

    def _prepare(self) -> None:
        """Give the group its settings, once. Without any, a token that may only consume is enough."""
        if self._is_prepared:
            return
        with self._app.admin() as admin:
            try:
                if self.handler.settings:
                    group = admin.create_group(self.handler.group, **self.handler.settings)
                else:
                    group = admin.group(self.handler.group)
                self._has_leases = group.config.delivery != "at_most_once"
            except (Forbidden, GroupNotFound):
                if self.handler.settings:
                    raise
        self._is_prepared = True

    def _begin(self, messages: list[Message]) -> None:
        calls = [Call(self.handler, message, self._clock()) for message in messages]
        with self._changed:
            if self._stopping:  # received while the worker began to stop
                released = Verdict("release", "released")
                self._unsettled.extend(_Unsettled(call, released) for call in calls)
                self._changed.notify_all()
                return
            self._calls.update(dict.fromkeys(calls))
            if not self.handler.is_async:
                self._queue.extend(calls)
                for _ in range(min(len(self._queue) - self._idle, self.concurrency - self._threads)):
                    self._threads += 1
                    self._spawn(f"handle-{self._threads}", self._handle)
                self._changed.notify_all()
        for call in calls:
            self.counter.began()
            if self.handler.is_async:
                asyncio.run_coroutine_threadsafe(self._handle_async(call), self._loop())

    # --- handling ----------------------------------------------------------------------------------------------------

    def _handle(self) -> None:
        """Run the calls of the queue, on one of the threads."""
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._queue or self._stopped)
                self._idle -= 1
                if not self._queue:
                    return
                call = self._queue.popleft()
            self._end(call, call_in_thread(call))

    async def _handle_async(self, call: Call) -> None:
        self._end(call, await call_async(call))

    def _end(self, call: Call, verdict: Verdict) -> None:
        self.counter.ended(self._clock() - call.began_at)
        with self._changed:
            del self._calls[call]
            if call.is_stuck:
                self.counter.set_stuck(-1)
                log.warning("handler %s has ended, %.0f s after it began", call.handler.name, call.age(self._clock()))
            if not call.is_abandoned:
                self._unsettled.append(_Unsettled(call, verdict))
            self._changed.notify_all()

    def _abandon(self, call: Call, verdict: Verdict) -> None:
        """Settle the message of a call that still runs. Under the lock."""
        call.is_abandoned = True
        self._unsettled.append(_Unsettled(call, verdict))
        self._changed.notify_all()

    def interrupt_late(self) -> None:
        """Interrupt handlers whose time is over; give up on those that do not end. Called several times a second."""
        timeout_s = self.handler.timeout_s
        if timeout_s is None:
            return
        now = self._clock()
        with self._changed:
            running = self._running()
        for call in running:
            if call.age(now) >= timeout_s:
                call.interrupt()
            if call.age(now) >= timeout_s + STUCK_AFTER_S:
                self._give_up(call, timeout_s)

    def _give_up(self, call: Call, timeout_s: float) -> None:
        with self._changed:
            if call not in self._calls or call.is_abandoned:
                return
            call.is_stuck = True
            self.counter.set_stuck(1)
            self._abandon(call, Verdict("nack", "timeout", reason=f"timeout: the handler took over {timeout_s:g} s"))
        log.error(
            "handler %s does not end, %.0f s after its timeout of %g s: message %s goes back, its place stays taken",
            *(call.handler.name, STUCK_AFTER_S, timeout_s, call.message.id),
        )

    # --- unsettled ----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        while True:
            with self._changed:
                self._in_settlement = []
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._unsettled or self._stopped)
                if not self._unsettled:
                    return
                count = min(len(self._unsettled), wire.RECEIVE_MESSAGES_MAX)
                self._in_settlement = [self._unsettled.popleft() for _ in range(count)]
                self._changed.notify_all()
            by_verdict: dict[Verdict, list[Call]] = {}
            for call, verdict in self._in_settlement:
                by_verdict.setdefault(LOST if call.is_lost else verdict, []).append(call)
            for verdict, calls in by_verdict.items():
                self._bring(verdict, calls)

    def _bring(self, verdict: Verdict, calls: list[Call]) -> None:
        """Bring one verdict on several messages to the broker. What fails is delivered again, when its lease ends."""
        lost = 0
        try:
            if verdict is not LOST and self._has_leases:
                self._call_broker(verdict, [call.message for call in calls])
        except StaleReceipt as error:
            lost = len(stale_among(error, _receipts_of(calls)))
            log.warning(
                "%d messages of handler %s were settled too late: others have or had them", lost, self.handler.name
            )
        except Exception as error:
            lost = len(calls)
            known = isinstance(error, PortalMQError)
            log.error(
                "%d messages of handler %s could not be settled (%s): they are delivered again",
                *(lost, self.handler.name, error),
                exc_info=not known,
            )
        self.counter.count("lost", lost)
        self.counter.count(verdict.outcome, len(calls) - lost)

    def _call_broker(self, verdict: Verdict, messages: list[Message]) -> None:
        match verdict.kind:
            case "ack":
                self._consumer.ack(messages)
            case "nack":
                self._consumer.nack(messages, verdict.delay_s, verdict.reason)
            case "reject":
                self._consumer.reject(messages, verdict.reason)
            case "release":
                self._consumer.release(messages)

    # --- leases ------------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Extend the leases of all messages in hand, three times in the duration of a lease."""
        every_s = self.handler.visibility_timeout_s / 3
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._stopped, every_s):
                    return
                in_hand = self._running()
                waiting = [each.call for each in (*self._unsettled, *self._in_settlement) if each.verdict is ACK]
                calls = [call for call in (*in_hand, *waiting) if not call.is_lost]
            if not calls or not self._has_leases:
                continue
            try:
                self._consumer.extend([call.message for call in calls], self.handler.visibility_timeout_s)
            except StaleReceipt as error:
                self._note_lost(calls, error)
            except Exception as error:  # noqa: BLE001 - the keeper must go on
                log.warning("the leases of handler %s could not be extended: %s", self.handler.name, error)

    def _note_lost(self, calls: list[Call], error: StaleReceipt) -> None:
        stale = stale_among(error, _receipts_of(calls))
        with self._changed:
            unsettled = {each.call for each in (*self._unsettled, *self._in_settlement)}
            lost = [call for call in calls if call.message.receipt in stale and call in self._calls]
            lost = [call for call in lost if call not in unsettled]  # an ack that has just arrived ends a lease, too
            for call in lost:
                call.is_lost = True
        if lost:
            log.warning("%d messages lost their leases while handler %s runs", len(lost), self.handler.name)


def _receipts_of(calls: list[Call]) -> list[str]:
    return [call.message.receipt for call in calls if call.message.receipt is not None]


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
