"""The pytest fixtures of portalmq.pytest_plugin, as a user's test takes them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from portalmq import Consumer, Producer
from portalmq.testing import DevBroker

seen: set[str] = set()


@pytest.mark.cluster
@pytest.mark.parametrize("number", [1, 2])
def test_each_test_has_a_topic_of_its_own(portalmq_broker: DevBroker, portalmq_topic: str, number: int) -> None:
    assert portalmq_topic not in seen
    seen.add(portalmq_topic)
    with Producer(portalmq_broker.url) as producer:
        producer.send(portalmq_topic, {"number": number})
    with Consumer(portalmq_topic, transport=portalmq_broker.transport, idle_timeout_s=1) as consumer:
        assert [message.json() for message in consumer] == [{"number": number}]


@pytest.mark.cluster
def test_a_broker_that_does_not_start_says_why() -> None:
    with pytest.raises(RuntimeError, match="no-such-option"):
        DevBroker("--no-such-option")


def test_the_plugin_imports_neither_the_client_nor_the_broker() -> None:
    program = (
        "import sys, portalmq.pytest_plugin; "
        "print([name for name in sys.modules if name.startswith(('portalmq.admin', 'portalmq.transport', 'gevent'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
