"""A member of a stream group in an asyncio event loop: the StreamMember of Consumer, without threads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from portalmq import wire
from portalmq.consumers.commit import Output
from portalmq.consumers.loop_consumer import SETTLERS_MAX, retrieve, shielded
from portalmq.consumers.subscription import Subscription, only_for_queues, seek_position
from portalmq.message import Message
from portalmq.network.loop_waits import LoopWaits
from portalmq.streams.member import StreamMember
from portalmq.transport.loop_transport import LoopTransport
from portalmq.transport.transport import ClusterOptions

T = TypeVar("T")

Place = tuple[str, int]


class LoopStream:
    """Has the methods of LoopConsumer. For one event loop; one receive at a time."""

    def __init__(self, subscription: Subscription, *, options: ClusterOptions, idle_timeout_s: float | None) -> None:
        self.subscription = subscription
        self._idle_timeout_s = idle_timeout_s
        # Two transports: close() cuts waiting fetches off, and still commits.
        self._reading = LoopTransport(**options._asdict())
        self._waits = LoopWaits()
        self._member = StreamMember(self._reading, self._reading.another(), subscription, self._waits)
        self._settlers = asyncio.Semaphore(SETTLERS_MAX)
        self._settler = StreamSettler(self._member)
        self._loop: asyncio.AbstractEventLoop | None = None  # of the latest receive
        # Messages that are not taken: those of a receive whose caller was cancelled.
        self._received: deque[Message] = deque()

    def __repr__(self) -> str:
        is_closed = self._member.buffers.closed
        return self.subscription.shown("AsyncConsumer", self._reading.urls, is_closed=is_closed)

    def begin_in_child(self, parent: LoopStream) -> None:
        """Take the place of a consumer that has forked."""
        self._member.begin_in_child(parent._member)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def start_next(self) -> asyncio.Future[list[Message]]:
        """Receive the next message; `take` returns it. It is kept if the caller is cancelled."""
        if not self._received and (message := self._member.next_of_batch(self._settler)) is not None:
            self._received.append(message)

        async def one() -> list[Message]:
            message = await self._member.next_message(self._idle_timeout_s, self._settler)
            return [] if message is None else [message]

        return self._start(one())

    def start_poll(self, timeout_s: float, max_messages: int | None) -> asyncio.Future[list[Message]]:
        """Receive several messages, as start_next does. Raises ValueError for a wrong number."""
        at_most = self.subscription.at_most(max_messages)
        return self._start(self._member.poll(timeout_s, at_most, self._settler))

    def _start(self, receive: Coroutine[Any, Any, list[Message]]) -> asyncio.Future[list[Message]]:
        self._loop = asyncio.get_running_loop()
        if self._received:
            receive.close()
            received: asyncio.Future[list[Message]] = self._loop.create_future()
            received.set_result(list(self._received))
            return received
        task = self._loop.create_task(self._keep(receive), name="portalmq-receive")
        task.add_done_callback(retrieve)
        return task

    async def _keep(self, receive: Coroutine[Any, Any, list[Message]]) -> list[Message]:
        messages = await receive
        self._received.extend(messages)
        return messages

    def take(self, max_messages: int | None) -> list[Message]:
        """Return messages that have arrived."""
        count = len(self._received) if max_messages is None else min(max_messages, len(self._received))
        return [self._received.popleft() for _ in range(count)]

    # --- settling ----------------------------------------------------------------------------------------------------

    async def ack(self, messages: Message | Iterable[Message]) -> None:
        self._member.finished([messages] if isinstance(messages, Message) else messages)

    async def nack(
        self, messages: Message | Iterable[Message], delay_s: float | None = None, reason: str | None = None
    ) -> None:
        raise only_for_queues("nack")

    async def reject(self, messages: Message | Iterable[Message], reason: str | None = None) -> None:
        raise only_for_queues("reject")

    async def release(self, messages: Message | Iterable[Message]) -> None:
        raise only_for_queues("release")

    async def extend(self, messages: Message | Iterable[Message], visibility_timeout_s: float | None = None) -> None:
        raise only_for_queues("extend")

    async def commit_with(self, messages: Message | Iterable[Message], outputs: Iterable[Output]) -> wire.Committed:
        given = [messages] if isinstance(messages, Message) else list(messages)
        return await self._finish_anyway(self._member.commit_with(given, outputs))

    async def commit(self, handed_out: Sequence[Message]) -> None:
        """Commit these messages; durable on return."""
        self._member.finished(handed_out)
        await self._finish_anyway(self._member.commit_finished())

    async def _finish_anyway(self, call: Coroutine[Any, Any, T]) -> T:
        """Make a call that its caller's cancellation does not end."""

        async def in_turn() -> T:
            async with self._settlers:
                return await call

        return await shielded(in_turn())

    # --- streams -----------------------------------------------------------------------------------------------------

    async def seek(self, topic: str, to: Any, partition: int | None) -> None:
        await self._finish_anyway(self._member.seek(topic, seek_position(to), partition))
        self._received = deque(each for each in self._received if not is_of(each, topic, partition))

    async def pause(self, topic: str | None, partition: int | None) -> None:
        self._member.pause(self._member.places(topic, partition))

    async def resume(self, topic: str | None, partition: int | None) -> None:
        self._member.resume(self._member.places(topic, partition))

    @property
    def assignment(self) -> list[Place]:
        return self._member.assignment()

    @property
    def member_id(self) -> str:
        return self._member.member_id

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self, last_answer_s: float) -> None:
        await self._member.close()

    def close_soon(self) -> None:
        """Close it in its event loop, if that still runs and it is not closed."""
        if self._loop is not None and not self._loop.is_closed() and not self._member.buffers.closed:
            self._loop.call_soon_threadsafe(lambda: self._waits.spawn("portalmq-close", self._member.close))

    def end(self) -> None:
        """Forget the messages that nobody took."""
        self._received.clear()


class StreamSettler:
    """What a message's own ack(), nack() and extend() call."""

    def __init__(self, member: StreamMember) -> None:
        self._member = member

    def ack(self, message: Message, /) -> None:
        self._member.finished([message])

    def nack(self, message: Message, /, *, delay_s: float | None = None, reason: str | None = None) -> None:
        raise only_for_queues("nack")

    def extend(self, message: Message, visibility_timeout_s: float | None, /) -> None:
        raise only_for_queues("extend")


def is_of(message: Message, topic: str, partition: int | None) -> bool:
    """Return whether a message is of the topic, and of this partition of it (None: of any)."""
    return message.topic == topic and partition in (None, message.partition)
