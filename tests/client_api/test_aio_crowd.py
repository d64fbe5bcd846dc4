"""Many clients in one event loop, over a network that only pretends: no threads, nothing lost on a cancellation."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from portalmq import AsyncConsumer, AsyncProducer, LeaseLost, Unavailable, wire
from portalmq.network.connection import Address, Doubt, NoAnswer, NotSent
from portalmq.network.either import THREADS, finish, settled
from portalmq.network.http_answer import Fields, HttpAnswer
from portalmq.network.loop_waits import LoopCondition, LoopMutex
from portalmq.producers import loop_producer

URL = "http://broker:1"
AN_HOUR_S = 3_600.0
WITHIN_S = 60.0


class Broker:
    """One broker with one partition, and the pool by which every client reaches it. `fail` is asked before each call
    is executed, `lose` before it is answered."""

    def __init__(self) -> None:
        self.log: list[bytes] = []
        self.free: deque[tuple[int, bytes]] = deque()
        self.leased: dict[str, tuple[int, bytes]] = {}
        self.acked: list[bytes] = []
        self.calls: list[str] = []
        self.parked = 0
        self.fail: Callable[[str], Exception | None] = lambda call: None
        self.lose: Callable[[str], Exception | None] = lambda call: None
        self.hold: Callable[[str], asyncio.Event | None] = lambda call: None
        self.identities = 0
        self._came = asyncio.Event()

    def fill(self, values: list[bytes]) -> None:
        self.free.extend(enumerate(values))
        self._came.set()

    def __call__(self, **options: object) -> Pool:
        return Pool(self)

    async def work(self, method: str, path: str, body: bytes) -> bytes:
        call = path.partition("?")[0].rpartition("/")[2]
        self.calls.append(call)
        if (held := self.hold(call)) is not None:
            await held.wait()
        if (fault := self.fail(call)) is not None:
            raise fault
        answer = await self._answer(call, path, body)
        if (fault := self.lose(call)) is not None:
            raise fault
        return answer

    async def _answer(self, call: str, path: str, body: bytes) -> bytes:
        match call:
            case "metadata":
                return msgspec.json.encode(
                    wire.Metadata(
                        [wire.BrokerDescription(1, URL, True)],
                        [wire.TopicMetadata("t", [wire.PartitionLeader(0, 1, 1, URL)])],
                    )
                )
            case "producers":
                self.identities += 1
                return msgspec.json.encode(wire.ProducerIdentity(self.identities, 0))
            case "messages":
                values = [message.value for message in msgspec.msgpack.decode(body, type=wire.PackBatch).messages]
                self.log += values
                return msgspec.json.encode(wire.ProducedRange(0, len(self.log) - len(values), len(values), 0))
            case "receive":
                return await self._receive(msgspec.json.decode(body, type=wire.ReceiveRequest))
            case "ack" | "nack" | "extend":
                for receipt in msgspec.json.decode(body)["receipts"]:
                    self._settle(call, receipt)
        return b"{}"

    def _settle(self, call: str, receipt: str) -> None:
        if call == "ack" and receipt in self.leased:
            self.acked.append(self.leased.pop(receipt)[1])
        elif call == "nack" and receipt in self.leased:
            self.free.append(self.leased.pop(receipt))
            self._came.set()

    async def _receive(self, request: wire.ReceiveRequest) -> bytes:
        for receipt in request.ack:
            self._settle("ack", receipt)
        self.parked += 1
        try:
            while not self.free and request.wait_ms:
                self._came.clear()
                await self._came.wait()
        finally:
            self.parked -= 1
        found = [self.free.popleft() for _ in range(min(len(self.free), request.max_messages))]
        messages = []
        for offset, value in found:
            receipt = f"{request.attempt_id}.{offset}"
            self.leased[receipt] = offset, value
            messages.append(wire.PackMessageOut(0, offset, value, 0, topic="t", receipt=receipt, delivery_count=1))
        return msgspec.json.encode(wire.PackReceived(messages))


class Pool:
    """The connections of one client."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.waiting: set[asyncio.Task[bytes]] = set()

    async def begin(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> Any:
        path = head.split()[1].decode()
        task = asyncio.create_task(self.broker.work(method, path, body))
        self.waiting.add(task)
        return task

    async def read(self, pending: asyncio.Task[bytes], timeout_s: float, doubt: Doubt | None = None) -> HttpAnswer:
        try:
            return HttpAnswer(200, Fields(), await pending)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                pending.cancel()
                raise
            raise NoAnswer("the connection was closed") from None
        finally:
            self.waiting.discard(pending)

    async def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, doubt: Doubt | None = None
    ) -> HttpAnswer:
        return await self.read(await self.begin(address, method, head, body, timeout_s), timeout_s)

    def rest(self) -> None: ...

    def hang_up(self) -> None:
        for task in self.waiting:
            task.cancel()

    async def close(self, answers_within_s: float = 0.0) -> None:
        self.hang_up()


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    broker = Broker()
    monkeypatch.setattr("portalmq.transport.loop_transport.LoopPool", broker)
    return broker


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), WITHIN_S))


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - it looks at the fake broker
        await asyncio.sleep(0)


def test_a_thousand_parked_consumers_share_the_loop_s_thread(broker: Broker) -> None:
    async def test() -> None:
        before = set(threading.enumerate())
        consumers = [AsyncConsumer("t", group="g", bootstrap=URL) for _ in range(1_000)]
        waiting = [asyncio.create_task(anext(consumer)) for consumer in consumers]
        await until(lambda: broker.parked == 1_000)
        assert set(threading.enumerate()) <= before
        done: set[asyncio.Task[Any]] = set()
        for number in range(3):
            broker.fill([b"%d" % number])
            ready, _ = await asyncio.wait([task for task in waiting if task not in done], return_when="FIRST_COMPLETED")
            done |= ready
        assert sorted(task.result().value for task in done) == [b"0", b"1", b"2"]
        await asyncio.gather(*(consumer.close() for consumer in consumers))
        ends = await asyncio.gather(*(task for task in waiting if task not in done), return_exceptions=True)
        assert {type(end) for end in ends} == {StopAsyncIteration}
        assert set(threading.enumerate()) <= before

    run(test)
    assert (broker.leased, broker.acked, len(broker.free)) == ({}, [], 3), "nobody asked for more: all went back"


def test_clients_without_a_call_start_nothing() -> None:
    async def test() -> None:
        before, tasks = set(threading.enumerate()), asyncio.all_tasks()
        async with AsyncProducer(URL), AsyncConsumer("t", bootstrap=URL):
            assert set(threading.enumerate()) <= before
            assert asyncio.all_tasks() == tasks

    run(test)


@pytest.mark.parametrize("manual_ack", [False, True])
def test_messages_that_arrive_after_a_cancellation_go_back_at_close(broker: Broker, manual_ack: bool) -> None:
    async def test() -> None:
        consumer = AsyncConsumer("t", group="g", bootstrap=URL, manual_ack=manual_ack)
        waiting = asyncio.create_task(consumer.poll(AN_HOUR_S))
        await until(lambda: broker.parked)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        broker.fill([b"1", b"2"])
        await until(lambda: broker.leased)
        await consumer.close()

    run(test)
    assert (broker.leased, broker.acked, len(broker.free)) == ({}, [], 2)


def test_cancelling_the_task_that_closes_does_not_end_the_closing(broker: Broker) -> None:
    async def test() -> None:
        consumer = AsyncConsumer("t", group="g", bootstrap=URL)
        broker.fill([b"1"])
        await anext(consumer)
        answered = asyncio.Event()
        broker.hold = lambda call: answered if call == "nack" else None
        closing = asyncio.create_task(consumer.close())
        await until(lambda: "nack" in broker.calls)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        answered.set()
        await until(lambda: broker.free)

    run(test)
    assert broker.leased == {}


def test_a_cancelled_ack_is_sent_all_the_same(broker: Broker) -> None:
    async def test() -> None:
        async with AsyncConsumer("t", group="g", bootstrap=URL, manual_ack=True) as consumer:
            broker.fill([b"1"])
            [message] = await consumer.poll(AN_HOUR_S)
            answered = asyncio.Event()
            broker.hold = lambda call: answered if call == "ack" else None
            acking = asyncio.create_task(consumer.ack(message))
            await until(lambda: "ack" in broker.calls)
            acking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await acking
            answered.set()
            await until(lambda: broker.acked)

    run(test)


def test_a_consumer_that_is_forgotten_gives_its_messages_back(broker: Broker) -> None:
    async def test() -> None:
        broker.fill([b"1", b"2"])
        consumer = AsyncConsumer("t", group="g", bootstrap=URL)
        await anext(consumer)
        del consumer
        gc.collect()
        await until(lambda: not broker.leased)

    run(test)
    assert (broker.acked, len(broker.free)) == ([], 2)


def test_the_leases_of_waiting_messages_are_extended_without_a_thread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with AsyncConsumer(
            "t", group="g", bootstrap=URL, visibility_timeout_s=0.02, max_handling_s=AN_HOUR_S
        ) as consumer:
            broker.fill([b"1", b"2"])
            await anext(consumer)
            await until(lambda: broker.calls.count("extend") > 2)

    run(test)


def test_a_lost_lease_is_told_when_the_next_message_is_asked_for(broker: Broker) -> None:
    async def test() -> None:
        async with AsyncConsumer("t", group="g", bootstrap=URL) as consumer:
            broker.fill([b"1"])
            message = await anext(consumer)
            consumer._inner._leases._calls.group_leases = True  # type: ignore[union-attr]
            await consumer._inner._leases._mark_lost([message.receipt or ""])  # type: ignore[union-attr]
            with pytest.raises(LeaseLost):
                await anext(consumer)

    run(test)


@pytest.mark.parametrize(
    ("fault", "stored"), [(NoAnswer("gone"), [b"0", b"1", b"1"]), (NotSent("gone"), [b"0", b"1", b"1"])]
)
def test_a_lost_answer_is_asked_for_again(broker: Broker, fault: Exception, stored: list[bytes]) -> None:
    """This broker knows no stamps, so a repeat shows."""

    async def test() -> None:
        async with AsyncProducer(URL) as producer:
            await producer.send("t", b"0")
            faults = [fault]
            broker.lose = lambda call: faults.pop() if call == "messages" and faults else None
            await producer.send("t", b"1")

    run(test)
    assert broker.log == stored


def test_without_stamps_only_what_was_not_sent_is_repeated(broker: Broker) -> None:
    async def test() -> None:
        async with AsyncProducer(URL, idempotent=False) as producer:
            await producer.send("t", b"0")
            faults: list[Exception] = [NotSent("refused")]
            broker.fail = lambda call: faults.pop() if call == "messages" and faults else None
            await producer.send("t", b"1")
            lost: list[Exception] = [NoAnswer("gone")]
            broker.lose = lambda call: lost.pop() if call == "messages" and lost else None
            with pytest.raises(Unavailable) as failed:
                await producer.send("t", b"2")
            assert failed.value.outcome == "unknown"

    run(test)
    assert broker.log == [b"0", b"1", b"2"]


def test_a_cancelled_send_says_what_is_known(broker: Broker) -> None:
    async def test() -> None:
        async with AsyncProducer(URL, buffer_messages=1) as producer:
            await producer.send("t", b"0")
            answered = asyncio.Event()
            broker.hold = lambda call: answered if call == "messages" else None
            sending = asyncio.create_task(producer.send("t", b"1"))
            await until(lambda: broker.calls.count("messages") == 2)
            behind = asyncio.create_task(producer.send("t", b"2"))
            await asyncio.sleep(0)
            for task, note in ((sending, loop_producer.UNKNOWN), (behind, loop_producer.NOT_SENT)):
                task.cancel()
                with pytest.raises(asyncio.CancelledError) as cancelled:
                    await task
                assert cancelled.value.__notes__ == [note]
            answered.set()

    run(test)
    assert broker.log == [b"0", b"1"]


def test_many_sends_of_one_moment_are_one_request(broker: Broker) -> None:
    async def test() -> None:
        before = set(threading.enumerate())
        async with AsyncProducer(URL) as producer:
            await asyncio.gather(*(producer.send("t", b"%d" % number) for number in range(1_000)))
            assert set(threading.enumerate()) <= before

    run(test)
    assert broker.log == [b"%d" % number for number in range(1_000)]
    assert broker.calls.count("messages") <= 2


def test_a_group_of_tasks_that_fails_leaves_the_producer_usable(broker: Broker) -> None:
    async def test() -> None:
        async with AsyncProducer(URL) as producer:
            with pytest.raises(ExceptionGroup):
                await send_together(producer, b"1", object())
            assert (await producer.send("t", b"2")).offset == len(broker.log) - 1

    run(test)


async def send_together(producer: AsyncProducer, *values: object) -> None:
    async with asyncio.TaskGroup() as group:
        for value in values:
            group.create_task(producer.send("t", value))


def test_blocking_work_does_not_suspend() -> None:
    async def suspends() -> None:
        await asyncio.sleep(0)

    async def value() -> int:
        return await settled(3) + await settled(two())

    async def two() -> int:
        return 2

    assert finish(value()) == 5
    with pytest.raises(RuntimeError, match="event loop"):
        finish(suspends())
    with pytest.raises(KeyError):
        finish(fails())


async def fails() -> None:
    raise KeyError


@pytest.mark.parametrize("kind", ["threads", "loop"])
def test_waits_are_alike(kind: str) -> None:
    async def test() -> None:
        lock = threading.RLock()
        condition = THREADS.condition(lock) if kind == "threads" else LoopCondition(lock)
        mutex = THREADS.mutex() if kind == "threads" else LoopMutex()
        with lock:
            assert not await condition.wait_for(lambda: False, 0.001)
            assert await condition.wait_for(lambda: True, None)
            await condition.wait(0.001)
        async with mutex:
            if kind == "loop":
                assert not await mutex.acquire(0.001)
        assert await mutex.acquire(0.001)
        mutex.release()

    asyncio.run(test())


def test_a_wait_for_a_change_leaves_the_lock_to_other_threads() -> None:
    async def test() -> None:
        lock = threading.RLock()
        condition = LoopCondition(lock)
        happened: list[bool] = []

        async def wait() -> bool:
            with lock:
                return await condition.wait_for(lambda: bool(happened), AN_HOUR_S)

        def change() -> None:
            with lock:
                happened.append(True)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        await asyncio.to_thread(change)
        condition.notify_all()
        assert await waiting

    run(test)
