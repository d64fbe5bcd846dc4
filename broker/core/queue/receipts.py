"""Receipts: self-contained signed proofs of a lease, which a consumer sends to settle a message.

Messages that are delivered together, side by side and under one lease, share the head of their receipts; only the last
three bytes differ. So a receive of a hundred messages signs once, and an ack of them checks once. A consumer can forge
receipts of its own lease, and of no other.

    0        8          10      18      22         26      30    45     48 bytes, base64url: 64 characters
    | topic  | partition| first | count | delivery | leader| MAC | nth  |
    | tag    | u16      | u64   | u32   | u32      | epoch |     | u24  |

The MAC is keyed BLAKE2b (RFC 7693) over the topic's id, the group, its id and the fields before the MAC; the key is the
cluster's. The group is not in the text: a receipt sent to another group fails its check.
"""

from __future__ import annotations

from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from hmac import compare_digest
from operator import itemgetter
from struct import Struct
from typing import NamedTuple

from portalmq.errors import InvalidRequest

_FIELDS = Struct(">8sHQIII")
_FIELDS_BYTES = _FIELDS.size
_MAC_BYTES = 15
HEAD_LENGTH = 60
COUNT_MAX = 1 << 24
_TO_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_FROM_URL_SAFE = bytes.maketrans(b"-_", b"+/")
# The texts that complete the receipts of a lease, as many as its largest receive had.
_endings: list[str] = []

head_of = itemgetter(slice(HEAD_LENGTH))


class Lease(NamedTuple):
    """The head of a receipt: `messages` messages of a partition from `first` on, in their lease number `delivery`."""

    topic_tag: bytes
    partition: int
    first: int
    messages: int
    delivery: int
    leader_epoch: int


def topic_tag(topic_id: str) -> bytes:
    """Return eight bytes that identify a topic in its receipts."""
    return blake2b(topic_id.encode(), digest_size=8).digest()


def topic_mark(topic_id: str) -> str:
    """Return eight letters of the topic's tag, which distinguish it from an earlier topic of the same name in visible
    keys."""
    return _mark(topic_tag(topic_id))


def mark_in(receipt: str) -> str:
    """Return the mark of a receipt's topic."""
    return _mark(tag_of(receipt[:HEAD_LENGTH]))


def _mark(tag: bytes) -> str:
    return tag[:4].hex()


class ReceiptSigner:
    """The receipts of one group on one topic: signing and checking."""

    def __init__(self, key: bytes, topic_id: str, group: str, group_id: str = "") -> None:
        self._tag = topic_tag(topic_id)
        self._mac = blake2b(f"{topic_id}\n{group}\n{group_id}".encode(), digest_size=_MAC_BYTES, key=key[:64])

    def head(self, partition: int, first: int, count: int, delivery: int, leader_epoch: int) -> str:
        """Return the common head of the receipts of [first, first + count); `nth_text` completes each."""
        assert 0 < count <= COUNT_MAX
        fields = _FIELDS.pack(self._tag, partition, first, count, delivery, leader_epoch)
        return _to_text(fields + self._signature(fields))

    def check(self, head: str) -> Lease:
        """Return the lease in the first HEAD_LENGTH letters of a receipt. Raise InvalidRequest if this group did not
        sign it."""
        raw = _from_text(head, _FIELDS_BYTES + _MAC_BYTES)
        fields = raw[:_FIELDS_BYTES]
        if not compare_digest(self._signature(fields), raw[_FIELDS_BYTES:]):
            raise not_a_receipt(head)
        return Lease._make(_FIELDS.unpack(fields))

    def _signature(self, fields: bytes) -> bytes:
        mac = self._mac.copy()
        mac.update(fields)
        return mac.digest()


def tag_of(head: str) -> bytes:
    """Return the topic's tag in a head that is not checked yet: it selects the signer that checks it."""
    return _from_text(head, _FIELDS_BYTES + _MAC_BYTES)[:8]


def offset_of(text: str, lease: Lease) -> int:
    """Return the offset of a receipt with this lease in its head. Raise InvalidRequest if the two do not match."""
    nth = _nth(text[HEAD_LENGTH:])
    if nth >= lease.messages:
        raise not_a_receipt(text)
    return lease.first + nth


def offsets_of(texts: list[str], head: str, lease: Lease) -> Sequence[int]:
    """Return the offsets of receipts with this head and lease, as a range if they are in order and without gaps.
    Raise InvalidRequest if they do not match."""
    start = offset_of(texts[0], lease)
    end = start + len(texts)
    if end <= lease.first + lease.messages and texts == receipt_texts(head, start - lease.first, end - lease.first):
        return range(start, end)
    return [offset_of(text, lease) for text in texts]


def receipt_texts(head: str, start: int, end: int) -> list[str]:
    """Return the receipts of the messages [start, end) of a lease, counted from its first one."""
    _endings.extend([nth_text(nth) for nth in range(len(_endings), end)])
    return [head + ending for ending in _endings[start:end]]


def nth_text(nth: int) -> str:
    """Return the text that completes the receipt of the nth message of a lease."""
    return _to_text(nth.to_bytes(3))


def not_a_receipt(text: str) -> InvalidRequest:
    return InvalidRequest(f"{text[:80]!r} is not a receipt of this group: send receipts back as receive gave them")


@lru_cache(maxsize=10_000)
def _nth(text: str) -> int:
    return int.from_bytes(_from_text(text, 3))


def _to_text(raw: bytes) -> str:
    return b2a_base64(raw, newline=False).translate(_TO_URL_SAFE).decode("ascii")


def _from_text(text: str, size: int) -> bytes:
    try:
        raw = a2b_base64(text.encode("ascii").translate(_FROM_URL_SAFE), strict_mode=True)
    except (Base64Error, ValueError):
        raw = b""
    if len(raw) != size:
        raise not_a_receipt(text)
    return raw
