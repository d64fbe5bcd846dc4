"""A kombu channel: declares, publishes and consumes.

queue, durable        topic and queue group of its name; bound to a fanout exchange also a group on that one's topic
queue, transient      (see `is_transient`) no group: the end of its exchanges' topics, or of a topic of its own
fanout exchange       one topic, whatever the number of queues
direct, topic         the bound queues get copies; transient ones read the exchange's topic
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.transport.virtual.base import UNDELIVERABLE_FMT, UndeliverableWarning

from portalmq import wire
from portalmq.errors import GroupNotFound, TopicNotFound, Unavailable
from portalmq.kombu.bindings import Binding
from portalmq.kombu.envelope import SendOptions, decode, encode, send_options
from portalmq.kombu.leases import GroupLeases
from portalmq.kombu.purging import cancel_scheduled, count_ready, purge_ready
from portalmq.kombu.qos import Held, QoS
from portalmq.kombu.readers import (
    BULK,
    LINGER_S,
    QueueReader,
    ReaderThread,
    Receives,
    Tail,
    TailReader,
    either_wants,
    is_routed,
)
from portalmq.kombu.session import PUBLISH_TIMEOUT_S, ClusterSession
from portalmq.network.forking import reset_in_children
from portalmq.producers.batching import SendFuture

BUFFERED_MAX = 1_000


class TaskConsumer(NamedTuple):
    queue: str
    no_ack: bool
    callback: Callable[[Any], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A message in the inbox; one without leases is of a transient queue."""

    channel: Channel
    queue: str
    leases: GroupLeases | None
    message: wire.PackMessageOut

    def __call__(self) -> bool:
        return self.channel.deliver(self)


def is_transient(
    queue: str, *, durable: bool, exclusive: bool, auto_delete: bool, arguments: Mapping[str, Any]
) -> bool:
    """Return whether a queue is gone with its consumer: a worker's mailbox, an event receiver, a reply or broadcast
    queue. What such a queue holds is not kept."""
    if exclusive:
        return True
    return auto_delete and ((not durable and "x-expires" in arguments) or queue.startswith("bcast."))


class Channel(virtual.Channel):
    """Acks may come from other threads, and so may close()."""

    supports_fanout = True
    max_priority = wire.PRIORITY_MAX
    do_restore = True

    def __init__(self, connection: Any, **kwargs: Any) -> None:
        self._qos: QoS | None = None
        self.closed = False
        super().__init__(connection, **kwargs)
        self._session: ClusterSession = connection.session
        self._begin()
        reset_in_children(self)

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._turn = threading.Lock()
        self._tags = itertools.count(1)
        self._buffered = 0
        self._callbacks: dict[str, TaskConsumer] = {}
        self._readers: dict[str, list[ReaderThread]] = {}
        self._leases: dict[str, GroupLeases] = {}
        self._gets: dict[str, Receives] = {}
        self._transient: dict[str, dict[str, Tail]] = {}

    def _reset_in_child(self) -> None:
        """Start without consumers: threads, leases and messages are the parent's, and closing returns none of them."""
        self._begin()
        self._qos = None
        self._consumers: set[str] = set()
        self._tag_to_queue: dict[str, str] = {}
        self._active_queues: list[str] = []

    @property
    def qos(self) -> QoS:
        if self._qos is None:
            self._qos = QoS(self._changed)
        return self._qos

    # --- declaring ---------------------------------------------------------------------------------------------------

    def prepare_queue_arguments(self, arguments: Mapping[str, Any], **options: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments, **options)

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        arguments = kwargs.get("arguments") or {}
        if queue and not passive:
            transient = is_transient(
                queue,
                durable=bool(kwargs.get("durable", False)),
                exclusive=bool(kwargs.get("exclusive", False)),
                auto_delete=bool(kwargs.get("auto_delete", False)),
                arguments=arguments,
            )
            if transient:
                self._transient.setdefault(queue, {})
        return super().queue_declare(queue, passive, **kwargs)

    def _new_queue(self, queue: str, **kwargs: Any) -> None:
        if queue in self._transient:
            return
        ttl_ms = (kwargs.get("arguments") or {}).get("x-message-ttl")
        config = {"default_ttl_ms": int(ttl_ms)} if ttl_ms else None
        self._session.admin.create_topic(self._session.names.topic(queue), config=config)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        if queue in self._transient:
            return True
        try:
            self._session.admin.describe(self._session.names.topic(queue))
        except TopicNotFound:
            return False
        return True

    def _queue_bind(self, exchange: str, routing_key: str, pattern: str | None, queue: str) -> None:
        kind = self.typeof(exchange).type
        binding = Binding(exchange, queue, routing_key or "")
        tails = self._transient.get(queue)
        if tails is None:
            if kind == "fanout":
                self._session.join_exchange(queue, exchange)
            self._session.bindings.add(binding, kind)
            return
        topic = self._session.prepare_exchange(exchange)
        known = tails.get(exchange)
        wants = partial(is_routed, kind, binding.routing_key)
        if known is not None:
            known.wants = either_wants(known.wants, wants)
        else:
            tail = tails[exchange] = Tail(topic, wants)
            tail.read(self._session.calls, 0.0)
        if kind != "fanout":
            self._session.bindings.add(binding, kind, transient=True)
            self._session.keep_bindings()

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        super().queue_unbind(queue, exchange, routing_key, arguments, **kwargs)
        if queue not in self._transient and exchange:
            self._session.bindings.remove([Binding(exchange, queue, routing_key or "")])

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        if if_empty and self._size(queue):
            return
        if self._transient.pop(queue, None) is not None:
            self._forget_transient(queue)
            self.state.queue_bindings_delete(queue)
            return
        self._end_readers(queue)
        sources = self._sources(queue)
        self._session.bindings.remove(self._session.bindings.of_queue(queue))
        self.state.queue_bindings_delete(queue)
        for group, _ in sources:
            _if_there(self._session.admin.delete_group, group)
        _if_there(self._session.admin.delete_topic, self._session.names.topic(queue))

    def _forget_transient(self, queue: str) -> None:
        own = [binding for binding in self._session.bindings.own() if binding.queue == queue]
        if own:
            self._session.bindings.remove(own, waits=False)  # it ends by itself, too

    def _sources(self, queue: str) -> list[tuple[str, str]]:
        """Return the groups of a durable queue, each with the topic that it reads."""
        names = self._session.names
        own = names.group(queue), names.topic(queue)
        return [
            own,
            *(
                (names.exchange_group(queue, binding.exchange), names.exchange_topic(binding.exchange))
                for binding in self._fanouts(queue)
            ),
        ]

    def _fanouts(self, queue: str) -> list[Binding]:
        bound = self._session.bindings.of_queue(queue)
        return [binding for binding, how in bound.items() if how.kind == "fanout" and how.until_ms is None]

    # --- publishing --------------------------------------------------------------------------------------------------

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str]:
        """Keep text as it is, so that pages and queries show it."""
        if isinstance(body, str):
            return body, "utf-8"
        encoded, kind = super().encode_body(body, "base64")
        return encoded, kind

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any) -> None:
        """Publish; durable on return. Raises a PortalMQError, or TimeoutError after `timeout` seconds (30)."""
        self._check_open()
        self._inplace_augment_message(message, exchange, routing_key)
        options = send_options(message)
        value = encode(message, exchange, routing_key)
        futures = [self._send(topic, value, options) for topic in self._targets(exchange, routing_key)]
        for future in futures:
            future.result(kwargs.get("timeout") or PUBLISH_TIMEOUT_S + 5)

    def _send(self, topic: str, value: bytes, options: SendOptions) -> SendFuture:
        try:
            return self._session.producer.send(topic, value, content_type=wire.JSON, **options._asdict())
        except RuntimeError:
            self._check_open()  # another thread has closed the connection meanwhile
            raise

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> None:
        self.basic_publish(message, "", queue, **kwargs)

    def _targets(self, exchange: str, routing_key: str) -> list[str]:
        names = self._session.names
        if not exchange:
            return [names.topic(routing_key)]
        kind = self.typeof(exchange).type
        if kind == "fanout":
            return [self._session.prepare_exchange(exchange)]
        route = self._session.bindings.route(exchange, kind, routing_key)
        topics = [names.topic(queue) for queue in sorted(route.queues)]
        if route.to_exchange:
            topics.append(self._session.prepare_exchange(exchange))
        if not topics and self.deadletter_queue:
            text = UNDELIVERABLE_FMT.format(exchange=exchange, routing_key=routing_key)
            warnings.warn(UndeliverableWarning(text), stacklevel=2)
            topics = [names.topic(self.deadletter_queue)]
        return topics

    # --- consuming ---------------------------------------------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], Any], consumer_tag: str, **kwargs: Any
    ) -> None:
        self._check_open()
        with self._changed:
            self._callbacks[consumer_tag] = TaskConsumer(queue, no_ack, callback)
            self._consumers.add(consumer_tag)
            self._tag_to_queue[consumer_tag] = queue
            self._active_queues.append(queue)
            if queue in self._readers:
                return
            readers = self._readers[queue] = self._new_readers(queue)
        for reader in readers:
            reader.start()

    def basic_cancel(self, consumer_tag: str) -> None:
        with self._changed:
            consumer = self._callbacks.pop(consumer_tag, None)
            if consumer is None:
                return
            self._consumers.discard(consumer_tag)
            self._tag_to_queue.pop(consumer_tag, None)
            self._active_queues.remove(consumer.queue)
            if consumer.queue in self._active_queues:
                return
        self._end_readers(consumer.queue)

    def _new_readers(self, queue: str) -> list[ReaderThread]:
        session, options = self._session, self._session.options
        tails = self._transient.get(queue)
        if tails is not None:
            return [
                TailReader(
                    queue,
                    tail,
                    self,
                    session.new_transport(),
                    wait_s=options.wait_time_s,
                    deliver=partial(self._arrived, queue, None),
                    on_failure=session.inbox.fail,
                )
                for tail in self._tails_of(queue, tails)
            ]
        sources = self._sources(queue)
        for group, _ in sources:
            session.prepare_group(group)
        return [
            QueueReader(
                queue,
                [topic],
                self._leases_of(group),
                self,
                session.new_transport(),
                visibility_timeout_s=options.visibility_timeout_s,
                wait_s=options.wait_time_s,
                turn=self._turn,
                deliver=partial(self._arrived, queue, self._leases_of(group)),
                on_failure=session.inbox.fail,
            )
            for group, topic in sources
        ]

    def _tails_of(self, queue: str, tails: dict[str, Tail]) -> list[Tail]:
        """Return what a transient queue reads. One that is bound to no exchange has a topic of its own, which is
        created here and read from its beginning."""
        if not tails:
            topic = self._session.names.topic(queue)
            self._session.admin.create_topic(topic)
            tails[""] = Tail(topic, lambda _: True)
            tails[""].offset = "earliest"
        return list(tails.values())

    def _leases_of(self, group: str) -> GroupLeases:
        with self._changed:
            if group not in self._leases:
                self._leases[group] = self._session.new_leases(group)
            return self._leases[group]

    def _end_readers(self, queue: str) -> None:
        """End the readers of a queue, and return what they have fetched and nobody was given."""
        readers = self._readers.pop(queue, [])
        for reader in readers:
            reader.stopped.set()
        with self._changed:
            self._changed.notify_all()
        for reader in readers:
            reader.end()
        if not self.closed:  # else they go back with all the others
            self._withdraw(queue)

    def _withdraw(self, queue: str) -> None:
        """Return what waits for a consumer: others may have it now, and a later one here in the order of the queue."""

        def is_withdrawn(entry: Any) -> bool:
            return entry.channel is self and entry.queue == queue and entry.leases is not None

        withdrawn: list[Any] = self._session.inbox.withdraw(is_withdrawn)
        with self._changed:
            self._buffered -= len(withdrawn)
            self._changed.notify_all()
        by_leases: dict[GroupLeases, list[str]] = {}
        for each in withdrawn:
            by_leases.setdefault(each.leases, []).append(each.message.receipt or "")
        for leases, receipts in by_leases.items():
            leases.give_back(receipts, "no consumer is left")

    # places for readers

    def free_places(self) -> int:
        with self._changed:
            limit = self.qos.prefetch_count
            if limit:
                return max(0, limit - len(self.qos) - self._buffered)
            return BULK if self._buffered < BUFFERED_MAX else 0

    def is_shared(self) -> bool:
        return len(self._readers) > 1 or any(len(readers) > 1 for readers in self._readers.values())

    def wait_for_places(self, reader: ReaderThread) -> int:
        with self._changed:
            self._changed.wait_for(lambda: reader.stopped.is_set() or self.free_places() > 0)
            wanted = max(1, self.qos.prefetch_count // 2)
            if 0 < self.free_places() < wanted:
                self._changed.wait_for(lambda: reader.stopped.is_set() or self.free_places() >= wanted, LINGER_S)
            return 0 if reader.stopped.is_set() else self.free_places()

    # delivering

    def _arrived(self, queue: str, leases: GroupLeases | None, messages: Sequence[wire.PackMessageOut]) -> None:
        """Put messages into the inbox, in a reader's thread."""
        with self._changed:
            self._buffered += len(messages)
        self._session.inbox.put([Arrival(self, queue, leases, message) for message in messages])

    def deliver(self, arrival: Arrival) -> bool:
        """Give a message to a consumer of the queue, in the connection's thread. Return False if it is gone."""
        queue, leases, message = arrival.queue, arrival.leases, arrival.message
        receipt = message.receipt or ""
        is_held = leases is None or leases.is_held(receipt)
        with self._changed:  # the place that it leaves is the one that it takes
            self._buffered -= 1
            consumer = self._next_consumer(queue)
            if is_held and consumer is not None:
                held = Held(queue, leases, receipt, partial(self._again, queue, message))
                taken = self._taken(message, held, no_ack=consumer.no_ack)
            else:
                self._changed.notify_all()
        if not is_held:
            return False
        if consumer is None:
            if leases is not None:
                leases.give_back([receipt], "no consumer is left")
            return False
        consumer.callback(taken)
        return True

    def _next_consumer(self, queue: str) -> TaskConsumer | None:
        """Return the queue's consumer whose turn it is. The caller holds the lock."""
        tags = [tag for tag, each in self._callbacks.items() if each.queue == queue]
        if len(tags) > 1:
            self._callbacks[tags[0]] = self._callbacks.pop(tags[0])
        return self._callbacks[tags[0]] if tags else None

    def _again(self, queue: str, message: wire.PackMessageOut) -> None:
        with self._changed:
            self._buffered += 1
        again = wire.PackMessageOut(message.partition, message.offset, message.value, message.timestamp_ms)
        again.delivery_count = 2
        self._session.inbox.put_first(Arrival(self, queue, None, again))

    def _taken(self, message: wire.PackMessageOut, held: Held, *, no_ack: bool) -> Any:
        """Return the kombu message, from now on unacked, or acked if the consumer does not ack."""
        tag = next(self._tags)
        raw = decode(message.value, tag, redelivered=(message.delivery_count or 1) > 1)
        taken = self.Message(raw, channel=self)
        if not no_ack:
            self.qos.append(taken, tag, held)
        elif held.leases is not None:
            held.leases.ack(held.receipt)
        if no_ack:
            with self._changed:
                self._changed.notify_all()
        return taken

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return a message that is there now, or None."""
        self._check_open()
        tails = self._transient.get(queue)
        if tails is not None:
            for tail in self._tails_of(queue, tails):
                for message in tail.read(self._session.calls, 0.0, limit=1):
                    return self._taken(message, Held(queue, None, "", lambda: None), no_ack=no_ack)
            return None
        for group, topic in self._sources(queue):
            leases = self._leases_of(group)
            self._session.prepare_group(group)
            if group not in self._gets:
                visibility_s = self._session.options.visibility_timeout_s
                self._gets[group] = Receives(self._session.calls, group, [topic], visibility_s, None)
            for message in self._gets[group].receive(1, 0.0).messages:
                receipt = message.receipt or ""
                leases.hold([receipt], time.monotonic())
                held = Held(queue, leases, receipt, lambda: None)
                return self._taken(message, held, no_ack=no_ack)
        return None

    def basic_recover(self, requeue: bool = False) -> Any:
        if not requeue:
            raise NotImplementedError("recover(requeue=False): PortalMQ does not hold messages for one consumer")
        return self.qos.restore_unacked()

    def drain_events(self, timeout: float | None = None, callback: Any = None) -> None:
        self.connection.drain_events(self.connection, timeout=timeout)

    @property
    def state(self) -> Any:
        self._check_open()
        return self.connection.state

    def _check_open(self) -> None:
        """Raise a connection error if the channel is closed. kombu may use one whose connection it has replaced, and
        repeats the call on the new one."""
        if self.closed or self.connection is None:
            raise Unavailable("the channel is closed, and so is its connection", outcome="not_applied")

    # --- counting and purging ----------------------------------------------------------------------------------------

    def _size(self, queue: str) -> int:
        """Return how many messages are ready, as AMQP counts them: neither those in work nor those not due yet."""
        if queue in self._transient:
            return 0
        return sum(count_ready(self._session, *source) for source in self._sources(queue))

    def _purge(self, queue: str) -> int:
        """Remove the messages that are ready, and those scheduled with an eta. Return their number. Messages in work
        stay: they are acked or come back."""
        if queue in self._transient:
            return 0
        session = self._session
        removed = sum(purge_ready(session, self._leases_of(group), topic) for group, topic in self._sources(queue))
        return removed + cancel_scheduled(session, session.names.topic(queue))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Return what is not acked, and send the last acks. A second close does nothing."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
        for tag in list(self._callbacks):
            self.basic_cancel(tag)
        for queue in list(self._transient):
            self._forget_transient(queue)
        self.qos.restore_unacked_once()
        for leases in self._leases.values():
            self._session.end_leases(leases)
        self._leases = {}
        if self.connection is not None:
            self.connection.close_channel(self)
        self.exchange_types = None


def _if_there(call: Callable[[str], object], name: str) -> None:
    try:
        call(name)
    except (TopicNotFound, GroupNotFound):
        return
