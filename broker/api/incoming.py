"""Every form in which messages come in, turned into the records that are stored.

    batch+json      {"messages": [{"value": any JSON | "value_base64": "...", "key", "headers", ...}], "producer"}
    batch+msgpack   the same; a binary value is the payload itself
    x-ndjson        each line one message's JSON value
    anything else   the body is one message, PortalMQ-* headers tell the rest

A batch is checked whole before anything of it reaches the domain; what is wrong is named with the index of its message.
Delays and times to live become moments here, by the clock of the broker that takes the request (see schedule.py).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Annotated, Any, TypeVar

import msgspec

from portalmq import wire
from portalmq.broker.api import schedule
from portalmq.broker.messages.idempotency import Keyed
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.yielding import give_way, in_turns
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, MessageTooLarge

T = TypeVar("T")

CONTENT_TYPE_LENGTH_MAX = 255
# So many messages are turned into records before others have their turn; fewer of those that are large.
MESSAGES_A_TURN = 1_000
BYTES_A_TURN = 128 * 1024
# A body of so many bytes is decoded message by message, which takes longer, and lets others have their turn.
LARGE_BYTES = 1024 * 1024
# The same, where values become objects: of so many bytes may be as many.
DENSE_BYTES = 256 * 1024

# Headers that become message headers under their own name: trace context (W3C) and binary CloudEvents.
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


class _PlainMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """The message that the client library sends, with its limits. A batch of these needs no other check, but for the
    keys: a pattern would take as long as all the rest of the decoding."""

    value: bytes
    content_type: Annotated[str, msgspec.Meta(min_length=1, max_length=CONTENT_TYPE_LENGTH_MAX)] = wire.BYTES
    key: Annotated[bytes, msgspec.Meta(max_length=wire.KEY_BYTES_MAX)] | None = None
    headers: dict[str, str] | None = None
    idempotency_key: str | None = None


class _PlainBatch(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[_PlainMessage], msgspec.Meta(max_length=wire.BATCH_MESSAGES_MAX)]
    producer: wire.ProducerStamp | None = None


class _RawBatch(msgspec.Struct, forbid_unknown_fields=True):
    """A batch whose messages are not decoded yet."""

    messages: list[msgspec.Raw]
    producer: wire.ProducerStamp | None = None


class _TooMany(Exception):
    """There are more messages than a batch may have."""


class _Counted(msgspec.Struct, gc=False):
    """A message of which nothing is kept. No more are decoded than a batch may have."""

    def __post_init__(self) -> None:
        _counted[0] += 1
        if _counted[0] > wire.BATCH_MESSAGES_MAX:
            raise _TooMany


class _CountedBatch(msgspec.Struct):
    messages: list[_Counted]


_counted = [0]  # of the decoding under way: that lets nobody else run

# Whoever writes a message's headers into HTTP, or a log, must find no line break in them.
_header_name = re.compile(r"[^\s:\x00-\x1f\x7f-\x9f]+\Z").match
_control_character = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]").search

# A line that is not blank, from its first character on.
_a_line = re.compile(rb"\S[^\n]*")

_headers_of = attrgetter("headers")
_type_of = attrgetter("content_type")
_idempotency_key_of = attrgetter("idempotency_key")
_NO_OPTIONS = (None, None, None, 0)
_decode_plain = msgspec.msgpack.Decoder(_PlainBatch).decode
_count_json = msgspec.json.Decoder(_CountedBatch).decode
_count_pack = msgspec.msgpack.Decoder(_CountedBatch).decode
_split_json = msgspec.json.Decoder(_RawBatch).decode
_split_pack = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_json_message = msgspec.json.Decoder(wire.JsonMessage).decode
_decode_pack_message = msgspec.msgpack.Decoder(wire.PackMessage).decode
_decode_raw_json = msgspec.json.Decoder(msgspec.Raw).decode
_decode_text = msgspec.json.Decoder(str).decode


def decode_messages(content_type: str | None, body: bytes, environ: dict[str, Any], now_ms: int) -> ProduceRequest:
    """The messages of a request with this content type and body; `environ` holds its headers, `now_ms` is the time of
    day from which delays and times to live count.

    Raises InvalidRequest, or MessageTooLarge when a batch has too many messages. The size of a value is the topic's
    affair.
    """
    essence = (content_type or "").partition(";")[0].strip().lower()
    if essence == wire.BATCH_MSGPACK:
        return _alone(_from_msgpack(body, now_ms), environ)
    if essence == wire.BATCH_JSON:
        return _alone(_from_json(body, now_ms), environ)
    if essence == wire.NDJSON:
        return _alone(_from_lines(body), environ)
    return _from_raw(content_type, body, environ, now_ms)


# --- batches ---------------------------------------------------------------------------------------------------------


def _from_msgpack(body: bytes, now_ms: int) -> ProduceRequest:
    try:
        plain = _decode_plain(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _from_any_msgpack(body, now_ms)
    _pause_in(body)
    messages = plain.messages
    named = list(map(_idempotency_key_of, messages))
    given = [key for key in named if key is not None]
    if given and not _are_keys(given):
        return _from_any_msgpack(body, now_ms)  # which names the one that is wrong
    for content_type in set(map(_type_of, messages)):
        _checked_type(content_type, "the batch")
    if any(map(_headers_of, messages)):
        records = [
            Record(
                message.value, message.content_type, message.key, _checked_headers(message.headers, f"message {index}")
            )
            for index, message in enumerate(in_turns(messages, a_turn(messages, len(body))))
        ]
    else:
        records = [Record(message.value, message.content_type, message.key) for message in messages]
    keys: list[Keyed | None] | None = None
    if given:
        keys = [None if key is None else (key, ()) for key in named]
    return ProduceRequest(records, producer=plain.producer, keys=keys)


def _from_any_msgpack(body: bytes, now_ms: int) -> ProduceRequest:
    _pause_in(body)
    _check_few(body, _count_pack)
    if len(body) < DENSE_BYTES:
        batch = wire.decode_msgpack(body, wire.PackBatch)
        return _from_batch(batch.messages, batch.producer, len(body), record_of_pack, now_ms)
    messages, producer = _in_parts(body, _split_pack, _decode_pack_message, "MessagePack")
    return _from_batch(messages, producer, len(body), record_of_pack, now_ms)


def _from_json(body: bytes, now_ms: int) -> ProduceRequest:
    _check_utf8(body)
    _pause_in(body)
    _check_few(body, _count_json)
    if len(body) < LARGE_BYTES:
        batch = wire.decode_json(body, wire.JsonBatch)
        return _from_batch(batch.messages, batch.producer, len(body), record_of_json, now_ms)
    messages, producer = _in_parts(body, _split_json, _decode_json_message, "JSON")
    return _from_batch(messages, producer, len(body), record_of_json, now_ms)


def _in_parts(
    body: bytes, split: Callable[[bytes], _RawBatch], decode: Callable[[msgspec.Raw], Any], what: str
) -> tuple[list[Any], wire.ProducerStamp | None]:
    """The messages of a large batch and its producer. Raises InvalidRequest with the place of the fault."""
    inside = "`$"
    try:
        _pause_in(body)
        batch = split(body)
        _pause_in(body)
        inside = "`$.messages[...]"
        paced = in_turns(batch.messages, a_turn(batch.messages, len(body)))
        return [_without_collector(decode, raw) for raw in paced], batch.producer
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InvalidRequest(f"the {what} body is not valid: {str(fault).replace('`$', inside)}") from None


def _without_collector(decode: Callable[[msgspec.Raw], T], raw: msgspec.Raw) -> T:
    """What is decoded holds no cycles. Looking for them while it grows takes many times as long as the decoding."""
    if not gc.isenabled():
        return decode(raw)
    gc.disable()
    try:
        return decode(raw)
    finally:
        gc.enable()


def _pause_in(body: bytes) -> None:
    if len(body) >= LARGE_BYTES:
        give_way()


def a_turn(messages: Sequence[Any], size: int) -> int:
    """How many messages of a body of that size are looked at in a turn."""
    return max(1, min(MESSAGES_A_TURN, len(messages) * BYTES_A_TURN // max(1, size)))


def _from_batch(
    messages: Sequence[Any],
    producer: wire.ProducerStamp | None,
    size: int,
    record_of: Callable[..., Record],
    now_ms: int,
) -> ProduceRequest:
    _check_count(len(messages))
    if size >= DENSE_BYTES:
        give_way()
    paced = in_turns(messages, a_turn(messages, size))
    records = [record_of(message, f"message {index}", now_ms) for index, message in enumerate(paced)]
    return ProduceRequest(records, _partitions(messages), producer=producer, keys=_keys(messages))


def record_of_pack(message: wire.PackMessage, where: str, now_ms: int) -> Record:
    """The record of a message as MessagePack carries it; `where` names it in errors. Raises InvalidRequest."""
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
        message.value = msgspec.UNSET  # many objects go in this turn, and not with those of the others
    return _record(message, value, kind, where, now_ms)


def record_of_json(message: wire.JsonMessage, where: str, now_ms: int) -> Record:
    """The record of a message as JSON carries it; `where` names it in errors. Raises InvalidRequest."""
    raw = message.value
    if message.value_base64 is not None:
        value, kind = _unwrapped(message, where), wire.BYTES
    elif isinstance(raw, msgspec.UnsetType):
        raise _no_value(where)
    else:
        value, kind = bytes(raw), wire.JSON
        # A message as browse shows it goes in again as it was: text stands there as a JSON string.
        if value[:1] == b'"' and _names_no_json(message.content_type):
            value, kind = _decode_text(value).encode("utf-8"), wire.TEXT
    return _record(message, value, kind, where, now_ms)


def _from_lines(body: bytes) -> ProduceRequest:
    _check_utf8(body)
    records: list[Record] = []
    for line in in_turns(_a_line.finditer(body), MESSAGES_A_TURN):
        if len(records) == wire.BATCH_MESSAGES_MAX:
            raise MessageTooLarge(f"there are more than {wire.BATCH_MESSAGES_MAX} lines, which is the limit: split it")
        try:
            records.append(Record(bytes(_decode_raw_json(line[0])), wire.JSON))
        except (msgspec.DecodeError, RecursionError) as fault:
            number = body.count(b"\n", 0, line.start()) + 1
            raise InvalidRequest(f"line {number} is not JSON: {fault}") from None
    return ProduceRequest(records)


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
        content_type if message.content_type is None else _checked_type(message.content_type, where),
        _key(message, where),
        _checked_headers(message.headers, where),
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
    return _checked_key(key, where)


def _partitions(messages: Sequence[Any]) -> list[int | None] | None:
    named = [message.partition for message in messages]
    return named if any(partition is not None for partition in named) else None


def _names_no_json(content_type: str | None) -> bool:
    return content_type is not None and not wire.is_json_type(content_type)


def _as_json(value: Any, where: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, msgspec.EncodeError) as fault:
        raise InvalidRequest(f"the value of {where} cannot be written as JSON: {fault}") from None


def _no_value(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where} has no value: give value, or value_base64")


# --- one message, as it is -------------------------------------------------------------------------------------------


def _from_raw(content_type: str | None, body: bytes, environ: dict[str, Any], now_ms: int) -> ProduceRequest:
    kind = _checked_type(content_type, "the request") if content_type else wire.BYTES
    if body and wire.is_json_type(kind):
        try:
            _check_utf8(body)
            _decode_raw_json(body)
        except (msgspec.DecodeError, RecursionError) as fault:
            raise InvalidRequest(f"the body is not the JSON that its Content-Type says: {fault}") from None
    options = schedule.of_headers(environ, now_ms)
    key = environ.get("HTTP_PORTALMQ_KEY")
    record = Record(
        body,
        kind,
        _checked_key(None if key is None else _header_text(key, wire.HEADER_KEY).encode("utf-8"), "the request"),
        _checked_headers(_message_headers(environ), "the request"),
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
    """A header's value as UTF-8: WSGI hands over its bytes, read as latin-1 (PEP 3333)."""
    if value.isascii():
        return value
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        raise InvalidRequest(f"the header {_lower(name.removeprefix('HTTP_'))!r} is not UTF-8") from None


def idempotency_key_of(environ: dict[str, Any]) -> str | None:
    """The Idempotency-Key, bare or as a structured-field string (RFC 8941, section 3.3.3)."""
    key: str | None = environ.get("HTTP_IDEMPOTENCY_KEY")
    if key is None:
        return None
    key = key.strip()
    if key.startswith('"'):
        if len(key) < 2 or not key.endswith('"'):
            raise InvalidRequest("Idempotency-Key begins with a quote and does not end with one")
        key = key[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return _checked_idempotency_key(key, "Idempotency-Key")


def _are_keys(keys: Sequence[str]) -> bool:
    joined = "".join(keys)
    lengths = list(map(len, keys))
    return (
        joined.isascii()
        and joined.isprintable()
        and min(lengths) >= 1
        and max(lengths) <= wire.IDEMPOTENCY_KEY_LENGTH_MAX
    )


def _checked_idempotency_key(key: str, what: str) -> str:
    if not (1 <= len(key) <= wire.IDEMPOTENCY_KEY_LENGTH_MAX) or not key.isascii() or not key.isprintable():
        raise InvalidRequest(f"{what} must be 1 to {wire.IDEMPOTENCY_KEY_LENGTH_MAX} printable ASCII characters")
    return key


def _keys(messages: Sequence[wire.JsonMessage | wire.PackMessage]) -> list[Keyed | None] | None:
    """The keys of a batch's messages, with the options as they were sent: a delay comes to another moment each time."""
    keys: list[Keyed | None] = []
    for index, message in enumerate(in_turns(messages, MESSAGES_A_TURN)):
        key = message.idempotency_key
        if key is None:
            keys.append(None)
            continue
        options = (message.delay_ms, message.deliver_at_ms, message.ttl_ms, message.priority or 0)
        as_sent = () if options == _NO_OPTIONS else options
        keys.append((_checked_idempotency_key(key, f"the idempotency_key of message {index}"), as_sent))
    return keys if any(keys) else None


def _alone(request: ProduceRequest, environ: dict[str, Any]) -> ProduceRequest:
    """A batch that no header says anything of: a delay that is passed over in silence would come too early."""
    if "HTTP_IDEMPOTENCY_KEY" in environ:
        raise InvalidRequest(
            "Idempotency-Key belongs to a single message; in a batch each message has its own idempotency_key, or the"
            " batch a producer's stamp"
        )
    for name in environ:
        if name in _OF_A_SINGLE or name.startswith(_OWN_HEADER):
            raise InvalidRequest(
                f"the header {_lower(name.removeprefix('HTTP_'))!r} belongs to a single message: in a JSON or"
                " MessagePack batch each message says it itself"
            )
    return request


# --- limits ----------------------------------------------------------------------------------------------------------


def _check_few(body: bytes, count: Callable[[bytes], object]) -> None:
    """Refuse a body of very many small messages before they are all decoded, which would take much time and memory."""
    if len(body) <= wire.BATCH_MESSAGES_MAX:
        return
    _counted[0] = 0
    try:
        count(body)
    except _TooMany:
        raise MessageTooLarge(
            f"the batch has more than {wire.BATCH_MESSAGES_MAX} messages, which is the limit: split it"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return  # the decoding names what is wrong


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


def _checked_headers(headers: dict[str, str] | None, where: str) -> dict[str, str] | None:
    """The headers with their names in lower case."""
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
