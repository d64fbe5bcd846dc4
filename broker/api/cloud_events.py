"""CloudEvents 1.0 in JSON: one event (structured mode), and a batch of them.

    event    {"specversion": "1.0", "id", "source", "type", …, "data" | "data_base64"}
    message  headers ce-specversion, ce-id, …; content type = datacontenttype; value = data

A message is stored as the binary mode of HTTP has it, so that events of all modes are alike for their consumers. In
headers, attributes are percent-encoded as there (HTTP binding 1.0.2, section 3.1.3.2). An event that is given out has
extensions of the broker: portalmqtopic, portalmqid and, with a lease, portalmqreceipt and portalmqdeliveries; a dead
letter has portalmqdeadreason. They are ignored when such an event is produced again.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from portalmq import wire
from portalmq.broker.api.outgoing import MESSAGES_A_TURN, embedded_json
from portalmq.broker.api.query import instant_ms
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.partition.long_poll import LeasedMessage
from portalmq.broker.partition.yielding import in_turns
from portalmq.broker.queues.outbox import HEADER_DEAD_REASON
from portalmq.errors import InvalidRequest

VERSION = "1.0"
PREFIX = "ce-"
OWN = "portalmq"
TYPE_OF_OTHERS = "portalmq.message"
NEEDED = ("specversion", "id", "source", "type")
TEXTS = (*NEEDED, "datacontenttype", "dataschema", "subject", "time")
# What describes the value, so no header says it.
MEMBERS = ("data", "datacontenttype")
INTEGER_MAX = 2**31 - 1

_is_name = re.compile(r"[a-z0-9]+").fullmatch
_is_rfc_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)", re.ASCII).fullmatch
_has_control = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]").search
_kept_in_headers = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) not in '"%')
_decode_event = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class EventParts(NamedTuple):
    """A message that is an event."""

    value: bytes
    content_type: str
    headers: dict[str, str]


def parts_of(body: bytes | msgspec.Raw, where: str) -> EventParts:
    """Return the message of an event in JSON. Raises InvalidRequest with `where` as the event's name."""
    try:
        members = _decode_event(body)
        data = members.pop("data", None)
        attributes = {name: _decode_any(value) for name, value in members.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InvalidRequest(f"{where} is not an event in JSON: {fault}") from None
    encoded = attributes.pop("data_base64", None)
    shown = {name: _text(name, value, where) for name, value in attributes.items() if value is not None}
    for name in NEEDED:
        if not shown.get(name):
            raise InvalidRequest(f"{where} has no {name}: a CloudEvent needs {', '.join(NEEDED)}")
    if shown["specversion"] != VERSION:
        raise InvalidRequest(f"{where} is of version {shown['specversion'][:100]!r}: {VERSION} is supported")
    if "time" in shown:
        instant_ms(shown["time"], f"time of {where}")
        if not _is_rfc_3339(shown["time"]):
            raise InvalidRequest(f"time of {where} is {shown['time'][:100]!r}: RFC 3339 has it as 2026-01-31T12:00:00Z")
    kind = shown.pop("datacontenttype", None)
    headers = {f"{PREFIX}{name}": quote(text, _kept_in_headers) for name, text in shown.items() if not _is_own(name)}
    value = _value(data, encoded, kind, where)
    if kind is None:
        kind = wire.BYTES if value is None else wire.JSON
    return EventParts(value or b"", kind, headers)


def _text(name: str, value: Any, where: str) -> str:
    """Return an attribute as text."""
    if not _is_name(name):
        raise InvalidRequest(f"{name[:100]!r} of {where} cannot name an attribute: only a-z and 0-9")
    if name in TEXTS and not (isinstance(value, str) and value):
        raise InvalidRequest(f"{name} of {where} must be text, and not empty")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) <= INTEGER_MAX:
        return str(value)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} of {where} must be text, true, false or a whole number of 32 bits")
    if _has_control(value):
        raise InvalidRequest(f"{name} of {where} has a control character in it")
    return value


def _value(data: msgspec.Raw | None, encoded: Any, kind: str | None, where: str) -> bytes | None:
    if encoded is not None:
        if data is not None:
            raise InvalidRequest(f"{where} has both data and data_base64: give one")
        if not isinstance(encoded, str):
            raise InvalidRequest(f"data_base64 of {where} must be text")
        return wire.decode_base64(encoded, f"data_base64 of {where}")
    if data is None:
        return None
    if kind is None or wire.is_json_type(kind):
        return bytes(data)
    text = _decode_any(data)
    if not isinstance(text, str):
        raise InvalidRequest(f"data of {where} must be text, or base64 in data_base64: it is {kind[:100]!r}, not JSON")
    return text.encode("utf-8")


def _is_own(name: str) -> bool:
    return name.startswith(OWN)


# --- events that are given out ---------------------------------------------------------------------------------------


def encode_event(stored: StoredMessage | LeasedMessage) -> bytes:
    return _encode(event_of(stored)) + b"\n"


def encode_events(messages: Iterable[StoredMessage | LeasedMessage]) -> bytes:
    return _encode([event_of(each) for each in in_turns(messages, MESSAGES_A_TURN)]) + b"\n"


def event_of(stored: StoredMessage | LeasedMessage) -> dict[str, Any]:
    """Return a message as an event. One that was not produced as an event gets an id, a source and a type."""
    record, message_id = stored.record, f"{stored.partition}-{stored.offset}"
    attributes = _attributes(record.headers or {})
    event: dict[str, Any] = {
        "id": message_id,
        "source": wire.topic_path(stored.topic),
        "type": TYPE_OF_OTHERS,
        **attributes,
        "specversion": VERSION,
    }
    if not attributes.keys() & {"id", "time"}:
        event["time"] = datetime.fromtimestamp(stored.timestamp_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    event |= {f"{OWN}topic": stored.topic, f"{OWN}id": message_id}
    if stored.receipt is not None:
        event |= {f"{OWN}receipt": stored.receipt, f"{OWN}deliveries": stored.delivery_count}
    reason = (record.headers or {}).get(HEADER_DEAD_REASON)
    if reason is not None:
        event[f"{OWN}deadreason"] = reason
    value, kind = record.value, record.content_type
    if not value and (kind == wire.BYTES or wire.is_json_type(kind)):
        return event if kind == wire.BYTES else {**event, "datacontenttype": kind}
    return {**event, "datacontenttype": kind, **_data(value, kind)}


def _attributes(headers: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for header, value in headers.items():
        name = header.removeprefix(PREFIX) if header.startswith(PREFIX) else header
        if (header != name or header in {"traceparent", "tracestate"}) and _is_name(name) and not _is_own(name):
            text = _unquoted(value)
            if name not in MEMBERS and (text or name not in TEXTS) and (name != "time" or _is_time(text)):
                found[name] = text
    return found


def _is_time(text: str) -> bool:
    try:
        instant_ms(text, "time")
    except InvalidRequest:
        return False
    return _is_rfc_3339(text) is not None


def _unquoted(value: str) -> str:
    try:
        text = unquote(value, errors="strict")
    except UnicodeDecodeError:
        return value  # it was not encoded
    return value if _has_control(text) else text


def _data(value: bytes, kind: str) -> dict[str, Any]:
    if wire.is_json_type(kind):
        shown: Any = embedded_json(value)
        if shown is not msgspec.UNSET:
            return {"data": shown}
    elif not kind.startswith(wire.BYTES):
        try:
            return {"data": value.decode("utf-8")}
        except UnicodeDecodeError:
            pass  # shown as bytes
    return {"data_base64": base64.b64encode(value).decode("ascii")}
