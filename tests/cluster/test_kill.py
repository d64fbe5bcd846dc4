"""kill -9 of the broker under load: everything acked is there, in order, once; groups go on where they were.

`PORTALMQ_KILLS` sets how many times (the suite: 8; the full proof is 30).
"""

from __future__ import annotations

import os
import random
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess

from portalmq import Admin, Consumer, Producer

KILLS = int(os.environ.get("PORTALMQ_KILLS", "8"))
TOPIC = "load"
PARTITIONS = 3
ACKED_BETWEEN_KILLS = 1_500

pytestmark = pytest.mark.cluster


class Load:
    """One idempotent producer that keeps sending numbered messages, each partition named, and notes what was acked."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.sent: dict[int, list[str]] = defaultdict(list)
        self.acked: set[str] = set()
        self.failures: list[BaseException] = []
        self._progress = threading.Condition()
        self._stopped = threading.Event()
        self._url = url
        self._thread = threading.Thread(target=self._run, name=f"load-{name}")
        self._thread.start()

    def _run(self) -> None:
        with Producer(self._url, linger_ms=1, batch_messages=50, buffer_messages=2_000) as producer:
            number = 0
            while not self._stopped.is_set():
                partition, value = number % PARTITIONS, f"{self.name}-{number}"
                self.sent[partition].append(value)
                future = producer.send(TOPIC, value, partition=partition)
                future.add_done_callback(lambda done, value=value: self._note(done, value))
                number += 1

    def _note(self, future, value: str) -> None:
        error = future.exception()
        with self._progress:
            if error is None:
                self.acked.add(value)
            else:
                self.failures.append(error)
            self._progress.notify_all()

    def wait_for_acked(self, count: int) -> None:
        with self._progress:
            enough = self._progress.wait_for(lambda: len(self.acked) >= count or self.failures, timeout=60)
        assert enough, f"only {len(self.acked)} of {count} were acked"
        assert not self.failures, self.failures[:3]

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def everything_in(url: str) -> dict[int, list[str]]:
    """The values of each partition in the order of their offsets, read back after the last restart."""
    found: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for message in Admin(url).read_all(TOPIC):
        found[message.partition].append((message.offset, message.text))
    for places in found.values():
        assert all(before < after for (before, _), (after, _) in pairwise(places))
    return {partition: [value for _, value in places] for partition, places in found.items()}


def check(loads: list[Load], found: dict[int, list[str]]) -> None:
    everything = [value for values in found.values() for value in values]
    assert len(everything) == len(set(everything)), "an idempotent producer's message is there twice"
    there = set(everything)
    for load in loads:
        assert load.acked <= there, f"acked and lost: {sorted(load.acked - there)[:5]}"
        for partition, sent in load.sent.items():
            mine = [value for value in found.get(partition, []) if value.startswith(f"{load.name}-")]
            kept = set(mine)
            assert mine == [value for value in sent if value in kept], "order of sending is the order of offsets"
    assert there <= {value for load in loads for values in load.sent.values() for value in values}


@pytest.mark.timeout(300)
def test_nothing_acked_is_lost_when_the_broker_is_killed_under_load(tmp_path: Path):
    with BrokerProcess(tmp_path / "data") as broker:
        Admin(broker.url).create_topic(TOPIC, partitions=PARTITIONS)
        loads = [Load(broker.url, name) for name in ("a", "b")]
        try:
            for kill in range(1, KILLS + 1):
                for load in loads:
                    load.wait_for_acked(kill * ACKED_BETWEEN_KILLS)
                broker.kill()
                broker.restart()
            for load in loads:
                load.wait_for_acked((KILLS + 1) * ACKED_BETWEEN_KILLS)
        finally:
            for load in loads:
                load.stop()
        broker.kill()
        broker.restart()
        check(loads, everything_in(broker.url))


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
                assert batch, f"{len(received)} of {messages} were received, and no more come"
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
