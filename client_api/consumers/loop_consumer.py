"""The consumer of a queue group in an asyncio event loop: the receiver and the leases of Consumer, without threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from portalmq import wire
from portalmq.consumers.commit import Output, commit_receipts
from portalmq.consumers.lease import Leases
from portalmq.consumers.lease_calls import (
    RELEASE_OPTIONS,
    LeaseCalls,
    Verb,
    extend_options,
    nack_options,
    receipts_of,
    reject_options,
)
from portalmq.consumers.receiver import LAST_ANSWER_S, Receiver, end_receiving
from portalmq.consumers.subscription import Subscription, only_for_streams
from portalmq.message import Message
from portalmq.network.either import finish
from portalmq.network.loop_waits import LoopWaits
from portalmq.transport.loop_transport import LoopTransport
from portalmq.transport.transport import ClusterOptions, Transport

# Calls of one consumer that settle messages at the same time.
SETTLERS_MAX = 4

T = TypeVar("T")


class LoopConsumer:
    """A queue group's consumer for one event loop. One receive at a time."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        options: ClusterOptions,
        idle_timeout_s: float | None,
    ) -> None:
        self.subscription = subscription
        self._idle_timeout_s = idle_timeout_s
        # Two transports: close() cuts a waiting receive off, and still acks and nacks.
        self._receiving = LoopTransport(**options._asdict())
        self._settle_transport = self._receiving.another()
        self._waits = LoopWaits()
        self._settlers = asyncio.Semaphore(SETTLERS_MAX)
        self._closed = threading.Event()
        self._leases = Leases(
            self._settle_transport,
            subscription.group,
            subscription.visibility_timeout_s,
            max_handling_s=subscription.max_handling_s,
            waits=self._waits,
        )
        self._receiver = Receiver(self._receiving, self._leases, subscription, self._closed)
        self._settler = BlockingSettler(
            self._leases,
            subscription,
            lambda: Transport(**options._asdict()),
        )

        # Of the latest receive.
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return self.subscription.shown("AsyncConsumer", self._receiving.urls, is_closed=self._closed.is_set())

    # --- receiving ---------------------------------------------------------------------------------------------------

    def start_next(self) -> asyncio.Task[bool]:
        """Wait until the next message may be taken; the result is false at the end of the iteration. The task goes on
        if its caller does not. Messages that are not taken soon go back to the group."""
        return self._start(1, self._idle_timeout_s, ends=True)

    def start_poll(self, timeout_s: float, max_messages: int | None) -> asyncio.Task[bool]:
        """Wait until messages may be taken. Raises ValueError for a wrong number."""
        return self._start(self.subscription.at_most(max_messages), timeout_s, ends=False)

    def _start(self, at_most: int, timeout_s: float | None, *, ends: bool) -> asyncio.Task[bool]:
        self._loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        receive = self._receiver.wait_for_messages(at_most, deadline, ends=ends)
        task = asyncio.create_task(receive, name="portalmq-receive")
        task.add_done_callback(retrieve)
        return task

    def take(self, max_messages: int | None) -> list[Message]:
        return self._receiver.take(self.subscription.at_most(max_messages), self._settler)

    # --- settling ----------------------------------------------------------------------------------------------------

    async def ack(self, messages: Message | Iterable[Message]) -> None:
        await self._settle("ack", messages, {})

    async def nack(
        self, messages: Message | Iterable[Message], delay_s: float | None = None, reason: str | None = None
    ) -> None:
        await self._settle("nack", messages, nack_options(delay_s, reason))

    async def reject(self, messages: Message | Iterable[Message], reason: str | None = None) -> None:
        await self._settle("nack", messages, reject_options(reason))

    async def release(self, messages: Message | Iterable[Message]) -> None:
        await self._settle("nack", messages, RELEASE_OPTIONS)

    async def extend(self, messages: Message | Iterable[Message], visibility_timeout_s: float | None = None) -> None:
        seconds = self.subscription.visibility_timeout_s if visibility_timeout_s is None else visibility_timeout_s
        await self._settle("extend", messages, extend_options(seconds))

    async def _settle(self, verb: Verb, messages: Message | Iterable[Message], options: dict[str, object]) -> None:
        if receipts := receipts_of(messages):
            await self._finish_anyway(self._leases.settle(verb, receipts, options))

    async def _finish_anyway(self, call: Coroutine[Any, Any, T]) -> T:
        """Make a call that its caller's cancellation does not end."""

        async def in_turn() -> T:
            async with self._settlers:
                return await call

        return await shielded(in_turn())

    async def commit_with(self, messages: Message | Iterable[Message], outputs: Iterable[Output]) -> wire.Committed:
        given = [messages] if isinstance(messages, Message) else list(messages)
        # Before anything can fail: after an error, asking for more must not ack messages without outputs.
        self._leases.forget([message.receipt for message in given if message.receipt is not None])
        group = self.subscription.group
        return await self._finish_anyway(commit_receipts(self._settle_transport, group, given, outputs))

    async def commit(self, handed_out: Sequence[Message]) -> None:
        """Ack these messages; durable on return. Raises ValueError with manual_ack."""
        if self.subscription.manual_ack:
            raise ValueError("with manual_ack in a queue group, ack the messages")

        async def commit() -> None:
            if handed_out:
                await self._leases.settle("ack", receipts_of(handed_out), {})
            await self._leases.commit()

        await self._finish_anyway(commit())

    # --- streams -----------------------------------------------------------------------------------------------------

    async def seek(self, topic: str, to: Any, partition: int | None) -> None:
        raise only_for_streams("seek")

    async def pause(self, topic: str | None, partition: int | None) -> None:
        raise only_for_streams("pause")

    async def resume(self, topic: str | None, partition: int | None) -> None:
        raise only_for_streams("resume")

    @property
    def assignment(self) -> list[tuple[str, int]]:
        raise only_for_streams("assignment")

    @property
    def member_id(self) -> str:
        raise only_for_streams("member_id")

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self, last_answer_s: float) -> None:
        """End a wait, send the last acks, and return all other messages to the group."""
        if self.subscription.manual_ack:
            self._leases.forget_handed()
        self._closed.set()
        await end_receiving(self._receiving, self._leases, last_answer_s)
        # Not closed: with manual_ack there may still be messages in hand to ack.
        self._settle_transport.rest()

    def close_soon(self) -> None:
        """Close it in its event loop, if that still runs and it is not closed."""
        if self._loop is not None and not self._loop.is_closed() and not self._closed.is_set():
            self._loop.call_soon_threadsafe(self._close_now)

    def _close_now(self) -> None:
        self._waits.spawn("portalmq-close", lambda: self.close(LAST_ANSWER_S))

    def end(self) -> None:
        """Nothing is left to end."""


async def shielded(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work that goes on if the caller is cancelled."""
    task = asyncio.create_task(work)
    task.add_done_callback(retrieve)
    return await asyncio.shield(task)


def retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a task, whose caller may be cancelled: otherwise the loop reports it."""
    if not task.cancelled():
        task.exception()


class BlockingSettler:
    """What a message's own ack(), nack() and extend() call: they block the thread for a round trip, over a transport of
    their own."""

    def __init__(self, leases: Leases, subscription: Subscription, connect: Callable[[], Transport]) -> None:
        self._leases = leases
        self._subscription = subscription
        self._connect = connect
        self._calls: LeaseCalls | None = None

    def ack(self, message: Message, /) -> None:
        self._settle("ack", message, {})

    def nack(self, message: Message, /, *, delay_s: float | None = None, reason: str | None = None) -> None:
        self._settle("nack", message, nack_options(delay_s, reason))

    def extend(self, message: Message, visibility_timeout_s: float | None, /) -> None:
        seconds = self._subscription.visibility_timeout_s if visibility_timeout_s is None else visibility_timeout_s
        self._settle("extend", message, extend_options(seconds))

    def _settle(self, verb: Verb, message: Message, options: dict[str, object]) -> None:
        if self._calls is None:
            subscription = self._subscription
            self._calls = LeaseCalls(self._connect(), subscription.group, subscription.visibility_timeout_s)
        finish(self._leases.settle(verb, receipts_of(message), options, self._calls))
