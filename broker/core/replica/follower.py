"""The follower's half of a replica: it fetches when its log is on disk, and truncates records that contradict the
leader.

It acts in no epoch below the highest that it has seen, and truncates nothing below its high watermark: it is
quarantined instead, and resigns. The other half is leader.py; neither half calls the other.
"""

from __future__ import annotations

from portalmq.broker.core.replica import events
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.replica.state import ReplicaState


class FollowingReplica(ReplicaState):
    """The follower's half of a PartitionReplica."""

    # --- fetching ----------------------------------------------------------------------------------------------------

    def _next_fetch(self) -> list[events.Action]:
        """Send the next fetch, once all fetched records are on disk."""
        state = self.state
        if (
            state is None
            or state.leader is None
            or state.leader == self.broker_id
            or state.leader_epoch != self.highest_epoch
            or self.in_sync is not None
            or self.broker_id not in state.replicas
            or self.quarantined
            or self._reshaping
            or self._rejected
            or self.fetch is not None
            or self.durable_end != self.next_offset
        ):
            return []
        self._fetches += 1
        self.fetch = events.Fetch(
            self.broker_id,
            self.incarnation,
            self.store_uuid,
            state.leader_epoch,
            self.next_offset,
            self.durable_end,
            self._epochs.last,
            self._fetches,
        )
        return [events.SendFetch(state.leader, self.fetch)]

    def _on_fetch_replied(self, event: events.FetchReplied, now_ms: int) -> list[events.Action]:
        if event.fetch != self.fetch:
            return []  # late, or a repeat
        self.fetch = None
        match event.reply:
            case events.Records():
                return self._on_records(event.fetch, event.reply)
            case events.Diverging():
                return self._on_diverging(event.reply)
            case events.BelowStart():
                self._reshaping = True
                return [events.ResetLog(event.reply.offset, event.reply.epochs)]
            case events.Rejected():
                if event.reply.leader_epoch > self.highest_epoch:
                    return [*self._learn_epoch(event.reply.leader_epoch), *self._refresh_now(now_ms)]
                self._rejected = True  # until the next tick: the leader may not know of its election yet
                return self._refresh_sparingly(now_ms)

    def _on_records(self, fetch: events.Fetch, reply: events.Records) -> list[events.Action]:
        self._leader_high_watermark = reply.high_watermark
        if not reply.batches:
            return [*self._follow_high_watermark(), *self._next_fetch()]
        for batch in reply.batches:
            self._check_follows(batch)
            if batch.is_epoch_start:
                self._epochs.add(batch.leader_epoch, batch.base_offset)
            if batch.producers is not None:
                self.producers = Producers(list(batch.producers))
            if batch.stamp is not None:
                self.producers.add(batch.stamp, batch.count, batch.base_offset, batch.appended_at_ms)
            self.next_offset = batch.end_offset
            self.last_timestamp_ms = max(self.last_timestamp_ms, batch.appended_at_ms)
        return [*self._follow_high_watermark(), events.Replicate(fetch)]

    def _check_follows(self, batch: events.BatchHead) -> None:
        expected = batch.leader_epoch if batch.is_epoch_start else self._epochs.last
        assert batch.base_offset == self.next_offset, (batch, self.next_offset)
        assert batch.leader_epoch == expected <= self.highest_epoch, (batch, self._epochs.entries)

    def _follow_high_watermark(self) -> list[events.Action]:
        high_watermark = min(self._leader_high_watermark, self.durable_end)
        if high_watermark <= self.high_watermark:
            return []
        self.high_watermark = high_watermark
        return [events.HighWatermarkAdvanced(high_watermark)]

    # --- diverging logs ----------------------------------------------------------------------------------------------

    def _on_diverging(self, reply: events.Diverging) -> list[events.Action]:
        """Truncate to the end of what both logs may share, and fetch again: one step may not suffice (KIP-279)."""
        _, own_end = self._epochs.end_of(reply.epoch, self.next_offset)
        to_offset = min(reply.end, own_end)
        if to_offset < self.high_watermark and not self._may_lose_records(self.state):
            self.quarantined = (
                f"the leader of epoch {self.highest_epoch} asks to truncate to {to_offset}, below the high watermark"
                f" {self.high_watermark}"
            )
            assert self.state is not None
            resigning = self._resign(self.state) if self._must_resign(self.state) else []
            return [events.Quarantine(self.quarantined), *resigning]
        self._reshaping = True
        return [events.Truncate(to_offset)]

    def _may_lose_records(self, partition_state: events.PartitionStateChanged | None) -> bool:
        """Return whether an operator began an epoch after this log's last with a replica that was not in sync."""
        return partition_state is not None and any(
            epoch > self._epochs.last for epoch in partition_state.unclean_epochs
        )

    def _must_resign(self, partition_state: events.PartitionStateChanged) -> bool:
        """Return whether this replica must leave the ISR: its store is not the one recorded there, or it is quarantined
        (rule 6)."""
        if self.broker_id not in partition_state.isr:
            return False
        return (
            bool(self.quarantined)
            or (partition_state.store_uuids or {}).get(self.broker_id, self.store_uuid) != self.store_uuid
        )

    def _resign(self, partition_state: events.PartitionStateChanged) -> list[events.Action]:
        if self._proposal is not None:
            return self._next_fetch()
        self._proposal = events.ProposeIsr(
            partition_state.isr - {self.broker_id}, partition_state.version, {}, {}, resigns=True
        )
        self._proposal_unknown = False
        return [self._proposal, *self._next_fetch()]
