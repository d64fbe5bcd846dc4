"""When a reader of a queue asks the broker."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest

from portalmq import wire
from portalmq.kombu.readers import GATHER_S, QueueReader


@pytest.mark.parametrize(
    ("count", "waits"),
    [(0, []), (1, []), (2, [GATHER_S]), (9, [GATHER_S]), (10, [])],
    ids=["none", "one", "a flow", "a fast flow", "a backlog"],
)
def test_only_messages_of_a_flow_gather_at_the_broker(count: int, waits: list[float]) -> None:
    places = Mock()
    places.wait_for_places.return_value = places.free_places.return_value = 10
    places.is_shared.return_value = False
    options: dict[str, Any] = {"visibility_timeout_s": 30.0, "wait_s": 1.0, "turn": threading.Lock()}
    reader = QueueReader("q", ["q"], Mock(group="q"), places, Mock(), deliver=Mock(), on_failure=Mock(), **options)
    messages = [wire.PackMessageOut(0, offset, b"", 0, receipt=str(offset)) for offset in range(count)]
    reader._receives = Mock(**{"receive.return_value": wire.PackReceived(messages)})
    reader.stopped = Mock(**{"is_set.return_value": False})
    reader.read()
    reader.stopped.wait.assert_not_called()
    reader.read()
    assert [each.args[0] for each in reader.stopped.wait.call_args_list] == waits
