"""One replica of a partition as a state machine: `step(event, now_ms, wall_ms) -> actions`.

It hears of an offset only after SQLite has committed it (`Appended`), so persist-before-send holds by construction.
The shell gives it events one at a time and performs the actions in order; performing may lead to new events.

    log start ......... high watermark ......... durable end ......... next offset
                readable               fsynced here        asked for, on its way to the disk

A replica leads, follows, or does neither (it knows no leader, or contradicts it and is quarantined). Safety rests on
the leader epoch alone: a leader commits what every member of its maximal ISR holds, each of which says so in this
epoch, and a member that has seen a higher epoch says nothing any more in a lower one. Clocks decide only when to stop
serving early, whom to propose for removal, and what to stamp messages with.

The rules, with their numbers, are those of ARCHITECTURE.md, "Replication"; in sync is decided in insync.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from portalmq.broker.core.epochs import Epochs
from portalmq.broker.core.events import (
    Action,
    AnswerDuplicate,
    Append,
    Appended,
    AppendRequested,
    BatchHead,
    BelowStart,
    BrokersChanged,
    Diverging,
    Event,
    Fetch,
    FetchReceived,
    FetchReplied,
    FollowerRefused,
    HighWatermarkAdvanced,
    IsrAnswered,
    LeaseRenewed,
    LogReset,
    Outcome,
    PartitionStateChanged,
    ProposeIsr,
    Quarantine,
    Records,
    Refresh,
    Refuse,
    Rejected,
    RememberEpoch,
    Replicate,
    ReplyFetch,
    ResetLog,
    SendFetch,
    SessionLost,
    StepDown,
    Tick,
    Truncate,
    Truncated,
)
from portalmq.broker.core.insync import NEVER_MS, InSync
from portalmq.broker.core.producers import Producers
from portalmq.errors import NotEnoughReplicas, NotLeader, PortalMQError, Unavailable

UNCOMMITTED_MAX = 500_000
REFRESH_AGAIN_MS = 1_000
REFRESH_PAUSE_MS = 300


class PartitionReplica:
    """Invariants, checked on leaving `step`: 0 <= high_watermark <= durable_end <= next_offset; the leader epoch never
    falls; epochs rise strictly in both columns; the high watermark falls only in an unclean election's truncation.

    `lease_ms`: how long a leader serves without hearing from the control plane or from every other ISR member.
    """

    def __init__(
        self,
        broker_id: int,
        *,
        producers: Producers,
        epochs: list[tuple[int, int]],
        end_offset: int,
        high_watermark: int,
        highest_epoch: int,
        last_timestamp_ms: int,
        log_start_offset: int = 0,
        incarnation: int = 0,
        store_uuid: str = "",
        lease_ms: int = 4_000,
        lag_ms: int = 3_000,
    ) -> None:
        self.broker_id = broker_id
        self.incarnation = incarnation
        self.store_uuid = store_uuid
        self.producers = producers
        self.next_offset = end_offset
        self.durable_end = end_offset
        self.high_watermark = max(log_start_offset, min(high_watermark, end_offset))
        self.log_start_offset = log_start_offset
        self.highest_epoch = highest_epoch
        self.last_timestamp_ms = last_timestamp_ms
        self.lease_ms = lease_ms
        self.lag_ms = lag_ms
        self.state: PartitionStateChanged | None = None
        self.quarantined = ""
        self.fetch: Fetch | None = None
        self._epochs = Epochs(epochs)
        self._leading: InSync | None = None
        self._brokers: Mapping[int, tuple[int, str]] = {}
        self._answered_ms = NEVER_MS
        self._proposal: ProposeIsr | None = None
        self._proposal_unknown = False
        self._refreshes = 0
        self._refresh_wanted = 0
        self._refreshed_ms = NEVER_MS
        # Who opens a log knows nothing of what was proposed in its epoch before: a synced word comes first.
        self._deposed = True
        self._reshaping = False
        self._rejected = False
        self._leader_high_watermark = 0
        self._fetches = 0

    # --- what others may ask -----------------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        return self._leading is not None

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch if self.state else self.highest_epoch

    @property
    def epochs(self) -> list[tuple[int, int]]:
        return self._epochs.entries

    @property
    def last_epoch(self) -> int:
        return self._epochs.last

    @property
    def in_sync(self) -> InSync | None:
        """The book on the followers, while this replica leads."""
        return self._leading

    def may_serve(self, now_ms: int) -> bool:
        """Whether this replica leads and its lease has not run out (rule 7)."""
        if self._leading is None:
            return False
        heard_ms = self._leading.heard_of_all_ms()
        return heard_ms is None or now_ms - max(self._answered_ms, heard_ms) <= self.lease_ms

    # --- the one door ------------------------------------------------------------------------------------------------

    def step(self, event: Event, now_ms: int, wall_ms: int | None = None) -> list[Action]:
        """`now_ms` never jumps and measures; `wall_ms` (Unix time) stamps batches, and is `now_ms` when left out."""
        wall_ms = now_ms if wall_ms is None else wall_ms
        match event:
            case AppendRequested():
                actions = self._on_append_requested(event, now_ms, wall_ms)
            case Appended():
                actions = self._on_appended(event, now_ms)
            case FetchReceived():
                actions = self._on_fetch_received(event, now_ms)
            case FetchReplied():
                actions = self._on_fetch_replied(event, now_ms)
            case Tick():
                actions = self._on_tick(now_ms)
            case LeaseRenewed():
                self._answered_ms = max(self._answered_ms, event.answered_ms)
                actions = []
            case PartitionStateChanged():
                actions = self._on_state_changed(event, now_ms, wall_ms)
            case IsrAnswered():
                actions = self._on_isr_answered(event, now_ms, wall_ms)
            case BrokersChanged():
                self._brokers = event.brokers
                actions = self._propose(now_ms)
            case FollowerRefused():
                if self._leading is not None:
                    self._leading.refused(event.broker_id, now_ms)
                actions = self._propose(now_ms)
            case SessionLost():
                self._answered_ms = NEVER_MS
                self._deposed = True
                actions = [*self._step_down(None), *self._ask_again(now_ms)]
            case Truncated():
                actions = self._on_truncated(event, now_ms, wall_ms)
            case LogReset():
                actions = self._on_log_reset(event, now_ms, wall_ms)
        assert 0 <= self.high_watermark <= self.durable_end <= self.next_offset, self
        return actions

    # --- who leads ---------------------------------------------------------------------------------------------------

    def _on_state_changed(self, word: PartitionStateChanged, now_ms: int, wall_ms: int) -> list[Action]:
        if word.leader_epoch < self.highest_epoch or (self.state is not None and word.version < self.state.version):
            return []  # an old word: a newer one is known here
        is_synced = 0 < self._refresh_wanted <= word.refresh
        if is_synced:
            self._refresh_wanted = 0
        before, self.state = self.state, word
        if self._proposal is not None:
            if word.version > self._proposal.version or (self._proposal_unknown and is_synced):
                self._proposal = None
            elif self._leading is not None:
                return []  # the compare-and-set is still on its way: what it finds is not known
        actions: list[Action] = []
        newer = word.leader_epoch > self.highest_epoch
        if newer:
            actions += self._learn_epoch(word.leader_epoch)
        if newer or is_synced:
            self._deposed = False
        if self.quarantined and self._may_forget(word):
            self.quarantined = ""
        if self._leading is not None and not newer and word.leader == self.broker_id:
            self._leading.word(word)
            return [*actions, *self._advance_high_watermark(now_ms), *self._propose(now_ms)]
        if self._leading is not None:
            actions += self._step_down(word.leader)
        if before is None or (before.leader, before.leader_epoch) != (word.leader, word.leader_epoch):
            self.fetch = None
            self._rejected = False
        if self._must_resign(word):
            return [*actions, *self._resign(word)]
        if word.leader == self.broker_id:
            return [*actions, *self._begin_leading(word, now_ms, wall_ms)]
        return [*actions, *self._next_fetch()]

    def _learn_epoch(self, epoch: int) -> list[Action]:
        """What was asked for in a lower epoch is not waited for any more: its answer has no authority."""
        self.highest_epoch = epoch
        self.fetch = None
        self._rejected = False
        self._leader_high_watermark = self.high_watermark
        return [RememberEpoch(epoch)]

    def _begin_leading(self, word: PartitionStateChanged, now_ms: int, wall_ms: int) -> list[Action]:
        """A leader first writes EPOCH_START. It is in the log already when this replica goes on within its epoch: after
        a session that was lost and nobody else elected, or when its log was opened anew."""
        if (word.incarnations or {}).get(self.broker_id, self.incarnation) != self.incarnation:
            return []  # what an earlier life of this broker was elected to: the controller elects anew
        if self._deposed:
            return [] if self._refresh_wanted else self._ask_again(now_ms)
        if self._reshaping:
            return []  # the end of the truncation that is under way comes first
        start = self._epochs.start_of(word.leader_epoch)
        epoch_start = self.next_offset if start is None else start
        self._leading = InSync(self.broker_id, word, epoch_start, now_ms, self.lag_ms)
        return self._advance_high_watermark(now_ms) if start is not None else [self._start_epoch(wall_ms)]

    def _start_epoch(self, wall_ms: int) -> Append:
        assert self._leading is not None
        self._leading.epoch_start = self.next_offset
        self._epochs.add(self._leading.state.leader_epoch, self.next_offset)
        return self._allot(None, 1, wall_ms)

    def _must_resign(self, word: PartitionStateChanged) -> bool:
        """In sync on paper, and not the store that was counted, or in contradiction to what others hold (rule 6)."""
        if self.broker_id not in word.isr:
            return False
        return (
            bool(self.quarantined) or (word.store_uuids or {}).get(self.broker_id, self.store_uuid) != self.store_uuid
        )

    def _resign(self, word: PartitionStateChanged) -> list[Action]:
        if self._proposal is not None:
            return self._next_fetch()
        self._proposal = ProposeIsr(word.isr - {self.broker_id}, word.version, {}, {}, resigns=True)
        self._proposal_unknown = False
        return [self._proposal, *self._next_fetch()]

    def _step_down(self, leader: int | None) -> list[Action]:
        if self._leading is None:
            return []
        self._leading = None
        self.fetch = None
        self._leader_high_watermark = 0
        if self._proposal is not None and not self._proposal.resigns:
            self._proposal = None
        return [StepDown(leader)]

    def _ask_again(self, now_ms: int) -> list[Action]:
        """Only what is read from now on will do."""
        action = self._refresh(now_ms)
        self._refresh_wanted = self._refreshes
        return [action]

    def _refresh(self, now_ms: int) -> Refresh:
        self._refreshes += 1
        self._refreshed_ms = now_ms
        return Refresh(self._refreshes)

    def _ask_sometimes(self, now_ms: int) -> list[Action]:
        return self._ask_again(now_ms) if now_ms - self._refreshed_ms >= REFRESH_PAUSE_MS else []

    # --- appending ---------------------------------------------------------------------------------------------------

    def _on_append_requested(self, event: AppendRequested, now_ms: int, wall_ms: int) -> list[Action]:
        try:
            place = self._admit(event, now_ms)
        except PortalMQError as error:
            return [Refuse(event.token, error)]
        if place is not None:
            return [AnswerDuplicate(event.token, *place)]
        append = self._allot(event.token, event.count, max(wall_ms, event.not_before_ms))
        if event.stamp is not None:
            self.producers.add(event.stamp, event.count, append.base_offset, append.appended_at_ms)
        return [append]

    def _admit(self, event: AppendRequested, now_ms: int) -> tuple[int, int] | None:
        leading = self._leading
        if leading is None:
            leader = self.state.leader if self.state else None
            raise NotLeader("another broker leads this partition, or none does yet", leader=leader)
        if not self.may_serve(now_ms):
            raise Unavailable("this broker cannot know whether it still leads the partition", retry_after_s=0.2)
        if not event.is_control:
            live, needed = leading.live_members(now_ms), leading.state.min_insync_replicas
            if live < needed:
                raise NotEnoughReplicas(f"{live} replicas are in sync, {needed} are needed", retry_after_s=1.0)
            if self.next_offset - self.high_watermark > UNCOMMITTED_MAX:
                raise NotEnoughReplicas("the followers are far behind", retry_after_s=1.0)
        return self.producers.first_place(event.stamp, event.count) if event.stamp else None

    def _allot(self, token: object, count: int, wall_ms: int) -> Append:
        """Offsets and a time: timestamps never fall, whatever the clock does."""
        assert self.state is not None
        assert count >= 1
        self.last_timestamp_ms = max(self.last_timestamp_ms, wall_ms)
        append = Append(token, self.next_offset, self.state.leader_epoch, self.last_timestamp_ms)
        self.next_offset += count
        return append

    def _on_appended(self, event: Appended, now_ms: int) -> list[Action]:
        assert self.durable_end <= event.end_offset <= self.next_offset, (self.durable_end, event, self.next_offset)
        self.durable_end = event.end_offset
        if self._leading is not None:
            return self._advance_high_watermark(now_ms)
        return [*self._follow_high_watermark(), *self._next_fetch()]

    def _advance_high_watermark(self, now_ms: int) -> list[Action]:
        """Nothing of an epoch counts as committed before the epoch's start does (rule 4)."""
        assert self._leading is not None
        end = self._leading.committed_end(self.durable_end, self._brokers, now_ms)
        if end <= max(self._leading.epoch_start, self.high_watermark):
            return []
        self.high_watermark = end
        return [HighWatermarkAdvanced(end)]

    # --- a leader and its followers ----------------------------------------------------------------------------------

    def _on_fetch_received(self, event: FetchReceived, now_ms: int) -> list[Action]:
        fetch = event.fetch
        if fetch.leader_epoch > self.highest_epoch:
            # There is a later epoch. Whoever leads it, what was led here is over.
            return [
                *self._learn_epoch(fetch.leader_epoch),
                *self._step_down(None),
                *self._ask_again(now_ms),
                ReplyFetch(event.token, fetch.fetch_offset, Rejected(self.highest_epoch)),
            ]
        leading = self._leading
        if leading is None or fetch.leader_epoch != leading.state.leader_epoch:
            return [ReplyFetch(event.token, fetch.fetch_offset, Rejected(self.highest_epoch))]
        if fetch.broker_id not in leading.state.replicas:
            rejected = ReplyFetch(event.token, fetch.fetch_offset, Rejected(self.highest_epoch))
            return [*self._ask_sometimes(now_ms), rejected]
        if fetch.fetch_offset < self.log_start_offset:
            gone = BelowStart(self.log_start_offset, tuple(self._epochs.entries))
            return [ReplyFetch(event.token, fetch.fetch_offset, gone)]
        epoch, end = self._epochs.end_of(fetch.last_epoch, self.durable_end)
        if epoch < fetch.last_epoch or end < fetch.fetch_offset:
            return [ReplyFetch(event.token, fetch.fetch_offset, Diverging(epoch, end))]
        if not leading.fetched(fetch, self.durable_end, now_ms):
            return [ReplyFetch(event.token, fetch.fetch_offset, Rejected(self.highest_epoch))]
        advanced = self._advance_high_watermark(now_ms)
        return [*advanced, *self._propose(now_ms), ReplyFetch(event.token, fetch.fetch_offset, None)]

    def _propose(self, now_ms: int) -> list[Action]:
        """One compare-and-set at a time. Who joins counts from here on, who leaves until it is known to have gone."""
        leading = self._leading
        if leading is None or self._proposal is not None or not self._holds_epoch_start(leading):
            return []
        wanted = leading.wanted(self.high_watermark, self._brokers, now_ms)
        if wanted == leading.state.isr:
            return []
        joiners = {broker_id: leading.joiner(broker_id) for broker_id in sorted(wanted - leading.state.isr)}
        self._proposal = ProposeIsr(
            wanted,
            leading.state.version,
            {broker_id: store_uuid for broker_id, (_, store_uuid) in joiners.items()},
            {broker_id: incarnation for broker_id, (incarnation, _) in joiners.items()},
        )
        self._proposal_unknown = False
        leading.proposed = wanted
        return [self._proposal]

    def _holds_epoch_start(self, leading: InSync) -> bool:
        return self.durable_end > leading.epoch_start

    def _on_isr_answered(self, event: IsrAnswered, now_ms: int, wall_ms: int) -> list[Action]:
        if self._proposal is None or event.version != self._proposal.version:
            return []
        if event.outcome is Outcome.APPLIED and event.word is not None:
            return self._on_state_changed(event.word, now_ms, wall_ms)
        # Somebody else was faster, or nobody knows. Until a word settles it the maximal ISR stands.
        self._proposal_unknown = True
        return self._ask_again(now_ms)

    def _on_tick(self, now_ms: int) -> list[Action]:
        actions: list[Action] = []
        if self._rejected:
            self._rejected = False
            actions += self._next_fetch()
        if self._refresh_wanted and now_ms - self._refreshed_ms >= REFRESH_AGAIN_MS:
            actions.append(self._refresh(now_ms))
        if self._leading is not None:
            self._leading.ticked(now_ms)
            actions += [*self._advance_high_watermark(now_ms), *self._propose(now_ms)]
        return actions

    # --- a follower and its leader -----------------------------------------------------------------------------------

    def _next_fetch(self) -> list[Action]:
        """Ask on, once all that was asked for is on disk."""
        state = self.state
        if (
            state is None
            or state.leader is None
            or state.leader == self.broker_id
            or state.leader_epoch != self.highest_epoch
            or self._leading is not None
            or self.broker_id not in state.replicas
            or self.quarantined
            or self._reshaping
            or self._rejected
            or self.fetch is not None
            or self.durable_end != self.next_offset
        ):
            return []
        self._fetches += 1
        self.fetch = Fetch(
            self.broker_id,
            self.incarnation,
            self.store_uuid,
            state.leader_epoch,
            self.next_offset,
            self.durable_end,
            self._epochs.last,
            self._fetches,
        )
        return [SendFetch(state.leader, self.fetch)]

    def _on_fetch_replied(self, event: FetchReplied, now_ms: int) -> list[Action]:
        if self.fetch is None or event.fetch != self.fetch:
            return []  # late, or a repeat
        self.fetch = None
        match event.reply:
            case Records():
                return self._on_records(event.fetch, event.reply)
            case Diverging():
                return self._on_diverging(event.reply)
            case BelowStart():
                self._reshaping = True
                return [ResetLog(event.reply.offset, event.reply.epochs)]
            case Rejected():
                if event.reply.leader_epoch > self.highest_epoch:
                    return [*self._learn_epoch(event.reply.leader_epoch), *self._ask_again(now_ms)]
                self._rejected = True  # until the next tick: the leader may not have heard of its election yet
                return self._ask_sometimes(now_ms)

    def _on_records(self, fetch: Fetch, reply: Records) -> list[Action]:
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
        return [*self._follow_high_watermark(), Replicate(fetch)]

    def _check_follows(self, batch: BatchHead) -> None:
        expected = batch.leader_epoch if batch.is_epoch_start else self._epochs.last
        assert batch.base_offset == self.next_offset, (batch, self.next_offset)
        assert batch.leader_epoch == expected <= self.highest_epoch, (batch, self._epochs.entries)

    def _follow_high_watermark(self) -> list[Action]:
        high_watermark = min(self._leader_high_watermark, self.durable_end)
        if high_watermark <= self.high_watermark:
            return []
        self.high_watermark = high_watermark
        return [HighWatermarkAdvanced(high_watermark)]

    def _on_diverging(self, reply: Diverging) -> list[Action]:
        """Cut back to what both logs may share, and ask again: one step may not be enough (KIP-279)."""
        _, own_end = self._epochs.end_of(reply.epoch, self.next_offset)
        to_offset = min(reply.end, own_end)
        if to_offset < self.high_watermark and not self._unclean_since():
            self.quarantined = (
                f"the leader of epoch {self.highest_epoch} would have it cut to {to_offset}, below its high watermark"
                f" {self.high_watermark}"
            )
            assert self.state is not None
            resigning = self._resign(self.state) if self._must_resign(self.state) else []
            return [Quarantine(self.quarantined), *resigning]
        self._reshaping = True
        return [Truncate(to_offset)]

    def _unclean_since(self) -> bool:
        """Whether an operator began an epoch that this log does not hold with a replica that was not in sync."""
        return self.state is not None and any(epoch > self._epochs.last for epoch in self.state.unclean_epochs)

    def _may_forget(self, word: PartitionStateChanged) -> bool:
        return any(epoch > self._epochs.last for epoch in word.unclean_epochs)

    def _on_truncated(self, event: Truncated, now_ms: int, wall_ms: int) -> list[Action]:
        """Cut as the leader asked; or by the disk, which refused a transaction and all that was to follow it."""
        self._reshaping = False
        self.next_offset = self.durable_end = event.end_offset
        self.high_watermark = min(self.high_watermark, event.end_offset)
        self.log_start_offset = min(self.log_start_offset, event.end_offset)
        self._leader_high_watermark = min(self._leader_high_watermark, self.high_watermark)
        self._epochs.truncate(event.end_offset)
        self.producers = event.producers
        if self._leading is None:
            return self._go_on(now_ms, wall_ms)
        if self._epochs.start_of(self._leading.state.leader_epoch) is None:
            return [self._start_epoch(wall_ms)]
        return []

    def _go_on(self, now_ms: int, wall_ms: int) -> list[Action]:
        """The log is what it will be for now: lead, when elected meanwhile, or ask for more."""
        word = self.state
        if word is not None and word.leader == self.broker_id and word.leader_epoch == self.highest_epoch:
            return [] if self._must_resign(word) else self._begin_leading(word, now_ms, wall_ms)
        return self._next_fetch()

    def _on_log_reset(self, event: LogReset, now_ms: int, wall_ms: int) -> list[Action]:
        self._reshaping = False
        self.next_offset = self.durable_end = self.high_watermark = self.log_start_offset = event.offset
        self._leader_high_watermark = event.offset
        self._epochs = Epochs(entry for entry in event.epochs if entry[1] < event.offset)
        self.producers = event.producers
        return self._go_on(now_ms, wall_ms)
