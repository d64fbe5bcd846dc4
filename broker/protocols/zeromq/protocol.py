"""What travels over MiniQ's sockets, decoded and encoded. No socket is touched here.

A ROUTER socket gives a request as frames:

    | who | (more who, request ids) | empty | body |      REQ, and REQ through proxies
    | who | body |                                         DEALER without the empty frame

All before the body is the way back, and is sent back as it came. A body that is no JSON object is, at the ports of
producers and consumers, a message for, or a request of, the queue DEFAULT.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec

from portalmq import wire
from portalmq.errors import InvalidRequest, MessageTooLarge, PortalMQError

DEFAULT = "default"
HOPS_MAX = 8
ID_LENGTH_MAX = 50

PortRole = Literal["commands", "producers", "consumers"]
Envelope = tuple[bytes, ...]

_encode = msgspec.json.Encoder().encode
_decode_any = msgspec.json.Decoder().decode
_ID = re.compile(r"(?:[0-9a-f]{8}-)?[0-9]+-[0-9]+", re.ASCII)
# A number is not made one: Python refuses those of thousands of digits.
_lenient = json.JSONDecoder(strict=False, parse_int=str)


class Malformed(InvalidRequest):
    """`envelope` is where to say so."""

    def __init__(self, detail: str, envelope: Envelope) -> None:
        super().__init__(detail)
        self.envelope = envelope


def split_frames(frames: Sequence[bytes]) -> tuple[Envelope, bytes]:
    """The way back, and the body. Raises Malformed."""
    head = frames[1 : HOPS_MAX + 1]
    delimiter = next((index for index, frame in enumerate(head, 1) if not frame), 0)
    envelope, bodies = tuple(frames[: delimiter + 1]), frames[delimiter + 1 :]
    if len(bodies) != 1:
        raise Malformed(f"a request is one frame, and this one has {len(bodies)}", envelope)
    return envelope, bodies[0]


# --- requests --------------------------------------------------------------------------------------------------------


class SendRequest(NamedTuple):
    """A message for a queue. Text travels as text, bytes are JSON when `content_type` says so."""

    queue: str
    value: str | bytes
    content_type: str | None
    token: str | None


class NextRequest(NamedTuple):
    """Somebody asks for a message of a queue."""

    queue: str
    token: str | None


class CommandRequest(NamedTuple):
    """A command. `message_id` is that of a DELETE_MSG of one message, which may be carried out together with others;
    `body` is what a broker is told, without the token."""

    kind: str
    queue: str
    message_id: str | None
    body: bytes
    token: str | None


class _SendIn(msgspec.Struct):
    queue: str = DEFAULT
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token: str | None = None


class _ReceiveIn(msgspec.Struct):
    queue: str = DEFAULT
    token: str | None = None


class _CommandIn(msgspec.Struct):
    type: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    token: str | None = None


class _Payload(msgspec.Struct):
    queue: str = DEFAULT
    id: Any = None
    ids: Any = None


class _CommandOut(msgspec.Struct):
    type: str
    payload: msgspec.Raw


wire.prepare(_SendIn, _ReceiveIn, _CommandIn, _Payload)
_decode_send = msgspec.json.Decoder(_SendIn).decode
_decode_receive = msgspec.json.Decoder(_ReceiveIn).decode
_decode_command = msgspec.json.Decoder(_CommandIn).decode
_decode_payload = msgspec.json.Decoder(_Payload).decode


def parse_send(body: bytes, message_bytes_max: int) -> SendRequest:
    """Raises InvalidRequest, MessageTooLarge."""
    posted = _decode_object(_decode_send, body)
    if posted is not None:
        if posted.message is msgspec.UNSET:
            raise InvalidRequest('there is no message: send {"queue": "q", "message": ...}')
        queue = wire.check_name(posted.queue, "queue")
        value, content_type = _value_of(bytes(posted.message))
        found = SendRequest(queue, value, content_type, posted.token)
    else:
        found = SendRequest(DEFAULT, _text_or_bytes(body), None, None)
    size = len(found.value.encode()) if isinstance(found.value, str) else len(found.value)
    if size > message_bytes_max:
        raise MessageTooLarge(f"the message has {size} bytes, {message_bytes_max} at most")
    return found


def _value_of(raw: bytes) -> tuple[str | bytes, str | None]:
    """A message as it was written: text is stored as text, anything else as its JSON, with every digit."""
    try:
        value = _decode_any(raw)
        if isinstance(value, str):
            value.encode()  # half of a surrogate pair is no text
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise InvalidRequest(f"the message is not valid JSON: {fault}") from None
    return (value, None) if isinstance(value, str) else (raw, wire.JSON)


def _text_or_bytes(body: bytes) -> str | bytes:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def parse_receive(body: bytes) -> NextRequest:
    """Raises InvalidRequest."""
    asked = _decode_object(_decode_receive, body)
    if asked is None:
        return NextRequest(DEFAULT, None)
    return NextRequest(wire.check_name(asked.queue, "queue"), asked.token)


def parse_command(body: bytes) -> CommandRequest:
    """Raises InvalidRequest. What a command means is the brokers' to judge."""
    told = _decode_object(_decode_command, body)
    if told is None:
        raise InvalidRequest('a command is a JSON object: {"type": "QUEUE_SIZE", "payload": {"queue": "q"}}')
    payload = _read(_decode_payload, bytes(told.payload))
    queue = wire.check_name(payload.queue, "queue")
    single = told.type == "DELETE_MSG" and payload.ids is None and _is_id(payload.id)
    rest = _encode(_CommandOut(told.type, told.payload))
    return CommandRequest(told.type, queue, payload.id if single else None, rest, told.token)


def _is_id(given: Any) -> bool:
    return isinstance(given, str) and len(given) <= ID_LENGTH_MAX and _ID.fullmatch(given) is not None


def partition_of(message_id: str) -> int:
    return int(message_id.split("-")[-2])


def message_id_of(mark: str, partition: int, offset: int) -> str:
    """A message's id: its place, and before that the mark of its topic, so that an id which outlives its queue names
    no message of the next one of that name."""
    return f"{mark}-{partition}-{offset}" if mark else f"{partition}-{offset}"


def topic_mark(topic_id: str) -> str:
    """As the brokers make it (core/queue/receipts.py): the first four bytes of the topic's tag. "" where it is not
    known."""
    return blake2b(topic_id.encode(), digest_size=8).digest()[:4].hex() if topic_id else ""


def mark_of_receipt(receipt: str) -> str:
    """The mark of the topic that a receipt is of: it begins with the tag."""
    return base64.urlsafe_b64decode(receipt[:8])[:4].hex()


def _decode_object(decode: Any, body: bytes) -> Any:
    """What a body says that is a JSON object, None for one that is none. Raises InvalidRequest. A plain one is read
    once: what has bytes beyond ASCII may have some that are no text, where a decoder does not look."""
    if body.isascii():
        try:
            return decode(body)
        except (msgspec.DecodeError, RecursionError):
            pass
    return _read(decode, body) if _is_object(body) else None


def _is_object(body: bytes) -> bool:
    """Whether it is meant as a JSON object. Nested deeper than can be read it is taken for one, and so is what programs
    write and no standard knows: Python's NaN and half of a surrogate pair, a control character in a string, a number of
    any length, C's NUL behind the object, a byte order mark before it. Stored as it came, in the default queue, it
    would be lost to the queue that it names."""
    if body.removeprefix(codecs.BOM_UTF8).lstrip(b" \t\r\n")[:1] != b"{":
        return False
    try:
        _decode_any(body)
    except RecursionError:
        return True
    except (msgspec.DecodeError, UnicodeError):
        try:
            _lenient.decode(body.decode("utf-8-sig").rstrip("\0 \t\r\n"))
        except RecursionError:
            return True
        except ValueError:
            return False
    return True


def _read(decode: Any, body: bytes) -> Any:
    try:
        return decode(body)
    except RecursionError:
        raise InvalidRequest("the JSON object is nested too deep") from None
    except (msgspec.DecodeError, UnicodeError) as fault:
        raise InvalidRequest(f"the JSON object is not valid: {fault}") from None


# --- answers ---------------------------------------------------------------------------------------------------------


class StoredAnswer(msgspec.Struct):
    """The answer to a message that is stored."""

    id: str
    queue: str
    timestamp: int
    status: Literal["ok"] = "ok"


class ReceivedMessage(msgspec.Struct, omit_defaults=True):
    """A message as a broker hands it out. `value` is its JSON text."""

    id: str
    receipt: str
    timestamp_ms: int
    delivery_count: int = 1
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | msgspec.UnsetType = msgspec.UNSET


class MessageAnswer(msgspec.Struct):
    """The answer with a message; bytes that are no text stand in `message_base64`."""

    id: str
    queue: str
    timestamp: int
    deliveries: int
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    message_base64: str | msgspec.UnsetType = msgspec.UNSET
    status: Literal["ok"] = "ok"


wire.prepare(ReceivedMessage)


def stored(partition: int, offset: int, queue: str, timestamp_ms: int, topic_id: str = "") -> bytes:
    return _encode(StoredAnswer(message_id_of(topic_mark(topic_id), partition, offset), queue, timestamp_ms))


def handed(queue: str, message: ReceivedMessage) -> bytes:
    return _encode(
        MessageAnswer(
            message.id, queue, message.timestamp_ms, message.delivery_count, message.value, message.value_base64
        )
    )


def empty(queue: str) -> bytes:
    return _encode({"status": "ok", "queue": queue, "id": None, "message": None})


def done(**members: Any) -> bytes:
    return _encode({"status": "ok", **members})


def with_member(answer: bytes, name: str, value: Any) -> bytes:
    """A broker's answer, and what only this server knows."""
    return _encode({**msgspec.json.decode(answer, type=dict[str, msgspec.Raw]), name: value})


def refusal(error: PortalMQError) -> bytes:
    return _encode(
        {
            "status": "error",
            "detail": error.detail,
            "code": error.code,
            "retryable": error.retryable,
            "outcome": error.outcome,
        }
    )


def message_of(answer: dict[str, Any]) -> Any:
    """The message in an answer, as whoever asked gets it."""
    if "message_base64" in answer:
        return base64.b64decode(answer["message_base64"])
    return answer["message"]
