"""The history of a message, and of a group: what the records of a partition's log say about the past."""

from __future__ import annotations

import msgspec

from portalmq import wire


class TraceEvent(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One event in the life of a message. Fields that do not apply, or are not known, are None.

    `event`     appended, scheduled, delivered, extended, nacked, expired, acked, dead, copied, redriven, dropped,
                cancelled, rescheduled, ttl_expired, purged
    `at_ms`     when its record was appended; of `expired` and `ttl_expired` the deadline
    `until_ms`  the end of the lease (delivered, extended), or when the message is free (again) (scheduled, nacked,
                redriven), or its copy is (rescheduled; now without it)
    `consumer`  the name that the receive gave, or the member of a stream group
    `unseen`    of `nacked`: given back unprocessed, so that the delivery does not count
    `outputs`   of `acked`: the messages that the same commit call published
    `to_topic`, `to_id`  of `dead` and `copied`: the topic of the copy, and its id there
    `leader_epoch`, `broker`, `offset`  the record: the epoch of the leader that wrote it, its broker, the offset
    """

    at_ms: int
    event: str
    group: str | None = None
    consumer: str | None = None
    delivery_count: int | None = None
    until_ms: int | None = None
    reason: str | None = None
    unseen: bool = False
    outputs: int = 0
    to_topic: str | None = None
    to_id: str | None = None
    leader_epoch: int | None = None
    broker: int | None = None
    offset: int | None = None


class TraceReplicas(msgspec.Struct):
    """The replicas of the message's partition, as the answering broker knows them. `holders` have the message on disk,
    for certain; of others it is not known."""

    leader: int | None
    leader_epoch: int
    replicas: list[int]
    isr: list[int]
    holders: list[int]


class AsOf(msgspec.Struct):
    """The state of knowledge: everything committed below `offset`, as `broker` has it. `at_ms` is the time up to which
    leases and times to live are told; a follower knows no more than the time of its newest record."""

    broker: int
    is_leader: bool
    offset: int
    at_ms: int


class MessageTrace(msgspec.Struct, omit_defaults=True):
    """The life of a message; of a purged one the content is gone. `next` is the `after` of the next page, if there is
    more. Records of groups below `incomplete_below` were compacted away, and what they said is not known."""

    message: wire.DecodedJsonMessage
    events: list[TraceEvent]
    replicas: TraceReplicas
    as_of: AsOf
    next: int | None = None
    incomplete_below: int | None = None


class PastCount(msgspec.Struct):
    """A group on one partition, as it was when the log ended at `offset`. The counts are messages."""

    topic: str
    partition: int
    offset: int
    mode: str
    ready: int
    in_flight: int
    scheduled: int
    dead: int
    lag: int
    oldest_unacked_ms: int
    paused: wire.Paused | None = None


class PastGroup(msgspec.Struct):
    """A group as it was at a moment, on the partitions that it has now. Its members and settings then are not known:
    the log does not hold them."""

    group: str
    at_ms: int
    mode: str
    ready: int
    in_flight: int
    scheduled: int
    dead: int
    lag: int
    oldest_unacked_ms: int
    partitions: list[PastCount]
    paused: wire.Paused | None = None


wire.prepare(MessageTrace, PastGroup)
