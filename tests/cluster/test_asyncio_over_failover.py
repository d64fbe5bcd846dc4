"""AsyncProducer and AsyncConsumer while the leader is killed and receives are cancelled repeatedly."""

from __future__ import annotations

import asyncio
import itertools
import os

import pytest
from support.cluster import Cluster

from portalmq import AsyncConsumer, AsyncProducer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

MESSAGES = int(os.environ.get("PORTALMQ_ASYNC_MESSAGES", "3000"))
AT_ONCE = 100
WITHIN_S = 200


def test_what_was_sent_is_stored_once_and_arrives(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=2)
    cluster.wait_in_sync(topic)

    async def produce(producer: AsyncProducer, sent: list[int]) -> None:
        for start in range(0, MESSAGES, AT_ONCE):
            batch = range(start, min(start + AT_ONCE, MESSAGES))
            await asyncio.gather(*(producer.send(topic, {"n": number}, key=str(number % 10)) for number in batch))
            sent += batch

    async def consume(consumer: AsyncConsumer, seen: set[int]) -> None:
        for turn in itertools.count():
            if len(seen) == MESSAGES:
                return
            try:
                message = await asyncio.wait_for(anext(consumer), 0.02 if turn % 7 == 0 else 60)
            except TimeoutError:
                continue
            seen.add(message.json()["n"])

    async def test() -> None:
        sent: list[int] = []
        seen: set[int] = set()
        read: set[int] = set()
        async with (
            AsyncProducer(cluster.urls) as producer,
            AsyncConsumer(topic, group=topic, bootstrap=cluster.urls, visibility_timeout_s=20) as consumer,
            AsyncConsumer(topic, group=f"{topic}-stream", bootstrap=cluster.urls, mode="stream") as reader,
        ):
            producing = asyncio.create_task(produce(producer, sent))
            consuming = [asyncio.create_task(consume(consumer, seen)), asyncio.create_task(consume(reader, read))]
            while len(sent) < MESSAGES // 3:
                assert not producing.done(), producing.exception()
                await asyncio.sleep(0.01)
            leader = await asyncio.to_thread(cluster.wait_for_leader, topic)
            await asyncio.to_thread(cluster.kill, leader)
            await asyncio.gather(producing, *consuming)
        assert seen == read == set(range(MESSAGES))

    asyncio.run(asyncio.wait_for(test(), WITHIN_S))
    with cluster.admin() as admin:
        stored = [message.json()["n"] for message in admin.read_all(topic)]
    assert sorted(stored) == list(range(MESSAGES))
