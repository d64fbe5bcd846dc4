"""AsyncProducer and AsyncConsumer: the producer and the consumer for asyncio, with the same names and guarantees.

They have no threads: the decisions (batches, retries, leases, assignments) are those of Producer and Consumer, and what
waits there suspends the coroutine here (network/either.py).

Cancelling is safe. A cancelled `send` may or may not be sent, like any message whose outcome was not awaited. Messages
of a cancelled receive are kept for the next receive, those of a queue for 5 s at most, and then go back to the group
uncounted. They never count as done.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from portalmq import consumer, wire
from portalmq.closeable import AsyncCloseable
from portalmq.consumer import Consumer
from portalmq.consumers.loop_consumer import SETTLERS_MAX, LoopConsumer, shielded
from portalmq.consumers.subscription import subscription_of
from portalmq.errors import PortalMQError
from portalmq.message import Message, RecordMetadata
from portalmq.network.forking import reset_in_children
from portalmq.network.tls import TLS_NAMES, TlsFiles
from portalmq.producer import Producer
from portalmq.producers.loop_producer import LoopProducer
from portalmq.streams.loop_stream import LoopStream, is_of
from portalmq.transport.calls import CALL_TIMEOUT_S
from portalmq.transport.loop_transport import LoopTransport
from portalmq.transport.transport import ClusterOptions, Transport

CLOSE_TIMEOUT_S = 5.0

__all__ = ["SETTLERS_MAX", "AsyncConsumer", "AsyncProducer"]

P = ParamSpec("P")
R = TypeVar("R")


def _with_parameters_of(
    model: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., R]], Callable[Concatenate[Any, P], R]]:
    """Give a method that passes its arguments on the parameters of `model`, and if it has none its description, for
    type checkers and for help()."""

    def give(method: Callable[..., R]) -> Callable[Concatenate[Any, P], R]:
        returned = method.__annotations__["return"]
        method.__doc__ = method.__doc__ or model.__doc__
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
        given = _options_of(Producer.__init__, args, options)
        cluster = _cluster_of(given, given["delivery_timeout_s"])
        self._inner = LoopProducer(LoopTransport(**cluster._asdict()), **given)
        self._closing: asyncio.Task[None] | None = None
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        """Forget a close() of the parent in the child of a fork."""
        if self._closing is not None and not self._closing.done():
            self._closing = None

    def __repr__(self) -> str:
        return repr(self._inner)

    @_with_parameters_of(Producer.send)
    async def send(self, topic: str, value: Any, **options: Any) -> RecordMetadata:
        """Send a message, and wait until it counts (see `acks`). Raises its PortalMQError, and the errors of
        Producer.send. While the buffer is full it waits, without blocking the event loop. A note of CancelledError says
        whether the message may be sent."""
        return await self._inner.send(topic, value, **options)

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Wait until every message sent so far has its outcome. Raises TimeoutError after `timeout` seconds."""
        await self._inner.flush(timeout)

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Flush and stop. Messages unsent after `timeout` seconds (default: the delivery timeout) fail. A second close
        waits for the first, which continues if its caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._inner.close(timeout), name="portalmq-close")
        await asyncio.shield(self._closing)


# --- consuming -------------------------------------------------------------------------------------------------------


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
        self._topics = topics
        self._options = _options_of(Consumer.__init__, topics, options)
        self._inner: LoopConsumer | LoopStream = self._new_inner()
        self._closed = False
        self._forget_received()
        self._close_if_forgotten()
        reset_in_children(self)

    def _close_if_forgotten(self) -> None:
        """Have the messages go back to the group when this object is garbage collected."""
        weakref.finalize(self, self._inner.close_soon).atexit = False

    def _new_inner(self) -> LoopConsumer | LoopStream:
        options = dict(self._options)
        kind = LoopStream if options["mode"] == "stream" else LoopConsumer
        cluster, idle_timeout_s = _cluster_of(options, CALL_TIMEOUT_S), options.pop("idle_timeout_s")
        return kind(subscription_of(self._topics, **options), options=cluster, idle_timeout_s=idle_timeout_s)

    def _reset_in_child(self) -> None:
        """Start afresh in the child of a fork: what the parent received stays the parent's."""
        before, self._inner = self._inner, self._new_inner()
        if isinstance(before, LoopStream) and isinstance(self._inner, LoopStream):
            self._inner.begin_in_child(before)
        self._close_if_forgotten()
        self._forget_received()

    def _forget_received(self) -> None:
        # The receive that goes on if its caller is cancelled. One at a time.
        self._receiving: asyncio.Future[Any] | None = None
        self._receive_lock = asyncio.Lock()
        # Messages that the user has: all since the latest receive; of a stream the last one of each partition.
        self._handed_out: dict[tuple[str, int, int], Message] = {}

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def _is_queue(self) -> bool:
        return self._inner.subscription.mode == "queue"

    # --- receiving ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """Return the next message; the one before is acked."""
        messages = await self._receive(lambda: self._inner.start_next(), 1, None)
        if not messages:
            raise StopAsyncIteration
        return messages[0]

    async def poll(self, timeout_s: float = 1.0, max_messages: int | None = None) -> list[Message]:
        """Return up to `max_messages` messages, as soon as there are any; an empty list after `timeout_s`. Raises the
        errors of Consumer.poll."""
        if self._closed:
            raise RuntimeError("the consumer is closed")
        return await self._receive(lambda: self._inner.start_poll(timeout_s, max_messages), max_messages, timeout_s)

    async def _receive(
        self, start: Callable[[], asyncio.Future[Any]], at_most: int | None, timeout_s: float | None
    ) -> list[Message]:
        """Return the messages of a receive whose caller was cancelled, or those of a new receive."""
        async with self._receive_lock:
            while not self._closed:
                is_new = self._receiving is None
                if self._receiving is None:
                    if self._is_queue:
                        self._handed_out.clear()  # asking for more acks them
                    self._receiving = start()
                found = await self._wait_for(self._receiving, None if is_new else timeout_s)
                if found and (messages := self._inner.take(at_most)):
                    for message in messages:
                        offset = message.offset if self._is_queue else 0
                        self._handed_out[message.topic, message.partition, offset] = message
                    return messages
                if self._receiving is not None:  # the earlier receive continues, this caller does not wait for it
                    break
                if is_new and not found:
                    break
            return []

    async def _wait_for(self, receiving: asyncio.Future[Any], timeout_s: float | None) -> bool:
        """Wait for a receive, which continues if this is cancelled. Return True if it brought messages. Raises its
        error."""
        await asyncio.wait([receiving], timeout=timeout_s)
        if not receiving.done():
            return False
        self._receiving = None
        return bool(receiving.result())

    # --- settling ----------------------------------------------------------------------------------------------------

    @_with_parameters_of(Consumer.ack)
    async def ack(self, messages: Message | Iterable[Message]) -> None:
        await self._inner.ack(messages)

    @_with_parameters_of(Consumer.nack)
    async def nack(self, messages: Message | Iterable[Message], *arguments: Any, **options: Any) -> None:
        await self._inner.nack(messages, *arguments, **options)

    @_with_parameters_of(Consumer.reject)
    async def reject(self, messages: Message | Iterable[Message], reason: str | None = None) -> None:
        await self._inner.reject(messages, reason)

    @_with_parameters_of(Consumer.release)
    async def release(self, messages: Message | Iterable[Message]) -> None:
        await self._inner.release(messages)

    @_with_parameters_of(Consumer.extend)
    async def extend(self, messages: Message | Iterable[Message], *arguments: Any, **options: Any) -> None:
        await self._inner.extend(messages, *arguments, **options)

    @_with_parameters_of(Consumer.commit_with)
    async def commit_with(self, messages: Message | Iterable[Message], outputs: Iterable[Any]) -> wire.Committed:
        return await self._inner.commit_with(messages, outputs)

    async def commit(self) -> None:
        """Ack all messages that this consumer handed out; durable on return. Messages of a cancelled receive are not
        included."""
        await self._inner.commit(list(self._handed_out.values()))

    # --- streams -----------------------------------------------------------------------------------------------------

    @_with_parameters_of(Consumer.seek)
    async def seek(self, topic: str, to: Any = "earliest", partition: int | None = None) -> None:
        """Move the group to another position in a topic. Messages of the topic from a cancelled receive are dropped."""
        await self._inner.seek(topic, to, partition)
        handed_out = self._handed_out.items()
        self._handed_out = {place: message for place, message in handed_out if not is_of(message, topic, partition)}

    @_with_parameters_of(Consumer.pause)
    async def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        await self._inner.pause(topic, partition)

    @_with_parameters_of(Consumer.resume)
    async def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        await self._inner.resume(topic, partition)

    @property
    def assignment(self) -> list[tuple[str, int]]:
        """The (topic, partition) pairs that this member of a stream group reads now."""
        return self._inner.assignment

    @property
    def member_id(self) -> str:
        """The id of this consumer in its stream group."""
        return self._inner.member_id

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End a wait, send the last acks, and return all other messages to the group, those of a cancelled receive too.
        A second close does nothing."""
        if self._closed:
            return
        self._closed = True
        await shielded(self._close())

    async def _close(self) -> None:
        try:
            await self._inner.close(consumer.LAST_ANSWER_S)
            if self._receiving is not None and not self._receive_lock.locked():  # a coroutine that waits for it gets it
                with contextlib.suppress(PortalMQError):
                    await self._wait_for(self._receiving, CLOSE_TIMEOUT_S)
        finally:
            self._inner.end()


def _cluster_of(options: dict[str, Any], timeout_s: float) -> ClusterOptions:
    """Take the arguments that say where the cluster is. Of a `transport` only these are used: it blocks."""
    transport: Transport | None = options.pop("transport")
    bootstrap, token, allowed = (options.pop(name) for name in ("bootstrap", "token", "allow_advertised"))
    tls = TlsFiles(*(options.pop(name) for name in TLS_NAMES))
    return ClusterOptions(bootstrap, token, timeout_s, tls, allowed) if transport is None else transport.options


def _options_of(model: Callable[..., Any], topics: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of `model` but topics, with their defaults. Raises TypeError for an unknown one."""
    bound = inspect.signature(model).bind(None, *topics, **given)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if name not in ("self", "topics")}
