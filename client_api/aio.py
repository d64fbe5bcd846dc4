"""AsyncProducer and AsyncConsumer: the producer and the consumer for asyncio, with the same names and guarantees.

They are the synchronous ones, and no second implementation of retries, leases and sequences: what cannot wait is done
in the event loop's thread, what may wait (the network, a full buffer) in a thread that belongs to the object.

    send --room in the buffer--> the producer's batch --sender thread--> leader --> the future wakes the coroutine
    next message --> the consumer's own thread --> one message (or, for poll, some)
    ack, nack, extend --> another thread, so that they do not wait for the receive that waits

Cancelling is safe. A cancelled `send` may or may not be sent, as any message whose outcome was not waited for. What a
cancelled receive brings is kept and given to whoever asks next; it is never taken for done.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from portalmq import wire
from portalmq.consumer import Consumer
from portalmq.consumers.commit import Output
from portalmq.errors import Backpressure, PortalMQError
from portalmq.message import Message, RecordMetadata
from portalmq.network.forking import reset_in_children
from portalmq.producer import Producer
from portalmq.producers.batching import SendFuture
from portalmq.streams.member import Delivery
from portalmq.transport.transport import Bootstrap

T = TypeVar("T")

SETTLERS_MAX = 4
CLOSE_TIMEOUT_S = 5.0


Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class _ThreadPool:
    """Up to `most` threads of one object, for one event loop; started when they are needed.

    Daemons, unlike those of concurrent.futures: a program that forgets close() must not hang at its end, in a receive.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._begin()
        reset_in_children(self)

    def _begin(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.unfinished = 0
        self.close = weakref.finalize(self, _stop_threads, self._jobs, self._threads)
        self.close.atexit = False

    def _reset_in_child(self) -> None:
        """In the child of a fork, which has none of the threads, and none of the event loops that wait for them."""
        was_closed = self.close.detach() is None
        self._begin()
        if was_closed:
            self.close()

    def start(self, do: Callable[[], T]) -> asyncio.Future[T]:
        """The future result of `do`. It runs to its end, whatever becomes of who waits for it."""
        if not self.close.alive:
            raise RuntimeError("it is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self.unfinished += 1
        future.add_done_callback(self._finished)
        self._jobs.put((loop, future, do))
        if len(self._threads) < min(self._most, self.unfinished):
            thread = threading.Thread(target=_run_jobs, args=(self._jobs,), name=self._name, daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    async def run(self, do: Callable[[], T]) -> T:
        return await asyncio.shield(self.start(do))

    def _finished(self, ended: asyncio.Future[Any]) -> None:
        self.unfinished -= 1
        if not ended.cancelled():
            ended.exception()  # who was cancelled does not ask for it


def _run_jobs(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        loop, future, do = job
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = (do(), None)
        except BaseException as fault:  # noqa: BLE001 - it is told to whoever waits
            outcome = (None, fault)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_set_outcome, future, *outcome)
        del job, future, do, outcome  # or they would live until the next job


def _set_outcome(future: asyncio.Future[Any], result: Any, fault: BaseException | None) -> None:
    if future.done():
        return
    if fault is None:
        future.set_result(result)
    else:
        future.set_exception(fault)


def _stop_threads(jobs: SimpleQueue[Job | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        jobs.put(None)


# --- producing -------------------------------------------------------------------------------------------------------


class AsyncProducer:
    """Sends messages to topics; see Producer, whose arguments and guarantees these are. For one event loop.

        async with AsyncProducer("http://localhost:5000") as producer:
            metadata = await producer.send("temp_1", {"celsius": 21.5}, key="sensor-1")
            await asyncio.gather(*(producer.send("temp_1", each) for each in many))

    Coroutines that send at the same time share batches. Messages keep the order in which their `send` was first
    awaited (tasks: were started).
    """

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        acks: wire.Acks = "all",
        linger_ms: float = 5,
        batch_messages: int = 1000,
        batch_bytes: int = 1_000_000,
        idempotent: bool = True,
        producer_name: str | None = None,
        compression: str | None = None,
        delivery_timeout_s: float = 120,
        token: str | None = None,
        max_block_s: float = 60,
        buffer_messages: int = 100_000,
        buffer_bytes: int = 64 * 1024 * 1024,
        tls_ca: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
        allow_advertised: bool | None = None,
    ) -> None:
        self._producer = Producer(
            bootstrap,
            acks=acks,
            linger_ms=linger_ms,
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            idempotent=idempotent,
            producer_name=producer_name,
            compression=compression,
            delivery_timeout_s=delivery_timeout_s,
            token=token,
            max_block_s=max_block_s,
            buffer_messages=buffer_messages,
            buffer_bytes=buffer_bytes,
            tls_ca=tls_ca,
            tls_client_cert=tls_client_cert,
            tls_client_key=tls_client_key,
            allow_advertised=allow_advertised,
        )
        # One thread keeps the order of the sends that have to wait; the other is for flush and close.
        self._senders = _ThreadPool("portalmq-async-send", 1)
        self._flusher = _ThreadPool("portalmq-async-flush", 1)
        self._hurried: list[SendFuture] = []
        self._max_block_s = max_block_s
        self._delivery_timeout_s = delivery_timeout_s
        self._closing: asyncio.Future[None] | None = None
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        """In the child of a fork; the producer and the threads see to themselves."""
        self._hurried = []
        if self._closing is not None and not self._closing.done():
            self._closing = None

    def __repr__(self) -> str:
        return f"<Async{repr(self._producer)[1:]}"

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | float | None = None,
        ttl_s: float | None = None,
        priority: int = 0,
        content_type: str | None = None,
    ) -> RecordMetadata:
        """Send a message, and wait until it counts (see `acks`). Raises its PortalMQError, and what Producer.send does;
        waits, without blocking the event loop, while the buffer is full."""

        def put() -> SendFuture:
            return self._producer.send(
                topic,
                value,
                key=key,
                headers=headers,
                partition=partition,
                delay_s=delay_s,
                deliver_at=deliver_at,
                ttl_s=ttl_s,
                priority=priority,
                content_type=content_type,
            )

        began = time.monotonic()

        def put_in_time() -> SendFuture:
            if time.monotonic() - began > self._max_block_s:
                raise Backpressure(
                    f"the sends before this one have waited for a broker for {self._max_block_s:g} s",
                    outcome="not_applied",
                )
            return put()

        # A send behind one that waits must wait too, or it would overtake.
        if self._senders.unfinished or not self._producer.has_room_for(topic, partition):
            future = await self._senders.run(put_in_time)
        else:
            future = put()
        self._hurry(future)
        return await asyncio.wrap_future(future)

    def _hurry(self, future: SendFuture) -> None:
        """Somebody waits for it: its batch goes out as soon as all that run now have sent theirs."""
        self._hurried.append(future)
        if len(self._hurried) == 1:
            asyncio.get_running_loop().call_soon(self._hurry_all)

    def _hurry_all(self) -> None:
        hurried, self._hurried = self._hurried, []
        for future in hurried:
            future.hurry()

    async def flush(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Wait until everything sent so far has its outcome. Raises TimeoutError after `timeout` seconds."""
        while self._senders.unfinished:  # those that wait for room were sent before
            await self._senders.run(lambda: None)
        await self._flusher.run(lambda: self._producer.flush(timeout))

    async def close(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Flush and stop. What is not sent after `timeout` seconds (default: the delivery timeout) fails. Closing twice
        is fine: the second one waits for the first, which goes on when its caller is cancelled."""
        if self._closing is None:
            limit_s = self._delivery_timeout_s if timeout is None else timeout
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


# --- consuming -------------------------------------------------------------------------------------------------------


class AsyncConsumer:
    """Receives messages; see Consumer, whose arguments and guarantees these are. For one event loop.

        async with AsyncConsumer("orders", group="billing") as consumer:
            async for message in consumer:
                await handle(message)

    Asking for the next message says that the one before is done. An exception in the loop's body never asks: that
    message goes back when the consumer closes. Settle with `await consumer.ack(message)`; a message's own ack() works
    too, and blocks the event loop for a round trip.
    """

    def __init__(
        self,
        *topics: str,
        group: str = "default",
        bootstrap: Bootstrap = None,
        mode: Literal["queue", "stream"] = "queue",
        delivery: Delivery = "at_least_once",
        max_messages: int = 100,
        visibility_timeout_s: float = 30,
        start: Literal["earliest", "latest"] | datetime = "earliest",
        manual_ack: bool = False,
        idle_timeout_s: float | None = None,
        token: str | None = None,
        member_id: str | None = None,
        session_timeout_s: float = 10,
        max_handling_s: float | None = None,
        tls_ca: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
        allow_advertised: bool | None = None,
    ) -> None:
        self._consumer = Consumer(
            *topics,
            group=group,
            bootstrap=bootstrap,
            mode=mode,
            delivery=delivery,
            max_messages=max_messages,
            visibility_timeout_s=visibility_timeout_s,
            start=start,
            manual_ack=manual_ack,
            idle_timeout_s=idle_timeout_s,
            token=token,
            member_id=member_id,
            session_timeout_s=session_timeout_s,
            max_handling_s=max_handling_s,
            tls_ca=tls_ca,
            tls_client_cert=tls_client_cert,
            tls_client_key=tls_client_key,
            allow_advertised=allow_advertised,
        )
        self._mode = mode
        self._manual_ack = manual_ack
        self._receiver = _ThreadPool("portalmq-async-receive", 1)
        self._settlers = _ThreadPool("portalmq-async-settle", SETTLERS_MAX)
        # While brokers are away acks may hold all settlers, and a queue of them behind: the end waits for none.
        self._closer = _ThreadPool("portalmq-async-close", 1)
        self._closed = False
        self._reset_in_child()
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        """As one that has received nothing, which is also what the child of a fork has."""
        # What a receive brought whose asker was cancelled; and that receive itself while it goes on. One at a time.
        self._undelivered: deque[Message] = deque()
        self._receiving: asyncio.Future[list[Message]] | None = None
        self._receive_lock = asyncio.Lock()
        # What the user has in hand: all since the latest receive, of a stream the last one of each partition.
        self._handed_out: dict[tuple[str, int, int], Message] = {}

    def __repr__(self) -> str:
        return f"<Async{repr(self._consumer)[1:]}"

    # --- receiving ---------------------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message; the one before is acked."""

        def one() -> list[Message]:
            message = next(self._consumer, None)
            return [] if message is None else [message]

        messages = await self._receive(one, 1, None)
        if not messages:
            raise StopAsyncIteration
        return messages[0]

    async def poll(self, timeout_s: float = 1.0, max_messages: int | None = None) -> list[Message]:
        """Up to `max_messages` messages, as soon as there are any; an empty list after `timeout_s`. Raises as
        Consumer.poll does."""
        if self._closed:
            raise RuntimeError("the consumer is closed")
        return await self._receive(lambda: self._consumer.poll(timeout_s, max_messages), max_messages, timeout_s)

    async def _receive(
        self, receive: Callable[[], list[Message]], at_most: int | None, timeout_s: float | None
    ) -> list[Message]:
        """What was kept; or what a receive brings that somebody began and left; or what a new one brings."""
        async with self._receive_lock:
            while not self._undelivered and not self._closed:
                if self._receiving is None:
                    if self._mode == "queue":
                        self._handed_out.clear()  # asking for more says that they are done
                    self._receiving = self._receiver.start(receive)
                    if not await self._wait_for(self._receiving, None):
                        return []
                elif not await self._wait_for(self._receiving, timeout_s) and self._receiving is not None:
                    return []  # the earlier one waits on, this asker does not
            count = len(self._undelivered) if at_most is None else min(at_most, len(self._undelivered))
            messages = [self._undelivered.popleft() for _ in range(count)]
            for message in messages:
                offset = message.offset if self._mode == "queue" else 0
                self._handed_out[message.topic, message.partition, offset] = message
            return messages

    async def _wait_for(self, receiving: asyncio.Future[list[Message]], timeout_s: float | None) -> bool:
        """Wait for a receive, which goes on if this is cancelled. Raises its error; True when it brought something."""
        await asyncio.wait([receiving], timeout=timeout_s)
        if not receiving.done():
            return False
        self._receiving = None
        self._undelivered.extend(receiving.result())
        return bool(self._undelivered)

    # --- settling ----------------------------------------------------------------------------------------------------

    async def ack(self, messages: Message | Iterable[Message]) -> None:
        """Say that messages are done. Raises StaleReceipt, the others being acked all the same."""
        await self._settlers.run(lambda: self._consumer.ack(messages))

    async def nack(
        self, messages: Message | Iterable[Message], delay_s: float | None = None, reason: str | None = None
    ) -> None:
        """Give messages back for redelivery."""
        await self._settlers.run(lambda: self._consumer.nack(messages, delay_s, reason))

    async def extend(self, messages: Message | Iterable[Message], visibility_timeout_s: float | None = None) -> None:
        """Hold leases for `visibility_timeout_s` seconds from now."""
        await self._settlers.run(lambda: self._consumer.extend(messages, visibility_timeout_s))

    async def commit_with(self, messages: Message | Iterable[Message], outputs: Iterable[Output]) -> wire.Committed:
        """Say that messages of one partition are done and publish `outputs`, both or neither, and once."""
        return await self._settlers.run(lambda: self._consumer.commit_with(messages, outputs))

    async def commit(self) -> None:
        """Say that all that this gave is done; durable on return. What a cancelled receive brought is not meant."""
        if self._mode == "queue" and self._manual_ack:
            self._consumer.commit()  # which says what is wrong with that
        given = list(self._handed_out.values())

        def commit() -> None:
            if given:
                self._consumer.ack(given)
            self._consumer.commit_finished()

        await self._settlers.run(commit)

    # --- streams -----------------------------------------------------------------------------------------------------

    async def seek(
        self,
        topic: str,
        to: Literal["earliest", "latest"] | int | datetime = "earliest",
        partition: int | None = None,
    ) -> None:
        """Set the group to another place in a topic. What a cancelled receive brought of it is dropped."""
        await self._settlers.run(lambda: self._consumer.seek(topic, to, partition))

        def is_void(message: Message) -> bool:
            return message.topic == topic and partition in (None, message.partition)

        self._undelivered = deque(message for message in self._undelivered if not is_void(message))
        self._handed_out = {place: message for place, message in self._handed_out.items() if not is_void(message)}

    async def pause(self, topic: str | None = None, partition: int | None = None) -> None:
        """Hand out nothing of a topic, or one partition of it, or at all, until resume()."""
        await self._settlers.run(lambda: self._consumer.pause(topic, partition))

    async def resume(self, topic: str | None = None, partition: int | None = None) -> None:
        """The opposite of pause()."""
        await self._settlers.run(lambda: self._consumer.resume(topic, partition))

    @property
    def assignment(self) -> list[tuple[str, int]]:
        """The partitions (topic, number) that this member of a stream group reads now."""
        return self._consumer.assignment

    @property
    def member_id(self) -> str:
        """The name under which this consumer is a member of its stream group."""
        return self._consumer.member_id

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """End a wait, send the last acks, give the rest back: also what a cancelled receive brought. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._closer.run(self._consumer.close)
            if self._receiving is not None and not self._receive_lock.locked():  # else who waits for it gets it
                with contextlib.suppress(PortalMQError):
                    await self._wait_for(self._receiving, CLOSE_TIMEOUT_S)
            if self._manual_ack and self._undelivered and self._mode == "queue":
                # What was handed out in manual mode is the user's to settle, but this never reached him.
                kept, reason = list(self._undelivered), "the consumer closed before it came to it"
                with contextlib.suppress(PortalMQError):
                    await self._closer.run(lambda: self._consumer.nack(kept, 0, reason))
        finally:
            self._undelivered.clear()
            self._receiver.close()
            self._settlers.close()
            self._closer.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
