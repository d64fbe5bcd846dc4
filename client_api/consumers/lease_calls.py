"""The calls to a queue group that settle or extend leases."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from portalmq import wire
from portalmq.consumers.acks import stale_among
from portalmq.errors import PortalMQError, StaleReceipt
from portalmq.message import Message
from portalmq.network.either import settled
from portalmq.transport.answers import decode_answer
from portalmq.transport.calls import EitherCalls
from portalmq.transport.request import Request, json_request

_log = logging.getLogger("portalmq.consumer")

LOOK_TIMEOUT_S = 1.0
# A broker whose peer stands still answers a look at the group late. The next look may take twice as long, up to the
# second bound. One for which a receive waits takes no longer than the third; one that only decides whether to fetch
# ahead comes after so many times what the one before took in vain.
GROUP_LOOK_TIMEOUT_S = 0.3
GROUP_LOOK_TIMEOUT_S_MAX = 5.0
HURRIED_LOOK_TIMEOUT_S_MAX = 1.0
HURRIED_LOOK_PAUSE = 10

RELEASE_OPTIONS: dict[str, object] = {"unseen": True, "delay_ms": 0}

Verb = Literal["ack", "nack", "extend"]


def receipts_of(messages: Message | Iterable[Message]) -> list[str]:
    """Return the receipts of messages to settle. Raises ValueError if one has none."""
    given = [messages] if isinstance(messages, Message) else list(messages)
    receipts = [message.receipt for message in given if message.receipt is not None]
    if len(receipts) < len(given):
        raise ValueError("a message without a receipt was browsed, not received: there is no lease to settle")
    return receipts


def nack_options(delay_s: float | None, reason: str | None) -> dict[str, object]:
    options: dict[str, object] = {}
    if delay_s is not None:
        options["delay_ms"] = round(delay_s * 1000)
    if reason is not None:
        options["reason"] = reason[:1000]
    return options


def reject_options(reason: str | None) -> dict[str, object]:
    return {"dead": True} | nack_options(None, reason)


def extend_options(visibility_timeout_s: float) -> dict[str, object]:
    return {"visibility_timeout_ms": round(visibility_timeout_s * 1000)}


class LeaseCalls:
    """Calls with receipts. `timeout_s` bounds those that name no time."""

    def __init__(
        self,
        transport: EitherCalls,
        group: str,
        visibility_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._group = group
        self._visibility_timeout_ms = round(visibility_timeout_s * 1000)
        # Whether the group leases messages at all (None: not known). With at_most_once they are acked at delivery.
        self.group_leases: bool | None = None
        self.timeout_s: float | None = None
        self._group_look_s = GROUP_LOOK_TIMEOUT_S
        self._look_again_at = -math.inf
        # A partition whose leader is asked about the group: another broker may stand still for long.
        self.near: tuple[str, int] | None = None

    async def settle(
        self, verb: Verb, receipts: list[str], options: dict[str, object], timeout_s: float | None = None
    ) -> None:
        request = json_request("POST", wire.group_path(self._group, verb), {"receipts": receipts, **options})
        await settled(self._transport.call(request, timeout_s=self.timeout_s or timeout_s))

    async def extend(self, receipts: Sequence[str], timeout_s: float | None = None) -> set[str]:
        """Extend leases from now on, of any number of messages. Return the receipts of those that are lost."""
        options, stale = {"visibility_timeout_ms": self._visibility_timeout_ms}, set[str]()
        for start in range(0, len(receipts), wire.RECEIVE_MESSAGES_MAX):
            some = list(receipts[start : start + wire.RECEIVE_MESSAGES_MAX])
            try:
                await self.settle("extend", some, dict(options), timeout_s)
            except StaleReceipt as error:
                stale |= stale_among(error, some)
        return stale

    async def give_back_unseen(self, receipts: list[str], reason: str) -> None:
        """Return messages that were never handed out: this does not count as a delivery."""
        await self.give_back(receipts, {"reason": reason, "delay_ms": 0, "unseen": True})

    async def give_back(self, receipts: list[str], options: dict[str, object]) -> None:
        """Return messages. After a failure their leases expire."""
        if not receipts:
            return
        try:
            await self.settle("nack", receipts, options)
        except PortalMQError as error:
            _log.debug("could not return %d messages: %s", len(receipts), error)

    async def group_has_leases(self, *, hurried: bool = False, rarely: bool = False) -> bool | None:
        """Return whether the group leases messages; None if no broker answers in time, or with `rarely` if none did a
        moment ago. `hurried`: a receive waits for it."""
        if self.group_leases is None and not (rarely and self._clock() < self._look_again_at):
            await self._look_at_group(min(self._group_look_s, HURRIED_LOOK_TIMEOUT_S_MAX if hurried else math.inf))
        return self.group_leases

    async def _look_at_group(self, timeout_s: float) -> None:
        request = Request("GET", wire.group_path(self._group), repeatable=True, near=self.near, may_be_slow=True)
        began = self._clock()
        try:
            answer = await settled(self._transport.call(request, timeout_s=timeout_s))
            group = decode_answer(answer, wire.GroupDescription)
        except PortalMQError:
            now = self._clock()
            self._look_again_at = now + HURRIED_LOOK_PAUSE * min(now - began, HURRIED_LOOK_TIMEOUT_S_MAX)
            self._group_look_s = min(2 * self._group_look_s, GROUP_LOOK_TIMEOUT_S_MAX)
        else:
            self.group_leases = group.config.delivery != "at_most_once"
