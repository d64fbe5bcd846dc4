"""Batches, the futures that refer to them, and one lane for each partition.

A batch of 1,000 messages should not cost 1,000 futures with a lock and a condition each. So a `SendFuture` is only
(batch, index) until it is queried; then it becomes a full `concurrent.futures.Future`, by filling in the state that
`Future.__init__` would have created. `result()`, callbacks, `wait` and `asyncio.wrap_future` work on it unchanged, and
a future that is never queried costs two attributes.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from portalmq import wire
from portalmq.errors import PortalMQError
from portalmq.message import RecordMetadata

if TYPE_CHECKING:
    from portalmq.transport.retries import Backoff

_log = logging.getLogger("portalmq.producer")

# The attributes of a concurrent.futures.Future; the first access to one of them creates all.
_FUTURE_STATE = frozenset(vars(Future()))


class SendFuture(Future[RecordMetadata]):
    """The outcome of one message. Cannot be cancelled: the message may already be sent.

    `result()` does not wait for the batch to fill up: it sends the batch at once.
    """

    def __init__(self, batch: ProducerBatch, index: int) -> None:
        # Deliberately without super().__init__(): see the module's docstring.
        self._batch = batch
        self._index = index

    def __getattr__(self, name: str) -> Any:
        if name not in _FUTURE_STATE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._batch.watch(self)
        return self.__dict__[name]

    def done(self) -> bool:
        """Return whether the message has its outcome."""
        return self._batch.settled or super().done()

    def result(self, timeout: float | None = None) -> RecordMetadata:
        """Return the position of the message. Raises its PortalMQError, or TimeoutError after `timeout` seconds."""
        batch = self._batch
        left = timeout if batch.settled else batch.hurry(timeout)
        if batch.settled:
            outcome = batch.outcome(self._index)
            if isinstance(outcome, PortalMQError):
                raise outcome
            return outcome
        return super().result(left)

    def hurry(self) -> None:
        """Have the batch sent now, by another thread."""
        if not self._batch.settled:
            self._batch.hurry(0.0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the PortalMQError of the message, or None. Raises TimeoutError after `timeout` seconds."""
        batch = self._batch
        left = timeout if batch.settled else batch.hurry(timeout)
        if batch.settled:
            outcome = batch.outcome(self._index)
            return outcome if isinstance(outcome, PortalMQError) else None
        return super().exception(left)


class Lane:
    """One partition of one topic: its batches are sent in order, one at a time, stamped with contiguous sequences.

    `open` collects messages, `queue` holds the batches to send next. `scheduled` is true while a sender has the lane,
    the lane waits for one, or it pauses until `retry_at`: so no two threads ever send for one lane. `identity` and
    `next_sequence` are the producer's stamp here; only the thread that sends for the lane changes them.
    """

    def __init__(self, topic: str, partition: int, acks: wire.Acks) -> None:
        self.topic = topic
        self.partition = partition
        self.path = f"{wire.messages_path(topic)}?partition={partition}&acks={acks}"
        self.open: ProducerBatch | None = None
        self.queue: deque[ProducerBatch] = deque()
        self.scheduled = False
        self.retry_at = 0.0
        self.backoff: Backoff | None = None
        self.identity: wire.ProducerIdentity | None = None
        self.next_sequence = 0


class ProducerBatch:
    """Messages of one lane, in order, that are sent together.

    `ranges` is a stack of index ranges to send: at first the whole batch, later halves if a broker refused a message
    (so that one bad message does not fail the others). `unknown` is true if a try of the topmost range ended with an
    unknown outcome; `failure` is the error of the last try. `body` is the request of that range, and `sequence` the
    number that it is stamped with. Each outcome is (start, end, position or error).
    `is_compressed` says that the last body has compressed values, `is_plain` that no more shall have.
    """

    def __init__(
        self,
        lane: Lane,
        born: float,
        due: float,
        deadline: float,
        hurry: Callable[[ProducerBatch, float | None], float | None],
    ) -> None:
        self.lane = lane
        self.born = born
        self.due = due
        self.deadline = deadline
        self.messages: list[Any] = []
        self.size = 0
        self.count = 0
        self.urgent = False
        self.ranges: list[tuple[int, int]] = []
        self.body: bytes | None = None
        self.sequence = 0
        self.is_compressed = False
        self.is_plain = False
        self.failure: PortalMQError | None = None
        self.restamps = 0
        self.unknown = False
        self.settled = False
        self._hurry = hurry
        self._lock = threading.Lock()
        self._watched: list[SendFuture] = []
        self._was_seen = False
        self._outcomes: list[tuple[int, int, wire.ProducedRange | PortalMQError]] = []

    def seal(self) -> None:
        """Close the batch for further messages."""
        self.count = len(self.messages)
        self.ranges = [(0, self.count)]

    def finish_range(self, outcome: wire.ProducedRange | PortalMQError) -> None:
        """Record the outcome of the topmost range. It may be called again if a signal handler's exception ends it."""
        start, end = self.ranges[-1]
        if isinstance(outcome, PortalMQError):
            # Its traceback refers to the frames of the sender, which refer to this batch: a cycle.
            outcome = outcome.with_traceback(None)
        self._outcomes.append((start, end, outcome))
        # Signal handlers run at calls and loops, so not between these.
        self.ranges, self.body, self.unknown = self.ranges[:-1], None, False

    def split_range(self) -> None:
        """Split the topmost range in two halves, the first one on top."""
        start, end = self.ranges.pop()
        middle = (start + end) // 2
        self.ranges += [(middle, end), (start, middle)]
        self.body = None

    def settle(self) -> None:
        """Settle the futures, and run their callbacks in this thread. It may be called again if a signal handler's
        exception ends it."""
        assert not self.ranges
        with self._lock:
            self.settled = True
            self.messages = []
        for future in self._watched:  # from now on watch() adds none
            if not Future.done(future):
                _set_outcome(future, self.outcome(future._index))
        self._watched = []

    def fail_in_child(self, why: PortalMQError) -> None:
        """Fail the futures in the child of a fork, where the batch is not sent; callbacks run in the parent alone."""
        self._lock = threading.Lock()
        if not self.settled:
            self._outcomes = [(0, len(self.messages), why)]
            self.ranges, self.messages, self.settled = [], [], True
        self._was_seen = True
        watched, self._watched = self._watched, []
        for future in watched:
            # Replaced, as a thread that does not exist here may hold its lock.
            real: Future[RecordMetadata] = Future()
            real.set_exception(copy.copy(why))
            future.__dict__.update(vars(real))

    def outcome(self, index: int) -> RecordMetadata | PortalMQError:
        """Return the outcome of the message at `index`. Only after settle()."""
        self._was_seen = True
        for start, end, what in self._outcomes:
            if start <= index < end:
                if isinstance(what, PortalMQError):
                    # A copy each: a shared exception would collect the traceback of every `raise`.
                    return copy.copy(what)
                offset = -1 if what.base_offset < 0 else what.base_offset + index - start
                return RecordMetadata(self.lane.topic, what.partition, offset, what.timestamp_ms, what.topic_id)
        raise AssertionError(f"the batch has no message {index}")

    def hurry(self, timeout: float | None) -> float | None:
        """Have the batch sent now. Return the rest of `timeout`."""
        return self._hurry(self, timeout)

    def watch(self, future: SendFuture) -> None:
        """Turn `future` into a full one, and settle it now or with the batch."""
        with self._lock:
            if "_condition" in future.__dict__:
                return
            real: Future[RecordMetadata] = Future()
            real.set_running_or_notify_cancel()
            if self.settled:
                _set_outcome(real, self.outcome(future._index))
            else:
                self._watched.append(future)
            # One step, so that other threads never see a partial state.
            future.__dict__.update(vars(real))

    def __del__(self) -> None:
        """Log failures that no future was ever asked for."""
        if not self._was_seen:
            for start, end, what in self._outcomes:
                if isinstance(what, PortalMQError):
                    where = f"{self.lane.topic}/{self.lane.partition}"
                    _log.error(
                        "%d messages to %s failed, and their futures were never read: %s", end - start, where, what
                    )


def _set_outcome(future: Future[RecordMetadata], outcome: RecordMetadata | PortalMQError) -> None:
    if isinstance(outcome, PortalMQError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
