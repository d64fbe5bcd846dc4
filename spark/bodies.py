"""The bodies of the groups' records, as far as this room reads them: MessagePack arrays, laid out in
broker/storage/SCHEMA.md. Fields are only ever added at the end of an array, and what comes behind the last one that is
named here is passed over.

Ranges are [start, end) offsets.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

Range = tuple[int, int]


class Kind(IntEnum):
    GROUP_START = 10
    GRANT = 11
    ACK = 12
    NACK = 13
    EXTEND = 14
    GROUP_END = 15
    DEAD = 16
    REDRIVE = 17
    DROP = 18
    COMMIT = 19
    CLAIM = 21
    COMMIT_OFFSET = 22
    SEEK = 23


class GroupStart(msgspec.Struct, array_like=True):
    start: int


class GroupEnd(msgspec.Struct, array_like=True):
    pass


class Grant(msgspec.Struct, array_like=True):
    """`ranges` are (start, end, delivery number); `lanes` is empty, or has a lane for each of them; `gone` are messages
    that were handed out before and have expired since, or were compacted away."""

    ranges: tuple[tuple[int, int, int], ...]
    next: int
    granted_at_ms: int
    deadline_ms: int
    consumer: str = ""
    attempt_id: str | None = None
    lanes: tuple[int, ...] = ()
    cursors: tuple[tuple[int, int, int], ...] = ()
    gone: tuple[Range, ...] = ()


class Ack(msgspec.Struct, array_like=True):
    """`ahead` are (lane, _, offset), and in none of the ranges: done by who was handed them by a leader that died
    before its grant was in the log."""

    ranges: tuple[Range, ...]
    at_ms: int = 0
    ahead: tuple[tuple[int, int, int], ...] = ()


class Nack(msgspec.Struct, array_like=True):
    """`ranges` are (start, end, free again from this time on)."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str | None = None
    unseen: bool = False


class Extend(msgspec.Struct, array_like=True):
    ranges: tuple[Range, ...]


class Dead(msgspec.Struct, array_like=True):
    """`ranges` are (start, end, deliveries)."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str = ""


class Redrive(msgspec.Struct, array_like=True):
    """`ranges` are (start, end, free again from this time on)."""

    ranges: tuple[tuple[int, int, int], ...]


class Drop(msgspec.Struct, array_like=True):
    ranges: tuple[Range, ...]


class Commit(msgspec.Struct, array_like=True):
    """Of a queue group with `ranges`; of a stream group with an `offset` of 0 or more."""

    commit_id: bytes
    at_ms: int
    outputs: msgspec.Raw
    ranges: tuple[Range, ...] = ()
    ahead: tuple[tuple[int, int, int], ...] = ()
    offset: int = -1
    member: str = ""


class Claim(msgspec.Struct, array_like=True):
    member: str
    generation: int
    start: int


class CommitOffset(msgspec.Struct, array_like=True):
    offset: int
    member: str


class Seek(msgspec.Struct, array_like=True):
    offset: int


Body = (
    GroupStart | GroupEnd | Grant | Ack | Nack | Extend | Dead | Redrive | Drop | Commit | Claim | CommitOffset | Seek
)

_DECODERS: dict[int, msgspec.msgpack.Decoder[Body]] = {
    Kind.GROUP_START: msgspec.msgpack.Decoder(GroupStart),
    Kind.GRANT: msgspec.msgpack.Decoder(Grant),
    Kind.ACK: msgspec.msgpack.Decoder(Ack),
    Kind.NACK: msgspec.msgpack.Decoder(Nack),
    Kind.EXTEND: msgspec.msgpack.Decoder(Extend),
    Kind.DEAD: msgspec.msgpack.Decoder(Dead),
    Kind.REDRIVE: msgspec.msgpack.Decoder(Redrive),
    Kind.DROP: msgspec.msgpack.Decoder(Drop),
    Kind.COMMIT: msgspec.msgpack.Decoder(Commit),
    Kind.CLAIM: msgspec.msgpack.Decoder(Claim),
    Kind.COMMIT_OFFSET: msgspec.msgpack.Decoder(CommitOffset),
    Kind.SEEK: msgspec.msgpack.Decoder(Seek),
}
STREAM_KINDS = (Kind.COMMIT, Kind.CLAIM, Kind.COMMIT_OFFSET, Kind.SEEK)


def decoded(kind: int, body: bytes) -> Body | None:
    """None for a kind that this room does not know. Raises msgspec.MsgspecError."""
    if kind == Kind.GROUP_END:
        return GroupEnd()  # its body is empty: not even an array
    decoder = _DECODERS.get(kind)
    return None if decoder is None else decoder.decode(body)
