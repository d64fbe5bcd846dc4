"""The calls of a member of a stream group to its coordinator: create, join, heartbeat, seek, leave."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

import msgspec

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.consumers.subscription import Subscription
from portalmq.errors import InvalidRequest, PortalMQError
from portalmq.network.either import Either, settled
from portalmq.transport.answers import decode_answer
from portalmq.transport.calls import EitherCalls
from portalmq.transport.request import Request, json_request, with_query

_log = logging.getLogger("portalmq.consumer")

HEARTBEAT_S_MIN = 1.0
CLOSE_WITHIN_S = 5.0

T = TypeVar("T")


class CoordinatorCalls(EitherCalls, Protocol):
    """The part of a transport that calls to a coordinator need."""

    def send_once(self, path: str, body: object, kind: type[T]) -> Either[T]: ...


class GroupCalls:
    """Calls in the name of one member. Every call raises the PortalMQError of the answer, except leave."""

    def __init__(self, transport: CoordinatorCalls, subscription: Subscription, member_id: str) -> None:
        self._transport = transport
        self._subscription = subscription
        self._group = subscription.group
        self._member_id = member_id
        self._session_s = subscription.session_timeout_s

    async def create_group(self) -> None:
        """Create the group with these settings, or check that it has them. Raises GroupModeMismatch, InvalidRequest."""
        path = wire.group_path(self._group)
        # One call creates it with its delivery: between two calls other members could see another one, or a crash leave
        # it.
        wanted, settings = self._subscription.delivery, {"mode": "stream", **self._subscription.settings}
        request = json_request("PUT", with_query(path, {"delivery": wanted}), settings)
        answer = await settled(self._transport.call(request, timeout_s=self._session_s))
        delivery = decode_answer(answer, wire.GroupDescription).config.delivery
        if delivery == wanted:
            return
        if answer.status != 201:  # with 201 an older broker has created it, which ignores the parameter
            raise InvalidRequest(
                f"group {self._group!r} delivers {delivery!r}, and this consumer asks for {wanted!r}: change one of"
                " them, or take another group"
            )
        await settled(self._transport.send_json("PUT", path, {"delivery": wanted}, object))

    async def join(self) -> contract.MemberAnswer:
        request = contract.JoinRequest(list(self._subscription.topics), self._member_id, round(self._session_s * 1000))
        return await self._call(contract.members_path(self._group), request, self._session_s)

    async def heartbeat(self, generation: int) -> contract.MemberAnswer:
        path = contract.member_path(self._group, self._member_id, "heartbeat")
        # A silent broker is given up in time to ask another one within the session.
        return await self._call(path, contract.HeartbeatRequest(generation), max(HEARTBEAT_S_MIN, self._session_s / 3))

    async def _call(self, path: str, body: msgspec.Struct, timeout_s: float) -> contract.MemberAnswer:
        answer = await settled(self._transport.call(json_request("POST", path, body), timeout_s=timeout_s))
        return decode_answer(answer, contract.MemberAnswer)

    async def seek(self, topic: str, to: str | dict[str, int], partition: int | None) -> contract.SeekAnswer:
        request = contract.SeekRequest(topic, dict(to) if isinstance(to, dict) else to, partition)
        path = wire.group_path(self._group, "seek")
        return await settled(self._transport.send_once(path, request, contract.SeekAnswer))

    async def leave(self) -> None:
        """Leave the group; after a failure the session times out."""
        request = Request("DELETE", contract.member_path(self._group, self._member_id), repeatable=True)
        try:
            await settled(self._transport.call(request, timeout_s=CLOSE_WITHIN_S))
        except PortalMQError as error:
            _log.debug("could not leave group %s, its session will time out: %s", self._group, error)
