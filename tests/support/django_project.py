"""A Django project in this process, for tests of the task backend: settings, and a few tasks."""

from __future__ import annotations

import threading
from typing import Any

import django
from django.conf import settings

if not settings.configured:
    settings.configure(
        INSTALLED_APPS=["portalmq.django"],
        USE_TZ=True,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        TASKS={"default": {"BACKEND": "portalmq.django.TaskBackend", "QUEUES": ["default", "mail"]}},
    )
    django.setup()

from portalmq.django.compat import task_backends

try:
    from django.tasks import task
except ModuleNotFoundError:
    from django_tasks import task

__all__ = ["add", "fail", "note", "noted", "open_gate", "report", "task_backends", "wait_at_gate"]

noted: list[Any] = []
gate = threading.Event()


def open_gate() -> None:
    gate.set()


@task()
def add(left: int, right: int) -> int:
    return left + right


@task()
def note(what: Any) -> None:
    noted.append(what)


@task(queue_name="mail")
def fail(why: str, until_attempt: int = 99) -> str:
    noted.append(why)
    if noted.count(why) >= until_attempt:
        return "at last"
    raise ValueError(why)


@task(takes_context=True)
async def report(context: Any, about: str) -> list[Any]:
    return [about, context.attempt, context.task_result.id]


@task()
def return_what_is_no_json() -> Any:
    return object()


@task()
def return_too_much() -> str:
    return "x" * 2_000_000


@task()
def wait_at_gate() -> str:
    noted.append("at the gate")
    gate.wait(60)
    return "through"
