"""Every form in which messages come in, turned into the records that are stored.

    batch+json      {"messages": [{"value": any JSON | "value_base64": "...", "key", "headers", ...}], "producer"}
    batch+msgpack   the same; a binary value is the payload itself
    x-ndjson        each line one message's JSON value
    anything else   the body is one message, PortalMQ-* headers tell the rest

A batch is checked whole before anything of it reaches the domain; what is wrong is named with the index of its message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from portalmq import wire
from portalmq.broker.api.query import whole_number
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, MessageTooLarge

CONTENT_TYPE_LENGTH_MAX = 255
IDEMPOTENCY_KEY_LENGTH_MAX = 255
PRIORITY_MAX = 31

# Headers that become message headers under their own name: trace context (W3C) and binary CloudEvents.
_KEPT_HEADERS = frozenset({"HTTP_TRACEPARENT", "HTTP_TRACESTATE"})
_CLOUD_EVENT = "HTTP_CE_"
_OWN_HEADER = "HTTP_PORTALMQ_HEADER_"


@dataclass(frozen=True, slots=True)
class Incoming:
    """What one produce request brings. `partitions` has one entry a record, or is None when no message names one."""

    records: list[Record]
    partitions: list[int | None] | None = None
    producer: wire.ProducerStamp | None = None
    idempotency_key: str | None = None
    single: bool = False


class _PlainMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """The message that the client library sends, with its limits. A batch of these needs no other check."""

    value: bytes
    content_type: Annotated[str, msgspec.Meta(min_length=1, max_length=CONTENT_TYPE_LENGTH_MAX)] = wire.BYTES
    key: Annotated[bytes, msgspec.Meta(max_length=wire.KEY_BYTES_MAX)] | None = None
    headers: dict[str, str] | None = None


class _PlainBatch(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[_PlainMessage], msgspec.Meta(max_length=wire.BATCH_MESSAGES_MAX)]
    producer: wire.ProducerStamp | None = None


# Whoever writes a message's headers into HTTP, or a log, must find no line break in them.
_header_name = re.compile(r"[^\s:\x00-\x1f\x7f-\x9f]+\Z").match
_control_character = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]").search

_headers_of = attrgetter("headers")
_type_of = attrgetter("content_type")
_decode_plain = msgspec.msgpack.Decoder(_PlainBatch).decode
_decode_raw_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_text = msgspec.json.Decoder(str).decode


def decode_messages(content_type: str | None, body: bytes, environ: dict[str, Any]) -> Incoming:
    """The messages of a request with this content type and body; `environ` holds its headers.

    Raises InvalidRequest, or MessageTooLarge when a batch has too many messages. The size of a value is the topic's
    affair.
    """
    essence = (content_type or "").partition(";")[0].strip().lower()
    if essence == wire.BATCH_MSGPACK:
        return _without_key(_from_msgpack(body), environ)
    if essence == wire.BATCH_JSON:
        return _without_key(_from_json(body), environ)
    if essence == wire.NDJSON:
        return _without_key(_from_lines(body), environ)
    return _from_raw(content_type, body, environ)


# --- batches ---------------------------------------------------------------------------------------------------------


def _from_msgpack(body: bytes) -> Incoming:
    try:
        plain = _decode_plain(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _from_any_msgpack(body)
    messages = plain.messages
    for content_type in set(map(_type_of, messages)):
        _checked_type(content_type, "the batch")
    if any(map(_headers_of, messages)):
        records = [
            Record(message.value, message.content_type, message.key, _checked_headers(message.headers, index))
            for index, message in enumerate(messages)
        ]
    else:
        records = [Record(message.value, message.content_type, message.key) for message in messages]
    return Incoming(records, producer=plain.producer)


def _from_any_msgpack(body: bytes) -> Incoming:
    batch = wire.decode_msgpack(body, wire.PackBatch)
    _check_count(len(batch.messages))
    records = []
    for index, message in enumerate(batch.messages):
        _check_unscheduled(message, index)
        if message.value is not msgspec.UNSET and message.value_base64 is not None:
            raise _both_values(index)
        if message.value_base64 is not None:
            value, kind = wire.decode_base64(message.value_base64, f"value_base64 of message {index}"), wire.BYTES
        elif message.value is msgspec.UNSET:
            raise _no_value(index)
        elif isinstance(message.value, bytes):
            value, kind = message.value, wire.BYTES
        elif isinstance(message.value, str) and _names_no_json(message.content_type):
            value, kind = message.value.encode("utf-8"), wire.TEXT
        else:
            value, kind = _as_json(message.value, index), wire.JSON
        records.append(_record(message, value, kind, index))
    return Incoming(records, _partitions(batch.messages), batch.producer)


def _from_json(body: bytes) -> Incoming:
    _check_utf8(body)
    batch = wire.decode_json(body, wire.JsonBatch)
    _check_count(len(batch.messages))
    records = []
    for index, message in enumerate(batch.messages):
        _check_unscheduled(message, index)
        raw = message.value
        if raw is not msgspec.UNSET and message.value_base64 is not None:
            raise _both_values(index)
        if message.value_base64 is not None:
            value, kind = wire.decode_base64(message.value_base64, f"value_base64 of message {index}"), wire.BYTES
        elif isinstance(raw, msgspec.UnsetType):
            raise _no_value(index)
        else:
            value, kind = bytes(raw), wire.JSON
            # A message as browse shows it goes in again as it was: text stands there as a JSON string.
            if value[:1] == b'"' and _names_no_json(message.content_type):
                value, kind = _decode_text(value).encode("utf-8"), wire.TEXT
        records.append(_record(message, value, kind, index))
    return Incoming(records, _partitions(batch.messages), batch.producer)


def _from_lines(body: bytes) -> Incoming:
    _check_utf8(body)
    records = []
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(Record(bytes(_decode_raw_json(line)), wire.JSON))
        except (msgspec.DecodeError, RecursionError) as fault:
            raise InvalidRequest(f"line {number} is not JSON: {fault}") from None
    _check_count(len(records))
    return Incoming(records)


def _record(message: wire.JsonMessage | wire.PackMessage, value: bytes, content_type: str, index: int) -> Record:
    return Record(
        value,
        content_type if message.content_type is None else _checked_type(message.content_type, f"message {index}"),
        _key(message, index),
        _checked_headers(message.headers, index),
    )


def _key(message: wire.JsonMessage | wire.PackMessage, index: int) -> bytes | None:
    key = message.key
    if message.key_base64 is not None:
        if key is not None:
            raise InvalidRequest(f"message {index} has both key and key_base64: give one")
        key = wire.decode_base64(message.key_base64, f"key_base64 of message {index}")
    elif isinstance(key, str):
        key = key.encode("utf-8")
    elif key is not None and not isinstance(key, bytes):
        raise InvalidRequest(f"the key of message {index} must be text or bytes")
    return _checked_key(key, f"message {index}")


def _partitions(messages: list[Any]) -> list[int | None] | None:
    named = [message.partition for message in messages]
    return named if any(partition is not None for partition in named) else None


def _names_no_json(content_type: str | None) -> bool:
    return content_type is not None and not wire.is_json_type(content_type)


def _as_json(value: Any, index: int) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.EncodeError) as fault:
        raise InvalidRequest(f"the value of message {index} cannot be written as JSON: {fault}") from None


def _both_values(index: int) -> InvalidRequest:
    return InvalidRequest(f"message {index} has both value and value_base64: give one")


def _no_value(index: int) -> InvalidRequest:
    return InvalidRequest(f"message {index} has no value: give value, or value_base64")


# --- one message, as it is -------------------------------------------------------------------------------------------


def _from_raw(content_type: str | None, body: bytes, environ: dict[str, Any]) -> Incoming:
    kind = _checked_type(content_type, "the request") if content_type else wire.BYTES
    if body and wire.is_json_type(kind):
        try:
            _check_utf8(body)
            _decode_raw_json(body)
        except (msgspec.DecodeError, RecursionError) as fault:
            raise InvalidRequest(f"the body is not the JSON that its Content-Type says: {fault}") from None
    _check_raw_schedule(environ)
    key = environ.get("HTTP_PORTALMQ_KEY")
    record = Record(
        body,
        kind,
        _checked_key(None if key is None else _header_text(key, wire.HEADER_KEY).encode("utf-8"), "the request"),
        _checked_headers(_message_headers(environ), None),
    )
    return Incoming([record], idempotency_key=_idempotency_key(environ), single=True)


def _message_headers(environ: dict[str, Any]) -> dict[str, str] | None:
    headers = {}
    for name, value in environ.items():
        if name.startswith(_OWN_HEADER):
            headers[_lower(name[len(_OWN_HEADER) :])] = _header_text(value, name)
        elif name.startswith(_CLOUD_EVENT) or name in _KEPT_HEADERS:
            headers[_lower(name[len("HTTP_") :])] = _header_text(value, name)
    return headers or None


def _lower(name: str) -> str:
    return name.lower().replace("_", "-")


def _header_text(value: str, name: str) -> str:
    """A header's value as UTF-8: WSGI hands over its bytes, read as latin-1 (PEP 3333)."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise InvalidRequest(f"the header {_lower(name.removeprefix('HTTP_'))!r} is not UTF-8") from None


def _idempotency_key(environ: dict[str, Any]) -> str | None:
    """The Idempotency-Key, bare or as a structured-field string (RFC 8941, section 3.3.3)."""
    key: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
    if key is None:
        return None
    key = key.strip()
    if key.startswith('"'):
        if len(key) < 2 or not key.endswith('"'):
            raise InvalidRequest("Idempotency-Key begins with a quote and does not end with one")
        key = key[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    if not (1 <= len(key) <= IDEMPOTENCY_KEY_LENGTH_MAX) or not key.isascii() or not key.isprintable():
        raise InvalidRequest(f"Idempotency-Key must be 1 to {IDEMPOTENCY_KEY_LENGTH_MAX} printable ASCII characters")
    return key


def _without_key(incoming: Incoming, environ: dict[str, Any]) -> Incoming:
    if "HTTP_IDEMPOTENCY_KEY" in environ:
        raise InvalidRequest(
            "Idempotency-Key belongs to a single message; a batch is made idempotent by its producer's stamp"
        )
    return incoming


# --- limits ----------------------------------------------------------------------------------------------------------


def _check_count(count: int) -> None:
    if count > wire.BATCH_MESSAGES_MAX:
        raise MessageTooLarge(f"the batch has {count} messages, the limit is {wire.BATCH_MESSAGES_MAX}: split it")


def _check_utf8(body: bytes) -> None:
    if body.isascii():
        return
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise InvalidRequest(f"the JSON body is not UTF-8: {fault.reason} at byte {fault.start}") from None


def _checked_type(content_type: str, where: str) -> str:
    if not (1 <= len(content_type) <= CONTENT_TYPE_LENGTH_MAX) or not content_type.isprintable():
        raise InvalidRequest(f"the content type of {where} must be 1 to {CONTENT_TYPE_LENGTH_MAX} printable characters")
    return content_type


def _checked_key(key: bytes | None, where: str) -> bytes | None:
    if key is not None and len(key) > wire.KEY_BYTES_MAX:
        raise InvalidRequest(f"the key of {where} has {len(key)} bytes, the limit is {wire.KEY_BYTES_MAX}")
    return key


def _checked_headers(headers: dict[str, str] | None, index: int | None) -> dict[str, str] | None:
    """The headers with their names in lower case."""
    if not headers:
        return None
    where = "the request" if index is None else f"message {index}"
    if len(headers) > wire.HEADERS_MAX:
        raise InvalidRequest(f"{where} has {len(headers)} headers, the limit is {wire.HEADERS_MAX}")
    lowered = {name.lower(): value for name, value in headers.items()}
    if len(lowered) < len(headers):
        raise InvalidRequest(f"the headers of {where} need names that differ in more than upper and lower case")
    for name, value in lowered.items():
        if not _header_name(name):
            raise InvalidRequest(
                f"{name[:100]!r} of {where} cannot name a header: no spaces, colons, control characters"
            )
        if _control_character(value):
            raise InvalidRequest(f"the header {name[:100]!r} of {where} has a control character or line break in it")
    size = sum([len(name.encode("utf-8")) + len(value.encode("utf-8")) for name, value in lowered.items()])
    if size > wire.HEADER_BYTES_MAX:
        raise InvalidRequest(f"the headers of {where} have {size} bytes, the limit is {wire.HEADER_BYTES_MAX}")
    return lowered


# --- what comes with a later release ---------------------------------------------------------------------------------


def _check_unscheduled(message: wire.JsonMessage | wire.PackMessage, index: int) -> None:
    if not 0 <= message.priority <= PRIORITY_MAX:
        raise InvalidRequest(f"the priority of message {index} is {message.priority}, but must be 0 to {PRIORITY_MAX}")
    if message.priority:
        raise _not_yet("priority", f"message {index}")
    for name in ("delay_ms", "deliver_at_ms", "ttl_ms"):
        if getattr(message, name):
            raise _not_yet(name, f"message {index}")


def _check_raw_schedule(environ: dict[str, Any]) -> None:
    priority = environ.get("HTTP_PORTALMQ_PRIORITY")
    if priority is not None:
        number = whole_number(priority, wire.HEADER_PRIORITY)
        if number > PRIORITY_MAX:
            raise InvalidRequest(f"{wire.HEADER_PRIORITY} is {number}, but must be 0 to {PRIORITY_MAX}")
        if number:
            raise _not_yet(wire.HEADER_PRIORITY, "the request")
    for name in (wire.HEADER_DELAY_MS, wire.HEADER_TTL_MS):
        value = environ.get("HTTP_" + name.upper().replace("-", "_"))
        if value is not None and whole_number(value, name):
            raise _not_yet(name, "the request")
    if environ.get("HTTP_PORTALMQ_DELIVER_AT") is not None:
        raise _not_yet(wire.HEADER_DELIVER_AT, "the request")


def _not_yet(what: str, where: str) -> InvalidRequest:
    return InvalidRequest(f"{what} of {where}: scheduling, expiry and priority come with a later release; leave it out")
