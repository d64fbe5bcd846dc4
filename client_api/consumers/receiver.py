"""The receives of a queue group's consumer: what to ask for, at which broker, and what a failure means.

    next_messages --> the waiting messages of Leases --none--> receive (with acks) --> Leases
                                                                  |
                      the next receive is under way  <------------'   while the messages of this one are handled

A receive whose answer is lost is repeated under its attempt id, and gets the same messages under the same leases.
"""

from __future__ import annotations

import threading
import time
import uuid
from functools import partial
from typing import Protocol

from portalmq import wire
from portalmq.consumers.lease import Leases
from portalmq.consumers.prefetch import AHEAD_S, Ahead, Prefetch
from portalmq.consumers.subscription import Subscription
from portalmq.errors import GroupNotFound, PortalMQError
from portalmq.message import Message, Settler, message_from_wire
from portalmq.network.either import Either, settled
from portalmq.network.http_answer import HttpAnswer
from portalmq.transport import system_random
from portalmq.transport.answers import decode_answer
from portalmq.transport.calls import CALL_TIMEOUT_S, Answering, EitherCalls
from portalmq.transport.reachability import SILENT_S_MAX
from portalmq.transport.request import WAIT_S_MIN, Request, json_request
from portalmq.transport.retries import may_repeat

# A waiting consumer asks again after this time, so that a paused broker does not hold it for long.
RECEIVE_WAIT_S = 10.0
LOOK_UP_WITHIN_S = 5.0
AGAIN_S = 1.0
# How long close() waits for the answer of a receive; messages leased by it go back at once.
LAST_ANSWER_S = 2.0


class ClosingCalls(Protocol):
    """The end of a transport."""

    def hang_up(self) -> None: ...
    def close(self) -> Either[None]: ...


class Receiver:
    """Receives for one thread, until `closed` is set.

    One receive at a time is under way: with two (half as much again, one at a time) the broker might serve the second
    one first, and messages of a partition would come out of order.
    """

    def __init__(
        self, transport: EitherCalls, leases: Leases, subscription: Subscription, closed: threading.Event
    ) -> None:
        self._transport = transport
        self._leases = leases
        self._subscription = subscription
        self._group_path = wire.group_path(subscription.group)
        self._closed = closed
        self._name = f"python-{uuid.uuid4().hex}"
        self._attempts = 0
        # When this attempt was first sent. If its answer came to a repeat, its leases may be as old as that.
        self._attempted_at = 0.0
        self._is_repeated = False
        self._prefetch = Prefetch(subscription.max_messages, time.monotonic)
        self._is_unanswered = False
        self._asked = 0
        self._failing_since = 0.0
        self._is_prepared = False
        self._near: tuple[str, int] | None = None

    async def next_messages(
        self, at_most: int, timeout_s: float | None, consumer: Settler, *, ends: bool
    ) -> list[Message]:
        """Return up to `at_most` messages, which `consumer` settles; those before are acked, unless manual_ack is set.
        With `ends` an empty result ends an iteration."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while await self.wait_for_messages(at_most, deadline, ends=ends):
            if messages := self.take(at_most, consumer):
                return messages
        return []

    async def wait_for_messages(self, at_most: int, deadline: float | None, *, ends: bool) -> bool:
        """Return whether there are messages to take, by the deadline; those before are acked, unless manual_ack is set.

        `ends`: none ends an iteration, so it must mean that there are none.
        """
        if self._subscription.manual_ack:
            self._leases.forget_handed()
        else:
            await self._leases.finish_handed()
        while not self._closed.is_set():
            if self._leases.has_waiting:
                return True
            # The end of an iteration waits as long as messages on their way back might stay leased.
            await self._leases.wait_given_back(self._subscription.visibility_timeout_s if ends else left_s(deadline))
            is_last = deadline is not None and time.monotonic() >= deadline
            try:
                received = await self._receive(at_most, deadline)
            except PortalMQError as error:
                if deadline is None or not self._may_report_empty(error, ends=ends):
                    raise
                if not ends:
                    break
                continue
            if received is False and is_last:
                break
        return False

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

    def take(self, at_most: int, consumer: Settler) -> list[Message]:
        """Return messages that have arrived, which `consumer` settles."""
        topic = self._subscription.topics[0]
        return [message_from_wire(packed, topic, consumer) for packed in self._leases.take(at_most)]

    async def _receive(self, at_most: int, deadline: float | None) -> bool | None:
        """Fetch messages and keep them. Return False if none came in time, and None if the next receive may find some
        at once: this one ran ahead."""
        if not await self._leases.begin_receive():
            return True  # the keeper has read the answer to the one that ran ahead
        try:
            await self._prepare(deadline)
            asked = max(self._prefetch.wanted(), at_most)
            ahead = self._leases.take_ahead()
            received = await self._answer(ahead, asked, deadline)
            self._failing_since = 0.0
        except BaseException as error:
            self._leases.receive_failed()
            if isinstance(error, PortalMQError) and self._closed.is_set():
                return False
            raise
        self._leases.arrived(received)
        is_repeated, leased_at = self._is_repeated, self._attempted_at
        count = len(received.messages)
        self._prefetch.received(count)
        if ahead is not None:
            self._prefetch.came_ahead(count)
        try:
            if count >= self._asked and await self._may_run_ahead():
                await self._run_ahead(asked)
        finally:
            await self._leases.hold(received.messages, leased_at if is_repeated or ahead is not None else None)
        if count and is_repeated:
            await self._leases.renew_waiting()
        return bool(count) or (None if ahead is not None else False)

    async def _answer(self, ahead: Ahead | None, asked: int, deadline: float | None) -> wire.PackReceived:
        """Return the answer to the receive that ran ahead, or else to a new one. Repeat a failed one without acks."""
        acks: list[str] = []
        try:
            if ahead is not None:
                return await settled(ahead.read(None))
            is_repeat = self._is_unanswered
            if not is_repeat:
                self._begin_attempt()
            acks = self._leases.take_acks(self._attempt_id)
            return await self._call(asked, deadline, acks, is_repeat=is_repeat)
        except PortalMQError as error:
            is_over = not left_s(deadline) or self._closed.is_set()
            if is_over or not may_repeat(error, repeatable=True) or (ahead is None and not acks):
                raise
            self._leases.send_acks_apart()
            await settled(self._transport.pause(min(error.retry_after_s or 0.0, left_s(deadline))))
            return await self._call(asked, deadline, [], is_repeat=True)

    async def _call(self, asked: int, deadline: float | None, acks: list[str], *, is_repeat: bool) -> wire.PackReceived:
        """Return the answer to this attempt. With acks it is tried once: a new leader receives at once, and answers
        acks only when the one before it certainly delivers no more."""
        timeout_s = left_s(deadline)
        request = self._request(asked, min(timeout_s, RECEIVE_WAIT_S), acks)
        if self._failing_since:
            timeout_s = max(timeout_s, AGAIN_S)  # it failed before: allow for a change of leaders
        within_s = 0.0 if acks else timeout_s
        answer = await settled(
            self._transport.call(request, timeout_s=within_s, waits_for_last_try=True, is_repeat=is_repeat)
        )
        return self._decoded(answer)

    def _request(self, asked: int, wait_s: float, acks: list[str], *, is_ahead: bool = False) -> Request:
        self._asked = asked
        receive = wire.ReceiveRequest(
            topics=list(self._subscription.topics),
            max_messages=asked,
            wait_ms=round(wait_s * 1000),
            visibility_timeout_ms=round(self._subscription.visibility_timeout_s * 1000),
            consumer=self._name,
            attempt_id=self._attempt_id,
            ack=acks,
        )
        return json_request(
            "POST",
            f"{self._group_path}/receive",
            receive,
            accept=wire.BATCH_MSGPACK,
            near=self._near,
            wait_s=max(wait_s, WAIT_S_MIN),
            marks_first_try=True,
            prefer=wire.ACKS_LATER if is_ahead else None,
        )

    async def _read(self, call: Answering, timeout_s: float | None) -> wire.PackReceived:
        return self._decoded(await settled(call.answer(timeout_s)))

    def _begin_attempt(self) -> None:
        """Until there is an answer, a repeat of this attempt returns the messages that a broker has leased under it."""
        self._attempts += 1
        self._attempted_at = time.monotonic()
        self._is_unanswered = True

    @property
    def _attempt_id(self) -> str:
        return f"{self._name}-{self._attempts}"

    def _decoded(self, answer: HttpAnswer) -> wire.PackReceived:
        received = decode_answer(answer, wire.PackReceived)
        self._is_unanswered = False
        self._is_repeated = answer.is_repeat
        return received

    async def _may_run_ahead(self) -> bool:
        """Return whether to send the next receive now. Messages of a group without leases would be lost with this
        process; with manual_ack the time between two receives does not show how long messages are handled."""
        subscription = self._subscription
        if not subscription.prefetch or subscription.manual_ack or self._closed.is_set():
            return False
        if not self._prefetch.runs_ahead(min(AHEAD_S, subscription.visibility_timeout_s / 4)):
            return False
        if not await self._leases.group_has_leases():
            self._prefetch.came_ahead(0)
            return False
        return True

    async def _run_ahead(self, asked: int) -> None:
        """Send the next receive, with the acks known so far. It does not wait at the broker."""
        self._begin_attempt()
        call: Answering | None = None
        try:
            acks = self._leases.take_acks(self._attempt_id)
            call = await settled(self._transport.begin(self._request(asked, 0.0, acks, is_ahead=True)))
            if call is None:
                self._is_unanswered = False
            else:
                self._leases.run_ahead(Ahead(partial(self._read, call), time.monotonic()))
        finally:
            if call is None:
                self._leases.send_acks_apart()

    async def _prepare(self, deadline: float | None) -> None:
        """Apply the settings to the group once, before its first receive fixes them."""
        if not self._is_prepared:
            settings = self._subscription.settings
            if self._subscription.delivery != "at_least_once":
                settings = settings | await self._settle_delivery(deadline)
            if settings:
                within_s = left_s(deadline)
                await settled(self._transport.send_json("PUT", self._group_path, settings, object, timeout_s=within_s))
        self._is_prepared = True
        if self._near is None:
            await self._look_up(deadline)

    async def _settle_delivery(self, deadline: float | None) -> dict[str, object]:
        """Return the delivery as a setting for a missing group; check that of an existing one. Raises ValueError if
        they differ."""
        wanted = self._subscription.delivery
        try:
            group = await settled(
                self._transport.get(self._group_path, wire.GroupDescription, timeout_s=left_s(deadline))
            )
        except GroupNotFound:
            return {"delivery": wanted}
        if group.config.delivery != wanted:
            raise ValueError(
                f"group {self._subscription.group!r} delivers {group.config.delivery!r}, and this consumer asks for"
                f" {wanted!r}: change one of them, or take another group"
            )
        return {}

    async def _look_up(self, deadline: float | None) -> None:
        """Choose a partition whose leader to ask: any broker would do, and that one forwards least. Consumers of one
        group choose at random, so that they spread over brokers."""
        try:
            within_s = min(LOOK_UP_WITHIN_S, max(AGAIN_S, left_s(deadline)))
            until = time.monotonic() + within_s
            metadata = await settled(self._transport.metadata([self._subscription.topics[0]], deadline=until))
        except PortalMQError:
            return
        places = [(topic.name, partition.partition) for topic in metadata.topics for partition in topic.partitions]
        self._near = system_random.choice(places) if places else None
        self._leases.ask_near(self._near)


async def end_receiving(receiving: ClosingCalls, leases: Leases, last_answer_s: float) -> None:
    """End a receive under way, whose broker may answer within `last_answer_s`, and release what is leased."""
    receiving.hang_up()
    await leases.end_receives(last_answer_s)
    await settled(receiving.close())
    await leases.release(last_answer_s)


def left_s(deadline: float | None) -> float:
    return CALL_TIMEOUT_S if deadline is None else max(0.0, deadline - time.monotonic())
