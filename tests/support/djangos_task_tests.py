"""Runs Django's own tests of the task framework with portalmq.django in the place of its two backends.

    python djangos_task_tests.py TESTS URL

TESTS is the folder `tests` of Django's sdist, URL a broker. Two subclasses take the names of DummyBackend, whose tasks
wait, and of ImmediateBackend, whose tasks have run when enqueue returns: a worker runs each at once.
"""

from __future__ import annotations

import itertools
import os
import sys
import unittest
from typing import Any

tests, url = sys.argv[1:]
sys.path.insert(0, tests)

import django  # noqa: E402
from django.conf import settings  # noqa: E402

settings.configure(
    INSTALLED_APPS=["portalmq.django"],
    USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()

from django.tasks.backends import dummy, immediate  # noqa: E402
from django.test.utils import get_runner, setup_test_environment  # noqa: E402

from portalmq.django import TaskBackend  # noqa: E402
from portalmq.django import worker as worker_module  # noqa: E402

# Tests of what only the replaced backends do, by name.
NOT_FOR_A_BROKER = {
    "test_using_correct_backend": "it expects no options",
    "test_options": "it is about the options of another backend",
    "test_no_enqueue": "it is about BaseTaskBackend",
    "test_check": "it expects no warning of empty QUEUES, with which a worker has nothing to read",
    "test_clear": "DummyBackend can forget tasks",
    "test_refresh_result": "it changes the stored result in memory",
    "test_refresh_result_async": "the same",
    "test_cannot_get_result": "ImmediateBackend has no results",
    "test_cannot_get_result_async": "the same",
    "test_cannot_refresh_result": "the same",
    "test_cannot_pass_run_after": "ImmediateBackend cannot defer",
    "test_throws_keyboard_interrupt": "it runs tasks in the thread that Ctrl-C interrupts",
}
_numbers = itertools.count()
worker_module.POLL_S = 0.1


class Waiting(TaskBackend):
    """As DummyBackend: tasks wait, and `results` lists them."""

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        prefix = f"own{os.getpid()}-{next(_numbers)}."
        options = {"bootstrap": url, "topic_prefix": prefix, "group": prefix + "g"}
        super().__init__(alias, {**params, "OPTIONS": options})
        self.listed: list[Any] = []

    @property
    def results(self) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        return super().results if caller.startswith("portalmq.") else self.listed

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        self.listed.append(result)
        return result

    def clear(self) -> None:
        self.listed.clear()


class AtOnce(Waiting):
    """As ImmediateBackend: a worker has run the task when enqueue returns."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        consumer = self.portalmq.consumer([self.portalmq.topic(task.queue_name)])
        with consumer:
            for message in consumer.poll(60, 1):
                worker_module.TaskRun(self, consumer, message, "w" * 32).run()
        result.refresh()
        return result


dummy.DummyBackend = Waiting
immediate.ImmediateBackend = AtOnce

suite, excluded = unittest.TestSuite(), list[str]()


def add(found: Any) -> None:
    for each in found:
        if isinstance(each, unittest.TestSuite):
            add(each)
        elif each._testMethodName in NOT_FOR_A_BROKER:
            excluded.append(each._testMethodName)
        else:
            suite.addTest(each)


setup_test_environment()
runner = get_runner(settings)(verbosity=0, interactive=False)
databases = runner.setup_databases()
for name in ("test_tasks", "test_dummy_backend", "test_immediate_backend", "test_custom_backend"):
    add(unittest.defaultTestLoader.loadTestsFromName(f"tasks.{name}"))
outcome = unittest.TextTestRunner(verbosity=1).run(suite)
runner.teardown_databases(databases)
print(f"django {django.__version__}: {outcome.testsRun} tests, {len(excluded)} are not for a broker")
sys.exit(not outcome.wasSuccessful())
