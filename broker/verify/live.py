"""The replicas of a running cluster, by HTTP from any of its brokers."""

from __future__ import annotations

import time
from collections.abc import Iterator

from portalmq import wire
from portalmq.admin import Admin
from portalmq.broker.verify.compare import PartitionFinding, ReplicaComparison, ReplicaFinding
from portalmq.broker.verify.receipts import MessagePage, StoredContent
from portalmq.errors import OffsetOutOfRange, Unavailable


class LiveReplica:
    """A broker's replica of a partition. A broker that did not answer within the Admin's timeout is in `silent`, with
    its error, and is not asked again: one that is down would hold up the comparison of each of its replicas."""

    def __init__(self, admin: Admin, topic: str, number: int, broker_id: int, silent: dict[int, Unavailable]) -> None:
        self.broker_id = broker_id
        self._admin = admin
        self._partition = (topic, number, broker_id)
        self._silent = silent

    def digest(self, offset: int, below: int, *, batches: bool = False) -> wire.ReplicaDigest:
        return self._ask(offset=offset, below=below, batches=batches)

    def check_file(self, offset: int) -> wire.ReplicaDigest:
        return self._ask(offset=offset, files=True)

    def _ask(self, *, offset: int, below: int = 0, batches: bool = False, files: bool = False) -> wire.ReplicaDigest:
        if (before := self._silent.get(self.broker_id)) is not None:
            raise before
        try:
            return self._admin.digest(*self._partition, offset=offset, below=below, batches=batches, files=files)
        except Unavailable as error:
            self._silent[self.broker_id] = error
            raise


class LivePartition:
    """A partition, as its leader shows it to readers."""

    def __init__(self, admin: Admin, topic: str, number: int, config: wire.TopicConfig) -> None:
        self.name = f"{topic}/{number}"
        self.is_compacted = config.cleanup == "compact"
        self._admin = admin
        self._partition = (topic, number)

    def page(self, offset: int) -> MessagePage:
        try:
            found = self._admin.browse(*self._partition, offset=offset, limit=wire.BROWSE_MESSAGES_MAX)
        except OffsetOutOfRange:  # below the log start, or beyond the end
            found = self._admin.browse(*self._partition, offset="earliest", limit=1)
            if offset >= found.log_start_offset:
                return MessagePage([], offset, found.log_start_offset, found.high_watermark)
        messages = [
            StoredContent(each.offset, each.key, each.value, each.content_type, each.headers or {})
            for each in found.messages
        ]
        return MessagePage(messages, found.next_offset, found.log_start_offset, found.high_watermark)


def partitions_of(
    admin: Admin, topic: wire.TopicDescription, brokers: int, silent: dict[int, Unavailable]
) -> Iterator[PartitionFinding]:
    """Compare the replicas of each partition of a topic. `silent`: see LiveReplica. Raises PortalMQError when no broker
    can be asked."""
    for each in topic.partitions:
        replicas = [LiveReplica(admin, topic.name, each.partition, broker_id, silent) for broker_id in each.replicas]
        found = ReplicaComparison(topic.name, each.partition, replicas, leader=each.leader, pause=time.sleep).run()
        missing = min(topic.replication_factor, brokers) - len(each.replicas)
        found.replicas += [ReplicaFinding(-1, "unknown", problem="no broker has this replica") for _ in range(missing)]
        yield found
