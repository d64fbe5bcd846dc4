"""AsyncProducer and AsyncConsumer: the producer and the consumer for asyncio, with the same names and guarantees.

They run the synchronous ones, so there is no second implementation of retries, leases and sequences. Work that cannot
wait runs in the event loop's thread. Work that may wait (the network, a full buffer) runs in a thread of the object.

    send --room in the buffer--> the producer's batch --sender thread--> leader --> the future wakes the coroutine
    next message --> the consumer's own thread --> one message (or, for poll, some)
    ack, nack, extend --> another thread, so that they do not wait behind a waiting receive

Cancelling is safe. A cancelled `send` may or may not be sent, like any message whose outcome was not awaited. Messages
of a cancelled receive are kept for the next receive; they never count as done.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from portalmq.closeable import AsyncCloseable
from portalmq.consumer import Consumer
from portalmq.errors import Backpressure, PortalMQError
from portalmq.loop_threads import LoopThreads
from portalmq.message import Message, RecordMetadata
from portalmq.network.forking import reset_in_children
from portalmq.producer import Producer
from portalmq.producers.batching import SendFuture

SETTLERS_MAX = 4
CLOSE_TIMEOUT_S = 5.0

P = ParamSpec("P")
R = TypeVar("R")


def _with_parameters_of(
    model: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a method that passes its arguments on the parameters of `model`, for type checkers and for help()."""

    def give(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        returned = method.__annotations__["return"]
        method.__signature__ = inspect.signature(model).replace(return_annotation=returned)  # type: ignore[attr-defined]
        return method

    return give


# --- producing -------------------------------------------------------------------------------------------------------


class AsyncProducer(AsyncCloseable):
    """Sends messages to topics, with the arguments and guarantees of Producer. For one event loop.

        async with AsyncProducer("http://localhost:5000") as producer:
            metadata = await producer.send("temp_1", {"celsius": 21.5}, key="sensor-1")
            await asyncio.gather(*(producer.send("temp_1", each) for each in many))

    Coroutines that send at the same time share batches. Messages keep the order in which their `send` was first awaited
    (for tasks: started).
    """

    @_with_parameters_of(Producer.__init__)
    def __init__(self, *args: Any, **options: Any) -> None:
        self._producer = Producer(*args, **options)
        # One thread keeps the order of the sends that have to wait; the other one is for flush and close.
        self._senders = LoopThreads("portalmq-async-send", 1)
        self._flusher = LoopThreads("portalmq-async-flush", 1)
        self._hurried: list[SendFuture] = []
        self._closing: asyncio.Future[None] | None = None
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        """Forget the parent's work in the child of a fork; the producer and the threads reset themselves."""
        self._hurried = []
        if self._closing is not None and not self._closing.done():
            self._closing = None

    def __repr__(self) -> str:
        return f"<Async{repr(self._producer)[1:]}"

    @_with_parameters_of(Producer.send)
    async def send(self, topic: str, value: Any, **options: Any) -> RecordMetadata:
        """Send a message, and wait until it counts (see `acks`). Raises its PortalMQError, and the errors of
        Producer.send. While the buffer is full it waits, without blocking the event loop."""
        began = time.monotonic()

        def put_in_time() -> SendFuture:
            within_s = self._producer._max_block_s
            if time.monotonic() - began > within_s:
                raise Backpressure(
                    f"the sends before this one have been waiting for a broker for {within_s:g} s",
                    outcome="not_applied",
                )
            return self._producer.send(topic, value, **options)

        # A send behind a waiting one must wait too, or it would overtake it.
        if self._senders.unfinished or not self._producer.has_room_for(topic, options.get("partition")):
            future = await self._senders.run(put_in_time)
        else:
            future = self._producer.send(topic, value, **options)
        self._hurry(future)
        return await asyncio.wrap_future(future)

    def _hurry(self, future: SendFuture) -> None:
        """Have the future's batch sent as soon as all coroutines that run now have sent theirs."""
        self._hurried.append(future)
        if len(self._hurried) == 1:
            asyncio.get_running_loop().call_soon(self._hurry_all)

    def _hurry_all(self) -> None:
        hurried, self._hurried = self._hurried, []
        for future in hurried:
            future.hurry()

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Wait until every message sent so far has its outcome. Raises TimeoutError after `timeout` seconds."""
        while self._senders.unfinished:  # sends that wait for room came before this flush
            await self._senders.run(lambda: None)
        await self._flusher.run(lambda: self._producer.flush(timeout))

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Flush and stop. Messages unsent after `timeout` seconds (default: the delivery timeout) fail. A second close
        waits for the first, which continues if its caller is cancelled."""
        if self._closing is None:
            limit_s = self._producer._delivery_timeout_s if timeout is None else timeout
            sends_done = threading.Event()
            if self._senders.unfinished:
                self._senders.start(sends_done.set)
            else:
                sends_done.set()

            def finish() -> None:
                began = time.monotonic()
                sends_done.wait(limit_s)
                self._producer.close(max(0.0, limit_s - (time.monotonic() - began)))

            self._closing = self._flusher.start(finish)
            self._senders.close()
            self._flusher.close()
        await asyncio.shield(self._closing)


# --- consuming -------------------------------------------------------------------------------------------------------


def _in_settler_thread(
    method: Callable[Concatenate[Consumer, P], R],
) -> Callable[Concatenate[AsyncConsumer, P], Coroutine[Any, Any, R]]:
    """Return the method of the consumer as one of AsyncConsumer."""

    @functools.wraps(method)
    async def run(self: AsyncConsumer, /, *args: P.args, **options: P.kwargs) -> R:
        return await self._settlers.run(lambda: method(self._consumer, *args, **options))

    return run


class AsyncConsumer(AsyncCloseable):
    """Receives messages, with the arguments and guarantees of Consumer. For one event loop.

        async with AsyncConsumer("orders", group="billing") as consumer:
            async for message in consumer:
                await handle(message)

    Asking for the next message acks the one before. After an exception in the loop's body nothing asks, and that
    message goes back to the group when the consumer closes. Settle with `await consumer.ack(message)`; a message's own
    ack() works too, but blocks the event loop for a round trip.
    """

    @_with_parameters_of(Consumer.__init__)
    def __init__(self, *topics: str, **options: Any) -> None:
        self._consumer = Consumer(*topics, **options)
        self._receiver = LoopThreads("portalmq-async-receive", 1)
        self._settlers = LoopThreads("portalmq-async-settle", SETTLERS_MAX)
        # While brokers are unreachable acks may occupy all settler threads and a queue behind them; close() has its own
        # thread.
        self._closer = LoopThreads("portalmq-async-close", 1)
        self._closed = False
        self._reset_in_child()
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        """Start with nothing received, at construction and in the child of a fork."""
        # Messages of a receive whose caller was cancelled; and that receive itself while it continues. One at a time.
        self._undelivered: deque[Message] = deque()
        self._receiving: asyncio.Future[list[Message]] | None = None
        self._receive_lock = asyncio.Lock()
        # Messages that the user has: all since the latest receive; of a stream the last one of each partition.
        self._handed_out: dict[tuple[str, int, int], Message] = {}

    def __repr__(self) -> str:
        return f"<Async{repr(self._consumer)[1:]}"

    # --- receiving ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Return the next message; the one before is acked."""

        def one() -> list[Message]:
            message = next(self._consumer, None)
            return [] if message is None else [message]

        messages = await self._receive(one, 1, None)
        if not messages:
            raise StopAsyncIteration
        return messages[0]

    async def poll(self, timeout_s: float = 1.0, max_messages: int | None = None) -> list[Message]:
        """Return up to `max_messages` messages, as soon as there are any; an empty list after `timeout_s`. Raises the
        errors of Consumer.poll."""
        if self._closed:
            raise RuntimeError("the consumer is closed")
        return await self._receive(lambda: self._consumer.poll(timeout_s, max_messages), max_messages, timeout_s)

    async def _receive(
        self, receive: Callable[[], list[Message]], at_most: int | None, timeout_s: float | None
    ) -> list[Message]:
        """Return buffered messages, those of a receive whose caller was cancelled, or those of a new receive."""
        async with self._receive_lock:
            while not self._undelivered and not self._closed:
                if self._receiving is None:
                    if self._consumer._mode == "queue":
                        self._handed_out.clear()  # asking for more acks them
                    self._receiving = self._receiver.start(receive)
                    if not await self._wait_for(self._receiving, None):
                        return []
                elif not await self._wait_for(self._receiving, timeout_s) and self._receiving is not None:
                    return []  # the earlier receive continues, this caller does not wait for it
            count = len(self._undelivered) if at_most is None else min(at_most, len(self._undelivered))
            messages = [self._undelivered.popleft() for _ in range(count)]
            for message in messages:
                offset = message.offset if self._consumer._mode == "queue" else 0
                self._handed_out[message.topic, message.partition, offset] = message
            return messages

    async def _wait_for(self, receiving: asyncio.Future[list[Message]], timeout_s: float | None) -> bool:
        """Wait for a receive, which continues if this is cancelled. Return True if it brought messages. Raises its
        error."""
        await asyncio.wait([receiving], timeout=timeout_s)
        if not receiving.done():
            return False
        self._receiving = None
        self._undelivered.extend(receiving.result())
        return bool(self._undelivered)

    # --- settling ----------------------------------------------------------------------------------------------------

    ack = _in_settler_thread(Consumer.ack)
    nack = _in_settler_thread(Consumer.nack)
    reject = _in_settler_thread(Consumer.reject)
    release = _in_settler_thread(Consumer.release)
    extend = _in_settler_thread(Consumer.extend)
    commit_with = _in_settler_thread(Consumer.commit_with)

    async def commit(self) -> None:
        """Ack all messages that this consumer handed out; durable on return. Messages of a cancelled receive are not
        included."""
        if self._consumer._mode == "queue" and self._consumer._subscription.manual_ack:
            self._consumer.commit()  # raises the error that explains it
        given = list(self._handed_out.values())

        def commit() -> None:
            if given:
                self._consumer.ack(given)
            self._consumer.commit_finished()

        await self._settlers.run(commit)

    # --- streams -----------------------------------------------------------------------------------------------------

    @_with_parameters_of(Consumer.seek)
    async def seek(self, topic: str, to: Any = "earliest", partition: int | None = None) -> None:
        """Move the group to another position in a topic. Messages of the topic from a cancelled receive are dropped."""
        await self._settlers.run(lambda: self._consumer.seek(topic, to, partition))

        def is_void(message: Message) -> bool:
            return message.topic == topic and partition in (None, message.partition)

        self._undelivered = deque(message for message in self._undelivered if not is_void(message))
        self._handed_out = {place: message for place, message in self._handed_out.items() if not is_void(message)}

    pause = _in_settler_thread(Consumer.pause)
    resume = _in_settler_thread(Consumer.resume)

    @property
    def assignment(self) -> list[tuple[str, int]]:
        """The (topic, partition) pairs that this member of a stream group reads now."""
        return self._consumer.assignment

    @property
    def member_id(self) -> str:
        """The id of this consumer in its stream group."""
        return self._consumer.member_id

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End a wait, send the last acks, and return all other messages to the group, those of a cancelled receive too.
        A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._closer.run(self._consumer.close)
            if self._receiving is not None and not self._receive_lock.locked():  # a coroutine that waits for it gets it
                with contextlib.suppress(PortalMQError):
                    await self._wait_for(self._receiving, CLOSE_TIMEOUT_S)
            if self._consumer._subscription.manual_ack and self._undelivered and self._consumer._mode == "queue":
                # In manual mode the user settles what was handed out, but these messages never were.
                kept, reason = list(self._undelivered), "the consumer closed before it handled the message"
                with contextlib.suppress(PortalMQError):
                    await self._closer.run(lambda: self._consumer.nack(kept, 0, reason))
        finally:
            self._undelivered.clear()
            self._receiver.close()
            self._settlers.close()
            self._closer.close()
