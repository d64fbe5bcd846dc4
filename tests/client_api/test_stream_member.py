"""A member of a stream group whose turns a test decides."""

from __future__ import annotations

from http.client import HTTPMessage
from typing import Any

import msgspec
import pytest

from portalmq import stream_wire, wire
from portalmq.connection import Answer
from portalmq.errors import Fenced
from portalmq.stream import StreamMember
from portalmq.transport import Request


def member(member_id: str | None, transport: Any = None) -> StreamMember:
    return StreamMember(
        transport,
        transport,
        "g",
        ["t"],
        {},
        delivery="at_least_once",
        manual_ack=False,
        member_id=member_id,
        session_timeout_s=6.0,
        max_messages=10,
    )


@pytest.mark.parametrize(("member_id", "turns"), [(None, ["join", "join"]), ("mine", ["join"])])
def test_a_member_whose_name_was_made_up_joins_again_when_a_copy_of_its_own_join_fences_it(
    monkeypatch, member_id, turns
):
    it = member(member_id)
    taken: list[str] = []

    def turn() -> float:
        taken.append("heartbeat" if it._joined else "join")
        it._joined = True
        if len(taken) == 1:
            raise Fenced("another consumer joined")
        it.feeds.closed = True
        return 0.0

    monkeypatch.setattr(it, "_turn", turn)
    it._live()
    assert taken == turns


class ClosingWhileJoining:
    """Brokers whose answer to a join comes when the consumer is closed already."""

    def __init__(self) -> None:
        self.member: StreamMember | None = None
        self.asked: list[str] = []

    def call(self, request: Request, *, timeout_s: float) -> Answer:
        self.asked.append(request.method)
        answer: object = wire.GroupDescription("g", "stream", [], 0, 0, 0, 0, 0, 0, wire.GroupConfig(mode="stream"))
        if request.method == "POST":
            assert self.member is not None
            self.member.close()
            answer = stream_wire.MemberAnswer(self.member.member_id, 1, [], 1000)
        return Answer(200, HTTPMessage(), msgspec.json.encode(answer))

    def rest(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(("member_id", "asked"), [(None, ["PUT", "POST", "DELETE"]), ("mine", ["PUT", "POST"])])
def test_a_consumer_that_is_closed_while_it_joins_leaves_its_partitions_to_others(
    member_id: str | None, asked: list[str]
) -> None:
    brokers = ClosingWhileJoining()
    it = brokers.member = member(member_id, brokers)
    it._live()
    assert brokers.asked == asked
