"""What a follower's broker and a leader's broker say to each other: the body of /internal/v1/fetch and its answer.

All partitions that one broker follows at another share one conversation, a *session* (after KIP-227): only what is new
travels. A request names the fetches that were sent since the last answered one; a fetch that was named stands until it
is answered, replaced, or left. So a hundred idle partitions cost their leader nothing to wait for, and a busy one pays
for no other.

    session, turn    the follower numbers its sessions and, from 1 on, the requests of each. A request with a later turn
                     ends the one that is parked; one with an earlier turn came late, and says nothing any more
    partitions       fetches that are new; they are repeated until a later turn is answered
    left             partitions that are not asked for any more
    answer           known=False: the leader has no such session, begin another one and name everything;
                     partitions: each answer echoes its fetch, and is dropped by who has moved on meanwhile
    answered_ms      the leader's clock as it answers, and in a request that of the last answer in this session: what
                     the request says was said after that, however long it was on its way (rule 14). 0: none came yet;
                     None from brokers that do not say it
"""

from __future__ import annotations

import msgspec

from portalmq.broker.core.replica.events import Fetch
from portalmq.broker.partition.fetch_answers import PartitionAnswer, PartitionKey

FETCH = "fetch"
FETCH_WAIT_MS = 500
FETCH_BYTES_MAX = 4 * 1024 * 1024


class AskedPartition(msgspec.Struct, array_like=True, frozen=True):
    """One replica's fetch. `store_uuid` is None when it is that of the broker; `known_hw` the high watermark there."""

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


class ReplicaFetchAnswer(msgspec.Struct, array_like=True, frozen=True):
    known: bool
    partitions: list[PartitionAnswer]
    answered_ms: int = 0


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(ReplicaFetchRequest).decode
decode_answer = msgspec.msgpack.Decoder(ReplicaFetchAnswer).decode


def asked_of(topic_id: str, partition: int, fetch: Fetch, store_uuid: str, known_hw: int) -> AskedPartition:
    """A fetch as it travels from the broker whose store is `store_uuid`."""
    return AskedPartition(
        topic_id,
        partition,
        None if fetch.store_uuid == store_uuid else fetch.store_uuid,
        fetch.leader_epoch,
        fetch.fetch_offset,
        fetch.durable_offset,
        fetch.last_epoch,
        fetch.number,
        known_hw,
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
