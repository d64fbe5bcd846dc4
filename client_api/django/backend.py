"""The task backend: a task is a message of its queue's topic, its result a record of the results' topic.

    enqueue --> topic "django.default" --worker--> the task runs --> commit: ack and result --> topic "django.results"
    get_result(id) --> the message, by its place in the id --> the last record of its key

The id of a result is `<queue>-<partition>-<offset>-<random>`: the place of the task's message, and a secret in it, so
that ids cannot be guessed.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from django.apps import apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import import_string

from portalmq import wire
from portalmq.django.compat import (
    BaseTaskBackend,
    InvalidTask,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)
from portalmq.django.options import RESULTS_QUEUE, BackendOptions
from portalmq.django.results import ResultRecord, ResultTopic
from portalmq.errors import InvalidRequest, NotFound
from portalmq.message import Message

UID_LENGTH = 22
PRIORITY_MIN, PRIORITY_MAX = -100, 100


class TaskMessage(msgspec.Struct, omit_defaults=True):
    """The value of a task's message. `run_after` is in Unix seconds."""

    id: str
    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    priority: int = 0
    run_after: float | None = None


class TaskPlace(NamedTuple):
    """What the id of a result says."""

    queue: str
    partition: int
    offset: int
    uid: str

    def __str__(self) -> str:
        return f"{self.queue}-{self.partition}-{self.offset}-{self.uid}"

    @classmethod
    def read(cls, result_id: str) -> TaskPlace | None:
        queue, *rest = str(result_id).rsplit("-", 3)
        if len(rest) != 3 or not (rest[0].isascii() and rest[0].isdigit() and rest[1].isascii() and rest[1].isdigit()):
            return None
        return cls(queue, int(rest[0]), int(rest[1]), rest[2])


def message_priority(priority: int) -> int:
    """Return the priority of a message, 0 to 31, for Django's -100 to 100. 0 becomes 16."""
    return round((priority - PRIORITY_MIN) * wire.PRIORITY_MAX / (PRIORITY_MAX - PRIORITY_MIN))


class TaskBackend(BaseTaskBackend):
    """The backend that TASKS names. Raises ImproperlyConfigured for OPTIONS that are not valid."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.portalmq = BackendOptions()
        self._refused: str | None = None
        try:
            self.portalmq = BackendOptions.read(self.options)
        except msgspec.ValidationError as error:
            self._refused = str(error)
        self.supports_get_result = self.portalmq.result_ttl_s > 0
        self._results: ResultTopic | None = None

    # --- tasks in --------------------------------------------------------------------------------------------------

    def validate_task(self, task: Any) -> None:
        super().validate_task(task)
        refused = self._refusal_of(task.queue_name)
        if refused:
            raise InvalidTask(refused)

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """Send a task; when this returns, every in-sync replica has it on disk. Raises TypeError for arguments that are
        no JSON, and PortalMQError if no broker took it in time; with `outcome` "unknown" it may run all the same."""
        self.validate_task(task)
        self.require_options()
        result = TaskResult(
            task=task,
            id="",
            status=TaskResultStatus.READY,
            enqueued_at=None,
            started_at=None,
            last_attempted_at=None,
            finished_at=None,
            args=list(args),
            kwargs=dict(kwargs),
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        uid = get_random_string(UID_LENGTH)
        run_after = None if task.run_after is None else _unix_s(task.run_after)
        value = TaskMessage(uid, task.module_path, result.args, result.kwargs, task.priority, run_after)
        future = self.portalmq.producer().send(
            self.portalmq.topic(task.queue_name),
            msgspec.json.encode(value),
            content_type=wire.JSON,
            priority=message_priority(task.priority),
            deliver_at=run_after,
        )
        sent = future.result()
        object.__setattr__(result, "id", str(TaskPlace(task.queue_name, sent.partition, sent.offset, uid)))
        object.__setattr__(result, "enqueued_at", local_time(sent.timestamp_ms / 1000))
        task_enqueued.send(type(self), task_result=result)
        return result

    # --- results out -----------------------------------------------------------------------------------------------

    @property
    def results(self) -> ResultTopic:
        if self._results is None:
            self._results = _topic_of(self.portalmq)
        return self._results

    def get_result(self, result_id: str) -> Any:
        """Return the task's state. Raises TaskResultDoesNotExist; ImportError if the task's function is gone."""
        if not self.supports_get_result:
            return super().get_result(result_id)
        self.require_options()
        place = TaskPlace.read(result_id)
        if place is None or (self.queues and place.queue not in self.queues) or self._refusal_of(place.queue):
            raise TaskResultDoesNotExist(result_id)
        try:
            topic = self.portalmq.topic(place.queue)
            message = self.portalmq.shared_admin().message(topic, f"{place.partition}-{place.offset}")
            value = msgspec.json.decode(message.value, type=TaskMessage)
        except (NotFound, InvalidRequest, msgspec.DecodeError):
            raise TaskResultDoesNotExist(result_id) from None
        if not hmac.compare_digest(value.id.encode(), place.uid.encode()):
            raise TaskResultDoesNotExist(result_id)
        record = self.results.latest(place.uid, message.timestamp_ms)
        return self.result_of(place, value, message.timestamp_ms, record)

    def place_of(self, message: Message, value: TaskMessage) -> TaskPlace:
        """Return the place of the message that enqueue sent, of which this one may be a copy: a task run early, say."""
        queue = message.topic.removeprefix(self.portalmq.topic_prefix)
        origin = message.headers.get(wire.HEADER_COPY_OF)
        if origin is not None:
            topic, _, message_id = origin.rpartition("/")
            place = TaskPlace.read(f"{topic.removeprefix(self.portalmq.topic_prefix)}-{message_id}-{value.id}")
            if place is not None:
                return place
        return TaskPlace(queue, message.partition, message.offset, value.id)

    def result_of(self, place: TaskPlace, value: TaskMessage, enqueued_ms: int, record: ResultRecord | None) -> Any:
        """Return Django's result of a task's message and what is recorded. Raises ImportError or TypeError if the task
        is not there."""
        record = record or ResultRecord(status="READY", worker_ids=[])
        result = TaskResult(
            task=self._task_of(place.queue, value),
            id=str(place),
            status=TaskResultStatus(record.status),
            enqueued_at=local_time(enqueued_ms / 1000),
            started_at=local_time(record.started_at),
            last_attempted_at=local_time(record.last_attempted_at),
            finished_at=local_time(record.finished_at),
            args=value.args,
            kwargs=value.kwargs,
            backend=self.alias,
            errors=self.errors_of(record),
            worker_ids=list(record.worker_ids),
        )
        object.__setattr__(result, "_return_value", record.return_value)
        return result

    @staticmethod
    def errors_of(record: ResultRecord) -> list[Any]:
        return [TaskError(**msgspec.structs.asdict(error)) for error in record.errors]

    def _task_of(self, queue: str, value: TaskMessage) -> Any:
        found = import_string(value.task)
        if not isinstance(found, Task):
            raise TypeError(f"{value.task} is no task: decorate it with @task")
        return found.using(
            priority=value.priority,
            queue_name=queue,
            run_after=local_time(value.run_after),
            backend=self.alias,
        )

    # --- settings --------------------------------------------------------------------------------------------------

    def require_options(self) -> None:
        """Raise ImproperlyConfigured if the OPTIONS are not valid."""
        if self._refused is not None:
            raise ImproperlyConfigured(f"TASKS[{self.alias!r}]['OPTIONS']: {self._refused}")

    def _refusal_of(self, queue: str) -> str | None:
        if queue == RESULTS_QUEUE:
            return f"the queue {queue!r} needs another name: the topic {self.portalmq.results_topic!r} has the results"
        try:
            wire.check_name(self.portalmq.topic(queue), "topic")
        except InvalidRequest as error:
            return f"the queue {queue!r}: {error.detail}"
        return None

    def check(self, **kwargs: Any) -> Iterable[Any]:
        """Yield what is wrong with the settings. Asks no broker."""
        at = f"TASKS[{self.alias!r}]"
        if self._refused is not None:
            hint = f"Options: {', '.join(BackendOptions.__struct_fields__)}."
            yield checks.Error(f"{at}['OPTIONS'] is not valid: {self._refused}", hint=hint, id="portalmq.E001")
            return
        try:
            self.portalmq.admin().close()
        except (ValueError, OSError, InvalidRequest) as error:
            hint = "Name brokers as http://host:5000, one or a list, or as zk://host:2181."
            yield checks.Error(f"{at}: no client can be made: {error}", hint=hint, id="portalmq.E002")
        for refusal in filter(None, map(self._refusal_of, sorted(self.queues))):
            yield checks.Error(f"{at}['QUEUES']: {refusal}", id="portalmq.E003")
        if not self.queues:
            hint = "Name QUEUES, or start each worker with --queues."
            yield checks.Warning(
                f"{at}['QUEUES'] is empty: a worker has no queues to read", hint=hint, id="portalmq.W001"
            )
        if not apps.is_installed("portalmq.django"):
            hint = "Add 'portalmq.django' to INSTALLED_APPS."
            yield checks.Warning(f"{at}: `manage.py portalmq_worker` is missing", hint=hint, id="portalmq.W002")


_topics: dict[BackendOptions, ResultTopic] = {}


def _topic_of(options: BackendOptions) -> ResultTopic:
    """Return the reader of this process: it remembers how far each id was looked up."""
    topic = _topics.get(options)
    if topic is None:
        topic = _topics.setdefault(options, ResultTopic(options.shared_admin(), options.results_topic))
    return topic


def local_time(unix_s: float | None) -> datetime | None:
    """Return a time as Django has it: aware if USE_TZ, otherwise naive in its time zone."""
    if unix_s is None:
        return None
    moment = datetime.fromtimestamp(unix_s, UTC)
    return moment if settings.USE_TZ else timezone.make_naive(moment)


def _unix_s(moment: datetime) -> float:
    return (timezone.make_aware(moment) if timezone.is_naive(moment) else moment).timestamp()
