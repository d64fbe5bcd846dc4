"""The HTTP contract: paths, media types, header names, limits and the shape of every body.

The client encodes with these Structs and the broker decodes with them (and the reverse), so the two cannot diverge.
Requests refuse unknown fields, because ignoring a misspelt option would lose messages. Answers accept them, because a
newer broker may send more.

Parts of it are modules of their own (cluster_wire, wire_decoding, wire_numbers, message_ids), imported from here too.
"""

# ruff: noqa: F401

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from urllib.parse import quote

import msgspec

from portalmq.cluster_wire import (
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
from portalmq.errors import InvalidRequest
from portalmq.message_ids import message_id_of, message_ids_of
from portalmq.wire_decoding import decode_base64, decode_json, decode_msgpack, prepare, structs_of
from portalmq.wire_numbers import INTEGER_MAX, NAME_PATTERN, WAIT_MS_MAX, Name, NonNegative, Positive, WaitMs

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"
BYTES = "application/octet-stream"
MSGPACK = "application/vnd.msgpack"
BATCH_JSON = "application/vnd.portalmq.batch+json"
BATCH_MSGPACK = "application/vnd.portalmq.batch+msgpack"
NDJSON = "application/x-ndjson"
CLOUD_EVENT = "application/cloudevents+json"
CLOUD_EVENTS = "application/cloudevents-batch+json"
PROBLEM = "application/problem+json"
EVENT_STREAM = "text/event-stream"

HEADER_KEY = "PortalMQ-Key"
HEADER_DELAY_MS = "PortalMQ-Delay-Ms"
HEADER_DELIVER_AT = "PortalMQ-Deliver-At"
HEADER_TTL_MS = "PortalMQ-Ttl-Ms"
HEADER_PRIORITY = "PortalMQ-Priority"
HEADER_COPY_OF = "portalmq-copy-of"  # of a message: the topic and the id of the one that it is a copy of
HEADER_NO_FORWARD = "PortalMQ-No-Forward"
# "1" on a receive whose attempt_id is new: then no broker looks for the result of an earlier try.
HEADER_FIRST_TRY = "PortalMQ-First-Try"
# Prefer (RFC 7240): a receive may be answered before its acks are committed. Older brokers ignore it.
ACKS_LATER = "acks=later"

# The paths of calls between brokers; clients are refused.
INTERNAL_PATH = "/internal/v1/"

NAME = re.compile(r"[A-Za-z0-9._-]{1,190}\Z")

BODY_BYTES_MAX = 8 * 1024 * 1024
MESSAGE_BYTES_MAX = 1024 * 1024
BATCH_MESSAGES_MAX = 10_000
RECEIVE_MESSAGES_MAX = 10_000
BROWSE_MESSAGES_MAX = 1_000
VISIBILITY_TIMEOUT_MS_MAX = 12 * 3600 * 1000
HEADERS_MAX = 64
HEADER_BYTES_MAX = 8 * 1024
KEY_BYTES_MAX = 4 * 1024
CONTENT_TYPE_LENGTH_MAX = 255
IDEMPOTENCY_KEY_LENGTH_MAX = 255
PARTITIONS_MAX = 1_000
PRIORITY_MAX = 31

Acks = Literal["all", "leader", "none"]


def check_name(name: str, what: str) -> str:
    """Return `name` if it is a valid name of a topic, a group or a lock; raise InvalidRequest otherwise."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a {what} is text, not {name!r}")
    if not NAME.match(name) or name in {".", ".."}:
        raise InvalidRequest(
            f"{name[:200]!r} cannot name a {what}: 1 to 190 of the characters A-Z a-z 0-9 . _ - , and not '.' or '..'"
        )
    return name


def topic_path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}"


def messages_path(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/messages"


def partition_messages_path(topic: str, partition: int) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/partitions/{partition}/messages"


def group_path(group: str, verb: str = "") -> str:
    return f"/v1/groups/{quote(group, safe='')}" + (f"/{verb}" if verb else "")


# --- produce ---------------------------------------------------------------------------------------------------------


class ProducerStamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity of an idempotent batch (KIP-98): the batch is appended once for (id, epoch, sequence)."""

    id: NonNegative
    epoch: NonNegative
    sequence: NonNegative


class JsonMessage(msgspec.Struct, gc=False, omit_defaults=True, forbid_unknown_fields=True):
    """A message in a JSON batch. `value` is kept as the JSON text that was sent."""

    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] | None = None
    content_type: str | None = None
    partition: NonNegative | None = None
    delay_ms: NonNegative | None = None
    deliver_at_ms: NonNegative | None = None
    ttl_ms: Positive | None = None
    priority: int | None = 0
    idempotency_key: str | None = None


class CopyRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The changes of a copy. What is left out is kept; a header that is null is left out of the copy, and so is a key
    that is null."""

    to_topic: str | None = None
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | None = None
    key: str | msgspec.UnsetType | None = msgspec.UNSET
    key_base64: str | None = None
    headers: dict[str, str | None] | None = None
    content_type: str | None = None
    partition: NonNegative | None = None
    delay_ms: NonNegative | None = None
    deliver_at_ms: NonNegative | None = None
    ttl_ms: Positive | None = None
    priority: int | None = None


class PackMessage(JsonMessage, gc=False):
    """A message in a MessagePack batch. A binary `value` is the payload itself; any other value is stored as JSON."""

    value: Any = msgspec.UNSET
    key: Any = None  # str, bytes or None: msgspec knows no union of the two


class JsonBatch(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[JsonMessage]
    producer: ProducerStamp | None = None


class CompressedValues(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The values of all messages of a MessagePack batch, in place of a value in each (portalmq.compression). A message
    that names no content type has the one that is given here."""

    codec: Literal["zstd"]
    data: bytes
    content_type: Annotated[str, msgspec.Meta(min_length=1, max_length=CONTENT_TYPE_LENGTH_MAX)] = BYTES


class PackBatch(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    messages: list[PackMessage]
    producer: ProducerStamp | None = None
    values: CompressedValues | None = None


class Produced(msgspec.Struct, frozen=True, gc=False):
    """The position of one message of a batch."""

    partition: int
    offset: int
    timestamp_ms: int


class ProducedRange(msgspec.Struct, frozen=True, omit_defaults=True):
    """The short answer to a single-partition batch, for requests with `Prefer: return=minimal` (RFC 7240). `topic_id`
    distinguishes the topic from an earlier one of the same name ("" from older brokers)."""

    partition: int
    base_offset: int
    count: int
    timestamp_ms: int
    topic_id: str = ""


class ProducerIdRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """`instance` identifies the process that asks under a `name`. With `renews` it had the name before, and gets a new
    epoch only if no other instance has taken over since (else 409 fenced)."""

    name: Name | None = None
    instance: Annotated[str, msgspec.Meta(max_length=100)] = ""
    renews: bool = False


class ProducerIdentity(msgspec.Struct, frozen=True):
    id: int
    epoch: int


# --- topics ----------------------------------------------------------------------------------------------------------

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


# --- browse ----------------------------------------------------------------------------------------------------------


class JsonMessageOut(msgspec.Struct, gc=False, omit_defaults=True):
    """A message in JSON answers; the lease's fields are there if it was received."""

    id: str
    topic: str
    partition: int
    offset: int
    key: str | None
    content_type: str
    headers: dict[str, str]
    timestamp_ms: int
    value: msgspec.Raw | str | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | msgspec.UnsetType = msgspec.UNSET
    key_base64: str | msgspec.UnsetType = msgspec.UNSET
    deliver_at_ms: int | None = None
    expires_at_ms: int | None = None
    priority: int = 0
    receipt: str | None = None
    delivery_count: int | None = None
    lease_expires_at_ms: int | None = None


# The state of a message that a queue group has not finished.
UnfinishedState = Literal["ready", "in_flight", "scheduled"]


class QueueCounts(msgspec.Struct):
    """The numbers of messages of a topic that a queue group has not finished, by state, and of its dead letters."""

    ready: int
    in_flight: int
    scheduled: int
    dead: int
    oldest_unacked_ms: int


class UnfinishedOut(JsonMessageOut, gc=False, omit_defaults=True, kw_only=True):
    """A message that a queue group has not finished. `available_at_ms` is when it may be delivered (again), or None if
    that is now."""

    state: UnfinishedState
    available_at_ms: int | None = None


class DecodedJsonMessage(JsonMessageOut, gc=False):
    """A decoded JsonMessageOut: `value` is the JSON text that was received."""

    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class DecodedUnfinished(DecodedJsonMessage, gc=False, kw_only=True):
    """A decoded UnfinishedOut."""

    state: UnfinishedState
    available_at_ms: int | None = None


class PackMessageOut(msgspec.Struct, gc=False, omit_defaults=True):
    """A message in MessagePack answers: key and value are binary, as they were sent. `topic` is beside the list if it
    is empty here."""

    partition: int
    offset: int
    value: bytes
    timestamp_ms: int
    key: bytes | None = None
    content_type: str = BYTES
    headers: dict[str, str] | None = None
    deliver_at_ms: int | None = None
    expires_at_ms: int | None = None
    priority: int = 0
    topic: str = ""
    receipt: str | None = None
    delivery_count: int | None = None
    lease_expires_at_ms: int | None = None


class BrowsePage(msgspec.Struct):
    """A page of a partition. `next_offset` is where the next page begins; `high_watermark` the first offset not yet
    readable."""

    messages: list[Any]
    next_offset: int
    log_start_offset: int
    high_watermark: int


class PackBrowsePage(BrowsePage):
    messages: list[PackMessageOut]


# --- groups ----------------------------------------------------------------------------------------------------------


# Where a group begins on a topic: {"at": Unix ms} is the first message appended at that time or later.
GroupStart = Literal["earliest", "latest"] | dict[Literal["at"], NonNegative]


RATE_PER_S_MAX = 1_000_000


class GroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # `queue`: consumers share messages under leases; `stream`: they share partitions. Fixed when the group is made
    mode: Literal["queue", "stream"] = "queue"
    # where the group begins on a topic: `earliest`, `latest`, or `{"at": "2026-01-31T12:00:00Z"}` (or Unix ms). The
    # first receive from a topic fixes it; partitions that are added later are read from their beginning
    start: GroupStart = "earliest"
    # how often a message may be delivered
    delivery: Literal["at_least_once", "at_most_once", "exactly_once"] = "at_least_once"
    # how long a lease lasts, unless a receive says otherwise
    visibility_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=VISIBILITY_TIMEOUT_MS_MAX)] = 30_000
    max_deliveries: Positive = 5  # deliveries without an ack after which a message becomes a dead letter
    # how long a nacked message waits after its first, second, … delivery; the last value holds for all later ones.
    # `delay_ms` of a nack takes precedence. A lease that expires returns its message at once
    retry_backoff_ms: Annotated[tuple[NonNegative, ...], msgspec.Meta(min_length=1, max_length=100)] = (0,)
    dead_letter_topic: str = "{topic}.dlq"  # where copies of dead letters go; `""` for nowhere
    # `key`: one message of a key at a time, in order. Fixed when the group is made
    ordering: Literal["none", "key"] = "none"
    # most messages leased at a time; partitions of a topic share it, at least one each. `null` for no limit
    max_in_flight: Positive | None = None
    # most messages of a key that are leased, or wait for a retry, at a time. Whether a group has limits for each key is
    # fixed when it is made; with one, priorities do not count
    max_in_flight_per_key: Positive | None = None
    # most deliveries a second, redeliveries included; partitions of a topic share it. `null` for no limit
    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=RATE_PER_S_MAX)] | None = None
    # how many deliveries may come at once after a pause, with `rate_per_s`; by default those of a second
    rate_burst: Positive | None = None
    # most deliveries a second of the messages of a key, redeliveries included. Whether a group has limits for each key
    # is fixed when it is made; with one, priorities do not count
    rate_per_s_per_key: Annotated[float, msgspec.Meta(gt=0, le=RATE_PER_S_MAX)] | None = None
    # how many deliveries of a key may come at once after a pause, with `rate_per_s_per_key`; by default those of a
    # second
    rate_burst_per_key: Positive | None = None

    @property
    def is_keyed(self) -> bool:
        """True if a message may have to wait because of its key."""
        return self.ordering == "key" or self.max_in_flight_per_key is not None or self.rate_per_s_per_key is not None


class ReceiveRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    topics: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=1_000)]  # topics to receive from
    # most messages of one answer
    max_messages: Annotated[int, msgspec.Meta(ge=1, le=RECEIVE_MESSAGES_MAX)] = 10
    wait_ms: WaitMs = 0  # how long to wait for the first message
    # how long the leases last; by default the group's setting
    visibility_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=VISIBILITY_TIMEOUT_MS_MAX)] | None = None
    consumer: Annotated[str, msgspec.Meta(max_length=190)] = ""  # name of the consumer, for others to see
    # id of this receive: a repeat under it returns the same messages under the same leases
    attempt_id: Annotated[str, msgspec.Meta(min_length=1, max_length=190)] | None = None
    # receipts that are acked first, so that a consumer needs one request a turn
    ack: Annotated[list[str], msgspec.Meta(max_length=RECEIVE_MESSAGES_MAX)] = []


class PackReceived(msgspec.Struct, omit_defaults=True):
    """`stale_receipts` are those of the request's `ack` whose leases were lost; the others are acked. With `acks_later`
    they are not committed yet: a later answer to this consumer names the attempt among `acked_attempts`."""

    messages: list[PackMessageOut]
    stale_receipts: list[str] = []
    acks_later: bool = False
    acked_attempts: list[str] = []


Receipts = Annotated[list[str], msgspec.Meta(min_length=1, max_length=RECEIVE_MESSAGES_MAX)]


class AckRequest(msgspec.Struct, forbid_unknown_fields=True):
    receipts: Receipts


class NackRequest(AckRequest, omit_defaults=True):
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=VISIBILITY_TIMEOUT_MS_MAX)] | None = None
    reason: Annotated[str, msgspec.Meta(max_length=1_000)] | None = None
    # These messages were never handed out: they go back as if they had not been delivered.
    unseen: bool = False
    # These messages become dead letters now, however many deliveries they have left; not with `unseen` or `delay_ms`.
    dead: bool = False


class ExtendRequest(AckRequest, omit_defaults=True):
    visibility_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=VISIBILITY_TIMEOUT_MS_MAX)] | None = None


class JsonOutput(JsonMessage, kw_only=True):
    """A message that a commit publishes."""

    topic: Name


class PackOutput(PackMessage, kw_only=True):
    topic: Name


class InputOffset(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The next offset to read of a partition. `committed` is where the input begins: the group's committed offset as
    the member knows it. If the group has committed another one, the commit is refused (`offset_moved`)."""

    topic: Name
    partition: NonNegative
    offset: NonNegative
    committed: NonNegative | None = None


class CommitInput(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Finished input and its output: all or nothing. A queue group sends receipts, a member of a stream group one
    offset."""

    ack: Receipts | None = None
    member_id: str | None = None
    generation: NonNegative | None = None
    offsets: Annotated[list[InputOffset], msgspec.Meta(min_length=1, max_length=1)] | None = None


class JsonCommit(CommitInput, kw_only=True):
    """The output of a commit as JSON messages."""

    publish: Annotated[list[JsonOutput], msgspec.Meta(max_length=BATCH_MESSAGES_MAX)] = []


class PackCommit(CommitInput, kw_only=True):
    publish: Annotated[list[PackOutput], msgspec.Meta(max_length=BATCH_MESSAGES_MAX)] = []


class Committed(msgspec.Struct, frozen=True):
    """The result of a commit, applied once: `id` is the position of its record, <partition>-<offset>."""

    acked: int
    published: int
    id: str


class RedriveRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The dead letters to deliver again: those with `ids`, those that match `where`, or all."""

    topic: Name
    ids: Annotated[list[str], msgspec.Meta(max_length=BATCH_MESSAGES_MAX)] | None = None
    where: Any = None
    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    dry_run: bool = False


class Redriven(msgspec.Struct, frozen=True):
    matched: int
    redriven: int


class MoveRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Move what the group has ready in `topic` to `to_topic`, at most `limit` messages."""

    topic: str
    to_topic: str
    limit: Annotated[int, msgspec.Meta(ge=1, le=BATCH_MESSAGES_MAX)] = 1_000
    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    dry_run: bool = False


class Moved(msgspec.Struct, frozen=True, omit_defaults=True):
    """`refused` messages cannot be in the other topic and stayed; `refusal` says why the first of them was."""

    matched: int
    moved: int
    refused: int = 0
    refusal: str | None = None


class DeliveryTime(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """When a scheduled message is delivered instead: one of the two."""

    deliver_at_ms: NonNegative | None = None
    delay_ms: NonNegative | None = None


class ScheduledSelection(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """The scheduled messages to change: those with `ids`, those that match `where`, or all; the first `limit` by due
    time."""

    ids: Annotated[list[str], msgspec.Meta(max_length=BATCH_MESSAGES_MAX)] | None = None
    where: Any = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=BATCH_MESSAGES_MAX)] = 1_000
    dry_run: bool = False


class MoveScheduled(ScheduledSelection):
    deliver_at_ms: NonNegative | None = None
    delay_ms: NonNegative | None = None


class ReceiptResult(msgspec.Struct, frozen=True, gc=False):
    """`unknown` occurs in a 503 only: the leader of this receipt's partition could not be asked, or did not answer."""

    receipt: str
    status: Literal["ok", "stale_receipt", "unknown"]


class ReceiptResults(msgspec.Struct):
    results: list[ReceiptResult]


class PauseRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(max_length=1_000)] = ""  # shown with the group's state
    by: Annotated[str, msgspec.Meta(max_length=200)] = ""  # who asks


class Paused(msgspec.Struct, frozen=True):
    """A group delivers nothing since then, and why; `by` is who asked, as they call themselves."""

    since_ms: int
    reason: str = ""
    by: str = ""


class GroupDescription(msgspec.Struct):
    """The state of a group. The counts are messages, `oldest_unacked_ms` is the age of the oldest unacked one."""

    group: str
    mode: str
    members: list[str]
    ready: int
    in_flight: int
    scheduled: int
    dead: int
    lag: int
    oldest_unacked_ms: int
    config: GroupConfig
    paused: Paused | None = None


def is_json_type(content_type: str) -> bool:
    """Return True for application/json and every `…+json` type (RFC 6839), with or without parameters."""
    essence = content_type.partition(";")[0].strip().lower()
    return essence == JSON or essence.endswith("+json")


prepare(*structs_of(__name__))
