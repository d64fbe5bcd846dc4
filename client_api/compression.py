"""Compression of the values of a batch, with zstd (RFC 8878).

    data = one zstd frame of msgpack([value, value, ...])        each value is binary

The frame tells its content size, so a reader knows how much memory it takes before it decompresses. Python 3.14 has
zstd; before that the package backports.zstd has the same functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from portalmq.wire import BATCH_MESSAGES_MAX

try:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
except ImportError:  # a light client without the extra `zstd`
    if not TYPE_CHECKING:
        zstd = None

ZSTD: Final = "zstd"
HAS_ZSTD = zstd is not None
NEEDS_ZSTD = "compression with zstd needs Python 3.14 or the package backports.zstd: pip install 'portalmq[zstd]'"

LEVEL = 3
# Values below this size, and values that become hardly smaller, are sent as they are.
SIZE_MIN = 512
RATIO_MAX = 0.9

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Annotated[list[bytes], msgspec.Meta(max_length=BATCH_MESSAGES_MAX)]).decode


class BadValues(ValueError):
    """Compressed values are damaged, too large, or not in the form that is described here."""


def compressed(values: Sequence[bytes]) -> bytes | None:
    """Return the values compressed; None when that saves too little."""
    plain = _encode(values)
    if len(plain) < SIZE_MIN:
        return None
    data = zstd.compress(plain, LEVEL)
    return data if len(data) <= RATIO_MAX * len(plain) else None


def content_size(data: bytes) -> int:
    """Return how many bytes `data` decompresses to, as it says itself. Raises BadValues."""
    try:
        info, size = zstd.get_frame_info(data), zstd.get_frame_size(data)
    except zstd.ZstdError as fault:
        raise BadValues(f"no zstd frame: {fault}") from None
    if info.decompressed_size is None:
        raise BadValues("the zstd frame does not tell its content size")
    if size != len(data):
        raise BadValues(f"the zstd frame ends after {size} of {len(data)} bytes: send one frame and nothing else")
    return info.decompressed_size


def values_of(data: bytes, count: int, bytes_max: int | None = None) -> list[bytes]:
    """Return the `count` values that `data` holds. Raises BadValues; for more than `bytes_max` bytes before it
    decompresses them. Takes about 1 ms for each MiB: the thread of an event loop should not do much of it."""
    size = content_size(data)
    if bytes_max is not None and size > bytes_max:
        raise BadValues(f"the values take {size} bytes, the limit is {bytes_max}")
    decompressor = zstd.ZstdDecompressor()
    try:
        plain = decompressor.decompress(data, size + 1)
        if not decompressor.eof or len(plain) != size:
            raise BadValues(f"the zstd frame does not hold the {size} bytes that it says")
        values: list[bytes] = _decode(plain)
    except (zstd.ZstdError, msgspec.DecodeError) as fault:
        raise BadValues(f"not a zstd frame of a MessagePack array of binaries: {fault}") from None
    if len(values) != count:
        raise BadValues(f"{len(values)} values for {count} messages")
    return values
