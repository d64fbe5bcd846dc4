"""An edited copy of a message: produced like any other; a header names the original.

What the request leaves out is kept. A time to live is kept as a duration, so that a copy of an expired message can be
delivered; a delivery time that is over is dropped.
"""

from __future__ import annotations

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api import schedule
from portalmq.broker.api.query import Parameters, place_of_id
from portalmq.broker.api.record_fields import checked_headers, checked_type, record_of_json
from portalmq.broker.api.request_context import RequestContext, current, may_forward
from portalmq.broker.api.single_message import idempotency_key_of
from portalmq.broker.api.traffic import single_answer
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import MessageNotFound, OffsetOutOfRange, PartitionNotFound

_WHERE = "the copy"


def copy(context: RequestContext, topic: str, message_id: str, query: Parameters) -> Response:
    """Produce a copy of the message with the changes of the body; answer as to a single message."""
    wire.check_name(topic, "topic")
    wanted = wire.decode_json(context.body(), wire.CopyRequest)
    target = topic if wanted.to_topic is None else wire.check_name(wanted.to_topic, "to_topic")
    number, offset = place_of_id(message_id)
    key = idempotency_key_of(current().headers)
    original = _find(context, topic, number, offset, is_keyed=key is not None)
    context.make_room([original.record])
    as_sent = ("copy", wanted.delay_ms, wanted.deliver_at_ms, wanted.ttl_ms, wanted.priority)
    request = ProduceRequest(
        [_edited(original, wanted, context.broker.wall_ms())],
        partition=wanted.partition,
        is_single=True,
        idempotency_key=key,
        as_sent=as_sent,
        forward=may_forward(current()),
    )
    return single_answer(target, context.broker.produce(target, request)[0]).response()


def _find(context: RequestContext, topic: str, number: int, offset: int, *, is_keyed: bool) -> StoredMessage:
    missing = MessageNotFound(
        f"there is no message {number}-{offset} in topic {topic!r}",
        outcome="unknown" if is_keyed else "not_applied",  # a first try may have found it before it was removed
    )
    browse = context.broker.browser.browse
    try:
        page = browse(topic, number, offset=offset, limit=1)
        if not page.messages:  # at the end of the log; beyond it, what is not committed yet is refused as Unavailable
            browse(topic, number, offset=offset + 1, limit=1)
            page = browse(topic, number, offset=offset, limit=1)
    except (OffsetOutOfRange, PartitionNotFound):
        raise missing from None
    if not page.messages or page.messages[0].offset != offset:
        raise missing
    return page.messages[0]


def _edited(original: StoredMessage, wanted: wire.CopyRequest, now_ms: int) -> Record:
    record = original.record
    value, kind = record.value, wanted.content_type or record.content_type
    if wanted.value is not msgspec.UNSET or wanted.value_base64 is not None:
        # Text stays text; another JSON value in place of what was no JSON becomes JSON.
        is_kept = wanted.content_type or wanted.value_base64 is not None or wire.is_json_type(kind)
        is_text = not isinstance(wanted.value, msgspec.UnsetType) and bytes(wanted.value)[:1] == b'"'
        message = wire.JsonMessage(wanted.value, wanted.value_base64, content_type=kind if is_kept or is_text else None)
        edited = record_of_json(message, _WHERE, now_ms)
        value, kind = edited.value, edited.content_type
    elif wanted.content_type is not None:
        checked_type(kind, _WHERE)
    headers = {**(record.headers or {}), **{name.lower(): text for name, text in (wanted.headers or {}).items()}}
    headers[wire.HEADER_COPY_OF] = f"{original.topic}/{original.partition}-{original.offset}"
    kept = {name: text for name, text in headers.items() if text is not None}
    deliver_at_ms, expires_at_ms = _moments(original, wanted, now_ms)
    priority = record.priority if wanted.priority is None else schedule.checked_priority(wanted.priority, _WHERE)
    key = _key(record, wanted, now_ms)
    return Record(value, kind, key, checked_headers(kept, _WHERE), deliver_at_ms, expires_at_ms, priority)


def _moments(original: StoredMessage, wanted: wire.CopyRequest, now_ms: int) -> tuple[int | None, int | None]:
    record, deliver_at_ms, ttl_ms = original.record, wanted.deliver_at_ms, wanted.ttl_ms
    if wanted.delay_ms is None and deliver_at_ms is None and (record.deliver_at_ms or 0) > now_ms:
        deliver_at_ms = record.deliver_at_ms
    if ttl_ms is None and record.expires_at_ms is not None:
        ttl_ms = max(1, record.expires_at_ms - max(original.timestamp_ms, record.deliver_at_ms or 0))
    return schedule.moments(wanted.delay_ms, deliver_at_ms, ttl_ms, now_ms, _WHERE)


def _key(record: Record, wanted: wire.CopyRequest, now_ms: int) -> bytes | None:
    if isinstance(wanted.key, msgspec.UnsetType) and wanted.key_base64 is None:
        return record.key
    key = None if isinstance(wanted.key, msgspec.UnsetType) else wanted.key
    message = wire.JsonMessage(value_base64="", key=key, key_base64=wanted.key_base64)
    return record_of_json(message, _WHERE, now_ms).key
