"""The producer in an asyncio event loop: the batches of Producer, sent by tasks instead of threads.

send --> append --> (all coroutines that run now) --> dispatch --a task for each ready lane--> leader --> outcomes
  '--line--'   while the buffer is full, or the topic's partitions are not known
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from portalmq.errors import Backpressure, PortalMQError, Unavailable
from portalmq.message import RecordMetadata
from portalmq.network.forking import reset_in_children
from portalmq.network.loop_waits import LoopWaits, waited
from portalmq.producers.batch_queue import BatchQueue, check_size
from portalmq.producers.batching import Lane, ProducerBatch
from portalmq.producers.outgoing import pack
from portalmq.producers.partitions import ProducerTopic
from portalmq.transport.loop_transport import LoopTransport

_log = logging.getLogger("portalmq.producer")

# Batches in flight at once, each of another partition.
IN_FLIGHT_MAX = 32
END_TIMEOUT_S = 1.0
NOT_SENT = "the send was cancelled before the message was put into a batch: it is not sent"
UNKNOWN = "the send was cancelled, and not its message: its outcome is unknown"
SENT_BEFORE_FORK = "the message was sent before this process was forked: only the parent learns its outcome"

Outcome = asyncio.Future[RecordMetadata]


class _Waiting:
    """A message that waits for a place in a batch. `placed` gives the future of its outcome."""

    def __init__(self, topic: str, partition: int | None, key: str | bytes | None, message: Any, size: int) -> None:
        self.topic = topic
        self.partition = partition
        self.key = key
        self.message = message
        self.size = size
        self.placed: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()


class LoopProducer(BatchQueue):
    """For one event loop."""

    def __init__(self, transport: LoopTransport, **options: Any) -> None:
        """`options` are those of BatchQueue._configure."""
        self._configure(**options)
        self._transport = transport
        self._begin()
        reset_in_children(self)

    def __repr__(self) -> str:
        return self._shown("AsyncProducer", self._transport.urls)

    def _begin(self) -> None:
        waits = LoopWaits()
        self._begin_queue(self._transport, waits)
        self._awaited: dict[ProducerBatch, list[tuple[int, Outcome]]] = {}
        # A send behind a waiting one must wait too, or it would overtake it. One task serves them.
        self._line: deque[_Waiting] = deque()
        self._usher: asyncio.Task[None] | None = None
        self._is_looking_up = False
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_dispatching = False
        self._timer: asyncio.TimerHandle | None = None

    def _reset_in_child(self) -> None:
        """Start afresh in the child of a fork: what is buffered is the parent's."""
        left = list(self._unsettled)
        self._begin()
        for batch in left:
            batch.fail_in_child(Unavailable(SENT_BEFORE_FORK, retryable=False, outcome="unknown"))

    # --- sending -----------------------------------------------------------------------------------------------------

    async def send(
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
    ) -> RecordMetadata:
        """Send a message and wait for its outcome. The arguments and errors are those of Producer.send."""
        message, size = pack(value, key, headers, delay_s, deliver_at, ttl_s, priority, content_type)
        check_size(size)
        self._check_open()
        known = self._topics.get(topic)
        if known is None or self._line or self._is_full or not known.has(partition):
            outcome = await self._wait_in_line(_Waiting(topic, partition, key, message, size))
        else:
            outcome = self._place(known, partition, key, message, size)
        try:
            return await outcome
        except asyncio.CancelledError as cancelled:
            cancelled.add_note(UNKNOWN)
            raise

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the producer is closed")

    def _place(
        self, known: ProducerTopic, partition: int | None, key: str | bytes | None, message: Any, size: int
    ) -> Outcome:
        """Put a message into a batch, which is sent as soon as all coroutines that run now have sent theirs."""
        batch, index = self._append(known, known.lane_of(partition, key), message, size)
        outcome: Outcome = asyncio.get_running_loop().create_future()
        self._awaited.setdefault(batch, []).append((index, outcome))
        batch.urgent = True
        self._wake()
        return outcome

    async def _wait_in_line(self, send: _Waiting) -> Outcome:
        """Have a message placed behind those that wait already, within max_block_s. Raises Backpressure, or the error
        that kept a broker from naming the topic's partitions."""
        self._line.append(send)
        if self._usher is None:
            self._usher = asyncio.create_task(self._serve_line(), name="portalmq-send-line")
        try:
            await asyncio.wait([send.placed], timeout=self._max_block_s)
            is_first = bool(self._line) and self._line[0] is send
            if not send.placed.done() and not (is_first and self._is_looking_up):  # a look-up ends by itself in time
                send.placed.cancel()
                raise (
                    self._stayed_full()
                    if is_first
                    else Backpressure(
                        f"the sends before this one have been waiting for a broker for {self._max_block_s:g} s",
                        outcome="not_applied",
                    )
                )
            return await send.placed
        except asyncio.CancelledError as cancelled:
            is_placed = send.placed.done() and not send.placed.cancelled()
            send.placed.cancel()
            cancelled.add_note(UNKNOWN if is_placed else NOT_SENT)
            raise

    async def _serve_line(self) -> None:
        """Place the messages that wait, in their order."""
        while self._line:
            send = self._line[0]
            try:
                known = await self._known(send.topic, send.partition)
                await self._await_room(send)
                if not send.placed.done():
                    self._check_open()
                    send.placed.set_result(self._place(known, send.partition, send.key, send.message, send.size))
            except Exception as fault:  # noqa: BLE001 - the waiting send raises it
                if not send.placed.done():
                    send.placed.set_exception(fault)
            self._line.popleft()
        self._usher = None

    async def _known(self, topic: str, partition: int | None) -> ProducerTopic:
        known = self._topics.get(topic)
        if known is not None and known.has(partition):
            return known
        self._is_looking_up = True
        try:
            known = known or await self._topics.look_up(topic)
            if partition is not None:
                await self._topics.lane(topic, partition)
        finally:
            self._is_looking_up = False
        return known

    async def _await_room(self, send: _Waiting) -> None:
        self._flushing += 1  # no batch lingers while a send waits for space
        try:
            while self._is_full and not self._closed and not send.placed.done():
                self._room.clear()
                self._wake()
                room = asyncio.create_task(self._room.wait())
                either: list[asyncio.Future[Any]] = [room, send.placed]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                room.cancel()
        finally:
            self._flushing -= 1

    # --- batches go --------------------------------------------------------------------------------------------------

    def _wake(self, at: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        if at:
            due = at - time.monotonic() + loop.time()
            if self._timer is not None and self._timer.when() <= due:
                return
            self._cancel_timer()
            self._timer = loop.call_at(due, self._ring)
        elif not self._is_dispatching:
            self._is_dispatching = True
            loop.call_soon(self._dispatch)

    def _ring(self) -> None:
        self._timer = None
        self._dispatch()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _room_changed(self) -> None:
        self._room.set()

    def _hurry(self, batch: ProducerBatch, timeout: float | None) -> float | None:
        self._wake()
        return timeout

    def _dispatch(self) -> None:
        """Send the batches that are due."""
        self._is_dispatching = False
        due = self._collect_due()
        while self._ready and len(self._tasks) < IN_FLIGHT_MAX:
            lane = self._ready.popleft()
            task = asyncio.get_running_loop().create_task(self._send(lane, lane.queue.popleft()), name="portalmq-send")
            self._tasks.add(task)
            task.add_done_callback(self._sent)
        if due < math.inf:
            self._wake(due)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a sender has failed", exc_info=fault)
        if self._ready or self._closed:
            self._wake()

    async def _send(self, lane: Lane, batch: ProducerBatch) -> None:
        try:
            pause_s = await self._batch_sender.send_batch(lane, batch, None)
        except BaseException as fault:
            await self._batch_sender.fail_batch(lane, batch, fault)
            self._settle(lane, batch)
            if not isinstance(fault, Exception):
                raise
            return
        if pause_s is not None:
            self._put_back(lane, batch, pause_s)
            return
        self._settle(lane, batch)
        await self._topics.refresh_if_old(lane.topic)

    def _settle(self, lane: Lane, batch: ProducerBatch) -> None:
        batch.settle()
        for index, waiter in self._awaited.pop(batch, ()):
            if waiter.done():
                continue  # cancelled
            outcome = batch.outcome(index)
            if isinstance(outcome, PortalMQError):
                waiter.set_exception(outcome)
            else:
                waiter.set_result(outcome)
        self._put_back(lane, batch, None)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def flush(self, timeout: float | None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Wait until every message sent so far has its outcome. Raises TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout

        def left_s() -> float | None:
            return None if deadline is None else deadline - time.monotonic()

        if self._line:  # they came before this flush
            _, left = await asyncio.wait([send.placed for send in self._line], timeout=left_s())
            if left:
                raise TimeoutError(f"{len(left)} messages still wait for a broker")
        mine = set(self._unsettled)
        self._flushing += 1
        try:
            while mine := mine & self._unsettled.keys():
                self._room.clear()
                self._wake()
                if not await waited(self._room.wait(), left_s()):
                    raise TimeoutError(f"{sum(len(batch.messages) for batch in mine)} messages are still unsent")
        finally:
            self._flushing -= 1

    async def close(self, timeout: float | None) -> None:  # noqa: ASYNC109 - the name that Producer has
        """Flush and stop. Messages unsent after `timeout` seconds (default: the delivery timeout) fail."""
        try:
            await self.flush(self._delivery_timeout_s if timeout is None else timeout)
        except TimeoutError as late:
            _log.error("closed with messages unsent: %s", late)
        finally:
            self._give_up()
            self._room.set()
            self._wake()
            await self._transport.close()
            deadline = time.monotonic() + END_TIMEOUT_S
            while (self._tasks or self._unsettled) and time.monotonic() < deadline:
                self._dispatch()
                if self._tasks:
                    await asyncio.wait(self._tasks, timeout=max(0.0, deadline - time.monotonic()))
            self._cancel_timer()
