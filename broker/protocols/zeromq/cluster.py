"""MiniQ's access to the brokers: the public HTTP API, through the client's producer and transport.

Messages go through one shared Producer, which batches those of many clients. All other requests are calls that any
broker answers, and that survive the death of a leader within their timeout.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import Future
from typing import Any

import msgspec

from portalmq import wire
from portalmq.broker.protocols.zeromq.protocol import DEFAULT, ReceivedMessage, mark_of_receipt
from portalmq.errors import PortalMQError, Unavailable
from portalmq.message import RecordMetadata
from portalmq.producer import Producer
from portalmq.transport import system_random
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import json_request
from portalmq.transport.transport import Bootstrap, Transport

LOOK_UP_WITHIN_S = 2.0
GIVE_BACK_WITHIN_S = 5.0
# For so many queues the broker to ask first is remembered.
NEAR_MAX = 10_000


class _Received(msgspec.Struct):
    messages: list[ReceivedMessage]


class _Deleted(msgspec.Struct):
    deleted: list[bool]


wire.prepare(_Received, _Deleted)


class ClusterClient:
    """Thread-safe. Every call but `send` takes at most its `timeout_s`, and raises PortalMQError."""

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
        self._transport = Transport(bootstrap, token=token, timeout_s=timeout_s)
        self._producer = Producer(
            bootstrap,
            token=token,
            # No lingering: messages that arrive during a request go with the next one.
            linger_ms=0,
            delivery_timeout_s=timeout_s,
            max_block_s=timeout_s,
            buffer_messages=buffer_messages,
            buffer_bytes=buffer_bytes,
        )
        self._visibility_ms = None if visibility_timeout_s is None else round(visibility_timeout_s * 1000)
        self._near: dict[str, tuple[str, int] | None] = {}

    def check(self, timeout_s: float) -> None:
        """Raise Unavailable when no broker answers."""
        self._transport.metadata([], deadline=time.monotonic() + timeout_s)

    # --- messages in -------------------------------------------------------------------------------------------------

    def has_room_for(self, queue: str) -> bool:
        """Return whether send() returns at once."""
        return self._producer.has_room_for(queue)

    def send(self, queue: str, value: str | bytes, content_type: str | None) -> Future[RecordMetadata]:
        try:
            return self._producer.send(queue, value, content_type=content_type)
        except RuntimeError as fault:
            raise Unavailable(
                f"MiniQ's server is shutting down: {fault}", retryable=True, outcome="not_applied"
            ) from None

    # --- messages out ------------------------------------------------------------------------------------------------

    def receive(self, queue: str, at_most: int, timeout_s: float) -> list[ReceivedMessage]:
        """Lease at most `at_most` messages, without waiting for any."""
        wanted = wire.ReceiveRequest(
            [queue],
            max_messages=at_most,
            visibility_timeout_ms=self._visibility_ms,
            attempt_id=f"zeromq:{uuid.uuid4().hex}",
        )
        path, near = wire.group_path(DEFAULT, "receive"), self._leader_near(queue)
        request = json_request("POST", path, wanted, near=near, marks_first_try=True)
        answer = self._transport.call(request, timeout_s=timeout_s)
        messages: list[ReceivedMessage] = decode_answer(answer, _Received).messages
        for each in messages:
            each.id = f"{mark_of_receipt(each.receipt)}-{each.id}"
        return messages

    def give_back(self, receipts: list[str]) -> None:
        """Release messages that no client has seen, for delivery at once. If that fails, their leases expire."""
        request = json_request("POST", wire.group_path(DEFAULT, "nack"), wire.NackRequest(receipts, unseen=True))
        self._transport.call(request, timeout_s=GIVE_BACK_WITHIN_S)

    # --- commands ----------------------------------------------------------------------------------------------------

    def delete(self, queue: str, partition: int, ids: list[str], timeout_s: float) -> list[bool]:
        """Delete messages of one partition; True for each that existed."""
        command = {"type": "DELETE_MSG", "payload": {"queue": queue, "ids": ids}}
        answer = self.command(msgspec.json.encode(command), timeout_s, near=(queue, partition))
        deleted: list[bool] = msgspec.json.decode(answer, type=_Deleted).deleted
        return deleted

    def command(self, body: bytes, timeout_s: float, near: tuple[str, int] | None = None) -> bytes:
        """Execute a command, each of which is idempotent, and return a broker's answer unchanged."""
        request = json_request("POST", "/miniq/command", msgspec.Raw(body), near=near)
        answer = self._transport.call(request, timeout_s=timeout_s)
        decode_answer(answer, dict[str, Any])
        return answer.body

    # --- where -------------------------------------------------------------------------------------------------------

    def _leader_near(self, queue: str) -> tuple[str, int] | None:
        """Return a partition whose leader to ask. Any broker would do; that one need not forward the request."""
        if queue in self._near:
            return self._near[queue]
        try:
            metadata = self._transport.metadata([queue], deadline=time.monotonic() + LOOK_UP_WITHIN_S)
        except PortalMQError:
            return None
        places = [(topic.name, each.partition) for topic in metadata.topics for each in topic.partitions]
        if not places:  # the first receive creates the topic
            return None
        if len(self._near) >= NEAR_MAX:
            self._near.clear()
        place = self._near[queue] = system_random.choice(places)
        return place

    def close(self, timeout_s: float) -> None:
        self._producer.close(timeout_s)
        self._transport.close()
