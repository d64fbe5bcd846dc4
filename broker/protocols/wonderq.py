"""WonderQ: a consumer receives messages under its id. The messages are locked for it until it deletes
them, or the lock expires.

    POST   /v1/publish {"message": ...}        200 {"id"}; "message_base64" for bytes
    GET    /v1/consumer?cid=7&limit=10         200 {"messages": [{id, message}]}
    DELETE /v1/consumer?cid=7&id=12            200 true, or false when that consumer does not hold the lock
    GET    /v1/queue                           200 {counts, messages: [{id, message, state, deliveries, ...}]}

Ids are integers, unique within the lifetime of the queue. The lock lasts for the group's visibility timeout (30 s by
default: `PUT /v1/groups/default {"visibility_timeout_ms": 5000}` changes it). A receive does not wait until the lock is
replicated: a lock granted just before its leader dies may be lost, and the message is delivered again. A deleted
message stays deleted.
"""

from __future__ import annotations

import uuid
from contextlib import suppress

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.request_context import RequestContext, answer, current, query
from portalmq.broker.cluster.rpc.queues import QueueSize
from portalmq.broker.partition.answer_size import first_of
from portalmq.broker.protocols import DEFAULT
from portalmq.broker.protocols.payload import (
    MessageBody,
    id_of,
    is_done,
    message_member,
    place_of_id,
    produce_one,
    record_of_pending,
)
from portalmq.broker.queues.unfinished import PendingMessage
from portalmq.errors import InvalidRequest, PartitionNotFound, TopicNotFound

LIMIT = 10
SHOWN_MAX = 1_000


def publish(context: RequestContext) -> Response:
    wanted = wire.decode_json(context.body(), MessageBody)
    produced = produce_one(context, DEFAULT, wanted.record())
    return answer({"id": id_of(produced.partition, produced.offset)})


def consume(context: RequestContext) -> Response:
    parameters = query("cid", "limit", "wait_ms")
    holder = _holder(parameters.number("cid"))
    limit = parameters.number("limit", least=1) or LIMIT
    if limit > wire.RECEIVE_MESSAGES_MAX:
        raise InvalidRequest(f"limit is {limit}, but must be at most {wire.RECEIVE_MESSAGES_MAX}")
    wait_ms = min(parameters.number("wait_ms") or 0, wire.WAIT_MS_MAX)
    wanted = wire.ReceiveRequest(
        [DEFAULT], max_messages=limit, wait_ms=wait_ms, attempt_id=f"{holder}:{uuid.uuid4().hex}", consumer=holder
    )
    with context.parked(wait_ms):
        messages = context.broker.receive_handler.receive(DEFAULT, wanted, peer_of(current()), is_first=True)
    return answer(
        {"messages": [{"id": id_of(each.partition, each.offset), **message_member(each.record)} for each in messages]}
    )


def delete(context: RequestContext) -> Response:
    parameters = query("cid", "id")
    holder, number = _holder(parameters.number("cid")), parameters.number("id")
    if number is None:
        raise InvalidRequest("name the processed message: ?cid=7&id=12")
    try:
        (verdict,) = context.broker.offset_acks.finish(DEFAULT, DEFAULT, [place_of_id(number)], holder=holder)
    except (PartitionNotFound, TopicNotFound):
        verdict = False
    return answer(is_done(verdict))


def _holder(cid: int | None) -> str:
    if cid is None:
        raise InvalidRequest("name the consumer by an integer: ?cid=7")
    return f"wonderq-{cid}"


def state(context: RequestContext) -> Response:
    """Return the counts of the queue, and its first messages."""
    limit = min(query("limit").number("limit", least=1) or 100, SHOWN_MAX)
    size = QueueSize(0, 0, 0)
    found: list[PendingMessage] = []
    more = False
    with suppress(TopicNotFound):
        # The size first: reading it starts the group, so messages not received yet are counted.
        size = context.broker.queue_sizes.size(DEFAULT, DEFAULT)
        found, more = first_of(context.broker.unfinished.messages(DEFAULT, DEFAULT), record_of_pending, limit)
    context.make_room(map(record_of_pending, found))
    messages = [
        {
            "id": id_of(each.stored.partition, each.stored.offset),
            **message_member(each.stored.record),
            "state": each.state,
            "deliveries": each.deliveries,
            "timestamp_ms": each.stored.timestamp_ms,
            "available_at_ms": each.available_at_ms,
        }
        for each in found
    ]
    return answer({**msgspec.structs.asdict(size), "messages": messages, "more": more})
