"""MiniQ's commands, each one JSON object: {"type", "payload": {"queue", ...}}, answered {"status": "ok", ...}.

    CREATE_QUEUE                  {queue, created}
    QUEUE_SIZE                    {queue, size, ready, in_flight, scheduled}: size is all that is not deleted
    DELETE_MSG   id, or ids       {queue, id}, or {queue, ids, deleted: [true, ...]}
    PRODUCE_MSG, CONSUME          {queue}: the queue exists; it is created if the cluster creates topics on first use

All commands are executed here: `POST /miniq/command` of any broker. Port 5557 of `portalmq zeromq` forwards to it.
Every command is idempotent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.request_context import RequestContext, answer
from portalmq.broker.protocols import DEFAULT
from portalmq.broker.protocols.payload import MessageKey, finish, is_done, parse_key
from portalmq.errors import InvalidRequest, MessageNotFound, PartitionNotFound, TopicNotFound

IDS_MAX = 1_000


class Payload(msgspec.Struct):
    queue: str = DEFAULT
    id: str | None = None
    ids: list[str] | None = None
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class Command(msgspec.Struct):
    type: str
    payload: Payload = msgspec.field(default_factory=Payload)


def command(context: RequestContext) -> Response:
    given = wire.decode_json(context.body(), Command)
    carry_out = COMMANDS.get(given.type)
    if carry_out is None:
        raise InvalidRequest(f"there is no command {given.type[:100]!r}; known: {', '.join(COMMANDS)}")
    queue = wire.check_name(given.payload.queue, "queue")
    try:
        done = carry_out(context, queue, given.payload)
    except TopicNotFound as error:
        # Name the command: the client may know no other protocol.
        detail = f"there is no queue {queue!r}: make it with CREATE_QUEUE"
        raise TopicNotFound(detail, retryable=error.retryable, outcome=error.outcome) from None
    return answer({"status": "ok", "queue": queue, **done})


def _create(context: RequestContext, queue: str, payload: Payload) -> dict[str, Any]:
    _, created = context.broker.create_topic(queue, wire.CreateTopic())
    return {"created": created}


def _size(context: RequestContext, queue: str, payload: Payload) -> dict[str, Any]:
    size = context.broker.queue_sizes.size(DEFAULT, queue)
    return {"size": size.size, "ready": size.ready, "in_flight": size.in_flight, "scheduled": size.scheduled}


def _delete(context: RequestContext, queue: str, payload: Payload) -> dict[str, Any]:
    if payload.ids is not None:
        if len(payload.ids) > IDS_MAX:
            raise InvalidRequest(f"{len(payload.ids)} ids at once, {IDS_MAX} at most")
        return {"ids": payload.ids, "deleted": _finished(context, queue, [parse_key(each) for each in payload.ids])}
    if payload.id is None:
        raise InvalidRequest("name the message to be deleted: the `id` that came with it")
    (deleted,) = _finished(context, queue, [parse_key(payload.id)])
    if not deleted:
        raise MessageNotFound(f"queue {queue!r} has no message {payload.id!r} to be deleted")
    return {"id": payload.id}


def _finished(context: RequestContext, queue: str, keys: list[MessageKey]) -> list[bool]:
    """Ack messages; True for each that existed. Raises when the outcome of one is unknown: repeating is safe."""
    if not keys:
        return []
    try:
        verdicts = finish(context, queue, keys)
    except PartitionNotFound:
        if len(keys) == 1:
            return [False]
        return [_finished(context, queue, [key])[0] for key in keys]
    return [is_done(verdict) for verdict in verdicts]


def _open(context: RequestContext, queue: str, payload: Payload) -> dict[str, Any]:
    if payload.message is not msgspec.UNSET:
        # Dropping it silently would lose it.
        raise InvalidRequest("this command carries no message: send the message to the producers' port")
    context.broker.use_topic(queue)
    return {}


COMMANDS: dict[str, Callable[[RequestContext, str, Payload], dict[str, Any]]] = {
    "CREATE_QUEUE": _create,
    "QUEUE_SIZE": _size,
    "DELETE_MSG": _delete,
    "PRODUCE_MSG": _open,
    "CONSUME": _open,
}
