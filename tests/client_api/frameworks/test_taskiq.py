"""The broker of taskiq, with taskiq's own receiver, against a broker in this process."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("taskiq", reason="pip install 'portalmq[taskiq]'")

import taskiq
from taskiq.acks import AcknowledgeType
from taskiq.receiver import Receiver

from portalmq import Admin
from portalmq.taskiq import PortalMQBroker
from portalmq.testing import InMemoryBroker

_numbers = itertools.count(1)
WITHIN_S = 60


@pytest.fixture(scope="module")
def server() -> Iterator[InMemoryBroker]:
    with InMemoryBroker() as server:
        yield server


@pytest.fixture
def made(server: InMemoryBroker) -> Callable[..., PortalMQBroker]:
    number = next(_numbers)

    def make(**options: Any) -> PortalMQBroker:
        return PortalMQBroker(server.url, **{"topic_prefix": f"t{number}.", "group": f"t{number}", **options})

    return make


@pytest.fixture
def admin(server: InMemoryBroker) -> Iterator[Admin]:
    with Admin(server.url) as admin:
        yield admin


@asynccontextmanager
async def running(broker: PortalMQBroker, **options: Any) -> Any:
    """A worker on the broker, which is shut down at the end."""
    await broker.startup()
    finish = asyncio.Event()
    receiver = Receiver(broker, run_startup=False, **{"max_async_tasks": 1, **options})
    listening = asyncio.create_task(receiver.listen(finish))
    try:
        yield receiver
    finally:
        finish.set()
        await asyncio.wait_for(listening, WITHIN_S)
        await broker.shutdown()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - a broker is asked, it sets no event
            await asyncio.sleep(0)


def counts(admin: Admin, broker: PortalMQBroker, queue: str = "default") -> tuple[int, int, int]:
    found = admin.queue_counts(broker._group, broker._topic_prefix + queue)
    return found.ready, found.in_flight, found.scheduled


def test_tasks_run_and_are_acked(made: Callable[..., PortalMQBroker], admin: Admin) -> None:
    broker, got = made(), []

    @broker.task
    async def put(number: int) -> None:
        got.append(number)

    @broker.task
    def put_in_a_thread(number: int) -> None:
        got.append(number)

    async def main() -> None:
        async with running(broker, max_async_tasks=4):
            for number in range(10):
                await put.kiq(number)
                await put_in_a_thread.kiq(100 + number)
            await until(lambda: len(got) == 20 and counts(admin, broker) == (0, 0, 0))

    asyncio.run(main())
    assert sorted(got) == [*range(10), *range(100, 110)]


def test_labels_say_when_in_which_order_and_where(
    made: Callable[..., PortalMQBroker], server: InMemoryBroker, admin: Admin
) -> None:
    broker, got = made(queues=("default", "mail")), []

    @broker.task
    async def put(what: str) -> None:
        got.append(what)

    async def main() -> None:
        await put.kicker().with_labels(delay=3600).kiq("delayed")
        await put.kiq("plain")
        await put.kicker().with_labels(priority=9).kiq("urgent")
        assert counts(admin, broker) == (2, 0, 1)
        async with running(broker):
            await until(lambda: len(got) == 2)
            await put.kicker().with_labels(queue_name="mail").kiq("mail")
            await until(lambda: len(got) == 3 and counts(admin, broker, "mail") == (0, 0, 0))
            await until(lambda: counts(admin, broker) == (0, 0, 1))  # no lease runs while the clock goes on
            await asyncio.to_thread(server.advance, 3601)
            await until(lambda: len(got) == 4)

    asyncio.run(main())
    assert got == ["urgent", "plain", "mail", "delayed"]


def test_a_task_that_was_not_acked_comes_again(
    made: Callable[..., PortalMQBroker], server: InMemoryBroker, admin: Admin
) -> None:
    first, second, got = made(), made(), []

    @second.task(task_name="put")
    async def put(what: str) -> None:
        got.append(what)

    async def main() -> None:
        await put.kiq("once more")
        listening = first.listen()
        await anext(listening)  # and no ack, as a killed worker
        await listening.aclose()
        await first.shutdown()
        assert counts(admin, second) == (0, 1, 0)
        await asyncio.to_thread(server.advance, 31)
        async with running(second):
            await until(lambda: bool(got) and counts(admin, second) == (0, 0, 0))

    asyncio.run(main())
    assert got == ["once more"]


@pytest.mark.parametrize("ack_type", ["when_received", "when_executed", "when_saved"])
def test_each_ack_type_acks_at_its_time(made: Callable[..., PortalMQBroker], admin: Admin, ack_type: str) -> None:
    broker, seen = made(), []

    @broker.task
    async def look() -> None:
        seen.append(counts(admin, broker))

    async def main() -> None:
        async with running(broker, ack_type=AcknowledgeType(ack_type)):
            await look.kiq()
            await until(lambda: bool(seen) and counts(admin, broker) == (0, 0, 0))

    asyncio.run(main())
    assert seen == [(0, 0, 0) if ack_type == "when_received" else (0, 1, 0)]


def test_messages_that_were_not_handed_out_go_back_as_if_unseen(
    made: Callable[..., PortalMQBroker], admin: Admin
) -> None:
    broker = made(max_messages=10)

    @broker.task
    async def put() -> None: ...

    async def main() -> None:
        for _ in range(3):
            await put.kiq()
        listening = broker.listen()
        message = await anext(listening)
        await listening.aclose()
        assert counts(admin, broker) == (2, 1, 0)
        await message.ack()
        await broker.shutdown()

    asyncio.run(main())
    assert counts(admin, broker) == (2, 0, 0)


def test_an_ack_under_a_lost_lease_is_no_error(made: Callable[..., PortalMQBroker], server: InMemoryBroker) -> None:
    slow, quick = made(), made()

    @quick.task
    async def put() -> None: ...

    async def main() -> None:
        await put.kiq()
        first, second = slow.listen(), quick.listen()
        lost = await anext(first)
        await asyncio.to_thread(server.advance, 31)
        kept = await anext(second)
        await lost.ack()
        await kept.ack()
        for listening, broker in ((first, slow), (second, quick)):
            await listening.aclose()
            await broker.shutdown()

    asyncio.run(main())


def test_bad_labels_and_names_are_refused_before_anything_is_sent(made: Callable[..., PortalMQBroker]) -> None:
    with pytest.raises(ValueError, match="at least one queue"):
        made(queues=())
    broker = made()

    @broker.task
    async def put() -> None: ...

    async def main() -> None:
        for labels in ({"delay": "soon"}, {"priority": "first"}, {"queue_name": "no such/queue"}):
            with pytest.raises(taskiq.exceptions.SendTaskError):
                await put.kicker().with_labels(**labels).kiq()
        await broker.shutdown()

    asyncio.run(main())
