"""Receipts: what a consumer shows to settle a message, unforgeable and self-contained.

    0        8          10       18        22        26      39 bytes, base64url without padding: 52 characters
    | topic  | partition| offset | delivery| leader  | MAC  |
    | tag    | u16      | u64    | u32     | epoch   |      |

The MAC is keyed BLAKE2b (RFC 7693) over the topic's id, the group and the fields before it; the key is the cluster's.
The group is not in the text: a receipt shown to another group simply fails its check.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Callable
from hashlib import blake2b
from hmac import compare_digest
from struct import Struct
from typing import NamedTuple

from portalmq.errors import InvalidRequest

_FIELDS = Struct(">8sHQII")
_MAC_BYTES = 13
_FIELDS_BYTES = _FIELDS.size
TAG_BYTES = 8
TEXT_LENGTH = 52
_TO_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_FROM_URL_SAFE = bytes.maketrans(b"-_", b"+/")


class Receipt(NamedTuple):
    topic_tag: bytes
    partition: int
    offset: int
    delivery: int
    leader_epoch: int


def topic_tag(topic_id: str) -> bytes:
    """Eight bytes that stand for a topic in its receipts."""
    return blake2b(topic_id.encode(), digest_size=8).digest()


class ReceiptBook:
    """Writes and checks the receipts of one group on one topic."""

    def __init__(self, key: bytes, topic_id: str, group: str) -> None:
        self._tag = topic_tag(topic_id)
        self._mac = blake2b(f"{topic_id}\n{group}\n".encode(), digest_size=_MAC_BYTES, key=key[:64])

    def writer(self, partition: int, leader_epoch: int) -> Callable[[int, int], str]:
        """What writes the receipts of a partition: (offset, delivery) -> text. One a receive, as this is hot."""
        pack, tag, begin = _FIELDS.pack, self._tag, self._mac.copy

        def write(offset: int, delivery: int) -> str:
            fields = pack(tag, partition, offset, delivery, leader_epoch)
            mac = begin()
            mac.update(fields)
            return b2a_base64(fields + mac.digest(), newline=False).translate(_TO_URL_SAFE).decode("ascii")

        return write

    def check(self, raw: bytes) -> Receipt:
        """The receipt in the bytes that `decode` gave. Raises InvalidRequest when it is none of this group's."""
        fields = raw[:_FIELDS_BYTES]
        mac = self._mac.copy()
        mac.update(fields)
        if not compare_digest(mac.digest(), raw[_FIELDS_BYTES:]):
            raise not_a_receipt(b2a_base64(raw, newline=False).translate(_TO_URL_SAFE).decode("ascii"))
        return Receipt._make(_FIELDS.unpack(fields))


def decode(text: str) -> bytes:
    """The bytes of a receipt that is still to be checked; the first TAG_BYTES tell whose book is to check it."""
    try:
        raw = a2b_base64(text.encode("ascii").translate(_FROM_URL_SAFE), strict_mode=True)
    except (Base64Error, ValueError):
        raw = b""
    if len(raw) != _FIELDS_BYTES + _MAC_BYTES:
        raise not_a_receipt(text)
    return raw


def not_a_receipt(text: str) -> InvalidRequest:
    return InvalidRequest(f"{text[:80]!r} is not a receipt of this group: send receipts back as receive gave them")
