"""A process that has used its clients forks: the child has another identity to the brokers, and the parent
continues."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest
from support.forked import in_child
from support.lock_broker import LockBroker
from support.scripted_broker import ScriptedBroker, hold

from portalmq import Admin, AsyncConsumer, AsyncProducer, Consumer, IllegalGeneration, Lock, Producer, Unavailable
from portalmq.network.forking import reset_in_children

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

PRODUCE = "/v1/topics/t/messages"
RECEIVE = "/v1/groups/g/receive"


def values(broker: ScriptedBroker) -> list[bytes]:
    return sorted(broker.values("t"))


def connections(broker: ScriptedBroker, method: str, path: str) -> list[int]:
    return [call.connection for call in broker.calls_of(method, path)]


def test_messages_of_parent_and_child_are_stored_under_two_identities() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", b"before").result(30)
        in_child(lambda: producer.send("t", b"child").result(30).offset)
        producer.send("t", b"parent").result(30)
        assert values(broker) == [b"before", b"child", b"parent"]
        stamps = [call.batch().producer for call in broker.calls_of("POST", PRODUCE)]
        assert [stamp and (stamp.id, stamp.sequence) for stamp in stamps] == [(1, 0), (2, 0), (1, 1)]
        before, child, parent = connections(broker, "POST", PRODUCE)
        assert before == parent != child, "they share no socket"


def test_buffered_messages_stay_the_parents() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=3_600_000) as producer:
        buffered = producer.send("t", b"buffered")
        watched = producer.send("t", b"watched")
        heard: list[int] = []
        watched.add_done_callback(lambda done: heard.append(os.getpid()))

        def child() -> list[object]:
            errors = [buffered.exception(30), watched.exception(30)]
            producer.send("t", b"child").result(30)
            producer.flush(30)
            producer.close()
            return [
                len(heard),
                *(isinstance(error, Unavailable) and "only the parent" in str(error) for error in errors),
            ]

        assert in_child(child) == [0, True, True]
        producer.flush(30)
        assert (buffered.result(0).offset, watched.result(0).offset, heard) == (1, 2, [os.getpid()])
        assert values(broker) == [b"buffered", b"child", b"watched"]


def test_a_child_that_is_forked_during_a_request_does_not_wait_for_it() -> None:
    answer = threading.Event()
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", b"first").result(30)
        broker.script("POST", PRODUCE, [hold(answer)])
        future = producer.send("t", b"second")
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) == 2)

        def child() -> str:
            producer.send("t", b"child").result(30)
            return str(future.exception(30))

        assert "only the parent" in str(in_child(child))
        answer.set()
        assert future.result(30).offset == 2
        assert values(broker) == [b"child", b"first", b"second"]


def test_a_closed_producer_stays_closed_in_the_child() -> None:
    with ScriptedBroker() as broker:
        producer = Producer(broker.url)
        producer.send("t", b"x").result(30)
        producer.close()

        def child() -> bool:
            with pytest.raises(RuntimeError, match="closed"):
                producer.send("t", b"y")
            return True

        assert in_child(child)


def test_a_child_neither_acks_nor_returns_the_parents_messages() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3"])
        with Consumer("t", group="g", bootstrap=broker.url, idle_timeout_s=0) as consumer:
            assert next(consumer).value == b"1"

            def child() -> list[str]:
                left = [message.text for message in consumer]
                consumer.close()
                return left

            assert in_child(child) == [], "the parent holds every lease"
            assert [call.path for call in broker.calls if call.path.endswith("ack")] == []
            assert [message.value for message in consumer] == [b"2", b"3"]
        names = {call.json()["consumer"] for call in broker.calls_of("POST", RECEIVE)}
        attempts = [call.json()["attempt_id"] for call in broker.calls_of("POST", RECEIVE)]
        assert (len(names), len(set(attempts))) == (2, len(attempts))


def test_a_child_may_ack_explicitly() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with Consumer("t", group="g", bootstrap=broker.url, manual_ack=True) as consumer:
            (message,) = consumer.poll(30)
            in_child(message.ack)
            assert broker.done == {("t", 0, 0)}


def test_a_child_that_ends_returns_no_message() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with Consumer("t", group="g", bootstrap=broker.url, idle_timeout_s=0) as consumer:
            next(consumer)
            in_child(consumer._shut_down)  # called at the interpreter's exit
            assert broker.calls_of("POST", "/v1/groups/g/nack") == []


def test_a_named_member_stays_the_parents() -> None:
    with Consumer("t", group="g", mode="stream", member_id="m", bootstrap="http://127.0.0.1:1") as consumer:
        consumer._stream._running = threading.Thread()  # type: ignore[union-attr] - as if it had joined

        def child() -> bool:
            with pytest.raises(IllegalGeneration, match="another member_id"):
                consumer.poll(30)
            return True

        assert in_child(child)


def test_unnamed_members_are_distinct() -> None:
    with Consumer("t", group="g", mode="stream", bootstrap="http://127.0.0.1:1") as consumer:
        assert in_child(lambda: consumer.member_id) != consumer.member_id


@pytest.mark.parametrize("owner", [None, "me"])
def test_a_child_does_not_hold_its_parents_lock(owner: str | None) -> None:
    with LockBroker() as broker:
        lock = Lock("l", broker.url, owner=owner)
        with lock as token:

            def child() -> list[object]:
                looked = [lock.held, lock.fencing_token, lock.lost]
                with pytest.raises(RuntimeError, match="not held"):
                    lock.release()
                lock.__exit__(None, None, None)
                lock.close()
                return [*looked, lock.owner == (owner and f"{owner}:{os.getpid()}")]

            assert in_child(child) == [False, None, False, True]
            assert (broker.holder, broker.token) == (lock.owner, token)
            lock.renew()
        assert broker.count("DELETE") == 1
        lock.close()


def test_an_admin_is_used_in_both() -> None:
    with ScriptedBroker() as broker, Admin(broker.url) as admin:
        admin.metadata([])
        in_child(lambda: admin.metadata([]) and None)
        admin.metadata([])
        first, child, last = connections(broker, "GET", "/v1/metadata")
        assert first == last != child


def test_asynchronous_clients_run_in_an_event_loop_of_the_child() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        producer = AsyncProducer(broker.url)
        consumer = AsyncConsumer("t", group="g", bootstrap=broker.url, idle_timeout_s=0)

        async def use() -> list[str]:
            await producer.send("t", b"sent")
            return [message.text async for message in consumer]

        async def parent() -> None:
            await producer.send("t", b"before")
            assert [message.text for message in await consumer.poll(30, 1)] == ["1"]
            said = await asyncio.to_thread(in_child, lambda: asyncio.new_event_loop().run_until_complete(use()))
            assert said == ["sent"], "the parent holds the other lease"
            assert await use() == ["before", "sent"]
            await producer.close()
            await consumer.close()

        asyncio.run(parent())


def test_an_object_that_cannot_be_reset_does_not_keep_the_others_from_it(caplog: pytest.LogCaptureFixture) -> None:
    class Reset:
        def __init__(self) -> None:
            self.fails = self.is_reset = False
            reset_in_children(self)

        def _reset_in_child(self) -> None:
            self.is_reset = True
            if self.fails:
                raise OSError("closed")

    three = [Reset() for _ in range(3)]

    def child() -> list[bool]:
        return [each.is_reset for each in three] + ["a Reset could not be reset" in caplog.text]

    for each in three:
        each.fails = True
    assert in_child(child) == [True] * 4
