"""Group commit: the queue of records for the disk, and the one transaction at a time that writes them.

    put -> queue -> [checksum, INSERT, COMMIT: one fsync for all that waited] -> on_written

A transaction runs on a native thread; a small one on the event loop while the disk is fast (disk_pace.py), and by the
call that waits for it if nothing else is ready to run. Appends that arrive during a transaction, or in the same turn of
the event loop, go into one together. Records that no call waits for
(a grant) do not start a transaction at once: they wait a few milliseconds for others.

A follower's batches take the same way: one fetch brings one entry of the queue, `ReplicatedBatches`, which is written
in one transaction with the leader's checksums.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.partition.disk_pace import DiskPace
from portalmq.broker.partition.folding import StateRecord
from portalmq.broker.partition.greenlets import KeptGreenlets, Start
from portalmq.broker.partition.native import NativeThreads
from portalmq.broker.storage.batch import BadFrame, Batch, BatchFrame, FrameHeader, batch_of_frame, frame_of
from portalmq.broker.storage.errors import DAMAGE, LogClosed, Shortage, StorageError
from portalmq.broker.storage.log import Log
from portalmq.errors import PortalMQError, Unavailable
from portalmq.wire import Acks

COMMIT_MESSAGES_MAX = 50_000
COMMIT_WAIT_S = 30.0
SOFT_LINGER_S = 0.005
REFUSED_PAUSE_S = 0.1


class NotCommittedYet(Unavailable):
    """The record is on its way, and may be committed later; a repeated call here would only wait as long again."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail, outcome="unknown", retry_after_s=1)


class WriterHost(Protocol):
    """What a writer needs of the broker."""

    pool: NativeThreads
    disk_pace: DiskPace
    greenlets: KeptGreenlets

    def storage_failed(self, fault: BaseException) -> None:
        """Report a fault after which nothing can be promised: the broker ends."""
        ...

    def committed(self, seconds: float) -> None: ...


class Pending:
    """A batch on its way: filled in when it is on disk, or refused. `is_soft`: no call is going to wait for it."""

    __slots__ = (
        "acks",
        "appended_at_ms",
        "base_offset",
        "batch",
        "done",
        "error",
        "frame",
        "is_soft",
        "size_bytes",
        "stamp",
    )

    def __init__(
        self,
        batch: Batch,
        size_bytes: int = 0,
        *,
        stamp: Stamp | None = None,
        acks: Acks = "all",
        is_soft: bool = False,
    ) -> None:
        self.batch = batch
        self.frame: BatchFrame | None = None
        self.size_bytes = size_bytes
        self.stamp = stamp
        self.acks = acks
        self.is_soft = is_soft
        self.base_offset = -1
        self.appended_at_ms = 0
        self.error: PortalMQError | None = None
        self.done = Event()

    @property
    def message_count(self) -> int:
        return self.batch.count

    def finish(self, error: PortalMQError | None = None) -> None:
        """Answer the waiting call. The first answer counts."""
        if not self.done.is_set():
            self.error = error
            self.done.set()

    def wait(self) -> None:
        """Wait until the batch is as safe as its acks ask. Raises its error, or NotCommittedYet after a timeout."""
        if not self.done.is_set() and not self.done.wait(COMMIT_WAIT_S):
            raise NotCommittedYet(f"not committed within {COMMIT_WAIT_S:.0f} s")
        if self.error is not None:  # a copy: many calls may wait for one error, and change its outcome
            raise copy.copy(self.error)


class ReplicatedBatches:
    """Verified batches from the leader; `batches` once they are on disk. `states` are the STATE records among them, by
    their offsets. No call waits for them."""

    __slots__ = ("batches", "frames", "heads", "size_bytes", "states")

    is_soft = False

    def __init__(
        self, frames: Sequence[BatchFrame], heads: Sequence[FrameHeader], states: Mapping[int, StateRecord]
    ) -> None:
        self.frames = frames
        self.heads = heads
        self.states = states
        self.batches: list[Batch] = []
        self.size_bytes = sum([frame.size_bytes for frame in frames])

    @property
    def end_offset(self) -> int:
        return self.heads[-1].end_offset

    @property
    def message_count(self) -> int:
        return sum([head.message_count for head in self.heads])


class TimedCommit(NamedTuple):
    """The seconds that a transaction took, and those of its COMMIT: the disk's part."""

    seconds: float
    commit_s: float


Entry = Pending | ReplicatedBatches
# The queue of each partition that has written nothing yet.
_NOTHING: deque[Entry] = deque(maxlen=0)
Committed = TimedCommit | StorageError | LogClosed | BadFrame


class Writer:
    """The queue of one partition's log. `on_written` gets what a transaction committed; `on_refused` gets what the disk
    had no room for, or unreadable data from a leader, together with all that was queued behind it; `on_unwritable`
    what met a damaged page of the file, and all that comes later.

    Invariant: a greenlet runs, or lingers, exactly while something is queued or being written: not `is_idle`.
    """

    def __init__(
        self,
        host: WriterHost,
        log: Log,
        on_written: Callable[[list[Entry]], None],
        on_refused: Callable[[list[Entry], Exception], None],
        on_unwritable: Callable[[list[Entry], StorageError], None],
    ) -> None:
        self._host = host
        self._log = log
        self._on_written = on_written
        self._on_refused = on_refused
        self._on_unwritable = on_unwritable
        self._damage: StorageError | None = None  # then nothing is written any more
        self._queue = _NOTHING
        self.is_idle = True
        self._lingering: gevent.Greenlet | None = None
        self._start: Start | None = None  # of _run, for the next turn
        # Whether the last transaction had one entry; otherwise others may come in the next turn to share the next.
        self._was_alone = False
        self._idle = Event()
        self._idle.set()
        self.queued_bytes = 0
        # Whether encoded batches are kept for followers.
        self.keeps_frames = False
        self.has_followers = False

    def wait_idle(self) -> None:
        """Wait until everything that was put is written."""
        self._idle.wait(COMMIT_WAIT_S)

    def put(self, pending: Entry) -> None:
        """Queue the entry that follows the previous one in offsets."""
        if self._queue is _NOTHING:
            self._queue = deque()
        self._queue.append(pending)
        self.queued_bytes += pending.size_bytes
        self._idle.clear()
        if self.is_idle:
            self.is_idle = False
            if pending.is_soft:
                self._lingering = gevent.spawn_later(SOFT_LINGER_S, self._run)
            else:
                self._start = self._host.greenlets.run(self._run)
        elif not pending.is_soft:
            self.hurry()

    def hurry(self) -> None:
        """Let records that no call waited for go to the disk now."""
        if self._lingering is not None:
            self._lingering.kill(block=False)
            self._lingering = None
            self._start = self._host.greenlets.run(self._run)

    def write_here(self) -> None:
        """Write what was put in this turn now, in the greenlet that is going to wait for it, if that takes no longer
        than a fast disk, and nothing else is ready to run: greenlets would only be switched."""
        start, loop = self._start, gevent.get_hub().loop
        if start is None or not self._was_alone or self._host.disk_pace.writers or self._damage is not None:
            return
        if loop.pendingcnt or len(loop._callbacks) > 1:
            return
        taken = list(self._queue)
        if not _are_small(taken) or not self._may_hold_the_loop(taken) or not self._host.greenlets.cancel(start):
            return
        self._start = None
        try:
            written = self._committed_at_once(taken)
            if written is not None:
                self._queue.clear()
                self._written(taken, written)
        except Exception as fault:
            self._host.storage_failed(fault)
            raise
        finally:
            if self._queue or (self._log.checkpoint_due and self._damage is None):
                self._start = self._host.greenlets.run(self._run)
            else:
                self._rest()

    def _run(self) -> None:
        self._lingering = self._start = None
        try:
            while self._queue or (self._log.checkpoint_due and self._damage is None):
                if self._damage is not None:
                    self.give_up([], self._damage)
                elif self._queue:
                    self._write(self._next_transaction())
                elif not self._host.pool.apply(_checkpoint, (self._log,)) and not self._queue:
                    break
        except DAMAGE as fault:  # of a checkpoint
            self.give_up([], fault)
        except StorageError as fault:
            self._host.storage_failed(fault)
        except Exception as fault:  # the waiting calls would wait in vain
            self._host.storage_failed(fault)
            raise
        finally:
            self._rest()

    def _rest(self) -> None:
        self.is_idle = True
        self._idle.set()

    def give_up(self, taken: list[Entry], damage: StorageError) -> None:
        """Write nothing more: neither these entries nor what is queued."""
        self._damage = damage
        self._on_unwritable(taken + self.take_back(), damage)

    def take_back(self) -> list[Entry]:
        """Return what is queued, which is not going to be written."""
        taken = list(self._queue)
        self._queue.clear()
        self.queued_bytes -= sum([entry.size_bytes for entry in taken])
        return taken

    def _next_transaction(self) -> list[Entry]:
        taken: list[Entry] = []
        messages = 0
        while self._queue and messages < COMMIT_MESSAGES_MAX:
            entry = self._queue.popleft()
            taken.append(entry)
            messages += entry.message_count
        return taken

    def _write(self, taken: list[Entry]) -> None:
        pace = self._host.disk_pace
        pace.writers += 1
        try:
            written = self._committed(taken)
        finally:
            pace.writers -= 1
        self._written(taken, written)

    def _written(self, taken: list[Entry], written: Committed) -> None:
        self._was_alone = len(taken) == 1
        self.queued_bytes -= sum([entry.size_bytes for entry in taken])
        if isinstance(written, TimedCommit):
            self._host.committed(written.seconds)
            self._on_written(taken)
        elif isinstance(written, Shortage | BadFrame):
            taken += self.take_back()
            self._on_refused(taken, written)
            gevent.sleep(REFUSED_PAUSE_S)  # a leader begins its epoch again at once, and the disk is still full
        elif isinstance(written, DAMAGE):
            self.give_up(taken, written)
        else:
            failed: PortalMQError = Unavailable("the storage failed while this was written", outcome="unknown")
            if isinstance(written, StorageError):
                self._host.storage_failed(written)
            else:
                failed = written
            for entry in taken:
                if isinstance(entry, Pending):
                    entry.finish(failed)

    def _committed(self, taken: list[Entry]) -> Committed:
        """Write the entries, on the event loop if that cannot take long (disk_pace.py), else on a native thread."""
        pace = self._host.disk_pace
        is_small = _are_small(taken)
        if is_small and self._may_hold_the_loop(taken):
            gevent.sleep(0)  # answers that are ready leave before this commit
            if pace.writers == 1:
                at_once = self._committed_at_once(taken)
                if at_once is not None:
                    return at_once
        written = self._host.pool.apply(_commit, (self._log, taken, self.keeps_frames))
        if is_small and isinstance(written, TimedCommit):
            pace.committed(written.commit_s, perf_counter(), on_loop=False)
        assert written is not None
        return written

    def _may_hold_the_loop(self, taken: list[Entry]) -> bool:
        """Return whether the event loop may commit these few entries. A leader with followers needs it meanwhile: they
        write the same batches at this time."""
        leads_others = self.has_followers and isinstance(taken[0], Pending)
        return not leads_others and self._host.disk_pace.is_fast(perf_counter())

    def _committed_at_once(self, taken: list[Entry]) -> Committed | None:
        """Write the entries on the event loop. Return None, with nothing written, if the log needs a native thread."""
        begin = perf_counter()
        written = _commit(self._log, taken, self.keeps_frames, waits=False)
        if isinstance(written, TimedCommit):
            now_s = perf_counter()
            self._host.disk_pace.committed(now_s - begin, now_s, on_loop=True)
        return written


def _are_small(taken: list[Entry]) -> bool:
    size_bytes = messages = 0
    for entry in taken:
        size_bytes += entry.size_bytes
        messages += entry.message_count
    return DiskPace.is_small(size_bytes, messages)


def _checkpoint(log: Log) -> bool:
    """Run a checkpoint on a native thread. Return False if it did not finish: there was no room, or another process
    reads what it has to replace. The next append tries again."""
    try:
        log.checkpoint()
    except (Shortage, LogClosed):
        return False
    return not log.checkpoint_due


def _commit(log: Log, taken: list[Entry], keeps_frames: bool, *, waits: bool = True) -> Committed | None:
    """Write all entries in one transaction: compute checksums of own batches, decode those from a leader. Without
    `waits` return None, with nothing written, if the log needs a native thread.

    Return an error instead of raising it.
    """
    batches: list[Batch] = []
    try:
        for entry in taken:
            if isinstance(entry, ReplicatedBatches):
                entry.batches = [batch_of_frame(*pair) for pair in zip(entry.frames, entry.heads, strict=True)]
                batches += entry.batches
            else:
                frame = entry.frame or frame_of(entry.batch)
                entry.batch = msgspec.structs.replace(entry.batch, crc=frame.crc)
                entry.frame = frame if keeps_frames else None
                batches.append(entry.batch)
        begin = perf_counter()
        if waits:
            log.append(batches)
        elif not log.append_at_once(batches):
            return None
    except (StorageError, LogClosed, BadFrame) as fault:
        return fault
    return TimedCommit(perf_counter() - begin, log.commit_s)
