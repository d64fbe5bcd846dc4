"""A broker whose limit of open files is below the number of its partitions' files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.broker_process import Answer, BrokerProcess

pytestmark = pytest.mark.cluster

PARTITIONS = 100
LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))"


def test_a_broker_serves_more_partitions_than_it_may_have_files_open_also_after_a_restart(tmp_path: Path):
    with BrokerProcess(tmp_path, prelude=LIMIT) as broker:
        made = broker.request("PUT", "/v1/topics/t", {"partitions": PARTITIONS})
        assert made.status in (200, 201, 503), made.body  # the creation may take longer than a caller waits
        for number in range(PARTITIONS):
            write(broker, number, f"before {number}")
    with BrokerProcess(tmp_path, prelude=LIMIT) as broker:
        for number in range(0, PARTITIONS, 10):
            write(broker, number, f"after {number}")
        for number in range(PARTITIONS):
            assert texts(broker, number) == [f"before {number}", f"after {number}"][: 1 if number % 10 else 2]


def write(broker: BrokerProcess, partition: int, text: str) -> None:
    served(broker, "POST", f"/v1/topics/t/messages?partition={partition}", text.encode())


def texts(broker: BrokerProcess, partition: int) -> list[str]:
    answer = served(broker, "GET", f"/v1/topics/t/partitions/{partition}/messages?offset=0")
    return [message["value"] for message in answer.json()["messages"]]


def served(broker: BrokerProcess, method: str, path: str, body: bytes | None = None) -> Answer:
    """Repeat the request until the partition is open, and return the answer."""
    deadline = time.monotonic() + 120
    while (answer := broker.request(method, path, body)).status == 503:
        assert time.monotonic() < deadline, answer.body
        time.sleep(0.05)
    assert answer.status == 200, answer.body
    return answer
