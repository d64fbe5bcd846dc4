"""A broker without automatic topic creation: current and older clients create no topic either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.zeromq import ZeroMQProcess, service_at

from portalmq import Admin, PortalConsumer, PortalProducer, Producer, TopicNotFound, publishMessage, subscribeMessage

pytestmark = pytest.mark.cluster


def test_no_program_makes_a_topic_that_the_broker_does_not(tmp_path: Path) -> None:
    strict = {"PORTALMQ_AUTO_CREATE_TOPICS": "false"}
    with (
        BrokerProcess(tmp_path / "broker", environment=strict) as broker,
        ZeroMQProcess(tmp_path / "zeromq", [broker.url]) as process,
        service_at(process.ports) as miniq,
        Producer(broker.url) as producer,
        PortalProducer("t", bootstrap=broker.url) as portal_producer,
        PortalConsumer("t", bootstrap=broker.url) as portal_consumer,
        Admin(broker.url) as admin,
    ):
        uses: list[Callable[[], object]] = [
            lambda: producer.send("t", b"x").result(30),
            lambda: publishMessage("t", "x", bootstrap=broker.url),
            lambda: next(iter(subscribeMessage("t", bootstrap=broker.url, idle_timeout_s=30))),
            lambda: portal_producer.publish("x"),
            portal_consumer.read,
            lambda: miniq.produce("t", "x"),
            lambda: miniq.consume("t"),
            lambda: miniq.open_producers("t"),
            lambda: miniq.open_consumers("t"),
        ]
        for use in uses:
            with pytest.raises(TopicNotFound, match=r"create it with PUT|CREATE_QUEUE"):
                use()
        assert admin.topics() == []
        miniq.create_queue("t")
        for use in uses[:2] + uses[3:]:
            use()
        assert [topic.name for topic in admin.topics()] == ["t"]
