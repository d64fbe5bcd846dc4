"""The fetch protocol between a follower's broker and a leader's broker: the body of /internal/v1/fetch and its answer.

All partitions that one broker follows at another share one *session* (after KIP-227): only changes travel. A request
names the fetches that were sent since the last answered request. A fetch that was named waits until it is answered,
replaced, or left. So a hundred idle partitions cost their leader nothing, and a busy one does not pay for the others.

    session, turn    the follower numbers its sessions and, from 1 on, the requests of each. A request with a later turn
                     ends the one that is parked; one with an earlier turn is late, and is ignored
    partitions       new fetches; they are repeated until a later turn is answered
    left             partitions that are no longer fetched
    answer           known=False: the leader has no such session, begin another one and name everything;
                     partitions: each answer echoes its fetch, and is dropped if the follower has moved on
    answered_ms      the leader's clock at its answer; in a request, that of the last answer in this session. What the
                     request says is from after that time, however long it travelled (rule 14). 0: no answer yet; None
                     from brokers without this field
    knows_compressed False from brokers of a version that does not know batches whose values are compressed
"""

from __future__ import annotations

import msgspec

from portalmq.broker.core.replica.events import Fetch
from portalmq.broker.partition.fetch_answers import PartitionAnswer, PartitionKey
from portalmq.broker.partition.host import FollowedPartition

FETCH = "fetch"
FETCH_WAIT_MS = 500
FETCH_BYTES_MAX = 4 * 1024 * 1024


class AskedPartition(msgspec.Struct, array_like=True, frozen=True):
    """One replica's fetch. `store_uuid` is None when it is the broker's; `known_hw` is the replica's high watermark."""

    topic_id: str
    partition: int
    store_uuid: str | None
    leader_epoch: int
    fetch_offset: int
    durable_offset: int
    last_epoch: int
    number: int
    known_hw: int

    @property
    def key(self) -> PartitionKey:
        return self.topic_id, self.partition


class ReplicaFetchRequest(msgspec.Struct, array_like=True, frozen=True):
    cluster_id: str
    broker_id: int
    incarnation: int
    store_uuid: str
    session: int
    turn: int
    wait_ms: int
    max_bytes: int
    partitions: list[AskedPartition]
    left: list[PartitionKey]
    answered_ms: int | None = None
    knows_compressed: bool = False


class ReplicaFetchAnswer(msgspec.Struct, array_like=True, frozen=True):
    known: bool
    partitions: list[PartitionAnswer]
    answered_ms: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ReplicaFetchRequest).decode
decode_answer = msgspec.msgpack.Decoder(ReplicaFetchAnswer).decode


def asked_of(partition: FollowedPartition, fetch: Fetch, store_uuid: str) -> AskedPartition:
    """Encode a fetch of the broker whose store is `store_uuid`."""
    return AskedPartition(
        partition.topic_id,
        partition.number,
        None if fetch.store_uuid == store_uuid else fetch.store_uuid,
        fetch.leader_epoch,
        fetch.fetch_offset,
        fetch.durable_offset,
        fetch.last_epoch,
        fetch.number,
        partition.high_watermark,
    )


def fetch_of(request: ReplicaFetchRequest, asked: AskedPartition) -> Fetch:
    return Fetch(
        request.broker_id,
        request.incarnation,
        asked.store_uuid or request.store_uuid,
        asked.leader_epoch,
        asked.fetch_offset,
        asked.durable_offset,
        asked.last_epoch,
        asked.number,
    )
