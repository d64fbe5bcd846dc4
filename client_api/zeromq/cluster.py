"""The brokers, as MiniQ's server uses them: the public HTTP API through the client's own producer and transport.

A message goes out by the shared Producer: what comes in from many clients meanwhile is one request. All else is a call
that any broker answers, and that survives a leader's death within its time.

Either may be begun by the loop that reads the sockets, which waits for nothing (see portalmq.begun). What comes of it
but a good answer is the threads' affair: senders go on with the same stamp, workers with the same call.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from portalmq import wire
from portalmq.begun import Begun, begin
from portalmq.connection import Answer, ConnectionPool
from portalmq.errors import PortalMQError, Unavailable
from portalmq.message import RecordMetadata
from portalmq.producer import Producer
from portalmq.transport import Bootstrap, Request, Transport, decode_answer, error_of_answer
from portalmq.zeromq.desk import Watch
from portalmq.zeromq.protocol import DEFAULT, Received, mark_in

LOOK_UP_WITHIN_S = 2.0
GIVE_BACK_WITHIN_S = 5.0
# A broker that is silent for longer may be paused: a thread sees what is to be done.
BEGUN_WITHIN_S = 5.0
# Of so many queues it is known where to ask first.
NEAR_MAX = 10_000

_JSON = (("Content-Type", wire.JSON),)
_COMMAND = "/miniq/command"
_RECEIVE = wire.group_path(DEFAULT, "receive")


class _Received(msgspec.Struct):
    messages: list[Received]


class _Deleted(msgspec.Struct):
    deleted: list[bool]


wire.prepare(_Received, _Deleted)

T = TypeVar("T")


@dataclass(slots=True)
class Call(Generic[T]):
    """One call to the brokers: begun, and carried out after that, it is one call still. `queue` is the one whose leader
    is asked, if that is known; any broker would do, and that one has the shortest way."""

    cluster: Cluster
    request: Request
    read: Callable[[Answer], T]
    queue: str | None = None
    was_begun: bool = False

    def begin(self, watch: Watch, timeout_s: float, done: Callable[[Answer | None], None]) -> bool:
        if self.queue is not None and self.request.near is None:
            return False  # who carries it out finds the leader, for those that come after
        begun = self.cluster.begin(self.request, min(timeout_s, BEGUN_WITHIN_S))
        if begun is None:
            return False
        self.was_begun = True
        watch(begun, done)
        return True

    def outcome(self, answer: Answer) -> T:
        if answer.status >= 300:
            raise error_of_answer(answer)
        return self.read(answer)

    def carry_out(self, timeout_s: float) -> T:
        near = self.request.near or (None if self.queue is None else self.cluster.find_near(self.queue))
        # Whoever asks again has the broker look whether it has done this already.
        request = replace(self.request, near=near, tells_first=self.request.tells_first and not self.was_begun)
        return self.read(self.cluster.call(request, timeout_s))


class Cluster:
    """Thread-safe, but for what is given a `watch`: that is the loop's. What is carried out may take up to its
    `timeout_s`, and raises a PortalMQError."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        *,
        token: str | None,
        timeout_s: float,
        buffer_messages: int,
        buffer_bytes: int,
        visibility_timeout_s: float | None = None,
    ) -> None:
        self._pool = ConnectionPool()
        self._transport = Transport(bootstrap, token=token, timeout_s=timeout_s, pool=self._pool)
        self._producer = Producer(
            transport=self._transport,
            # Nobody waits for others to come: what comes while a request is on its way goes with the next one.
            linger_ms=0,
            delivery_timeout_s=timeout_s,
            max_block_s=timeout_s,
            buffer_messages=buffer_messages,
            buffer_bytes=buffer_bytes,
        )
        self._visibility_ms = None if visibility_timeout_s is None else round(visibility_timeout_s * 1000)
        self._near: dict[str, tuple[str, int] | None] = {}

    def check(self, timeout_s: float) -> None:
        """Raises Unavailable when no broker is there."""
        self._transport.metadata([], deadline=time.monotonic() + timeout_s)

    # --- messages in -------------------------------------------------------------------------------------------------

    def has_room_for(self, queue: str) -> bool:
        """Whether send() returns at once."""
        return self._producer.has_room_for(queue)

    def send(
        self, queue: str, value: str | bytes, content_type: str | None, watch: Watch | None = None
    ) -> Future[RecordMetadata]:
        if watch is not None:
            future = self._begin_send(queue, value, content_type, watch)
            if future is not None:
                return future
        try:
            return self._producer.send(queue, value, content_type=content_type)
        except RuntimeError as fault:
            raise Unavailable(f"MiniQ's server ends: {fault}", retryable=True, outcome="not_applied") from None

    def _begin_send(
        self, queue: str, value: str | bytes, content_type: str | None, watch: Watch
    ) -> Future[RecordMetadata] | None:
        message = self._producer.take_in_hand(queue, value, content_type)
        if message is None:
            return None
        begun = None if message.request is None else self.begin(message.request, BEGUN_WITHIN_S)
        if begun is None:
            message.leave()
        else:
            watch(begun, message.end)
        return message.future

    # --- messages out ------------------------------------------------------------------------------------------------

    def receiving(self, queue: str, at_most: int) -> Call[list[Received]]:
        """Lease up to so many messages, without waiting for any."""
        wanted = wire.ReceiveRequest(
            [queue],
            max_messages=at_most,
            visibility_timeout_ms=self._visibility_ms,
            attempt_id=f"zeromq:{uuid.uuid4().hex}",
        )
        body, near = msgspec.json.encode(wanted), self._near.get(queue)
        request = Request("POST", _RECEIVE, body, _JSON, repeatable=True, near=near, tells_first=True)
        return Call(self, request, _messages_of, queue)

    def give_back(self, receipts: list[str]) -> None:
        """Nobody has seen these messages: they may go to the next one at once. If that fails, their leases end."""
        body = msgspec.json.encode(wire.NackRequest(receipts, unseen=True))
        request = Request("POST", wire.group_path(DEFAULT, "nack"), body, _JSON, repeatable=True)
        self.call(request, GIVE_BACK_WITHIN_S)

    # --- commands ----------------------------------------------------------------------------------------------------

    def deleting(self, queue: str, partition: int, ids: list[str]) -> Call[list[bool]]:
        """Which of these messages, all of one partition, were there and are done now."""
        told = msgspec.json.encode({"type": "DELETE_MSG", "payload": {"queue": queue, "ids": ids}})
        request = Request("POST", _COMMAND, told, _JSON, repeatable=True, near=(queue, partition))
        return Call(self, request, lambda answer: decode_answer(answer, _Deleted).deleted)

    def telling(self, body: bytes) -> Call[bytes]:
        """Any command, as the brokers answer it. Every command says what is to be so: twice is once."""
        return Call(self, Request("POST", _COMMAND, body, _JSON, repeatable=True), _body_of)

    # --- where -------------------------------------------------------------------------------------------------------

    def begin(self, request: Request, timeout_s: float) -> Begun | None:
        """Send it by a kept connection, without waiting. None where that cannot be done now."""
        way = self._transport.way(request)
        return None if way is None else begin(self._pool, *way, request.body, timeout_s)

    def call(self, request: Request, timeout_s: float) -> Answer:
        return self._transport.call(request, timeout_s=timeout_s)

    def find_near(self, queue: str) -> tuple[str, int] | None:
        """A partition of the queue, whose leader to ask."""
        if queue in self._near:
            return self._near[queue]
        try:
            metadata = self._transport.metadata([queue], deadline=time.monotonic() + LOOK_UP_WITHIN_S)
        except PortalMQError:
            return None
        places = [(topic.name, each.partition) for topic in metadata.topics for each in topic.partitions]
        if not places:  # it is made by the first receive
            return None
        if len(self._near) >= NEAR_MAX:
            self._near.clear()
        place = self._near[queue] = random.choice(places)
        return place

    def close(self, timeout_s: float) -> None:
        self._producer.close(timeout_s)
        self._transport.close()


def _messages_of(answer: Answer) -> list[Received]:
    messages = decode_answer(answer, _Received).messages
    for each in messages:
        each.id = f"{mark_in(each.receipt)}-{each.id}"
    return messages


def _body_of(answer: Answer) -> bytes:
    decode_answer(answer, dict[str, Any])
    return answer.body
