"""A member of a stream group for an asyncio event loop: the synchronous Consumer, in threads of its own.

    next message --> one thread
    ack, commit, seek --> others, so that they do not wait behind a waiting receive

A member has threads anyway, for its heartbeats and fetches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from portalmq import wire
from portalmq.consumer import Consumer
from portalmq.consumers.commit import Output
from portalmq.consumers.loop_consumer import SETTLERS_MAX
from portalmq.loop_threads import LoopThreads
from portalmq.message import Message

T = TypeVar("T")


class StreamThreads:
    """Has the methods of LoopConsumer."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.subscription = consumer._subscription
        self._receiver = LoopThreads("portalmq-async-receive", 1)
        self._settlers = LoopThreads("portalmq-async-settle", SETTLERS_MAX)
        # While brokers are unreachable calls may occupy all settler threads and a queue behind them; close() has its
        # own thread.
        self._closer = LoopThreads("portalmq-async-close", 1)
        # Messages that are not taken: those of a receive whose caller was cancelled.
        self._received: deque[Message] = deque()

    def __repr__(self) -> str:
        return f"<Async{repr(self._consumer)[1:]}"

    def start_next(self) -> asyncio.Future[list[Message]]:
        """Receive the next message; `take` returns it. It is kept if the caller is cancelled."""

        def one() -> list[Message]:
            message = next(self._consumer, None)
            return [] if message is None else [message]

        return self._start(one)

    def start_poll(self, timeout_s: float, max_messages: int | None) -> asyncio.Future[list[Message]]:
        return self._start(lambda: self._consumer.poll(timeout_s, max_messages))

    def _start(self, receive: Callable[[], list[Message]]) -> asyncio.Future[list[Message]]:
        received: asyncio.Future[list[Message]]
        if self._received:
            received = asyncio.get_running_loop().create_future()
            received.set_result(list(self._received))
        else:
            received = self._receiver.start(receive)
            received.add_done_callback(self._keep)
        return received

    def _keep(self, received: asyncio.Future[list[Message]]) -> None:
        if not received.cancelled() and received.exception() is None:
            self._received.extend(received.result())

    def take(self, max_messages: int | None) -> list[Message]:
        """Return messages that have arrived."""
        count = len(self._received) if max_messages is None else min(max_messages, len(self._received))
        return [self._received.popleft() for _ in range(count)]

    def forget(self) -> None:
        """Drop the messages that have arrived: they are the parent's of this fork."""
        self._received.clear()

    async def _settle(self, do: Callable[[], T]) -> T:
        return await self._settlers.run(do)

    async def ack(self, messages: Message | Iterable[Message]) -> None:
        await self._settle(lambda: self._consumer.ack(messages))

    async def nack(
        self, messages: Message | Iterable[Message], delay_s: float | None = None, reason: str | None = None
    ) -> None:
        await self._settle(lambda: self._consumer.nack(messages, delay_s, reason))

    async def reject(self, messages: Message | Iterable[Message], reason: str | None = None) -> None:
        await self._settle(lambda: self._consumer.reject(messages, reason))

    async def release(self, messages: Message | Iterable[Message]) -> None:
        await self._settle(lambda: self._consumer.release(messages))

    async def extend(self, messages: Message | Iterable[Message], visibility_timeout_s: float | None = None) -> None:
        await self._settle(lambda: self._consumer.extend(messages, visibility_timeout_s))

    async def commit_with(self, messages: Message | Iterable[Message], outputs: Iterable[Output]) -> wire.Committed:
        return await self._settle(lambda: self._consumer.commit_with(messages, outputs))

    async def commit(self, handed_out: Sequence[Message]) -> None:
        def commit() -> None:
            if handed_out:
                self._consumer.ack(handed_out)
            self._consumer.commit_finished()

        await self._settle(commit)

    async def seek(self, topic: str, to: Any, partition: int | None) -> None:
        await self._settle(lambda: self._consumer.seek(topic, to, partition))
        self._received = deque(each for each in self._received if not is_of(each, topic, partition))

    async def pause(self, topic: str | None, partition: int | None) -> None:
        await self._settle(lambda: self._consumer.pause(topic, partition))

    async def resume(self, topic: str | None, partition: int | None) -> None:
        await self._settle(lambda: self._consumer.resume(topic, partition))

    @property
    def assignment(self) -> list[tuple[str, int]]:
        return self._consumer.assignment

    @property
    def member_id(self) -> str:
        return self._consumer.member_id

    async def close(self, last_answer_s: float) -> None:
        await self._closer.run(self._consumer.close)

    def end(self) -> None:
        """Let the threads end."""
        self._received.clear()
        self._receiver.close()
        self._settlers.close()
        self._closer.close()


def is_of(message: Message, topic: str, partition: int | None) -> bool:
    """Return whether a message is of the topic, and of this partition of it (None: of any)."""
    return message.topic == topic and partition in (None, message.partition)
