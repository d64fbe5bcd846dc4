"""The producer: `send()` puts a message into a batch and returns; sender threads send batches to their leaders.

    send() --> Lane.open --full, lingered or hurried--> Lane.queue --> a sender --BatchSender--> leader --> futures

One sender at a time has a lane (a partition), which keeps its order; portalmq.producers.batch_sender makes it
exactly-once. A thread that waits in `result()`, or in `flush()` for one batch, sends it itself if the lane is free, and
no other thread wakes: the sender that keeps the time sleeps until an alarm that send() sets, and that thread clears.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from portalmq import wire
from portalmq.closeable import Closeable, close_at_exit
from portalmq.compression import HAS_ZSTD, NEEDS_ZSTD, ZSTD
from portalmq.errors import Backpressure, MessageTooLarge, Unavailable
from portalmq.network.forking import reset_in_children
from portalmq.network.tls import TlsFiles
from portalmq.producers.batch_sender import BatchSender
from portalmq.producers.batching import Lane, ProducerBatch, SendFuture
from portalmq.producers.outgoing import MESSAGE_OVERHEAD_BYTES, PlainMessage, pack
from portalmq.producers.partitions import ProducerTopic, ProducerTopics
from portalmq.producers.senders import SenderThreads
from portalmq.transport.transport import Bootstrap, Transport

_log = logging.getLogger("portalmq.producer")

BATCH_BYTES_MAX = wire.BODY_BYTES_MAX - 64 * 1024
# How long a message that need not linger is left to the thread that sent it, if that awaited the one before.
AWAITED_LINGER_S = 0.002
# Between awaited messages that follow each other sooner, the alarm stays set: one that rings for nothing costs less.
RAPID_S = 0.0002
# With a shorter timeout a waiting thread does not send itself: the time might end during a request.
SEND_SELF_TIMEOUT_S_MIN = 1.0
SENT_BEFORE_FORK = "the message was sent before this process was forked: only the parent learns its outcome"


class Producer(Closeable):
    """Sends messages to topics. Thread-safe; use one for a process, and close it (or use `with`).

    A message is appended exactly once, even after retries, unless `idempotent=False`. `acks` says when a message counts
    as sent: "all" (on disk on every in-sync replica), "leader" (on the leader's disk), "none" (not awaited, offset -1).
    A thread that waits for a message sends it at once. The message after it may linger for 2 ms, even if `linger_ms` is
    less, as it is probably waited for, too.
    The child of a fork sends as a producer of its own, and messages buffered before the fork stay the parent's. With a
    `producer_name` the child fences its parent when it sends.
    """

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        acks: wire.Acks = "all",
        linger_ms: float = 5,
        batch_messages: int = 1000,
        batch_bytes: int = 1_000_000,
        idempotent: bool = True,
        producer_name: str | None = None,
        compression: Literal["zstd"] | None = None,
        delivery_timeout_s: float = 120,
        token: str | None = None,
        max_block_s: float = 60,
        buffer_messages: int = 100_000,
        buffer_bytes: int = 64 * 1024 * 1024,
        transport: Transport | None = None,
        tls_ca: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
        allow_advertised: bool | None = None,
    ) -> None:
        """`linger_ms`: how long a message waits for others, unless the batch reaches `batch_messages` or `batch_bytes`
        first. While a partition has a request in flight, its next batch grows up to `batch_bytes`.
        `compression="zstd"`: the values of a batch are sent, replicated and stored compressed where that saves a tenth;
        every consumer gets them plain.
        `delivery_timeout_s`: how long a message is retried before its future fails. `max_block_s`: how long `send()`
        waits for space in the buffer, or for a broker to return the topic's partitions. `producer_name`: a later
        producer of this name fences this one. `tls_ca`: a file with the authority of the brokers' certificates.
        `tls_client_cert`: a file with the certificate to show to brokers that ask for one. `tls_client_key`: a file
        with its private key, if that is separate. `allow_advertised=False`: over http send the token only to hosts that
        `bootstrap` names, not to others that brokers advertise. `transport`: a connection that is used instead of one
        to `bootstrap`, such as that of `portalmq.testing.InMemoryBroker`; close() closes it."""
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
        self._transport = transport or Transport(
            bootstrap,
            token=token,
            timeout_s=delivery_timeout_s,
            tls=TlsFiles(tls_ca, tls_client_cert, tls_client_key),
            allow_advertised=allow_advertised,
        )
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
        self._begin()
        close_at_exit(self)
        reset_in_children(self)

    def __repr__(self) -> str:
        named = f" {self._producer_name!r}" if self._producer_name else ""
        state = "closed" if self._closed else f"{self._buffered_messages} messages unsent"
        return f"<Producer{named} at {', '.join(self._transport.urls)}: {state}>"

    def _begin(self) -> None:
        """Start with no identity, no threads and an empty buffer."""
        self._batch_sender = BatchSender(
            self._transport,
            self._acks,
            idempotent=self._idempotent,
            producer_name=self._producer_name,
            delivery_timeout_s=self._delivery_timeout_s,
            compresses=self._compresses,
        )
        # It knows its owner: a wait that a signal handler's exception ends cannot release it for another thread.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._topics = ProducerTopics(self._transport, self._acks, self._max_block_s)
        # Invariants, under the lock: a lane is in `_open` while lane.open is a batch; in `_ready`, in `_paused` or with
        # a sender while lane.scheduled; `_unsettled` has every batch that has a message and no outcome.
        self._open: dict[Lane, None] = {}
        self._ready: deque[Lane] = deque()
        self._paused: list[Lane] = []
        self._unsettled: dict[ProducerBatch, None] = {}
        self._buffered_messages = 0
        self._buffered_bytes = 0
        self._senders = SenderThreads(self._lock, self._run_sender)
        # When the latest batch was opened, if a waiting thread has sent it.
        self._awaited_at: float | None = None
        self._flushing = 0

    def _reset_in_child(self) -> None:
        """Start afresh in the child of a fork. Buffered messages are the parent's: their futures fail here, and are
        served there."""
        left = list(self._unsettled)
        self._senders.alarm.close()
        self._begin()
        for batch in left:
            batch.fail_in_child(Unavailable(SENT_BEFORE_FORK, retryable=False, outcome="unknown"))

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        topic: str,
        value: Any,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        partition: int | None = None,
        delay_s: float | None = None,
        deliver_at: datetime | float | None = None,
        ttl_s: float | None = None,
        priority: int = 0,
        content_type: str | None = None,
    ) -> SendFuture:
        """Send `value` (bytes, text, or a JSON value) to `topic`; return at once, with a future of RecordMetadata.

        Messages of one `key` go to one partition and keep their order. `deliver_at` is a datetime with a time zone, or
        Unix seconds; `delay_s` counts from the moment when a broker receives the message, `ttl_s` from when it can be
        delivered. Queue groups receive waiting messages of the greatest `priority` (0 to 31) first. Blocks only while
        the buffer is full. Raises Backpressure if it stays full for `max_block_s`, MessageTooLarge, TypeError for a
        value that JSON cannot encode, ValueError for invalid options, RuntimeError once closed.
        """
        if (
            type(value) is bytes
            and key is None
            and headers is None
            and delay_s is None
            and deliver_at is None
            and ttl_s is None
            and priority == 0
            and content_type is None
        ):
            message: Any = PlainMessage(value)
            size = len(value) + MESSAGE_OVERHEAD_BYTES
        else:
            message, size = pack(value, key, headers, delay_s, deliver_at, ttl_s, priority, content_type)
        if size > BATCH_BYTES_MAX:
            raise MessageTooLarge(f"the message takes {size} bytes, a request at most {BATCH_BYTES_MAX}")
        known = self._topics.get(topic)
        if known is None:
            known = self._look_up(topic)
        lanes = known.lanes
        if partition is not None:
            lane = self._topics.lane(topic, partition)
        elif key is not None:
            lane = lanes[zlib.crc32(key.encode() if isinstance(key, str) else key) % len(lanes)]
        else:
            lane = lanes[known.sticky]
        with self._lock:
            if (
                self._buffered_messages >= self._buffer_messages
                or self._buffered_bytes >= self._buffer_bytes
                or self._closed
            ):
                self._wait_for_room()
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
        return SendFuture(batch, index)

    def has_room_for(self, topic: str, partition: int | None = None) -> bool:
        """Return whether a send() to the topic would return at once: the topic is known, and the buffer is not full."""
        known = self._topics.get(topic)
        return (
            known is not None
            and (partition is None or partition < len(known.lanes))
            and self._buffered_messages < self._buffer_messages
            and self._buffered_bytes < self._buffer_bytes
        )

    def _look_up(self, name: str) -> ProducerTopic:
        if self._closed:
            raise RuntimeError("the producer is closed")
        return self._topics.look_up(name)

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
            self._senders.wake(due if linger_s else 0.0)
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
            self._senders.wake()

    def _close_batch(self, lane: Lane, batch: ProducerBatch) -> None:
        self._topics[lane.topic].move_on_from(lane)
        batch.seal()
        lane.open = None
        del self._open[lane]

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._max_block_s
        while not self._closed and (
            self._buffered_messages >= self._buffer_messages or self._buffered_bytes >= self._buffer_bytes
        ):
            left = deadline - time.monotonic()
            # No batch lingers while a send waits for space.
            self._flushing += 1
            self._senders.wake()
            try:
                has_room = left > 0 and self._room.wait(left)
            finally:
                self._flushing -= 1
            if not has_room and time.monotonic() >= deadline:
                raise Backpressure(
                    f"the producer's buffer stayed full for {self._max_block_s:g} s "
                    f"({self._buffered_messages} messages, {self._buffered_bytes} bytes wait for the broker)",
                    outcome="not_applied",
                )
        if self._closed:
            raise RuntimeError("the producer is closed")

    # --- sender threads ----------------------------------------------------------------------------------------------

    def _run_sender(self) -> None:
        while True:
            with self._lock:
                lane = self._next_lane()
                if lane is None:
                    return
                batch = lane.queue.popleft()
            try:
                # After an error that is not of sending the lane is released below.
                self._release(lane, batch, self._batch_sender.send_batch(lane, batch, None))
            except BaseException as fault:
                self._batch_sender.fail_batch(lane, batch, fault)
                self._release(lane, batch, None)
                if not isinstance(fault, Exception):
                    raise
            # Otherwise its failure would be logged only when the next batch comes (see ProducerBatch.__del__).
            del batch
            self._topics.refresh_if_old(lane.topic)

    def _next_lane(self) -> Lane | None:
        """Wait for a lane with a batch to send; return None at the end. The caller holds the lock."""
        while True:
            due = self._collect_due()
            if self._ready:
                lane = self._ready.popleft()
                if self._ready or due < math.inf:
                    self._senders.wake(0.0 if self._ready else due)
                return lane
            if self._closed and not self._unsettled:
                self._senders.wake_all()
                return None
            self._senders.rest(due)

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

    def _hurry(self, batch: ProducerBatch, timeout: float | None) -> float | None:
        """Send `batch` now, in this thread if its lane is free. Return the rest of `timeout`."""
        lane = batch.lane
        # A request that the timeout or a signal handler's exception cuts off must be repeated.
        may_help = self._idempotent and (timeout is None or timeout >= SEND_SELF_TIMEOUT_S_MIN)
        started = time.monotonic()
        has_lane = False
        try:
            with self._lock:
                if batch.settled or lane.open is not batch:
                    return timeout
                batch.urgent = True
                if lane.scheduled:
                    return timeout
                if not may_help:
                    self._seal(lane, batch)
                    return timeout
                is_rapid = self._awaited_at is not None and batch.born < self._awaited_at + RAPID_S
                if not is_rapid and len(self._open) == 1 and not self._paused:
                    self._senders.unset(batch.due)
                self._awaited_at = batch.born
                self._close_batch(lane, batch)
                lane.scheduled = has_lane = True
            self._release(lane, batch, self._batch_sender.send_batch(lane, batch, timeout))
        except BaseException:
            # A signal handler of the caller has raised it, probably: a sender goes on with the batch.
            if has_lane:
                batch.unknown = batch.unknown or batch.body is not None
                self._release(lane, batch, 0.0)
            raise
        return None if timeout is None else max(0.0, timeout - (time.monotonic() - started))

    def _release(self, lane: Lane, batch: ProducerBatch, pause_s: float | None) -> None:
        """Release the lane for the next sender, after a try to send the batch that returned `pause_s`."""
        if pause_s is None:
            batch.settle()
        with self._lock:
            if batch not in self._unsettled:
                return  # this process was forked while the batch was in flight, and it is the parent's
            if pause_s is not None:
                lane.queue.appendleft(batch)
                lane.retry_at = time.monotonic() + pause_s
                self._paused.append(lane)
                self._senders.wake()
                return
            if self._flushing:
                self._room.notify_all()  # they look when this thread releases the lock
            # From here until the lane is free there is no call: no signal handler's exception comes between.
            self._buffered_messages -= batch.count
            self._buffered_bytes -= batch.size
            del self._unsettled[batch]
            if lane.queue:
                self._ready.append(lane)
                self._senders.wake()
                return
            lane.scheduled = False
            follower = lane.open
            if follower is not None and (
                len(follower.messages) >= self._batch_messages or follower.urgent or self._flushing or self._closed
            ):
                self._seal(lane, follower)
            elif follower is not None:
                self._senders.wake(follower.due)
            elif self._closed:
                self._senders.wake()

    # --- the end -----------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every message sent so far has its outcome; the futures say which.

        Raises TimeoutError after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            mine = set(self._unsettled)
            alone = next(iter(self._open)).open if len(self._open) == 1 else None
        if alone is not None:
            self._hurry(alone, timeout)  # one batch needs no other thread
        with self._lock:
            self._flushing += 1
            if mine & self._unsettled.keys():
                self._senders.wake()
            try:
                while mine := mine & self._unsettled.keys():
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise TimeoutError(f"{sum(len(batch.messages) for batch in mine)} messages are still unsent")
                    self._room.wait(left)
            finally:
                self._flushing -= 1

    def close(self, timeout: float | None = None) -> None:
        """Flush and stop. Messages unsent after `timeout` seconds (default: the delivery timeout) fail."""
        with self._lock:
            if self._closed:
                return
        try:
            self.flush(self._delivery_timeout_s if timeout is None else timeout)
        except TimeoutError as late:
            _log.error("closed with messages unsent: %s", late)
        finally:
            with self._lock:
                self._closed = True
                for batch in self._unsettled:
                    batch.deadline = 0.0
                for lane in self._paused:
                    lane.retry_at = 0.0
                self._room.notify_all()
                self._senders.wake_all()
                if self._unsettled:
                    self._senders.wake()
            self._transport.close()
            if self._senders.end() and not self._unsettled:
                self._senders.alarm.close()
