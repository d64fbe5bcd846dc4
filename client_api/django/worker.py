"""The worker: threads that each receive one task, run it, and settle its message.

    success    one commit acks the message and publishes the result: both or neither
    failure    the record is written; then the message is returned for the next attempt, or it becomes a dead letter
    no word    the process was killed: the lease ends, and another worker runs the task again

So a task runs at least once. Each thread has a consumer of its own, which renews the lease of its one message while the
task runs.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from traceback import format_exception
from typing import Any

import msgspec
from django.db import close_old_connections

from portalmq import wire
from portalmq.consumer import Consumer
from portalmq.django.backend import TaskBackend, TaskMessage, local_time
from portalmq.django.compat import TaskContext, TaskResultStatus, normalize_json, task_finished, task_started
from portalmq.django.results import SUCCESSFUL, ResultRecord, StoredError
from portalmq.errors import Forbidden, InvalidRequest, MessageTooLarge, PortalMQError, StaleReceipt, TopicExists
from portalmq.message import Message

_log = logging.getLogger("portalmq.django")

# A thread that waits for a task notices the order to stop within this time.
POLL_S = 1.0
PAUSE_S_MAX = 30.0
TRACEBACK_CHARS_MAX = 32_000
ERRORS_MAX = 10
DEFAULT_MAX_DELIVERIES = 5
# Stands among the worker ids for a process that died before its record of the attempt was sent.
UNKNOWN_WORKER = "unknown"


class TaskWorker:
    """Runs the tasks of some queues in `concurrency` threads, until stop()."""

    def __init__(self, backend: TaskBackend, queues: Sequence[str], concurrency: int) -> None:
        backend.require_options()
        self._backend = backend
        self._options = backend.portalmq
        self._topics = [self._options.topic(queue) for queue in queues]
        self._stopping = threading.Event()
        name = f"{socket.gethostname()[:30]}-{os.getpid()}"
        # Daemons, since a reload ends the process under them; then their messages go back to the group.
        self._threads = [
            threading.Thread(target=self._work, args=(f"{name}-{number}",), name=f"portalmq-{number}", daemon=True)
            for number in range(concurrency)
        ]

    def prepare(self) -> None:
        """Create the topics, and let the group deliver often enough. If the token may not, they have to exist."""
        options = self._options
        admin = options.shared_admin()
        try:
            for topic in self._topics:
                try:
                    admin.create_topic(topic)
                except TopicExists:
                    continue
            if self._backend.supports_get_result:
                self._backend.results.create(options.result_partitions, options.result_ttl_s)
            if options.max_attempts > DEFAULT_MAX_DELIVERIES:
                admin.create_group(options.group, max_deliveries=options.max_attempts)
        except Forbidden as error:
            _log.warning("the topics and the group %r have to exist: %s", options.group, error)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each thread finish the task that it has. Returns at once."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until all threads have ended."""
        for thread in self._threads:
            while thread.is_alive():
                thread.join(1.0)  # not for ever at once: a signal may come

    # --- one thread ------------------------------------------------------------------------------------------------

    def _work(self, worker_id: str) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            # After an error, a new consumer: closing the old one returns its message.
            try:
                with self._options.consumer(self._topics) as consumer:
                    while not self._stopping.is_set():
                        for message in consumer.poll(POLL_S, 1):
                            TaskRun(self._backend, consumer, message, worker_id).run()
                        pause_s = 0.0
            except PortalMQError as error:
                pause_s = min(PAUSE_S_MAX, pause_s * 2 or 1.0)
                _log.warning("%s: %s; again in %g s", type(error).__name__, error, pause_s)
            except Exception:  # noqa: BLE001 - a receiver of a signal may raise anything, and the worker goes on
                pause_s = min(PAUSE_S_MAX, pause_s * 2 or 1.0)
                _log.exception("a worker's thread failed; again in %g s", pause_s)


class TaskRun:
    """One delivery of a task."""

    def __init__(self, backend: TaskBackend, consumer: Consumer, message: Message, worker_id: str) -> None:
        self._backend = backend
        self._options = backend.portalmq
        self._consumer = consumer
        self._message = message
        self._worker_id = worker_id
        self._record = ResultRecord(status="RUNNING", worker_ids=[])

    def run(self) -> None:
        """Run the task and settle the message. Raises a PortalMQError if that fails: then the task comes again."""
        try:
            value = msgspec.json.decode(self._message.value, type=TaskMessage)
        except msgspec.DecodeError as error:
            _log.error("%s of %s is no task: %s", self._message.id, self._message.topic, error)
            self._consumer.reject(self._message, f"no task: {error}")
            return
        self._uid = value.id
        close_old_connections()
        try:
            self._run(value)
        except StaleReceipt:
            _log.warning("the lease of task %s was lost: another worker runs it, or has", value.id)
        finally:
            close_old_connections()

    def _run(self, value: TaskMessage) -> None:
        backend, message = self._backend, self._message
        place = backend.place_of(message, value)
        now = time.time()
        before = self._earlier(value)
        self._record = record = ResultRecord(
            status="RUNNING",
            worker_ids=[*before.worker_ids, self._worker_id],
            started_at=before.started_at or now,
            last_attempted_at=now,
            errors=before.errors,
        )
        try:
            result = backend.result_of(place, value, message.timestamp_ms, record)
        except Exception as error:  # noqa: BLE001 - a module of the project may fail in any way
            _log.exception("task %s cannot be loaded", value.task)
            self._failed(None, error)
            return
        started = self._announce()
        task_started.send(type(backend), task_result=result)
        try:
            context = [TaskContext(task_result=result)] if result.task.takes_context else []
            returned = normalize_json(result.task.call(*context, *result.args, **result.kwargs))
        except BaseException as error:  # noqa: BLE001 - SystemExit too: it is the task's, not the worker's
            if started is not None:
                started.result()
            self._failed(result, error)
            return
        if started is not None:
            started.result()  # or it might replace the record of success
        self._succeeded(result, returned)

    def _earlier(self, value: TaskMessage) -> ResultRecord:
        """Return what earlier attempts have recorded. Each delivery counts as an attempt, recorded or not."""
        earlier = self._message.delivery_count - 1
        found = None
        if earlier and self._backend.supports_get_result:
            found = self._backend.results.latest(value.id, self._message.timestamp_ms)
        found = found or ResultRecord(status="READY", worker_ids=[])
        found.worker_ids += [UNKNOWN_WORKER] * (earlier - len(found.worker_ids))
        return found

    def _announce(self) -> Any:
        """Send the record that the task runs; return its future."""
        if not self._backend.supports_get_result:
            return None
        return self._options.producer().send(**self._output())

    def _output(self) -> dict[str, Any]:
        return {
            "topic": self._options.results_topic,
            "key": self._uid,
            "value": msgspec.json.encode(self._record),
            "content_type": wire.JSON,
        }

    # --- the end ---------------------------------------------------------------------------------------------------

    def _succeeded(self, result: Any, returned: object) -> None:
        record = self._record
        record.status, record.return_value, record.finished_at = SUCCESSFUL, returned, time.time()
        try:
            if self._backend.supports_get_result:
                self._consumer.commit_with(self._message, [self._output()])
            else:
                self._consumer.ack(self._message)
        except (MessageTooLarge, InvalidRequest) as error:
            record.return_value = None
            self._failed(result, error)
            return
        object.__setattr__(result, "_return_value", returned)
        self._finish(result)

    def _failed(self, result: Any, error: BaseException) -> None:
        record, message = self._record, self._message
        again = message.delivery_count < self._options.max_attempts
        kind = type(error)
        trace = "".join(format_exception(error))[-TRACEBACK_CHARS_MAX:]
        record.errors = [*record.errors, StoredError(f"{kind.__module__}.{kind.__qualname__}", trace)][-ERRORS_MAX:]
        record.status, record.finished_at = ("READY", None) if again else ("FAILED", time.time())
        # Not by a worker whose lease was lost: the record of another one counts. Raises StaleReceipt.
        self._consumer.extend(message)
        if self._backend.supports_get_result:
            self._options.producer().send(**self._output()).result()
        reason = f"{kind.__name__}: {error}"
        if again:
            self._consumer.nack(message, delay_s=self._options.retry_delay_s, reason=reason)
        else:
            self._consumer.reject(message, reason)
        if result is not None and not again:
            result.errors[:] = self._backend.errors_of(record)
            self._finish(result)

    def _finish(self, result: Any) -> None:
        object.__setattr__(result, "status", TaskResultStatus(self._record.status))
        object.__setattr__(result, "finished_at", local_time(self._record.finished_at))
        task_finished.send(type(self._backend), task_result=result)
