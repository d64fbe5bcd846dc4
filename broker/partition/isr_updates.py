"""Requests of a replica to the control plane: changes of the ISR, and reads of the partition's present state.

They run one after the other, since the second may depend on the first: a read requested after a compare-and-set begins
once that is answered.
"""

from __future__ import annotations

import logging

import gevent

from portalmq.broker.core.replica.events import (
    IsrAnswered,
    LeaderAnswered,
    LeaseRenewed,
    Outcome,
    PartitionStateChanged,
    ProposeIsr,
    Refresh,
)
from portalmq.broker.partition.following import FollowingPartition

log = logging.getLogger(__name__)


class IsrUpdates:
    """Invariant: a greenlet runs exactly while requests are queued. At most one Refresh waits: the newest counts."""

    def __init__(self, partition: FollowingPartition) -> None:
        self._partition = partition
        self._waiting: list[ProposeIsr | Refresh] = []
        self._greenlet: gevent.Greenlet | None = None

    def send(self, update: ProposeIsr | Refresh) -> None:
        if isinstance(update, Refresh):
            self._waiting = [each for each in self._waiting if not isinstance(each, Refresh)]
        self._waiting.append(update)
        if self._greenlet is None and not self._partition.closed:
            self._greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        try:
            while self._waiting and not self._partition.closed:
                update = self._waiting.pop(0)
                if isinstance(update, Refresh):
                    self._refresh(update)
                else:
                    self._propose(update)
        finally:
            self._greenlet = None

    def _refresh(self, update: Refresh) -> None:
        partition = self._partition
        membership = partition.host.membership
        partition_state = membership.reread(
            partition.topic_id, partition.number, update.number, partition.min_insync_replicas
        )
        if partition_state is not None and not partition.closed:
            partition.step(LeaseRenewed(membership.answered_ms()))
            self._tell(partition_state)

    def _propose(self, update: ProposeIsr) -> None:
        partition = self._partition
        try:
            answer = partition.host.membership.change_isr(
                partition.topic_id, partition.number, update, partition.min_insync_replicas
            )
        except Exception:  # an error must not leave the core waiting: the outcome has to be read
            log.exception("%s: its change of the ISR failed", partition)
            answer = IsrAnswered(update.version, Outcome.UNKNOWN)
        if not partition.closed:
            self._tell(answer)

    def _tell(self, event: IsrAnswered | PartitionStateChanged) -> None:
        """Tell what may be the first news of an election: a new leader needs to know when its predecessor answered."""
        partition = self._partition
        partition.step(LeaderAnswered(partition.host.fetchers.heard_ms(partition)))
        partition.step(event)
