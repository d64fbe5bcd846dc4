"""A member of a stream group for an asyncio event loop: the synchronous Consumer, in threads of its own.

    next message --> one thread
    ack, commit, seek --> others, so that they do not wait behind a waiting receive

A member has threads anyway, for its heartbeats and fetches.
"""

from __future__ import annotations

import asyncio
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

    def __repr__(self) -> str:
        return f"<Async{repr(self._consumer)[1:]}"

    def start_next(self) -> asyncio.Future[list[Message]]:
        def one() -> list[Message]:
            message = next(self._consumer, None)
            return [] if message is None else [message]

        return self._receiver.start(one)

    def start_poll(self, timeout_s: float, max_messages: int | None) -> asyncio.Future[list[Message]]:
        return self._receiver.start(lambda: self._consumer.poll(timeout_s, max_messages))

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

    async def give_back(self, messages: Sequence[Message], reason: str) -> None:
        """A stream group has no leases: what is not committed is read again."""

    def end(self) -> None:
        """Let the threads end."""
        self._receiver.close()
        self._settlers.close()
        self._closer.close()
