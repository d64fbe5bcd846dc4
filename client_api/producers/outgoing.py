"""Encoding of an outgoing message: from a user's value to payload, content type and options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from datetime import datetime
from typing import Any

import msgspec

from portalmq import wire
from portalmq.compression import ZSTD, compressed

# The size of a message in a request beside its payload, counted so that a body stays below the broker's limit.
MESSAGE_OVERHEAD_BYTES = 64

_encode = msgspec.json.Encoder().encode


class PlainMessage(msgspec.Struct, gc=False):
    """A message that is only a payload: the cheapest object that encodes as a wire.PackMessage."""

    value: bytes


# Stands for a PlainMessage whose value is elsewhere.
_NOTHING_ELSE = wire.PackMessage()


def with_compressed_values(
    messages: Sequence[PlainMessage | wire.PackMessage],
) -> tuple[list[wire.PackMessage], wire.CompressedValues] | None:
    """Return the messages without their values, and the values compressed; None when that saves too little."""
    data = compressed([message.value for message in messages])
    if data is None:
        return None
    kinds = [message.content_type if isinstance(message, wire.PackMessage) else None for message in messages]
    common = kinds[0]
    rest: list[wire.PackMessage] = []
    for message, kind in zip(messages, kinds, strict=True):
        if isinstance(message, wire.PackMessage):
            message = copy(message)
            message.value = msgspec.UNSET
            message.content_type = None if kind == common else kind or wire.BYTES
            rest.append(message)
        else:
            rest.append(_NOTHING_ELSE if common is None else wire.PackMessage(content_type=wire.BYTES))
    return rest, wire.CompressedValues(ZSTD, data, common or wire.BYTES)


def _encode_json(value: Any) -> bytes:
    """Return the value as JSON. Raises TypeError for what JSON lacks; msgspec by itself writes NaN and infinity as
    null."""
    payload = _encode(value)
    if b"null" in payload:
        waiting = [msgspec.to_builtins(value)]
        while waiting:
            part = waiting.pop()
            if isinstance(part, float) and not math.isfinite(part):
                raise TypeError(f"the value contains {part}, which JSON cannot encode: send None, or text")
            if isinstance(part, dict):
                waiting += part.values()
            elif isinstance(part, list | tuple):
                waiting += part
    return payload


def pack(
    value: Any,
    key: str | bytes | None,
    headers: Mapping[str, str] | None,
    delay_s: float | None = None,
    deliver_at: datetime | float | None = None,
    ttl_s: float | None = None,
    priority: int = 0,
    content_type: str | None = None,
) -> tuple[wire.PackMessage, int]:
    """Return the message in its wire form, and its size. Raises TypeError for a value that is not bytes, text or JSON,
    and for a key or header that is not text; ValueError for invalid times and priorities."""
    if delay_s is not None and deliver_at is not None:
        raise ValueError("delay_s and deliver_at both say when the message is to be delivered: give one")
    if not isinstance(priority, int) or not 0 <= priority <= wire.PRIORITY_MAX:
        raise ValueError(f"priority={priority!r} must be a whole number from 0 to {wire.PRIORITY_MAX}")
    if key is not None and not isinstance(key, str | bytes | bytearray | memoryview):
        raise TypeError(f"key={key!r}: a key is text or bytes")
    for name, text in headers.items() if headers else ():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(f"header {name!r}: {text!r}: names and values of headers are text")
    natural: str | None = None
    if isinstance(value, bytes | bytearray | memoryview):
        payload = bytes(value)
    elif isinstance(value, str):
        payload, natural = value.encode(), wire.TEXT
    else:
        payload, natural = _encode_json(value), wire.JSON
    size = len(payload) + MESSAGE_OVERHEAD_BYTES
    if key is not None:
        size += len(key.encode() if isinstance(key, str) else key)
    if headers:
        size += sum(len(name.encode()) + len(text.encode()) + 8 for name, text in headers.items())
    message = wire.PackMessage(
        value=payload,
        key=key,
        headers=dict(headers) if headers else None,
        content_type=content_type or natural,
        delay_ms=None if delay_s is None else _milliseconds(delay_s, "delay_s"),
        deliver_at_ms=None if deliver_at is None else _milliseconds(_unix_seconds(deliver_at), "deliver_at"),
        ttl_ms=None if ttl_s is None else max(1, _milliseconds(ttl_s, "ttl_s")),
        priority=priority,
    )
    return message, size


def _milliseconds(seconds: float, what: str) -> int:
    try:
        is_good = 0 <= seconds < 1e12
    except TypeError:
        kinds = "a number, or a datetime" if what == "deliver_at" else "a number"
        raise TypeError(f"{what}={seconds!r} must be {kinds}") from None
    if not is_good:
        raise ValueError(f"{what}={seconds!r} must be a number of seconds, not negative and below 10**12")
    return round(seconds * 1000)


def _unix_seconds(moment: datetime | float) -> float:
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ValueError("deliver_at needs a time zone, for instance datetime.now(UTC)")
        return moment.timestamp()
    return moment
