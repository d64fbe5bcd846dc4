"""A member of a stream group: it stays in the group, reads the partitions assigned to it, and commits.

    member      join -> heartbeat, commit, heartbeat, ...        adopts the coordinator's assignments
    fetchers    see fetch_buffer.py
    user        next_message, poll: asking for more finishes what was handed out before
    both        commits, see commits.py

Each is a thread, or a task of one event loop (network/either.py).

The generation of a heartbeat says which partitions this member has released. So it adopts a new assignment only when
the partitions that it loses are finished: nothing more is handed out, messages in hand are awaited (for a while),
finished ones are committed, and the next heartbeat reports it. Reading of the other partitions continues during that
time.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.consumers.commit import Output
from portalmq.consumers.subscription import Subscription
from portalmq.errors import (
    Fenced,
    GroupNotFound,
    IllegalGeneration,
    OffsetOutOfRange,
    PortalMQError,
    Unavailable,
)
from portalmq.message import Message
from portalmq.network.either import THREADS, Waits, settled
from portalmq.streams.commits import OffsetCommitter
from portalmq.streams.fetch_buffer import DecodedBatch, FetchBuffer, FetchCalls, PartitionBuffer, TopicPartition
from portalmq.streams.group_calls import CLOSE_WITHIN_S, CoordinatorCalls, GroupCalls
from portalmq.transport.calls import CALL_TIMEOUT_S
from portalmq.transport.reachability import FIRST_CONTACT_S, SILENT_S_MAX
from portalmq.transport.retries import may_repeat

_log = logging.getLogger("portalmq.consumer")

COMMIT_EVERY_S = 1.0
# How long a revoked partition is held for the message in hand.
RELEASE_WITHIN_S = 5.0
RELEASE_POLL_S = 0.05
AGAIN_S = 0.3
# While no coordinator is reachable, no other member gets these partitions, and a new coordinator allows one session
# more. So the member continues for a while; after this time it is more likely that the member itself is disconnected.
SESSIONS_WITHOUT_ANSWER = 3
WAIT_S = 1.0


class StreamMember:
    """One consumer's membership of a stream group. `reading` fetches, `settle_transport` joins, heartbeats and
    commits."""

    def __init__(
        self,
        reading: FetchCalls,
        settle_transport: CoordinatorCalls,
        subscription: Subscription,
        waits: Waits = THREADS,
    ) -> None:
        self.member_id = subscription.member_id or f"python-{uuid.uuid4().hex}"
        self.buffers = FetchBuffer(reading, lambda: time.time_ns() // 1_000_000, waits=waits)
        self._is_static = subscription.member_id is not None
        self._reading = reading
        self._settle_transport = settle_transport
        self._group = subscription.group
        self._delivery = subscription.delivery
        self._auto = not subscription.manual_ack
        self._session_s = subscription.session_timeout_s
        self._lock, self._changed = self.buffers.lock, self.buffers.changed
        self._waits = waits
        # Ends the pause before the member's next step.
        self._turn = waits.condition(self._lock)
        self._is_woken = False
        self._commits = OffsetCommitter(settle_transport, self._group, self.member_id, self.buffers, self._wake, waits)
        self._calls = GroupCalls(settle_transport, subscription, self.member_id)
        self._running: Any = None  # the thread or task
        self._failure: PortalMQError | None = None
        # The error of the member's latest step.
        self._last_error: PortalMQError | None = None
        self._joined = False
        self._left = False
        self._answered_at = 0.0
        self._revoked_at = 0.0
        self._committed_at = 0.0
        # The (since, committed) of partitions that were taken away; the member may get them again.
        self._released_offsets: dict[TopicPartition, tuple[int, int]] = {}
        # Answers of earlier generations are older than the latest seek.
        self._not_before = -1
        # The batch that is handed out now.
        self._batch: DecodedBatch | None = None

    def begin_in_child(self, parent: StreamMember) -> None:
        """Take the place of a member that has forked. Under its permanent id it never joins: every read raises."""
        if self._is_static and parent._running is not None:
            self._failure = IllegalGeneration(
                f"the member {self.member_id!r} is the parent of this process: make a consumer with another member_id"
            )

    def _wake(self) -> None:
        with self._lock:
            self._is_woken = True
            self._turn.notify_all()

    # --- handing out -------------------------------------------------------------------------------------------------

    def next_of_batch(self, consumer: Any) -> Message | None:
        """Return the next message of the batch in progress, if it has one; the one before is finished."""
        with self._lock:
            batch = self._batch
            if batch is not None:
                buffer = batch.buffer
                if not (buffer.revoked or buffer.gone or self._failure):
                    if self._auto:
                        buffer.done = buffer.handed
                    if batch.next < len(batch.records) and buffer.place not in self.buffers.paused:
                        return self._hand_out(batch, consumer)
        return None

    async def next_message(self, timeout_s: float | None, consumer: Any) -> Message | None:
        """Return the next message; the one before is finished. None after `timeout_s`, or once closed."""
        messages = await self._messages(timeout_s, 1, consumer, one=True)
        return messages[0] if messages else None

    def _hand_out(self, batch: DecodedBatch, consumer: Any) -> Message:
        message = batch.hand_out_one(consumer)
        if self._delivery == "at_most_once":
            buffer = batch.buffer
            buffer.done = buffer.committed  # the batch was committed before its first message was handed out
        return message

    async def poll(self, timeout_s: float | None, at_most: int, consumer: Any) -> list[Message]:
        """Return up to `at_most` messages; those of the poll before are finished. Empty after `timeout_s`."""
        if self.buffers.closed:
            raise RuntimeError("the consumer is closed")
        return await self._messages(timeout_s, at_most, consumer, one=False)

    async def _messages(self, timeout_s: float | None, at_most: int, consumer: Any, *, one: bool) -> list[Message]:
        self._start()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._finish_handed()
                while True:
                    if self._failure is not None:
                        raise self._failure
                    if self.buffers.closed:
                        return []
                    batch = self._begun_batch() or self.buffers.take()
                    if batch is not None:
                        break
                    left_s = WAIT_S if deadline is None else deadline - time.monotonic()
                    self._raise_if_silent(is_over=left_s <= 0, ends=one)
                    if left_s <= 0 and not (one and self._must_keep_waiting(left_s)):
                        return []
                    left_s = left_s if left_s > 0 else RELEASE_POLL_S
                    await self._changed.wait(min(left_s, WAIT_S))
                self._batch = batch
            if self._delivery == "at_most_once":
                within_s = None if one or deadline is None else max(WAIT_S, deadline - time.monotonic())
                try:
                    if not await self._commit_before_handing_out(batch, within_s):
                        continue
                except PortalMQError as error:
                    if (
                        within_s is None
                        or not may_repeat(error, True)
                        or not self._settle_transport.reachability.may_report_empty()
                    ):
                        raise
                    return []  # leaders change, and the next poll retries it
            with self._lock:
                if batch.buffer.gone or batch.buffer.revoked:
                    continue
                if one:
                    return [self._hand_out(batch, consumer)]
                return batch.hand_out(at_most, consumer)

    def _raise_if_silent(self, *, is_over: bool, ends: bool) -> None:
        """Raise Unavailable if no broker answers and the caller would wait for ever, or its time `is_over` and an empty
        result would be wrong. `ends`: an empty result ends an iteration, so it must mean that there is nothing."""
        for reach in (self._settle_transport.reachability, self._reading.reachability):
            failure = reach.failure
            if failure is None:
                continue
            gives_up = reach.silent_s > (CALL_TIMEOUT_S if reach.was_reached else FIRST_CONTACT_S)
            if gives_up or (is_over and (reach.is_refused if ends else not reach.may_report_empty())):
                raise Unavailable(failure.detail, **failure.extra)

    def _must_keep_waiting(self, left_s: float) -> bool:
        """Return True if an empty result would be premature, as the group could not be asked. Raises the cause after
        some time."""
        if self._answered_at and self._last_error is None:
            return False
        if left_s < -SILENT_S_MAX:
            raise self._last_error or Unavailable(f"group {self._group!r} could not be joined in time")
        return True

    def _begun_batch(self) -> DecodedBatch | None:
        """Return the batch in progress, if it has messages left."""
        batch = self._batch
        if batch is None or batch.buffer.gone or batch.buffer.revoked or batch.next >= len(batch.records):
            return None
        return None if batch.buffer.place in self.buffers.paused else batch

    def _finish_handed(self) -> None:
        if self._auto and self._delivery != "at_most_once":
            for buffer in self.buffers.by_partition.values():
                buffer.done = buffer.handed
        if self.buffers.by_partition and any(buffer.revoked for buffer in self.buffers.by_partition.values()):
            self._wake()

    async def _commit_before_handing_out(self, batch: DecodedBatch, within_s: float | None) -> bool:
        """Commit a batch before its first message is handed out (at_most_once); return False if it was refused. Raises
        the error that prevents a commit in time."""
        if batch.buffer.committed >= batch.end:
            return True
        with self._lock:
            batch.buffer.done = batch.end
        try:
            await self._commits.commit([batch.buffer], timeout_s=within_s)
        except (IllegalGeneration, OffsetOutOfRange):
            self._wake()
            with self._lock:
                self._batch = None
                await self._changed.wait(RELEASE_POLL_S)  # until a heartbeat reports the partition's new owner
            return False
        return True

    def finished(self, messages: Iterable[Message]) -> None:
        """Mark these messages as done, and all before them in their partitions; committed within a second."""
        with self._lock:
            for message in messages:
                buffer = self.buffers.by_partition.get((message.topic, message.partition))
                if buffer is not None and message.offset < buffer.handed:
                    buffer.done = max(buffer.done, message.offset + 1)

    # --- commits -----------------------------------------------------------------------------------------------------

    async def commit(self) -> None:
        """Commit all that was handed out; durable on return. Raises IllegalGeneration for partitions that were taken
        away."""
        with self._lock:
            for buffer in self.buffers.by_partition.values():
                buffer.done = buffer.handed
        await self.commit_finished()

    async def commit_finished(self) -> None:
        """Commit finished messages, not all that was handed out; durable on return. Raises IllegalGeneration."""
        with self._lock:
            buffers = list(self.buffers.by_partition.values())
        await self._commits.commit(buffers)

    async def commit_with(self, messages: Sequence[Message], outputs: Iterable[Output]) -> wire.Committed:
        """Commit the offset after these messages and publish `outputs`, both or neither. After an error the partition
        is read again from the committed offset: asking for more must not commit input without outputs."""
        return await self._commits.commit_with(messages, outputs)

    # --- seek, pause, resume -----------------------------------------------------------------------------------------

    async def seek(self, topic: str, to: str | dict[str, int], partition: int | None) -> contract.SeekAnswer:
        """Move the group to another position; messages that this member has read ahead are discarded."""
        self._start()
        answer = await self._calls.seek(topic, to, partition)
        with self._lock:
            self.buffers.drop([place for place in self.buffers.by_partition if place[0] == topic])
            self._released_offsets.clear()
            self._batch = None
            self._not_before = answer.generation
        self._wake()
        return answer

    def pause(self, places: Iterable[TopicPartition] | None) -> None:
        with self._lock:
            self.buffers.paused.update(self.buffers.by_partition if places is None else places)

    def resume(self, places: Iterable[TopicPartition] | None) -> None:
        with self._lock:
            self.buffers.paused.difference_update(list(self.buffers.paused) if places is None else list(places))
            self._changed.notify_all()

    def places(self, topic: str | None, partition: int | None) -> list[TopicPartition] | None:
        """Return a partition, or those of the topic that this member has; None for no topic."""
        if topic is None:
            return None
        if partition is not None:
            return [(topic, partition)]
        return [place for place in self.assignment() if place[0] == topic]

    def assignment(self) -> list[TopicPartition]:
        with self._lock:
            return sorted(place for place, buffer in self.buffers.by_partition.items() if not buffer.revoked)

    # --- the member --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._running is None and self._failure is None:
            self._running = self._waits.spawn("portalmq-member", self._run)

    async def _run(self) -> None:
        while not self.buffers.closed:
            pause_s = AGAIN_S
            try:
                pause_s = await self._step()
                self._last_error = None
            except (Fenced, IllegalGeneration, GroupNotFound) as error:
                self._drop_membership(error)
                # Only this member has a generated id, so its late duplicate request caused the fencing.
                if isinstance(error, Fenced) and self._is_static:
                    self._fail(error)
                    return
                pause_s = RELEASE_POLL_S
            except PortalMQError as error:
                if self.buffers.closed:
                    return
                self._last_error = error
                if not error.retryable:
                    self._fail(error)
                    return
                _log.debug("group %s: %s", self._group, error)
                if self._joined and time.monotonic() > self._answered_at + SESSIONS_WITHOUT_ANSWER * self._session_s:
                    self._drop_membership(error)
            except Exception as fault:
                self._fail(Unavailable(f"the consumer's membership failed: {fault!r}", retryable=False))
                raise
            with self._lock:
                await self._turn.wait_for(lambda: self._is_woken, pause_s)
                self._is_woken = False

    async def _step(self) -> float:
        """Join or send a heartbeat, adopt the answer, commit. Return the seconds until the next step."""
        answer = await (self._calls.heartbeat(self._commits.generation) if self._joined else self._join())
        self._answered_at = time.monotonic()
        interval_s = answer.heartbeat_interval_ms / 1000
        adopted = await self._adopt(answer)
        if adopted is None:
            return RELEASE_POLL_S
        if adopted:
            return 0.0  # report the release at once
        return min(interval_s, await self._commit_done())

    async def _join(self) -> contract.MemberAnswer:
        await self._calls.create_group()
        answer = await self._calls.join()
        with self._lock:
            self._joined, is_late = True, self._left
        if is_late:
            # close() came before the answer, and could not leave. Nobody would read what is assigned here.
            if not self._is_static:
                await self._calls.leave()
            raise Unavailable("the consumer is closed", retryable=False)
        _log.info("joined group %s as %s in generation %d", self._group, self.member_id, answer.generation)
        return answer

    async def _adopt(self, answer: contract.MemberAnswer) -> bool | None:
        """Apply this assignment. Return True if partitions were released, None if that has to wait for a message in
        hand; then the old generation stays."""
        if answer.generation < max(self._commits.generation, self._not_before):
            return False  # from a replaced coordinator, or from before a seek
        named = {(each.topic, each.partition): each for each in answer.assignment}
        with self._lock:
            taken_away = [buffer for place, buffer in self.buffers.by_partition.items() if place not in named]
            if taken_away and not any(buffer.revoked for buffer in taken_away):
                self._revoked_at = time.monotonic()
            for buffer in taken_away:
                buffer.revoked = True
            in_hand = any(buffer.handed > buffer.done for buffer in taken_away)
            if in_hand and self._auto and time.monotonic() < self._revoked_at + RELEASE_WITHIN_S:
                return None
        if taken_away:
            await self._commit_revoked(taken_away)
        with self._lock:
            self._released_offsets |= {buffer.place: (buffer.since, buffer.committed) for buffer in taken_away}
            self.buffers.drop([buffer.place for buffer in taken_away])
            self._commits.generation = answer.generation
            added = []
            for place, each in named.items():
                known = self.buffers.by_partition.get(place)
                if known is None or known.since < each.since:
                    since, committed = self._released_offsets.pop(place, (-1, 0))
                    if since == each.since and committed > each.offset:
                        each = contract.AssignedPartition(*place, committed, since)
                    added.append(each)
                else:
                    known.revoked = False
            self.buffers.add(added)
        if taken_away or added:
            _log.info("group %s: generation %d, %d partitions", self._group, answer.generation, len(named))
        return bool(taken_away)

    async def _commit_revoked(self, buffers: Sequence[PartitionBuffer]) -> None:
        try:
            await self._commits.commit(buffers, timeout_s=self._session_s / 2)
        except PortalMQError as error:
            _log.warning("group %s: %s; messages of revoked partitions may be delivered twice", self._group, error)

    async def _commit_done(self) -> float:
        """Commit finished messages once a second. Return the seconds until the next time."""
        now = time.monotonic()
        if now >= self._committed_at + COMMIT_EVERY_S:
            self._committed_at = now
            with self._lock:
                buffers = [buffer for buffer in self.buffers.by_partition.values() if not buffer.revoked]
            try:
                await self._commits.commit(buffers, timeout_s=max(1.0, self._session_s / 4))
            except (IllegalGeneration, OffsetOutOfRange) as error:
                _log.info("group %s: %s", self._group, error)
                return 0.0
            except PortalMQError as error:
                _log.debug("group %s: commits are retried: %s", self._group, error)
        return COMMIT_EVERY_S

    def _drop_membership(self, why: PortalMQError) -> None:
        """Drop all partitions: the group has removed this member, and nothing that it has read counts."""
        if not self.buffers.closed:
            _log.warning("group %s: %s", self._group, why)
        with self._lock:
            self.buffers.drop(list(self.buffers.by_partition))
            self._released_offsets.clear()
            self._batch = None
            self._joined = False
            self._commits.generation = -1

    def _fail(self, error: PortalMQError) -> None:
        with self._lock:
            self._failure = error
            self._changed.notify_all()

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Commit finished messages and leave; a member with a permanent id keeps its partitions for its session."""
        with self._lock:
            if self._left:
                return
            self._left = True
            buffers = list(self.buffers.by_partition.values())
            joined = self._joined
        self.buffers.close()
        await settled(self._reading.close())
        self._wake()
        if joined:
            try:
                await self._commits.commit(buffers, timeout_s=CLOSE_WITHIN_S)
            except PortalMQError as error:
                _log.warning("the last messages could not be committed and will be read again: %s", error)
        if joined and not self._is_static:
            await self._calls.leave()
        self._settle_transport.rest()
