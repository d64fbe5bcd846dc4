"""kombu's calls, and what a broker sees of them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import kombu
import pytest
from kombu.asynchronous.hub import Hub
from kombu.pidbox import Mailbox
from support.kombu_broker import KombuBroker
from support.scripted_broker import lose_answer, refuse

from portalmq.errors import Unauthorized, Unavailable
from portalmq.kombu.channel import Channel


@pytest.fixture
def broker() -> Iterator[KombuBroker]:
    with KombuBroker() as broker:
        yield broker


@pytest.fixture
def connection(broker: KombuBroker) -> Iterator[kombu.Connection]:
    with broker.connect() as connection:
        yield connection


JOBS = kombu.Queue("jobs", kombu.Exchange("jobs", type="direct"), routing_key="jobs")


def publish(connection: kombu.Connection, bodies: Any, queue: kombu.Queue = JOBS, **options: Any) -> None:
    producer = kombu.Producer(connection.default_channel)
    for body in bodies:
        producer.publish(
            body, exchange=queue.exchange, routing_key=queue.routing_key, declare=[queue], serializer="json", **options
        )


class Sink:
    """A consumer that keeps what it gets."""

    def __init__(
        self, connection: kombu.Connection, queues: list[kombu.Queue], *, acks: bool = True, **options: Any
    ) -> None:
        self.bodies: list[Any] = []
        self.messages: list[Any] = []
        self.connection = connection
        self.acks = acks
        self.channel = connection.channel()
        self.consumer = kombu.Consumer(self.channel, queues, callbacks=[self.got], **options)
        self.consumer.consume()

    def got(self, body: Any, message: Any) -> None:
        self.bodies.append(body)
        self.messages.append(message)
        if self.acks:
            message.ack()

    def drain(self, count: int) -> list[Any]:
        while len(self.bodies) < count:
            self.connection.drain_events(timeout=30)
        return self.bodies


def test_a_publish_is_one_request(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, [1])
    before = len(broker.calls)
    with connection.Producer() as producer:
        for body in range(5):
            producer.publish(body, routing_key="jobs", serializer="json", retry=True)
    assert [call.path for call in broker.calls[before:]] == ["/v1/topics/jobs/messages"] * 5
    connection.close()
    assert not connection.connected


def test_a_queue_is_a_topic_and_a_group_of_its_name(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, [1, 2, 3])
    sink = Sink(connection, [JOBS])
    assert sink.drain(3) == [1, 2, 3]
    assert broker.tasks("jobs") == [1, 2, 3]
    sink.channel.close()
    assert len(broker.done) == 3
    assert broker.calls_of("POST", "/v1/groups/jobs/receive")


def test_a_prefix_is_put_before_all_names(broker: KombuBroker) -> None:
    with broker.connect(topic_prefix="shop.") as connection:
        publish(connection, [1])
        Sink(connection, [JOBS]).drain(1)
    assert set(broker.topics) == {"shop.jobs", "shop.kombu.bindings"}


def test_the_prefetch_is_one_receive_and_acks_travel_with_the_next(
    broker: KombuBroker, connection: kombu.Connection
) -> None:
    publish(connection, range(8))
    sink = Sink(connection, [JOBS], acks=False, prefetch_count=4)
    sink.drain(4)
    assert broker.held() == 4
    for message in sink.messages:
        message.ack()
    sink.drain(8)
    receives = [call.json() for call in broker.calls_of("POST", "/v1/groups/jobs/receive")]
    asking = [receive for receive in receives if receive["max_messages"] == 4]
    assert asking
    assert any(receive.get("ack") for receive in receives)


def test_a_channel_never_holds_more_than_its_prefetch(broker: KombuBroker, connection: kombu.Connection) -> None:
    queues = [kombu.Queue(name, kombu.Exchange(""), routing_key=name) for name in "ab"]
    for queue in queues:
        publish(connection, range(5), queue)
    sink = Sink(connection, queues, acks=False, prefetch_count=2)
    for count in range(2, 11):
        sink.drain(count)
        assert len(sink.bodies) == count
        assert len(sink.channel.qos) == 2
        sink.messages[count - 2].ack()
    assert sorted(sink.bodies) == sorted([*range(5), *range(5)])


def test_what_is_not_acked_goes_back_uncounted_when_the_channel_closes(
    broker: KombuBroker, connection: kombu.Connection
) -> None:
    publish(connection, range(3))
    sink = Sink(connection, [JOBS], acks=False)
    sink.drain(2)
    sink.messages[0].ack()
    sink.channel.close()
    assert broker.held() == 0
    assert len(broker.done) == 1
    nacks = [call.json() for call in broker.calls_of("POST", "/v1/groups/jobs/nack")]
    assert all(nack["unseen"] for nack in nacks)


def test_a_requeued_message_comes_again(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, ["x"])
    sink = Sink(connection, [JOBS], acks=False)
    sink.drain(1)
    sink.messages[0].requeue()
    sink.drain(2)
    assert sink.messages[1].delivery_info["redelivered"]
    (nack,) = [call.json() for call in broker.calls_of("POST", "/v1/groups/jobs/nack")]
    assert not nack.get("unseen")  # else no later delivery would show that it is one
    sink.messages[1].reject()
    sink.channel.close()
    assert len(broker.done) == 1


def test_the_messages_of_one_receive_are_delivered_together(broker: KombuBroker, connection: kombu.Connection) -> None:
    for count in range(2, 22):
        publish(connection, range(count))
        sink = Sink(connection, [JOBS])
        connection.drain_events(timeout=30)
        assert sink.bodies == list(range(count))
        sink.channel.close()


def test_what_a_cancelled_consumer_was_not_given_goes_back_and_keeps_its_order(
    broker: KombuBroker, connection: kombu.Connection
) -> None:
    publish(connection, range(3))
    first = Sink(connection, [JOBS])
    assert connection.transport.session.inbox.wait(30)
    first.consumer.cancel()
    assert broker.held() == 0
    nacks = [call.json() for call in broker.calls_of("POST", "/v1/groups/jobs/nack")]
    assert [(len(nack["receipts"]), nack["unseen"]) for nack in nacks] == [(3, True)]
    with broker.connect() as other:
        assert json.loads(JOBS(other.default_channel).get(no_ack=True).body) == 0
    second = Sink(connection, [JOBS])
    assert second.drain(2) == [1, 2]
    assert first.bodies == []


def test_a_lost_answer_to_a_receive_costs_nothing(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, range(3))
    broker.script("POST", "/v1/groups/jobs/receive", [lose_answer, refuse(503, "unavailable")])
    assert Sink(connection, [JOBS]).drain(3) == [0, 1, 2]
    assert max(broker.deliveries.values()) == 1


def test_a_refusal_for_good_is_raised_to_the_worker(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, [1])
    broker.script("POST", "/v1/groups/jobs/receive", [refuse(401, "unauthorized")])
    with pytest.raises(Unauthorized):
        Sink(connection, [JOBS]).drain(1)


def test_a_queue_can_be_read_message_by_message(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, [1, 2])
    channel = connection.default_channel
    bound = JOBS(channel)
    message = bound.get()
    assert json.loads(message.body) == 1
    message.ack()
    assert bound.get(no_ack=True) is not None
    assert bound.get() is None


def test_counting_and_purging(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, range(5))
    channel = connection.default_channel
    assert JOBS(channel).queue_declare(passive=True).message_count == 5
    held = JOBS(channel).get()
    assert JOBS(channel).purge() == 4
    assert JOBS(channel).queue_declare(passive=True).message_count == 0
    assert broker.held() == 1
    held.ack()


def test_a_deleted_queue_has_neither_topic_nor_bindings(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, [1])
    JOBS(connection.default_channel).delete()
    assert "jobs" not in broker.topics
    publish(connection, [])
    kombu.Producer(connection.default_channel).publish(1, exchange="jobs", routing_key="jobs")
    assert "jobs" not in broker.topics


def test_a_passive_declaration_of_nothing_is_an_error(connection: kombu.Connection) -> None:
    with pytest.raises(connection.channel_errors, match="NOT_FOUND"):
        kombu.Queue("none")(connection.default_channel).queue_declare(passive=True)


def test_a_fanout_exchange_is_one_topic_with_a_group_for_each_queue(
    broker: KombuBroker, connection: kombu.Connection
) -> None:
    bus = kombu.Exchange("bus", type="fanout")
    queues = [kombu.Queue(name, bus) for name in ("one", "two")]
    kombu.Producer(connection.default_channel, exchange=bus).publish(["hello"], declare=queues)
    assert broker.tasks("bus.exchange") == [["hello"]]
    for name in ("one", "two"):
        assert broker.calls_of("POST", f"/v1/groups/{name}.bus/receive")
        assert not broker.topics[name][0]


def test_a_worker_is_asked_and_answers(broker: KombuBroker, connection: kombu.Connection) -> None:
    mailbox = Mailbox("celery", type="fanout", queue_expires=10, queue_exclusive=False)
    with broker.connect() as other:
        node = mailbox(other).Node(
            "worker@host", channel=other.default_channel, handlers={"ping": lambda state: "pong"}
        )
        node.listen(callback=node.handle_message)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                try:
                    other.drain_events(timeout=0.1)
                except TimeoutError:
                    continue

        worker = threading.Thread(target=work)
        worker.start()
        try:
            assert mailbox(connection).call(["worker@host"], "ping", timeout=30) == [{"worker@host": "pong"}]
        finally:
            stop.set()
            worker.join()
    assert set(broker.topics) == {"celery.pidbox.exchange", "reply.celery.pidbox.exchange", "kombu.bindings"}


def test_events_reach_a_receiver_of_their_kind_alone(broker: KombuBroker, connection: kombu.Connection) -> None:
    events = kombu.Exchange("celeryev", type="topic")
    receiver = kombu.Queue("ev.1", events, routing_key="task.#", auto_delete=True, durable=False, expires=60)
    sink = Sink(connection, [receiver], no_ack=True, acks=False)
    with broker.connect() as other:
        producer = kombu.Producer(other.default_channel, exchange=events)
        for number, key in enumerate(["task.sent", "worker.heartbeat", "task.done"]):
            producer.publish(number, routing_key=key)
    assert sink.drain(2) == [0, 2]
    assert "ev.1" not in broker.topics


def test_events_that_nobody_receives_are_not_sent(broker: KombuBroker, connection: kombu.Connection) -> None:
    producer = kombu.Producer(connection.default_channel, exchange=kombu.Exchange("celeryev", type="topic"))
    producer.publish(1, routing_key="task.sent")
    assert set(broker.topics) == set()


def test_an_event_loop_delivers(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, range(3))
    sink = Sink(connection, [JOBS])
    hub = Hub()
    connection.register_with_event_loop(hub)
    while len(sink.bodies) < 3:
        hub.run_once()
    assert sink.bodies == [0, 1, 2]
    connection.close()
    hub.close()


def test_the_child_of_a_fork_returns_nothing_of_its_parent(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, range(3))
    sink = Sink(connection, [JOBS], acks=False)
    sink.drain(3)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            connection.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert broker.held() == 3
    assert not broker.calls_of("POST", "/v1/groups/jobs/nack")


def test_a_connection_can_be_closed_by_another_thread(broker: KombuBroker, connection: kombu.Connection) -> None:
    publish(connection, range(3))
    sink = Sink(connection, [JOBS], acks=False)
    sink.drain(3)
    threads = [threading.Thread(target=connection.transport.close_connection, args=(None,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broker.held() == 0


def test_a_broker_that_is_not_there_is_a_connection_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        connection = kombu.Connection(f"portalmq://127.0.0.1:{unused.getsockname()[1]}", connect_timeout=1)
        with pytest.raises(connection.connection_errors) as caught:
            connection.connect()
        assert isinstance(caught.value, Unavailable)


def test_a_token_is_sent(broker: KombuBroker) -> None:
    with kombu.Connection(broker.url.replace("http://", "portalmq://:secret@")) as connection:
        publish(connection, [1])
    assert {call.headers.get("authorization") for call in broker.calls} == {"Bearer secret"}


def test_the_transport_is_found_without_the_alias(broker: KombuBroker) -> None:
    with kombu.Connection(broker.url.replace("http", "portalmq"), transport="portalmq.kombu:Transport") as connection:
        publish(connection, [1])
    assert broker.tasks("jobs") == [1]


def test_an_option_that_cannot_be_used_is_said_at_connecting(broker: KombuBroker) -> None:
    with pytest.raises(ValueError, match="visibility_timeout"):
        broker.connect(visibility_timeout="an hour").connect()


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["127.0.0.1", "localhost"]])
def test_a_publish_that_failed_is_repeated_on_a_new_connection(
    broker: KombuBroker, monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    failures: list[Exception] = []
    original = Channel.basic_publish

    def basic_publish(self: Channel, *arguments: Any, **options: Any) -> None:
        if failures:
            raise failures.pop()
        original(self, *arguments, **options)

    monkeypatch.setattr(Channel, "basic_publish", basic_publish)
    policy = {"interval_start": 0, "interval_step": 0, "max_retries": 3}
    url = broker.url.replace("http", "portalmq")
    with kombu.Connection(";".join(url.replace("127.0.0.1", each) for each in addresses)) as connection:
        producer = kombu.Producer(connection)
        for number in range(3):
            producer.publish(number, exchange="", routing_key="jobs", declare=[JOBS], retry=True, retry_policy=policy)
            failures += [TimeoutError("late"), Unavailable("no leader")]
    assert broker.tasks("jobs") == [0, 1, 2]


def test_a_declaration_that_failed_during_a_publish_is_repeated_too(
    broker: KombuBroker, connection: kombu.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [Unavailable("no leader")]
    original = Channel._new_queue

    def new_queue(self: Channel, queue: str, **options: Any) -> None:
        if failures:
            raise failures.pop()
        original(self, queue, **options)

    monkeypatch.setattr(Channel, "_new_queue", new_queue)
    policy = {"interval_start": 0, "interval_step": 0, "max_retries": 3}
    kombu.Producer(connection).publish(
        1, exchange="", routing_key="jobs", declare=[JOBS], retry=True, retry_policy=policy
    )
    assert broker.tasks("jobs") == [1]
