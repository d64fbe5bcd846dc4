"""Full collections of Python's garbage collector, kept short.

A full collection looks at every container object while the event loop stands still: 1.4 s in a broker with 10,000
topics. So what a long one leaves is set apart (gc.freeze), and the next looks only at newer objects. Objects that were
set apart and die later are found only if no cycle holds them; replicas are cycles. So after some closed replicas, and
once a day for all else, all objects are looked at again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Mapping
from time import monotonic, thread_time
from typing import Protocol

LONG_S = 0.05
CLOSED_MIN = 10
# All objects are looked at again when so many replicas were closed: the part of those that are open.
CLOSED_PART = 10
EVERY_S = 86_400.0


class CountedReplicas(Protocol):
    @property
    def closed_count(self) -> int:
        """How many replicas were closed since the start."""
        ...

    def partitions(self) -> Collection[object]: ...


class FullCollections:
    """Sets apart what a long full collection leaves. `worked` returns the seconds that this thread has worked, without
    pauses of the process."""

    def __init__(
        self,
        replicas: CountedReplicas,
        worked: Callable[[], float] = thread_time,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._replicas = replicas
        self._worked = worked
        self._clock = clock
        self._closed_before = replicas.closed_count
        self._next_s = clock() + EVERY_S
        self._began_s = 0.0

    def start(self) -> None:
        """Set apart what is there now, and watch the collections of this process."""
        gc.freeze()
        gc.callbacks.append(self.on_collection)

    def close(self) -> None:
        """End the watch before Python ends: it deletes objects that are set apart only after the modules they use."""
        gc.callbacks.remove(self.on_collection)
        gc.unfreeze()

    def on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Take a call of gc.callbacks, from any thread: a collection begins and ends in one."""
        if info["generation"] != 2:
            return
        if phase == "start":
            if self._is_due():
                gc.unfreeze()
                self._closed_before = self._replicas.closed_count
                self._next_s = self._clock() + EVERY_S
            self._began_s = self._worked()
        elif self._worked() - self._began_s >= LONG_S:
            gc.freeze()

    def _is_due(self) -> bool:
        closed = self._replicas.closed_count - self._closed_before
        limit = max(CLOSED_MIN, len(self._replicas.partitions()) // CLOSED_PART)
        return closed >= limit or self._clock() >= self._next_s
