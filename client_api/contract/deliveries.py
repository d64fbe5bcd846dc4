"""Bodies of receives, of what consumers answer to deliveries, and of orders about what was delivered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from portalmq.contract.decoding import prepare, structs_of
from portalmq.contract.limits import BATCH_MESSAGES_MAX, RECEIVE_MESSAGES_MAX, VISIBILITY_TIMEOUT_MS_MAX
from portalmq.contract.messages import JsonMessage, PackMessage, PackMessageOut
from portalmq.contract.numbers import Name, NonNegative, WaitMs


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


prepare(*structs_of(__name__))
