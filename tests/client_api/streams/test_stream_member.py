"""A member of a stream group, which the tests step through."""

from __future__ import annotations

from http.client import HTTPMessage
from typing import Any, Literal

import msgspec
import pytest

from portalmq import stream_wire, wire
from portalmq.consumers.subscription import Subscription
from portalmq.errors import Fenced, Unavailable
from portalmq.network.connection import HttpAnswer
from portalmq.network.either import finish
from portalmq.streams.fetch_buffer import DecodedBatch, PartitionBuffer
from portalmq.streams.member import WAIT_S, StreamMember
from portalmq.transport.reachability import Reachability
from portalmq.transport.request import Request


def member(
    member_id: str | None, transport: Any = None, delivery: Literal["at_least_once", "at_most_once"] = "at_least_once"
) -> StreamMember:
    subscription = Subscription(
        group="g",
        topics=("t",),
        settings={},
        delivery=delivery,
        manual_ack=False,
        max_messages=10,
        visibility_timeout_s=30.0,
        member_id=member_id,
        session_timeout_s=6.0,
    )
    return StreamMember(transport, transport, subscription)


@pytest.mark.parametrize(("member_id", "turns"), [(None, ["join", "join"]), ("mine", ["join"])])
def test_a_member_with_a_generated_id_rejoins_when_its_duplicate_join_fences_it(monkeypatch, member_id, turns):
    it = member(member_id)
    batch: list[str] = []

    async def turn() -> float:
        batch.append("heartbeat" if it._joined else "join")
        it._joined = True
        if len(batch) == 1:
            raise Fenced("another consumer joined")
        it.buffers.closed = True
        return 0.0

    monkeypatch.setattr(it, "_step", turn)
    finish(it._run())
    assert batch == turns


class ClosingWhileJoining:
    """Brokers whose answer to a join arrives after the consumer is closed."""

    def __init__(self) -> None:
        self.member: StreamMember | None = None
        self.asked: list[str] = []

    def call(self, request: Request, *, timeout_s: float) -> HttpAnswer:
        self.asked.append(request.method)
        answer: object = wire.GroupDescription("g", "stream", [], 0, 0, 0, 0, 0, 0, wire.GroupConfig(mode="stream"))
        if request.method == "POST":
            assert self.member is not None
            finish(self.member.close())
            answer = stream_wire.MemberAnswer(self.member.member_id, 1, [], 1000)
        return HttpAnswer(200, HTTPMessage(), msgspec.json.encode(answer))

    def rest(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(("member_id", "asked"), [(None, ["PUT", "POST", "DELETE"]), ("mine", ["PUT", "POST"])])
def test_a_consumer_that_is_closed_while_it_joins_leaves_its_partitions_to_others(
    member_id: str | None, asked: list[str]
) -> None:
    brokers = ClosingWhileJoining()
    it = brokers.member = member(member_id, brokers)
    finish(it._run())
    assert brokers.asked == asked


class ChangingLeaders:
    """Brokers that refuse the first commits."""

    def __init__(self) -> None:
        self.reachability = Reachability(lambda: 0.0)
        self.are_back = False
        self.given_s: list[float | None] = []

    def call(self, request: Request, *, timeout_s: float | None) -> HttpAnswer:
        self.given_s.append(timeout_s)
        if not self.are_back:
            raise Unavailable("a leader is elected")
        return HttpAnswer(204, HTTPMessage(), b"")


def test_a_poll_whose_messages_are_committed_first_keeps_its_time_while_leaders_change() -> None:
    brokers = ChangingLeaders()
    it = member(None, brokers, "at_most_once")
    it._running = "elsewhere"  # the member has no thread of its own
    feed = PartitionBuffer(stream_wire.AssignedPartition("t", 0, 0, 1))
    it.buffers.by_partition[feed.place] = feed
    it._batch = DecodedBatch(feed, [(0, stream_wire.FrameRecord(b"a", "text/plain"))], 0, 1)
    assert finish(it.poll(0.0, 10, None)) == []
    assert brokers.given_s == [WAIT_S]
    brokers.are_back = True
    assert [message.value for message in finish(it.poll(0.0, 10, None))] == [b"a"]
