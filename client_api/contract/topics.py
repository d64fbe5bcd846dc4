"""Bodies about topics. A setting of a topic is a field of TopicConfig."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from portalmq.contract.decoding import prepare, structs_of
from portalmq.contract.limits import BODY_BYTES_MAX, MESSAGE_BYTES_MAX, PARTITIONS_MAX
from portalmq.contract.numbers import Positive

DAY_MS = 24 * 3600 * 1000


class TopicConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a topic; None means no limit, or the cluster's default. docs/SETTINGS.md is generated from the
    comments."""

    # replicas that must store a message before it is acknowledged; by default a majority of the partition's replicas
    min_insync_replicas: Positive | None = None
    # age at which messages are deleted; a compacted topic keeps them unless it is set explicitly
    retention_ms: Positive | None = 7 * DAY_MS
    retention_bytes: Positive | None = None  # size of a partition above which its oldest messages are deleted
    # size at which a partition begins a new file; retention deletes whole files
    segment_bytes: Annotated[int, msgspec.Meta(ge=1024 * 1024, le=1 << 40)] = 256 * 1024 * 1024
    # largest message; a larger one is refused with 413
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1, le=BODY_BYTES_MAX)] = MESSAGE_BYTES_MAX
    dedup_window_ms: Positive = DAY_MS  # how long producers' sequences and Idempotency-Keys are remembered
    default_ttl_ms: Positive | None = None  # time to live of a message that names none
    # largest backlog of the slowest queue group; more messages are refused with 429
    max_backlog_messages: Positive | None = None
    # `compact` keeps the last message of each key instead of all messages of an age
    cleanup: Literal["delete", "compact"] = "delete"


class AlterTopic(msgspec.Struct, forbid_unknown_fields=True):
    partitions: Annotated[int, msgspec.Meta(ge=1, le=PARTITIONS_MAX)] | None = None
    config: dict[str, Any] = {}


class CreateTopic(AlterTopic, kw_only=True):
    replication_factor: Annotated[int, msgspec.Meta(ge=1, le=32)] | None = None


class TopicSummary(msgspec.Struct):
    name: str
    partitions: int
    replication_factor: int


class PartitionDescription(msgspec.Struct):
    partition: int
    leader: int | None
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    log_start_offset: int
    high_watermark: int
    size_bytes: int


class TopicDescription(msgspec.Struct):
    name: str
    partitions: list[PartitionDescription]
    config: TopicConfig
    topic_id: str = ""
    replication_factor: int = 1


prepare(*structs_of(__name__))
