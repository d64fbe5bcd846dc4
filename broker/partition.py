"""One partition on this broker: a core that decides, a log that keeps, and the waiters in between.

All methods run on the hub's thread (greenlets), so there are no locks; only transactions and long reads run on native
threads. The order of offsets is the order of requests, and everything is answered in that order.

    append -> core allots offsets -> queue -> [native thread: CRC, INSERT, COMMIT] -> core: Appended
           <- waiters answered, receivers and browsers woken <- core: HighWatermarkAdvanced

Everything that the core hears passes `tell`, and its actions are performed in order. One of them waits for the disk
(RememberEpoch: a replica acts in no epoch that it could forget); until it is durable the rest stays queued. What a
follower does is in following.py, what a leader does for its followers in serving.py, the groups' fold in folding.py,
cleaning in upkeep.py.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.core import events as core
from portalmq.broker.core.delivery import GroupDelivery
from portalmq.broker.core.events import (
    Action,
    AnswerDuplicate,
    Append,
    Appended,
    AppendRequested,
    BrokersChanged,
    HighWatermarkAdvanced,
    LeaseRenewed,
    PartitionStateChanged,
    ProposeIsr,
    Quarantine,
    Refresh,
    Refuse,
    RememberEpoch,
    Replicate,
    ReplyFetch,
    ResetLog,
    SendFetch,
    SessionLost,
    Stamp,
    StepDown,
    Truncate,
    Truncated,
)
from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.core.insync import InSync
from portalmq.broker.core.records import GroupRecord, StreamRecord
from portalmq.broker.core.replica import PartitionReplica
from portalmq.broker.core.streams import StreamOffsets
from portalmq.broker.errands import Errands
from portalmq.broker.folding import KIND_OF, Recovered, recover
from portalmq.broker.following import Following
from portalmq.broker.hosting import PartitionHost
from portalmq.broker.readable import ReadablePartition
from portalmq.broker.reader import Reader
from portalmq.broker.serving import Serving
from portalmq.broker.storage.batch import Batch, Kind, Record
from portalmq.broker.storage.errors import DiskFull, StorageError
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.state import StateFile
from portalmq.broker.uncommitted import Uncommitted
from portalmq.broker.upkeep import Upkeep
from portalmq.broker.writer import Entry, Pending, Replicated, Writer
from portalmq.errors import (
    Backpressure,
    NotLeader,
    PortalMQError,
    StorageFull,
    Unavailable,
)
from portalmq.wire import Acks

log = logging.getLogger(__name__)

QUEUED_BYTES_MAX = 64 * 1024 * 1024
UNCOMMITTED_BYTES_MAX = 128 * 1024 * 1024
# Batches and control records; above it groups stand still too, while messages have limits of their own.
UNCOMMITTED_RECORDS_MAX = 200_000
REMEMBER_AGAIN_S = 1.0
# Every replica is told something several times a second. Others take a broker for dead after two seconds at the least.
PAUSED_MS = 1_500
REFUSAL_LOGGED_EVERY_MS = 5_000
DISK_FULL = "the broker's disk is full: free space or add disk, then repeat"

_encode = msgspec.msgpack.encode
_numbers = count()


class Partition(ReadablePartition):
    """A replica at work. `topic` and `number` name it; `delivery` holds the folds of its queue groups,
    `streams` those of its stream groups.

    `serves` says that it leads, and that what was committed before its epoch is known to it. `on_leading` and
    `on_stepped_down` tell of that, each in a greenlet of its own, in order; `on_damaged` that its files are to be
    replaced. `damage` says why, `quarantined` why this replica does nothing more.
    """

    def __init__(
        self,
        host: PartitionHost,
        topic: str,
        number: int,
        log: Log,
        state_file: StateFile,
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
        self.store_uuid = store_uuid or host.store_uuid
        self.dedup_window_ms = dedup_window_ms
        self.min_insync_replicas = min_insync_replicas
        self.delivery: dict[str, GroupDelivery] = {}
        self.streams: dict[str, StreamOffsets] = {}
        self.on_readable: list[Callable[[], None]] = []
        self.on_leading: Callable[[Partition], None] = lambda partition: None
        self.on_stepped_down: Callable[[Partition], None] = lambda partition: None
        self.on_damaged: Callable[[Partition], None] = lambda partition: None
        # An order to append something elsewhere (groups.outbox) may be committed now.
        self.on_ordered: Callable[[], None] = lambda: None
        self.changed = False
        self.serves = False
        self.damage = ""
        self.flaw = ""
        self.closed = False
        self._cache_key = next(_numbers)
        self._writer = Writer(host, log, self._on_written, self._on_refused)
        self._reader = Reader(
            log, host.cache, self._cache_key, host.storage_failed, lambda fault: self.damaged(str(fault))
        )
        self.following = Following(self)
        self.serving = Serving(self, self._cache_key)
        self.upkeep = Upkeep(self)
        self.errands = Errands(self)
        self._actions: deque[Action] = deque()
        self._performing = False
        self._remembering: RememberEpoch | None = None
        self._book: InSync | None = None
        self._uncommitted = Uncommitted()
        self._browsers: set[Event] = set()
        self._used = True
        self._is_streamed = False
        self._refused_ms = 0
        self._told_ms = host.clock.now_ms()
        found = recovered or recover(log, state_file)
        self.lost = found.lost
        self.install(found)
        self.replica = self._replica_of(found, found.highest_epoch)

    def __str__(self) -> str:
        return f"partition {self.number} of topic {self.topic!r}"

    # --- opening -----------------------------------------------------------------------------------------------------

    def install(self, found: Recovered) -> None:
        """Take what the log adds up to, after it was opened, cut or begun anew."""
        self.host.cache.drop(self._cache_key)
        self.groups = found.groups
        self.delivery.clear()
        self.delivery.update(found.groups.delivery)
        self.streams.clear()
        self.streams.update(found.groups.streams)
        found.groups.delivery = self.delivery  # those who serve groups keep hold of these dicts
        found.groups.streams = self.streams
        self.start = found.start
        self.messages_next = self.log.message_count_total
        self.readable_end = found.readable_end
        self._uncommitted.ends.clear()
        if found.recovered_end > found.readable_end:
            self._uncommitted.ends.append((found.recovered_end, 0))
        self.upkeep.forget_snapshot()

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
        )

    # --- the one door of the core ------------------------------------------------------------------------------------

    def tell(self, event: core.Event) -> None:
        """Tell the core, and perform what it asks for."""
        clock = self.host.clock
        now_ms, wall_ms = clock.now_ms(), clock.wall_ms()
        actions = [] if now_ms - self._told_ms <= PAUSED_MS else self._after_a_pause(now_ms, wall_ms)
        self._told_ms = now_ms
        actions += self.replica.step(event, now_ms, wall_ms)
        if actions:
            self._actions += actions
            if not self._performing:
                self._perform()
        self.following.settle()
        if self.replica.in_sync is not self._book:
            self._note_leadership()

    def _after_a_pause(self, now_ms: int, wall_ms: int) -> list[Action]:
        """This process stood still, or did not get to run: others may have taken it for dead, and have elected another
        leader. What arrived meanwhile must not be answered as if nothing had been."""
        replica = self.replica
        if not replica.leading or replica.state is None or replica.state.replicas == (self.host.broker_id,):
            return []
        log.warning("%s: nothing was heard for %d ms: does it still lead?", self, now_ms - self._told_ms)
        return replica.step(SessionLost(), now_ms, wall_ms)

    def hear(self, word: PartitionStateChanged, brokers: Mapping[int, tuple[int, str]] | None = None) -> None:
        """The control plane's word on this partition, and on who is there."""
        if brokers is not None:
            self.hear_brokers(brokers)
        if self.lost:
            self.damaged(self.lost, word)
        if self.damage:
            return
        self._writer.keeps_frames = len(word.replicas) > 1 or self._is_streamed
        self.tell(LeaseRenewed(self.host.membership.answered_ms()))
        self.tell(word)

    def keep_frames(self) -> None:
        """Somebody reads it as a stream: from now on batches are kept as they travel."""
        self._is_streamed = self._writer.keeps_frames = True

    def hear_brokers(self, brokers: Mapping[int, tuple[int, str]]) -> None:
        self.tell(BrokersChanged(brokers))

    def _perform(self) -> None:
        self._performing = True
        try:
            while self._actions:
                action = self._actions.popleft()
                if isinstance(action, RememberEpoch):
                    self._remembering = action
                    gevent.spawn(self._remember, action)
                    return
                self._act(action)
        finally:
            self._performing = self._remembering is not None

    def _remember(self, action: RememberEpoch) -> None:
        """Make it durable that the epoch was seen, then perform what waits for that. A full disk holds it up."""
        while not self.closed:
            failed = self.host.pool.apply(_remembered, (self.state_file, action.leader_epoch))
            if failed is None:
                break
            if not isinstance(failed, DiskFull):
                self.host.storage_failed(failed)
                return
            log.warning("%s: no room to remember its leader epoch %d", self, action.leader_epoch)
            gevent.sleep(REMEMBER_AGAIN_S)
        self._remembering = None
        self._perform()
        self.following.settle()

    def _act(self, action: Action) -> None:
        match action:
            case Append():
                self._enqueue(action)
            case HighWatermarkAdvanced():
                self._on_high_watermark(action.high_watermark)
            case ReplyFetch():
                self.serving.answer(action)
            case Replicate():
                self._enqueue_replicated(self.following.replicated())
            case SendFetch():
                if not self.closed:
                    self.following.send(action)
            case AnswerDuplicate():
                self._answer_duplicate(action)
            case Refuse():
                pending: Any = action.token
                pending.finish(action.error)
            case StepDown():
                self._on_step_down(action.leader)
            case ProposeIsr() | Refresh():
                self.errands.send(action)
            case Truncate():
                self.following.truncate(action)
            case ResetLog():
                self.following.reset(action)
            case Quarantine():
                log.critical("%s is quarantined, and does nothing more: %s", self, action.reason)

    @property
    def quarantined(self) -> str:
        return self.replica.quarantined

    # --- who leads ---------------------------------------------------------------------------------------------------

    def _note_leadership(self) -> None:
        """The core began or ended to lead. The end is acted on with StepDown, in its place among the actions."""
        self._book = self.replica.in_sync
        if self._book is None:
            return
        self._begin_to_serve()

    def _take_over(self) -> None:
        """Leases and back-offs in the log are by the clocks of those who led before."""
        now_ms = self.host.clock.now_ms()
        for delivery in self.delivery.values():
            delivery.take_over(now_ms)

    def _begin_to_serve(self) -> None:
        """A leader knows all that was committed before its time once the start of its epoch is committed."""
        book = self.replica.in_sync
        if self.serves or book is None or self.replica.high_watermark <= book.epoch_start:
            return
        self.serves = True
        self._take_over()  # what the one before wrote last was perhaps still on its way to the disk at the election
        if self.groups.purges:
            gevent.spawn(self.upkeep.finish_purges)  # from here an append could not tell its place yet
        gevent.spawn(self.on_leading, self)

    def _on_step_down(self, leader: int | None) -> None:
        """Whoever waits learns that the outcome is unknown. What is on its way to the disk goes on, and is folded."""
        self.serving.end()
        error = self.located(
            NotLeader("the leadership moved while this was on its way", leader=leader, outcome="unknown")
        )
        self._uncommitted.fail(error)
        for event in self._browsers:
            event.set()
        if self.serves:
            self.serves = False
            gevent.spawn(self.on_stepped_down, self)

    def located(self, error: PortalMQError) -> PortalMQError:
        """NotLeader with what the caller needs next; the leader that is just beginning says so itself."""
        if not isinstance(error, NotLeader):
            return error
        leader = error.extra.get("leader")
        if leader == self.host.broker_id and error.outcome == "not_applied":
            return Unavailable("this broker was elected, and has not begun to lead yet", retry_after_s=0.1)
        if leader is not None:
            error.extra["leader_url"] = self.host.membership.mirror.url_of(leader)
        return error

    def damaged(self, reason: str, word: PartitionStateChanged | None = None) -> None:
        """Something in the files is not what was written. With another replica in sync this one is to be rebuilt from
        it; else it goes on with what it has, and refuses what it has not."""
        if self.damage or self.closed or reason == self.flaw:
            return
        state = word or self.replica.state
        if state is None or not state.isr - {self.host.broker_id}:
            self.flaw = reason
            log.critical("%s is damaged, and there is no other replica to rebuild it from: %s", self, reason)
            return
        self.damage = reason
        log.critical("%s is damaged, and will be rebuilt from another replica: %s", self, reason)
        gevent.spawn(self.on_damaged, self)

    # --- appending ---------------------------------------------------------------------------------------------------

    def append(
        self, records: tuple[Record, ...], size_bytes: int, *, stamp: Stamp | None = None, acks: Acks = "all"
    ) -> tuple[int, int]:
        """Append messages and wait as `acks` asks; (base offset, timestamp_ms), or (-1, 0) for acks "none".

        Raises what the core refuses with; Unavailable with outcome unknown when the wait ends first.
        """
        pending = self.submit(records, size_bytes, stamp=stamp, acks=acks)
        return self.outcome(pending)

    def submit(
        self, records: tuple[Record, ...], size_bytes: int, *, stamp: Stamp | None = None, acks: Acks = "all"
    ) -> Pending:
        """The first half of append: offsets are allotted on return."""
        self.check_room()
        batch = Batch(0, len(records), 0, Kind.MESSAGES, 0, 0, records=records)
        return self._submit(Pending(batch, size_bytes, stamp=stamp, acks=acks), len(records), is_control=False)

    def check_room(self) -> None:
        """Raises StorageFull or Backpressure when no more payload is to be taken now."""
        if self.host.disk_is_full():
            raise StorageFull("the broker's disk is nearly full: free space or add disk, then repeat", retry_after_s=5)
        if self._writer.queued_bytes > QUEUED_BYTES_MAX:
            raise Backpressure(f"{self._writer.queued_bytes} bytes wait for the disk already", retry_after_s=0.5)
        if self._uncommitted.bytes > UNCOMMITTED_BYTES_MAX:
            raise Backpressure(f"{self._uncommitted.bytes} bytes wait for the followers already", retry_after_s=0.5)

    def outcome(self, pending: Pending) -> tuple[int, int]:
        """The second half of append: wait until the batch is as safe as its acks ask."""
        if pending.acks == "none":
            return -1, 0
        pending.wait()
        return pending.base_offset, pending.appended_at_ms

    def append_control(
        self, kind: Kind, body: bytes, group: str = "", *, is_soft: bool = False, not_before_ms: int = 0
    ) -> Pending:
        """Append a control record. A soft one is not hurried to the disk, as nobody is going to `settle` it. Raises
        Backpressure while too many are not committed: leases come and go though no follower is there."""
        if self._uncommitted.records >= UNCOMMITTED_RECORDS_MAX:
            raise Backpressure(f"{self._uncommitted.records} records wait for the followers already", retry_after_s=0.5)
        pending = Pending(Batch(0, 1, 0, kind, 0, 0, group=group, body=body), len(body), is_soft=is_soft)
        return self._submit(pending, 1, is_control=True, not_before_ms=not_before_ms)

    def append_group_record(
        self, group: str, record: GroupRecord | StreamRecord, *, is_soft: bool = False, not_before_ms: int = 0
    ) -> Pending:
        """Fold a group's record and append it: from here on the group's state has it. The log's time is
        `not_before_ms` at the least from then on."""
        body = _encode(record)
        pending = self.append_control(KIND_OF[type(record)], body, group, is_soft=is_soft, not_before_ms=not_before_ms)
        self.groups.apply(group, record, pending.base_offset)
        return pending

    def end_group(self, group: str) -> Pending | None:
        """Forget a group; what to wait on until that is committed."""
        if self.closed or (group not in self.delivery and group not in self.streams):
            return None
        pending = self.append_control(Kind.GROUP_END, b"", group)
        self.groups.end(group)
        return pending

    def _submit(self, pending: Pending, size: int, *, is_control: bool, not_before_ms: int = 0) -> Pending:
        if self.closed:
            raise Unavailable("the partition is being closed", retry_after_s=0.5)
        if self._remembering is not None:
            raise Unavailable("the partition's leadership is just changing", retry_after_s=0.1)
        self.tell(AppendRequested(pending, size, pending.stamp, is_control, not_before_ms))
        if pending.error is not None:
            raise self.located(pending.error)
        return pending

    def _enqueue(self, action: Append) -> None:
        pending: Any = action.token
        if pending is None:
            pending = Pending(Batch(0, 1, 0, Kind.EPOCH_START, 0, 0))
        if self.closed:
            pending.finish(Unavailable("the partition is being closed", retry_after_s=0.5))
            return
        stamp = pending.stamp
        pending.base_offset, pending.appended_at_ms = action.base_offset, action.appended_at_ms
        pending.batch = batch = Batch(
            action.base_offset,
            pending.batch.count,
            self.messages_next,
            pending.batch.kind,
            action.leader_epoch,
            action.appended_at_ms,
            stamp.producer_id if stamp else -1,
            stamp.producer_epoch if stamp else -1,
            stamp.sequence if stamp else -1,
            pending.batch.group,
            pending.batch.records,
            pending.batch.body,
        )
        self.messages_next += batch.message_count
        self.changed = self._used = True
        self._uncommitted.add(pending)
        self._writer.put(pending)

    def _enqueue_replicated(self, entry: Replicated) -> None:
        if self.closed:
            return
        for head in entry.heads:
            if head.kind == Kind.MESSAGES:
                self.messages_next += head.count
                self._uncommitted.ends.append((head.end_offset, head.appended_at_ms))
        self.changed = self._used = True
        self._writer.put(entry)

    # --- what the writer tells ---------------------------------------------------------------------------------------

    def _on_written(self, taken: list[Entry]) -> None:
        """These batches are on disk."""
        end_offset = 0
        for entry in taken:
            if isinstance(entry, Replicated):
                end_offset = entry.end_offset
                for batch in entry.batches:
                    if batch.kind != Kind.MESSAGES:
                        self.groups.take(batch)
                continue
            end_offset = entry.batch.end_offset
            self.host.cache.put(self._cache_key, entry.batch, entry.size_bytes)
            if entry.frame is not None:
                self.host.cache.put_frame(self._cache_key, entry.base_offset, end_offset, entry.frame)
                entry.frame = None
        self._uncommitted.written(end_offset)
        self.tell(Appended(end_offset))
        self.serving.written(end_offset)
        self.upkeep.take_snapshot_if_due()
        leads = self.replica.leading
        for entry in taken:
            if isinstance(entry, Pending) and entry.acks == "leader" and leads:
                entry.finish()

    def _on_refused(self, taken: list[Entry], why: Exception) -> None:
        """None of this transaction is in the log, and nothing that was allotted after it: the core goes on from what
        is."""
        now_ms = self.host.clock.now_ms()
        if now_ms - self._refused_ms > REFUSAL_LOGGED_EVERY_MS:
            log.warning("%s: a transaction was refused: %s", self, why)
            self._refused_ms = now_ms
        full = StorageFull(DISK_FULL, retry_after_s=5)
        refused = {entry for entry in taken if isinstance(entry, Pending)}
        self._uncommitted.refuse(refused, StorageFull(DISK_FULL, outcome="unknown", retry_after_s=5))
        found = recover(self.log, self.state_file, self.high_watermark)
        self.install(found)
        if self.replica.leading:
            self._take_over()
        self.following.pause()
        # An EPOCH_START that waits for its epoch to be remembered stood after what is gone: the core asks for it again.
        self._actions = deque(action for action in self._actions if not isinstance(action, Append))
        self.tell(Truncated(self.log.end_offset, found.producers))
        for pending in refused:
            pending.finish(full)

    # --- what moves when the high watermark does ---------------------------------------------------------------------

    def _on_high_watermark(self, high_watermark: int) -> None:
        self.changed = True
        readable_end = self._uncommitted.advance(high_watermark, self.readable_end)
        if self.serving.parked:
            self.serving.high_watermark_moved()
        if not self.serves:
            self._begin_to_serve()
        if self.groups.moves:
            self.upkeep.move_log_start(self.groups.due(high_watermark))
        if self.groups.outbox:
            self.on_ordered()
        if readable_end > self.readable_end:
            self.readable_end = readable_end
            for wake in self.on_readable:
                wake()
            for event in self._browsers:
                event.set()

    def _answer_duplicate(self, action: AnswerDuplicate) -> None:
        pending: Any = action.token
        pending.base_offset, pending.appended_at_ms = action.base_offset, action.appended_at_ms
        end = action.base_offset + pending.batch.count
        if end <= self.replica.high_watermark:
            pending.finish()
        else:
            self._uncommitted.add_repeat(end, pending)

    # --- upkeep ------------------------------------------------------------------------------------------------------

    def snapshot(self) -> PartitionFold:
        """The fold over everything that was appended. It may enter the log as STATE: it commits with its prefix."""
        fold = PartitionFold(
            applied=self.replica.next_offset,
            log_start_offset=max(self.log.log_start_offset, self.groups.purged_upto),
            epochs=list(self.replica.epochs),
            producers=self.replica.producers.snapshot(),
        )
        return self.groups.snapshot_into(fold)

    def save_state(self) -> None:
        self.upkeep.save_state()

    def purge(self, upto: int | None) -> None:
        self.upkeep.purge(upto)

    def retain(self, retention_ms: int | None, retention_bytes: int | None, group_expiry_ms: int) -> None:
        self.upkeep.retain(retention_ms, retention_bytes, group_expiry_ms)

    @property
    def is_quiet(self) -> bool:
        """It leads and all its replicas are in sync, or it follows and its fetch stands: little depends on the time."""
        replica = self.replica
        if replica.leading:
            assert replica.state is not None
            return self.serves and len(replica.state.isr) == len(replica.state.replicas)
        return replica.fetch is not None

    def rest_if_idle(self) -> None:
        """Close the files when nothing was read or written since the last call; the next use opens them again."""
        used, self._used, self._reader.used = self._used or self._reader.used, False, False
        if not used and self._writer.is_idle and not self.changed and not self._performing:
            self.host.pool.apply(self.log.park)
            self.state_file.park()

    def close(self, *, saves: bool = True) -> None:
        """Refuse new work, write what waits, save the fold, close the files."""
        if self.closed:
            return
        self.closed = True
        self.following.close()
        self.serving.end()
        for event in self._browsers:
            event.set()
        self._writer.wait_idle()
        if saves:
            self.upkeep.save_state()
        self._on_step_down(None)
        self.host.cache.drop(self._cache_key)
        self.host.pool.apply(self.log.close)  # it writes: a thousand partitions would hold the hub for seconds
        self.state_file.close()


def _remembered(state_file: StateFile, leader_epoch: int) -> StorageError | None:
    """On a native thread. An error is answered and not raised, as gevent would print it."""
    try:
        state_file.save_highest_epoch(leader_epoch)
    except StorageError as error:
        return error
    return None
