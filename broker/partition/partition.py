"""One partition on this broker: a core that decides, a log that stores, and the requests that wait in between.

All methods run on the hub's thread (greenlets), so there are no locks; only transactions and long reads run on native
threads. All events for the core pass `step`, and its actions are performed in order.

    Partition                here: opening, input of the core, leadership, closing
      AppendingPartition     appending.py: records, from the append to the disk
        ReadablePartition    readable.py: reading

    action_queue.py          actions of the core that are not done yet
    following.py             the follower's half of replication; serving.py the leader's
    isr_updates.py           requests to the control plane
    folding.py, retention.py  the fold of the groups; snapshots, purges, retention
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import gevent
from gevent.event import Event

from portalmq.broker.core.fold import PartitionFold, SpanFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.replica import events as core
from portalmq.broker.core.replica.isr import IsrTracker
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.core.stream.offsets import StreamOffsets
from portalmq.broker.partition.action_queue import ActionQueue, EpochWriter
from portalmq.broker.partition.appending import AppendingPartition
from portalmq.broker.partition.folding import GroupsFold, Recovered, recover
from portalmq.broker.partition.following import FollowerReplication
from portalmq.broker.partition.host import PartitionHost
from portalmq.broker.partition.isr_updates import IsrUpdates
from portalmq.broker.partition.reader import Reader
from portalmq.broker.partition.refusals import refusal_of
from portalmq.broker.partition.retention import Retention
from portalmq.broker.partition.serving import LeaderReplication
from portalmq.broker.partition.uncommitted import Uncommitted
from portalmq.broker.partition.writer import Entry, Pending, Writer
from portalmq.broker.partition.yielding import TimeSlice
from portalmq.broker.storage.errors import DAMAGE, DiskFull, Shortage, StorageError
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.state import StateFile
from portalmq.errors import (
    NotLeader,
    Unavailable,
)

log = logging.getLogger(__name__)

# Every replica gets an event several times a second. Others declare a broker dead after two seconds at the earliest.
PAUSED_MS = 1_500
REFUSAL_LOGGED_EVERY_MS = 5_000
READ_AGAIN_S = 0.5
# Messages whose leases are set by this leader's clock before it serves, without a pause.
TAKEN_OVER_AT_ONCE = 1_000

_numbers = count()


class Partition(AppendingPartition):
    """A replica at work. `topic` and `number` name it; `delivery` holds the folds of its queue groups,
    `streams` those of its stream groups.

    `serves`: it leads, and knows all that was committed before its epoch. `on_leading` and `on_stepped_down` are called
    when that changes, each in a greenlet of its own, in order; `on_damaged` when its files should be replaced, and
    `on_unwritable` when it has to be closed before that. `fault` says why, `rebuild_reason` that they are being
    replaced.
    """

    # CPython shares the keys of instances with up to 30 attributes; a dict of more takes five times the memory.
    __slots__ = (
        "_browsers",
        "_cache_key",
        "_is_streamed",
        "_isr_tracker",
        "_last_step_ms",
        "_refused_ms",
        "_taking_over",
        "_used",
        "_writer",
        "action_queue",
        "fault",
        "groups",
        "isr_updates",
        "lost",
        "on_damaged",
        "on_ordered",
        "rebuild_reason",
        "sends_ahead",
        "store_uuid",
    )

    def __init__(
        self,
        host: PartitionHost,
        topic: str,
        number: int,
        log: Log,
        state_file: StateFile,
        epochs: EpochWriter,
        *,
        dedup_window_ms: int,
        topic_id: str = "",
        store_uuid: str | None = None,
        min_insync_replicas: int | None = None,
        recovered: Recovered | None = None,
    ) -> None:
        self.host = host
        self.topic = topic
        self.topic_id = topic_id
        self.number = number
        self.log = log
        self.state_file = state_file
        found = recovered or recover(log, state_file)
        self.store_uuid = store_uuid or host.store_uuid
        self.dedup_window_ms = dedup_window_ms
        self.min_insync_replicas = min_insync_replicas
        self.delivery: dict[str, GroupDelivery] = {}
        self.streams: dict[str, StreamOffsets] = {}
        self.on_readable: list[Callable[[], None]] = []
        self.on_leading: Callable[[Partition], None] = lambda partition: None
        self.on_stepped_down: Callable[[Partition], None] = lambda partition: None
        self.on_damaged: Callable[[Partition], None] = lambda partition: None
        self.on_unwritable: Callable[[Partition, str], None] = lambda partition, fault: None
        # Called when an order to append something elsewhere (groups.outbox) may be committed.
        self.on_ordered: Callable[[], None] = lambda: None
        self.changed = False
        self.serves = False
        self.rebuild_reason = ""
        self.fault = ""
        self.closed = False
        self._cache_key = next(_numbers)
        self._writer = Writer(host, log, self._on_written, self._on_refused, self._on_unwritable)
        self.reader = Reader(
            log, host.cache, self._cache_key, host.storage_failed, lambda fault: self.report_damage(str(fault))
        )
        self.following = FollowerReplication(self)
        self.serving = LeaderReplication(self, self._cache_key)
        self.retention = Retention(self)
        self.isr_updates = IsrUpdates(self)
        self.action_queue = ActionQueue(self, epochs, self._act, self._on_remembered)
        self._isr_tracker: IsrTracker | None = None
        # The leadership that is taken over in turns, or was last.
        self._taking_over: IsrTracker | None = None
        self.uncommitted = Uncommitted()
        self._browsers: set[Event] = set()
        self._used = True
        self._is_streamed = self.sends_ahead = False
        self._refused_ms = 0
        self._last_step_ms = host.clock.now_ms()
        self.groups = GroupsFold()
        self.lost = found.lost
        self.install(found)
        self.changed = not found.is_saved
        self.replica = self._replica_of(found, found.highest_epoch)

    def __str__(self) -> str:
        return f"partition {self.number} of topic {self.topic!r}"

    # --- opening -----------------------------------------------------------------------------------------------------

    def install(self, found: Recovered) -> None:
        """Load what the log adds up to, after it was opened, truncated or begun again."""
        self.reader.forget()
        found.groups.go_on_after(self.groups)
        self.groups = found.groups
        self.delivery.clear()
        self.delivery.update(found.groups.delivery)
        self.streams.clear()
        self.streams.update(found.groups.streams)
        found.groups.delivery = self.delivery  # users of these dicts keep their references
        found.groups.streams = self.streams
        self.start = found.start
        self.messages_next = self.log.message_count_total
        self.readable_end = found.readable_end
        self.uncommitted.ends.clear()
        if found.recovered_end > found.readable_end:
            self.uncommitted.add_end(found.recovered_end, 0)
        self.retention.forget_snapshot()

    def _replica_of(self, found: Recovered, highest_epoch: int) -> PartitionReplica:
        return PartitionReplica(
            self.host.broker_id,
            producers=found.producers,
            epochs=found.epochs,
            end_offset=self.log.end_offset,
            high_watermark=found.high_watermark,
            highest_epoch=highest_epoch,
            last_timestamp_ms=self.log.last_timestamp_ms,
            log_start_offset=found.start.offset,
            incarnation=self.host.incarnation,
            store_uuid=self.store_uuid,
            lease_ms=self.host.lease_ms,
            lag_ms=self.host.lag_ms,
            began_ms=self.host.began_ms,
        )

    # --- input of the core -------------------------------------------------------------------------------------------

    def step(self, event: core.Event) -> None:
        """Pass an event to the core, and perform the resulting actions."""
        clock = self.host.clock
        now_ms, wall_ms = clock.now_ms(), clock.wall_ms()
        actions = [] if now_ms - self._last_step_ms <= PAUSED_MS else self._after_a_pause(now_ms, wall_ms)
        self._last_step_ms = now_ms
        actions += self.replica.step(event, now_ms, wall_ms)
        if actions:
            self.action_queue.add(actions)
        self.following.settle()
        if self.replica.in_sync is not self._isr_tracker:
            self._note_leadership()
        if self.uncommitted.unsettled and self.replica.may_settle(now_ms):
            self.uncommitted.settle()

    def check_pause(self, now_ms: int) -> None:
        """Check for a pause of this process before a call is answered at `now_ms`. After a pause no call is answered,
        reads included, until it is known whether this replica still leads."""
        if now_ms - self._last_step_ms > PAUSED_MS and not self.closed:
            self.step(core.Tick())

    def leadership(self) -> Callable[[], bool]:
        """Return a function that tells whether messages that were taken just now may still be handed out."""
        isr_tracker = self.replica.in_sync

        def holds() -> bool:
            now_ms = self.host.clock.now_ms()
            self.check_pause(now_ms)
            return self.replica.in_sync is isr_tracker and self.replica.may_deliver(now_ms)

        return holds

    def _after_a_pause(self, now_ms: int, wall_ms: int) -> list[core.Action]:
        """Step down after a pause: others may have declared this process dead and elected another leader. Requests that
        arrived during the pause must not be answered as if nothing had happened."""
        replica = self.replica
        if not replica.leading or replica.state is None or replica.state.replicas == (self.host.broker_id,):
            return []
        log.warning("%s: the process was paused for %d ms, and may no longer lead", self, now_ms - self._last_step_ms)
        return replica.step(core.SessionLost(), now_ms, wall_ms)

    def on_partition_state(
        self, partition_state: core.PartitionStateChanged, brokers: Mapping[int, tuple[int, str]] | None = None
    ) -> None:
        """Apply the partition's state in the control plane, and which brokers are registered."""
        if brokers is not None:
            self.step(core.BrokersChanged(brokers))
        if self.lost:
            self.report_damage(self.lost)
        if self.rebuild_reason:
            return
        self._writer.has_followers = self.sends_ahead = len(partition_state.replicas) > 1
        self._writer.keeps_frames = self.sends_ahead or self._is_streamed
        self.step(core.LeaseRenewed(self.host.membership.answered_ms()))
        self.step(core.LeaderAnswered(self.host.fetchers.heard_ms(self)))
        self.step(partition_state)

    def keep_frames(self) -> None:
        """Keep batches in their wire format from now on: a stream reader uses them."""
        self._is_streamed = self._writer.keeps_frames = True

    def _act(self, action: core.Action) -> None:
        match action:
            case core.Append():
                self._enqueue(action)
            case core.HighWatermarkAdvanced():
                self._on_high_watermark(action.high_watermark)
            case core.ReplyFetch():
                self.serving.answer(action)
            case core.Replicate():
                self._enqueue_replicated(self.following.replicated())
            case core.SendFetch():
                if not self.closed:
                    self.following.send(action)
            case core.AnswerDuplicate():
                self._answer_duplicate(action)
            case core.Refuse():
                pending: Any = action.token
                pending.finish(action.error)
            case core.StepDown():
                self._on_step_down(action.leader)
            case core.ProposeIsr() | core.Refresh():
                self.isr_updates.send(action)
            case core.Truncate():
                self.following.truncate(action)
            case core.ResetLog():
                self.following.reset(action)
            case core.Quarantine():
                log.critical("%s is quarantined, and does nothing more: %s", self, action.reason)

    # --- leadership --------------------------------------------------------------------------------------------------

    def _note_leadership(self) -> None:
        """React to the begin of a leadership. Its end is handled by StepDown, in the order of the actions."""
        self._isr_tracker = self.replica.in_sync
        if self._isr_tracker is None:
            return
        self._begin_to_serve()

    def _on_remembered(self) -> None:
        self.following.settle()
        self._begin_to_serve()

    def _take_over(self, paced: Callable[[list[SpanFold]], Iterable[SpanFold]] = iter) -> None:
        """Convert leases and back-offs in the log: they were timed by the clocks of earlier leaders."""
        now_ms = self.host.clock.now_ms()
        for delivery in list(self.delivery.values()):
            delivery.take_over(now_ms, paced)

    def _take_over_in_turns(self, isr_tracker: IsrTracker) -> None:
        time_slice = TimeSlice()

        def leads() -> bool:
            return self.replica.in_sync is isr_tracker and not self.closed

        def while_leading(spans: list[SpanFold]) -> Iterator[SpanFold]:
            """Yield with pauses. After a pause a later epoch may have begun, which converts them by its own time."""
            for span in time_slice.paced(spans):
                if not leads():
                    return
                yield span

        self._take_over(while_leading)
        if leads():
            self._serve()

    def _begin_to_serve(self) -> None:
        """Serve once the epoch is on disk, and its start committed, if it has begun: then the leader knows all that was
        committed before."""
        isr_tracker = self.replica.in_sync
        if self.serves or isr_tracker is None or isr_tracker is self._taking_over or self.action_queue.remembering:
            return
        if self.replica.high_watermark <= isr_tracker.epoch_start:
            return
        # Not earlier: the last records of the earlier leader may have been written only after the election.
        now_ms = self.host.clock.now_ms()
        ahead = [each.outstanding for each in self.delivery.values() if each.may_be_ahead_of(now_ms)]
        if sum(ahead) <= TAKEN_OVER_AT_ONCE:
            self._take_over()
            self._serve()
        else:
            self._taking_over = isr_tracker
            gevent.spawn(self._take_over_in_turns, isr_tracker)

    def _serve(self) -> None:
        self.serves = True
        if self.groups.purges:
            gevent.spawn(self.retention.finish_purges)  # an append within this call would not know its offset yet
        gevent.spawn(self.on_leading, self)

    def _on_step_down(self, leader: int | None) -> None:
        """Fail all waiting calls with an unknown outcome. What is on its way to the disk is written and folded."""
        self.serving.end()
        error = self.located(
            NotLeader("the leadership moved while this was on its way", leader=leader, outcome="unknown")
        )
        self.uncommitted.fail(error)
        for event in self._browsers:
            event.set()
        if self.serves:
            self.serves = False
            gevent.spawn(self.on_stepped_down, self)

    def report_damage(self, reason: str) -> None:
        """Note that a record in the files is damaged or missing. The replica continues with what it has, and refuses
        what it lacks, until it is rebuilt from another replica that is known to be whole."""
        if self.fault or self.rebuild_reason or self.closed:
            return
        self.fault = reason
        log.critical("%s is damaged: %s", self, reason)
        gevent.spawn(self.on_damaged, self)

    def storage_failed(self, fault: Exception) -> None:
        """Report damage of this replica's files. Any other fault is one of the disk, and ends the broker."""
        if isinstance(fault, DAMAGE):
            self.report_damage(str(fault))
        else:
            self.host.storage_failed(fault)

    # --- results of the writer ---------------------------------------------------------------------------------------

    def _on_refused(self, taken: list[Entry], why: Exception) -> None:
        """Continue from what the log has: nothing of this transaction is in it, nor anything appended after it."""
        now_ms = self.host.clock.now_ms()
        if now_ms - self._refused_ms > REFUSAL_LOGGED_EVERY_MS:
            log.warning("%s: a transaction was refused: %s", self, why)
            self._refused_ms = now_ms
        shortage = why if isinstance(why, Shortage) else DiskFull(str(why))
        try:
            found = self._read_again(taken)
        except DAMAGE as fault:
            self._writer.give_up(taken, fault)
            return
        sent_end, self.serving.sent_end = self.serving.sent_end, 0
        refused = {entry for entry in taken if isinstance(entry, Pending)}
        self.uncommitted.refuse(refused, refusal_of(shortage, "unknown"))
        if found is not None:
            self._go_on_with(found, sent_end)
        for pending in refused:  # a follower may write, and later lead with, what it was sent
            pending.finish(refusal_of(shortage, "unknown" if pending.base_offset < sent_end else "not_applied"))

    def _on_unwritable(self, taken: list[Entry], fault: StorageError) -> None:
        """Refuse what is not written, now that a page of the log's file is damaged. Parts of it may be found later."""
        for entry in taken:
            if isinstance(entry, Pending):
                entry.finish(Unavailable(f"a file is damaged on this broker: {fault}", outcome="unknown"))
        gevent.spawn(self.on_unwritable, self, str(fault))

    def _read_again(self, taken: list[Entry]) -> Recovered | None:
        """Return what the log adds up to; None when the partition is closed. While the files cannot be opened, new
        entries are refused too, since they follow what is missing."""
        while not self.closed:
            try:
                return recover(self.log, self.state_file, self.high_watermark)
            except Shortage:
                gevent.sleep(READ_AGAIN_S)
            taken += self._writer.take_back()
        return None

    def _go_on_with(self, found: Recovered, sent_end: int) -> None:
        self.install(found)
        if self.replica.leading:
            self._take_over()
        self.following.pause()
        # An EPOCH_START that waits for a durable epoch followed what is gone: the core asks for it again.
        self.action_queue.drop_appends()
        self.step(core.Truncated(self.log.end_offset, found.producers, sent_end))
        self.on_ordered()  # the end of an order may be among what was refused

    # --- the high watermark ------------------------------------------------------------------------------------------

    def _on_high_watermark(self, high_watermark: int) -> None:
        self.changed = True
        settles = self.replica.may_settle(self.host.clock.now_ms())
        readable_end = self.uncommitted.advance(high_watermark, self.readable_end, settles=settles)
        if self.serving.parked:
            self.serving.high_watermark_moved()
        if not self.serves:
            self._begin_to_serve()
        if self.groups.moves:
            self.retention.move_log_start(self.groups.due(high_watermark))
        if self.groups.outbox:
            self.on_ordered()
        if readable_end > self.readable_end:
            self.readable_end = readable_end
            for wake in self.on_readable:
                wake()
            for event in self._browsers:
                event.set()

    # --- maintenance -------------------------------------------------------------------------------------------------

    def snapshot(self) -> PartitionFold:
        """Return the fold over all that was appended. It may be appended as STATE: it commits with its prefix."""
        fold = PartitionFold(
            applied=self.replica.next_offset,
            log_start_offset=max(self.log.log_start_offset, self.groups.purged_upto),
            epochs=list(self.replica.epochs),
            producers=self.replica.producers.snapshot(),
        )
        return self.groups.snapshot_into(fold)

    @property
    def needs_ticks(self) -> bool:
        """Whether anything depends on the time: it does not serve, has other replicas, or calls wait for the lease of
        an earlier leader."""
        return self.sends_ahead or not self.serves or bool(self.uncommitted.unsettled)

    @property
    def is_quiet(self) -> bool:
        """Whether little depends on the time: it leads with all replicas in sync, or its fetch waits at the leader."""
        replica = self.replica
        if replica.leading:
            assert replica.state is not None
            return self.serves and len(replica.state.isr) == len(replica.state.replicas)
        return replica.fetch is not None

    def close_if_idle(self) -> bool:
        """Close the files when nothing was read or written since the last call; the next use opens them again. Return
        whether that closed any."""
        used, self._used, self.reader.used = self._used or self.reader.used, False, False
        if used or self.changed or self.action_queue.performing or not self._writer.is_idle:
            return False
        opened = [files for files in (self.log, self.state_file) if files.is_open]
        for files in opened:
            self.host.pool.apply(files.park)
        return bool(opened)

    def close(self, *, saves: bool = True) -> None:
        """Refuse new calls, write what is queued, save the fold, close the files."""
        if self.closed:
            return
        self.closed = True
        self.following.close()
        self.serving.end()
        for event in self._browsers:
            event.set()
        self._writer.wait_idle()
        if saves:
            try:
                self.retention.save_last()
            except StorageError as fault:  # the other file is closed all the same
                self.storage_failed(fault)
        self._on_step_down(None)
        self.reader.forget()
        is_damaged = bool(self.fault or self.rebuild_reason)
        # Closing writes: a thousand partitions would block the hub for seconds.
        self.host.pool.apply(self.log.close, (), {"is_damaged": is_damaged})
        self.host.pool.apply(self.state_file.close)  # a check of the file may hold it
