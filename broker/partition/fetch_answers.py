"""A leader's answers to a follower's fetch of one partition, in the format of the answer of /internal/v1/fetch."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from portalmq.broker.core.replica.events import BatchHead, Fetch, Stamp
from portalmq.broker.partition.folding import StateRecord
from portalmq.broker.storage.batch import BatchFrame, BatchKind, FrameHeader

PartitionKey = tuple[str, int]


class Echo(NamedTuple):
    """The identity of one fetch of a replica."""

    leader_epoch: int
    fetch_offset: int
    last_epoch: int
    number: int


class _FollowerAnswer(msgspec.Struct, array_like=True, frozen=True):
    topic_id: str
    partition: int
    echo: Echo

    @property
    def key(self) -> PartitionKey:
        return self.topic_id, self.partition


class RecordsAnswer(_FollowerAnswer, array_like=True, frozen=True, tag="records"):
    """The records after the fetch offset, if any, and the leader's high watermark."""

    frames: list[BatchFrame]
    high_watermark: int


class DivergingAnswer(_FollowerAnswer, array_like=True, frozen=True, tag="diverging"):
    epoch: int
    end: int


class BelowStartAnswer(_FollowerAnswer, array_like=True, frozen=True, tag="below"):
    """The fetch offset is below the log's start, `offset`. The rest is what an empty log that begins there needs."""

    offset: int
    epochs: list[tuple[int, int]]
    messages_before: int
    timestamp_before_ms: int


class RejectedAnswer(_FollowerAnswer, array_like=True, frozen=True, tag="rejected"):
    leader_epoch: int


PartitionAnswer = RecordsAnswer | DivergingAnswer | BelowStartAnswer | RejectedAnswer


def echo_of(fetch: Fetch) -> Echo:
    return Echo(fetch.leader_epoch, fetch.fetch_offset, fetch.last_epoch, fetch.number)


def batch_head(head: FrameHeader, state: StateRecord | None) -> BatchHead:
    """Return what the core needs of a batch. `state` is its content if it is a STATE record."""
    return BatchHead(
        head.base_offset,
        head.count,
        head.leader_epoch,
        head.appended_at_ms,
        head.kind == BatchKind.EPOCH_START,
        Stamp(head.producer_id, head.producer_epoch, head.sequence) if head.producer_id >= 0 else None,
        None if state is None else tuple(state.producers),
    )
