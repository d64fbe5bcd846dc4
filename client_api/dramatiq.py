"""The broker of dramatiq on PortalMQ. docs/DRAMATIQ.md is the manual.

    import dramatiq
    from portalmq.dramatiq import PortalMQBroker

    dramatiq.set_broker(PortalMQBroker("http://localhost:5000"))

A queue is the topic `dramatiq.<queue>`, which one queue group reads. Delayed messages wait at the broker, so there are
no delay queues. A message that dramatiq gives up becomes a dead letter of the group.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

try:
    from dramatiq.broker import Broker, Consumer, MessageProxy
    from dramatiq.errors import ConnectionClosed, DecodeError, QueueJoinTimeout, QueueNotFound
    from dramatiq.message import Message
except ImportError as error:
    raise ImportError("portalmq.dramatiq needs dramatiq: pip install 'portalmq[dramatiq]'") from error

from portalmq import consumer as portalmq_consumer
from portalmq import message as portalmq_message
from portalmq import wire
from portalmq.admin import Admin
from portalmq.errors import NotFound, PortalMQError, StaleReceipt
from portalmq.held import HANDLING_S_MAX, HeldMessages
from portalmq.producer import Producer
from portalmq.transport.transport import Bootstrap

_log = logging.getLogger("portalmq.dramatiq")

ENQUEUE_TIMEOUT_S = 30.0


class PortalMQBroker(Broker):
    """A dramatiq broker. Actors may name `broker_priority`, 0 to 31: of the waiting messages, the greatest first."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        group: str = "dramatiq",
        topic_prefix: str = "dramatiq.",
        visibility_timeout_s: float = 30.0,
        max_handling_s: float = HANDLING_S_MAX,
        middleware: list[Any] | None = None,
        **connection: Any,
    ) -> None:
        """`visibility_timeout_s`: how soon the messages of a killed worker come again. Leases of a living one are
        renewed, for `max_handling_s` at most. `connection` has the `token` and the `tls_…` options of Producer."""
        super().__init__(middleware=middleware)
        self.actor_options |= {"broker_priority"}
        self.queues: dict[str, str] = {}
        self._group = group
        self._topic_prefix = topic_prefix
        self._visibility_timeout_s = visibility_timeout_s
        self._max_handling_s = max_handling_s
        self._connection = {"bootstrap": bootstrap, **connection}
        self._admin = Admin(**self._connection)
        self._lock = threading.Lock()
        self._producer: Producer | None = None

    def close(self) -> None:
        """Send what is left, and close the connections."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()
        self._admin.close()

    def declare_queue(self, queue_name: str) -> None:
        """Make a queue known. Its topic is created at its first use."""
        if queue_name not in self.queues:
            topic = wire.check_name(self._topic_prefix + queue_name, "topic")
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = topic
            self.emit_after("declare_queue", queue_name)

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        """Send a message, delayed by `delay` ms; when this returns it is on the disks of all in-sync replicas. Raises
        QueueNotFound, ConnectionClosed if no broker took it in 30 s, or another PortalMQError."""
        topic = self._topic_of(message.queue_name)
        self.emit_before("enqueue", message, delay)
        with _connection_errors():
            sent = self._producing().send(
                topic,
                message.encode(),
                content_type=wire.JSON,
                delay_s=None if delay is None else max(0.0, delay / 1000),
                priority=self._priority_of(message),
            )
            sent.result()
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30_000) -> Any:
        """Return a consumer of a queue. Raises QueueNotFound."""
        consumer = portalmq_consumer.Consumer(
            self._topic_of(queue_name),
            group=self._group,
            max_messages=1,  # a poll asks for the number it names, and no more wait in the client
            visibility_timeout_s=self._visibility_timeout_s,
            manual_ack=True,
            **self._connection,
        )
        held = HeldMessages(consumer.extend, self._visibility_timeout_s, self._max_handling_s)
        return QueueConsumer(consumer, held, prefetch, timeout / 1000)

    def flush(self, queue_name: str) -> None:
        """Delete the messages of a queue, delayed ones included."""
        with _connection_errors(), _missing_is_empty():
            self._admin.purge(self._topic_of(queue_name))

    def flush_all(self) -> None:
        """Delete the messages of all declared queues."""
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Wait until the queue has no messages but dead letters; ask every `interval` ms. For tests. Raises
        QueueNotFound, or QueueJoinTimeout after `timeout` ms."""
        topic = self._topic_of(queue_name)
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        while not self._is_done(topic):
            if deadline is not None and time.monotonic() >= deadline:
                raise QueueJoinTimeout(queue_name)
            time.sleep(interval / 1000)

    def _is_done(self, topic: str) -> bool:
        with _connection_errors(), _missing_is_empty():
            counts = self._admin.queue_counts(self._group, topic)
            return counts.ready + counts.in_flight + counts.scheduled == 0
        return True

    def _producing(self) -> Producer:
        with self._lock:
            if self._producer is None:
                timeout_s = ENQUEUE_TIMEOUT_S
                self._producer = Producer(delivery_timeout_s=timeout_s, max_block_s=timeout_s, **self._connection)
            return self._producer

    def _priority_of(self, message: Any) -> int:
        priority = message.options.get("broker_priority")
        if priority is None and message.actor_name in self.actors:
            priority = self.actors[message.actor_name].options.get("broker_priority")
        return priority or 0

    def _topic_of(self, queue_name: str) -> str:
        try:
            return self.queues[queue_name]
        except KeyError:
            raise QueueNotFound(queue_name) from None


class QueueConsumer(Consumer):
    """Receives up to `prefetch` messages ahead of their acks, and keeps their leases until these."""

    def __init__(
        self, consumer: portalmq_consumer.Consumer, held: HeldMessages, prefetch: int, timeout_s: float
    ) -> None:
        self._consumer = consumer
        self._held = held
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._buffer: deque[portalmq_message.Message] = deque()
        self._settled = threading.Event()

    def __next__(self) -> Any:
        """Return the next message, or None if none comes in time."""
        if not self._buffer:
            self._settled.clear()
            free = self._prefetch - len(self._held)
            if free <= 0:
                self._settled.wait(self._timeout_s)
                return None
            with _connection_errors():
                received = self._consumer.poll(self._timeout_s, min(free, wire.RECEIVE_MESSAGES_MAX))
            self._held.add(received)
            self._buffer.extend(received)
            if not received:
                return None
        message = self._buffer.popleft()
        try:
            return DramatiqMessage(Message.decode(message.value), message)
        except DecodeError as error:
            with self._settlement(message):
                self._consumer.reject(message, f"no message of dramatiq: {error}")
            return None

    def ack(self, message: Any) -> None:
        """Mark a message as done."""
        with self._settlement(message.leased):
            self._consumer.ack(message.leased)

    def nack(self, message: Any) -> None:
        """Make a dead letter of a message."""
        failure = message._exception
        with self._settlement(message.leased):
            self._consumer.reject(message.leased, None if failure is None else f"{type(failure).__name__}: {failure}")

    def requeue(self, messages: Iterable[Any]) -> None:
        """Return messages that were not handled."""
        self._release([message.leased for message in messages])

    def close(self) -> None:
        """Return the messages that were received and not handed out. Acks still work."""
        left = list(self._buffer)
        self._buffer.clear()
        self._release(left)
        self._held.close()
        self._consumer.close()

    def _release(self, messages: list[portalmq_message.Message]) -> None:
        if messages:
            with self._settlement(*messages):
                self._consumer.release(messages)

    @contextmanager
    def _settlement(self, *messages: portalmq_message.Message) -> Iterator[None]:
        """After a broken connection dramatiq settles the message again, so its lease is still renewed."""
        with _connection_errors():
            try:
                yield
            except StaleReceipt as error:
                _log.warning("a lease was lost, and the message comes again: %s", error)
        self._held.drop(messages)
        self._settled.set()


class DramatiqMessage(MessageProxy):
    """A message of dramatiq, with the message of PortalMQ that brought it."""

    def __init__(self, message: Any, leased: portalmq_message.Message) -> None:
        super().__init__(message)
        self.leased = leased


@contextmanager
def _connection_errors() -> Iterator[None]:
    """Raise dramatiq's ConnectionClosed for errors that a repeat may help, so that dramatiq repeats."""
    try:
        yield
    except PortalMQError as error:
        if not error.retryable:
            raise
        raise ConnectionClosed(str(error)) from error


@contextmanager
def _missing_is_empty() -> Iterator[None]:
    try:
        yield
    except NotFound:
        return
