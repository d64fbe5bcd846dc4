"""What is asked, by queue, and the workers that ask the brokers for it.

    take --> a lane for each (kind, queue) --> a worker carries out all that waits in it as one call --> answers

A lane is with one worker at a time. So what comes in while a call is on its way goes with the next one, a queue without
a leader keeps one worker and not all of them, and nobody is asked for more messages than there are consumers waiting.
A message for a queue that is known takes no lane: the producer has batches of its own.

With a `watch` the thread that takes requests begins the calls itself and hears of their answers: it waits for none, and
nothing changes hands between threads. A worker is for a call that could not be begun, or that was not answered well. A
message that comes alone is begun, those that come together are the producer's batch.

Every request has a deadline. What a call could not do in time is refused; those in the same call with time left are
tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from portalmq.begun import Begun
from portalmq.connection import Answer
from portalmq.errors import MessageNotFound, PortalMQError, Unavailable
from portalmq.message import RecordMetadata
from portalmq.zeromq import protocol
from portalmq.zeromq.protocol import Asked, Door, Posted, Received, Told, Way

_log = logging.getLogger("portalmq.zeromq")

WORKERS_MAX = 32
RECEIVE_MAX = 32
DELETE_MAX = 500
# With less time left than this no call is begun.
CALL_S_MIN = 0.05


# Told of a request that was begun: calls back with its answer, or with None when there is none, in the same thread.
Watch = Callable[[Begun, Callable[[Answer | None], None]], None]

T_co = TypeVar("T_co", covariant=True)


class Call(Protocol[T_co]):
    """One call to the brokers, however often it is tried."""

    def begin(self, watch: Watch, timeout_s: float, done: Callable[[Answer | None], None]) -> bool:
        """Whether it could be begun without waiting."""
        ...

    def outcome(self, answer: Answer) -> T_co:
        """Of a call that was begun. Raises a PortalMQError."""
        ...

    def carry_out(self, timeout_s: float) -> T_co:
        """Waits. Raises a PortalMQError."""
        ...


class Cluster(Protocol):
    """What the desk needs of the brokers."""

    def has_room_for(self, queue: str) -> bool: ...
    def send(
        self, queue: str, value: str | bytes, content_type: str | None, watch: Watch | None = None
    ) -> Future[RecordMetadata]: ...
    def receiving(self, queue: str, at_most: int) -> Call[list[Received]]: ...
    def give_back(self, receipts: list[str]) -> None: ...
    def deleting(self, queue: str, partition: int, ids: list[str]) -> Call[list[bool]]: ...
    def telling(self, body: bytes) -> Call[bytes]: ...


@dataclass(slots=True)
class Job:
    """One request: where it came in, the way back, until when (monotonic), and how many bytes it holds."""

    door: Door
    way: Way
    deadline: float
    size: int
    what: Posted | Asked | Told


class Reply(NamedTuple):
    """`lease` is (queue, receipt) where a message is handed out: if it reaches nobody, it is given back."""

    job: Job
    body: bytes
    lease: tuple[str, str] | None = None


class Returned(NamedTuple):
    """A message that reached nobody."""

    receipt: str


@dataclass(slots=True)
class _Calling:
    """A call for these jobs. `was_tried`: it was begun, and whether it did anything is not known."""

    call: Call[Any]
    jobs: list[Job]
    was_tried: bool = False


_Lane = tuple[str, str, int]
_Item = Job | Returned | _Calling


class Desk:
    """`answer` is called once for each job, by any thread. `ports` are told to those who open a door. With a `watch`
    one thread takes jobs, begins their calls, and calls back.

    Invariant, under the lock: a lane is in `_lanes` while it has items, is with a worker, or has a call that was begun.
    One that is with nobody is in `_ready`, or in `_fresh` until the next begin(). `_fresh` and `_posts` are of the
    thread that takes.
    """

    def __init__(
        self,
        cluster: Cluster,
        answer: Callable[[Reply], None],
        *,
        ports: Callable[[], dict[Door, int]],
        watch: Watch | None = None,
        clock: Callable[[], float] = time.monotonic,
        workers_max: int = WORKERS_MAX,
    ) -> None:
        self._cluster = cluster
        self._answer = answer
        self._ports = ports
        self._watch = watch
        self._clock = clock
        self._workers_max = workers_max
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._lanes: dict[_Lane, deque[_Item]] = {}
        self._ready: deque[_Lane] = deque()
        self._workers: list[threading.Thread] = []
        self._resting = 0
        self._closed = False
        self._fresh: list[_Lane] = []
        self._posts: dict[str, list[Job]] = {}

    # --- in ----------------------------------------------------------------------------------------------------------

    def take(self, job: Job) -> None:
        """Never waits. With a `watch` begin() is to follow."""
        what = job.what
        if isinstance(what, Posted):
            if not self._cluster.has_room_for(what.queue):
                self._put(("post", what.queue, 0), job)
            elif self._watch is None:
                self._send(job)
            else:
                self._posts.setdefault(what.queue, []).append(job)
        elif isinstance(what, Asked):
            self._ask(("receive", what.queue, 0), job)
        elif what.message_id is not None:
            self._ask(("delete", what.queue, protocol.partition_of(what.message_id)), job)
        else:
            self._ask(("tell", what.queue, 0), job)

    def give_back(self, queue: str, receipt: str) -> None:
        """Its answer reached nobody."""
        self._put(("give back", queue, 0), Returned(receipt))

    def _put(self, lane: _Lane, item: _Item) -> None:
        with self._lock:
            items = self._lanes.get(lane)
            if items is not None:
                items.append(item)
                return
            self._lanes[lane] = deque([item])
            self._ready.append(lane)
            self._wake()

    def _ask(self, lane: _Lane, job: Job) -> None:
        if self._watch is None:
            self._put(lane, job)
            return
        with self._lock:
            items = self._lanes.get(lane)
            if items is not None:
                items.append(job)
                return
            self._lanes[lane] = deque([job])
        self._fresh.append(lane)

    # --- calls that are begun ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """What was taken since the last time: what came together goes together."""
        posts, self._posts = self._posts, {}
        for jobs in posts.values():
            alone = len(jobs) == 1
            for job in jobs:
                self._send(job, self._watch if alone else None)
        fresh, self._fresh = self._fresh, []
        for lane in fresh:
            self._begin_next(lane)

    def _begin_next(self, lane: _Lane) -> None:
        """A lane that is with nobody else goes on, or ends."""
        with self._lock:
            items = self._lanes[lane]
            taken = [items.popleft() for _ in range(min(len(items), _at_once(lane)))]
            if not taken:
                del self._lanes[lane]
                return
        assert self._watch is not None
        self._begin(self._watch, lane, [item for item in taken if isinstance(item, Job)])

    def _begin(self, watch: Watch, lane: _Lane, jobs: list[Job]) -> None:
        """For a lane that is nobody else's. A call that cannot be begun is a worker's."""
        calling = _Calling(self._call(lane, jobs), jobs)
        # Half of the time is left to the worker who goes on where this fails.
        timeout_s = (min(job.deadline for job in jobs) - self._clock()) / 2
        if timeout_s < CALL_S_MIN or not calling.call.begin(watch, timeout_s, partial(self._ended, lane, calling)):
            self._hand_over(lane, calling)

    def _ended(self, lane: _Lane, calling: _Calling, answer: Answer | None) -> None:
        try:
            if answer is None:
                raise Unavailable("the broker gave no answer", outcome="unknown")
            self._settle(lane, calling.jobs, calling.call.outcome(answer))
        except PortalMQError as error:
            if error.retryable:
                calling.was_tried = error.outcome == "unknown"
                self._hand_over(lane, calling)
                return
            for job in calling.jobs:
                self._refuse(job, error)
        except Exception as fault:  # noqa: BLE001 - the loop outlives whatever comes up
            self._fail(fault, calling.jobs)
        # Begun with what the sockets have by now.
        self._fresh.append(lane)

    def _hand_over(self, lane: _Lane, calling: _Calling) -> None:
        with self._lock:
            self._lanes[lane].appendleft(calling)
            self._ready.append(lane)
            self._wake()

    # --- workers -----------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._resting:
            # Counted here: one that is woken and has not run yet must not be taken for one that rests.
            self._resting -= 1
            self._work.notify()
        elif len(self._workers) < self._workers_max:
            worker = threading.Thread(target=self._run, name="portalmq-miniq", daemon=True)
            self._workers.append(worker)
            worker.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._ready:
                    if self._closed:
                        return
                    self._resting += 1
                    self._work.wait()
                lane = self._ready.popleft()
                items = self._lanes[lane]
                at_once = 1 if isinstance(items[0], _Calling) else _at_once(lane)
                taken = [items.popleft() for _ in range(min(len(items), at_once))]
            left = self._serve(lane, taken)
            with self._lock:
                items.extendleft(reversed(left))
                if items:
                    self._ready.append(lane)
                    if len(self._ready) > 1:
                        self._wake()
                else:
                    del self._lanes[lane]

    def _serve(self, lane: _Lane, taken: Sequence[_Item]) -> list[Job]:
        """Those that are to be tried again."""
        if isinstance(taken[0], _Calling):
            return self._go_on(lane, taken[0])
        receipts = [item.receipt for item in taken if isinstance(item, Returned)]
        jobs = [item for item in taken if isinstance(item, Job)]
        now = self._clock()
        late = [job for job in jobs if job.deadline - now < CALL_S_MIN]
        jobs = [job for job in jobs if job.deadline - now >= CALL_S_MIN]
        for job in late:
            self._refuse(job, Unavailable("the brokers could not be asked in time: ask again", outcome="not_applied"))
        if lane[0] == "post":
            for job in jobs:
                try:
                    self._send(job)
                except Exception as fault:  # noqa: BLE001 - a worker outlives whatever comes up
                    self._fail(fault, [job])
        elif jobs:
            return self._go_on(lane, _Calling(self._call(lane, jobs), jobs))
        elif receipts:
            try:
                self._cluster.give_back(receipts)
            except Exception as fault:  # noqa: BLE001 - a worker outlives whatever comes up
                _log.info("messages that reached nobody come again when their leases end: %r", fault)
        return []

    def _go_on(self, lane: _Lane, calling: _Calling) -> list[Job]:
        timeout_s = min(job.deadline for job in calling.jobs) - self._clock()
        try:
            self._settle(lane, calling.jobs, calling.call.carry_out(max(timeout_s, CALL_S_MIN)))
        except PortalMQError as error:
            if calling.was_tried:
                error.outcome = "unknown"
            return self._after(error, calling.jobs)
        except Exception as fault:  # noqa: BLE001 - a worker outlives whatever comes up
            self._fail(fault, calling.jobs)
        return []

    def _fail(self, fault: Exception, jobs: list[Job]) -> None:
        _log.exception("a call for MiniQ failed")
        for job in jobs:
            self._refuse(job, Unavailable(f"the call failed: {fault!r}", retryable=False, outcome="unknown"))

    def _after(self, error: PortalMQError, jobs: list[Job]) -> list[Job]:
        """A call failed whose time was that of its oldest job. The others have time left, where it may help."""
        now, again = self._clock(), []
        for job in jobs:
            if error.retryable and job.deadline - now >= CALL_S_MIN and not self._closed:
                again.append(job)
            else:
                self._refuse(job, error)
        return again

    def _refuse(self, job: Job, error: PortalMQError) -> None:
        self._answer(Reply(job, protocol.refusal(error)))

    # --- what is asked -----------------------------------------------------------------------------------------------

    def _call(self, lane: _Lane, jobs: list[Job]) -> Call[Any]:
        kind, queue, partition = lane
        if kind == "receive":
            return self._cluster.receiving(queue, len(jobs))
        if kind == "delete":
            return self._cluster.deleting(queue, partition, _ids(jobs))
        (job,) = jobs
        assert isinstance(job.what, Told)
        return self._cluster.telling(job.what.body)

    def _settle(self, lane: _Lane, jobs: list[Job], outcome: Any) -> None:
        kind, queue, _ = lane
        if kind == "receive":
            self._received(queue, jobs, outcome)
        elif kind == "delete":
            self._deleted(queue, jobs, outcome)
        else:
            self._told(jobs[0], outcome)

    def _send(self, job: Job, watch: Watch | None = None) -> None:
        assert isinstance(job.what, Posted)
        try:
            future = self._cluster.send(job.what.queue, job.what.value, job.what.content_type, watch)
        except PortalMQError as error:
            self._refuse(job, error)
            return
        future.add_done_callback(partial(self._sent, job, job.what.queue))

    def _sent(self, job: Job, queue: str, future: Future[RecordMetadata]) -> None:
        fault = future.exception()
        if fault is None:
            where = future.result()
            told = protocol.stored(where.partition, where.offset, queue, where.timestamp_ms, where.topic_id)
            self._answer(Reply(job, told))
            return
        if not isinstance(fault, PortalMQError):
            fault = Unavailable(f"sending failed: {fault!r}", outcome="unknown")
        self._refuse(job, fault)

    def _received(self, queue: str, jobs: list[Job], found: list[Received]) -> None:
        messages = iter(found)
        for job in jobs:
            message = next(messages, None)
            if message is None:
                self._answer(Reply(job, protocol.empty(queue)))
            else:
                self._answer(Reply(job, protocol.handed(queue, message), (queue, message.receipt)))

    def _deleted(self, queue: str, jobs: list[Job], verdicts: list[bool]) -> None:
        for job, message_id, was_there in zip(jobs, _ids(jobs), verdicts, strict=True):
            if was_there:
                self._answer(Reply(job, protocol.done(queue=queue, id=message_id)))
            else:
                self._refuse(job, MessageNotFound(f"queue {queue!r} has no message {message_id!r} to be deleted"))

    def _told(self, job: Job, answer: bytes) -> None:
        assert isinstance(job.what, Told)
        opens: Door | None = _OPENS.get(job.what.kind)
        if opens is not None:
            answer = protocol.with_member(answer, "port", self._ports()[opens])
        self._answer(Reply(job, answer))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """What is carried out is carried out; the workers end when nothing waits."""
        with self._lock:
            self._closed = True
            self._work.notify_all()
        deadline = time.monotonic() + timeout_s
        for worker in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))


_OPENS: dict[str, Door] = {"PRODUCE_MSG": "producers", "CONSUME": "consumers"}
_AT_ONCE = {"tell": 1, "receive": RECEIVE_MAX}


def _at_once(lane: _Lane) -> int:
    return _AT_ONCE.get(lane[0], DELETE_MAX)


def _ids(jobs: list[Job]) -> list[str]:
    return [job.what.message_id for job in jobs if isinstance(job.what, Told) and job.what.message_id is not None]
