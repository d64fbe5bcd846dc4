"""The shell that joins one core and one disk, as the broker's partition does: it performs the core's actions, in order,
and sends it their results.

RememberEpoch takes time, and the actions after it wait. Events in the meantime wait too, or are stepped with their
actions queued: both are right, and a seed chooses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from simulation.disk import Batch
from simulation.fetches import Fetches, PollRequest
from simulation.group_host import GroupHost
from simulation.network import CLIENTS
from simulation.submission import Submission
from simulation.trace import is_worth_tracing, line_of

from portalmq.broker.core.replica.events import (
    Action,
    AnswerDuplicate,
    Append,
    Appended,
    AppendRequested,
    BatchHead,
    Event,
    Fetch,
    FetchReceived,
    FetchReplied,
    FollowerRefused,
    HighWatermarkAdvanced,
    LeaderAnswered,
    LogReset,
    Poll,
    ProposeIsr,
    Quarantine,
    Refresh,
    Refuse,
    RememberEpoch,
    Replicate,
    ReplyFetch,
    ResetLog,
    SendFetch,
    StepDown,
    Tick,
    Truncate,
    Truncated,
)
from portalmq.broker.core.replica.isr import NEVER_MS
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.errors import NotLeader, PortalMQError, StorageFull

if TYPE_CHECKING:
    from simulation.node import Node

SAVE_MS = 1_000


class ReplicaShell:
    def __init__(self, node: Node, high_watermark: int) -> None:
        self.node = node
        self.world = node.world
        self.disk = disk = node.disk
        options = node.world.options
        self.replica = PartitionReplica(
            node.id,
            producers=disk.producers(),
            epochs=disk.epochs(),
            end_offset=disk.end,
            high_watermark=high_watermark,
            highest_epoch=disk.highest_epoch,
            last_timestamp_ms=disk.batches[-1].head.appended_at_ms if disk.batches else 0,
            log_start_offset=disk.start,
            incarnation=node.incarnation,
            store_uuid=node.store,
            lease_ms=options.lease_ms,
            lag_ms=options.lag_ms,
            began_ms=self.world.now,
        )
        self.closed = False
        self.fetches = Fetches(self)
        self.isr_changing = False
        self.watermark_seen = 0
        self.fetch_seen: Fetch | None = None
        self.brokers_seen: Mapping[int, tuple[int, str]] = {}  # these three are the checker's
        self._events: deque[tuple[Event, list[Batch]]] = deque()
        self._actions: deque[Action] = deque()
        self._to_replicate: deque[list[Batch]] = deque()
        self._pumping = False
        self._stalled = False
        self._queue: list[tuple[Batch, Submission | None]] = []
        self._writing: list[tuple[Batch, Submission | None]] = []
        self._reshape: Callable[[], None] | None = None
        self._tail = disk.batches[-1].uid if disk.batches else (-1 if disk.start else 0)
        self._uncommitted: deque[Submission] = deque()
        self._duplicates: list[Submission] = []
        self._waiters: list[tuple[int, Callable[[PortalMQError | None], None]]] = []
        self._saved_ms = self.world.now
        self.sent_end = 0  # where followers were sent records to
        self.host = GroupHost(self) if options.groups is not None else None
        self._every(options.tick_ms, self._tick)

    # --- one event, its actions --------------------------------------------------------------------------------------

    def tell(self, event: Event, batches: list[Batch] | None = None) -> None:
        if not self.closed:
            self._events.append((event, batches or []))
            self._pump()

    def tell_if_current(self, event: Event) -> None:
        self.isr_changing = False
        self.tell(event)

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while not self.closed:
                if self._actions and not self._stalled:
                    self._perform(self._actions.popleft())
                elif self._events and not (self._stalled and self.world.options.one_event_at_a_time):
                    self._step(*self._events.popleft())
                else:
                    break
        finally:
            self._pumping = False

    def _step(self, event: Event, batches: list[Batch]) -> None:
        actions = self.replica.step(event, self.world.now, self.node.wall_ms)
        for action in actions:
            if isinstance(action, Replicate):
                self._to_replicate.append(batches)
            elif isinstance(action, Append) and isinstance(action.token, Submission) and action.token.is_state:
                action.token.fold = tuple(self.replica.producers.snapshot())
        self._actions += actions
        if self.world.tracing and (actions or is_worth_tracing(event)):
            self.world.note(self.node.id, "{}", line_of(event, actions))
        self.world.checker.stepped(self, event, actions)

    def _perform(self, action: Action) -> None:
        match action:
            case Append():
                self._append(action)
            case ReplyFetch():
                self.fetches.reply(action)
            case SendFetch():
                self.world.checker.acts(self, action.fetch.leader_epoch)
                self.fetches.ask(action)
            case Replicate():
                batches = self._to_replicate.popleft()
                self._enqueue([(batch, None) for batch in batches])
            case HighWatermarkAdvanced():
                self._on_high_watermark(action.high_watermark)
            case Refuse():
                self._finish(_submission(action.token), action.error)
            case AnswerDuplicate():
                self._answer_duplicate(_submission(action.token), action.base_offset)
            case RememberEpoch():
                self._stalled = True
                self.soon(self._fsync_ms(), self._remembered, action.leader_epoch)
            case ProposeIsr():
                self.isr_changing = True
                self.node.membership.change_isr(self, action)
            case Refresh():
                self.node.membership.reread(self, action.number)
            case StepDown():
                self._on_step_down(action.leader)
            case Truncate():
                self._begin_reshape(lambda: self._truncate(action.to_offset), self._truncated)
            case ResetLog():
                self._begin_reshape(lambda: self._reset(action), lambda: self._was_reset(action))
            case Quarantine():
                self.world.checker.quarantined(self, action.reason)

    def soon(self, delay_ms: int, act: Callable[..., None], *content: Any) -> None:
        self.node.soon(delay_ms, self._if_open, act, *content)

    def _if_open(self, act: Callable[..., None], *content: Any) -> None:
        if not self.closed:
            act(*content)

    def _every(self, period_ms: int, act: Callable[[], None]) -> None:
        def again() -> None:
            self.soon(period_ms, again)
            act()

        self.soon(self.world.random.randint(1, period_ms), again)

    def _fsync_ms(self) -> int:
        return self.world.random.randint(0, self.world.options.fsync_ms) + self.disk.slow_ms

    def _remembered(self, epoch: int) -> None:
        self.disk.highest_epoch = max(self.disk.highest_epoch, epoch)
        self._stalled = False
        self._pump()

    # --- the log -----------------------------------------------------------------------------------------------------

    def _append(self, action: Append) -> None:
        submission = action.token if isinstance(action.token, Submission) else None
        head = BatchHead(
            action.base_offset,
            submission.count if submission else 1,
            action.leader_epoch,
            action.appended_at_ms,
            is_epoch_start=submission is None,
            stamp=submission.stamp if submission else None,
            producers=submission.fold if submission else None,
        )
        if submission is not None:
            submission.base = action.base_offset
        batch = Batch(head, submission.uid if submission else self.world.next_uid(), self._tail)
        if submission is not None:
            batch.log_start = submission.log_start
        if self.host is not None and submission is not None:
            batch.mail, batch.control = submission.mail, submission.control
            if submission.is_state:
                batch.state, batch.log_start = self.host.state(batch.base)
            self.host.fold(batch)
        self.world.checker.writes(self, batch)
        self._enqueue([(batch, submission)])
        if self.world.options.sends_ahead:
            self.fetches.wake()

    def _enqueue(self, batches: list[tuple[Batch, Submission | None]]) -> None:
        self._tail = batches[-1][0].uid
        self._queue += batches
        self._write()

    def _write(self) -> None:
        if not self._writing and self._queue:
            self._writing, self._queue = self._queue, []
            self.soon(self._fsync_ms(), self._written)

    @property
    def sendable_end(self) -> int:
        """The end of the records that followers may get now."""
        return self.replica.sendable_end if self.world.options.sends_ahead else self.disk.end

    def ahead_from(self, offset: int) -> list[Batch]:
        """Return the batches from `offset` on that are not on this disk yet, and may be sent all the same."""
        on_their_way = [batch for batch, _ in self._writing + self._queue]
        return [batch for batch in on_their_way if offset <= batch.base and batch.end <= self.sendable_end]

    def _written(self) -> None:
        if self.disk.full:
            self._refused()
            return
        taken, self._writing = self._writing, []
        batches = [batch for batch, _ in taken]
        self.world.checker.appends(self, batches)
        self.disk.append(batches)
        if self.host is not None:
            self.host.written(batches)
        submissions = [submission for _, submission in taken if submission is not None]
        self._uncommitted += [submission for submission in submissions if not submission.done]
        self.tell(Appended(self.disk.end))
        for submission in submissions:
            if submission.acks == "leader":
                self._finish(submission)
        self.fetches.wake()
        self._write()

    def _refused(self) -> None:
        """The disk is full: neither the transaction nor offsets allotted after it are in the log."""
        self.world.count("disk refused")
        self.world.note(self.node.id, "has no room on its disk")
        dropped = [submission for _, submission in self._writing + self._queue]
        dropped += [action.token for action in self._actions if isinstance(action, Append)]
        for action in self._actions:
            if isinstance(action, AnswerDuplicate):  # behind an epoch that is not on disk yet
                self._answer_duplicate(_submission(action.token), action.base_offset)
        self._writing, self._queue = [], []
        sent_end, self.sent_end = self.sent_end, 0
        full, unknown = StorageFull("full"), StorageFull("full", outcome="unknown")
        if self.world.chance(0.5):
            if self.host is not None:
                self.host.rebuild()
            self._actions = deque(a for a in self._actions if not isinstance(a, Append | Replicate | AnswerDuplicate))
            self._to_replicate.clear()
            self._tail = self.disk.batches[-1].uid if self.disk.batches else (-1 if self.disk.start else 0)
            # Ahead of other waiting events: one stepped first would be allotted an offset after records that are not
            # there.
            waiting = [(event, batches) for event, batches in self._events if not isinstance(event, Appended)]
            self._events = deque([(Truncated(self.disk.end, self.disk.producers(), sent_end), []), *waiting])
            self._pump()
        else:
            self._close()
            self.node.reopen(min(self.replica.high_watermark, self.disk.end))
        for submission in [*dropped, *self._duplicates]:
            if isinstance(submission, Submission):
                self._finish(submission, unknown if 0 <= submission.base < sent_end else full)
        self._duplicates.clear()
        self._fail_waiters(full)

    def _begin_reshape(self, change: Callable[[], None], tell: Callable[[], None]) -> None:
        assert not self._queue, "a log is cut only when all appends are on disk"
        assert not self._writing
        self._reshape = change
        self.soon(self._fsync_ms(), self._reshaped, tell)

    def _reshaped(self, tell: Callable[[], None]) -> None:
        assert self._reshape is not None
        self._reshape()
        self._reshape = None
        tell()

    def _truncate(self, to_offset: int) -> None:
        self.world.count("truncated")
        self.disk.truncate(to_offset)
        self._tail = self.disk.batches[-1].uid if self.disk.batches else (-1 if self.disk.start else 0)
        self._shrank()

    def _truncated(self) -> None:
        self.tell(Truncated(self.disk.end, self.disk.producers()))

    def _reset(self, action: ResetLog) -> None:
        self.world.count("reset")
        self.disk.reset(action.offset, [entry for entry in action.epochs if entry[1] < action.offset])
        self._tail = -1
        self._shrank()

    def _shrank(self) -> None:
        if self.host is not None:
            self.host.rebuild()
        self.world.checker.shrank(self.node)

    def _was_reset(self, action: ResetLog) -> None:
        self.tell(LogReset(action.offset, action.epochs, self.disk.producers()))

    # --- produce -----------------------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        is_control = submission.is_state or submission.control is not None
        self.tell(
            AppendRequested(
                submission,
                submission.count,
                submission.stamp,
                is_control,
                submission.not_before_ms,
                submission.delivers,
            )
        )

    def _finish(self, submission: Submission, error: PortalMQError | None = None) -> None:
        if submission.done:
            return
        submission.done = True
        if submission.is_state:
            return
        self.world.checker.answered(self, submission, error)
        if submission.then is not None:
            submission.then(error)
        if submission.answer is not None:
            self.world.network.send(self.node.id, CLIENTS, submission.answer, submission.base, error)

    def _answer_duplicate(self, submission: Submission, base: int) -> None:
        submission.base = base
        submission.repeats = True
        self.world.count("duplicate")
        if submission.end <= self.replica.high_watermark:
            self._finish(submission)
        else:
            self._duplicates.append(submission)

    def _on_high_watermark(self, high_watermark: int) -> None:
        while self._uncommitted and self._uncommitted[0].end <= high_watermark:
            self._finish(self._uncommitted.popleft())
        for submission in self._duplicates:
            if submission.end <= high_watermark:
                self._finish(submission)
        self._duplicates = [submission for submission in self._duplicates if not submission.done]
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for end, then in waiters:
                self.wait_for(end, then)
        self.fetches.high_watermark_moved()
        if self.host is not None:
            self.host.committed(high_watermark)

    def _on_step_down(self, leader: int | None) -> None:
        """Return batches, including those being written: others may take their offsets later."""
        self.fetches.end()
        unknown = NotLeader("moved", leader=leader, outcome="unknown")
        on_their_way = [submission for _, submission in self._writing + self._queue if submission is not None]
        for submission in [*self._uncommitted, *on_their_way, *self._duplicates]:
            self._finish(submission, unknown)
        self._uncommitted.clear()
        self._duplicates.clear()
        self._fail_waiters(unknown)

    # --- groups ------------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Return whether an action requested now would wait."""
        return bool(self._pumping or self._stalled or self._actions or self._events)

    def request(self, name: str, content: tuple[Any, ...], answer: Callable[[Any], None]) -> None:
        """A client of a group asks."""
        assert self.host is not None
        self.host.request(name, content, answer)

    def arrived(self, id: tuple[int, ...]) -> None:
        """An output of the outbox arrived at its destination."""
        assert self.host is not None
        self.host.outbox.arrived(id)

    def wait_for(self, end: int, then: Callable[[PortalMQError | None], None]) -> None:
        """Call `then` when everything below `end` is committed, or its outcome unknown."""
        if end <= self.replica.high_watermark:
            then(None)
        else:
            self._waiters.append((end, then))

    def _fail_waiters(self, error: PortalMQError) -> None:
        waiters, self._waiters = self._waiters, []
        for _, then in waiters:
            then(error)

    def fetch(self, fetch: Fetch, sent_after_ms: int = NEVER_MS, poll: Poll | None = None) -> None:
        """A follower fetches, `sent_after_ms` after this broker's last answer to it."""
        self.tell(FetchReceived(fetch, fetch, sent_after_ms, poll))

    def poll(self, request: PollRequest) -> None:
        """A follower's broker polls."""
        self.fetches.polled(request)

    def poll_answered(self, leader: int, answered_ms: int) -> None:
        """A leader has answered a poll with nothing, at `answered_ms` of its clock."""
        self.fetches.poll_answered(leader, answered_ms)
        self.tell(LeaderAnswered(self.world.now))

    def replied(self, answer: FetchReplied, batches: list[Batch], answered_ms: int) -> None:
        """A leader has answered, at `answered_ms` of its clock."""
        self.fetches.heard(answer.fetch, answered_ms)
        self.tell(LeaderAnswered(self.world.now))
        self.tell(answer, batches)

    # --- time --------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = self.world.now
        self.tell(Tick())
        if self.replica.in_sync is not None:
            for member in self.replica.in_sync.overdue(now):
                is_open = self.world.network.is_open(self.node.id, member)
                if (is_open and not self.world.nodes[member].alive) or self.world.refuses(member):
                    self.tell(FollowerRefused(member))
        self.fetches.tick()
        if self.host is not None:
            self.host.tick()
        if now - self._saved_ms >= SAVE_MS:
            self._saved_ms = now
            self.disk.saved_high_watermark = min(self.replica.high_watermark, self.disk.end)

    def retain(self) -> None:
        """A leader that serves states in the log how far it may be dropped; the fold of another one is not whole yet.
        Every replica drops the part that a committed STATE record allows, and nothing else."""
        upto = self.disk.start
        if self.replica.leading:
            upto = self.world.random.randint(upto, max(upto, self.replica.high_watermark))
        if self.replica.leading and (self.host is None or self.host.serves()):
            if self.host is not None:
                self.host.purge(upto)
            index = self.disk.index_from(upto + 1) - 1
            log_start = self.disk.batches[index].base if index >= 0 else self.disk.start
            self.submit(Submission(self.world.next_uid(), 1, is_state=True, log_start=log_start))
        upto = self.droppable()
        if self._reshape is None and upto > self.disk.start:
            self.world.checker.drops(self, upto)
            self.disk.drop_below(upto)
            if self.host is not None:
                self.host.lanes.drop_below(upto)
            self.replica.log_start_offset = self.disk.start
            self.world.count("retained")
            self.world.note(self.node.id, "drops all below {}", self.disk.start)

    def droppable(self) -> int:
        """Return the log start stated by the committed log, as far as this replica knows it."""
        committed = (batch for batch in self.disk.batches if batch.end <= self.replica.high_watermark)
        return max((batch.log_start for batch in committed), default=0)

    # --- the end -----------------------------------------------------------------------------------------------------

    def damaged(self) -> None:
        """A batch does not match its CRC. It is never served: the replica starts from nothing, unless it is the last
        copy."""
        if not self.world.may_lose(self.node):
            self.disk.flipped.clear()
            return
        self._close()
        self._unknown_to_all()
        self.node.damaged_at_rest()
        self.node.reopen(0)

    def _close(self) -> None:
        self.closed = True

    def _unknown_to_all(self) -> None:
        self.closed = True
        self._on_step_down(None)

    def crash(self, *, cleanly: bool) -> None:
        """Keep the synced data, and any prefix of the data being written."""
        if self._writing:
            survivors = [batch for batch, _ in self._writing][: self.world.random.randint(0, len(self._writing))]
            if survivors:
                self.world.count("unsynced survived")
                self.world.checker.appends(self, survivors)
                self.disk.append(survivors)
        elif self._reshape is not None and self.world.chance(0.5):
            self._reshape()
        if cleanly:
            self.disk.saved_high_watermark = min(self.replica.high_watermark, self.disk.end)
        self.closed = True

    def read(self, offset: int) -> list[Batch] | None:
        """Return the batches for a consumer from `offset` on; None if this broker does not serve."""
        if self.closed or not self.replica.may_serve(self.world.now):
            return None
        first = self.disk.index_from(offset)
        return [batch for batch in self.disk.batches[first : first + 20] if batch.end <= self.replica.high_watermark]


def _submission(token: object) -> Submission:
    assert isinstance(token, Submission)
    return token
