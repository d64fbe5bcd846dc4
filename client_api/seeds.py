"""The names that programs of the older queues import: Portal MQ's client, producer and consumer, and the two calls of
the design notes.

    with PortalProducer("temp_1", "sensor-7") as producer:
        producer.publish({"celsius": 21.5})             # retried until acknowledged, and stored once
    for message in PortalConsumer("temp_1", "controller-1"):
        handle(message.message)                         # consumed when the next is asked for

    publishMessage("orders", {"n": 1})
    for message in subscribeMessage("orders"):
        handle(message.json())                          # acked when the next is asked for

Portal MQ's consumers share one offset: all of them read the message at that offset, and one of them consumes it.
Consumers that divide the work, each message leased to one of them, are `portalmq.Consumer` and `subscribeMessage`.
"""

from __future__ import annotations

import base64
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from portalmq import wire
from portalmq.closeable import Closeable
from portalmq.consumer import Consumer
from portalmq.errors import NotFound, PortalMQError, TopicNotFound
from portalmq.message import Message, RecordMetadata
from portalmq.network.http_answer import HttpAnswer
from portalmq.producer import Producer
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import json_request
from portalmq.transport.transport import Bootstrap, Transport

DELIVERY_TIMEOUT_S = 120.0
LOOK_UP_WITHIN_S = 5.0
# A sleeping consumer asks again after this time, so that a paused broker does not hold it for long.
SLEEP_S = 10.0
# publishMessage keeps a producer for each cluster and token: the most recently used ones.
PRODUCERS_MAX = 8

Kind = Literal["producer", "consumer"]
PortalDelivery = Literal["at_least_once", "at_most_once"]


@dataclass(frozen=True, slots=True)
class PortalMessage:
    """A message and its sequence number. `message` is text, a JSON value, or bytes if it is neither."""

    topic: str
    message: Any
    offset: int
    timestamp_ms: int


class _Published(msgspec.Struct):
    offset: int


class _ReadAnswer(msgspec.Struct):
    offset: int
    timestamp_ms: int = 0
    message: Any = None
    message_base64: str | None = None


wire.prepare(_Published, _ReadAnswer)


# --- Portal MQ -------------------------------------------------------------------------------------------------------


class PortalClient(Closeable):
    """Portal MQ's endpoints, at any broker that answers. Thread-safe; close it, or use `with`.

    Every call is tried at one broker after another until it is answered, for `timeout_s` at most, and raises the
    PortalMQError of the last try.
    """

    def __init__(
        self, bootstrap: Bootstrap = None, *, token: str | None = None, timeout_s: float = DELIVERY_TIMEOUT_S
    ) -> None:
        self._transport = Transport(bootstrap, token=token, timeout_s=timeout_s)
        self._timeout_s = timeout_s

    # --- topics, producers, consumers --------------------------------------------------------------------------------

    def create_topic(self, name: str) -> None:
        """Create a topic; succeeds if it exists."""
        self._post("/topic/create", {"name": wire.check_name(name, "topic")})

    def delete_topic(self, name: str) -> bool:
        """Delete a topic with its messages; return False if it does not exist."""
        return self._exists("/topic/delete", {"name": wire.check_name(name, "topic")})

    def topic_exists(self, name: str) -> bool:
        return self._exists("/topic/exists", {"name": wire.check_name(name, "topic")})

    def create_producer(self, producer_id: str) -> None:
        """Register the producer's name; succeeds if it exists."""
        self._create("producer", producer_id)

    def delete_producer(self, producer_id: str) -> bool:
        return self._exists("/producer/delete", _id_body("producer", producer_id))

    def producer_exists(self, producer_id: str) -> bool:
        return self._exists("/producer/exists", _id_body("producer", producer_id))

    def create_consumer(self, consumer_id: str) -> None:
        """Register the consumer's name; succeeds if it exists."""
        self._create("consumer", consumer_id)

    def delete_consumer(self, consumer_id: str) -> bool:
        return self._exists("/consumer/delete", _id_body("consumer", consumer_id))

    def consumer_exists(self, consumer_id: str) -> bool:
        return self._exists("/consumer/exists", _id_body("consumer", consumer_id))

    def _create(self, kind: Kind, name: str) -> None:
        self._post(f"/{kind}/create", _id_body(kind, name))

    def _exists(self, path: str, body: dict[str, object]) -> bool:
        try:
            self._post(path, body)
        except NotFound:
            return False
        return True

    # --- messages ----------------------------------------------------------------------------------------------------

    def publish(self, topic: str, message: Any, *, producer_id: str, sequence: str) -> int:
        """Publish text, bytes, or a JSON value. Return the message's sequence number in the topic once it is
        replicated.

        `sequence` is the producer's own id for this message: all repeats under it, within a day, are one message.
        """
        body: dict[str, object] = {"name": wire.check_name(topic, "topic"), "id": producer_id, "sequence": sequence}
        if isinstance(message, bytes | bytearray | memoryview):
            body["message_base64"] = base64.b64encode(message).decode("ascii")
        else:
            body["message"] = message
        return decode_answer(self._post("/publish", body, topic), _Published).offset

    def read(
        self, topic: str, *, consumer_id: str, wait_s: float = 0.0, first_use: bool = False
    ) -> PortalMessage | None:
        """Return the message at the shared offset, or None if there is none within `wait_s`. Reading changes nothing,
        except that `first_use` creates a missing topic if the cluster creates topics at their first use."""
        wait_ms = round(min(max(wait_s, 0.0), SLEEP_S) * 1000)
        body: dict[str, object] = {"name": wire.check_name(topic, "topic"), "id": consumer_id, "wait_ms": wait_ms}
        if first_use:
            body["first_use"] = True
        answer = self._post("/read", body, topic, wait_s=wait_ms / 1000)
        if answer.status == 204:
            return None
        shown = decode_answer(answer, _ReadAnswer)
        message = shown.message if shown.message_base64 is None else base64.b64decode(shown.message_base64)
        return PortalMessage(topic, message, shown.offset, shown.timestamp_ms)

    def consume(self, topic: str, offset: int) -> bool:
        """Advance the shared offset past this message. Return False if it is elsewhere: another consumer has advanced
        it, or an earlier try of this call whose answer was lost."""
        body = {"name": wire.check_name(topic, "topic"), "offset": offset}
        return self._post("/consume", body, topic).status == 200

    # --- the end -----------------------------------------------------------------------------------------------------

    def look_up(self, topic: str) -> None:
        """Learn the brokers and the leader of the topic: the broker that was named may fail later."""
        try:
            self._transport.metadata([topic], deadline=time.monotonic() + min(LOOK_UP_WITHIN_S, self._timeout_s))
        except PortalMQError:
            return  # the call itself goes to any known broker

    def _prepare(self, kind: Kind, name: str | None, topic: str) -> None:
        """Register the name, unless it was generated: it would stay registered after each start. Look the topic up."""
        if name is not None:
            self._create(kind, name)
        self.look_up(topic)

    def close(self) -> None:
        """End waits and retries of other threads. A second close does nothing."""
        self._transport.close()

    def _post(self, path: str, body: dict[str, object], topic: str | None = None, *, wait_s: float = 0.0) -> HttpAnswer:
        """Post a call. Each may be repeated: `publish` because of its sequence, `consume` because an offset is passed
        only once."""
        request = json_request("POST", path, body, near=None if topic is None else (topic, 0), wait_s=wait_s)
        return self._transport.call(request, timeout_s=self._timeout_s + wait_s)


def _id_body(kind: Kind, name: str) -> dict[str, object]:
    return {"id": wire.check_name(name, kind)}


class PortalProducer(Closeable):
    """Publishes to one topic, and retries each message until a broker has acknowledged it. Thread-safe.

    `producer_id` is its name, generated if it is not given; two producers may share a name.
    """

    def __init__(
        self,
        topic: str,
        producer_id: str | None = None,
        bootstrap: Bootstrap = None,
        *,
        token: str | None = None,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
    ) -> None:
        """`delivery_timeout_s`: how long one message is retried."""
        self.topic = wire.check_name(topic, "topic")
        self.producer_id = _name("producer", producer_id)
        self._is_named = producer_id is not None
        # Programs restart under their names and count from one again; those messages are no repeats.
        self._instance = uuid.uuid4().hex
        self._published = 0
        self._lock = threading.Lock()
        self._is_known = False
        self._client = PortalClient(bootstrap, token=token, timeout_s=delivery_timeout_s)

    def publish(self, message: Any) -> int:
        """Publish text, bytes, or a JSON value, and return its sequence number once it is replicated. A missing topic
        is created.

        Raises TypeError for a value that JSON cannot encode, TopicNotFound if the cluster creates no topics at their
        first use, and the PortalMQError of the last try: if its outcome is "unknown" the message may be stored.
        """
        if not self._is_known:
            self._client._prepare("producer", self.producer_id if self._is_named else None, self.topic)
            self._is_known = True
        with self._lock:
            self._published += 1
            sequence = f"{self._instance}-{self._published}"
        return self._client.publish(self.topic, message, producer_id=self.producer_id, sequence=sequence)

    def close(self) -> None:
        """End retries of other threads. The producer's name stays registered until `PortalClient.delete_producer`."""
        self._client.close()


class PortalConsumer(Closeable):
    """Reads one topic at the offset that all consumers share. For one thread; close may be called from another.

    at_least_once   the message is handed out, and consumed when the next is asked for. Another consumer that reads
                    before that gets the same message; a consumer that crashes with it loses nothing.
    at_most_once    the message is consumed first, and handed out to the one consumer that did: they compete for it. A
                    consumer that crashes with it, or never gets the answer, has lost it.
    """

    def __init__(
        self,
        topic: str,
        consumer_id: str | None = None,
        bootstrap: Bootstrap = None,
        *,
        delivery: PortalDelivery = "at_least_once",
        idle_timeout_s: float | None = None,
        token: str | None = None,
        timeout_s: float = DELIVERY_TIMEOUT_S,
    ) -> None:
        """`idle_timeout_s`: iteration ends when no message came for this long. `timeout_s` bounds a call."""
        if delivery not in ("at_least_once", "at_most_once"):
            raise ValueError(f"delivery={delivery!r}: use 'at_least_once' or 'at_most_once'")
        self.topic = wire.check_name(topic, "topic")
        self.consumer_id = _name("consumer", consumer_id)
        self._is_named = consumer_id is not None
        self._delivery = delivery
        self._idle_timeout_s = idle_timeout_s
        self._held: PortalMessage | None = None
        self._is_known = False
        self._closed = threading.Event()
        self._client = PortalClient(bootstrap, token=token, timeout_s=timeout_s)

    def read(self, wait_s: float = 0.0) -> PortalMessage | None:
        """Return the message at the shared offset; wait for one up to `wait_s`. A missing topic is created; raises
        TopicNotFound if the cluster creates none at their first use."""
        if not self._is_known:
            self._client._prepare("consumer", self.consumer_id if self._is_named else None, self.topic)
            self._is_known = True
        began = time.monotonic()
        was_missing = False
        while True:
            left_s = max(0.0, began + wait_s - time.monotonic())
            try:
                message = self._client.read(self.topic, consumer_id=self.consumer_id, wait_s=left_s, first_use=True)
            except TopicNotFound:
                if was_missing:
                    raise
                was_missing = True  # perhaps deleted during the wait: the next call creates it again
                continue
            was_missing = False
            if message is not None or left_s <= 0 or self._closed.is_set():
                return message

    def consume(self, message: PortalMessage) -> bool:
        """Consume the message. Return False if another consumer has, or an earlier try whose answer was lost."""
        if message.topic != self.topic:
            raise ValueError(f"this consumer reads {self.topic!r}, and the message is of {message.topic!r}")
        return self._client.consume(self.topic, message.offset)

    def __iter__(self) -> Iterator[PortalMessage]:
        return self

    def __next__(self) -> PortalMessage:
        """Return the next message. Waits for one, up to `idle_timeout_s`; ends at close()."""
        try:
            self._consume_held()
            deadline = None if self._idle_timeout_s is None else time.monotonic() + self._idle_timeout_s
            while not self._closed.is_set():
                left_s = SLEEP_S if deadline is None else max(0.0, deadline - time.monotonic())
                message = self.read(min(left_s, SLEEP_S))
                if message is None:
                    if left_s <= 0:
                        break
                elif self._delivery == "at_least_once":
                    self._held = message
                    return message
                elif self.consume(message):
                    return message
        except PortalMQError:
            if not self._closed.is_set():
                raise
        raise StopIteration

    def _consume_held(self) -> None:
        """Consume the message in hand; after an error it stays in hand, and the next call tries again."""
        if self._held is not None and not self._closed.is_set():
            with suppress(TopicNotFound):  # deleted, and the message with it
                self.consume(self._held)
            self._held = None

    def close(self) -> None:
        """End a wait in another thread. A message in hand is not consumed, so the next consumer reads it; the
        consumer's name stays registered."""
        self._closed.set()
        self._client.close()


def _name(kind: Kind, given: str | None) -> str:
    return f"{kind}-{uuid.uuid4().hex}" if given is None else wire.check_name(given, kind)


# --- the design notes ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _SharedProducer:
    """A producer and the number of calls that use it. Only a producer without users is closed."""

    producer: Producer
    users: int = 0


# By cluster and token; the most recently used is last.
_shared: OrderedDict[tuple[object, ...], _SharedProducer] = OrderedDict()
_shared_lock = threading.Lock()


def publishMessage(
    topic: str,
    payload: Any,
    *,
    bootstrap: Bootstrap = None,
    token: str | None = None,
    timeout_s: float = DELIVERY_TIMEOUT_S,
    **options: Any,
) -> RecordMetadata:
    """Publish bytes, text, or a JSON value, and return its position once it is on disk on every in-sync replica.
    `options` are those of `Producer.send`: key, headers, delay_s, ttl_s, priority, ...

    Raises the PortalMQError of the last try, and TimeoutError after `timeout_s`: then the message may be stored, or may
    be later.
    """
    with _producer(bootstrap, token) as producer:
        return producer.send(topic, payload, **options).result(timeout_s)


def subscribeMessage(
    topic: str, *, group: str = "default", bootstrap: Bootstrap = None, token: str | None = None, **options: Any
) -> Iterator[Message]:
    """Yield the messages of the topic for a consumer group, without end; each is acked when the next is asked for.

    A message in hand when the iterator is closed or abandoned goes back to the group. `options` are those of
    `Consumer`: mode, delivery ("at_least_once", "at_most_once", "exactly_once"), start, idle_timeout_s, ...
    """
    # Created here, and not at the first message, so that invalid options fail in this call.
    return _messages(Consumer(topic, group=group, bootstrap=bootstrap, token=token, **options))


def _messages(consumer: Consumer) -> Iterator[Message]:
    with consumer:
        for message in consumer:  # noqa: UP028 - `yield from` would close the consumer twice
            yield message


@contextmanager
def _producer(bootstrap: Bootstrap, token: str | None) -> Iterator[Producer]:
    """Yield the producer of a cluster: opening one for each message would be most of the work."""
    named = bootstrap if bootstrap is None or isinstance(bootstrap, str) else tuple(bootstrap)
    # A changed environment variable names another cluster.
    key = (named if named is not None else os.environ.get("PORTALMQ_URL"), token)
    with _shared_lock:
        shared = _shared.get(key)
        if shared is None:
            shared = _shared[key] = _SharedProducer(Producer(named, linger_ms=0, token=token))
        _shared.move_to_end(key)
        shared.users += 1
    try:
        yield shared.producer
    finally:
        with _shared_lock:
            shared.users -= 1
            surplus = [old for old, each in _shared.items() if not each.users][: max(0, len(_shared) - PRODUCERS_MAX)]
            closing = [_shared.pop(old) for old in surplus]
        for each in closing:
            each.producer.close()


def _forget_producers() -> None:
    """Forget the producers in the child of a fork: their threads are the parent's, and the lock may be held."""
    global _shared, _shared_lock
    _shared, _shared_lock = OrderedDict(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_producers)
