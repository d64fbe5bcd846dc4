"""Writes of one partition that a test holds back, and then lets through or has the disk refuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.errors import DiskFull


class HeldWrites:
    def __init__(self) -> None:
        self._decided = threading.Event()
        self._refuses = False

    def let_through(self) -> None:
        self._decided.set()

    def refuse(self) -> None:
        """Refuse the transaction that is held. Later ones are written."""
        self._refuses = True
        self._decided.set()

    def decided(self) -> bool:
        """Wait on a native thread for the decision. Return whether the transaction is to be written."""
        self._decided.wait()
        refuses, self._refuses = self._refuses, False
        return not refuses


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch, partition: Partition) -> Iterator[HeldWrites]:
    """Hold what is appended to the partition until the test decides. The end of the block lets it through."""
    partition._writer.wait_idle()
    writes, append = HeldWrites(), partition.log.append

    def held(batches: object) -> None:
        if not writes.decided():
            raise DiskFull("no room, says the test")
        append(batches)

    with monkeypatch.context() as patch:
        patch.setattr(partition.log, "append", held)
        try:
            yield writes
        finally:
            writes.let_through()
            partition._writer.wait_idle()
