"""The batches of one producer: which are open, due, ready to be sent, paused or unsettled.

    append --> Lane.open --full, lingered, urgent--> Lane.queue (ready) --> a sender --> freed, or paused

One sender at a time has a lane (a partition), which keeps its order. This decides and waits for nothing: Producer sends
with threads and calls it under its lock, LoopProducer sends with the tasks of an event loop.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any, Literal

from portalmq import wire
from portalmq.compression import HAS_ZSTD, NEEDS_ZSTD, ZSTD
from portalmq.errors import Backpressure, MessageTooLarge
from portalmq.network.either import THREADS, Waits
from portalmq.producers.batch_sender import BatchSender
from portalmq.producers.batching import Lane, ProducerBatch
from portalmq.producers.partitions import ProducerTopic, ProducerTopics
from portalmq.transport.calls import EitherCalls

BATCH_BYTES_MAX = wire.BODY_BYTES_MAX - 64 * 1024
# How long a message that need not linger is left to the thread that sent it, if that awaited the one before.
AWAITED_LINGER_S = 0.002


class BatchQueue:
    """What producers share. They say what `_wake` does."""

    _awaited_at: float | None = None

    def _configure(
        self,
        *,
        acks: wire.Acks,
        linger_ms: float,
        batch_messages: int,
        batch_bytes: int,
        idempotent: bool,
        producer_name: str | None,
        compression: Literal["zstd"] | None,
        delivery_timeout_s: float,
        max_block_s: float,
        buffer_messages: int,
        buffer_bytes: int,
    ) -> None:
        """Check and keep the arguments of Producer. Raises ValueError, or RuntimeError without zstd."""
        if acks not in ("all", "leader", "none"):
            raise ValueError(f"acks={acks!r}: use 'all', 'leader' or 'none'")
        if compression not in (None, ZSTD):
            raise ValueError(f"compression={compression!r}: use 'zstd' or None")
        if compression is not None and not HAS_ZSTD:
            raise RuntimeError(NEEDS_ZSTD)
        if not 1 <= batch_messages <= wire.BATCH_MESSAGES_MAX:
            raise ValueError(f"batch_messages must be 1 to {wire.BATCH_MESSAGES_MAX}")
        if not 1 <= batch_bytes <= BATCH_BYTES_MAX:
            raise ValueError(f"batch_bytes must be 1 to {BATCH_BYTES_MAX}")
        if linger_ms < 0 or delivery_timeout_s <= 0 or max_block_s < 0 or buffer_messages < 1 or buffer_bytes < 1:
            raise ValueError("times and limits must be positive")
        if producer_name is not None and not idempotent:
            raise ValueError("a producer_name fences by its sequence numbers: it needs idempotent=True")
        self._acks: wire.Acks = acks
        self._producer_name = producer_name
        self._compresses = compression is not None
        self._linger_s = linger_ms / 1000
        self._batch_messages = min(batch_messages, buffer_messages)
        self._batch_bytes = batch_bytes
        self._idempotent = idempotent
        self._delivery_timeout_s = delivery_timeout_s
        self._max_block_s = max_block_s
        self._buffer_messages = buffer_messages
        self._buffer_bytes = buffer_bytes
        self._closed = False

    def _begin_queue(self, transport: EitherCalls, waits: Waits = THREADS) -> None:
        """Start with no identity and an empty buffer."""
        self._batch_sender = BatchSender(
            transport,
            self._acks,
            idempotent=self._idempotent,
            producer_name=self._producer_name,
            delivery_timeout_s=self._delivery_timeout_s,
            compresses=self._compresses,
            waits=waits,
        )
        self._topics = ProducerTopics(transport, self._acks, self._max_block_s, waits)
        # Invariants, under the owner's lock: a lane is in `_open` while lane.open is a batch; in `_ready`, in `_paused`
        # or with a sender while lane.scheduled; `_unsettled` has every batch that has a message and no outcome.
        self._open: dict[Lane, None] = {}
        self._ready: deque[Lane] = deque()
        self._paused: list[Lane] = []
        self._unsettled: dict[ProducerBatch, None] = {}
        self._buffered_messages = 0
        self._buffered_bytes = 0
        self._flushing = 0

    def _wake(self, at: float = 0.0) -> None:
        """Have a sender look for work at this time of time.monotonic(), or now."""
        raise NotImplementedError

    def _room_changed(self) -> None:
        """A batch has its outcome, and someone waits for room or for outcomes."""
        raise NotImplementedError

    def _hurry(self, batch: ProducerBatch, timeout: float | None) -> float | None:
        """Send `batch` now. Return the rest of `timeout`."""
        raise NotImplementedError

    def _shown(self, kind: str, urls: list[str]) -> str:
        """Return the repr of the producer."""
        named = f" {self._producer_name!r}" if self._producer_name else ""
        state = "closed" if self._closed else f"{self._buffered_messages} messages unsent"
        return f"<{kind}{named} at {', '.join(urls)}: {state}>"

    # --- messages come -----------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return self._buffered_messages >= self._buffer_messages or self._buffered_bytes >= self._buffer_bytes

    def _stayed_full(self) -> Backpressure:
        return Backpressure(
            f"the producer's buffer stayed full for {self._max_block_s:g} s "
            f"({self._buffered_messages} messages, {self._buffered_bytes} bytes wait for the broker)",
            outcome="not_applied",
        )

    def _append(self, known: ProducerTopic, lane: Lane, message: Any, size: int) -> tuple[ProducerBatch, int]:
        """Put a message into the lane's batch. Return the batch, and the message's index in it."""
        batch = lane.open
        if batch is not None and batch.size + size > self._batch_bytes:
            self._seal(lane, batch)
            batch = None
        if batch is None:
            batch = self._open_batch(lane)
        messages = batch.messages
        index = len(messages)
        messages.append(message)
        batch.size += size
        self._buffered_messages += 1
        self._buffered_bytes += size
        if index + 1 >= self._batch_messages or batch.size >= self._batch_bytes:
            self._batch_filled(known, lane, batch)
        return batch, index

    def _open_batch(self, lane: Lane) -> ProducerBatch:
        now = time.monotonic()
        linger_s = self._linger_s
        if linger_s < AWAITED_LINGER_S and self._awaited_at is not None:
            linger_s = AWAITED_LINGER_S
        due = now + linger_s
        batch = ProducerBatch(lane, now, due, now + self._delivery_timeout_s, self._hurry)
        lane.open = batch
        self._open[lane] = None
        self._unsettled[batch] = None
        if not lane.scheduled:
            self._wake(due if linger_s else 0.0)
        return batch

    def _batch_filled(self, topic: ProducerTopic, lane: Lane, batch: ProducerBatch) -> None:
        """Send a full batch. While the one before it is in flight it may grow up to the byte limit: under load the
        requests grow, and a broker whose cost is one fsync a request handles two to three times as many messages."""
        if batch.size >= self._batch_bytes or len(batch.messages) >= wire.BATCH_MESSAGES_MAX or not lane.scheduled:
            self._seal(lane, batch)
        else:
            topic.move_on_from(lane)

    def _seal(self, lane: Lane, batch: ProducerBatch) -> None:
        """Close the lane's open batch and queue it."""
        self._close_batch(lane, batch)
        lane.queue.append(batch)
        if not lane.scheduled:
            lane.scheduled = True
            self._ready.append(lane)
            self._wake()

    def _close_batch(self, lane: Lane, batch: ProducerBatch) -> None:
        self._topics[lane.topic].move_on_from(lane)
        batch.seal()
        lane.open = None
        del self._open[lane]

    # --- batches go --------------------------------------------------------------------------------------------------

    def _collect_due(self) -> float:
        """Queue every lane whose pause or linger is over. Return when the next one is due."""
        now = time.monotonic()
        due = math.inf
        for lane in [lane for lane in self._paused if lane.retry_at <= now]:
            self._paused.remove(lane)
            self._ready.append(lane)
        if self._paused:
            due = min(lane.retry_at for lane in self._paused)
        for lane in list(self._open):
            batch = lane.open
            assert batch is not None
            if lane.scheduled:
                continue
            if batch.due <= now or batch.urgent or self._flushing or self._closed:
                self._close_batch(lane, batch)
                lane.queue.append(batch)
                lane.scheduled = True
                self._ready.append(lane)
                self._awaited_at = None
            else:
                due = min(due, batch.due)
        return due

    def _put_back(self, lane: Lane, batch: ProducerBatch, pause_s: float | None) -> None:
        """Free the lane for the next sender, after a try to send the batch that returned `pause_s`."""
        if batch not in self._unsettled:
            return  # this process was forked while the batch was in flight, and it is the parent's
        if pause_s is not None:
            lane.queue.appendleft(batch)
            lane.retry_at = time.monotonic() + pause_s
            self._paused.append(lane)
            self._wake()
            return
        if self._flushing:
            self._room_changed()
        # From here until the lane is free there is no call: no signal handler's exception comes between.
        self._buffered_messages -= batch.count
        self._buffered_bytes -= batch.size
        del self._unsettled[batch]
        if lane.queue:
            self._ready.append(lane)
            self._wake()
            return
        lane.scheduled = False
        follower = lane.open
        if follower is not None and (
            len(follower.messages) >= self._batch_messages or follower.urgent or self._flushing or self._closed
        ):
            self._seal(lane, follower)
        elif follower is not None:
            self._wake(follower.due)
        elif self._closed:
            self._wake()

    def _give_up(self) -> None:
        """Have all that is unsent fail at its next try."""
        self._closed = True
        for batch in self._unsettled:
            batch.deadline = 0.0
        for lane in self._paused:
            lane.retry_at = 0.0


def check_size(size: int) -> None:
    """Raise MessageTooLarge for a message that no request could carry."""
    if size > BATCH_BYTES_MAX:
        raise MessageTooLarge(f"the message takes {size} bytes, a request at most {BATCH_BYTES_MAX}")
