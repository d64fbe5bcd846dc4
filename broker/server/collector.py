"""Full collections of Python's garbage collector, kept short.

A full collection looks at every container object while the event loop stands still: 1.4 s in a broker with 10,000
topics. What a long one leaves is alive, so it is set apart (gc.freeze): the next one looks only at newer objects.
Replicas that are closed later are cycles among those set apart: after many of them, all objects are looked at again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from time import perf_counter

LONG_S = 0.05
CLOSED_MAX = 1_000


class FullCollections:
    """Set apart what a long full collection leaves. `closed` returns how many replicas were closed in all."""

    def __init__(self, closed: Callable[[], int], clock: Callable[[], float] = perf_counter) -> None:
        self._closed = closed
        self._clock = clock
        self._closed_before = 0
        self._began = 0.0

    def start(self) -> None:
        """Set apart what is there now, and watch the collections of this process."""
        gc.freeze()
        gc.callbacks.append(self.on_collection)

    def close(self) -> None:
        gc.callbacks.remove(self.on_collection)
        gc.unfreeze()

    def on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        """Take a call of gc.callbacks, from any thread."""
        if info["generation"] != 2:
            return
        if phase == "start":
            if self._closed() - self._closed_before >= CLOSED_MAX:
                gc.unfreeze()
                self._closed_before = self._closed()
            self._began = self._clock()
        elif self._clock() - self._began >= LONG_S:
            gc.freeze()
