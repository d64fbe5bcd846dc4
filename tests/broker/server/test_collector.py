"""A long full collection sets apart what it leaves, and closed replicas are found later all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from portalmq.broker.server.collector import CLOSED_MAX, LONG_S, FullCollections


class Times:
    """A clock, and a count of closed replicas."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 2 * LONG_S
        self.closed = 0


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def times() -> Iterator[Times]:
    times = Times()
    collections = FullCollections(lambda: times.closed, lambda: times.now_s)

    def pass_time(phase: str, info: object) -> None:
        times.now_s += times.step_s if phase == "stop" else 0.0

    gc.callbacks.append(pass_time)  # before the other: each collection takes twice LONG_S
    collections.start()
    yield times
    collections.close()
    gc.callbacks.remove(pass_time)
    assert gc.get_freeze_count() == 0


def test_what_was_there_at_the_start_is_set_apart(times: Times) -> None:
    assert gc.get_freeze_count() > 1_000
    assert len(gc.get_objects()) < 1_000


def test_what_a_long_full_collection_leaves_is_set_apart(times: Times) -> None:
    before, held = gc.get_freeze_count(), [Cycle() for _ in range(5_000)]
    gc.collect(1)
    assert gc.get_freeze_count() == before
    gc.collect()
    assert gc.get_freeze_count() >= before + len(held)


def test_a_short_one_sets_nothing_apart(times: Times) -> None:
    times.step_s = LONG_S / 2
    before, held = gc.get_freeze_count(), [Cycle() for _ in range(5_000)]
    gc.collect()
    assert gc.get_freeze_count() <= before
    assert len(held) == 5_000


def test_closed_replicas_are_found_once_they_are_many(times: Times) -> None:
    held = Cycle()
    gone = weakref.ref(held)
    gc.collect()
    del held
    times.closed = CLOSED_MAX - 1
    gc.collect()
    assert gone() is not None
    times.closed = CLOSED_MAX
    gc.collect()
    assert gone() is None
    assert gc.get_freeze_count() > 1_000
