"""Requests grouped by queue, and the worker threads that send them to the brokers.

    submit --> a lane for each (kind, queue) --> a worker sends all waiting requests of a lane as one call --> replies

One worker at a time serves a lane. Requests that arrive during a call therefore go with the next one, a queue without a
leader occupies one worker and not all, and a receive asks for no more messages than there are waiting consumers. A
message for a known queue needs no lane: the producer has its own batches.

Every request has a deadline. When a call fails, requests past their deadline are refused, and the others are retried.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from portalmq.broker.protocols.zeromq import protocol
from portalmq.broker.protocols.zeromq.protocol import (
    CommandRequest,
    Envelope,
    NextRequest,
    PortRole,
    ReceivedMessage,
    SendRequest,
)
from portalmq.errors import MessageNotFound, PortalMQError, Unavailable
from portalmq.message import RecordMetadata

_log = logging.getLogger("portalmq.zeromq")

WORKERS_MAX = 32
RECEIVE_MAX = 32
DELETE_MAX = 500
# No call begins with less time left than this.
CALL_S_MIN = 0.05


class ClusterClient(Protocol):
    """The calls to the brokers that the dispatcher needs."""

    def has_room_for(self, queue: str) -> bool: ...
    def send(self, queue: str, value: str | bytes, content_type: str | None) -> Future[RecordMetadata]: ...
    def receive(self, queue: str, at_most: int, timeout_s: float) -> list[ReceivedMessage]: ...
    def give_back(self, receipts: list[str]) -> None: ...
    def delete(self, queue: str, partition: int, ids: list[str], timeout_s: float) -> list[bool]: ...
    def command(self, body: bytes, timeout_s: float) -> bytes: ...


@dataclass(slots=True)
class Job:
    """One request: the port it came in by, the envelope of its reply, its deadline (monotonic) and size in bytes.
    `is_unknown`: a call for it may have been carried out, so no later refusal says that it was not."""

    role: PortRole
    envelope: Envelope
    deadline: float
    size: int
    request: SendRequest | NextRequest | CommandRequest
    is_unknown: bool = False


class Reply(NamedTuple):
    """`lease` is (queue, receipt) of a delivered message: if the reply cannot be sent, the message is released."""

    job: Job
    body: bytes
    lease: tuple[str, str] | None = None


_Lane = tuple[str, str, int]
_Item = Job | str  # a request, or the receipt of a message whose reply could not be sent


class RequestDispatcher:
    """`answer` is called once for each job, by any thread. `ports` go into the replies to PRODUCE_MSG and CONSUME.

    Invariant, under the lock: a lane is in `_lanes` while it has items or a worker; it is in `_ready` while it has
    items and no worker.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        answer: Callable[[Reply], None],
        *,
        ports: Callable[[], dict[PortRole, int]],
        clock: Callable[[], float] = time.monotonic,
        workers_max: int = WORKERS_MAX,
    ) -> None:
        self._cluster = cluster
        self._answer = answer
        self._ports = ports
        self._clock = clock
        self._workers_max = workers_max
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._lanes: dict[_Lane, deque[_Item]] = {}
        self._ready: deque[_Lane] = deque()
        self._workers: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    # --- in ----------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Accept a job without waiting."""
        request = job.request
        if isinstance(request, SendRequest):
            if self._cluster.has_room_for(request.queue):
                self._send(job)
            else:
                self._enqueue(("post", request.queue, 0), job)
        elif isinstance(request, NextRequest):
            self._enqueue(("receive", request.queue, 0), job)
        elif request.message_id is not None:
            self._enqueue(("delete", request.queue, protocol.partition_of(request.message_id)), job)
        else:
            self._enqueue(("tell", request.queue, 0), job)

    def give_back(self, queue: str, receipt: str) -> None:
        """Release a message whose reply could not be sent."""
        self._enqueue(("give back", queue, 0), receipt)

    def _enqueue(self, lane: _Lane, item: _Item) -> None:
        with self._lock:
            items = self._lanes.get(lane)
            if items is not None:
                items.append(item)
                return
            self._lanes[lane] = deque([item])
            self._ready.append(lane)
            self._wake()

    def _wake(self) -> None:
        if self._idle:
            # Counted here: a worker that is notified but has not run yet is no longer idle.
            self._idle -= 1
            self._work.notify()
        elif len(self._workers) < self._workers_max:
            worker = threading.Thread(target=self._run, name="portalmq-miniq", daemon=True)
            self._workers.append(worker)
            worker.start()

    # --- workers -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._ready:
                    if self._closed:
                        return
                    self._idle += 1
                    self._work.wait()
                lane = self._ready.popleft()
                items = self._lanes[lane]
                batch = [items.popleft() for _ in range(min(len(items), _BATCH_MAX.get(lane[0], DELETE_MAX)))]
            left = self._serve(lane, batch)
            with self._lock:
                items.extendleft(reversed(left))
                if items:
                    self._ready.append(lane)
                    if len(self._ready) > 1:
                        self._wake()
                else:
                    del self._lanes[lane]

    def _serve(self, lane: _Lane, batch: Sequence[_Item]) -> list[Job]:
        """Serve items of one lane; return the jobs to retry."""
        kind, queue, partition = lane
        receipts = [item for item in batch if isinstance(item, str)]
        jobs = [item for item in batch if isinstance(item, Job)]
        now = self._clock()
        late = [job for job in jobs if job.deadline - now < CALL_S_MIN]
        jobs = [job for job in jobs if job.deadline - now >= CALL_S_MIN]
        for job in late:
            self._refuse(job, Unavailable("the brokers could not be asked in time: ask again", outcome="not_applied"))
        timeout_s = min((job.deadline for job in jobs), default=now) - now
        try:
            if receipts:
                self._cluster.give_back(receipts)
            elif not jobs:
                pass
            elif kind == "post":
                for job in jobs:
                    self._send(job)
            elif kind == "receive":
                self._receive(queue, jobs, timeout_s)
            elif kind == "delete":
                self._delete(queue, partition, jobs, timeout_s)
            else:
                self._command(jobs, timeout_s)
        except PortalMQError as error:
            if receipts:
                _log.info("undelivered messages could not be released, their leases will expire: %s", error)
            return self._still_in_time(error, jobs)
        except Exception as fault:  # noqa: BLE001 - no error ends a worker
            _log.exception("a call for MiniQ failed")
            return self._still_in_time(
                Unavailable(f"the call failed: {fault!r}", retryable=False, outcome="unknown"), jobs
            )
        return []

    def _still_in_time(self, error: PortalMQError, jobs: list[Job]) -> list[Job]:
        """Return the jobs of a failed call that may be retried, and refuse the rest. The call's timeout was that of its
        oldest job, so others may have time left."""
        now, again = self._clock(), []
        for job in jobs:
            job.is_unknown = job.is_unknown or error.outcome == "unknown"
            if error.retryable and job.deadline - now >= CALL_S_MIN and not self._closed:
                again.append(job)
            else:
                self._refuse(job, error)
        return again

    def _refuse(self, job: Job, error: PortalMQError) -> None:
        if job.is_unknown and error.outcome != "unknown":
            error = copy.copy(error)  # other jobs may have it too
            error.outcome = "unknown"
        self._answer(Reply(job, protocol.refusal(error)))

    # --- calls to the brokers ----------------------------------------------------------------------------------------

    def _send(self, job: Job) -> None:
        assert isinstance(job.request, SendRequest)
        try:
            future = self._cluster.send(job.request.queue, job.request.value, job.request.content_type)
        except PortalMQError as error:
            self._refuse(job, error)
            return
        future.add_done_callback(partial(self._sent, job, job.request.queue))

    def _sent(self, job: Job, queue: str, future: Future[RecordMetadata]) -> None:
        fault = future.exception()
        if fault is None:
            where = future.result()
            body = protocol.stored(where.partition, where.offset, queue, where.timestamp_ms, where.topic_id)
            self._answer(Reply(job, body))
            return
        if not isinstance(fault, PortalMQError):
            fault = Unavailable(f"sending failed: {fault!r}", outcome="unknown")
        self._refuse(job, fault)

    def _receive(self, queue: str, jobs: list[Job], timeout_s: float) -> None:
        messages = iter(self._cluster.receive(queue, len(jobs), timeout_s))
        for job in jobs:
            message = next(messages, None)
            if message is None:
                self._answer(Reply(job, protocol.empty(queue)))
            else:
                self._answer(Reply(job, protocol.handed(queue, message), (queue, message.receipt)))

    def _delete(self, queue: str, partition: int, jobs: list[Job], timeout_s: float) -> None:
        ids = [
            job.request.message_id
            for job in jobs
            if isinstance(job.request, CommandRequest) and job.request.message_id is not None
        ]
        verdicts = self._cluster.delete(queue, partition, ids, timeout_s)
        for job, message_id, was_there in zip(jobs, ids, verdicts, strict=True):
            if was_there:
                self._answer(Reply(job, protocol.done(queue=queue, id=message_id)))
            else:
                self._refuse(job, MessageNotFound(f"queue {queue!r} has no message {message_id!r} to be deleted"))

    def _command(self, jobs: list[Job], timeout_s: float) -> None:
        (job,) = jobs
        assert isinstance(job.request, CommandRequest)
        answer = self._cluster.command(job.request.body, timeout_s)
        opens: PortRole | None = _OPENS.get(job.request.kind)
        if opens is not None:
            answer = protocol.with_member(answer, "port", self._ports()[opens])
        self._answer(Reply(job, answer))

    # --- close -------------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """End the workers when no request waits. Running calls complete."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))


_OPENS: dict[str, PortRole] = {"PRODUCE_MSG": "producers", "CONSUME": "consumers"}
_BATCH_MAX = {"tell": 1, "receive": RECEIVE_MAX}
