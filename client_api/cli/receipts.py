"""Receipts of a producer: a line for each acknowledged message, to check later that it is there as it was sent.

    {"topic": "t", "partition": 0, "offset": 17, "id": "0-17", "checksum": "<half of a SHA-256, in hex>"}

The checksum covers key, value, content type and headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from os import SEEK_END
from pathlib import Path
from typing import IO

import msgspec

from portalmq import wire
from portalmq.message import RecordMetadata

CHECKSUM_DIGITS = 32
# More than any line has, and how one begins.
_LINE_BYTES = 4_096
_START = b'{"topic":"'

_encode = msgspec.msgpack.Encoder().encode


class Receipt(msgspec.Struct, frozen=True):
    topic: str
    partition: int
    offset: int
    id: str
    checksum: str


class BadReceipts(ValueError):
    """A file has a line that is no receipt."""


_encode_line = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(Receipt).decode


def checksum_of(key: bytes | None, value: bytes, content_type: str, headers: Mapping[str, str]) -> str:
    """Return the checksum of a message as it is stored."""
    return sha256(_encode((key, value, content_type, sorted(headers.items())))).hexdigest()[:CHECKSUM_DIGITS]


def checksum_to_send(
    key: str | None, value: bytes | str, content_type: str | None, headers: Mapping[str, str] | None
) -> str:
    """Return the checksum of a message that is sent as text or bytes."""
    natural = wire.TEXT if isinstance(value, str) else wire.BYTES
    sent = value.encode() if isinstance(value, str) else value
    return checksum_of(None if key is None else key.encode(), sent, content_type or natural, headers or {})


def receipt_line(place: RecordMetadata, checksum: str) -> bytes:
    receipt = Receipt(place.topic, place.partition, place.offset, f"{place.partition}-{place.offset}", checksum)
    return _encode_line(receipt) + b"\n"


def open_receipts(path: Path) -> IO[bytes]:
    """Open a file to append receipts, without what a kill has left of the last line. Raises OSError."""
    if path.is_file():
        with open(path, "rb+") as there:
            size = there.seek(0, SEEK_END)
            there.seek(max(0, size - _LINE_BYTES))
            rest = there.read().rpartition(b"\n")[2]
            if _is_cut_off(rest):
                there.truncate(size - len(rest))
            elif rest:
                there.write(b"\n")
    return open(path, "ab")


def _is_cut_off(line: bytes) -> bool:
    """Return whether a line is the beginning of a receipt."""
    is_whole = line.endswith((b"\n", b"}"))
    return not is_whole and bool(line) and line[: len(_START)] == _START[: len(line)]


def receipts_in(path: Path) -> Iterator[Receipt]:
    """Yield the receipts of a file, but not the beginning of one at its end. Raises BadReceipts."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if _is_cut_off(line):
                return
            try:
                receipt = _decode_line(line)
                if len(bytes.fromhex(receipt.checksum)) * 2 != CHECKSUM_DIGITS:
                    raise ValueError("its checksum is of another length")
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as fault:
                raise BadReceipts(f"{path}, line {number}, is no receipt: {fault}") from None
            yield receipt
