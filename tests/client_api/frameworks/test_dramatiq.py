"""The broker of dramatiq, with dramatiq's own worker, against a broker in this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("dramatiq", reason="pip install 'portalmq[dramatiq]'")

import dramatiq
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout, QueueNotFound
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend

from portalmq import Admin, Consumer, Producer
from portalmq.dramatiq import PortalMQBroker
from portalmq.testing import InMemoryBroker

_numbers = itertools.count(1)
WITHIN_MS = 60_000


@pytest.fixture(scope="module")
def server() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as server:
        yield server


@pytest.fixture
def broker(server: InMemoryBroker) -> Iterator[PortalMQBroker]:
    number = next(_numbers)
    broker = PortalMQBroker(server.url, topic_prefix=f"d{number}.", group=f"d{number}")
    dramatiq.set_broker(broker)
    yield broker
    broker.close()


@pytest.fixture
def admin(server: InMemoryBroker) -> Iterator[Admin]:
    with Admin(server.url) as admin:
        yield admin


@contextmanager
def working(broker: PortalMQBroker, threads: int = 4, timeout_ms: int = 100) -> Iterator[Any]:
    worker = dramatiq.Worker(broker, worker_timeout=timeout_ms, worker_threads=threads)
    if threads == 1:
        worker.queue_prefetch = 1  # the order of what is prefetched is dramatiq's
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def finish(broker: PortalMQBroker, worker: Any) -> None:
    for queue in broker.get_declared_queues():
        broker.join(queue, timeout=WITHIN_MS, interval=10)
    worker.join()


def wait_until_idle(broker: PortalMQBroker, admin: Admin, *, scheduled: int) -> None:
    deadline = time.monotonic() + WITHIN_MS / 1000
    while True:
        counts = admin.queue_counts(broker._group, broker.queues["default"])
        if (counts.ready, counts.in_flight, counts.scheduled) == (0, 0, scheduled):
            return
        assert time.monotonic() < deadline, counts


def test_actors_get_their_messages(broker: PortalMQBroker) -> None:
    got: list[int] = []
    put = dramatiq.actor(got.append, actor_name="put")
    for number in range(100):
        put.send(number)
    with working(broker) as worker:
        finish(broker, worker)
    assert sorted(got) == list(range(100))


def test_a_failing_actor_is_retried_and_then_succeeds(broker: PortalMQBroker) -> None:
    attempts: list[int] = []

    @dramatiq.actor(min_backoff=1, max_backoff=1)
    def third_time() -> None:
        attempts.append(1)
        if len(attempts) < 3:
            raise RuntimeError("not yet")

    third_time.send()
    with working(broker) as worker:
        finish(broker, worker)
    assert len(attempts) == 3


def test_a_message_that_is_given_up_is_a_dead_letter_with_its_reason(broker: PortalMQBroker, admin: Admin) -> None:
    @dramatiq.actor(max_retries=0)
    def never() -> None:
        raise ValueError("no way")

    sent = never.send()
    with working(broker) as worker:
        finish(broker, worker)
    [dead] = admin.dead_letters(broker._group, broker.queues["default"])
    assert dead.headers["portalmq-dead-reason"] == "ValueError: no way"
    assert dead.json()["message_id"] == sent.message_id


def test_a_message_of_an_unknown_actor_is_a_dead_letter(broker: PortalMQBroker, admin: Admin) -> None:
    broker.declare_queue("default")
    broker.enqueue(dramatiq.Message(queue_name="default", actor_name="gone", args=(), kwargs={}, options={}))
    with working(broker) as worker:
        finish(broker, worker)
    [dead] = admin.dead_letters(broker._group, broker.queues["default"])
    assert dead.headers["portalmq-dead-reason"].startswith("ActorNotFound")


def test_what_is_no_message_is_a_dead_letter_and_stops_no_worker(broker: PortalMQBroker, admin: Admin) -> None:
    got: list[int] = []
    put = dramatiq.actor(got.append, actor_name="put")
    with Producer(admin.urls[0]) as producer:
        producer.send(broker.queues["default"], b"\xff").result()
    put.send(1)
    with working(broker) as worker:
        finish(broker, worker)
    assert got == [1]
    assert [dead.value for dead in admin.dead_letters(broker._group, broker.queues["default"])] == [b"\xff"]


def test_delayed_messages_wait_at_the_broker(broker: PortalMQBroker, server: InMemoryBroker, admin: Admin) -> None:
    got: list[str] = []
    put = dramatiq.actor(got.append, actor_name="put")
    put.send_with_options(args=("second",), delay=2 * 3_600_000)
    put.send_with_options(args=("first",), delay=3_600_000)
    assert len(list(admin.scheduled(broker.queues["default"]))) == 2
    assert broker.get_declared_delay_queues() == set()
    with working(broker, threads=1) as worker:
        with pytest.raises(QueueJoinTimeout):
            broker.join("default", timeout=0)
        server.advance(3_601)
        wait_until_idle(broker, admin, scheduled=1)  # no lease runs while the clock goes on
        server.advance(3_600)
        finish(broker, worker)
    assert got == ["first", "second"]


def test_waiting_messages_come_by_broker_priority(broker: PortalMQBroker) -> None:
    got: list[str] = []
    low = dramatiq.actor(lambda: got.append("low"), actor_name="low")
    high = dramatiq.actor(lambda: got.append("high"), actor_name="high", broker_priority=9)
    low.send()
    high.send()
    low.send_with_options(broker_priority=31)
    with working(broker, threads=1) as worker:
        finish(broker, worker)
    assert got == ["low", "high", "low"]


def test_middleware_and_results_work(server: InMemoryBroker) -> None:
    number = next(_numbers)
    results = Results(backend=StubBackend())
    broker = PortalMQBroker(server.url, topic_prefix=f"d{number}.", middleware=[results, CurrentMessage()])
    dramatiq.set_broker(broker)

    @dramatiq.actor(store_results=True)
    def who(left: int) -> list[Any]:
        message = CurrentMessage.get_current_message()
        return [left, message.message_id]

    sent = who.send(5)
    with working(broker) as worker:
        finish(broker, worker)
        assert sent.get_result(block=True) == [5, sent.message_id]
    broker.close()


def test_a_message_of_a_worker_that_vanished_comes_again(broker: PortalMQBroker, server: InMemoryBroker) -> None:
    got: list[int] = []
    put = dramatiq.actor(got.append, actor_name="put")
    put.send(1)
    vanished = Consumer(broker.queues["default"], group=broker._group, bootstrap=server.url, manual_ack=True)
    assert len(vanished.poll(60, 1)) == 1  # and no ack
    server.advance(31)
    with working(broker) as worker:
        finish(broker, worker)
    vanished.close()
    assert got == [1]


def test_prefetched_messages_go_back_at_a_stop(broker: PortalMQBroker, admin: Admin) -> None:
    entered, gate = threading.Event(), threading.Event()

    @dramatiq.actor
    def wait() -> None:
        entered.set()
        gate.wait(60)

    for _ in range(5):
        wait.send()
    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    assert entered.wait(60)
    stopping = threading.Thread(target=worker.stop)
    for thread in worker.workers:
        thread.stop()
    gate.set()
    stopping.start()
    stopping.join()
    counts = admin.queue_counts(broker._group, broker.queues["default"])
    assert (counts.ready, counts.in_flight, counts.dead) == (4, 0, 0)
    assert {each.message.delivery_count for each in admin.unfinished(broker._group, broker.queues["default"])} == {0}


def test_a_consumer_takes_no_more_than_its_prefetch(broker: PortalMQBroker, admin: Admin) -> None:
    put = dramatiq.actor(lambda: None, actor_name="put")
    for _ in range(5):
        put.send()
    consumer = broker.consume("default", prefetch=2, timeout=10)
    first, second, none = next(consumer), next(consumer), next(consumer)
    assert none is None
    assert admin.queue_counts(broker._group, broker.queues["default"]).in_flight == 2
    consumer.ack(first)
    third = next(consumer)
    assert third.message_id not in {first.message_id, second.message_id}
    consumer.requeue([second, third])
    consumer.close()
    assert admin.queue_counts(broker._group, broker.queues["default"]).ready == 4


def test_an_ack_under_a_lost_lease_is_no_error(broker: PortalMQBroker, server: InMemoryBroker) -> None:
    dramatiq.actor(lambda: None, actor_name="put").send()
    slow, quick = broker.consume("default", timeout=1_000), broker.consume("default", timeout=60_000)
    message = next(slow)
    server.advance(31)
    again = next(quick)
    assert again.message_id == message.message_id
    slow.ack(message)
    quick.ack(again)
    slow.close()
    quick.close()


def test_flush_deletes_waiting_and_delayed_messages(broker: PortalMQBroker) -> None:
    put = dramatiq.actor(lambda: None, actor_name="put")
    broker.flush_all()  # there is no topic yet
    put.send()
    put.send_with_options(delay=3_600_000)
    broker.flush_all()
    broker.join("default", timeout=WITHIN_MS)


def test_an_undeclared_queue_is_refused(broker: PortalMQBroker) -> None:
    message = dramatiq.Message(queue_name="other", actor_name="a", args=(), kwargs={}, options={})
    for call in (
        lambda: broker.consume("other"),
        lambda: broker.join("other"),
        lambda: broker.flush("other"),
        lambda: broker.enqueue(message),
    ):
        with pytest.raises(QueueNotFound):
            call()


def test_a_broker_that_is_gone_is_a_connection_error_of_dramatiq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.dramatiq.ENQUEUE_TIMEOUT_S", 0.2)
    broker = PortalMQBroker("http://127.0.0.1:9")
    broker.declare_queue("default")
    began = time.monotonic()
    message = dramatiq.Message(queue_name="default", actor_name="a", args=(), kwargs={}, options={})
    with pytest.raises(ConnectionClosed):
        broker.enqueue(message)
    assert time.monotonic() >= began
