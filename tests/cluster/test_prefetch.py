"""Consumers whose next fetch is under way while they handle messages, on real brokers."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
from support.cluster import Cluster

from portalmq import Consumer, Producer
from portalmq.consumers.receiver import Receiver

KEYS, PER_KEY = 40, 10


def test_every_message_comes_once_and_in_the_order_of_its_key(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[int] = []
    run_ahead = Receiver._run_ahead

    async def noted(self: Receiver, asked: int) -> None:
        ahead.append(asked)
        await run_ahead(self, asked)

    monkeypatch.setattr(Receiver, "_run_ahead", noted)
    admin = cluster.admin()
    admin.create_topic(topic, partitions=1)
    cluster.wait_in_sync(topic)
    admin.create_group(topic, ordering="key")
    with Producer(cluster.urls) as producer:
        for number in range(PER_KEY):
            for key in range(KEYS):
                producer.send(topic, number, key=f"k{key}")
        producer.flush(60)
    lock = threading.Lock()
    handled: dict[str, list[int]] = defaultdict(list)
    deliveries: list[int] = []

    def work(most: int) -> None:
        with Consumer(topic, group=topic, bootstrap=cluster.urls, max_messages=5) as consumer:
            while most > 0 and len(deliveries) < KEYS * PER_KEY:
                for message in consumer.poll(0.2):
                    most -= 1
                    with lock:
                        handled[str(message.key)].append(message.json())
                        deliveries.append(message.delivery_count)
            consumer.commit()

    # One leaves early, with messages ahead; the others get them long before their leases would end.
    threads = [threading.Thread(target=work, args=(most,)) for most in (30, KEYS * PER_KEY, KEYS * PER_KEY)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert set(map(tuple, handled.values())) == {tuple(range(PER_KEY))}
    assert deliveries == [1] * KEYS * PER_KEY
    assert ahead
