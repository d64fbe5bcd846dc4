"""Portal MQ's read and consume on a topic whose partitions are led by three brokers."""

from __future__ import annotations

import pytest
from support.cluster import Cluster

from portalmq import PortalClient

pytestmark = pytest.mark.cluster


def test_messages_of_all_leaders_are_read_at_any_broker(cluster: Cluster, topic: str) -> None:
    cluster.admin().create_topic(topic, partitions=6)
    cluster.wait_in_sync(topic)
    with PortalClient(cluster.urls[0]) as first, PortalClient(cluster.urls[1]) as second:
        assert first.read(topic, consumer_id="c") is None
        sent = {first.publish(topic, n, producer_id="p", sequence=str(n)) for n in range(18)}
        read: set[int] = set()
        clients = [first, second]
        while (message := clients[len(read) % 2].read(topic, consumer_id="c")) is not None:
            assert first.consume(topic, message.offset)
            read.add(message.offset)
        assert read == sent
        assert len({offset >> 40 for offset in read}) > 1, "the messages are in several partitions"
