"""A worker with a broker in this process: what becomes of messages, whatever their handlers do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from portalmq import Admin, App, Forbidden, Message, Producer, Reject, Retry
from portalmq.testing import InMemoryBroker

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as broker:
        yield broker


@pytest.fixture(scope="module")
def producer(broker: InMemoryBroker) -> Iterator[Producer]:
    with Producer(transport=broker.transport, linger_ms=0) as producer:
        yield producer


@pytest.fixture(scope="module")
def admin(broker: InMemoryBroker) -> Iterator[Admin]:
    with Admin(transport=broker.transport) as admin:
        yield admin


@pytest.fixture
def app(broker: InMemoryBroker) -> App:
    return App(broker.url)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)[:150].replace("[", "-").replace("]", "")


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def ready(admin: Admin, group: str) -> dict[str, int]:
    counts = admin.group(group)
    return {"ready": counts.ready or 0, "in_flight": counts.in_flight or 0, "dead": counts.dead or 0}


NOTHING = {"ready": 0, "in_flight": 0, "dead": 0}


def outcomes(worker: Any) -> dict[str, int]:
    return {name: count for name, count in worker.state().handlers[0].outcomes.items() if count}


def test_returning_acks(app: App, topic: str, producer: Producer, admin: Admin) -> None:
    handled: list[int] = []

    @app.handler(topic, group=topic)
    def handle(message: Message) -> None:
        handled.append(message.json())

    for number in range(100):
        producer.send(topic, number)
    with app.running(4) as worker:
        until(lambda: len(handled) == 100)
        until(lambda: outcomes(worker) == {"acked": 100})
    assert sorted(handled) == list(range(100))
    assert ready(admin, topic) == NOTHING


def test_raising_nacks_with_the_exception_as_reason(
    app: App, topic: str, producer: Producer, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    @app.handler(topic, group=topic, max_deliveries=2, retry_backoff_s=0)
    def handle(message: Message) -> None:
        raise KeyError("no such customer")

    producer.send(topic, 1)
    with caplog.at_level(logging.WARNING, "portalmq.worker"), app.running() as worker:
        until(lambda: outcomes(worker) == {"failed": 2})
    (dead,) = admin.dead_letters(topic, topic)
    assert dead.headers["portalmq-dead-reason"] == "KeyError: 'no such customer'"
    assert dead.headers["portalmq-delivery-count"] == "2"
    assert "no such customer" in caplog.text
    assert "delivery 2" in caplog.text


def test_reject_makes_a_dead_letter_at_once(app: App, topic: str, producer: Producer, admin: Admin) -> None:
    @app.handler(topic, group=topic)
    def handle(message: Message) -> None:
        raise Reject("not ours")

    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: outcomes(worker) == {"rejected": 1})
    (dead,) = admin.dead_letters(topic, topic)
    assert (dead.headers["portalmq-dead-reason"], dead.headers["portalmq-delivery-count"]) == ("not ours", "1")


def test_retry_sets_the_delay(app: App, topic: str, producer: Producer, broker: InMemoryBroker, admin: Admin) -> None:
    seen: list[int] = []

    @app.handler(topic, group=topic)
    def handle(message: Message) -> None:
        seen.append(message.delivery_count)
        if message.delivery_count == 1:
            raise Retry(3600)

    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: outcomes(worker) == {"retried": 1})
        assert seen == [1]
        broker.advance(3601)
        until(lambda: outcomes(worker) == {"retried": 1, "acked": 1})
    assert seen == [1, 2]


@pytest.mark.parametrize("is_async", [False, True])
def test_no_more_than_the_concurrency_run_at_a_time(app: App, topic: str, producer: Producer, is_async: bool) -> None:
    full, go = threading.Semaphore(0), threading.Event()
    running, most = [0], [0]
    lock = threading.Lock()

    def enter(by: int) -> None:
        with lock:
            running[0] += by
            most[0] = max(most[0], running[0])

    def work(message: Message) -> None:
        enter(1)
        full.release()
        go.wait(WITHIN_S)
        enter(-1)

    async def work_async(message: Message) -> None:
        enter(1)
        full.release()
        await asyncio.to_thread(go.wait, WITHIN_S)
        enter(-1)

    app.handler(topic, group=topic, concurrency=8)(work_async if is_async else work)
    for number in range(40):
        producer.send(topic, number)
    producer.flush()
    with app.running(1) as worker:
        for _ in range(8):
            assert full.acquire(timeout=WITHIN_S)
        assert worker.state().handlers[0].running == 8
        assert not full.acquire(timeout=0.05)
        go.set()
        until(lambda: outcomes(worker) == {"acked": 40})
    assert most == [8]


def test_a_late_handler_is_interrupted_and_its_message_comes_again(
    app: App, topic: str, producer: Producer, admin: Admin
) -> None:
    ends: list[str] = []

    @app.handler(topic, group=topic, timeout_s=0.1, max_deliveries=2, retry_backoff_s=0)
    def handle(message: Message) -> None:
        try:
            until(lambda: False)
        except Exception:  # noqa: BLE001 - as careless handlers have it
            ends.append("swallowed")
        finally:
            ends.append("interrupted")

    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: outcomes(worker) == {"timeout": 2})
    assert ends == ["interrupted"] * 2
    (dead,) = admin.dead_letters(topic, topic)
    assert dead.headers["portalmq-dead-reason"] == "timeout: the handler took over 0.1 s"


def test_a_late_async_handler_is_cancelled(app: App, topic: str, producer: Producer) -> None:
    ends: list[str] = []

    @app.handler(topic, group=topic, timeout_s=0.05, max_deliveries=2)
    async def handle(message: Message) -> None:
        try:
            await asyncio.sleep(WITHIN_S)
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: outcomes(worker) == {"timeout": 2})
    assert ends == ["cancelled"] * 2


def test_a_timeout_error_of_an_async_handler_is_its_failure(app: App, topic: str, producer: Producer) -> None:
    @app.handler(topic, group=topic, max_deliveries=1)
    async def handle(message: Message) -> None:
        raise TimeoutError("the database is slow")

    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: outcomes(worker) == {"failed": 1})


def test_a_stuck_handler_keeps_its_place_and_its_message_goes_back(
    app: App, topic: str, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portalmq.worker.runner.STUCK_AFTER_S", 0.1)
    go, begun = threading.Event(), threading.Semaphore(0)

    @app.handler(topic, group=topic, concurrency=1, timeout_s=0.05, max_deliveries=1)
    def handle(message: Message) -> None:
        begun.release()
        lock = threading.Lock()
        lock.acquire()
        while not go.is_set():
            try:
                lock.acquire(timeout=0.5)
            except BaseException:  # noqa: BLE001 - it cannot be interrupted
                continue

    producer.send(topic, 1)
    with app.running() as worker:
        assert begun.acquire(timeout=WITHIN_S)
        until(lambda: outcomes(worker) == {"timeout": 1})
        state = worker.state()
        assert (state.handlers[0].stuck, state.is_ready) == (1, False)
        go.set()
        until(lambda: worker.state().handlers[0].stuck == 0)
        assert outcomes(worker) == {"timeout": 1}, "its late end counts for nothing"


def test_leases_are_kept_while_a_handler_runs(
    app: App, topic: str, producer: Producer, broker: InMemoryBroker, admin: Admin
) -> None:
    go, counts = threading.Event(), []

    @app.handler(topic, group=topic, visibility_timeout_s=1, timeout_s=None)
    def handle(message: Message) -> None:
        counts.append(message.delivery_count)
        go.wait(WITHIN_S)

    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: counts)
        began = time.monotonic()
        until(lambda: time.monotonic() - began > 1.5)
        go.set()
        until(lambda: outcomes(worker) == {"acked": 1})
    assert counts == [1]


def test_a_message_whose_lease_was_lost_is_not_acked_by_its_first_handler(
    app: App, topic: str, producer: Producer, broker: InMemoryBroker
) -> None:
    go, counts = threading.Event(), []

    @app.handler(topic, group=topic, concurrency=2)
    def handle(message: Message) -> None:
        counts.append(message.delivery_count)
        if message.delivery_count == 1:
            go.wait(WITHIN_S)

    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: counts == [1])
        broker.advance(31)
        until(lambda: outcomes(worker) == {"acked": 1})
        go.set()
        until(lambda: worker.state().handlers[0].running == 0)
        until(lambda: outcomes(worker).keys() == {"acked", "lost"} or outcomes(worker) == {"acked": 2})
    assert counts == [1, 2]


def test_stopping_lets_handlers_end(app: App, topic: str, producer: Producer, admin: Admin) -> None:
    begun, go = threading.Event(), threading.Event()

    @app.handler(topic, group=topic, concurrency=1)
    def handle(message: Message) -> None:
        begun.set()
        go.wait(WITHIN_S)

    producer.send(topic, 1)
    producer.send(topic, 2)
    with app.running(grace_s=WITHIN_S):
        assert begun.wait(WITHIN_S)
        threading.Timer(0.05, go.set).start()
    assert ready(admin, topic) == {"ready": 1, "in_flight": 0, "dead": 0}


def test_after_the_grace_messages_go_back_uncounted(app: App, topic: str, producer: Producer, admin: Admin) -> None:
    begun, go, counts = threading.Semaphore(0), threading.Event(), []

    @app.handler(topic, group=topic)
    def handle(message: Message) -> None:
        counts.append(message.delivery_count)
        begun.release()
        go.wait(WITHIN_S)

    producer.send(topic, 1)
    for _ in range(2):
        with app.running(grace_s=0.01):
            assert begun.acquire(timeout=WITHIN_S)
        assert ready(admin, topic) == {"ready": 1, "in_flight": 0, "dead": 0}
    go.set()
    assert counts == [1, 1]


@dataclasses.dataclass
class Order:
    id: int
    tags: list[str] = dataclasses.field(default_factory=list)


class Paid(msgspec.Struct):
    id: int


def test_a_payload_is_decoded_to_the_type_of_the_parameter(app: App, topic: str, producer: Producer) -> None:
    handled: list[Any] = []

    @app.handler(topic, group=topic)
    def handle(order: Order, message: Message) -> None:
        handled.append((order, message.key))

    producer.send(topic, {"id": 7, "tags": ["new"]}, key="k")
    with app.running():
        until(lambda: handled)
    assert handled == [(Order(7, ["new"]), b"k")]


def test_a_payload_of_another_type_is_a_dead_letter_at_once(
    app: App, topic: str, producer: Producer, admin: Admin
) -> None:
    @app.handler(topic, group=topic)
    async def handle(paid: Paid) -> None:
        raise AssertionError("it is not called")

    producer.send(topic, {"id": "seven"})
    producer.send(topic, b"\xff")
    with app.running() as worker:
        until(lambda: outcomes(worker) == {"rejected": 2})
    reasons = [dead.headers["portalmq-dead-reason"] for dead in admin.dead_letters(topic, topic)]
    assert "the payload is not Paid: Expected `int`, got `str`" in reasons[0]


def test_settings_reach_the_group(app: App, topic: str, admin: Admin) -> None:
    @app.handler(topic, group=topic, max_deliveries=3, retry_backoff_s=(1, 10.5), ordering="key")
    def handle(message: Message) -> None: ...

    with app.running() as worker:
        until(lambda: worker.state().is_ready)
    config = admin.group(topic).config
    assert (config.max_deliveries, config.retry_backoff_ms, config.ordering) == (3, (1000, 10500), "key")


def test_without_settings_a_token_that_may_consume_is_enough(
    app: App, topic: str, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise Forbidden("this token may consume")

    handled: list[int] = []

    @app.handler(topic, group=topic)
    def handle(number: int) -> None:
        handled.append(number)

    monkeypatch.setattr(Admin, "create_group", refuse)
    monkeypatch.setattr(Admin, "group", refuse)
    producer.send(topic, 1)
    with app.running() as worker:
        until(lambda: outcomes(worker) == {"acked": 1})
    assert handled == [1]


def test_a_handler_that_exits_does_not_end_the_worker(app: App, topic: str, producer: Producer) -> None:
    @app.handler(topic, group=topic, max_deliveries=1)
    def handle(message: Message) -> None:
        raise SystemExit(3)

    producer.send(topic, 1)
    producer.send(topic, 2)
    with app.running(1) as worker:
        until(lambda: outcomes(worker) == {"failed": 2})


def test_handlers_may_send(app: App, topic: str, producer: Producer) -> None:
    handled: list[int] = []

    @app.handler(topic, group=topic)
    def first(message: Message) -> None:
        app.producer.send(f"{topic}.next", message.json() + 1)

    @app.handler(f"{topic}.next", group=topic)
    def second(number: int) -> None:
        handled.append(number)

    producer.send(topic, 1)
    with app.running():
        until(lambda: handled == [2])


def test_a_group_of_another_mode_is_a_fault_that_is_told(
    app: App, topic: str, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    admin.create_group(topic, mode="stream")

    @app.handler(topic, group=topic)
    def handle(message: Message) -> None: ...

    with app.running() as worker:
        until(lambda: worker.state().handlers[0].fault)
        state = worker.state()
        assert not state.is_ready
        assert "GroupModeMismatch" in state.faults[0]
