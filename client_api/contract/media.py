"""Media types, and the names of headers that only PortalMQ knows."""

from __future__ import annotations

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
BYTES = "application/octet-stream"
MSGPACK = "application/vnd.msgpack"
BATCH_JSON = "application/vnd.portalmq.batch+json"
BATCH_MSGPACK = "application/vnd.portalmq.batch+msgpack"
NDJSON = "application/x-ndjson"
CLOUD_EVENT = "application/cloudevents+json"
CLOUD_EVENTS = "application/cloudevents-batch+json"
PROBLEM = "application/problem+json"
EVENT_STREAM = "text/event-stream"
HEADER_KEY = "PortalMQ-Key"
HEADER_DELAY_MS = "PortalMQ-Delay-Ms"
HEADER_DELIVER_AT = "PortalMQ-Deliver-At"
HEADER_TTL_MS = "PortalMQ-Ttl-Ms"
HEADER_PRIORITY = "PortalMQ-Priority"
HEADER_COPY_OF = "portalmq-copy-of"  # of a message: the topic and the id of the one that it is a copy of
HEADER_NO_FORWARD = "PortalMQ-No-Forward"
# "1" on a receive whose attempt_id is new: then no broker looks for the result of an earlier try.
HEADER_FIRST_TRY = "PortalMQ-First-Try"
# Prefer (RFC 7240): a receive may be answered before its acks are committed. Older brokers ignore it.
ACKS_LATER = "acks=later"


def is_json_type(content_type: str) -> bool:
    """Return True for application/json and every `…+json` type (RFC 6839), with or without parameters."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence == JSON or essence.endswith("+json")
