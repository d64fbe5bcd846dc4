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
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from portalmq import wire
from portalmq.closeable import Closeable, close_at_exit
from portalmq.errors import Unavailable
from portalmq.network.either import finish
from portalmq.network.forking import reset_in_children
from portalmq.network.tls import TlsFiles
from portalmq.producers.batch_queue import BATCH_BYTES_MAX, BatchQueue, check_size
from portalmq.producers.batching import Lane, ProducerBatch, SendFuture
from portalmq.producers.outgoing import MESSAGE_OVERHEAD_BYTES, PlainMessage, pack
from portalmq.producers.partitions import ProducerTopic
from portalmq.producers.senders import SenderThreads
from portalmq.transport.transport import Bootstrap, Transport

_log = logging.getLogger("portalmq.producer")

# Between awaited messages that follow each other sooner, the alarm stays set: one that rings for nothing costs less.
RAPID_S = 0.0002
# With a shorter timeout a waiting thread does not send itself: the time might end during a request.
SEND_SELF_TIMEOUT_S_MIN = 1.0
SENT_BEFORE_FORK = "the message was sent before this process was forked: only the parent learns its outcome"


class Producer(Closeable, BatchQueue):
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
        self._configure(
            acks=acks,
            linger_ms=linger_ms,
            batch_messages=batch_messages,
            batch_bytes=batch_bytes,
            idempotent=idempotent,
            producer_name=producer_name,
            compression=compression,
            delivery_timeout_s=delivery_timeout_s,
            max_block_s=max_block_s,
            buffer_messages=buffer_messages,
            buffer_bytes=buffer_bytes,
        )
        self._transport = transport or Transport(
            bootstrap,
            token=token,
            timeout_s=delivery_timeout_s,
            tls=TlsFiles(tls_ca, tls_client_cert, tls_client_key),
            allow_advertised=allow_advertised,
        )
        self._begin()
        close_at_exit(self)
        reset_in_children(self)

    def __repr__(self) -> str:
        return self._shown("Producer", self._transport.urls)

    def _begin(self) -> None:
        """Start with no identity, no threads and an empty buffer."""
        # It knows its owner: a wait that a signal handler's exception ends cannot release it for another thread.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._begin_queue(self._transport)
        self._senders = SenderThreads(self._lock, self._run_sender)
        # When the latest batch was opened, if a waiting thread has sent it.
        self._awaited_at = None

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
            check_size(size)
        known = self._topics.get(topic)
        if known is None:
            known = self._look_up(topic)
        if partition is not None and not known.has(partition):
            lane = finish(self._topics.lane(topic, partition))
        else:
            lane = known.lane_of(partition, key)
        with self._lock:
            if (
                self._buffered_messages >= self._buffer_messages
                or self._buffered_bytes >= self._buffer_bytes
                or self._closed
            ):
                self._wait_for_room()
            batch, index = self._append(known, lane, message, size)
        return SendFuture(batch, index)

    def has_room_for(self, topic: str, partition: int | None = None) -> bool:
        """Return whether a send() to the topic would return at once: the topic is known, and the buffer is not full."""
        known = self._topics.get(topic)
        return known is not None and known.has(partition) and not self._is_full

    def _look_up(self, name: str) -> ProducerTopic:
        if self._closed:
            raise RuntimeError("the producer is closed")
        return finish(self._topics.look_up(name))

    def _wait_for_room(self) -> None:
        deadline = time.monotonic() + self._max_block_s
        while not self._closed and self._is_full:
            left = deadline - time.monotonic()
            # No batch lingers while a send waits for space.
            self._flushing += 1
            self._senders.wake()
            try:
                has_room = left > 0 and self._room.wait(left)
            finally:
                self._flushing -= 1
            if not has_room and time.monotonic() >= deadline:
                raise self._stayed_full()
        if self._closed:
            raise RuntimeError("the producer is closed")

    def _wake(self, at: float = 0.0) -> None:
        self._senders.wake(at)

    def _room_changed(self) -> None:
        self._room.notify_all()  # they look when this thread releases the lock

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
                self._release(lane, batch, finish(self._batch_sender.send_batch(lane, batch, None)))
            except BaseException as fault:
                finish(self._batch_sender.fail_batch(lane, batch, fault))
                self._release(lane, batch, None)
                if not isinstance(fault, Exception):
                    raise
            # Otherwise its failure would be logged only when the next batch comes (see ProducerBatch.__del__).
            del batch
            finish(self._topics.refresh_if_old(lane.topic))

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
            self._release(lane, batch, finish(self._batch_sender.send_batch(lane, batch, timeout)))
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
            self._put_back(lane, batch, pause_s)

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
                self._give_up()
                self._room.notify_all()
                self._senders.wake_all()
                if self._unsettled:
                    self._senders.wake()
            self._transport.close()
            if self._senders.end() and not self._unsettled:
                self._senders.alarm.close()
