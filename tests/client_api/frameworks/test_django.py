"""The backend of Django's tasks, its results and its worker, against a broker in this process."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("django", reason="pip install 'portalmq[django]'")

from django.core.management import CommandError, call_command
from django.test import override_settings
from support import django_project as project

from portalmq import Admin, Consumer, Producer, TopicNotFound
from portalmq.django import results as results_module
from portalmq.django.backend import TaskPlace, message_priority
from portalmq.django.compat import InvalidTask, TaskResultDoesNotExist, task_enqueued, task_finished, task_started
from portalmq.django.options import BackendOptions
from portalmq.django.worker import TaskWorker
from portalmq.testing import InMemoryBroker

_numbers = itertools.count(1)
WITHIN_S = 60.0


@pytest.fixture(autouse=True)
def quick_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have idle threads of a worker look more often whether they shall stop."""
    monkeypatch.setattr("portalmq.django.worker.POLL_S", 0.1)


@pytest.fixture(scope="module")
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as broker:
        yield broker


class Project:
    """Settings with topics of their own, and workers on them."""

    def __init__(self, broker: InMemoryBroker, **options: Any) -> None:
        self.broker = broker
        self.prefix = f"p{next(_numbers)}."
        options = {"bootstrap": [broker.url], "topic_prefix": self.prefix, "group": self.prefix + "workers"} | options
        queues = ["default", "mail"]
        self.settings = {"default": {"BACKEND": "portalmq.django.TaskBackend", "QUEUES": queues, "OPTIONS": options}}

    @property
    def backend(self) -> Any:
        return project.task_backends["default"]

    @contextmanager
    def worker(self, concurrency: int = 1) -> Iterator[TaskWorker]:
        worker = TaskWorker(self.backend, ["default", "mail"], concurrency)
        worker.prepare()
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()
            worker.join()

    def finish(self, *results: Any) -> None:
        """Have a worker run these tasks."""
        with self.worker():
            for result in results:
                self.wait(result, lambda result=result: result.is_finished)

    def wait(self, result: Any, until: Callable[[], bool]) -> None:
        deadline = datetime.now(UTC) + timedelta(seconds=WITHIN_S)
        while not until():
            assert datetime.now(UTC) < deadline, f"still {result.status} after {WITHIN_S} s"
            result.refresh()


@contextmanager
def made(broker: InMemoryBroker, **options: Any) -> Iterator[Project]:
    shop = Project(broker, **options)
    project.noted.clear()
    project.gate.clear()
    with override_settings(TASKS=shop.settings):
        yield shop


@pytest.fixture
def shop(broker: InMemoryBroker) -> Iterator[Project]:
    with made(broker) as shop:
        yield shop


@pytest.fixture
def admin(broker: InMemoryBroker) -> Iterator[Admin]:
    with Admin(broker.url) as admin:
        yield admin


# --- enqueue and run -------------------------------------------------------------------------------------------------


def test_a_task_runs_and_its_result_can_be_read(shop: Project) -> None:
    result = project.add.enqueue(2, right=3)
    assert (result.status, result.is_finished, result.attempts) == ("READY", False, 0)
    assert result.enqueued_at is not None
    shop.finish(result)
    assert (result.status, result.return_value, result.errors) == ("SUCCESSFUL", 5, [])
    assert result.finished_at >= result.started_at
    assert len(result.worker_ids) == 1
    again = project.add.get_result(result.id)
    assert (again.args, again.kwargs, again.return_value, again.enqueued_at) == (
        [2],
        {"right": 3},
        5,
        result.enqueued_at,
    )


def test_a_result_is_ready_before_any_worker_was_started(shop: Project) -> None:
    result = project.add.enqueue(1, 1)
    assert project.add.get_result(result.id).status == "READY"


def test_an_async_task_gets_its_context(shop: Project) -> None:
    result = project.report.enqueue("sales")
    shop.finish(result)
    assert result.return_value == ["sales", 1, result.id]


async def _enqueued_and_found() -> tuple[Any, Any]:
    result = await project.add.aenqueue(1, 2)
    return result, await project.add.aget_result(result.id)


def test_a_task_is_enqueued_and_found_by_coroutines(shop: Project) -> None:
    import asyncio

    result, found = asyncio.run(_enqueued_and_found())
    assert found.id == result.id
    assert found.args == [1, 2]


def test_a_failing_task_has_its_traceback_in_the_result_and_is_a_dead_letter(shop: Project, admin: Admin) -> None:
    result = project.fail.enqueue("no paper")
    shop.finish(result)
    assert result.status == "FAILED"
    [error] = result.errors
    assert error.exception_class is ValueError
    assert "no paper" in error.traceback
    assert "django_project.py" in error.traceback
    [dead] = admin.dead_letters(shop.prefix + "workers", shop.prefix + "mail")
    assert dead.headers["portalmq-dead-reason"] == "ValueError: no paper"


def test_a_failed_task_that_is_redriven_succeeds(shop: Project, admin: Admin) -> None:
    result = project.fail.enqueue("no ink", until_attempt=2)
    shop.finish(result)
    assert result.status == "FAILED"
    admin.redrive(shop.prefix + "workers", shop.prefix + "mail")
    with shop.worker():
        shop.wait(result, lambda: result.status == "SUCCESSFUL")
    assert result.return_value == "at last"


def test_a_task_is_tried_again_as_often_as_the_options_say(broker: InMemoryBroker) -> None:
    with made(broker, max_attempts=3) as shop:
        result = project.fail.enqueue("slow net", until_attempt=3)
        shop.finish(result)
        assert (result.status, result.return_value) == ("SUCCESSFUL", "at last")
        assert result.attempts == 3
        assert [error.exception_class for error in result.errors] == [ValueError, ValueError]


@pytest.mark.parametrize(
    ("task", "error"), [("return_what_is_no_json", TypeError), ("return_too_much", None)], ids=["no JSON", "too large"]
)
def test_a_result_that_cannot_be_kept_fails_the_task(shop: Project, task: str, error: type | None) -> None:
    result = getattr(project, task).enqueue()
    shop.finish(result)
    assert result.status == "FAILED"
    assert error is None or result.errors[0].exception_class is error


def test_signals_are_sent_in_order(shop: Project) -> None:
    seen: list[Any] = []
    signals = {"enqueued": task_enqueued, "started": task_started, "finished": task_finished}
    receivers = {}
    for name, signal in signals.items():
        receivers[name] = lambda name=name, **given: seen.append((name, str(given["task_result"].status)))
        signal.connect(receivers[name])
    try:
        shop.finish(project.add.enqueue(1, 1))
    finally:
        for name, signal in signals.items():
            signal.disconnect(receivers[name])
    assert seen == [("enqueued", "READY"), ("started", "RUNNING"), ("finished", "SUCCESSFUL")]


def test_a_message_that_is_no_task_becomes_a_dead_letter_and_stops_no_worker(shop: Project, admin: Admin) -> None:
    with Producer(shop.broker.url) as producer:
        producer.send(shop.prefix + "default", b"not a task", priority=31).result()
    shop.finish(project.add.enqueue(1, 1))
    [dead] = admin.dead_letters(shop.prefix + "workers", shop.prefix + "default")
    assert dead.value == b"not a task"


def test_a_task_whose_function_is_gone_fails_with_the_import_error(shop: Project, admin: Admin) -> None:
    with Producer(shop.broker.url) as producer:
        value = {"id": "u1", "task": "support.django_project.gone", "args": [], "kwargs": {}}
        producer.send(shop.prefix + "default", value, priority=31).result()
    shop.finish(project.add.enqueue(1, 1))
    [dead] = admin.dead_letters(shop.prefix + "workers", shop.prefix + "default")
    assert "gone" in dead.headers["portalmq-dead-reason"]
    record = shop.backend.results.latest("u1", 0)
    assert record.status == "FAILED"
    assert "ImportError" in record.errors[0].traceback


def test_only_a_task_can_be_run_by_a_message(shop: Project, admin: Admin) -> None:
    with Producer(shop.broker.url) as producer:
        value = {"id": "u2", "task": "os.getpid", "args": [], "kwargs": {}}
        producer.send(shop.prefix + "default", value, priority=31).result()
    shop.finish(project.add.enqueue(1, 1))
    [dead] = admin.dead_letters(shop.prefix + "workers", shop.prefix + "default")
    assert "os.getpid is no task" in dead.headers["portalmq-dead-reason"]


# --- order and time --------------------------------------------------------------------------------------------------


def test_the_highest_priority_runs_first(shop: Project) -> None:
    results = [project.note.using(priority=priority).enqueue(priority) for priority in (-100, 0, 50, 100, -7)]
    shop.finish(*results)
    assert project.noted == [100, 50, 0, -7, -100]


def test_priorities_become_those_of_messages() -> None:
    assert [message_priority(each) for each in (-100, 0, 100)] == [0, 16, 31]
    mapped = [message_priority(each) for each in range(-100, 101)]
    assert mapped == sorted(mapped)


def test_a_deferred_task_runs_when_it_is_due(shop: Project) -> None:
    due = datetime.now(UTC) + timedelta(hours=2)
    later = project.note.using(run_after=due).enqueue("later")
    assert later.task.run_after == due
    shop.finish(project.note.enqueue("now"))
    assert project.noted == ["now"]
    later.refresh()
    assert later.status == "READY"
    assert abs(later.task.run_after - due) < timedelta(seconds=1)
    shop.broker.advance(2 * 3600)
    shop.finish(later)
    assert project.noted == ["now", "later"]


def test_a_deferred_task_that_an_operator_runs_now_keeps_its_result_id(shop: Project, admin: Admin) -> None:
    later = project.report.using(run_after=datetime.now(UTC) + timedelta(days=30)).enqueue("early")
    [message] = admin.scheduled(shop.prefix + "default")
    admin.run_scheduled(shop.prefix + "default", message.id)
    shop.finish(later)
    assert later.return_value == ["early", 1, later.id]


# --- crashes ---------------------------------------------------------------------------------------------------------


def test_a_task_of_a_worker_that_vanished_runs_again(shop: Project) -> None:
    result = project.report.enqueue("lost once")
    vanished = Consumer(
        shop.prefix + "default", group=shop.prefix + "workers", bootstrap=shop.broker.url, manual_ack=True
    )
    assert len(vanished.poll(WITHIN_S, 1)) == 1  # and no ack
    shop.broker.advance(31)
    shop.finish(result)
    vanished.close()
    assert result.return_value == ["lost once", 2, result.id]


def test_a_worker_that_lost_its_lease_overwrites_no_result(shop: Project, admin: Admin) -> None:
    result = project.wait_at_gate.enqueue()
    with shop.worker() as slow:
        shop.wait(result, lambda: result.status == "RUNNING")
        shop.broker.advance(31)
        slow.stop()
        project.open_gate()  # another worker runs it, and this one is too late, or the other way round
        with shop.worker():
            shop.wait(result, lambda: result.is_finished)
    assert result.status == "SUCCESSFUL"
    assert admin.queue_counts(shop.prefix + "workers", shop.prefix + "default").dead == 0


def test_a_stopped_worker_finishes_what_it_runs_and_takes_nothing_more(shop: Project) -> None:
    running, waiting = project.wait_at_gate.enqueue(), project.note.enqueue("after")
    with shop.worker() as worker:
        shop.wait(running, lambda: running.status == "RUNNING")
        worker.stop()
        project.open_gate()
    running.refresh()
    waiting.refresh()
    assert (running.status, waiting.status) == ("SUCCESSFUL", "READY")


# --- results ---------------------------------------------------------------------------------------------------------


def test_ids_are_secret_and_foreign_ones_do_not_exist(shop: Project, broker: InMemoryBroker) -> None:
    result = project.add.enqueue(1, 1)
    place = TaskPlace.read(result.id)
    assert place is not None
    assert str(place) == result.id
    wrong = [
        str(place._replace(uid="x" * 22)),
        str(place._replace(offset=10_000)),
        str(place._replace(partition=99)),
        str(place._replace(queue="results")),
        str(place._replace(queue="other")),
        "",
        "no-id",
        "default-0--1-x",
        "default-0-²-x",
    ]
    for each in wrong:
        with pytest.raises(TaskResultDoesNotExist):
            project.add.get_result(each)


def test_a_look_up_reads_on_from_where_the_last_one_ended(shop: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_module, "PAGE_MESSAGES", 10)
    waiting = project.add.using(run_after=datetime.now(UTC) + timedelta(days=1)).enqueue(1, 1)
    others = [project.add.enqueue(number, 1) for number in range(120)]
    with shop.worker(4):
        for other in others:
            shop.wait(other, lambda other=other: other.is_finished)
    pages: list[int] = []
    browse = Admin.browse

    def counted(admin: Admin, topic: str, *args: Any, **options: Any) -> Any:
        page = browse(admin, topic, *args, **options)
        if topic.endswith("results"):
            pages.append(len(page.messages))
        return page

    monkeypatch.setattr(Admin, "browse", counted)
    waiting.refresh()
    first, pages[:] = list(pages), []
    waiting.refresh()
    assert sum(first) < 120  # one of eight partitions has about 2 * 120 / 8
    assert sum(pages) == 0
    assert len(pages) == 1


def test_without_a_time_to_live_there_are_no_results(broker: InMemoryBroker, admin: Admin) -> None:
    with made(broker, result_ttl_s=0) as shop:
        result = project.note.enqueue("unheard")
        assert shop.backend.supports_get_result is False
        with pytest.raises(NotImplementedError):
            result.refresh()
        with shop.worker():
            done = lambda: admin.queue_counts(shop.prefix + "workers", shop.prefix + "default")  # noqa: E731
            deadline = datetime.now(UTC) + timedelta(seconds=WITHIN_S)
            while not project.noted or done().in_flight:
                assert datetime.now(UTC) < deadline
        with pytest.raises(TopicNotFound):
            admin.describe(shop.prefix + "results")


def test_the_results_topic_is_compacted_and_forgets(shop: Project, admin: Admin) -> None:
    shop.finish(project.add.enqueue(1, 1))
    config = admin.describe(shop.prefix + "results").config
    assert (config.cleanup, config.retention_ms) == ("compact", 24 * 3600 * 1000)


# --- settings --------------------------------------------------------------------------------------------------------


def checked(**options: Any) -> list[str]:
    settings = {"BACKEND": "portalmq.django.TaskBackend", "OPTIONS": options.pop("options", {}), **options}
    with override_settings(TASKS={"default": settings}):
        return [message.id for message in project.task_backends["default"].check()]


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"options": {"bootstrap": "http://localhost:5000"}}, []),
        ({"options": {"bootstrap": ["http://a:5000", "http://b:5000"]}}, []),
        ({"options": {"bootstrap": ("http://a:5000",)}}, []),
        ({"options": {"bootstrp": "http://localhost:5000"}}, ["portalmq.E001"]),
        ({"options": {"bootstrap": 5000}}, ["portalmq.E001"]),
        ({"options": {"max_attempts": 0}}, ["portalmq.E001"]),
        ({"options": {"bootstrap": "ftp://localhost"}}, ["portalmq.E002"]),
        ({"options": {"tls_ca": "/no/such/file"}}, ["portalmq.E002"]),
        ({"QUEUES": ["mail box"]}, ["portalmq.E003"]),
        ({"QUEUES": ["results"]}, ["portalmq.E003"]),
        ({"QUEUES": []}, ["portalmq.W001"]),
    ],
)
def test_settings_are_checked_without_a_broker(settings: dict[str, Any], ids: list[str]) -> None:
    assert checked(**settings) == ids


def test_the_queue_of_the_results_is_refused_for_tasks(shop: Project) -> None:
    with pytest.raises(InvalidTask):
        project.add.using(queue_name="results")


def test_options_are_one_key_for_all_threads() -> None:
    one, other = (BackendOptions.read({"bootstrap": ["http://a:5000"]}) for _ in range(2))
    assert one == other
    assert one.producer() is other.producer()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--queues", "mail,post"], "post: no such queue"),
        (["--queues", ","], "none: no such queue"),
        (["--backend", "second"], "TASKS has no 'second'"),
        (["-c", "0"], "--concurrency is 1 to 1,000"),
        (["-c", "1001"], "--concurrency is 1 to 1,000"),
    ],
)
@pytest.mark.parametrize("reload", ["--reload", "--no-reload"])
def test_the_command_refuses_what_it_cannot_run(
    shop: Project, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str, reload: str
) -> None:
    """Before a reloader starts, as an error in its thread ends nothing."""
    monkeypatch.setattr("django.utils.autoreload.run_with_reloader", lambda *_, **__: pytest.fail("it reloads"))
    with pytest.raises(CommandError, match=said):
        call_command("portalmq_worker", *arguments, reload, stdout=io.StringIO())


def test_importing_the_package_imports_no_framework() -> None:
    program = (
        "import sys, portalmq, portalmq.django\n"
        "from portalmq import Producer, Consumer, Admin\n"
        "print({'django', 'django_tasks', 'dramatiq', 'taskiq'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "set()\n"
