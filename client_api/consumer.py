"""The consumer of a queue group: competing consumers share the topics' messages, each message is leased to one of them.

Iterating is the whole protocol: asking for the next message says that the one before is done. An exception in the
loop's body never asks, so that message stays unacked and goes back when the consumer closes (or is collected).
"""

from __future__ import annotations

import random
import threading
import time
import uuid
import weakref
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Literal, Self

import msgspec

from portalmq import wire
from portalmq.commit import Output, commit_receipts
from portalmq.errors import PortalMQError
from portalmq.lease import Leases, Verb
from portalmq.message import Message, message_from_wire
from portalmq.transport import CALL_TIMEOUT_S, Bootstrap, Request, Transport, decode_answer

# A consumer that waits asks again this often: a broker that is paused holds it no longer.
RECEIVE_WAIT_S = 10.0
LOOK_UP_WITHIN_S = 5.0


class Consumer:
    """Receives messages of `topics` for a group. For one thread; ack, nack, extend and close may come from others.

        for message in Consumer("orders", group="billing"):
            handle(message)

    Messages are delivered at least once: a message whose lease runs out, or that is given back, comes again with a
    higher `delivery_count`.
    """

    def __init__(
        self,
        *topics: str,
        group: str = "default",
        bootstrap: Bootstrap = None,
        mode: Literal["queue"] = "queue",
        delivery: Literal["at_least_once"] = "at_least_once",
        max_messages: int = 100,
        visibility_timeout_s: float = 30,
        start: Literal["earliest", "latest"] = "earliest",
        manual_ack: bool = False,
        idle_timeout_s: float | None = None,
        token: str | None = None,
    ) -> None:
        """`max_messages`: how many are fetched at once; choose 1 when handling one takes long. `start` counts when the
        group meets a partition for the first time. `idle_timeout_s`: iteration ends when nothing came for so long.
        """
        if not topics:
            raise ValueError("name at least one topic")
        if mode != "queue":
            raise ValueError(f"mode={mode!r} is not supported yet: this version consumes in mode='queue'")
        if delivery != "at_least_once":
            raise ValueError(f"delivery={delivery!r} is not supported yet: this version delivers 'at_least_once'")
        if start not in ("earliest", "latest"):
            raise ValueError(f"start={start!r}: use 'earliest' or 'latest'")
        if not 1 <= max_messages <= wire.RECEIVE_MESSAGES_MAX:
            raise ValueError(f"max_messages must be 1 to {wire.RECEIVE_MESSAGES_MAX}")
        if not 1 <= visibility_timeout_s * 1000 <= wire.VISIBILITY_TIMEOUT_MS_MAX:
            raise ValueError(f"visibility_timeout_s must be 0.001 to {wire.VISIBILITY_TIMEOUT_MS_MAX // 1000}")
        self.topics = tuple(wire.check_name(topic, "topic") for topic in topics)
        self.group = wire.check_name(group, "group")
        self._max_messages = max_messages
        self._visibility_timeout_s = visibility_timeout_s
        self._start = start
        self._manual_ack = manual_ack
        self._idle_timeout_s = idle_timeout_s
        self._name = f"python-{uuid.uuid4().hex}"
        self._attempts = 0
        self._is_prepared = False
        self._near: tuple[str, int] | None = None
        self._closed = threading.Event()
        # Two transports: close() cuts a waiting receive off, and still has to ack and nack.
        self._receiving = Transport(bootstrap, token=token)
        settling = Transport(bootstrap, token=token)
        self._settling = settling
        self._leases = Leases(settling, self.group, visibility_timeout_s)
        self._shut_down = weakref.finalize(self, _shut_down, self._closed, self._receiving, settling, self._leases)

    # --- receiving ---------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        """The next message; the one before is acked. Waits for one, up to `idle_timeout_s`."""
        messages = self._next_messages(1, self._idle_timeout_s)
        if not messages:
            raise StopIteration
        return messages[0]

    def poll(self, timeout_s: float = 1.0, max_messages: int | None = None) -> list[Message]:
        """Up to `max_messages` messages, as soon as there are any; an empty list after `timeout_s`.

        Messages of the poll before are acked, unless manual_ack is set.
        """
        if max_messages is not None and not 1 <= max_messages <= wire.RECEIVE_MESSAGES_MAX:
            raise ValueError(f"max_messages must be 1 to {wire.RECEIVE_MESSAGES_MAX}")
        return self._next_messages(max_messages or self._max_messages, timeout_s)

    def _next_messages(self, at_most: int, timeout_s: float | None) -> list[Message]:
        if self._manual_ack:
            self._leases.keep_only_waiting()
        else:
            self._leases.finish_handed()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            messages = self._take(at_most)
            if messages:
                return messages
            left_s = RECEIVE_WAIT_S if deadline is None else max(0.0, deadline - time.monotonic())
            received = self._receive(min(left_s, RECEIVE_WAIT_S), at_most)
            if not received and left_s <= 0:
                break
        return []

    def _take(self, at_most: int) -> list[Message]:
        topic = self.topics[0]
        messages: list[Message] = []
        while len(messages) < at_most and (packed := self._leases.take()) is not None:
            messages.append(message_from_wire(packed, topic, self))
        return messages

    def _receive(self, wait_s: float, at_most: int) -> bool:
        """Fetch messages and keep them. False when none came in `wait_s`."""
        try:
            self._prepare()
            self._attempts += 1
            request = wire.ReceiveRequest(
                topics=list(self.topics),
                max_messages=max(self._max_messages, at_most),
                wait_ms=round(wait_s * 1000),
                visibility_timeout_ms=round(self._visibility_timeout_s * 1000),
                consumer=self._name,
                attempt_id=f"{self._name}-{self._attempts}",
                ack=self._leases.board(),
            )
            answer = self._receiving.call(
                Request(
                    "POST",
                    wire.group_path(self.group, "receive"),
                    msgspec.json.encode(request),
                    (("Content-Type", wire.JSON), ("Accept", wire.BATCH_MSGPACK)),
                    repeatable=True,
                    near=self._near,
                    wait_s=wait_s,
                    tells_first=True,
                ),
                timeout_s=CALL_TIMEOUT_S + wait_s,
            )
            received = decode_answer(answer, wire.PackReceived)
        except BaseException as error:
            self._leases.missed()
            if isinstance(error, PortalMQError) and self._closed.is_set():
                return False
            raise
        self._leases.arrived(received.stale_receipts)
        self._leases.hold(received.messages)
        return bool(received.messages)

    def _prepare(self) -> None:
        """Give the group its start, once, before its first receive fixes it."""
        if not self._is_prepared and self._start != "earliest":
            self._receiving.send_json("PUT", wire.group_path(self.group), {"start": self._start}, object)
        self._is_prepared = True
        if self._near is None:
            self._look_up()

    def _look_up(self) -> None:
        """Choose a partition whose leader to ask: any broker would do, and that one has the shortest way. Consumers of
        one group choose at random, so that no broker has them all."""
        try:
            metadata = self._receiving.metadata([self.topics[0]], deadline=time.monotonic() + LOOK_UP_WITHIN_S)
        except PortalMQError:
            return
        places = [(topic.name, partition.partition) for topic in metadata.topics for partition in topic.partitions]
        self._near = random.choice(places) if places else None

    # --- settling ----------------------------------------------------------------------------------------------------

    def ack(self, messages: Message | Iterable[Message]) -> None:
        """Say that messages are done. Raises StaleReceipt when a lease has passed on; the others are acked all the
        same (`error.extra["results"]` tells which)."""
        self._settle("ack", messages, {})

    def nack(
        self, messages: Message | Iterable[Message], delay_s: float | None = None, reason: str | None = None
    ) -> None:
        """Give messages back for redelivery, after `delay_s` seconds (default: the group's back-off)."""
        options: dict[str, object] = {}
        if delay_s is not None:
            options["delay_ms"] = round(delay_s * 1000)
        if reason is not None:
            options["reason"] = reason[:1000]
        self._settle("nack", messages, options)

    def extend(self, messages: Message | Iterable[Message], visibility_timeout_s: float | None = None) -> None:
        """Hold leases for `visibility_timeout_s` seconds from now (default: this consumer's)."""
        seconds = self._visibility_timeout_s if visibility_timeout_s is None else visibility_timeout_s
        self._settle("extend", messages, {"visibility_timeout_ms": round(seconds * 1000)})

    def commit_with(self, messages: Message | Iterable[Message], outputs: Iterable[Output]) -> wire.Committed:
        """Say that messages of one partition are done and publish `outputs`, both or neither, and once.

        An output is a dict: `topic` and `value` (bytes, text or what JSON can say), and as wanted `key` (`Message.key`
        as it is), `headers`, `content_type`, `partition`, `delay_ms`, `deliver_at_ms`, `ttl_ms`, `priority`. Raises
        StaleReceipt when a message is another consumer's by now, or done: then nothing was done. An unknown outcome is
        repeated until it is known; after an error whose `outcome` is "unknown" the messages are not acked, and come
        again unless the commit was done.
        """
        given = [messages] if isinstance(messages, Message) else list(messages)
        # Before anything can fail: going on after an error must not ack what has no outputs.
        self._leases.withdraw([message.receipt for message in given if message.receipt is not None])
        return commit_receipts(self._settling, self.group, given, outputs)

    def _settle(self, verb: Verb, messages: Message | Iterable[Message], options: dict[str, object]) -> None:
        given = [messages] if isinstance(messages, Message) else list(messages)
        receipts = [message.receipt for message in given if message.receipt is not None]
        if len(receipts) < len(given):
            raise ValueError("a message without a receipt was browsed, not received: there is no lease to settle")
        if receipts:
            self._leases.settle(verb, receipts, options)

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End a wait in another thread, send the last acks, give the rest back. Closing twice is fine."""
        if self._manual_ack:
            self._leases.keep_only_waiting()
        self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _shut_down(closed: threading.Event, receiving: Transport, settling: Transport, leases: Leases) -> None:
    """Runs once: at close(), when the consumer is collected, or when the interpreter ends."""
    closed.set()
    receiving.close()
    leases.release()
    # Not closed: with manual_ack, other threads may still have messages in hand to ack.
    settling.rest()
