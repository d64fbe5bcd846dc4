"""The body of a request as one message, with its options and headers in HTTP headers."""

from __future__ import annotations

from typing import Any

import msgspec

from portalmq import wire
from portalmq.broker.api import schedule
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
_KEPT_HEADERS = frozenset({"HTTP_TRACEPARENT", "HTTP_TRACESTATE"})
_CLOUD_EVENT = "HTTP_CE_"
_OWN_HEADER = "HTTP_PORTALMQ_HEADER_"
_OF_A_SINGLE = frozenset(
    f"HTTP_{name.upper().replace('-', '_')}"
    for name in (
        wire.HEADER_KEY,
        wire.HEADER_DELAY_MS,
        wire.HEADER_DELIVER_AT,
        wire.HEADER_TTL_MS,
        wire.HEADER_PRIORITY,
    )
)

_check_json = msgspec.json.Decoder(msgspec.Raw).decode


def decode_single(content_type: str | None, body: bytes, environ: dict[str, Any], now_ms: int) -> ProduceRequest:
    """Return the request to produce `body` as one message. Raises InvalidRequest."""
    kind = checked_type(content_type, "the request") if content_type else wire.BYTES
    if body and wire.is_json_type(kind):
        try:
            check_utf8(body)
            _check_json(body)
        except (msgspec.DecodeError, RecursionError) as fault:
            raise InvalidRequest(f"the body is not the JSON that its Content-Type says: {fault}") from None
    options = schedule.of_headers(environ, now_ms)
    key = environ.get("HTTP_PORTALMQ_KEY")
    record = Record(
        body,
        kind,
        checked_key(None if key is None else _header_text(key, wire.HEADER_KEY).encode("utf-8"), "the request"),
        checked_headers(_message_headers(environ), "the request"),
        options.deliver_at_ms,
        options.expires_at_ms,
        options.priority,
    )
    return ProduceRequest(
        [record], idempotency_key=idempotency_key_of(environ), is_single=True, as_sent=options.as_sent
    )


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
    """Return a header's value as UTF-8; WSGI decodes headers as Latin-1 (PEP 3333)."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise InvalidRequest(f"the header {_lower(name.removeprefix('HTTP_'))!r} is not UTF-8") from None


def idempotency_key_of(environ: dict[str, Any]) -> str | None:
    """Return the Idempotency-Key, bare or as a structured-field string (RFC 8941, section 3.3.3)."""
    key: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
    if key is None:
        return None
    key = key.strip()
    if key.startswith('"'):
        if len(key) < 2 or not key.endswith('"'):
            raise InvalidRequest("Idempotency-Key begins with a quote and does not end with one")
        key = key[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return checked_idempotency_key(key, "Idempotency-Key")


def check_no_single_headers(environ: dict[str, Any]) -> None:
    """Raise InvalidRequest for a header of a single message on a batch: ignoring a delay would deliver too early."""
    if "HTTP_IDEMPOTENCY_KEY" in environ:
        raise InvalidRequest(
            "Idempotency-Key belongs to a single message; in a batch each message has its own idempotency_key, or the"
            " batch has a producer's stamp"
        )
    for name in environ:
        if name in _OF_A_SINGLE or name.startswith(_OWN_HEADER):
            raise InvalidRequest(
                f"the header {_lower(name.removeprefix('HTTP_'))!r} belongs to a single message: in a JSON or"
                " MessagePack batch it is a field of each message"
            )
