"""Fields of a message in a batch, turned into the record that is stored, and the limits of each field."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from portalmq import wire
from portalmq.broker.api import schedule
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest

# A header that contains a line break would forge another one when it is written into HTTP or a log.
_header_name = re.compile(r"[^\s:\x00-\x1f\x7f-\x9f]+\Z").match
_control_character = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]").search
_decode_text = msgspec.json.Decoder(str).decode


def record_of_pack(message: wire.PackMessage, where: str, now_ms: int) -> Record:
    """Return the record of a MessagePack message. Raises InvalidRequest with `where` as the message's name."""
    if message.value_base64 is not None:
        value, kind = _unwrapped(message, where), wire.BYTES
    elif message.value is msgspec.UNSET:
        raise _no_value(where)
    elif isinstance(message.value, bytes):
        value, kind = message.value, wire.BYTES
    elif isinstance(message.value, str) and _names_no_json(message.content_type):
        value, kind = message.value.encode("utf-8"), wire.TEXT
    else:
        value, kind = _as_json(message.value, where), wire.JSON
        message.value = msgspec.UNSET  # frees its objects now, rather than those of all messages at once
    return _record(message, value, kind, where, now_ms)


def record_of_json(message: wire.JsonMessage, where: str, now_ms: int) -> Record:
    """Return the record of a JSON message. Raises InvalidRequest with `where` as the message's name."""
    raw = message.value
    if message.value_base64 is not None:
        value, kind = _unwrapped(message, where), wire.BYTES
    elif isinstance(raw, msgspec.UnsetType):
        raise _no_value(where)
    else:
        value, kind = bytes(raw), wire.JSON
        # A message that browse returned can be produced again unchanged: browse writes text as a JSON string.
        if value[:1] == b'"' and _names_no_json(message.content_type):
            value, kind = _decode_text(value).encode("utf-8"), wire.TEXT
    return _record(message, value, kind, where, now_ms)


def _unwrapped(message: wire.JsonMessage | wire.PackMessage, where: str) -> bytes:
    if message.value is not msgspec.UNSET:
        raise InvalidRequest(f"{where} has both value and value_base64: give one")
    return wire.decode_base64(message.value_base64 or "", f"value_base64 of {where}")


def _record(
    message: wire.JsonMessage | wire.PackMessage, value: bytes, content_type: str, where: str, now_ms: int
) -> Record:
    deliver_at_ms, expires_at_ms = schedule.moments(
        message.delay_ms, message.deliver_at_ms, message.ttl_ms, now_ms, where
    )
    return Record(
        value,
        content_type if message.content_type is None else checked_type(message.content_type, where),
        _key(message, where),
        checked_headers(message.headers, where),
        deliver_at_ms,
        expires_at_ms,
        schedule.checked_priority(message.priority, where),
    )


def _key(message: wire.JsonMessage | wire.PackMessage, where: str) -> bytes | None:
    key = message.key
    if message.key_base64 is not None:
        if key is not None:
            raise InvalidRequest(f"{where} has both key and key_base64: give one")
        key = wire.decode_base64(message.key_base64, f"key_base64 of {where}")
    elif isinstance(key, str):
        key = key.encode("utf-8")
    elif key is not None and not isinstance(key, bytes):
        raise InvalidRequest(f"the key of {where} must be text or bytes")
    return checked_key(key, where)


def _names_no_json(content_type: str | None) -> bool:
    return content_type is not None and not wire.is_json_type(content_type)


def _as_json(value: Any, where: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.EncodeError) as fault:
        raise InvalidRequest(f"the value of {where} cannot be written as JSON: {fault}") from None


def _no_value(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} has no value: give value, or value_base64")


# --- limits ----------------------------------------------------------------------------------------------------------


def checked_idempotency_key(key: str, what: str) -> str:
    if not (1 <= len(key) <= wire.IDEMPOTENCY_KEY_LENGTH_MAX) or not key.isascii() or not key.isprintable():
        raise InvalidRequest(f"{what} must be 1 to {wire.IDEMPOTENCY_KEY_LENGTH_MAX} printable ASCII characters")
    return key


def check_utf8(body: bytes) -> None:
    if body.isascii():
        return
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise InvalidRequest(f"the JSON body is not UTF-8: {fault.reason} at byte {fault.start}") from None


def checked_type(content_type: str, where: str) -> str:
    length_max = wire.CONTENT_TYPE_LENGTH_MAX
    if not (1 <= len(content_type) <= length_max) or not content_type.isprintable():
        raise InvalidRequest(f"the content type of {where} must be 1 to {length_max} printable characters")
    return content_type


def checked_key(key: bytes | None, where: str) -> bytes | None:
    if key is not None and len(key) > wire.KEY_BYTES_MAX:
        raise InvalidRequest(f"the key of {where} has {len(key)} bytes, the limit is {wire.KEY_BYTES_MAX}")
    return key


def checked_headers(headers: dict[str, str] | None, where: str) -> dict[str, str] | None:
    """Return the headers with their names in lower case."""
    if not headers:
        return None
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
