"""The commit call: receipts or an offset, and messages to publish, in JSON or MessagePack.

{"ack": [receipts], "publish": [{"topic", …message}]}                                      a queue group
{"member_id", "generation", "offsets": [{"topic", "partition", "offset", "committed"}], "publish"}
                                                                                           a stream group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from portalmq import wire
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.api.incoming import messages_per_turn
from portalmq.broker.api.record_fields import record_of_json, record_of_pack
from portalmq.broker.api.request_context import RequestContext, ResponseParts, accepts_packed, encoded, may_forward
from portalmq.broker.cluster.rpc.queues import MemberOffset
from portalmq.broker.partition.yielding import in_turns
from portalmq.broker.queues.commit import OutputMessage
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest


def commit(context: RequestContext, request: HttpRequest, group: str) -> ResponseParts:
    """Acknowledge input and publish output: both or neither."""
    wire.check_name(group, "group")
    body, now_ms = context.body_of(request), context.broker.wall_ms()
    wanted: wire.JsonCommit | wire.PackCommit
    record_of: Callable[..., Record]
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() == wire.BATCH_MSGPACK:
        wanted, record_of = wire.decode_msgpack(body, wire.PackCommit), record_of_pack
    else:
        wanted, record_of = wire.decode_json(body, wire.JsonCommit), record_of_json
    publish: Sequence[Any] = wanted.publish
    publications = [
        _publication(each, record_of(each, f"message {index} to publish", now_ms))
        for index, each in enumerate(in_turns(publish, messages_per_turn(publish, len(body))))
    ]
    committed = _committed(context, group, wanted, publications, forward=may_forward(request))
    return encoded(committed, packed=accepts_packed(request))


def _publication(message: wire.JsonOutput | wire.PackOutput, record: Record) -> OutputMessage:
    if message.idempotency_key is not None:
        raise InvalidRequest("a commit appends its messages exactly once: give them no idempotency_key")
    return OutputMessage(wire.check_name(message.topic, "topic"), record, message.partition)


def _committed(
    context: RequestContext,
    group: str,
    wanted: wire.JsonCommit | wire.PackCommit,
    publications: list[OutputMessage],
    *,
    forward: bool,
) -> wire.Committed:
    stream = (wanted.member_id, wanted.generation, wanted.offsets)
    if wanted.ack is not None:
        if any(each is not None for each in stream):
            raise InvalidRequest("a commit has `ack` (queue groups), or member_id, generation and offsets (streams)")
        return context.broker.group_commits.commit_receipts(group, wanted.ack, publications, forward=forward)
    if wanted.member_id is None or wanted.generation is None or wanted.offsets is None:
        raise InvalidRequest(
            "a commit needs what is done: `ack` with receipts, or, in a stream group, member_id, generation and offsets"
        )
    place = wanted.offsets[0]
    wire.check_name(place.topic, "topic")
    shown = MemberOffset(wanted.member_id, wanted.generation, place.offset, place.committed)
    return context.broker.group_commits.commit_offset(
        group, place.topic, place.partition, shown, publications, forward=forward
    )
