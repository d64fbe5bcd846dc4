"""Digests of the replicas of a partition, for comparisons of all of them (`portalmq verify`).

Any broker answers for any replica: it asks the broker that has it. One part is read at a time here, whoever asks, so a
comparison takes no more of a broker than one reader of old messages.
"""

from __future__ import annotations

from typing import Protocol

from gevent.lock import BoundedSemaphore

from portalmq.broker.cluster.routing import place_of
from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.brokers import DIGEST, DigestRequest, ReplicaLogEnd
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.partition.native import attempt
from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.digest import PartDigest, digest_of
from portalmq.broker.storage.errors import DAMAGE, CorruptBatch, OffsetPurged, Shortage
from portalmq.errors import PartitionNotFound, PortalMQError, Unavailable
from portalmq.wire import ReplicaDigest

# How long a request waits for those before it: shorter than its caller does.
TURN_WAIT_S = 10.0


class ReplicasHere(Protocol):
    """The topics, and the replicas on this broker."""

    def known(self, name: str) -> Topic: ...
    def local(self, topic_id: str, number: int) -> Partition | None: ...
    def closed_log_end(self, topic_id: str, number: int) -> ReplicaLogEnd | None: ...


class Digests:
    """Answers for the replicas of this broker, and asks the other brokers for theirs."""

    def __init__(self, broker_id: int, topics: ReplicasHere, peers: PeerCaller) -> None:
        self._broker_id = broker_id
        self._topics = topics
        self._peers = peers
        self._turn = BoundedSemaphore()

    def of_replica(
        self, topic: str, number: int, broker_id: int, *, offset: int, below: int, lists: bool, files: bool
    ) -> ReplicaDigest:
        """Return the digest of the replica on a broker. Raises PortalMQError."""
        place = place_of(self._topics.known(topic).state, number)
        asked = DigestRequest(place.topic_id, number, offset, below, lists, files)
        return self.answer(asked) if broker_id == self._broker_id else DIGEST.ask(self._peers, broker_id, asked)

    def answer(self, asked: DigestRequest) -> ReplicaDigest:
        """Serve the call `digest`."""
        partition = self._topics.local(asked.topic_id, asked.number)
        if partition is None:
            closed = self._topics.closed_log_end(asked.topic_id, asked.number)
            if closed is None:
                raise PartitionNotFound(f"no replica of this partition is open on broker {self._broker_id}")
            fault = closed.fault or closed.lossy
            return ReplicaDigest(self._broker_id, 0, closed.high_watermark, closed.end, 0, asked.offset, fault=fault)
        if not self._turn.acquire(timeout=TURN_WAIT_S):
            raise Unavailable(f"broker {self._broker_id} is reading other replicas for a comparison", retry_after_s=1)
        try:
            fault, part = self._files(partition, asked) if asked.files else self._part(partition, asked)
        finally:
            self._turn.release()
        replica, log = partition.replica, partition.log
        return ReplicaDigest(
            self._broker_id,
            log.log_start_offset,
            replica.high_watermark,
            replica.durable_end,
            partition.groups.compacted,
            part.next_offset,
            part.sha256,
            fault or partition.fault,
            part.batches,
        )

    def _part(self, partition: Partition, asked: DigestRequest) -> tuple[str, PartDigest]:
        nothing = PartDigest(asked.offset, "", [])
        if asked.below <= asked.offset:
            return "", nothing
        work = attempt(partition.host.pool, digest_of, partition.log, asked.offset, asked.below, lists=asked.lists)
        if isinstance(work, PartDigest):
            return "", work
        if isinstance(work, OffsetPurged):  # the answer says where the log begins now
            return "", nothing
        return self._told(partition, work), nothing._replace(
            next_offset=work.offset if isinstance(work, CorruptBatch) else asked.offset
        )

    def _files(self, partition: Partition, asked: DigestRequest) -> tuple[str, PartDigest]:
        faults = partition.retention.repair() if asked.offset <= partition.log.base_offset else []
        checked = attempt(partition.host.pool, partition.log.check_file, asked.offset)
        if not isinstance(checked, int):
            faults.append(self._told(partition, checked))
            checked = asked.offset
        return "; ".join(faults), PartDigest(checked, "", [])

    def _told(self, partition: Partition, fault: Exception) -> str:
        """Return the description of damage, which is noted. Raises PortalMQError for other faults."""
        if isinstance(fault, PortalMQError):
            raise fault
        if not isinstance(fault, Shortage | OffsetPurged):
            partition.storage_failed(fault)
        if isinstance(fault, DAMAGE):
            return str(fault)
        raise Unavailable(f"broker {self._broker_id} cannot read its files now: {fault}") from fault
