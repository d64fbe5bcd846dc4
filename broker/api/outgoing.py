"""Encoding of messages: JSON for people, MessagePack for the client library."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import msgspec

from portalmq import wire
from portalmq.broker.messages.browse import StoredMessage, StoredPage
from portalmq.broker.partition.long_poll import LeasedMessage
from portalmq.broker.partition.yielding import in_turns
from portalmq.broker.queues.later_acks import Acked
from portalmq.broker.storage.batch import Record

# After so many messages as JSON, other greenlets run.
MESSAGES_A_TURN = 1_000

_json = msgspec.json.Encoder()
_pack = msgspec.msgpack.Encoder()
_check_json = msgspec.json.Decoder(msgspec.Raw).decode

# Python's json reads integers of at most 4,300 digits (sys.int_info), and 1e400 is not an IEEE 754 number. A payload
# that may hold such a number, possibly within a string, is decoded to decide.
_all_digits_alike = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE = (b"e000", b"e+000", b"0" * 100)
_decode_json = msgspec.json.Decoder().decode


def json_message(stored: StoredMessage | LeasedMessage) -> wire.JsonMessageOut:
    """Return the message as in JSON answers."""
    record = stored.record
    message = wire.JsonMessageOut(
        id=f"{stored.partition}-{stored.offset}",
        topic=stored.topic,
        partition=stored.partition,
        offset=stored.offset,
        key=None,
        content_type=record.content_type,
        headers=record.headers or {},
        timestamp_ms=stored.timestamp_ms,
        deliver_at_ms=record.deliver_at_ms,
        expires_at_ms=record.expires_at_ms,
        priority=record.priority,
        receipt=stored.receipt,
        delivery_count=stored.delivery_count,
        lease_expires_at_ms=stored.lease_expires_at_ms,
    )
    if record.key is not None:
        try:
            message.key = record.key.decode("utf-8")
        except UnicodeDecodeError:
            message.key_base64 = base64.b64encode(record.key).decode("ascii")
    _show_value(message, record)
    return message


def _show_value(message: wire.JsonMessageOut, record: Record) -> None:
    try:
        text = record.value.decode("utf-8")
    except UnicodeDecodeError:
        message.value_base64 = base64.b64encode(record.value).decode("ascii")
        return
    message.value = embedded_json(record.value) if wire.is_json_type(record.content_type) else text
    if message.value is msgspec.UNSET:
        message.value = text


def embedded_json(value: bytes) -> msgspec.Raw | msgspec.UnsetType:
    """Return the payload as part of a JSON answer, on one line. UNSET when it is not JSON, whatever its content type
    says, or has a number for which many readers refuse the whole answer."""
    try:
        _check_json(value)
        if _has_large_number(value):
            return msgspec.UNSET
        if b"\n" in value or b"\r" in value:
            value = msgspec.json.format(value, indent=-1)
    except (msgspec.DecodeError, RecursionError):
        return msgspec.UNSET
    return msgspec.Raw(value)


def _has_large_number(value: bytes) -> bool:
    shape = value.translate(_all_digits_alike)
    if not (_LARGE[0] in shape or _LARGE[1] in shape or _LARGE[2] in shape):
        return False
    try:
        _decode_json(value)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return True
    return False


def packed_messages(messages: Iterable[StoredMessage | LeasedMessage]) -> list[wire.PackMessageOut]:
    shown = wire.PackMessageOut
    return [
        shown(
            stored.partition,
            stored.offset,
            record.value,
            stored.timestamp_ms,
            record.key,
            record.content_type,
            record.headers,
            record.deliver_at_ms,
            record.expires_at_ms,
            record.priority,
            stored.topic,
            stored.receipt,
            stored.delivery_count,
            stored.lease_expires_at_ms,
        )
        for stored in messages
        for record in (stored.record,)
    ]


def encode_received(messages: Iterable[LeasedMessage], acked: Acked | None, *, packed: bool) -> bytes:
    stale_receipts = acked.stale if acked is not None else []
    if packed:
        received = wire.PackReceived(packed_messages(messages), stale_receipts)
        if acked is not None:
            received.acks_later, received.acked_attempts = acked.verdicts is None, acked.attempts
        return _pack.encode(received)
    shown = [json_message(delivered) for delivered in in_turns(messages, MESSAGES_A_TURN)]
    answer: dict[str, object] = {"messages": shown}
    if stale_receipts:
        answer["stale_receipts"] = stale_receipts
    return _json.encode(answer) + b"\n"


def encode_page(page: StoredPage, *, packed: bool) -> bytes:
    offsets = (page.next_offset, page.log_start_offset, page.high_watermark)
    if packed:
        return _pack.encode(wire.PackBrowsePage(packed_messages(page.messages), *offsets))
    shown = [json_message(stored) for stored in in_turns(page.messages, MESSAGES_A_TURN)]
    return _json.encode(wire.BrowsePage(shown, *offsets)) + b"\n"


def json_line(stored: StoredMessage) -> bytes:
    return _json.encode(json_message(stored)) + b"\n"


def server_sent_event(stored: StoredMessage) -> bytes:
    """Return a message as a server-sent event (WHATWG HTML, 9.2). Its id is the offset, so a client can resume."""
    return b"id: %d\ndata: %s\n\n" % (stored.offset, _json.encode(json_message(stored)))
