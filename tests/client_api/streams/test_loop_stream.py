"""AsyncConsumer(mode="stream") in one event loop, at a real broker in this process: as Consumer, without threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from portalmq import Admin, AsyncConsumer, Consumer, IllegalGeneration, Message, Producer
from portalmq.testing import InMemoryBroker

WITHIN_S = 30.0
COUNT = 20


@pytest.fixture(scope="module")
def broker() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as broker:
        yield broker


@pytest.fixture
def topic(broker: InMemoryBroker, request: pytest.FixtureRequest) -> str:
    """A topic of two partitions, with COUNT messages in each."""
    name = str(request.node.name).replace("[", "-").replace("]", "")
    with Admin(transport=broker.transport) as admin, Producer(transport=broker.transport) as producer:
        admin.create_topic(name, partitions=2)
        for number in range(COUNT):
            for partition in range(2):
                producer.send(name, number, partition=partition)
    return name


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, WITHIN_S))


def consumer(broker: InMemoryBroker, topic: str, **options: Any) -> AsyncConsumer:
    return AsyncConsumer(topic, group=topic, transport=broker.transport, mode="stream", **options)


async def until(is_so: Callable[[], bool]) -> None:
    for _ in itertools.count():
        if is_so():
            return
        await asyncio.sleep(0.01)


async def taken(reading: AsyncConsumer, count: int) -> list[Message]:
    """Return so many messages, of any partition. A poll returns fewer where a batch of the producer ends."""
    found: list[Message] = []
    while len(found) < count:
        found += await reading.poll(WITHIN_S, count - len(found))
    return found


def by_partition(messages: list[Message]) -> dict[int, list[int]]:
    return {number: [m.json() for m in messages if m.partition == number] for number in {m.partition for m in messages}}


ALL = {0: list(range(COUNT)), 1: list(range(COUNT))}


def test_all_is_read_in_order_without_a_thread(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        threads = set(threading.enumerate())
        async with consumer(broker, topic, idle_timeout_s=1) as reading:
            found = [message async for message in reading]
            assert set(threading.enumerate()) <= threads
            assert reading.assignment == [(topic, 0), (topic, 1)]
        assert by_partition(found) == ALL

    run(work())


def test_what_was_asked_for_and_finished_is_committed_at_the_close(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        async with consumer(broker, topic) as reading:
            first = [await anext(reading) for _ in range(7)]
        async with consumer(broker, topic, idle_timeout_s=1) as reading:
            rest = [message async for message in reading]
        again = {first[-1].id}  # in hand at the close
        assert again <= {message.id for message in rest}
        assert by_partition(first[:-1] + rest) == {
            number: sorted(values) for number, values in by_partition(first[:-1] + rest).items()
        }
        assert len(first[:-1] + rest) == 2 * COUNT

    run(work())


def test_a_commit_is_durable_and_covers_what_was_handed_out(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        reading = consumer(broker, topic, manual_ack=True)
        messages = await taken(reading, 5)
        await reading.commit()
        await reading.close()
        async with consumer(broker, topic, idle_timeout_s=1) as others:
            rest = [message async for message in others]
        assert by_partition(messages + rest) == ALL

    run(work())


def test_a_cancelled_receive_loses_nothing(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        found: list[Message] = []
        async with consumer(broker, topic) as reading:
            found.append(await anext(reading))
            for steps in itertools.count():
                task = asyncio.create_task(anext(reading))
                for _ in range(steps % 7):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    found.append(await task)
                if len(found) == 2 * COUNT:
                    break
        assert by_partition(found) == ALL

    run(work())


def test_two_members_share_the_partitions_and_one_takes_over(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        found: list[Message] = []

        async def read(reading: AsyncConsumer) -> None:
            async for message in reading:
                found.append(message)

        one, two = (consumer(broker, topic, session_timeout_s=2) for _ in range(2))
        tasks = [asyncio.create_task(read(each)) for each in (one, two)]
        await until(lambda: [len(each.assignment) for each in (one, two)] == [1, 1])
        await one.close()
        await until(lambda: len(two.assignment) == 2)
        with Producer(transport=broker.transport) as producer:
            for partition in range(2):
                producer.send(topic, COUNT, partition=partition)
        await until(lambda: {m.partition for m in found if m.json() == COUNT} == {0, 1})
        await two.close()
        await asyncio.gather(*tasks)
        assert {each: sorted(set(values)) for each, values in by_partition(found).items()} == {
            number: list(range(COUNT + 1)) for number in range(2)
        }

    run(work())


def test_seek_pause_and_resume(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        async with consumer(broker, topic) as reading:
            first = [await anext(reading) for _ in range(2 * COUNT)]
            await reading.pause(topic, 1)
            await reading.seek(topic, "earliest")
            second = []
            while len(second) < COUNT:
                second += await reading.poll(1.0)
            assert await reading.poll(0.1) == []
            await reading.resume()
            while len(second) < 2 * COUNT:
                second += await reading.poll(1.0)
        assert by_partition(first) == by_partition(second) == ALL
        assert [message.partition for message in second] == [0] * COUNT + [1] * COUNT

    run(work())


def test_a_commit_with_outputs_is_once_and_only_of_what_the_member_has(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        out = f"{topic}-out"
        async with consumer(broker, topic, delivery="exactly_once") as reading:
            polled = await reading.poll(WITHIN_S, 3)
            messages = [message for message in polled if message.partition == polled[0].partition]
            total = sum(message.json() for message in messages)
            done = await reading.commit_with(messages, [{"topic": out, "value": total}])
            assert done.id
            with pytest.raises(IllegalGeneration):
                await reading.commit_with(messages, [{"topic": out, "value": "twice"}])
        async with AsyncConsumer(
            out, group=out, transport=broker.transport, mode="stream", idle_timeout_s=1
        ) as reading:
            assert [message.json() async for message in reading] == [total]

    run(work())


def test_at_most_once_hands_out_what_is_committed_already(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        reading = consumer(broker, topic, delivery="at_most_once")
        first = await anext(reading)
        await reading.close()
        async with consumer(broker, topic, delivery="at_most_once", idle_timeout_s=1) as others:
            rest = [message async for message in others]
        assert first.id not in {message.id for message in rest}

    run(work())


@pytest.mark.parametrize(
    "call",
    [
        lambda reading, message: reading.nack(message),
        lambda reading, message: reading.reject(message),
        lambda reading, message: reading.release(message),
        lambda reading, message: reading.extend(message),
    ],
    ids=["nack", "reject", "release", "extend"],
)
def test_there_are_no_leases(
    broker: InMemoryBroker, topic: str, call: Callable[[AsyncConsumer, Message], Coroutine[Any, Any, None]]
) -> None:
    async def work() -> None:
        async with consumer(broker, topic) as reading:
            message = await anext(reading)
            message.ack()
            with pytest.raises(ValueError, match="a stream group has no leases"):
                await call(reading, message)
            with pytest.raises(ValueError, match="a stream group has no leases"):
                message.nack()

    run(work())


def test_a_member_that_is_forgotten_leaves_its_partitions_to_others(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        reading = consumer(broker, topic, session_timeout_s=WITHIN_S)
        message = await anext(reading)
        assert reading.assignment == [(topic, 0), (topic, 1)]
        del message, reading
        gc.collect()
        async with consumer(broker, topic, session_timeout_s=WITHIN_S) as other:
            await anext(other)
            await until(lambda: len(other.assignment) == 2)

    run(work())


def test_a_cancelled_wait_ends_the_program(broker: InMemoryBroker, topic: str) -> None:
    """asyncio.run cancels the tasks of the member, and does not wait for them."""

    async def work() -> None:
        reading = consumer(broker, topic)
        await anext(reading)

    run(work())
    with Consumer(topic, group=topic, transport=broker.transport, mode="stream", idle_timeout_s=15) as after:
        assert next(after).json() == 0, "its session is over, and nothing was committed"


def test_a_queue_group_is_refused(broker: InMemoryBroker, topic: str) -> None:
    async def work() -> None:
        with Admin(transport=broker.transport) as admin:
            admin.create_group(topic)
        async with consumer(broker, topic) as reading:
            for _ in range(2):
                with pytest.raises(Exception, match="in queue mode"):
                    await anext(reading)

    run(work())
