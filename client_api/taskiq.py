"""The broker of taskiq on PortalMQ. docs/DRAMATIQ.md has the manual.

    from portalmq.taskiq import PortalMQBroker

    broker = PortalMQBroker("http://localhost:5000")

    @broker.task(delay=5, priority=9)
    async def greet(name: str) -> None: ...

A task is a message of the topic `taskiq.<queue>`. The labels `delay` (seconds), `priority` (0 to 31) and `queue_name`
say when, in which order and through which topic it comes.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

try:
    from taskiq import AckableMessage, AsyncBroker
except ImportError as error:
    raise ImportError("portalmq.taskiq needs taskiq: pip install 'portalmq[taskiq]'") from error

from portalmq import wire
from portalmq.aio import AsyncConsumer, AsyncProducer
from portalmq.errors import PortalMQError, StaleReceipt
from portalmq.held import HANDLING_S_MAX, HeldMessages
from portalmq.message import Message
from portalmq.transport.transport import Bootstrap

_log = logging.getLogger("portalmq.taskiq")

SEND_TIMEOUT_S = 30.0
POLL_S = 5.0


class PortalMQBroker(AsyncBroker):
    """A taskiq broker. A worker reads `queues`; a task without the label `queue_name` goes to the first of them."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        queues: Sequence[str] = ("default",),
        group: str = "taskiq",
        topic_prefix: str = "taskiq.",
        visibility_timeout_s: float = 30.0,
        max_handling_s: float = HANDLING_S_MAX,
        max_messages: int = 1,
        **connection: Any,
    ) -> None:
        """`visibility_timeout_s`: how soon the tasks of a killed worker come again. Leases of a living one are renewed
        until the ack, for `max_handling_s` at most. `max_messages`: of one receive; taskiq prefetches besides.
        `connection` has the `token` and the `tls_…` options of Producer."""
        super().__init__()
        if not queues:
            raise ValueError("name at least one queue")
        self._queues = tuple(queues)
        self._topic_prefix = topic_prefix
        self._topics = [self._topic_of(queue) for queue in self._queues]
        self._group = group
        self._visibility_timeout_s = visibility_timeout_s
        self._max_handling_s = max_handling_s
        self._max_messages = max_messages
        self._connection = {"bootstrap": bootstrap, **connection}
        self._producer: AsyncProducer | None = None
        self._consumer: AsyncConsumer | None = None
        self._held: HeldMessages | None = None

    async def kick(self, message: Any) -> None:
        """Send a task; when this returns it is on the disks of all in-sync replicas. Raises PortalMQError, or
        ValueError for labels that are no numbers."""
        if self._producer is None:
            timeout_s = SEND_TIMEOUT_S
            self._producer = AsyncProducer(delivery_timeout_s=timeout_s, max_block_s=timeout_s, **self._connection)
        labels = message.labels
        await self._producer.send(
            self._topic_of(str(labels.get("queue_name") or self._queues[0])),
            message.message,
            delay_s=float(labels["delay"]) if labels.get("delay") is not None else None,
            priority=int(labels.get("priority") or 0),
            headers={"task-id": message.task_id, "task-name": message.task_name},
        )

    async def listen(self) -> AsyncGenerator[Any, None]:
        """Yield tasks. Each is leased until its ack; without one it comes again."""
        consumer = self._consumer = AsyncConsumer(
            *self._topics,
            group=self._group,
            max_messages=1,  # a poll asks for the number it names, and no more wait in the client
            manual_ack=True,
            visibility_timeout_s=self._visibility_timeout_s,
            **self._connection,
        )
        held = self._held = HeldMessages(_extend_each, self._visibility_timeout_s, self._max_handling_s)
        left: list[Message] = []
        try:
            while True:
                try:
                    left = await consumer.poll(POLL_S, self._max_messages)
                except PortalMQError as error:
                    if not error.retryable:
                        raise
                    _log.warning("no broker answers, and the worker tries on: %s", error)
                    continue
                held.add(left)
                while left:
                    yield AckableMessage(data=left[0].value, ack=_Ack(consumer, held, left.pop(0)))
        finally:
            if left:  # these were never handed out
                held.drop(left)
                await consumer.release(left)

    async def shutdown(self) -> None:
        """Close the connections. Tasks that are not acked by now come again."""
        await super().shutdown()
        if self._held is not None:
            self._held.close()
        for closing in (self._consumer, self._producer):
            if closing is not None:
                await closing.close()
        self._consumer = self._producer = None

    def _topic_of(self, queue: str) -> str:
        return wire.check_name(self._topic_prefix + queue, "topic")


class _Ack:
    """The ack of one message, which taskiq calls when the task's ack type says so."""

    def __init__(self, consumer: AsyncConsumer, held: HeldMessages, message: Message) -> None:
        self._consumer = consumer
        self._held = held
        self._message = message

    async def __call__(self) -> None:
        try:
            await self._consumer.ack(self._message)
        except StaleReceipt as error:
            _log.warning("a lease was lost, and the task comes again: %s", error)
        self._held.drop([self._message])


def _extend_each(messages: list[Message]) -> None:
    for message in messages:
        message.extend()
