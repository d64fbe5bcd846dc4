"""Threads that fetch the messages of a queue for a channel.

A QueueReader receives for a queue group, as many messages as the channel may still take (its prefetch), in one
receive that carries the acks of those before. A TailReader follows the topic of an exchange for a transient queue,
which has no group: what is published while it does not read is not for it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from portalmq import wire
from portalmq.consumers.acks import PendingAcks
from portalmq.errors import OffsetOutOfRange, PortalMQError, TopicNotFound
from portalmq.kombu.bindings import matches
from portalmq.kombu.envelope import decode
from portalmq.kombu.leases import GroupLeases
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import WAIT_S_MIN, Request, json_request, with_query
from portalmq.transport.retries import may_repeat
from portalmq.transport.transport import Transport

_log = logging.getLogger("portalmq.kombu")

# A channel without a prefetch limit takes this many at once.
BULK = 100
# A free place waits this long for others, so that one receive fills them all.
LINGER_S = 0.003
# Several messages that fill no receive are a flow: its next ones gather for this long, so that a receive, which costs
# the brokers a commit, takes more of them. Messages that come one at a time are not kept waiting.
GATHER_S = 0.005
# Failures that a repeat may help are repeated for this long; then kombu connects again.
FAILING_S_MAX = 60.0
PAUSE_S = 0.25
END_S_MAX = 3.0
LOOK_UP_S_MAX = 2.0


class Places(Protocol):
    """What a reader needs of its channel."""

    def wait_for_places(self, reader: ReaderThread) -> int:
        """Wait until the channel may take messages; return how many, or 0 once the reader is stopped."""

    def free_places(self) -> int: ...

    def is_shared(self) -> bool:
        """Return whether several readers share the places."""


class ReaderThread(threading.Thread):
    """Reads for one queue until `stop`."""

    def __init__(self, name: str, transport: Transport, on_failure: Callable[[Exception], None]) -> None:
        super().__init__(name=f"portalmq-kombu-{name}", daemon=True)
        self._transport = transport
        self._on_failure = on_failure
        self.stopped = threading.Event()

    def run(self) -> None:
        failing_since: float | None = None
        while not self.stopped.is_set():
            try:
                self.read()
                failing_since = None
            except PortalMQError as error:
                if self.stopped.is_set():
                    return
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                if not may_repeat(error, repeatable=True) or now - failing_since > FAILING_S_MAX:
                    self._on_failure(error)
                    return
                self.stopped.wait(error.retry_after_s or PAUSE_S)
            except Exception as error:  # noqa: BLE001 - the connection's thread raises it
                if not self.stopped.is_set():
                    _log.exception("a reader ended")
                    self._on_failure(error)
                return

    def read(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Stop: a broker answers a waiting receive at once. What it has leased by then is given back."""
        self.stopped.set()
        self._transport.hang_up()
        if self.is_alive() and self is not threading.current_thread():
            self.join(END_S_MAX)
        self._transport.close()


class QueueReader(ReaderThread):
    def __init__(
        self,
        queue: str,
        topics: Sequence[str],
        leases: GroupLeases,
        places: Places,
        transport: Transport,
        *,
        visibility_timeout_s: float,
        wait_s: float,
        turn: threading.Lock,
        deliver: Callable[[Sequence[wire.PackMessageOut]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """`turn` is held by one reader of the channel at a time while it asks for what is there."""
        super().__init__(queue, transport, on_failure)
        self._leases = leases
        self._places = places
        self._wait_s = wait_s
        self._turn = turn
        self._deliver = deliver
        self._receives = Receives(transport, leases.group, topics, visibility_timeout_s, leases.acks)
        self._flows = False

    def read(self) -> None:
        if self._flows:
            self.stopped.wait(GATHER_S)
        if not self._places.wait_for_places(self):
            return
        if self._places.is_shared():
            # A queue with messages answers at once, and within the turn the number of free places is exact.
            with self._turn:
                free = self._places.free_places()
                if not free or self._receive(free, 0.0):
                    return
        if free := self._places.free_places():
            self._receive(free, self._wait_s)

    def _receive(self, free: int, wait_s: float) -> bool:
        try:
            received = self._receives.receive(free, wait_s)
        except BaseException:
            self._leases.receive_failed()
            raise
        self._leases.arrived(received)
        messages = received.messages
        self._flows = 1 < len(messages) < free
        receipts = [message.receipt for message in messages if message.receipt is not None]
        if not messages:
            return False
        self._leases.hold(receipts, time.monotonic())
        # In a long poll other readers may have filled the places.
        taken = 0 if self.stopped.is_set() else min(len(messages), self._places.free_places())
        self._deliver(messages[:taken])
        if receipts[taken:]:
            self._leases.give_back(receipts[taken:], "the worker has enough")
        return True


class Receives:
    """Receives for a group, each under an id, so that one whose answer was lost can be repeated."""

    def __init__(
        self,
        transport: Transport,
        group: str,
        topics: Sequence[str],
        visibility_timeout_s: float,
        acks: PendingAcks | None,
    ) -> None:
        self._transport = transport
        self._path = wire.group_path(group, "receive")
        self._topics = list(topics)
        self._visibility_ms = round(visibility_timeout_s * 1000)
        self._acks = acks
        self._name = f"kombu-{uuid.uuid4().hex}"
        self._attempts = 0
        self._is_unanswered = False
        self._near: tuple[str, int] | None = None

    def receive(self, at_most: int, wait_s: float, timeout_s: float | None = None) -> wire.PackReceived:
        """Receive once. Raises PortalMQError; then the next call repeats this one."""
        if self._near is None:
            self._look_up()
        is_repeat = self._is_unanswered
        if not is_repeat:
            self._attempts += 1
        attempt_id = f"{self._name}-{self._attempts}"
        acks = [] if self._acks is None or is_repeat or self._acks.are_in_receive else self._acks.take(attempt_id)
        self._is_unanswered = True
        body = wire.ReceiveRequest(
            topics=self._topics,
            max_messages=at_most,
            wait_ms=round(wait_s * 1000),
            visibility_timeout_ms=self._visibility_ms,
            consumer=self._name,
            attempt_id=attempt_id,
            ack=acks,
        )
        request = json_request(
            "POST",
            self._path,
            body,
            accept=wire.BATCH_MSGPACK,
            near=self._near,
            wait_s=max(wait_s, WAIT_S_MIN),
            marks_first_try=True,
            prefer=wire.ACKS_LATER if acks else None,
        )
        # With acks it is tried once: a new leader answers acks only when the one before it is certain to be gone.
        within_s = 0.0 if acks else (timeout_s or FAILING_S_MAX / 4)
        answer = self._transport.call(request, timeout_s=within_s, waits_for_last_try=True, is_repeat=is_repeat)
        received = decode_answer(answer, wire.PackReceived)
        self._is_unanswered = False
        return received

    def _look_up(self) -> None:
        """Learn the leader, who forwards least. Any broker would do."""
        self._near = self._topics[0], 0
        with contextlib.suppress(PortalMQError):
            self._transport.metadata(self._topics, deadline=time.monotonic() + LOOK_UP_S_MAX)


Wants = Callable[[wire.PackMessageOut], bool]


def is_routed(kind: str, bound_key: str, message: wire.PackMessageOut) -> bool:
    """Return whether a transient queue that is bound with this key gets the message."""
    if kind == "fanout":
        return True
    info = decode(message.value, 0, redelivered=False)["properties"]["delivery_info"]
    return matches(kind, bound_key, str(info.get("routing_key", "")))


def either_wants(first: Wants, second: Wants) -> Wants:
    return lambda message: first(message) or second(message)


class Tail:
    """A position in the topic of an exchange, and which of its messages are for a transient queue."""

    def __init__(self, topic: str, wants: Wants) -> None:
        self.topic = topic
        self.wants = wants
        self.offset: int | str = "latest"

    def read(self, transport: Transport, wait_s: float, limit: int = BULK) -> list[wire.PackMessageOut]:
        """Return the queue's messages of one page, those of greater priority first."""
        query: dict[str, object] = {"limit": limit, "offset": self.offset}
        if wait_s:
            query["wait_ms"] = round(wait_s * 1000)
        request = Request(
            "GET",
            with_query(wire.partition_messages_path(self.topic, 0), query),
            headers=(("Accept", wire.BATCH_MSGPACK),),
            repeatable=True,
            leader_of=(self.topic, 0),
            wait_s=wait_s,
        )
        try:
            answer = transport.call(request, timeout_s=FAILING_S_MAX / 4, waits_for_last_try=True)
        except OffsetOutOfRange:
            _log.warning("%s: messages were deleted before a transient queue had read them", self.topic)
            self.offset = "earliest"
            return []
        except TopicNotFound:
            self.offset = "earliest"
            raise
        page = decode_answer(answer, wire.PackBrowsePage)
        self.offset = page.next_offset
        now_ms = time.time() * 1000
        wanted = [
            message
            for message in page.messages
            if (message.expires_at_ms is None or message.expires_at_ms > now_ms) and self.wants(message)
        ]
        return sorted(wanted, key=lambda message: -message.priority)


class TailReader(ReaderThread):
    def __init__(
        self,
        queue: str,
        tail: Tail,
        places: Places,
        transport: Transport,
        *,
        wait_s: float,
        deliver: Callable[[Sequence[wire.PackMessageOut]], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        super().__init__(queue, transport, on_failure)
        self._tail = tail
        self._places = places
        self._wait_s = wait_s
        self._deliver = deliver

    def read(self) -> None:
        if free := self._places.wait_for_places(self):
            self._deliver(self._tail.read(self._transport, self._wait_s, limit=free))
