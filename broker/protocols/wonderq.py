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
from typing import Annotated, Any, ClassVar

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.query import Parameters
from portalmq.broker.api.request_context import RequestContext, answer, current
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
from portalmq.errors import PartitionNotFound, TopicNotFound
from portalmq.wire import NonNegative, Positive

LIMIT = 10
SHOWN_MAX = 1_000


class PublishedMessage(msgspec.Struct):
    example: ClassVar = {"id": 17}

    id: int


class LockedMessage(PublishedMessage):
    """The message is `message`, or `message_base64` if it is not text."""

    message: Any = msgspec.UNSET
    message_base64: str | msgspec.UnsetType = msgspec.UNSET


class LockedMessages(msgspec.Struct):
    example: ClassVar = {"messages": [{"id": 17, "message": "text"}]}

    messages: list[LockedMessage]


class QueuedMessage(LockedMessage, kw_only=True):
    state: wire.UnfinishedState
    deliveries: int
    timestamp_ms: int
    available_at_ms: int | None


class WonderQueue(wire.QueueCounts):
    """The counts of the queue, and its first messages."""

    example: ClassVar = {
        "ready": 0,
        "in_flight": 1,
        "scheduled": 0,
        "dead": 0,
        "oldest_unacked_ms": 5,
        "messages": [],
        "more": False,
    }

    messages: list[QueuedMessage]
    more: bool


def publish(context: RequestContext) -> Response:
    """Append a message."""
    wanted = wire.decode_json(context.body(), MessageBody)
    produced = produce_one(context, DEFAULT, wanted.record())
    return answer(PublishedMessage(id_of(produced.partition, produced.offset)))


class ConsumeQuery(Parameters):
    """`cid`: the consumer. `wait_ms`: more than 60,000 counts as 60,000."""

    cid: NonNegative
    limit: Annotated[int, msgspec.Meta(ge=1, le=wire.RECEIVE_MESSAGES_MAX)] = LIMIT
    wait_ms: NonNegative = 0


def consume(context: RequestContext, query: ConsumeQuery) -> Response:
    """Receive messages; they are locked for the consumer."""
    holder, wait_ms = _holder(query.cid), min(query.wait_ms, wire.WAIT_MS_MAX)
    wanted = wire.ReceiveRequest(
        [DEFAULT], max_messages=query.limit, wait_ms=wait_ms, attempt_id=f"{holder}:{uuid.uuid4().hex}", consumer=holder
    )
    with context.parked(wait_ms):
        messages = context.broker.receive_handler.receive(DEFAULT, wanted, peer_of(current()), is_first=True)
    return answer(
        {"messages": [{"id": id_of(each.partition, each.offset), **message_member(each.record)} for each in messages]}
    )


class DeleteQuery(Parameters):
    """`cid`: the consumer. `id`: the processed message."""

    cid: NonNegative
    id: NonNegative


def delete(context: RequestContext, query: DeleteQuery) -> Response:
    """Delete a message. False if the consumer does not hold its lock."""
    place, holder = place_of_id(query.id), _holder(query.cid)
    try:
        (verdict,) = context.broker.offset_acks.finish(DEFAULT, DEFAULT, [place], holder=holder)
    except (PartitionNotFound, TopicNotFound):
        verdict = False
    return answer(is_done(verdict))


def _holder(cid: int) -> str:
    return f"wonderq-{cid}"


class StateQuery(Parameters):
    """`limit`: more than 1,000 counts as 1,000."""

    limit: Positive = 100


def state(context: RequestContext, query: StateQuery) -> Response:
    """Return the counts of the queue, and its first messages."""
    limit = min(query.limit, SHOWN_MAX)
    size = QueueSize(0, 0, 0)
    found: list[PendingMessage] = []
    more = False
    with suppress(TopicNotFound):
        size = context.broker.queue_sizes.look(DEFAULT, DEFAULT)
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
