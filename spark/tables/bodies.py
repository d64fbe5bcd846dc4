"""The bodies of the groups' records, as far as this package reads them: MessagePack arrays, specified in
broker/storage/SCHEMA.md. New fields are only added at the end of an array; decoding ignores fields after the last one
that is named here.

Ranges are [start, end) offsets.
"""

from __future__ import annotations

import msgspec

Range = tuple[int, int]


class GroupStartBody(msgspec.Struct, array_like=True):
    start: int


class GroupEndBody(msgspec.Struct, array_like=True):
    pass


class GrantBody(msgspec.Struct, array_like=True):
    """A delivery. `ranges` are (start, end, delivery number); `lanes` is empty, or has a lane for each range; `gone`
    has messages that were delivered before and have since expired, or were removed by compaction."""

    ranges: tuple[tuple[int, int, int], ...]
    next: int
    granted_at_ms: int
    deadline_ms: int
    consumer: str = ""
    attempt_id: str | None = None
    lanes: tuple[int, ...] = ()
    cursors: tuple[tuple[int, int, int], ...] = ()
    gone: tuple[Range, ...] = ()


class AckBody(msgspec.Struct, array_like=True):
    """An ack. `ahead` are (lane, _, offset), in none of the ranges: messages delivered by a leader that died before its
    grant was in the log."""

    ranges: tuple[Range, ...]
    at_ms: int = 0
    ahead: tuple[tuple[int, int, int], ...] = ()


class NackBody(msgspec.Struct, array_like=True):
    """A nack. `ranges` are (start, end, available again at)."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str | None = None
    unseen: bool = False


class ExtendBody(msgspec.Struct, array_like=True):
    ranges: tuple[Range, ...]


class DeadBody(msgspec.Struct, array_like=True):
    """Dead letters. `ranges` are (start, end, deliveries)."""

    ranges: tuple[tuple[int, int, int], ...]
    at_ms: int
    reason: str = ""


class RedriveBody(msgspec.Struct, array_like=True):
    """A redrive. `ranges` are (start, end, available again at)."""

    ranges: tuple[tuple[int, int, int], ...]


class DropBody(msgspec.Struct, array_like=True):
    ranges: tuple[Range, ...]


class CommitBody(msgspec.Struct, array_like=True):
    """A commit of a queue group with `ranges`, or of a stream group with an `offset` of 0 or more."""

    commit_id: bytes
    at_ms: int
    outputs: msgspec.Raw
    ranges: tuple[Range, ...] = ()
    ahead: tuple[tuple[int, int, int], ...] = ()
    offset: int = -1
    member: str = ""


class ClaimBody(msgspec.Struct, array_like=True):
    member: str
    generation: int
    start: int


class CommitOffsetBody(msgspec.Struct, array_like=True):
    offset: int
    member: str


class SeekBody(msgspec.Struct, array_like=True):
    offset: int


Body = (
    GroupStartBody
    | GroupEndBody
    | GrantBody
    | AckBody
    | NackBody
    | ExtendBody
    | DeadBody
    | RedriveBody
    | DropBody
    | CommitBody
    | ClaimBody
    | CommitOffsetBody
    | SeekBody
)

KINDS: dict[int, type[Body]] = {
    10: GroupStartBody,
    11: GrantBody,
    12: AckBody,
    13: NackBody,
    14: ExtendBody,
    15: GroupEndBody,
    16: DeadBody,
    17: RedriveBody,
    18: DropBody,
    19: CommitBody,
    21: ClaimBody,
    22: CommitOffsetBody,
    23: SeekBody,
}
GROUP_END = 15
STREAM_KINDS = (GROUP_END, 19, 21, 22, 23)
_DECODERS = {kind: msgspec.msgpack.Decoder(body) for kind, body in KINDS.items()}


def decoded(kind: int, body: bytes) -> Body | None:
    """Decode a body; None for an unknown kind. Raises msgspec.MsgspecError."""
    if kind == GROUP_END:
        return GroupEndBody()  # its body is empty, without even an array
    decoder = _DECODERS.get(kind)
    return None if decoder is None else decoder.decode(body)
