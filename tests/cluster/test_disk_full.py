"""A disk that is nearly full: the broker refuses to produce before SQLite runs out of space, and consuming
continues."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.broker_process import BrokerProcess

from portalmq import Consumer, Producer, StorageFull

pytestmark = pytest.mark.cluster


def test_a_nearly_full_disk_refuses_new_messages_and_keeps_serving_the_old_ones(tmp_path: Path):
    with BrokerProcess(tmp_path) as broker, Producer(broker.url) as producer:
        producer.send("t", "kept").result(timeout=30)
    low_water = ("--disk-low-water-bytes", str(1 << 60))
    with BrokerProcess(tmp_path, *low_water) as broker:
        with Producer(broker.url, delivery_timeout_s=5) as producer, pytest.raises(StorageFull) as caught:
            producer.send("t", "refused").result(timeout=30)
        assert (caught.value.status, caught.value.outcome, caught.value.retryable) == (507, "not_applied", True)
        assert consumed(broker, "g") == ["kept"]
        assert broker.request("GET", "/healthz").json()["disk_full"] is True
    with BrokerProcess(tmp_path) as broker, Producer(broker.url) as producer:
        producer.send("t", "after").result(timeout=30)
        assert consumed(broker, "g") == ["after"]


def consumed(broker: BrokerProcess, group: str) -> list[str]:
    """Receive and ack all messages of the group."""
    with Consumer("t", group=group, bootstrap=broker.url) as consumer:
        return [message.text for message in consumer.poll(timeout_s=30) + consumer.poll(timeout_s=0.2)]
