"""The bodies of answers that no client decodes as a whole, and of which a part is in portalmq.wire."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from portalmq import wire
from portalmq.contract.history import AsOf, TraceEvent, TraceReplicas
from portalmq.contract.schedules import ScheduleDescription


class Problem(msgspec.Struct):
    """An error (RFC 9457). `code` is stable and meant for programs, `detail` is for people. `outcome`: the request had
    no effect and will have none, may have one, or `results` says which of its items had one."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    outcome: Literal["not_applied", "unknown", "partial"]
    retry_after_ms: int | UnsetType = UNSET
    # Members of single codes: not_leader, offset_out_of_range, stale_receipt, lock_held, ...
    leader: int | UnsetType | None = UNSET
    leader_url: str | UnsetType | None = UNSET
    log_start_offset: int | UnsetType = UNSET
    high_watermark: int | UnsetType = UNSET
    committed: int | UnsetType = UNSET
    generation: int | UnsetType = UNSET
    expected_sequence: int | UnsetType = UNSET
    results: list[Any] | UnsetType = UNSET
    owner: str | UnsetType | None = UNSET
    expires_in_ms: int | UnsetType = UNSET
    waiters: int | UnsetType = UNSET
    newest_token: int | UnsetType = UNSET
    exists: bool | UnsetType = UNSET


# --- cluster ---------------------------------------------------------------------------------------------------------


class Status(msgspec.Struct, omit_defaults=True):
    """`broker_id` for callers with a token, where one is needed."""

    status: Literal["ok", "ready"]
    broker_id: int | UnsetType = UNSET


class Health(Status):
    """The state of the broker, for callers with a token, where one is needed; the others get `status` alone."""

    cluster_id: str | UnsetType = UNSET
    incarnation: int | UnsetType = UNSET
    control_plane: str | UnsetType = UNSET
    registered: bool | UnsetType = UNSET
    controller: int | UnsetType | None = UNSET
    topics: int | UnsetType = UNSET
    led: int | UnsetType = UNSET
    followed: int | UnsetType = UNSET
    under_replicated: int | UnsetType = UNSET
    quarantined: int | UnsetType = UNSET
    parked_receives: int | UnsetType = UNSET
    parked_interests: int | UnsetType = UNSET
    disk_full: bool | UnsetType = UNSET
    clocks_differ: bool | UnsetType = UNSET


class TopicList(msgspec.Struct):
    topics: list[wire.TopicSummary]


class GroupList(msgspec.Struct):
    groups: list[wire.GroupDescription]


class ScheduleList(msgspec.Struct):
    schedules: list[ScheduleDescription]


class LockList(msgspec.Struct):
    locks: list[wire.LockDescription]


# --- messages --------------------------------------------------------------------------------------------------------


class ProducedMessage(msgspec.Struct, omit_defaults=True):
    """The place of a single message; with acks=none only its topic."""

    topic: str
    id: str | UnsetType = UNSET
    partition: int | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    timestamp_ms: int | UnsetType = UNSET


class ProduceResult(msgspec.Struct):
    """The place of a message of a batch, or its error; nothing with acks=none."""

    partition: int | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    timestamp_ms: int | UnsetType = UNSET
    error: Problem | UnsetType = UNSET


class ProduceResults(msgspec.Struct):
    """A result for each message of a batch, in order."""

    results: list[ProduceResult]


class BrowsedMessages(wire.BrowsePage):
    messages: list[wire.JsonMessageOut]


class CloudEvent(msgspec.Struct):
    """An event (CloudEvents 1.0 in JSON). Other members are its extensions; those that begin with `portalmq` are the
    broker's."""

    specversion: Literal["1.0"]
    id: str
    source: str
    type: str
    datacontenttype: str | UnsetType = UNSET
    dataschema: str | UnsetType = UNSET
    subject: str | UnsetType = UNSET
    time: str | UnsetType = UNSET
    data: Any = UNSET
    data_base64: str | UnsetType = UNSET


class TopicMessages(msgspec.Struct):
    """`more`: the topic has more messages than a page."""

    messages: list[wire.JsonMessageOut]
    more: bool


class ScheduledPage(msgspec.Struct, omit_defaults=True):
    """`next`: `after` of the next page, if there is one."""

    messages: list[wire.JsonMessageOut]
    next: str | UnsetType = UNSET


class MovedMessage(msgspec.Struct):
    """The scheduled message that is cancelled, `<topic>/<id>`, and when its copy is delivered."""

    copy_of: str
    deliver_at_ms: int


class RunMessages(msgspec.Struct):
    """How many scheduled messages matched, and how many are delivered now."""

    matched: int
    run: int


class CancelledMessages(msgspec.Struct):
    """How many scheduled messages matched, and how many are cancelled."""

    matched: int
    cancelled: int


class TracePage(msgspec.Struct, omit_defaults=True):
    """The life of a message; of a purged one without its value. `next`: `after` of the next page, if there is one.
    `incomplete_below`: records of groups below were compacted away."""

    message: wire.JsonMessageOut
    events: list[TraceEvent]
    replicas: TraceReplicas
    as_of: AsOf
    next: int | UnsetType = UNSET
    incomplete_below: int | UnsetType = UNSET


# --- groups ----------------------------------------------------------------------------------------------------------


class ReceivedMessages(msgspec.Struct):
    """`stale_receipts`: those of the request's `ack` whose leases were lost."""

    messages: list[wire.JsonMessageOut]
    stale_receipts: list[str] | UnsetType = UNSET


class UnfinishedPage(msgspec.Struct, omit_defaults=True):
    """`counts` are on the first page. `next`: `after` of the next page, if there is one."""

    messages: list[wire.UnfinishedOut]
    counts: wire.QueueCounts | UnsetType = UNSET
    next: str | UnsetType = UNSET


class DeadLetterPage(msgspec.Struct):
    """`next_after`: `after` of the next page, or null."""

    messages: list[wire.JsonMessageOut]
    next_after: str | None


class DroppedDeadLetters(msgspec.Struct):
    dropped: int
