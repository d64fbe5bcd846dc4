"""The follower's half of replication on one partition: it fetches, writes, and truncates what contradicts the leader.

    SendFetch -> fetchers -> leader
              <- frames: checksums verified, heads to the core, one entry for the writer (Replicate)
    Truncate, ResetLog -> on a native thread: the files first, then the fold from the newest snapshot that fits them

Unreadable data from a leader is refused, and fetched again later. So is everything while the disk is full: the replica
falls out of the ISR, and returns by itself when there is room.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import gevent
import msgspec

from portalmq.broker.core.fold import LARGE_BYTES, PartitionFold
from portalmq.broker.core.replica import events as core
from portalmq.broker.partition.fetch_answers import (
    BelowStartAnswer,
    DivergingAnswer,
    PartitionAnswer,
    RecordsAnswer,
    batch_head,
    echo_of,
)
from portalmq.broker.partition.folding import Recovered, StateRecord, recover
from portalmq.broker.partition.host import FollowedPartition, Replica
from portalmq.broker.partition.native import attempt
from portalmq.broker.partition.writer import ReplicatedBatches
from portalmq.broker.storage.batch import BadFrame, BatchFrame, BatchKind, FrameHeader, verified_header
from portalmq.broker.storage.errors import Shortage
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.reading import ReplicaStart
from portalmq.broker.storage.state import StateFile

log = logging.getLogger(__name__)

# How long a follower pauses its fetches after its disk was full, or after an answer that it cannot use.
PAUSE_S = 1.0


class FollowingPartition(Replica, FollowedPartition, Protocol):
    """A partition, as its follower's half sees it."""

    @property
    def messages_next(self) -> int: ...

    def install(self, found: Recovered) -> None: ...


class FollowerReplication:
    """Invariant: `_asked` is the fetch of this partition that the fetchers have; None when they have none."""

    def __init__(self, partition: FollowingPartition) -> None:
        self._partition = partition
        self._asked: core.Fetch | None = None
        self._waiting: core.SendFetch | None = None
        self._pause: gevent.Greenlet | None = None
        self._received = ReplicatedBatches((), (), {})
        self._start = ReplicaStart(0, 0, 0)

    # --- fetching ----------------------------------------------------------------------------------------------------

    def send(self, action: core.SendFetch) -> None:
        if self._pause is not None:
            self._waiting = action
            return
        self._asked = action.fetch
        self._partition.host.fetchers.follow(self._partition, action.leader, action.fetch)

    def settle(self) -> None:
        """Withdraw a fetch that is no longer current, after the core has changed."""
        if self._asked is not None and self._partition.replica.fetch is not self._asked:
            self.leave()

    def leave(self) -> None:
        if self._asked is not None:
            self._asked = None
            self._partition.host.fetchers.unfollow(self._partition)

    def pause(self) -> None:
        """Fetch nothing for a while."""
        if self._pause is None:
            self._pause = gevent.spawn_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.fetch is self._partition.replica.fetch:
            self.send(waiting)

    def close(self) -> None:
        self._asked = None
        self._partition.host.fetchers.unfollow(self._partition)
        if self._pause is not None:
            self._pause.kill(block=False)
            self._pause = None

    # --- answers -----------------------------------------------------------------------------------------------------

    def replied(self, answer: PartitionAnswer) -> None:
        """Take the leader's answer to this replica's fetch, or to an earlier one."""
        fetch = self._asked
        if fetch is None or echo_of(fetch) != answer.echo:
            return
        leader = self._partition.replica.state.leader if self._partition.replica.state else None
        try:
            reply = self._understood(fetch, answer)
        except BadFrame as fault:
            if self._asked is not fetch:
                return
            self._asked = None
            log.error("%s: broker %s sent what cannot be used: %s", self._partition, leader, fault)
            self._partition.host.fetchers.unfollow(self._partition)
            if leader is not None:
                self._waiting = core.SendFetch(leader, fetch)
            self.pause()
            return
        if self._asked is fetch:  # as it was, if there was a pause
            self._asked = None
            self._partition.step(core.FetchReplied(fetch, reply))

    def _understood(self, fetch: core.Fetch, answer: PartitionAnswer) -> core.Reply:
        """Read the answer. Others may run while a large STATE record is loaded. Raises BadFrame."""
        match answer:
            case RecordsAnswer():
                heads = self._checked(fetch, answer.frames)
                pairs = zip(heads, answer.frames, strict=True)
                states = {
                    head.base_offset: self._state(head, frame) for head, frame in pairs if head.kind == BatchKind.STATE
                }
                self._received = ReplicatedBatches(answer.frames, heads, states)
                batches = [batch_head(head, states.get(head.base_offset)) for head in heads]
                return core.Records(tuple(batches), answer.high_watermark)
            case DivergingAnswer():
                return core.Diverging(answer.epoch, answer.end)
            case BelowStartAnswer():
                self._start = ReplicaStart(answer.offset, answer.messages_before, answer.timestamp_before_ms)
                return core.BelowStart(answer.offset, tuple(answer.epochs))
            case _:
                return core.Rejected(answer.leader_epoch)

    def _state(self, head: FrameHeader, frame: BatchFrame) -> StateRecord:
        """Load a STATE record. Raises BadFrame for one that is none."""
        try:
            if len(frame.body) < LARGE_BYTES:
                return StateRecord(frame.body)
            state = attempt(self._partition.host.pool, StateRecord, frame.body)
            if isinstance(state, Exception):
                raise state
            return state
        except msgspec.MsgspecError as error:
            raise BadFrame(f"the STATE record at {head.base_offset} is unreadable: {error}") from error

    def _checked(self, fetch: core.Fetch, frames: Sequence[BatchFrame]) -> list[FrameHeader]:
        """Return the heads of frames with correct checksums that continue this log. Raises BadFrame."""
        partition = self._partition
        offset, messages, at_ms = fetch.fetch_offset, partition.messages_next, partition.log.last_timestamp_ms
        epoch = partition.replica.last_epoch
        heads: list[FrameHeader] = []
        for frame in frames:
            head = verified_header(frame)
            if head.kind == BatchKind.EPOCH_START and epoch < head.leader_epoch <= fetch.leader_epoch:
                epoch = head.leader_epoch
            if (head.base_offset, head.messages_before, head.leader_epoch) != (offset, messages, epoch):
                raise BadFrame(
                    f"a batch at offset {head.base_offset}, after {head.messages_before} messages, of epoch"
                    f" {head.leader_epoch}; the log goes on at {offset}, after {messages}, in epoch {epoch}"
                )
            if head.appended_at_ms < at_ms:
                raise BadFrame(f"the batch at {offset} is of {head.appended_at_ms} ms, before {at_ms} ms")
            offset, messages, at_ms = head.end_offset, messages + head.message_count, head.appended_at_ms
            heads.append(head)
        return heads

    def replicated(self) -> ReplicatedBatches:
        """Return what the last answer brought, for the writer."""
        received, self._received = self._received, ReplicatedBatches((), (), {})
        return received

    # --- truncation --------------------------------------------------------------------------------------------------

    def truncate(self, action: core.Truncate) -> None:
        def done(found: Recovered) -> None:
            self._partition.step(core.Truncated(self._partition.log.end_offset, found.producers))

        log.warning(
            "%s: its log is truncated to %d, from where the leader's differs", self._partition, action.to_offset
        )
        gevent.spawn(self._reshape, _truncated, (action.to_offset, self._partition.high_watermark), done)

    def reset(self, action: core.ResetLog) -> None:
        def done(found: Recovered) -> None:
            self._partition.step(core.LogReset(action.offset, action.epochs, found.producers))

        log.warning("%s: the leader's log begins at %d: this one begins again there", self._partition, action.offset)
        epochs = [entry for entry in action.epochs if entry[1] < action.offset]
        gevent.spawn(self._reshape, _reset, (self._start, epochs), done)

    def _reshape(
        self,
        change: Callable[..., Recovered],
        arguments: tuple[object, ...],
        done: Callable[[Recovered], None],
    ) -> None:
        partition = self._partition
        while not partition.closed:
            found = attempt(partition.host.pool, change, partition.log, partition.state_file, *arguments)
            if not isinstance(found, Shortage):
                break
            gevent.sleep(PAUSE_S)
        if partition.closed:
            return
        if isinstance(found, ValueError):
            partition.report_damage(str(found))
        elif isinstance(found, Exception):
            partition.storage_failed(found)
        else:
            partition.install(found)
            done(found)


def _truncated(files: Log, state_file: StateFile, to_offset: int, high_watermark: int) -> Recovered:
    """Truncate the log at `to_offset` and fold the rest, on a native thread. A batch that contains `to_offset` goes as
    a whole: if the leader had any of it, it would have all."""
    border = files.replica_start(to_offset).offset
    if border < high_watermark <= to_offset:
        raise ValueError(f"the batch at offset {border} cannot be committed up to {high_watermark} alone")
    to_offset = border
    saved = state_file.load()
    if saved is not None and saved[1] > to_offset:  # an unclean election: what was committed no longer is
        state_file.forget()
    if to_offset < files.log_start_offset:
        files.reset(0, 0, 0)
    else:
        files.truncate(to_offset)
    return recover(files, state_file, min(to_offset, high_watermark))


def _reset(files: Log, state_file: StateFile, start: ReplicaStart, epochs: list[tuple[int, int]]) -> Recovered:
    """Begin an empty log at `start`, on a native thread. The epochs below it are in no record that this replica will
    get, so they are on disk before the log is."""
    fold = PartitionFold(applied=start.offset, log_start_offset=start.offset, epochs=epochs)
    state_file.save(fold, start.offset, durable=True)
    files.reset(*start)
    return recover(files, state_file)
