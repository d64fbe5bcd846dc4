"""The leader's half of a replica: it allots offsets, advances the high watermark, answers followers, proposes the ISR.

It commits what every member of its maximal ISR has acknowledged in this epoch (isr.py), and nothing before EPOCH_START
is committed. The other half is follower.py; neither half calls the other.
"""

from __future__ import annotations

from portalmq.broker.core.replica import events
from portalmq.broker.core.replica.isr import IsrTracker
from portalmq.broker.core.replica.state import SUCCESSOR_WAITS_MS, ReplicaState
from portalmq.errors import NotEnoughReplicas, NotLeader, OutOfOrderSequence, PortalMQError, Unavailable

UNCOMMITTED_MAX = 500_000
# The epoch in which a partition is created: it has no earlier leader, whose deliveries an ack would have to wait for.
FIRST_EPOCH = 1
# Where an epoch begins whose EPOCH_START is still to be appended.
NOT_BEGUN = -1
_NOT_VOUCHED = "the followers do not vouch for the partition's leader at the moment"


class LeadingReplica(ReplicaState):
    """The leader's half of a PartitionReplica."""

    # --- the start of an epoch ---------------------------------------------------------------------------------------

    def _begin_leading(
        self, partition_state: events.PartitionStateChanged, now_ms: int, wall_ms: int
    ) -> list[events.Action]:
        """Begin to lead, with EPOCH_START as the first record. That record is in the log already if this replica
        continues in its own epoch: after a lost session without another election, or after its log was opened again.
        A replica alone that has nothing left to commit writes it with the first record that follows."""
        if (partition_state.incarnations or {}).get(self.broker_id, self.incarnation) != self.incarnation:
            return []  # an earlier incarnation was elected: the controller elects again
        if self._resigned:
            return [] if self._refresh_wanted else self._refresh_now(now_ms)
        if self._reshaping:
            return []  # a truncation is in progress
        start = self._epochs.start_of(partition_state.leader_epoch)
        is_alone = len(partition_state.replicas) == 1
        continues = self._continues_epoch == partition_state.leader_epoch or is_alone
        if start is not None and not continues:
            return self._give_up(partition_state)
        defers = is_alone and partition_state.min_insync_replicas <= 1 and self.high_watermark == self.next_offset
        epoch_start = NOT_BEGUN if start is None else start
        self.in_sync = IsrTracker(self.broker_id, partition_state, epoch_start, now_ms, self.lag_ms)
        heard_ms = self._leader_answered_ms
        if len(partition_state.replicas) > 1 and partition_state.leader_epoch > FIRST_EPOCH:
            heard_ms = max(heard_ms, self._began_ms)  # an earlier incarnation may have vouched until then
        self._settles_from_ms = heard_ms + SUCCESSOR_WAITS_MS
        if start is None and not defers:
            return [self._start_epoch(wall_ms)]
        return self._advance_high_watermark(now_ms)

    def _give_up(self, partition_state: events.PartitionStateChanged) -> list[events.Action]:
        """Resign as the leader, not from the ISR: followers may have records of this epoch that are not in this log, so
        their offsets must not be allotted again in it."""
        if self._proposal is None:
            self._proposal = events.ProposeIsr(partition_state.isr, partition_state.version, {}, {}, resigns=True)
            self._proposal_unknown = False
            return [self._proposal]
        return []

    def _start_epoch(self, wall_ms: int) -> events.Append:
        assert self.in_sync is not None
        self._continues_epoch = self.in_sync.state.leader_epoch
        self.in_sync.epoch_start = self.next_offset
        self._epochs.add(self.in_sync.state.leader_epoch, self.next_offset)
        return self._allot(None, 1, wall_ms)

    @property
    def _is_to_begin(self) -> bool:
        return self.in_sync is not None and self.in_sync.epoch_start == NOT_BEGUN

    # --- appending ---------------------------------------------------------------------------------------------------

    def _on_append_requested(self, event: events.AppendRequested, now_ms: int, wall_ms: int) -> list[events.Action]:
        try:
            place = self._admit(event, now_ms)
        except PortalMQError as error:
            return [events.Refuse(event.token, error)]
        if place is not None:
            return [events.AnswerDuplicate(event.token, *place)]
        begins = [self._start_epoch(wall_ms)] if self._is_to_begin else []
        append = self._allot(event.token, event.count, max(wall_ms, event.not_before_ms))
        if event.stamp is not None:
            self.producers.add(event.stamp, event.count, append.base_offset, append.appended_at_ms)
        return [*begins, append]

    def _admit(self, event: events.AppendRequested, now_ms: int) -> tuple[int, int] | None:
        leading = self.in_sync
        if leading is None:
            leader = self.state.leader if self.state else None
            raise NotLeader("another broker leads this partition, or none does yet", leader=leader)
        if not (self.may_deliver(now_ms) if event.delivers else self.may_serve(now_ms)):
            if not self.may_serve(now_ms):
                raise Unavailable("this broker does not know whether it still leads the partition", retry_after_s=0.2)
            raise Unavailable(_NOT_VOUCHED, retry_after_s=0.2)
        if not event.is_control:
            too_few = self._too_few_replicas(leading, now_ms)
            if too_few is not None:
                # A repeat needs nothing appended: its first copy may yet be committed, so it waits for that.
                repeated = self.producers.repeated_by(event.stamp, event.count) if event.stamp else None
                if repeated is not None:
                    return repeated
                raise too_few
        try:
            return self.producers.find_duplicate(event.stamp, event.count) if event.stamp else None
        except OutOfOrderSequence as gap:
            if self.may_deliver(now_ms):
                raise
            # The missing batch may be with a successor that this leader does not know of.
            raise Unavailable(_NOT_VOUCHED, retry_after_s=0.2) from gap

    def _too_few_replicas(self, leading: IsrTracker, now_ms: int) -> NotEnoughReplicas | None:
        live, needed = leading.live_members(now_ms), leading.state.min_insync_replicas
        if live < needed:
            return NotEnoughReplicas(f"{live} replicas are in sync, {needed} are needed", retry_after_s=1.0)
        if self.next_offset - self.high_watermark > UNCOMMITTED_MAX:
            return NotEnoughReplicas("the followers are far behind", retry_after_s=1.0)
        return None

    def _allot(self, token: object, count: int, wall_ms: int) -> events.Append:
        """Allot offsets and a timestamp. Timestamps never fall, whatever the clock does."""
        assert self.state is not None
        assert count >= 1
        self.last_timestamp_ms = max(self.last_timestamp_ms, wall_ms)
        append = events.Append(token, self.next_offset, self.state.leader_epoch, self.last_timestamp_ms)
        self.next_offset += count
        return append

    def _advance_high_watermark(self, now_ms: int) -> list[events.Action]:
        """Raise the high watermark. Nothing of an epoch is committed before its EPOCH_START is (rule 4)."""
        leading = self.in_sync
        assert leading is not None
        at_least = max(leading.epoch_start, self.high_watermark)
        if self.durable_end <= at_least:  # not on disk here, so not committed
            return []
        end = leading.committed_end(self.durable_end, self._brokers, now_ms)
        if end <= at_least:
            return []
        self.high_watermark = end
        return [events.HighWatermarkAdvanced(end)]

    # --- followers ---------------------------------------------------------------------------------------------------

    def _on_fetch_received(self, event: events.FetchReceived, now_ms: int) -> list[events.Action]:
        fetch = event.fetch
        if fetch.leader_epoch > self.highest_epoch:
            # There is a later epoch, so this leadership is over, whichever broker leads now.
            return [
                *self._learn_epoch(fetch.leader_epoch),
                *self._step_down(None),
                *self._refresh_now(now_ms),
                events.ReplyFetch(event.token, fetch.fetch_offset, events.Rejected(self.highest_epoch)),
            ]
        leading = self.in_sync
        if leading is None or fetch.leader_epoch != leading.state.leader_epoch:
            return [events.ReplyFetch(event.token, fetch.fetch_offset, events.Rejected(self.highest_epoch))]
        if fetch.broker_id not in leading.state.replicas:
            rejected = events.ReplyFetch(event.token, fetch.fetch_offset, events.Rejected(self.highest_epoch))
            return [*self._refresh_sparingly(now_ms), rejected]
        if fetch.fetch_offset < self.log_start_offset:
            gone = events.BelowStart(self.log_start_offset, tuple(self._epochs.entries))
            return [events.ReplyFetch(event.token, fetch.fetch_offset, gone)]
        epoch, end = self._epochs.end_of(fetch.last_epoch, self.sendable_end)
        if epoch < fetch.last_epoch or end < fetch.fetch_offset:
            return [events.ReplyFetch(event.token, fetch.fetch_offset, events.Diverging(epoch, end))]
        if not leading.fetched(fetch, self.durable_end, now_ms, event.sent_after_ms, event.poll):
            return [events.ReplyFetch(event.token, fetch.fetch_offset, events.Rejected(self.highest_epoch))]
        advanced = self._advance_high_watermark(now_ms)
        return [*advanced, *self._propose(now_ms), events.ReplyFetch(event.token, fetch.fetch_offset, None)]

    def fetch_ended(self, broker_id: int, poll: events.Poll) -> None:
        """Note that a fetch was answered or withdrawn: later requests of its broker say nothing of this replica."""
        if self.in_sync is not None:
            self.in_sync.fetch_ended(broker_id, poll)

    def _propose(self, now_ms: int) -> list[events.Action]:
        """Propose a change of the ISR, one compare-and-set at a time. A joining member counts from the proposal on,
        a leaving one until the change is confirmed."""
        leading = self.in_sync
        if leading is None or self._proposal is not None or not self._holds_epoch_start(leading):
            return []
        if leading.is_settled(now_ms):
            return []
        wanted = leading.wanted(self.high_watermark, self._brokers, now_ms)
        renewed = leading.renewed(self.high_watermark, self._brokers, now_ms) & wanted
        if wanted == leading.state.isr and not renewed:
            return []
        recorded = sorted(wanted - leading.state.isr | renewed)
        joiners = {broker_id: leading.joiner(broker_id) for broker_id in recorded}
        self._proposal = events.ProposeIsr(
            wanted,
            leading.state.version,
            {broker_id: store_uuid for broker_id, (_, store_uuid) in joiners.items()},
            {broker_id: incarnation for broker_id, (incarnation, _) in joiners.items()},
        )
        self._proposal_unknown = False
        leading.proposed = wanted
        return [self._proposal]

    def _holds_epoch_start(self, leading: IsrTracker) -> bool:
        return self.durable_end > leading.epoch_start
