"""Decode the body of a produce request, in any of its formats, into the records that are stored.

    batch+json      {"messages": [{"value": any JSON | "value_base64": "...", "key", "headers", ...}], "producer"}
    batch+msgpack   the same; a binary value is the payload itself. Or all values are compressed together:
                    {"values": {"codec": "zstd", "data": …}, "messages": [{"key", …}]} (wire.CompressedValues)
    x-ndjson        each line is the JSON value of one message
    cloudevents-batch+json   [event, …] (cloud_events.py)
    anything else   the body is one message, its options are PortalMQ-* headers (single_message.py); if it is
                    cloudevents+json, the event in it

A whole batch is checked before any of it is appended. An error names the index of its message. Delays and times to live
become times of day here, by the clock of the broker that takes the request (schedule.py).
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from portalmq import wire
from portalmq.broker.api import cloud_events
from portalmq.broker.api.record_fields import (
    check_utf8,
    checked_headers,
    checked_idempotency_key,
    checked_type,
    record_of_json,
    record_of_pack,
)
from portalmq.broker.api.single_message import check_no_single_headers, decode_single
from portalmq.broker.messages.idempotency import Keyed
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.native import decompressed
from portalmq.broker.partition.yielding import give_way, in_turns
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, MessageTooLarge

T = TypeVar("T")

# After so many messages, or bytes, other greenlets run.
MESSAGES_A_TURN = 1_000
BYTES_A_TURN = 128 * 1024
# From this size on, a body is decoded message by message. That is slower, and lets other greenlets run.
LARGE_BYTES = 1024 * 1024
# The same for MessagePack, where values become objects: a body may hold as many objects as bytes.
DENSE_BYTES = 256 * 1024


class _PlainMessage(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    """A message as the client library sends it, with its limits. Only idempotency keys need further checks: a pattern
    here would take as long as the rest of the decoding."""

    value: bytes | msgspec.UnsetType = msgspec.UNSET
    content_type: Annotated[str, msgspec.Meta(min_length=1, max_length=wire.CONTENT_TYPE_LENGTH_MAX)] | None = None
    key: Annotated[bytes, msgspec.Meta(max_length=wire.KEY_BYTES_MAX)] | None = None
    headers: dict[str, str] | None = None
    idempotency_key: str | None = None


class _PlainBatch(msgspec.Struct, forbid_unknown_fields=True):
    messages: Annotated[list[_PlainMessage], msgspec.Meta(max_length=wire.BATCH_MESSAGES_MAX)]
    producer: wire.ProducerStamp | None = None
    values: wire.CompressedValues | None = None


class _RawBatch(msgspec.Struct, forbid_unknown_fields=True):
    """A batch whose messages are not decoded yet."""

    messages: list[msgspec.Raw]
    producer: wire.ProducerStamp | None = None


class _RawPackBatch(_RawBatch, forbid_unknown_fields=True):
    values: wire.CompressedValues | None = None


class _TooMany(Exception):
    """A batch has more messages than the limit."""


class _Counted(msgspec.Struct, gc=False):
    """A message that is only counted. Decoding stops at the limit."""

    def __post_init__(self) -> None:
        _counted[0] += 1
        if _counted[0] > wire.BATCH_MESSAGES_MAX:
            raise _TooMany


class _CountedBatch(msgspec.Struct):
    messages: list[_Counted]


_counted = [0]  # of the decoding under way, during which no other greenlet runs

# A line that is not blank, from its first character on.
_line = re.compile(rb"\S[^\n]*")

_headers_of = attrgetter("headers")
_NO_OPTIONS = (None, None, None, 0)
_decode_plain = msgspec.msgpack.Decoder(_PlainBatch).decode
_count_events = msgspec.json.Decoder(list[_Counted]).decode
_decode_events = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_raw_json = msgspec.json.Decoder(msgspec.Raw).decode


class _Format(NamedTuple):
    """The decoders of a batch format. From `parts_from_bytes` on, a body is decoded message by message."""

    name: str
    count_messages: Callable[[bytes], _CountedBatch]
    decode: Callable[[bytes], Any]
    parts_from_bytes: int
    split: Callable[[bytes], _RawBatch]
    decode_message: Callable[[msgspec.Raw], Any]
    record_of: Callable[..., Record]


_JSON = _Format(
    "JSON",
    msgspec.json.Decoder(_CountedBatch).decode,
    partial(wire.decode_json, kind=wire.JsonBatch),
    LARGE_BYTES,
    msgspec.json.Decoder(_RawBatch).decode,
    msgspec.json.Decoder(wire.JsonMessage).decode,
    record_of_json,
)
_PACK = _Format(
    "MessagePack",
    msgspec.msgpack.Decoder(_CountedBatch).decode,
    partial(wire.decode_msgpack, kind=wire.PackBatch),
    DENSE_BYTES,
    msgspec.msgpack.Decoder(_RawPackBatch).decode,
    msgspec.msgpack.Decoder(wire.PackMessage).decode,
    record_of_pack,
)


# Returns the values of so many messages.
Decompress = Callable[[bytes, int], list[bytes]]


def decode_messages(
    content_type: str | None,
    body: bytes,
    headers: Mapping[str, str],
    now_ms: int,
    decompress: Decompress = decompressed,
) -> ProduceRequest:
    """Return the messages of a request body; `headers` are the request's. Delays and times to live count from
    `now_ms`, a time of day. Values that are compressed are decompressed once: what cannot be read is refused here.

    Raises InvalidRequest, or MessageTooLarge when a batch has too many messages. The size of a value is checked later,
    against its topic's limit.
    """
    essence = (content_type or "").partition(";")[0].strip().lower()
    if essence == wire.BATCH_MSGPACK:
        request = _from_msgpack(body, now_ms, decompress)
    elif essence == wire.BATCH_JSON:
        check_utf8(body)
        request = _from_batch(body, _JSON, now_ms, decompress)
    elif essence == wire.NDJSON:
        request = _from_lines(body)
    elif essence == wire.CLOUD_EVENTS:
        check_utf8(body)
        request = _from_events(body)
    else:
        return decode_single(content_type, body, headers, now_ms)
    check_no_single_headers(headers)
    return request


def _from_msgpack(body: bytes, now_ms: int, decompress: Decompress) -> ProduceRequest:
    try:
        plain = _decode_plain(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _from_batch(body, _PACK, now_ms, decompress)
    _pause_in(body)
    messages, packed = plain.messages, plain.values
    values: list[Any] = [message.value for message in messages]
    named = [message.idempotency_key for message in messages]
    given = [key for key in named if key is not None]
    if values.count(msgspec.UNSET) != (len(values) if packed else 0) or (given and not _are_keys(given)):
        return _from_batch(body, _PACK, now_ms, decompress)  # raises an error that names the wrong one
    default = packed.content_type if packed else wire.BYTES
    types = [message.content_type or default for message in messages]
    for content_type in set(types):
        checked_type(content_type, "the batch")
    if packed:
        values = decompress(packed.data, len(messages))
    records = [Record(value, kind, message.key) for value, kind, message in zip(values, types, messages, strict=True)]
    if any(map(_headers_of, messages)):
        paced = in_turns(zip(records, messages, strict=True), messages_per_turn(messages, len(body)))
        records = [
            Record(record.value, record.content_type, record.key, checked_headers(message.headers, f"message {index}"))
            for index, (record, message) in enumerate(paced)
        ]
    keys: list[Keyed | None] | None = None
    if given:
        keys = [None if key is None else (key, ()) for key in named]
    return ProduceRequest(records, producer=plain.producer, keys=keys, compressed=_kept(packed, values))


def _kept(packed: wire.CompressedValues | None, values: Iterable[bytes]) -> bytes:
    """Return the compressed values if they are stored so. An empty one prevents it, since its row shows a tombstone."""
    return packed.data if packed is not None and b"" not in values else b""


def _from_batch(body: bytes, form: _Format, now_ms: int, decompress: Decompress) -> ProduceRequest:
    _pause_in(body)
    _check_few(body, form.count_messages)
    size = len(body)
    batch = form.decode(body) if size < form.parts_from_bytes else None
    messages, batch = (batch.messages, batch) if batch is not None else _in_parts(body, form)
    if len(messages) > wire.BATCH_MESSAGES_MAX:
        raise MessageTooLarge(
            f"the batch has {len(messages)} messages, the limit is {wire.BATCH_MESSAGES_MAX}: split it"
        )
    if size >= DENSE_BYTES:
        give_way()
    packed: wire.CompressedValues | None = getattr(batch, "values", None)
    if packed is not None:
        _fill_in(messages, packed, decompress)
    paced = in_turns(messages, messages_per_turn(messages, size))
    records = [form.record_of(message, f"message {index}", now_ms) for index, message in enumerate(paced)]
    compressed = _kept(packed, (record.value for record in records))
    return ProduceRequest(
        records, _partitions(messages), producer=batch.producer, keys=_keys(messages), compressed=compressed
    )


def _fill_in(messages: Sequence[wire.PackMessage], packed: wire.CompressedValues, decompress: Decompress) -> None:
    for index, message in enumerate(messages):
        if message.value is not msgspec.UNSET or message.value_base64 is not None:
            raise InvalidRequest(f"message {index} has a value, and the values of the batch are compressed: give one")
    for message, value in zip(messages, decompress(packed.data, len(messages)), strict=True):
        message.value = value
        message.content_type = message.content_type or packed.content_type


def _in_parts(body: bytes, form: _Format) -> tuple[list[Any], Any]:
    """Return the messages of a large batch, and the batch. Raises InvalidRequest that says where the error is."""
    inside = "`$"
    try:
        _pause_in(body)
        batch = form.split(body)
        _pause_in(body)
        inside = "`$.messages[...]"
        paced = in_turns(batch.messages, messages_per_turn(batch.messages, len(body)))
        return [_without_collector(form.decode_message, raw) for raw in paced], batch
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InvalidRequest(f"the {form.name} body is not valid: {str(fault).replace('`$', inside)}") from None


def _without_collector(decode: Callable[[msgspec.Raw], T], raw: msgspec.Raw) -> T:
    """Decode with the garbage collector off. Decoded values hold no cycles, and searching growing values for cycles
    takes many times as long as decoding them."""
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


def messages_per_turn(messages: Sequence[Any], size: int) -> int:
    """Return how many messages of a body of `size` bytes are handled before other greenlets run."""
    return max(1, min(MESSAGES_A_TURN, len(messages) * BYTES_A_TURN // max(1, size)))


def _from_lines(body: bytes) -> ProduceRequest:
    check_utf8(body)
    records: list[Record] = []
    for line in in_turns(_line.finditer(body), MESSAGES_A_TURN):
        if len(records) == wire.BATCH_MESSAGES_MAX:
            raise MessageTooLarge(f"there are more than {wire.BATCH_MESSAGES_MAX} lines, which is the limit: split it")
        try:
            records.append(Record(bytes(_decode_raw_json(line[0])), wire.JSON))
        except (msgspec.DecodeError, RecursionError) as fault:
            number = body.count(b"\n", 0, line.start()) + 1
            raise InvalidRequest(f"line {number} is not JSON: {fault}") from None
    return ProduceRequest(records)


def _from_events(body: bytes) -> ProduceRequest:
    _check_few(body, _count_events)
    try:
        events = _decode_events(body)
    except (msgspec.DecodeError, RecursionError) as fault:
        raise InvalidRequest(f"the body is not an array of events in JSON: {fault}") from None
    records: list[Record] = []
    for index, event in enumerate(in_turns(events, messages_per_turn(events, len(body)))):
        where = f"event {index}"
        value, kind, headers = cloud_events.parts_of(event, where)
        records.append(Record(value, checked_type(kind, where), None, checked_headers(headers, where)))
    return ProduceRequest(records)


def _partitions(messages: Sequence[Any]) -> list[int | None] | None:
    named = [message.partition for message in messages]
    return named if any(partition is not None for partition in named) else None


def _are_keys(keys: Sequence[str]) -> bool:
    """Return whether all are valid idempotency keys. Checks them together, which is faster than one by one."""
    joined = "".join(keys)
    lengths = list(map(len, keys))
    return (
        joined.isascii()
        and joined.isprintable()
        and min(lengths) >= 1
        and max(lengths) <= wire.IDEMPOTENCY_KEY_LENGTH_MAX
    )


def _keys(messages: Sequence[wire.JsonMessage | wire.PackMessage]) -> list[Keyed | None] | None:
    """Return the keys of a batch's messages, each with the options as the client sent them: a retry repeats its delay,
    which then ends at another time."""
    keys: list[Keyed | None] = []
    for index, message in enumerate(in_turns(messages, MESSAGES_A_TURN)):
        key = message.idempotency_key
        if key is None:
            keys.append(None)
            continue
        options = (message.delay_ms, message.deliver_at_ms, message.ttl_ms, message.priority or 0)
        as_sent = () if options == _NO_OPTIONS else options
        keys.append((checked_idempotency_key(key, f"the idempotency_key of message {index}"), as_sent))
    return keys if any(keys) else None


def _check_few(body: bytes, count: Callable[[bytes], object]) -> None:
    """Raise MessageTooLarge for too many messages before all are decoded, which would take much time and memory."""
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
        return  # decoding it whole raises an error with its place
