"""A message in the old protocols: one JSON value. Text is stored as text, anything else as the JSON that the client
wrote, so a number keeps its digits. Other bytes are base64, in a member of another name."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgspec

from portalmq import wire
from portalmq.broker.api.request_context import RequestContext
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.protocols import DEFAULT
from portalmq.broker.queues.settle import Verdict
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, PortalMQError

NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# The record of a PendingMessage.
record_of_pending = attrgetter("stored.record")

_decode_any = msgspec.json.Decoder().decode


class MessageBody(msgspec.Struct, kw_only=True):
    """The members of a request body that carry a message: `message`, or `message_base64`."""

    example: ClassVar = {"message": "text"}

    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    message_base64: str | msgspec.UnsetType = msgspec.UNSET

    def record(self) -> Record:
        """Return the record to store. Raises InvalidRequest."""
        if isinstance(self.message, msgspec.Raw) and self.message_base64 is msgspec.UNSET:
            return record_of(self.message)
        if isinstance(self.message_base64, str) and self.message is msgspec.UNSET:
            return Record(wire.decode_base64(self.message_base64, "message_base64"), wire.BYTES)
        raise InvalidRequest("give the message as `message` (text, or any JSON) or as `message_base64`, and not both")


def record_of(raw: msgspec.Raw) -> Record:
    """Return the record of a JSON value. Raises InvalidRequest when it is not valid."""
    written = bytes(raw)
    try:
        message = _decode_any(written)
        return Record(message.encode(), wire.TEXT) if isinstance(message, str) else Record(written, wire.JSON)
    except NOT_JSON as fault:
        raise InvalidRequest(f"the message is no valid JSON: {fault}") from None


def message_member(record: Record, name: str = "message") -> dict[str, Any]:
    """Return the message as a member of an answer: `name`, or `<name>_base64`."""
    try:
        text = record.value.decode("utf-8")
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(record.value).decode("ascii")}
    if wire.is_json_type(record.content_type):
        try:
            _decode_any(record.value)
            return {name: msgspec.Raw(record.value)}
        except NOT_JSON:
            pass  # not JSON, whatever its content type says: shown as text, it is what was sent
    return {name: text}


# The optional first part is a topic's mark.
_KEY = re.compile(r"(?:([0-9a-f]{8})-)?([0-9]{1,19})-([0-9]{1,19})", re.ASCII)


class MessageKey(NamedTuple):
    """`<mark>-<partition>-<offset>`: the position of a message, and the mark of its topic. A key of a deleted queue
    therefore names no message of a new queue with the same name. `mark` is "" in keys without one, such as the ids of
    other protocols."""

    mark: str
    partition: int
    offset: int

    def __str__(self) -> str:
        place = f"{self.partition}-{self.offset}"
        return f"{self.mark}-{place}" if self.mark else place


def parse_key(text: str) -> MessageKey:
    """Parse a key. Raises InvalidRequest."""
    found = _KEY.fullmatch(text)
    if found is not None:
        mark, partition, offset = found.groups()
        key = MessageKey(mark or "", int(partition), int(offset))
        if max(key.partition, key.offset) <= wire.INTEGER_MAX:
            return key
    raise InvalidRequest(f"{text[:100]!r} is not a message's key: use the key that came with the message")


def produce_one(context: RequestContext, topic: str, record: Record, key: str | None = None) -> wire.Produced:
    """Produce a message, under an idempotency key if given. Raises its error."""
    (produced,) = context.broker.produce(topic, ProduceRequest([record], idempotency_key=key))
    if isinstance(produced, PortalMQError):
        raise produced
    return produced


def is_done(verdict: Verdict) -> bool:
    """Return whether an ack counted. Raises the error of an unknown outcome."""
    if isinstance(verdict, PortalMQError):
        raise verdict
    return verdict


def finish(context: RequestContext, queue: str, keys: Sequence[MessageKey]) -> list[Verdict]:
    """Ack messages by key for the group of the older queues; one verdict each. Raises TopicNotFound,
    PartitionNotFound."""
    places = [(key.partition, key.offset) for key in keys]
    return context.broker.offset_acks.finish(DEFAULT, queue, places, marks=[key.mark for key in keys])


# An id is one integer: the offset itself in partition 0, so ids of a queue with one partition are its offsets.
_OFFSET_BITS = 40


def id_of(partition: int, offset: int) -> int:
    """Return a message's id. 10 bits of partition and 40 of offset stay below 2^53, exact in every JSON reader."""
    return (partition << _OFFSET_BITS) | offset


def place_of_id(number: int) -> tuple[int, int]:
    return number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1)
