"""Group commit: what waits for the disk, and the one transaction at a time that takes it there.

    put -> queue -> [native thread: checksum, INSERT, COMMIT: one fsync for all that waited] -> on_written

Appends that come while a transaction runs go into the next one together. What nobody waits for (a grant) does not start
one at once: it lingers a few milliseconds for company.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

import gevent
from gevent.event import Event
from gevent.threadpool import ThreadPool

from portalmq.broker.core.events import Stamp
from portalmq.broker.storage.batch import Batch, sealed_batch
from portalmq.broker.storage.errors import DiskFull, StorageError
from portalmq.broker.storage.log import Log
from portalmq.errors import PortalMQError, Unavailable
from portalmq.wire import Acks

COMMIT_MESSAGES_MAX = 50_000
COMMIT_WAIT_S = 60.0
SOFT_LINGER_S = 0.005
REFUSED_PAUSE_S = 0.1


class WriterHost(Protocol):
    """What a writer needs of the broker."""

    pool: ThreadPool

    def storage_failed(self, fault: BaseException) -> None:
        """Called for a fault after which nothing can be promised: the broker ends."""
        ...

    def committed(self, seconds: float) -> None: ...


class Pending:
    """A batch on its way: filled in when it is on disk, or refused. `is_soft`: nobody is going to wait for it."""

    __slots__ = ("acks", "appended_at_ms", "base_offset", "batch", "done", "error", "is_soft", "size_bytes", "stamp")

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
        self.size_bytes = size_bytes
        self.stamp = stamp
        self.acks = acks
        self.is_soft = is_soft
        self.base_offset = -1
        self.appended_at_ms = 0
        self.error: PortalMQError | None = None
        self.done = Event()

    def finish(self, error: PortalMQError | None = None) -> None:
        self.error = error
        self.done.set()

    def wait(self) -> None:
        """Until it is as safe as its acks ask. Raises its error, or Unavailable (unknown) when it takes too long."""
        if not self.done.wait(COMMIT_WAIT_S):
            raise Unavailable(f"not committed within {COMMIT_WAIT_S:.0f} s", outcome="unknown", retry_after_s=1)
        if self.error is not None:
            raise self.error


class Writer:
    """The queue of one partition's log. `on_written` gets what a transaction committed, `on_refused` what the disk had
    no room for together with all that waited behind it.

    Invariant: a greenlet runs, or lingers, exactly while something is queued or being written.
    """

    def __init__(
        self,
        host: WriterHost,
        log: Log,
        on_written: Callable[[list[Pending]], None],
        on_refused: Callable[[list[Pending]], None],
    ) -> None:
        self._host = host
        self._log = log
        self._on_written = on_written
        self._on_refused = on_refused
        self._queue: deque[Pending] = deque()
        self._greenlet: gevent.Greenlet | None = None
        self._lingers = False
        self._idle = Event()
        self._idle.set()
        self.queued_bytes = 0

    @property
    def is_idle(self) -> bool:
        return self._greenlet is None

    def wait_idle(self) -> None:
        """Until everything that was put is written."""
        self._idle.wait(COMMIT_WAIT_S)

    def put(self, pending: Pending) -> None:
        """Take a batch whose offsets follow those of the one before."""
        self._queue.append(pending)
        self.queued_bytes += pending.size_bytes
        self._idle.clear()
        if self._greenlet is None:
            self._lingers = pending.is_soft
            self._greenlet = gevent.spawn_later(SOFT_LINGER_S, self._run) if self._lingers else gevent.spawn(self._run)
        elif self._lingers and not pending.is_soft:
            self._greenlet.kill(block=False)
            self._lingers = False
            self._greenlet = gevent.spawn(self._run)

    def _run(self) -> None:
        self._lingers = False
        try:
            while self._queue or self._log.checkpoint_due:
                if self._queue:
                    self._write(self._next_transaction())
                elif not self._host.pool.apply(_checkpoint, (self._log,)):
                    break
        except Exception as fault:  # whatever it is, those who wait would wait in vain
            self._host.storage_failed(fault)
            raise
        finally:
            self._greenlet = None
            self._idle.set()

    def _next_transaction(self) -> list[Pending]:
        taken: list[Pending] = []
        messages = 0
        while self._queue and messages < COMMIT_MESSAGES_MAX:
            pending = self._queue.popleft()
            taken.append(pending)
            messages += pending.batch.count
        return taken

    def _write(self, taken: list[Pending]) -> None:
        written = self._host.pool.apply(_commit, (self._log, [pending.batch for pending in taken]))
        if isinstance(written, DiskFull):
            taken += self._queue
            self._queue.clear()
        self.queued_bytes -= sum([pending.size_bytes for pending in taken])
        if isinstance(written, DiskFull):
            self._on_refused(taken)
            gevent.sleep(REFUSED_PAUSE_S)  # a leader begins its epoch again at once, and the disk is as full as before
        elif isinstance(written, StorageError):
            self._host.storage_failed(written)
            failed = Unavailable("the storage failed while this was written", outcome="unknown")
            for pending in taken:
                pending.finish(failed)
        else:
            batches, seconds = written
            self._host.committed(seconds)
            for pending, batch in zip(taken, batches, strict=True):
                pending.batch = batch
            self._on_written(taken)


def _checkpoint(log: Log) -> bool:
    """On a native thread: whether there was room. If not, the write-ahead log keeps what it has."""
    try:
        log.checkpoint()
    except DiskFull:
        return False
    return True


def _commit(log: Log, batches: list[Batch]) -> tuple[list[Batch], float] | StorageError:
    """On a native thread: checksum the batches and write them in one transaction. Answers them, and the seconds.

    A fault is answered and not raised, as gevent would print it.
    """
    sealed = [sealed_batch(batch) for batch in batches]
    begin = perf_counter()
    try:
        log.append(sealed)
    except StorageError as fault:
        return fault
    return sealed, perf_counter() - begin
