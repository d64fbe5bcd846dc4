"""One replica of a partition as a state machine: `step(event, now_ms) -> actions`.

It hears of an offset only after SQLite has committed it (`Appended`), so persist-before-send holds by construction.
The shell gives it events one at a time and performs the actions in order; performing may lead to new events.

    log start ......... high watermark ......... durable end ......... next offset
                readable               fsynced here        asked for, on its way to the disk
"""

from __future__ import annotations

from portalmq.broker.core.events import (
    Action,
    AnswerDuplicate,
    Append,
    Appended,
    AppendRequested,
    Event,
    HighWatermarkAdvanced,
    PartitionStateChanged,
    Refuse,
    StepDown,
)
from portalmq.broker.core.producers import Producers
from portalmq.errors import NotEnoughReplicas, NotLeader, PortalMQError


class PartitionReplica:
    """Invariants, checked on leaving `step`: 0 <= high_watermark <= durable_end <= next_offset; the high watermark and
    the leader epoch never fall; epochs rise strictly in both columns."""

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
    ) -> None:
        self.broker_id = broker_id
        self.producers = producers
        self.epochs = list(epochs)
        self.next_offset = end_offset
        self.durable_end = end_offset
        self.high_watermark = min(high_watermark, end_offset)
        self.highest_epoch = highest_epoch
        self.last_timestamp_ms = last_timestamp_ms
        self.state: PartitionStateChanged | None = None
        self._epoch_start = end_offset

    @property
    def leading(self) -> bool:
        return self.state is not None and self.state.leader == self.broker_id

    @property
    def leader_epoch(self) -> int:
        return self.state.leader_epoch if self.state else self.highest_epoch

    def step(self, event: Event, now_ms: int) -> list[Action]:
        """The one door. `now_ms` is Unix time; it stamps batches and decides nothing."""
        before = self.high_watermark
        match event:
            case AppendRequested():
                actions = self._on_append_requested(event, now_ms)
            case Appended():
                actions = self._on_appended(event)
            case PartitionStateChanged():
                actions = self._on_state_changed(event, now_ms)
        assert before <= self.high_watermark <= self.durable_end <= self.next_offset
        return actions

    def _on_state_changed(self, event: PartitionStateChanged, now_ms: int) -> list[Action]:
        if event.leader_epoch < self.highest_epoch:
            return []  # an old word: a newer epoch is known here
        led, newer = self.leading, event.leader_epoch > self.highest_epoch
        self.state = event
        self.highest_epoch = event.leader_epoch
        actions: list[Action] = []
        if led and (newer or not self.leading):
            actions.append(StepDown(event.leader))
        if self.leading and (newer or not led):
            actions += self._begin_epoch(event.leader_epoch, now_ms)
        return actions

    def _begin_epoch(self, leader_epoch: int, now_ms: int) -> list[Action]:
        """A leader first writes EPOCH_START. It is in the log already when this replica was reloaded within its epoch
        after a transaction that the disk refused."""
        if self.epochs and self.epochs[-1][0] == leader_epoch:
            self._epoch_start = self.epochs[-1][1]
            return self._advance_high_watermark()
        self._epoch_start = self.next_offset
        assert not self.epochs or self.epochs[-1][0] < leader_epoch, (self.epochs[-1], leader_epoch)
        self.epochs.append((leader_epoch, self.next_offset))
        return [self._allot(None, 1, now_ms)]

    def _on_append_requested(self, event: AppendRequested, now_ms: int) -> list[Action]:
        try:
            place = self._admit(event)
        except PortalMQError as error:
            return [Refuse(event.token, error)]
        if place is not None:
            return [AnswerDuplicate(event.token, *place)]
        append = self._allot(event.token, event.count, now_ms)
        if event.stamp is not None:
            self.producers.add(event.stamp, event.count, append.base_offset, append.appended_at_ms)
        return [append]

    def _admit(self, event: AppendRequested) -> tuple[int, int] | None:
        if self.state is None or not self.leading:
            leader = self.state.leader if self.state else None
            raise NotLeader("another broker leads this partition, or none does yet", leader=leader)
        if not event.is_control and len(self.state.isr) < self.state.min_insync_replicas:
            raise NotEnoughReplicas(
                f"{len(self.state.isr)} replicas are in sync, {self.state.min_insync_replicas} are needed",
                retry_after_s=1.0,
            )
        return self.producers.first_place(event.stamp, event.count) if event.stamp else None

    def _allot(self, token: object, count: int, now_ms: int) -> Append:
        """Offsets and a time: timestamps never fall, whatever the clock does."""
        assert self.state is not None
        assert count >= 1
        self.last_timestamp_ms = max(self.last_timestamp_ms, now_ms)
        append = Append(token, self.next_offset, self.state.leader_epoch, self.last_timestamp_ms)
        self.next_offset += count
        return append

    def _on_appended(self, event: Appended) -> list[Action]:
        assert self.durable_end <= event.end_offset <= self.next_offset, (self.durable_end, event, self.next_offset)
        self.durable_end = event.end_offset
        return self._advance_high_watermark()

    def _advance_high_watermark(self) -> list[Action]:
        """HW is the least durable end over the in-sync replicas: with one replica, our own, once the epoch's start
        is on disk."""
        if not self.leading or self.state is None or len(self.state.isr) < self.state.min_insync_replicas:
            return []
        if self.durable_end <= max(self._epoch_start, self.high_watermark):
            return []
        self.high_watermark = self.durable_end
        return [HighWatermarkAdvanced(self.high_watermark)]
