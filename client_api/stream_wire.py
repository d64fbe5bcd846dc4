"""The HTTP contract of stream groups: members, offsets, and the fetch of stored batches.

A fetch is answered with *frames*: the bytes of each batch that its checksum covers, as the leader has them in memory.

    frame = [header, crc32, body]       header = msgpack([base_offset, count, messages_before, kind, leader_epoch,
                                                          producer_id, producer_epoch, sequence, appended_at_ms, group])
                                        body   = msgpack([[value, content_type, key, headers, deliver_at_ms,
                                                           expires_at_ms, priority, message_id, body_hash], ...])

The checksum is zlib's CRC-32 over header and body. Missing trailing fields have their defaults.

The header of a batch whose values are compressed has an eleventh field, "zstd", and its body is a CompressedBody. Only
a client that names `FRAMES_COMPRESSED` in Accept gets such frames; the others get them with plain values.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from portalmq.compression import HAS_ZSTD, ZSTD, values_of
from portalmq.wire import Name, NonNegative, WaitMs, group_path, prepare, structs_of

FRAMES_MSGPACK = "application/vnd.portalmq.frames+msgpack"
FRAMES_COMPRESSED = f"{FRAMES_MSGPACK};values=zstd"
FRAMES_ACCEPTED = FRAMES_COMPRESSED if HAS_ZSTD else FRAMES_MSGPACK
FETCH_PATH = "/v1/fetch"

SESSION_TIMEOUT_MS = 10_000
SESSION_TIMEOUT_MS_MIN = 500
SESSION_TIMEOUT_MS_MAX = 30 * 60_000
GROUP_TOPICS_MAX = 100
OFFSETS_MAX = 10_000
FETCH_PARTITIONS_MAX = 1_000
FETCH_BYTES = 4 * 1024 * 1024
FETCH_BYTES_MAX = 32 * 1024 * 1024

Generation = NonNegative


def members_path(group: str) -> str:
    return group_path(group, "members")


def member_path(group: str, member_id: str, verb: str = "") -> str:
    return f"{members_path(group)}/{quote(member_id, safe='')}" + (f"/{verb}" if verb else "")


# --- members ---------------------------------------------------------------------------------------------------------


class JoinRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request to join. Without a `member_id` the broker generates one."""

    topics: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=GROUP_TOPICS_MAX)]
    member_id: Name | None = None
    session_timeout_ms: Annotated[int, msgspec.Meta(ge=SESSION_TIMEOUT_MS_MIN, le=SESSION_TIMEOUT_MS_MAX)] = (
        SESSION_TIMEOUT_MS
    )


class HeartbeatRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`generation` is that of the assignment in use: the member has released all partitions that it does not
    include."""

    generation: Generation


class AssignedPartition(msgspec.Struct, frozen=True):
    """A partition to read. `since` is the generation in which the member got the partition, or the group was moved
    last. The member starts at `offset` if it does not know this `since` yet."""

    topic: str
    partition: int
    offset: int = 0
    since: int = 0


class MemberAnswer(msgspec.Struct):
    member_id: str
    generation: int
    assignment: list[AssignedPartition]
    heartbeat_interval_ms: int


# --- offsets ---------------------------------------------------------------------------------------------------------


class PartitionOffset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`offset` is the next one to read."""

    topic: Name
    partition: NonNegative
    offset: NonNegative


class CommitOffsetsRequest(msgspec.Struct, forbid_unknown_fields=True):
    member_id: Annotated[str, msgspec.Meta(min_length=1, max_length=190)]
    generation: Generation
    offsets: Annotated[list[PartitionOffset], msgspec.Meta(min_length=1, max_length=OFFSETS_MAX)]


class OffsetResult(msgspec.Struct, frozen=True):
    """`status` is "ok" or the code of an error."""

    topic: str
    partition: int
    offset: int
    status: str


class OffsetResults(msgspec.Struct):
    results: list[OffsetResult]


class GroupOffset(msgspec.Struct, frozen=True):
    """A group's position on a partition; `lag` counts messages, `lag_ms` is the age of the first of them."""

    topic: str
    partition: int
    committed: int
    high_watermark: int
    lag: int
    lag_ms: int


class GroupOffsets(msgspec.Struct):
    offsets: list[GroupOffset]


class SeekRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """`to`: "earliest", "latest", {"offset": n} (of one partition), {"at": RFC 3339 text or Unix ms}."""

    topic: Name
    to: str | dict[str, int | str]
    partition: NonNegative | None = None
    dry_run: bool = False


class SeekResult(msgspec.Struct, frozen=True, rename={"before": "from"}):
    partition: int
    before: int
    to: int


class SeekAnswer(msgspec.Struct):
    topic: str
    offsets: list[SeekResult]
    dry_run: bool
    generation: int = 0


# --- fetch -----------------------------------------------------------------------------------------------------------


class FetchRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    partitions: Annotated[list[PartitionOffset], msgspec.Meta(min_length=1, max_length=FETCH_PARTITIONS_MAX)]
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=FETCH_BYTES_MAX)] = FETCH_BYTES
    wait_ms: WaitMs = 0


class Frame(msgspec.Struct, array_like=True, gc=False, frozen=True):
    header: bytes
    crc: int
    body: bytes


class FrameHead(msgspec.Struct, array_like=True, gc=False, frozen=True):
    base_offset: int
    count: int
    messages_before: int
    kind: int
    leader_epoch: int
    producer_id: int
    producer_epoch: int
    sequence: int
    appended_at_ms: int
    group: str
    codec: str = ""


class CompressedBody(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The body of a batch whose values are compressed: `values` as portalmq.compression describes, and each other field
    of the messages: a list, or the one value that all of them have."""

    values: bytes
    content_type: str | list[str]
    key: bytes | list[bytes | None] | None
    headers: dict[str, str] | list[dict[str, str] | None] | None
    deliver_at_ms: int | list[int | None] | None
    expires_at_ms: int | list[int | None] | None
    priority: int | list[int]
    message_id: bytes | list[bytes | None] | None
    body_hash: bytes | list[bytes | None] | None

    def columns(self, count: int) -> list[Iterable[Any]]:
        """Return the fields after `values` as columns of `count` entries. Raises ValueError for another number."""
        columns: list[Iterable[Any]] = []
        for name in self.__struct_fields__[1:]:
            column = getattr(self, name)
            if isinstance(column, list) and len(column) != count:
                raise ValueError(f"{len(column)} entries of {name} for {count} messages")
            columns.append(column if isinstance(column, list) else repeat(column, count))
        return columns


class FrameRecord(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A message as it is stored."""

    value: bytes
    content_type: str
    key: bytes | None = None
    headers: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    expires_at_ms: int | None = None
    priority: int = 0
    message_id: bytes | None = None
    body_hash: bytes | None = None


class FetchedPartition(msgspec.Struct, omit_defaults=True):
    """`frames` are whole batches: the first may begin below the requested offset. `error` is a problem document; one of
    code not_leader names the leader. `topic_id` identifies the topic that answered: a topic that was deleted and
    created again has another."""

    topic: str
    partition: int
    next_offset: int = 0
    high_watermark: int = 0
    log_start_offset: int = 0
    frames: list[Frame] = []
    error: dict[str, Any] | None = None
    topic_id: str = ""


class FetchAnswer(msgspec.Struct):
    partitions: list[FetchedPartition]


prepare(*structs_of(__name__))

_decode_compressed = msgspec.msgpack.Decoder(CompressedBody).decode


def records_of_compressed(head: FrameHead, body: bytes) -> list[FrameRecord]:
    """Return the messages of a batch whose values are compressed. Raises msgspec.DecodeError, ValueError."""
    if head.codec != ZSTD:  # brokers send only what the fetch accepts
        raise ValueError(f"the values at offset {head.base_offset} are compressed with {head.codec[:40]!r}: not known")
    found = _decode_compressed(body)
    values = values_of(found.values, head.count)
    return list(map(FrameRecord, values, *found.columns(head.count)))
