"""The headers of requests, as parameters of the description. (Views read them one by one.)"""

from __future__ import annotations

from typing import Annotated

import msgspec

from portalmq import wire
from portalmq.wire import NonNegative, Positive

_instant = msgspec.Meta(extra_json_schema={"type": ["string", "integer"]})
_printable = msgspec.Meta(extra_json_schema={"minLength": 1, "maxLength": 255, "pattern": "^[!#-~]([ -~]*[!-~])?$"})


class ForwardHeaders(msgspec.Struct, rename={"no_forward": wire.HEADER_NO_FORWARD}):
    """`PortalMQ-No-Forward`: `1` asks for 421 `not_leader` instead of a forwarded call."""

    no_forward: str | None = None


class IdempotencyHeaders(msgspec.Struct, rename={"idempotency_key": "Idempotency-Key"}):
    """`Idempotency-Key`: a repeat with the same key and body is answered as the first time, and changes nothing."""

    idempotency_key: Annotated[str, _printable] | None = None


class ProduceHeaders(
    IdempotencyHeaders,
    rename={
        "key": wire.HEADER_KEY,
        "delay_ms": wire.HEADER_DELAY_MS,
        "deliver_at": wire.HEADER_DELIVER_AT,
        "ttl_ms": wire.HEADER_TTL_MS,
        "priority": wire.HEADER_PRIORITY,
        "prefer": "Prefer",
    },
):
    """`PortalMQ-Key`: the key of a single message. `PortalMQ-Delay-Ms`: how long a single message waits.
    `PortalMQ-Deliver-At`: when a single message can be delivered, as an RFC 3339 time or in Unix milliseconds.
    `PortalMQ-Ttl-Ms`: the time to live of a single message. `PortalMQ-Priority`: the priority of a single message.
    `Prefer`: `return=minimal` asks for a short answer to a batch for one partition."""

    key: str | None = None
    delay_ms: NonNegative | None = None
    deliver_at: Annotated[str, _instant] | None = None
    ttl_ms: Positive | None = None
    priority: Annotated[int, msgspec.Meta(ge=0, le=wire.PRIORITY_MAX)] | None = None
    prefer: str | None = None


class ReceiveHeaders(msgspec.Struct, rename={"prefer": "Prefer", "first_try": wire.HEADER_FIRST_TRY}):
    """`Prefer`: `acks=later` allows an answer before the request's acks are committed. `PortalMQ-First-Try`: `1` if the
    `attempt_id` is new."""

    prefer: str | None = None
    first_try: str | None = None


class BrowseHeaders(msgspec.Struct, rename={"last_event_id": "Last-Event-ID"}):
    """`Last-Event-ID`: the offset of the last event, after which an event stream resumes."""

    last_event_id: NonNegative | None = None
