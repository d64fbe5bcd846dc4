"""Decoding and encoding of MiniQ's requests and replies; no sockets.

A ROUTER socket delivers a request as frames:

    | client | (more hops, request ids) | empty | body |   REQ, and REQ through proxies
    | client | body |                                      DEALER without the empty frame

All frames before the body are the envelope, which the reply repeats. At the ports of producers and consumers, a body
that is not a JSON object is a message for, or a request to, the queue DEFAULT.
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
# The ports that MiniQ's clients expect.
PORTS: dict[PortRole, int] = {"commands": 5557, "producers": 5555, "consumers": 5556}
Envelope = tuple[bytes, ...]

_encode = msgspec.json.Encoder().encode
_decode_any = msgspec.json.Decoder().decode
_ID = re.compile(r"(?:[0-9a-f]{8}-)?[0-9]+-[0-9]+", re.ASCII)
# Integers stay text: Python refuses to convert thousands of digits.
_lenient = json.JSONDecoder(strict=False, parse_int=str)


class Malformed(InvalidRequest):
    """A request with the wrong frames; `envelope` is that of the reply."""

    def __init__(self, detail: str, envelope: Envelope) -> None:
        super().__init__(detail)
        self.envelope = envelope


def split_frames(frames: Sequence[bytes]) -> tuple[Envelope, bytes]:
    """Return the envelope and the body. Raises Malformed."""
    head = frames[1 : HOPS_MAX + 1]
    delimiter = next((index for index, frame in enumerate(head, 1) if not frame), 0)
    envelope, bodies = tuple(frames[: delimiter + 1]), frames[delimiter + 1 :]
    if len(bodies) != 1:
        raise Malformed(f"a request is one frame, and this one has {len(bodies)}", envelope)
    return envelope, bodies[0]


# --- requests --------------------------------------------------------------------------------------------------------


class SendRequest(NamedTuple):
    """A message for a queue: text, or bytes, which are JSON when `content_type` says so."""

    queue: str
    value: str | bytes
    content_type: str | None
    token: str | None


class NextRequest(msgspec.Struct, frozen=True):
    """A request for the next message of a queue."""

    queue: str = DEFAULT
    token: str | None = None


class CommandRequest(NamedTuple):
    """A command. `message_id` is set for a DELETE_MSG of one message, which may be batched with others; `body` is the
    command for the broker, without the token."""

    kind: str
    queue: str
    message_id: str | None
    body: bytes
    token: str | None


class _SendIn(msgspec.Struct):
    queue: str = DEFAULT
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token: str | None = None


class _CommandIn(msgspec.Struct):
    type: str
    payload: msgspec.Raw = msgspec.Raw(b"{}")
    token: str | None = None


class _Payload(msgspec.Struct):
    queue: str = DEFAULT
    id: Any = None
    ids: Any = None


wire.prepare(_SendIn, NextRequest, _CommandIn, _Payload)
_decode_send = msgspec.json.Decoder(_SendIn).decode
_decode_receive = msgspec.json.Decoder(NextRequest).decode
_decode_command = msgspec.json.Decoder(_CommandIn).decode
_decode_payload = msgspec.json.Decoder(_Payload).decode


def parse_send(body: bytes, message_bytes_max: int) -> SendRequest:
    """Parse a request at the producers' port. Raises InvalidRequest, MessageTooLarge."""
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
    """Return the value to store and its content type: text as text, anything else as the JSON that the client wrote."""
    try:
        value = _decode_any(raw)
        if isinstance(value, str):
            value.encode()  # fails for half of a surrogate pair
    except (msgspec.DecodeError, UnicodeError, RecursionError) as fault:
        raise InvalidRequest(f"the message is not valid JSON: {fault}") from None
    return (value, None) if isinstance(value, str) else (raw, wire.JSON)


def _text_or_bytes(body: bytes) -> str | bytes:
    try:
        return body.decode()
    except UnicodeDecodeError:
        return body


def parse_receive(body: bytes) -> NextRequest:
    """Parse a request at the consumers' port. Raises InvalidRequest."""
    asked: NextRequest = _decode_object(_decode_receive, body) or NextRequest()
    wire.check_name(asked.queue, "queue")
    return asked


def parse_command(body: bytes) -> CommandRequest:
    """Parse a request at the command port. Raises InvalidRequest. The brokers check the command itself."""
    command = _decode_object(_decode_command, body)
    if command is None:
        raise InvalidRequest('a command is a JSON object: {"type": "QUEUE_SIZE", "payload": {"queue": "q"}}')
    payload = _read(_decode_payload, bytes(command.payload))
    queue = wire.check_name(payload.queue, "queue")
    single = command.type == "DELETE_MSG" and payload.ids is None and _is_id(payload.id)
    rest = _encode({"type": command.type, "payload": command.payload})
    return CommandRequest(command.type, queue, payload.id if single else None, rest, command.token)


def _is_id(given: Any) -> bool:
    return isinstance(given, str) and len(given) <= ID_LENGTH_MAX and _ID.fullmatch(given) is not None


def partition_of(message_id: str) -> int:
    return int(message_id.split("-")[-2])


def message_id_of(mark: str, partition: int, offset: int) -> str:
    """Return a message's id: the mark of its topic, if known, and its position. With the mark, an id of a deleted queue
    names no message of a new queue with the same name."""
    return f"{mark}-{partition}-{offset}" if mark else f"{partition}-{offset}"


def topic_mark(topic_id: str) -> str:
    """Return the topic's mark, as core/queue/receipts.py computes it: the first four bytes of the topic's tag. "" for
    an unknown topic."""
    return blake2b(topic_id.encode(), digest_size=8).digest()[:4].hex() if topic_id else ""


def mark_of_receipt(receipt: str) -> str:
    """Return the mark of a receipt's topic: a receipt begins with the tag."""
    return base64.urlsafe_b64decode(receipt[:8])[:4].hex()


def _decode_object(decode: Any, body: bytes) -> Any:
    """Decode a body that is a JSON object; None for any other body. Raises InvalidRequest for a broken object. An ASCII
    body is decoded once. Other bodies are checked first: the decoder skips members that may hold invalid UTF-8."""
    if body.isascii():
        try:
            return decode(body)
        except (msgspec.DecodeError, RecursionError):
            pass
    return _read(decode, body) if _is_object(body) else None


def _is_object(body: bytes) -> bool:
    """Return whether a body is meant as a JSON object. True also for objects nested too deep to decode, and for common
    deviations from the standard: Python's NaN, half of a surrogate pair, control characters in strings, numbers of any
    length, a NUL behind the object, a byte order mark before it. Stored unchanged in the default queue, such a message
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


class ReceivedMessage(msgspec.Struct, omit_defaults=True):
    """A message in a broker's answer. `value` is its JSON text."""

    id: str
    receipt: str
    timestamp_ms: int
    delivery_count: int = 1
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | msgspec.UnsetType = msgspec.UNSET


class MessageAnswer(msgspec.Struct):
    """The reply with a message; bytes that are not text are in `message_base64`."""

    id: str
    queue: str
    timestamp: int
    deliveries: int
    message: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    message_base64: str | msgspec.UnsetType = msgspec.UNSET
    status: Literal["ok"] = "ok"


wire.prepare(ReceivedMessage)


def stored(partition: int, offset: int, queue: str, timestamp_ms: int, topic_id: str = "") -> bytes:
    message_id = message_id_of(topic_mark(topic_id), partition, offset)
    return _encode({"id": message_id, "queue": queue, "timestamp": timestamp_ms, "status": "ok"})


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
    """Return a broker's answer with one more member."""
    return _encode({**msgspec.json.decode(answer, type=dict[str, msgspec.Raw]), name: value})


def refusal(error: PortalMQError) -> bytes:
    shown = ("detail", "code", "retryable", "outcome")
    return _encode({"status": "error", **{name: getattr(error, name) for name in shown}})


def message_of(answer: dict[str, Any]) -> Any:
    """Return the message of a reply: text, a JSON value or bytes."""
    if "message_base64" in answer:
        return base64.b64decode(answer["message_base64"])
    return answer["message"]
