"""Decoding of bodies into Structs. Its errors say where a body is not valid."""

from __future__ import annotations

import base64
import binascii
from contextlib import suppress
from typing import TypeVar

import msgspec

from portalmq.errors import InvalidRequest


def prepare(*kinds: type[msgspec.Struct]) -> None:
    """Have msgspec build the decoders of these kinds; without arguments, of all Structs of PortalMQ. (It cannot decode
    some of its own: `msgspec.inspect` has such before 0.22.)

    msgspec does this at the first use of a kind, and crashes the process if two threads do it at once (seen in 0.22).
    So call this before starting threads.
    """
    for kind in kinds or structs_of(__name__.partition(".")[0]):
        with suppress(TypeError):  # of some no decoder exists: they stay in memory
            msgspec.json.Decoder(kind)


def structs_of(name: str) -> list[type[msgspec.Struct]]:
    """Return the Structs of a module, or of the modules of a package."""
    return [kind for kind in _all_of(msgspec.Struct) if f"{kind.__module__}.".startswith(f"{name}.")]


def _all_of(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    return [deeper for direct in kind.__subclasses__() for deeper in (direct, *_all_of(direct))]


T = TypeVar("T")


def decode_json(body: bytes, kind: type[T]) -> T:
    """Return `body` as a `kind`; an empty body counts as `{}`. Raises InvalidRequest that says where it is invalid."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InvalidRequest(f"the JSON body is not valid: {fault}") from None


def decode_msgpack(body: bytes, kind: type[T]) -> T:
    """Return `body` as a `kind`. Raises InvalidRequest that says where it is invalid."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InvalidRequest(f"the MessagePack body is not valid: {fault}") from None


def decode_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as fault:
        raise InvalidRequest(f"{what} is not base64 (RFC 4648, section 4): {fault}") from None
