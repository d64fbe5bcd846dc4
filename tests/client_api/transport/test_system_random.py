"""The module `random` is the user's: clients neither draw from it nor follow its seed."""

from __future__ import annotations

import random
import time

from portalmq.producers.batching import Lane
from portalmq.producers.partitions import ProducerTopic
from portalmq.transport.cluster_metadata import ClusterMetadata
from portalmq.transport.retries import Backoff


def choices() -> list[object]:
    lanes: list[Lane] = [object()] * 1_000_000  # type: ignore[list-item]
    book = ClusterMetadata("localhost:5000", time.monotonic)
    return [Backoff().next_s(), ProducerTopic(lanes, 0.0).sticky, book._share]


def test_clients_do_not_use_the_users_random_numbers() -> None:
    random.seed(7)
    before = random.getstate()
    first = choices()
    assert random.getstate() == before
    random.seed(7)
    assert choices() != first
