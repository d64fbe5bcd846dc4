"""The body of a request as one message, with its options and headers in HTTP headers."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from portalmq import wire
from portalmq.broker.api import cloud_events, schedule
from portalmq.broker.api.record_fields import (
    check_utf8,
    checked_headers,
    checked_idempotency_key,
    checked_key,
    checked_type,
)
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest

# HTTP headers that become message headers under the same name: trace context (W3C) and binary CloudEvents.
_KEPT_HEADERS = frozenset({"traceparent", "tracestate"})
_CLOUD_EVENT = cloud_events.PREFIX
_OWN_HEADER = "portalmq-header-"
_OF_A_SINGLE = frozenset(
    name.lower()
    for name in (
        wire.HEADER_KEY,
        wire.HEADER_DELAY_MS,
        wire.HEADER_DELIVER_AT,
        wire.HEADER_TTL_MS,
        wire.HEADER_PRIORITY,
    )
)

_check_json = msgspec.json.Decoder(msgspec.Raw).decode


def decode_single(content_type: str | None, body: bytes, headers: Mapping[str, str], now_ms: int) -> ProduceRequest:
    """Return the request to produce `body` as one message. Raises InvalidRequest."""
    kind = checked_type(content_type, "the request") if content_type else wire.BYTES
    kept = _message_headers(headers)
    if kind.partition(";")[0].strip().lower() == wire.CLOUD_EVENT:
        body, kind, attributes = cloud_events.parts_of(body, "the body")
        # Both modes may be in one request; the body counts (HTTP binding, section 3.2.2).
        kept = {name: value for name, value in kept.items() if not name.startswith(_CLOUD_EVENT)} | attributes
        kind = checked_type(kind, "the request")
    elif body and wire.is_json_type(kind):
        try:
            check_utf8(body)
            _check_json(body)
        except (msgspec.DecodeError, RecursionError) as fault:
            raise InvalidRequest(f"the body is not the JSON that its Content-Type says: {fault}") from None
    options = schedule.of_headers(headers, now_ms)
    key = headers.get("portalmq-key")
    record = Record(
        body,
        kind,
        checked_key(None if key is None else _header_text(key, wire.HEADER_KEY).encode("utf-8"), "the request"),
        checked_headers(kept, "the request"),
        options.deliver_at_ms,
        options.expires_at_ms,
        options.priority,
    )
    return ProduceRequest(
        [record], idempotency_key=idempotency_key_of(headers), is_single=True, as_sent=options.as_sent
    )


def _message_headers(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {}
    for name, value in headers.items():
        if name.startswith(_OWN_HEADER):
            kept[name[len(_OWN_HEADER) :]] = _header_text(value, name)
        elif name.startswith(_CLOUD_EVENT) or name in _KEPT_HEADERS:
            kept[name] = _header_text(value, name)
    return kept


def _header_text(value: str, name: str) -> str:
    """Return a header's value, which was decoded as Latin-1, as UTF-8."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise InvalidRequest(f"the header {name!r} is not UTF-8") from None


def idempotency_key_of(headers: Mapping[str, str]) -> str | None:
    """Return the Idempotency-Key, bare or as a structured-field string (RFC 8941, section 3.3.3)."""
    key: str | None = headers.get("idempotency-key")
    if key is None:
        return None
    key = key.strip()
    if key.startswith('"'):
        if len(key) < 2 or not key.endswith('"'):
            raise InvalidRequest("Idempotency-Key begins with a quote and does not end with one")
        key = key[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return checked_idempotency_key(key, "Idempotency-Key")


def check_no_single_headers(headers: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a header of a single message on a batch: ignoring a delay would deliver too early."""
    if "idempotency-key" in headers:
        raise InvalidRequest(
            "Idempotency-Key belongs to a single message; in a batch each message has its own idempotency_key, or the"
            " batch has a producer's stamp"
        )
    for name in headers:
        if name in _OF_A_SINGLE or name.startswith(_OWN_HEADER):
            raise InvalidRequest(
                f"the header {name!r} belongs to a single message: in a JSON or"
                " MessagePack batch it is a field of each message"
            )
