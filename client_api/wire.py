"""The HTTP contract: paths, media types, header names, limits and the shape of every body.

The client encodes with these Structs and the broker decodes with them (and the reverse), so the two cannot diverge.
Requests refuse unknown fields, because ignoring a misspelt option would lose messages. Answers accept them, because a
newer broker may send more.

Each name is defined in a module of `portalmq.contract` and imported from here. Rarer bodies are in its `history` and
`schedules` alone.
"""

# ruff: noqa: F401

from __future__ import annotations

from portalmq.contract.cluster import (
    LOCK_PLACE_MS_MAX,
    LOCK_TTL_MS_MAX,
    LOCK_TTL_MS_MIN,
    BatchDigest,
    BrokerDescription,
    ClusterDescription,
    LockDescription,
    LockGrant,
    LockOwner,
    LockRelease,
    LockRenewal,
    LockRequest,
    LockTtl,
    Metadata,
    PartitionLeader,
    ReplicaDigest,
    SqlRequest,
    SqlResult,
    TopicMetadata,
    lock_path,
)
from portalmq.contract.decoding import (
    decode_base64,
    decode_json,
    decode_msgpack,
    prepare,
    structs_of,
)
from portalmq.contract.deliveries import (
    AckRequest,
    CommitInput,
    Committed,
    DeliveryTime,
    ExtendRequest,
    InputOffset,
    JsonCommit,
    JsonOutput,
    Moved,
    MoveRequest,
    MoveScheduled,
    NackRequest,
    PackCommit,
    PackOutput,
    PackReceived,
    ReceiptResult,
    ReceiptResults,
    Receipts,
    ReceiveRequest,
    Redriven,
    RedriveRequest,
    ScheduledSelection,
)
from portalmq.contract.groups import (
    RATE_PER_S_MAX,
    GroupConfig,
    GroupDescription,
    GroupStart,
    Paused,
    PauseRequest,
    QueueCounts,
)
from portalmq.contract.limits import (
    BATCH_MESSAGES_MAX,
    BODY_BYTES_MAX,
    BROWSE_MESSAGES_MAX,
    CONTENT_TYPE_LENGTH_MAX,
    HEADER_BYTES_MAX,
    HEADERS_MAX,
    IDEMPOTENCY_KEY_LENGTH_MAX,
    KEY_BYTES_MAX,
    MESSAGE_BYTES_MAX,
    PARTITIONS_MAX,
    PRIORITY_MAX,
    RECEIVE_MESSAGES_MAX,
    VISIBILITY_TIMEOUT_MS_MAX,
)
from portalmq.contract.media import (
    ACKS_LATER,
    BATCH_JSON,
    BATCH_MSGPACK,
    BYTES,
    CLOUD_EVENT,
    CLOUD_EVENTS,
    EVENT_STREAM,
    HEADER_COPY_OF,
    HEADER_DELAY_MS,
    HEADER_DELIVER_AT,
    HEADER_FIRST_TRY,
    HEADER_KEY,
    HEADER_NO_FORWARD,
    HEADER_PRIORITY,
    HEADER_TTL_MS,
    JSON,
    MSGPACK,
    NDJSON,
    PROBLEM,
    TEXT,
    is_json_type,
)
from portalmq.contract.messages import (
    Acks,
    BrowsePage,
    CompressedValues,
    CopyRequest,
    DecodedJsonMessage,
    DecodedUnfinished,
    JsonBatch,
    JsonMessage,
    JsonMessageOut,
    PackBatch,
    PackBrowsePage,
    PackMessage,
    PackMessageOut,
    Produced,
    ProducedRange,
    ProducerIdentity,
    ProducerIdRequest,
    ProducerStamp,
    UnfinishedOut,
    UnfinishedState,
)
from portalmq.contract.numbers import (
    INTEGER_MAX,
    NAME_PATTERN,
    WAIT_MS_MAX,
    Name,
    NonNegative,
    Positive,
    WaitMs,
)
from portalmq.contract.paths import (
    INTERNAL_PATH,
    NAME,
    check_name,
    group_path,
    messages_path,
    partition_messages_path,
    topic_path,
)
from portalmq.contract.topics import (
    DAY_MS,
    AlterTopic,
    CreateTopic,
    PartitionDescription,
    TopicConfig,
    TopicDescription,
    TopicSummary,
)
from portalmq.message_ids import message_id_of, message_ids_of
