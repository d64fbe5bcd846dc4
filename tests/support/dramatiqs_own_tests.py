"""The conftest of dramatiq's own tests, with the broker of portalmq.dramatiq for its stub and Redis brokers.

The sdist of dramatiq has the tests without their conftest.py and common.py; this file takes the place of both.
"""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Middleware
from dramatiq.rate_limits.backends import StubBackend as StubLimits
from dramatiq.results.backends import StubBackend

from portalmq.dramatiq import PortalMQBroker

# What reaches into the parts of another broker.
NOT_FOR_THIS_BROKER = {
    "test_actors_can_be_sent_messages": "it reads the queue object of the stub",
    "test_messages_belonging_to_missing_actors_are_rejected": "it compares the stub's list of dead letters",
    "test_worker_handles_non_numeric_eta_and_logs_warning": "it writes to the queue object of the stub",
    "test_worker_handles_none_eta": "the same",
    "test_redis_unacked_messages_can_be_requeued": "it calls Redis",
    "test_redis_messages_can_be_dead_lettered": "it reads keys of Redis",
    "test_redis_dead_lettered_messages_are_cleaned_up": "the same",
    "test_redis_messages_belonging_to_missing_actors_are_rejected": "the same",
    "test_redis_requeues_unhandled_messages_on_shutdown": "the same",
    "test_redis_requeues_unhandled_delay_messages_on_shutdown": "the same",
    "test_redis_broker_can_flush_queues": "the same",
    "test_redis_broker_can_connect_via_url": "it connects to Redis",
    "test_redis_broker_can_connect_via_client": "the same",
    "test_redis_broker_raises_attribute_error_when_given_an_invalid_attribute": "it is about scripts of Redis",
    "test_redis_consumer_ack_can_retry_on_connection_error": "it replaces a script of Redis",
    "test_redis_consumer_nack_can_retry_on_connection_error": "the same",
    "test_redis_consumer_nack_does_not_raise_on_missing_id": "the same",
    "test_redis_join_race_condition": "the same",
    "test_messages_without_actor_not_crashing_lookup_options": "its results are in Redis",
}
_numbers = itertools.count()

skip_on_pypy = pytest.mark.skipif(platform.python_implementation() == "PyPy", reason="PyPy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        why = NOT_FOR_THIS_BROKER.get(item.name.partition("[")[0])
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


class Failures(Middleware):
    """Remembers the exceptions of messages that were given up, for join."""

    def __init__(self) -> None:
        self.found: list[BaseException | None] = []

    def after_nack(self, broker: Any, message: Any) -> None:
        self.found.append(message._exception)


class StubLikeBroker(PortalMQBroker):
    """Raises the exceptions of failed actors in join, as StubBroker does."""

    def __init__(self) -> None:
        name = f"own{os.getpid()}-{next(_numbers)}"
        super().__init__(os.environ["PORTALMQ_URL"], topic_prefix=f"{name}.", group=name)
        self.failures = Failures()
        self.add_middleware(self.failures)

    def join(self, queue_name: str, *, fail_fast: bool = True, timeout: int | None = None, **options: Any) -> None:
        super().join(queue_name, timeout=timeout, **options)
        for failure in self.failures.found if fail_fast else []:
            raise failure or Exception("Message failed with unknown error")


@pytest.fixture
def stub_broker() -> Iterator[Any]:
    broker = StubLikeBroker()
    broker.emit_after("process_boot")
    dramatiq.set_broker(broker)
    yield broker
    broker.emit_before("process_stop")
    broker.close()


@contextmanager
def worker(*args: Any, **options: Any) -> Iterator[Any]:
    made = dramatiq.Worker(*args, **options)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def stub_worker(stub_broker: Any) -> Iterator[Any]:
    with worker(stub_broker, worker_timeout=100, worker_threads=32) as made:
        yield made


@pytest.fixture
def redis_worker(redis_broker: Any) -> Iterator[Any]:
    with worker(redis_broker, worker_timeout=100, worker_threads=32) as made:
        yield made


@pytest.fixture
def redis_broker(stub_broker: Any) -> Any:
    return stub_broker


@pytest.fixture
def result_backend() -> Any:
    return StubBackend()


@pytest.fixture
def result_backends() -> dict[str, Any]:
    return {"stub": StubBackend()}


@pytest.fixture
def rate_limiter_backend() -> Any:
    return StubLimits()


@pytest.fixture
def redis_result_backend() -> None: ...
