"""A long full collection sets apart what it leaves, and closed replicas are found later all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from portalmq.broker.server.collector import CLOSED_MIN, CLOSED_PART, EVERY_S, LONG_S, FullCollections


class Process:
    """The clocks of a process in which a collection takes `step_s`, and its replicas."""

    def __init__(self) -> None:
        self.now_s = self.worked_s = 0.0
        self.step_s = 2 * LONG_S
        self.closed_count = 0
        self.open: list[object] = []

    def partitions(self) -> list[object]:
        return self.open

    def collect(self, phase: str, info: object) -> None:
        self.worked_s += self.step_s if phase == "stop" else 0.0


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    collections = FullCollections(process, lambda: process.worked_s, lambda: process.now_s)
    gc.callbacks.append(process.collect)  # before the other
    collections.start()
    yield process
    collections.close()
    gc.callbacks.remove(process.collect)
    assert gc.get_freeze_count() == 0


@pytest.fixture
def gone(process: Process) -> weakref.ref[Cycle]:
    """A reference to a cycle that was set apart and is garbage."""
    held = Cycle()
    reference = weakref.ref(held)
    gc.collect()
    del held
    gc.collect()
    assert reference() is not None
    return reference


def test_what_was_there_at_the_start_is_set_apart(process: Process) -> None:
    assert gc.get_freeze_count() > 10 * len(gc.get_objects())


def test_what_a_long_full_collection_leaves_is_set_apart(process: Process) -> None:
    before, held = gc.get_freeze_count(), [Cycle() for _ in range(5_000)]
    gc.collect(1)
    assert gc.get_freeze_count() <= before
    gc.collect()
    assert gc.get_freeze_count() >= before + len(held) // 2


def test_a_short_one_sets_nothing_apart(process: Process) -> None:
    process.step_s = LONG_S / 2
    before, held = gc.get_freeze_count(), [Cycle() for _ in range(5_000)]
    gc.collect()
    assert gc.get_freeze_count() <= before
    assert len(held) == 5_000


@pytest.mark.parametrize("open_replicas", [0, 1_000])
def test_closed_replicas_are_found_once_they_are_many(
    open_replicas: int, process: Process, gone: weakref.ref[Cycle]
) -> None:
    process.open = [None] * open_replicas
    limit = max(CLOSED_MIN, open_replicas // CLOSED_PART)
    process.closed_count = limit - 1
    gc.collect()
    assert gone() is not None
    process.closed_count = limit
    gc.collect()
    assert gone() is None


def test_all_else_is_found_once_a_day(process: Process, gone: weakref.ref[Cycle]) -> None:
    process.now_s = EVERY_S
    gc.collect()
    assert gone() is None
