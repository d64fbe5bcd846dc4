"""The receives of a queue group's consumer: what to ask for, at which broker, and what a failure means.

    next_messages --> the waiting messages of Leases --none--> receive (with acks) --> Leases

A receive whose answer is lost is repeated under its attempt id, and gets the same messages under the same leases.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable

from portalmq import wire
from portalmq.consumers.lease import Leases
from portalmq.consumers.subscription import Subscription
from portalmq.errors import GroupNotFound, PortalMQError
from portalmq.message import Message, Settler, message_from_wire
from portalmq.network.http_answer import HttpAnswer
from portalmq.transport import system_random
from portalmq.transport.answers import decode_answer
from portalmq.transport.reachability import SILENT_S_MAX
from portalmq.transport.request import WAIT_S_MIN, json_request
from portalmq.transport.retries import may_repeat
from portalmq.transport.transport import CALL_TIMEOUT_S, Transport

# A waiting consumer asks again after this time, so that a paused broker does not hold it for long.
RECEIVE_WAIT_S = 10.0
LOOK_UP_WITHIN_S = 5.0
AGAIN_S = 1.0
FIRST_MESSAGES = 10
AHEAD_S = 1.0


class Prefetch:
    """The number of messages that a consumer fetches at once, at most `most`: those it handles in a second, so that
    others get the rest.

    The first fetch is a guess; later ones follow from how long the previous messages were handled. Messages that a
    wrong guess holds back behind a slow one are returned to the group (see lease.py).
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._next = min(FIRST_MESSAGES, most)
        self._count = 0
        self._received_at = 0.0

    def wanted(self) -> int:
        """Return how many to fetch, now that the messages of the latest fetch are handled."""
        if self._count:
            took_s = self._clock() - self._received_at
            fit = self._most if took_s <= 0 else int(min(AHEAD_S * self._count / took_s, self._most))
            self._next, self._count = max(1, fit), 0
        return self._next

    def received(self, count: int) -> None:
        self._count, self._received_at = count, self._clock()


class Receiver:
    """Receives for one thread, until `closed` is set."""

    def __init__(
        self, transport: Transport, leases: Leases, subscription: Subscription, closed: threading.Event
    ) -> None:
        self._transport = transport
        self._leases = leases
        self._subscription = subscription
        self._group_path = wire.group_path(subscription.group)
        self._closed = closed
        self._name = f"python-{uuid.uuid4().hex}"
        self._attempts = 0
        self._prefetch = Prefetch(subscription.max_messages, time.monotonic)
        self._is_unanswered = False
        self._failing_since = 0.0
        self._is_prepared = False
        self._near: tuple[str, int] | None = None

    def next_messages(self, at_most: int, timeout_s: float | None, consumer: Settler, *, ends: bool) -> list[Message]:
        """Return up to `at_most` messages, which `consumer` settles; those before are acked, unless manual_ack is set.

        `ends`: an empty result ends an iteration, so it must mean that there are none.
        """
        if self._subscription.manual_ack:
            self._leases.forget_handed()
        else:
            self._leases.finish_handed()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed.is_set():
            messages = self._take(at_most, consumer)
            if messages:
                return messages
            # The end of an iteration waits as long as messages on their way back might stay leased.
            self._leases.wait_given_back(self._subscription.visibility_timeout_s if ends else left_s(deadline))
            is_last = deadline is not None and time.monotonic() >= deadline
            try:
                received = self._receive(at_most, deadline)
            except PortalMQError as error:
                if deadline is None or not self._may_report_empty(error, ends=ends):
                    raise
                if not ends:
                    break
                continue
            if not received and is_last:
                break
        return []

    def _may_report_empty(self, error: PortalMQError, *, ends: bool) -> bool:
        """Return whether a receive that failed at its deadline may look like an empty one, since leaders change. The
        end of an iteration never may."""
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        reach = self._transport.reachability
        if not may_repeat(error, repeatable=True):
            return False
        if ends:
            return now < self._failing_since + (AGAIN_S if reach.is_refused else SILENT_S_MAX)
        return reach.may_report_empty() and now < self._failing_since + CALL_TIMEOUT_S

    def _take(self, at_most: int, consumer: Settler) -> list[Message]:
        topic = self._subscription.topics[0]
        messages: list[Message] = []
        while len(messages) < at_most and (packed := self._leases.take()) is not None:
            messages.append(message_from_wire(packed, topic, consumer))
        return messages

    def _receive(self, at_most: int, deadline: float | None) -> bool:
        """Fetch messages and keep them. Return False if none came in time."""
        try:
            self._leases.begin_receive()
            self._prepare(deadline)
            is_repeat = self._is_unanswered
            if not is_repeat:
                self._attempts += 1
            # Until there is an answer: a repeat of this attempt returns the messages that a broker has leased under it.
            self._is_unanswered = True
            acks = self._leases.take_acks()
            try:
                answer = self._call(at_most, deadline, acks, is_repeat=is_repeat)
            except PortalMQError as error:
                if not acks or not may_repeat(error, repeatable=True) or not left_s(deadline) or self._closed.is_set():
                    raise
                self._leases.send_acks_apart()
                self._transport.pause(min(error.retry_after_s or 0.0, left_s(deadline)))
                answer = self._call(at_most, deadline, [], is_repeat=True)
            received = decode_answer(answer, wire.PackReceived)
            self._is_unanswered, self._failing_since = False, 0.0
        except BaseException as error:
            self._leases.receive_failed()
            if isinstance(error, PortalMQError) and self._closed.is_set():
                return False
            raise
        self._leases.arrived(received.stale_receipts)
        self._leases.hold(received.messages)
        self._prefetch.received(len(received.messages))
        return bool(received.messages)

    def _call(self, at_most: int, deadline: float | None, acks: list[str], *, is_repeat: bool) -> HttpAnswer:
        """Return the answer to this attempt. With acks it is tried once: a new leader receives at once, and answers
        acks only when the one before it certainly delivers no more."""
        timeout_s = left_s(deadline)
        wait_s = min(timeout_s, RECEIVE_WAIT_S)
        if self._failing_since:
            timeout_s = max(timeout_s, AGAIN_S)  # it failed before: allow for a change of leaders
        request = wire.ReceiveRequest(
            topics=list(self._subscription.topics),
            max_messages=max(self._prefetch.wanted(), at_most),
            wait_ms=round(wait_s * 1000),
            visibility_timeout_ms=round(self._subscription.visibility_timeout_s * 1000),
            consumer=self._name,
            attempt_id=f"{self._name}-{self._attempts}",
            ack=acks,
        )
        return self._transport.call(
            json_request(
                "POST",
                f"{self._group_path}/receive",
                request,
                accept=wire.BATCH_MSGPACK,
                near=self._near,
                wait_s=max(wait_s, WAIT_S_MIN),
                marks_first_try=True,
            ),
            timeout_s=0.0 if acks else timeout_s,
            waits_for_last_try=True,
            is_repeat=is_repeat,
        )

    def _prepare(self, deadline: float | None) -> None:
        """Apply the settings to the group once, before its first receive fixes them."""
        if not self._is_prepared:
            settings = self._subscription.settings
            if self._subscription.delivery != "at_least_once":
                settings = settings | self._settle_delivery(deadline)
            if settings:
                self._transport.send_json("PUT", self._group_path, settings, object, timeout_s=left_s(deadline))
        self._is_prepared = True
        if self._near is None:
            self._look_up(deadline)

    def _settle_delivery(self, deadline: float | None) -> dict[str, object]:
        """Return the delivery as a setting for a missing group; check that of an existing one. Raises ValueError if
        they differ."""
        wanted = self._subscription.delivery
        try:
            group = self._transport.get(self._group_path, wire.GroupDescription, timeout_s=left_s(deadline))
        except GroupNotFound:
            return {"delivery": wanted}
        if group.config.delivery != wanted:
            raise ValueError(
                f"group {self._subscription.group!r} delivers {group.config.delivery!r}, and this consumer asks for"
                f" {wanted!r}: change one of them, or take another group"
            )
        return {}

    def _look_up(self, deadline: float | None) -> None:
        """Choose a partition whose leader to ask: any broker would do, and that one forwards least. Consumers of one
        group choose at random, so that they spread over brokers."""
        try:
            within_s = min(LOOK_UP_WITHIN_S, max(AGAIN_S, left_s(deadline)))
            metadata = self._transport.metadata([self._subscription.topics[0]], deadline=time.monotonic() + within_s)
        except PortalMQError:
            return
        places = [(topic.name, partition.partition) for topic in metadata.topics for partition in topic.partitions]
        self._near = system_random.choice(places) if places else None


def left_s(deadline: float | None) -> float:
    return CALL_TIMEOUT_S if deadline is None else max(0.0, deadline - time.monotonic())
