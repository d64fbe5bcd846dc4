"""The bodies of the HTTP contract that concern the cluster: brokers, leaders, locks."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import msgspec

from portalmq.contract.decoding import prepare, structs_of
from portalmq.contract.numbers import NonNegative, WaitMs

# --- locks -----------------------------------------------------------------------------------------------------------

LOCK_TTL_MS_MIN = 500
LOCK_TTL_MS_MAX = 24 * 3600 * 1000
LOCK_PLACE_MS_MAX = 5_000

LockOwner = Annotated[str, msgspec.Meta(min_length=1, max_length=190)]
LockTtl = Annotated[int, msgspec.Meta(ge=LOCK_TTL_MS_MIN, le=LOCK_TTL_MS_MAX)]


class LockRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """`keep_place_ms`: how long the position in the queue is kept when the wait ends without the lock."""

    owner: LockOwner
    ttl_ms: LockTtl = 30_000
    wait_ms: WaitMs = 0
    keep_place_ms: Annotated[int, msgspec.Meta(ge=0, le=LOCK_PLACE_MS_MAX)] = 0


class LockRelease(msgspec.Struct, forbid_unknown_fields=True):
    owner: LockOwner
    fencing_token: NonNegative


class LockRenewal(LockRelease, omit_defaults=True):
    """Without `ttl_ms` the lock keeps its ttl."""

    ttl_ms: LockTtl | None = None


class LockGrant(msgspec.Struct, frozen=True):
    """The owner holds the lock for `expires_in_ms` without a renewal, counted from when it sent the request."""

    owner: str
    fencing_token: int
    expires_in_ms: int


class LockDescription(msgspec.Struct):
    """`owner` is None while the lock is free; `fencing_token` is the newest one. `expires_in_ms` is the rest of the ttl
    on the answering broker's clock; `waiters` is the length of the queue."""

    name: str
    owner: str | None
    fencing_token: int
    ttl_ms: int
    expires_in_ms: int
    waiters: int


def lock_path(name: str) -> str:
    return f"/v1/locks/{quote(name, safe='')}"


# --- cluster ---------------------------------------------------------------------------------------------------------


class BrokerDescription(msgspec.Struct):
    id: int
    url: str
    live: bool


class ClusterDescription(msgspec.Struct):
    cluster_id: str
    controller: int | None
    brokers: list[BrokerDescription]


class PartitionLeader(msgspec.Struct):
    partition: int
    leader: int | None
    leader_epoch: int
    leader_url: str | None


class TopicMetadata(msgspec.Struct):
    """`first_partitions` is the number of partitions at the topic's creation (0 from older brokers): a message with an
    idempotency key, and no key or partition, goes to crc32(message_id_of(it)) modulo that."""

    name: str
    partitions: list[PartitionLeader]
    first_partitions: int = 0


class Metadata(msgspec.Struct):
    """The leaders of partitions, for clients that call them directly."""

    brokers: list[BrokerDescription]
    topics: list[TopicMetadata]


# --- SQL -------------------------------------------------------------------------------------------------------------


class SqlRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """One SELECT over the segment files of the broker that is asked."""

    query: Annotated[str, msgspec.Meta(min_length=1, max_length=100_000)]
    limit: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1_000
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=30_000)] = 5_000


class SqlResult(msgspec.Struct):
    """Rows in the order of `columns`. Bytes are `{"base64": text}`. `truncated`: there are more rows than the limit."""

    columns: list[str]
    rows: list[list[Any]]
    truncated: bool
    elapsed_ms: float


# --- digests ---------------------------------------------------------------------------------------------------------


class BatchDigest(msgspec.Struct, frozen=True):
    """One batch of a replica. `holes`: how many of its messages compaction has removed."""

    offset: int
    count: int
    kind: int
    holes: int
    sha256: str


class ReplicaDigest(msgspec.Struct, frozen=True):
    """A replica of a partition, and the SHA-256 of its batches up to `next_offset`. What a compaction ordered below
    `compacted_upto` may be missing already. `fault` says what is damaged: at `next_offset`, if a batch is."""

    broker_id: int
    log_start_offset: int
    high_watermark: int
    end_offset: int
    compacted_upto: int
    next_offset: int
    sha256: str = ""
    fault: str = ""
    batches: list[BatchDigest] = []


prepare(*structs_of(__name__))
