"""Bodies of produce requests and of messages that are read."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from portalmq.contract.decoding import prepare, structs_of
from portalmq.contract.limits import CONTENT_TYPE_LENGTH_MAX
from portalmq.contract.media import BYTES
from portalmq.contract.numbers import Name, NonNegative, Positive

Acks = Literal["all", "leader", "none"]


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


prepare(*structs_of(__name__))
