"""A message as the old protocols carry it: one JSON value. Text is stored as text, and anything else as JSON; bytes
that are neither come out as base64, and say so."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from portalmq import wire
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest

_encode = msgspec.json.Encoder().encode


def record_of(message: Any) -> Record:
    if isinstance(message, str):
        return Record(message.encode(), wire.TEXT)
    return Record(_encode(message), wire.JSON)


def shown(record: Record, name: str = "message") -> dict[str, Any]:
    """The message as a member of an answer: under `name`, or under `<name>_base64`."""
    try:
        text = record.value.decode("utf-8")
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(record.value).decode("ascii")}
    if wire.is_json_type(record.content_type):
        try:
            return {name: msgspec.json.decode(record.value)}
        except msgspec.MsgspecError:
            pass  # it says that it is JSON, and is not: as text it is what was sent
    return {name: text}


def message_id(partition: int, offset: int) -> str:
    return f"{partition}-{offset}"


def place_of_id(text: str) -> tuple[int, int]:
    """(partition, offset). Raises InvalidRequest."""
    partition, dash, offset = text.partition("-")
    if dash and partition.isdecimal() and offset.isdecimal() and len(text) <= 40 and text.isascii():
        return int(partition), int(offset)
    raise InvalidRequest(f"{text[:100]!r} is no key of a message: show the one that came with it")


# A message as one integer: the offset itself in partition 0, where all messages of a queue with one partition are.
_OFFSET_BITS = 40


def number_of(partition: int, offset: int) -> int:
    """Exact in every JSON reader: 10 bits of partition over 40 of offset are below 2^53."""
    return (partition << _OFFSET_BITS) | offset


def place_of_number(number: int) -> tuple[int, int]:
    return number >> _OFFSET_BITS, number & ((1 << _OFFSET_BITS) - 1)
