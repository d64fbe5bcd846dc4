"""MiniQ over HTTP: a message stays in its queue until it is confirmed.

    POST /message  {"Message": ...}   200 {key, timestamp}; any other body is the message itself
    GET  /message                     200 {message, timestamp, key}, 404 when none is available
    POST /confirm  {"Key": key}       200; 404 for an unknown key
    GET  /messages                    the whole queue, consuming nothing: {messages: [{message, timestamp, key, state}]}
    POST /miniq/command               a command, as MiniQ has them over ZeroMQ

A delivered message is leased. When the lease ends unconfirmed, it is delivered again. A broker started with
--no-confirm (MiniQ's -c) acks a message when it delivers it. ?queue=name selects another queue, that is, a topic. A key
carries a mark of its queue: a key of a deleted queue confirms nothing in a new one of the same name. Timestamps are
Unix milliseconds.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.query import Parameters, read_by
from portalmq.broker.api.request_context import RequestContext, answer, current
from portalmq.broker.partition.answer_size import first_of
from portalmq.broker.protocols import DEFAULT
from portalmq.broker.protocols.payload import (
    NOT_JSON,
    MessageKey,
    finish,
    is_done,
    message_member,
    parse_key,
    produce_one,
    record_of,
    record_of_pending,
)
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, MessageNotFound, PartitionNotFound, TopicNotFound
from portalmq.wire import NonNegative

KEY_PATTERN = "^([0-9a-f]{8}-)?[0-9]{1,19}-[0-9]{1,19}$"
COMMAND_NAMES = ("CREATE_QUEUE", "QUEUE_SIZE", "DELETE_MSG", "PRODUCE_MSG", "CONSUME")
LIST_MAX = 10_000
IDS_MAX = 1_000


class PostRequest(msgspec.Struct):
    example: ClassVar = {"Message": "text"}

    message: msgspec.Raw = msgspec.field(name="Message")


class Confirmation(msgspec.Struct):
    example: ClassVar = {"Key": "0f0f0f0f-0-17"}

    key: Annotated[str, msgspec.Meta(extra_json_schema={"pattern": KEY_PATTERN})] = msgspec.field(name="Key")


def _queue_name(text: str, what: str) -> str:
    return wire.check_name(text or DEFAULT, "queue")


QueueName = Annotated[str, read_by(_queue_name, pattern=f"{wire.NAME_PATTERN}|^$")]


class QueueQuery(Parameters):
    queue: QueueName = DEFAULT


class PostedMessage(msgspec.Struct):
    example: ClassVar = {"key": "0f0f0f0f-0-17", "timestamp": 1_774_000_000_000}

    key: str
    timestamp: int


class TakenMessage(PostedMessage):
    """The message is `message`, or `message_base64` if it is not text."""

    example: ClassVar = {"message": "text", "key": "0f0f0f0f-0-17", "timestamp": 1_774_000_000_000}

    message: Any = msgspec.UNSET
    message_base64: str | msgspec.UnsetType = msgspec.UNSET


class ListedMessage(TakenMessage, kw_only=True):
    state: wire.UnfinishedState


class ListedMessages(msgspec.Struct):
    example: ClassVar = {"messages": [], "more": False}

    messages: list[ListedMessage]
    more: bool


class ConfirmedKey(msgspec.Struct):
    example: ClassVar = {"confirmed": "0f0f0f0f-0-17"}

    confirmed: str


def post(context: RequestContext, query: QueueQuery) -> Response:
    """Append a message: the member `Message` of a JSON body, or any other body itself."""
    queue = query.queue
    # Read first: if the queue is deleted and created again during this call, the key is of the deleted one.
    mark = _mark(context, queue)
    produced = produce_one(context, queue, _posted(context.body()))
    key = MessageKey(mark or _mark(context, queue), produced.partition, produced.offset)
    return answer(PostedMessage(str(key), produced.timestamp_ms))


def _mark(context: RequestContext, queue: str) -> str:
    """Return the queue's mark; "" when it does not exist."""
    try:
        return context.broker.offset_acks.mark(queue)
    except TopicNotFound:
        return ""


def _posted(body: bytes) -> Record:
    try:
        return record_of(msgspec.json.decode(body, type=PostRequest).message)
    except (*NOT_JSON, InvalidRequest):
        pass
    try:
        body.decode("utf-8")
    except UnicodeDecodeError:
        return Record(body, wire.BYTES)
    return Record(body, wire.TEXT)


class GetQuery(QueueQuery):
    """`wait_ms`: more than 60,000 counts as 60,000."""

    wait_ms: NonNegative = 0


def get(context: RequestContext, query: GetQuery) -> Response:
    """Receive a message. It is leased, and offered again unless it is confirmed."""
    queue, wait_ms = query.queue, min(query.wait_ms, wire.WAIT_MS_MAX)
    wanted = wire.ReceiveRequest([queue], max_messages=1, wait_ms=wait_ms, attempt_id=uuid.uuid4().hex)
    with context.parked(wait_ms):
        messages = context.broker.receive_handler.receive(DEFAULT, wanted, peer_of(current()), is_first=True)
    if not messages:
        raise MessageNotFound(f"queue {queue!r} has no message available now")
    (message,) = messages
    if context.config.no_confirm:
        is_done(*context.broker.settlement.settle(DEFAULT, [message.receipt]))
    key = MessageKey(context.broker.offset_acks.mark_in(message.receipt), message.partition, message.offset)
    return answer({**message_member(message.record), "timestamp": message.timestamp_ms, "key": str(key)})


def confirm(context: RequestContext, query: QueueQuery) -> Response:
    """Confirm a message: it is done."""
    queue = query.queue
    key = wire.decode_json(context.body(), Confirmation).key
    try:
        (verdict,) = finish(context, queue, [parse_key(key)])
    except (PartitionNotFound, TopicNotFound):
        verdict = False
    if not is_done(verdict):
        raise MessageNotFound(f"queue {queue!r} has no message with the key {key[:100]!r}")
    return answer(ConfirmedKey(key))


def read_all(context: RequestContext, query: QueueQuery) -> Response:
    """Return the messages that are not confirmed, at most LIST_MAX and 16 MiB; `more` is true when there are more."""
    queue = query.queue
    mark = context.broker.offset_acks.mark(queue)
    found, more = first_of(context.broker.unfinished.messages(DEFAULT, queue), record_of_pending, LIST_MAX)
    context.make_room(map(record_of_pending, found))
    messages = [
        {
            **message_member(each.stored.record),
            "timestamp": each.stored.timestamp_ms,
            "key": str(MessageKey(mark, each.stored.partition, each.stored.offset)),
            "state": each.state,
        }
        for each in found
    ]
    return answer({"messages": messages, "more": more})


# --- commands --------------------------------------------------------------------------------------------------------


class Payload(msgspec.Struct):
    queue: wire.Name = DEFAULT
    id: str | None = None
    ids: list[str] | None = None
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class CommandAnswer(msgspec.Struct):
    """The members after `queue` depend on the command."""

    example: ClassVar = {"status": "ok", "queue": "default", "created": True}

    status: Literal["ok"]
    queue: str
    created: bool | msgspec.UnsetType = msgspec.UNSET
    size: int | msgspec.UnsetType = msgspec.UNSET
    ready: int | msgspec.UnsetType = msgspec.UNSET
    in_flight: int | msgspec.UnsetType = msgspec.UNSET
    scheduled: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    ids: list[str] | msgspec.UnsetType = msgspec.UNSET
    deleted: list[bool] | msgspec.UnsetType = msgspec.UNSET


class Command(msgspec.Struct):
    example: ClassVar = {"type": "CREATE_QUEUE", "payload": {"queue": "default"}}

    type: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(COMMAND_NAMES)})]
    payload: Payload = msgspec.field(default_factory=Payload)


def command(context: RequestContext) -> Response:
    """Execute a command: {"type", "payload": {"queue", ...}}, answered {"status": "ok", ...}. Each is idempotent.

        CREATE_QUEUE           {queue, created}
        QUEUE_SIZE             {queue, size, ready, in_flight, scheduled}: size is all that is not deleted
        DELETE_MSG id, or ids  {queue, id}, or {queue, ids, deleted: [true, ...]}
        PRODUCE_MSG, CONSUME   {queue}: the queue exists; it is created if the cluster creates topics on first use

    Port 5557 of `portalmq zeromq` forwards to it.
    """
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
    size = context.broker.queue_sizes.look(DEFAULT, queue)
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


COMMANDS: dict[str, Callable[[RequestContext, str, Payload], dict[str, Any]]] = dict(
    zip(COMMAND_NAMES, (_create, _size, _delete, _open, _open), strict=True)
)
