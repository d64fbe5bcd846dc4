"""SIGKILL of the broker under load: every acked message is stored once, in order; groups continue at their positions.

`PORTALMQ_KILLS` sets the number of kills (the suite: 8; the full run: 30).
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.load import check, everything_in, loads

from portalmq import Admin, Consumer, Producer

KILLS = int(os.environ.get("PORTALMQ_KILLS", "8"))
TOPIC = "load"
PARTITIONS = 3
ACKED_BETWEEN_KILLS = 1_500

pytestmark = pytest.mark.cluster


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_nothing_acked_is_lost_when_the_broker_is_killed_under_load(tmp_path: Path):
    with BrokerProcess(tmp_path / "data") as broker:
        Admin(broker.url).create_topic(TOPIC, partitions=PARTITIONS)
        with loads(broker.url, topic=TOPIC, partitions=PARTITIONS) as running:
            for _ in range(KILLS):
                for load in running:
                    load.wait_for_acked(ACKED_BETWEEN_KILLS)
                broker.kill()
                broker.restart()
            for load in running:
                load.wait_for_acked(ACKED_BETWEEN_KILLS)
        broker.kill()
        broker.restart()
        check(running, everything_in(broker.url, TOPIC))


@pytest.mark.timeout(300)
def test_a_group_receives_everything_although_the_broker_is_killed(tmp_path: Path):
    messages, random_kill = 6_000, random.Random(7)
    with BrokerProcess(tmp_path / "data") as broker:
        with Producer(broker.url) as producer:
            for number in range(messages):
                producer.send(TOPIC, str(number), key=str(number))
        received: set[str] = set()
        kills_at = sorted(random_kill.sample(range(500, messages - 500), 3))
        with Consumer(
            TOPIC, group="g", bootstrap=broker.url, manual_ack=True, visibility_timeout_s=1, max_messages=100
        ) as consumer:
            while len(received) < messages:
                batch = consumer.poll(timeout_s=30)
                assert batch, f"{len(received)} of {messages} were received, and no more arrive"
                consumer.ack(batch)
                received |= {message.text for message in batch}
                if kills_at and len(received) >= kills_at[0]:
                    del kills_at[0]
                    broker.kill()
                    broker.restart()
        assert received == {str(number) for number in range(messages)}
        broker.kill()
        broker.restart()
        assert Admin(broker.url).group("g").lag == 0
