"""Leaders that are killed at intervals, and started again, while something else runs.

with LeaderKills(cluster, 20, lambda number: cluster.leader("t")) as kills:
    ...
print(kills.count)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from support.cluster import Cluster

END_WITHIN_S = 120.0


class LeaderKills:
    """Each `every_s` seconds kills the broker that `victim` names, given the number of kills so far, and starts it
    again. Leaving the block heals the cluster, and raises what went wrong here."""

    def __init__(self, cluster: Cluster, every_s: float, victim: Callable[[int], int | None]) -> None:
        self.count = 0
        self._cluster, self._every_s, self._victim = cluster, every_s, victim
        self._ended = threading.Event()
        self._fault: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="leader-kills", daemon=True)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._every_s):
                victim = self._victim(self.count)
                if victim is not None:
                    self._cluster.kill(victim)
                    self.count += 1
                    self._cluster.start(victim)
        except BaseException as fault:  # noqa: BLE001 - raised in __exit__
            self._fault = fault

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(END_WITHIN_S)
        self._cluster.heal()
        if fault is None and self._fault is not None:
            raise self._fault
