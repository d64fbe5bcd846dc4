"""Links between brokers, clients and ZooKeeper: each message has a delay of its own, gets lost, or arrives twice.

A link has two directions. A cut direction loses all messages; a clogged one holds them until it opens again, and then
delivers all of them at once, in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.world import World

Place = int | str
CLIENTS = "clients"
ZOOKEEPER = "zookeeper"


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.drop = world.options.drop
        self.duplicate = world.options.duplicate
        self.heavy_tail = world.options.heavy_tail
        self._cuts: defaultdict[tuple[Place, Place], int] = defaultdict(int)
        self._clogs: defaultdict[tuple[Place, Place], int] = defaultdict(int)
        self._held: defaultdict[tuple[Place, Place], list[Callable[[], None]]] = defaultdict(list)

    # --- messages ----------------------------------------------------------------------------------------------------

    def send(self, source: Place, target: Place, deliver: Callable[..., None], *content: Any) -> None:
        random = self.world.random
        link = source, target
        if self._cuts[link] > 0 or (self.drop and random.random() < self.drop):
            return
        copies = 2 if self.duplicate and random.random() < self.duplicate else 1
        for copy in range(copies):
            if self._clogs[link] > 0:
                self._held[link].append(lambda: self.world.after(self.delay(), deliver, *content))
            else:
                late = random.randint(0, self.world.options.late_copies_ms) if copy else 0
                self.world.after(self.delay() + late, deliver, *content)

    def delay(self) -> int:
        random = self.world.random
        if self.heavy_tail and random.random() < self.heavy_tail:
            return int(random.paretovariate(0.7) * 20) % 10_000
        return random.randint(0, self.world.options.delay_ms)

    # --- links -------------------------------------------------------------------------------------------------------

    def is_cut(self, source: Place, target: Place) -> bool:
        return self._cuts[source, target] > 0

    def is_open(self, source: Place, target: Place) -> bool:
        """Return whether a call from `source` would be answered in time."""
        there, back = (source, target), (target, source)
        return not (self._cuts[there] or self._cuts[back] or self._clogs[there] or self._clogs[back])

    def cut(self, source: Place, target: Place, duration_ms: int) -> None:
        self._cuts[source, target] += 1
        self.world.after(duration_ms, self._mend, source, target)

    def clog(self, source: Place, target: Place, duration_ms: int) -> None:
        self._clogs[source, target] += 1
        self.world.after(duration_ms, self._unclog, source, target)

    def _mend(self, source: Place, target: Place) -> None:
        self._cuts[source, target] = max(0, self._cuts[source, target] - 1)

    def _unclog(self, source: Place, target: Place) -> None:
        self._clogs[source, target] = max(0, self._clogs[source, target] - 1)
        if self._clogs[source, target] == 0:
            for release in self._held.pop((source, target), []):
                release()

    def heal(self, *, wholly: bool) -> None:
        """Open all links; with `wholly` also stop losing, repeating and delaying messages."""
        self._cuts.clear()
        for source, target in list(self._clogs):
            self._clogs[source, target] = 1
            self._unclog(source, target)
        if wholly:
            self.drop = self.duplicate = self.heavy_tail = 0.0
