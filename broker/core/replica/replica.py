"""One replica of a partition as a state machine: `step(event, now_ms, wall_ms) -> actions`.

It learns of an offset only after SQLite committed it (`Appended`), so persist-before-send holds by construction. The
caller passes events one at a time and performs the actions in order; performing them may cause new events.

    PartitionReplica     here: step, the control plane's state, events common to leader and follower
      LeadingReplica     leader.py: offsets, the high watermark, fetches of followers; isr.py tracks them
      FollowingReplica   follower.py: fetching, and truncating records that contradict the leader
        ReplicaState     state.py: the state of both

A replica leads, follows, or does neither (it knows no leader, or contradicts it and is quarantined). Safety rests on
the leader epoch alone: a leader commits what every member of its maximal ISR holds and has acknowledged in this epoch,
and a member that has seen a higher epoch acknowledges nothing in a lower one. Clocks decide only when to stop serving
early, which replica to propose for removal, and the timestamps of messages.

The numbered rules are in broker/core/DESIGN.md.
"""

from __future__ import annotations

from portalmq.broker.core.replica import events
from portalmq.broker.core.replica.epochs import Epochs
from portalmq.broker.core.replica.follower import FollowingReplica
from portalmq.broker.core.replica.isr import NEVER_MS
from portalmq.broker.core.replica.leader import LeadingReplica

REFRESH_AGAIN_MS = 1_000


class PartitionReplica(LeadingReplica, FollowingReplica):
    """One replica of a partition.

    Invariants, checked at the end of `step`: 0 <= high_watermark <= durable_end <= next_offset; the leader epoch never
    falls; epochs rise strictly in both columns; the high watermark falls only in an unclean election's truncation.
    """

    # --- events ------------------------------------------------------------------------------------------------------

    def step(self, event: events.Event, now_ms: int, wall_ms: int | None = None) -> list[events.Action]:
        """Take one event and return the actions to perform. `now_ms` never jumps and measures durations. `wall_ms`
        (Unix time) stamps batches; it defaults to `now_ms`."""
        wall_ms = now_ms if wall_ms is None else wall_ms
        match event:
            case events.AppendRequested():
                actions = self._on_append_requested(event, now_ms, wall_ms)
            case events.EpochNeeded():
                actions = [self._start_epoch(wall_ms)] if self._is_to_begin else []
            case events.Appended():
                actions = self._on_appended(event, now_ms)
            case events.FetchReceived():
                actions = self._on_fetch_received(event, now_ms)
            case events.FetchReplied():
                actions = self._on_fetch_replied(event, now_ms)
            case events.Tick():
                actions = self._on_tick(now_ms)
            case events.LeaseRenewed():
                self._answered_ms = max(self._answered_ms, event.answered_ms)
                actions = []
            case events.LeaderAnswered():
                self._leader_answered_ms = max(self._leader_answered_ms, event.at_ms)
                actions = []
            case events.PartitionStateChanged():
                actions = self._on_state_changed(event, now_ms, wall_ms)
            case events.IsrAnswered():
                actions = self._on_isr_answered(event, now_ms, wall_ms)
            case events.BrokersChanged():
                self._brokers = event.brokers
                actions = self._propose(now_ms)
            case events.FollowerRefused():
                if self.in_sync is not None:
                    self.in_sync.refused(event.broker_id, now_ms)
                actions = self._propose(now_ms)
            case events.SessionLost():
                self._answered_ms = NEVER_MS
                self._resigned = True
                actions = [*self._step_down(None), *self._refresh_now(now_ms)]
            case events.Truncated():
                actions = self._on_truncated(event, now_ms, wall_ms)
            case events.LogReset():
                actions = self._on_log_reset(event, now_ms, wall_ms)
        assert 0 <= self.high_watermark <= self.durable_end <= self.next_offset, self
        return actions

    # --- who leads ---------------------------------------------------------------------------------------------------

    def _on_state_changed(
        self, partition_state: events.PartitionStateChanged, now_ms: int, wall_ms: int
    ) -> list[events.Action]:
        if partition_state.leader_epoch < self.highest_epoch or (
            self.state is not None and partition_state.version < self.state.version
        ):
            return []  # outdated: a newer state is known
        is_synced = 0 < self._refresh_wanted <= partition_state.refresh
        if is_synced:
            self._refresh_wanted = 0
        before, self.state = self.state, partition_state
        if self._proposal is not None:
            if partition_state.version > self._proposal.version or (self._proposal_unknown and is_synced):
                self._proposal = None
            elif self.in_sync is not None:
                return []  # the compare-and-set is still in flight, and its effect unknown
        actions: list[events.Action] = []
        newer = partition_state.leader_epoch > self.highest_epoch
        if newer:
            actions += self._learn_epoch(partition_state.leader_epoch)
        if newer or is_synced:
            self._resigned = False
        if self.quarantined and self._may_lose_records(partition_state):
            self.quarantined = ""
        if self.in_sync is not None and not newer and partition_state.leader == self.broker_id:
            self.in_sync.on_partition_state(partition_state)
            if self._is_to_begin and len(partition_state.replicas) > 1:
                actions.append(self._start_epoch(wall_ms))
            return [*actions, *self._advance_high_watermark(now_ms), *self._propose(now_ms)]
        if self.in_sync is not None:
            actions += self._step_down(partition_state.leader)
        if before is None or (before.leader, before.leader_epoch) != (
            partition_state.leader,
            partition_state.leader_epoch,
        ):
            self.fetch = None
            self._rejected = False
        if self._must_resign(partition_state):
            return [*actions, *self._resign(partition_state)]
        if partition_state.leader == self.broker_id:
            return [*actions, *self._begin_leading(partition_state, now_ms, wall_ms)]
        return [*actions, *self._next_fetch()]

    def _on_isr_answered(self, event: events.IsrAnswered, now_ms: int, wall_ms: int) -> list[events.Action]:
        if self._proposal is None or event.version != self._proposal.version:
            return []
        if event.outcome is events.Outcome.APPLIED and event.partition_state is not None:
            return self._on_state_changed(event.partition_state, now_ms, wall_ms)
        # Another change came first, or the outcome is unknown: the maximal ISR counts until a refreshed state resolves
        # it.
        self._proposal_unknown = True
        return self._refresh_now(now_ms)

    # --- leader and follower -----------------------------------------------------------------------------------------

    def _on_appended(self, event: events.Appended, now_ms: int) -> list[events.Action]:
        assert self.durable_end <= event.end_offset <= self.next_offset, (self.durable_end, event, self.next_offset)
        self.durable_end = event.end_offset
        if self.in_sync is not None:
            return self._advance_high_watermark(now_ms)
        return [*self._follow_high_watermark(), *self._next_fetch()]

    def _on_tick(self, now_ms: int) -> list[events.Action]:
        actions: list[events.Action] = []
        if self._rejected:
            self._rejected = False
            actions += self._next_fetch()
        if self._refresh_wanted and now_ms - self._refreshed_ms >= REFRESH_AGAIN_MS:
            actions.append(self._refresh(now_ms))
        if self.in_sync is not None:
            self.in_sync.ticked(now_ms)
            actions += [*self._advance_high_watermark(now_ms), *self._propose(now_ms)]
        return actions

    def _on_truncated(self, event: events.Truncated, now_ms: int, wall_ms: int) -> list[events.Action]:
        """Take the new end of a log that was truncated for the leader, or by a disk that refused a transaction."""
        self._reshaping = False
        gives_up = event.end_offset < event.sent_end
        if gives_up:
            self._continues_epoch = -1
        self.next_offset = self.durable_end = event.end_offset
        self.high_watermark = min(self.high_watermark, event.end_offset)
        self.log_start_offset = min(self.log_start_offset, event.end_offset)
        self._leader_high_watermark = min(self._leader_high_watermark, self.high_watermark)
        self._epochs.truncate(event.end_offset)
        self.producers = event.producers
        if self.in_sync is None:
            return self._resume(now_ms, wall_ms)
        if gives_up:
            self._resigned = True
            return [*self._step_down(None), *self._refresh_now(now_ms)]
        if self._epochs.start_of(self.in_sync.state.leader_epoch) is None:
            return [self._start_epoch(wall_ms)]
        return []

    def _resume(self, now_ms: int, wall_ms: int) -> list[events.Action]:
        """Continue after a change of the log: lead if this replica was elected, else fetch."""
        partition_state = self.state
        if (
            partition_state is not None
            and partition_state.leader == self.broker_id
            and partition_state.leader_epoch == self.highest_epoch
        ):
            return [] if self._must_resign(partition_state) else self._begin_leading(partition_state, now_ms, wall_ms)
        return self._next_fetch()

    def _on_log_reset(self, event: events.LogReset, now_ms: int, wall_ms: int) -> list[events.Action]:
        self._reshaping = False
        self.next_offset = self.durable_end = self.high_watermark = self.log_start_offset = event.offset
        self._leader_high_watermark = event.offset
        self._epochs = Epochs(entry for entry in event.epochs if entry[1] < event.offset)
        self.producers = event.producers
        return self._resume(now_ms, wall_ms)
