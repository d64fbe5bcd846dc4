"""Schedules in the simulation, with `--schedules N`: recurring messages in a topic of their own, changed, moved and
paused while brokers fail.

    S1   no tick of a schedule is twice in the logs, whatever partitions it went to, and its ticks are in order in each
    S2   while some broker was always up and nobody changed a schedule, none of its ticks is missing
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from portalmq import wire
from portalmq.broker.schedules.timetable import cron_line
from portalmq.control_plane.schedules import ScheduleSpec
from portalmq.errors import InvalidRequest, ScheduleNotFound

if TYPE_CHECKING:
    from simulation.shell.clients import Clients

TICKS = "ticks"
EVERY_MS = 1_000
LOOK_S = 0.05

cron_line("* * * * *", "UTC")  # reads the zones from the real disk


class Recurring:
    """The schedules of a run. Every other one is never changed."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.world = clients.world
        self.found: dict[str, list[tuple[int, int]]] = {}  # (tick, partition) by schedule, in the order of the logs
        self.was_down = False

    def start(self) -> None:
        seed = self.world.seed
        self.clients.spawn(self._watch)
        self.clients.spawn(self._begin, Random(f"schedules {seed}"))

    def _watch(self) -> None:
        """Note when no broker is up. At the start none is."""
        machines = self.world.machines.values()
        while not self.clients.stopping and not any(each.broker is not None and each.broker.ready for each in machines):
            self.clients.loop.wait(LOOK_S)
        while not self.clients.stopping:
            self.was_down |= not any(each.broker is not None and each.broker.ready for each in machines)
            self.clients.loop.wait(LOOK_S)

    def _begin(self, random: Random) -> None:
        clients, options = self.clients, self.world.options
        request = wire.CreateTopic(partitions=1 + random.randrange(3), replication_factor=options.replication)
        created = None
        while created is None:
            clients.loop.wait(0.05)
            with contextlib.suppress(InvalidRequest):  # too few brokers are up
                created = clients.patiently(random, lambda broker: broker.create_topic(TICKS, request))
        for number in range(options.schedules):
            clients.spawn(self._keep, number, Random(f"schedule {self.world.seed} {number}"))

    def _keep(self, number: int, random: Random) -> None:
        """Create a schedule, change it now and then, and delete it at the end."""
        clients, name = self.clients, f"s{number}"

        def put(value: int, key: bytes | None) -> None:
            spec = ScheduleSpec(TICKS, None, EVERY_MS, "UTC", str(value).encode(), "text/plain", key)
            clients.patiently(random, lambda broker: broker.schedules.put(name, spec))

        put(0, None)
        change = 0
        while not clients.stopping:
            clients.loop.wait(0.2 + random.random())
            if number % 2 or clients.stopping:
                continue
            change += 1
            what = random.choice(("value", "key", "pause"))
            if what == "pause":
                with contextlib.suppress(ScheduleNotFound):  # ZooKeeper was adopted anew, without it
                    clients.patiently(random, lambda broker: broker.schedules.pause(name, paused=True))
                    clients.patiently(random, lambda broker: broker.schedules.pause(name, paused=False))
            else:
                put(change, random.choice((b"a", b"b", b"c")) if what == "key" else None)
            self.world.reached["schedule changed"] += 1
        with contextlib.suppress(ScheduleNotFound):  # a repeat
            clients.patiently(random, lambda broker: broker.schedules.delete(name))

    # --- the end -----------------------------------------------------------------------------------------------------

    def stored(self, number: int, log: Sequence[Any]) -> None:
        """Take the ticks in the log of a partition."""
        for batch in log:
            for record in batch.records:
                tick = datetime.fromisoformat(record.headers["portalmq-tick"])
                ticks = self.found.setdefault(record.headers["portalmq-schedule"], [])
                ticks.append((round(tick.timestamp() * 1_000), number))

    def check(self) -> None:
        has_jumped = any(step.kind in {"clock", "adopt", "ruin"} for step in self.world.steps)
        for name, found in self.found.items():
            ticks = [tick for tick, _ in found]
            self.world.reached["ticks"] += len(ticks)
            if len(set(ticks)) < len(ticks):
                twice = sorted({tick for tick in ticks if ticks.count(tick) > 1})
                self.world.fail("S1", f"{name} has the ticks {twice} twice: {found}")
            if any(after <= before for (before, at), (after, other) in pairwise(found) if at == other):
                self.world.fail("S1", f"the ticks of {name} are not in order: {found}")
            is_kept = int(name[1:]) % 2 == 1
            gaps = [(before, after) for before, after in pairwise(sorted(ticks)) if after - before != EVERY_MS]
            if is_kept and gaps and not self.was_down and not has_jumped:
                self.world.fail("S2", f"{name} misses ticks: {gaps} of {ticks}")
