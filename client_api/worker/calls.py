"""One call of a handler with one message: its verdict, and its interruption when its time is over.

A thread cannot be ended from outside. So a late call gets HandlerTimeout as an exception in its thread, as soon as
Python code runs there. It may arrive a moment too late, when the call has just ended, and must not reach the next one:

    interrupter  was_interrupted = True ---> is_over? --no--> raise in the thread ---> may_end = True
    thread       ... the call ends: is_over = True ---> was_interrupted? --yes--> wait for may_end, drop what is pending

Each of the two writes before it reads, so at least one of them sees the other.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import threading
import time
from typing import Literal, NamedTuple

from portalmq.message import Message
from portalmq.worker.handler import Handler
from portalmq.worker.outcomes import HandlerTimeout, Reject, Retry

log = logging.getLogger("portalmq.worker")

LOOK_S = 0.001
_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NOTHING = ctypes.py_object()  # a null pointer, which takes a pending exception back


class Verdict(NamedTuple):
    """What becomes of a message. `outcome` is how it is counted."""

    kind: Literal["ack", "nack", "reject", "release", "none"]
    outcome: str
    delay_s: float | None = None
    reason: str | None = None


ACK = Verdict("ack", "acked")
LOST = Verdict("none", "lost")


class Call:
    """A message in a handler, from its receive to its verdict. `is_lost`: its lease is another consumer's.
    `is_abandoned`: its message is settled already, although the handler runs. `is_stuck`: that is for its timeout."""

    __slots__ = (
        *("began_at", "handler", "is_abandoned", "is_lost", "is_over", "is_stuck", "may_end", "message"),
        *("thread", "was_interrupted"),
    )

    def __init__(self, handler: Handler, message: Message, began_at: float) -> None:
        self.handler = handler
        self.message = message
        self.began_at = began_at
        self.is_lost = self.is_abandoned = self.is_stuck = False
        self.is_over = self.was_interrupted = self.may_end = False
        self.thread: int | None = None

    def age(self, now: float) -> float:
        return now - self.began_at

    def interrupt(self) -> None:
        """Raise HandlerTimeout in the call's thread, once. A call on an event loop cancels itself."""
        if self.thread is None or self.was_interrupted:
            return
        self.was_interrupted = True
        if not self.is_over:
            _set_async_exc(self.thread, ctypes.py_object(HandlerTimeout))
        self.may_end = True


def call_in_thread(call: Call) -> Verdict:
    """Call the handler on this thread, and return its verdict. Raises nothing."""
    verdict: Verdict | None = None
    while True:
        try:
            if verdict is None:
                call.thread = threading.get_ident()
                verdict = _run(call)
            call.is_over = True
            if call.was_interrupted:
                while not call.may_end:
                    time.sleep(LOOK_S)
                _set_async_exc(threading.get_ident(), _NOTHING)
            return verdict
        except HandlerTimeout:  # it arrived outside of the handler
            verdict = verdict or _timeout(call)


def _run(call: Call) -> Verdict:
    try:
        call.handler.function(*call.handler.arguments(call.message))
    except HandlerTimeout:
        return _timeout(call)
    except BaseException as error:  # noqa: BLE001 - also a handler that calls sys.exit() must not end the worker
        return verdict_of(call, error)
    return ACK


async def call_async(call: Call) -> Verdict:
    """Call an async handler, cancel it when its time is over, and return its verdict. Raises nothing."""
    try:
        arguments = call.handler.arguments(call.message)
        async with asyncio.timeout(call.handler.timeout_s) as limit:
            await call.handler.function(*arguments)
    except BaseException as error:  # noqa: BLE001 - as above
        if isinstance(error, TimeoutError) and limit.expired():
            return _timeout(call)
        return verdict_of(call, error)
    return ACK


def verdict_of(call: Call, error: BaseException) -> Verdict:
    """Return the verdict on a message whose handler raised `error`, and log it."""
    name, message = call.handler.name, call.message
    if isinstance(error, Retry):
        log.info("handler %s retries message %s of %s: %s", name, message.id, message.topic, error.reason)
        return Verdict("nack", "retried", error.delay_s, error.reason)
    if isinstance(error, Reject):
        log.warning("handler %s rejects message %s of %s: %s", name, message.id, message.topic, error.reason)
        return Verdict("reject", "rejected", reason=error.reason)
    log.warning(
        "handler %s failed with message %s of %s, delivery %d",
        *(name, message.id, message.topic, message.delivery_count),
        exc_info=error,
    )
    return Verdict("nack", "failed", reason=_reason(error))


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _timeout(call: Call) -> Verdict:
    reason = f"timeout: the handler took over {call.handler.timeout_s:g} s"
    log.warning("handler %s, message %s of %s: %s", call.handler.name, call.message.id, call.message.topic, reason)
    return Verdict("nack", "timeout", reason=reason)
