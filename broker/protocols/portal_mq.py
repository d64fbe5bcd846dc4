"""Portal MQ: a producer repeats a publish until it is acknowledged. Consumers read the current message with its
sequence number, then consume it, which advances the shared offset; one of several consumers succeeds.

    POST /publish {name, message, id}      200 {partition, offset}. With "sequence" a repeat is recognised;
                                           "message_base64" for bytes
    POST /read    {name, id}               200 {message, offset}, 204 when there is none; "wait_ms" waits for one; with
                                           "first_use" a missing topic is created, if /publish would create it
    POST /consume {name, offset}           200 when that message was the current one, otherwise 204
    POST /topic/create, delete {name}      200; /topic/exists 200 or 404
    POST /producer, /consumer ...  {id}    the same, for names of programs

The sequence number is the message's offset, combined with the partition in a topic of several partitions. Unknown
members of a JSON body are ignored.
"""

from __future__ import annotations

from itertools import count
from typing import Annotated, Any, ClassVar

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.request_context import RequestContext, answer, current, no_content
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.protocols import PORTAL_GROUP
from portalmq.broker.protocols.payload import MessageBody, id_of, message_member, place_of_id, produce_one
from portalmq.errors import InvalidRequest, NotFound, PartitionNotFound, TopicNotFound

# A waiting read of a topic with several partitions waits this long at each of them in turn.
LOOK_MS = 500
KEY_LENGTH_MAX = 255

Name = Annotated[str, msgspec.Meta(max_length=1_000, extra_json_schema={"pattern": wire.NAME_PATTERN})]
_round_robin = count()


class PublishRequest(MessageBody, kw_only=True):
    example: ClassVar = {"name": "orders", "message": "text", "id": "importer"}

    name: Name
    id: str | int | None = None
    sequence: str | int | None = None


class ReadRequest(msgspec.Struct):
    example: ClassVar = {"name": "orders", "id": "billing"}

    name: Name
    id: str | int | None = None
    wait_ms: Annotated[int, msgspec.Meta(ge=0, le=wire.WAIT_MS_MAX)] = 0
    first_use: bool = False


class ConsumeRequest(msgspec.Struct):
    example: ClassVar = {"name": "orders", "offset": 17}

    name: Name
    offset: Annotated[int, msgspec.Meta(ge=0, le=wire.INTEGER_MAX)]


class TopicBody(msgspec.Struct):
    example: ClassVar = {"name": "orders"}

    name: Name


_program_name = msgspec.Meta(extra_json_schema={"pattern": wire.NAME_PATTERN})


class ProgramBody(msgspec.Struct):
    example: ClassVar = {"id": "billing"}

    id: Annotated[str | int, _program_name]


class MessagePlace(msgspec.Struct):
    example: ClassVar = {"partition": 0, "offset": 17}

    partition: int
    offset: int


class CurrentMessage(msgspec.Struct):
    """The message is `message`, or `message_base64` if it is not text."""

    example: ClassVar = {"message": "text", "offset": 17, "timestamp_ms": 1_774_000_000_000}

    offset: int
    timestamp_ms: int
    message: Any = msgspec.UNSET
    message_base64: str | msgspec.UnsetType = msgspec.UNSET


class ConsumedOffset(msgspec.Struct):
    example: ClassVar = {"consumed": 17}

    consumed: int


class TopicAnswer(msgspec.Struct, omit_defaults=True):
    example: ClassVar = {"name": "orders"}

    name: str
    exists: bool | msgspec.UnsetType = msgspec.UNSET


class ProgramAnswer(msgspec.Struct, omit_defaults=True):
    example: ClassVar = {"id": "billing"}

    id: str
    exists: bool | msgspec.UnsetType = msgspec.UNSET


def publish(context: RequestContext) -> Response:
    """Append a message. With `sequence` a repeat is recognised."""
    wanted = wire.decode_json(context.body(), PublishRequest)
    key = None
    if wanted.sequence is not None:
        if wanted.id is None:
            raise InvalidRequest("a sequence counts the messages of a producer: name it in `id`")
        # With the length of the id: either part may contain a colon.
        key = f"{PORTAL_GROUP}:{len(str(wanted.id))}:{wanted.id}:{wanted.sequence}"
        if len(key) > KEY_LENGTH_MAX:
            raise InvalidRequest(f"`id` and `sequence` have {len(key)} characters together, {KEY_LENGTH_MAX} at most")
    topic = wire.check_name(wanted.name, "topic")
    produced = produce_one(context, topic, wanted.record(), key)
    return answer(MessagePlace(produced.partition, id_of(produced.partition, produced.offset)))


def read(context: RequestContext) -> Response:
    """Return the current message, which stays current until it is consumed."""
    wanted = wire.decode_json(context.body(), ReadRequest)
    topic = wire.check_name(wanted.name, "topic")
    with context.parked(wanted.wait_ms):
        partitions = (
            context.broker.use_topic(topic) if wanted.first_use else context.broker.shared_offsets.partitions(topic)
        )
        stored = _first_message(context, topic, partitions, wanted.wait_ms)
    if stored is None:
        return no_content()
    offset = id_of(stored.partition, stored.offset)
    return answer({**message_member(stored.record), "offset": offset, "timestamp_ms": stored.timestamp_ms})


def _first_message(context: RequestContext, topic: str, size: int, wait_ms: int) -> StoredMessage | None:
    """Return the current message of any of `size` partitions, or None; each call begins with another partition."""
    turn = next(_round_robin)
    while True:
        numbers = [(turn + step) % size for step in range(size)]
        head = context.broker.shared_offsets.first_head(PORTAL_GROUP, topic, numbers)
        if head.message is not None:
            return head.message
        if wait_ms <= 0:
            return None
        look_ms = wait_ms if size == 1 else min(wait_ms, LOOK_MS)
        context.broker.browser.browse(
            topic,
            numbers[0],
            offset=head.offset,
            limit=1,
            wait_ms=look_ms,
            peer=peer_of(current()),
        )
        wait_ms -= look_ms
        turn += 1


def consume(context: RequestContext) -> Response:
    """Advance to the next message. 204 if another one is current."""
    wanted = wire.decode_json(context.body(), ConsumeRequest)
    partition, offset = place_of_id(wanted.offset)
    try:
        advanced = context.broker.shared_offsets.advance(
            PORTAL_GROUP, wire.check_name(wanted.name, "topic"), partition, offset
        )
    except PartitionNotFound:
        advanced = False
    return answer(ConsumedOffset(wanted.offset)) if advanced else no_content()


# --- topics, producers, consumers ------------------------------------------------------------------------------------


def create_topic(context: RequestContext) -> Response:
    """Create a topic."""
    topic = _topic(context)
    context.broker.create_topic(topic, wire.CreateTopic())
    return answer(TopicAnswer(topic))


def delete_topic(context: RequestContext) -> Response:
    """Delete a topic."""
    topic = _topic(context)
    context.broker.delete_topic(topic)
    return answer(TopicAnswer(topic))


def topic_exists(context: RequestContext) -> Response:
    """Return whether a topic exists, else 404."""
    topic = _topic(context)
    try:
        context.broker.shared_offsets.partitions(topic)
    except TopicNotFound as error:
        error.extra["exists"] = False
        raise
    return answer(TopicAnswer(topic, exists=True))


def _topic(context: RequestContext) -> str:
    return wire.check_name(wire.decode_json(context.body(), TopicBody).name, "topic")


def create_program(context: RequestContext, kind: str) -> Response:
    """Register the name of a program."""
    name = _program(context, kind)
    context.broker.registry.create(kind, name)
    return answer(ProgramAnswer(name))


def delete_program(context: RequestContext, kind: str) -> Response:
    """Remove the name of a program."""
    name = _program(context, kind)
    if not context.broker.registry.delete(kind, name):
        raise NotFound(f"there is no {kind} {name!r}")
    return answer(ProgramAnswer(name))


def program_exists(context: RequestContext, kind: str) -> Response:
    """Return whether a program is registered, else 404."""
    name = _program(context, kind)
    if not context.broker.registry.has(kind, name):
        raise NotFound(f"there is no {kind} {name!r}", exists=False)
    return answer(ProgramAnswer(name, exists=True))


def _program(context: RequestContext, kind: str) -> str:
    return wire.check_name(str(wire.decode_json(context.body(), ProgramBody).id), kind)
