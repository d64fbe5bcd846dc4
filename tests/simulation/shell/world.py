"""One run: brokers, ZooKeeper, clients and faults on one simulated loop. One seed is one run.

World(seed).run()     raises Violation
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from random import Random
from typing import Any

import gevent
from simulation import bounds
from simulation.shell import patches
from simulation.shell.checker import Checker, Violation, observe
from simulation.shell.clients import Clients
from simulation.shell.faults import Faults
from simulation.shell.loop import START_S, Process, SimThreads, install
from simulation.shell.machine import Machine
from simulation.shell.network import SimNetwork, probe, refuses
from simulation.shell.options import draw
from simulation.shell.plane import ZooKeeper
from simulation.shell.small import SHELL

from portalmq.broker import wiring
from portalmq.broker.cluster import membership, replicas, topics
from portalmq.broker.replication import ticker

HEALED_WITHIN_S = 60.0
RUINED_S = 6.0
_ADDRESS = re.compile("0x[0-9a-f]+")


class World:
    """`left_out` are the numbers of faults that do not happen."""

    def __init__(
        self, seed: int, home: Path, *, left_out: Collection[int] = (), tell: Callable[[str], None] | None = None
    ) -> None:
        self.seed = seed
        self.home = home
        self.options, self.steps = draw(seed)
        self.left_out = left_out
        self.tell = tell
        self.loop = install(Random(f"loop {seed}"))
        self.loop.on_error = self._on_error
        self.random = Random(f"world {seed}")
        self.trace = hashlib.sha256()
        self.reached: Counter[str] = Counter()
        self.failure: Violation | None = None
        self.is_over = self.is_ruined = self.is_adopting = False
        self.is_doubtful = False  # an adoption has not noticed that a file was damaged
        self.buried: list[Any] = []
        self._install()
        self.network = SimNetwork(self)
        self.zookeeper = ZooKeeper(self)
        self.machines = {number: Machine(self, number) for number in range(1, self.options.brokers + 1)}
        self.checker = Checker(self)
        observe(self.checker)
        self.clients = Clients(self)
        self.faults = Faults(self)

    def _install(self) -> None:
        """Connect the process-wide replacements with this run."""
        loop, randomness = self.loop, Random(f"bytes {self.seed}")
        patches.use(
            lambda: loop.now_ns,
            lambda: loop.now_ns + loop.current.wall_ms * 1_000_000,
            lambda size: randomness.getrandbits(8 * size).to_bytes(size, "little") if size else b"",
        )
        patches.random.seed(f"module {self.seed}")
        world = self

        class SimProber:
            def __init__(self, **_: Any) -> None: ...

            def probe(self, url: str) -> Any:
                return probe(world, loop.current, url)

            def close(self) -> None: ...

        membership.Prober = SimProber  # type: ignore[misc,assignment]
        membership.probe_once = lambda url, **_: probe(world, loop.current, url)  # type: ignore[assignment]
        wiring.NativeThreads = SimThreads  # type: ignore[misc,assignment]
        replicas.Log.open = _opener(self.options.segment_bytes)  # type: ignore[method-assign]
        topics._configure = _configurer(self.options.segment_bytes)
        ticker.Ticker.__init__.__kwdefaults__["refuses"] = lambda url: refuses(world, loop.current, url)
        if self.tell is not None:
            logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False  # they ask greenlets
            handler = _Handler(self)
            logging.getLogger().handlers[:] = [handler]
            logging.getLogger().setLevel(logging.INFO)
        else:
            logging.disable(logging.CRITICAL)

    # --- what parts of the run need ----------------------------------------------------------------------------------

    @property
    def now_s(self) -> float:
        return self.loop.now_ns / 1e9 - START_S

    def machine_at(self, url: str) -> Machine:
        return self.machines[int(url.rpartition("-")[2].partition(":")[0])]

    def note(self, who: object, text: str, *values: object) -> None:
        """Add a line to the trace."""
        line = f"{self.now_s:10.6f} {who!s:>10} {text.format(*values)}"
        self.trace.update(line.encode() + b"\n")
        if self.tell is not None:
            self.tell(line)

    def fail(self, rule: str, why: str, cause: BaseException | None = None) -> None:
        """End the run with a violation."""
        if self.failure is None:
            why = _ADDRESS.sub("0x0", why)[:600]
            self.failure = Violation(f"{rule}: {why}")
            self.failure.__cause__ = cause
            self.note("world", "VIOLATION {}: {}", rule, why)
            if cause is not None and self.tell is not None:
                self.tell("".join(traceback.format_exception(cause)))
        self.loop.is_over = True

    def _on_error(self, process: Process, context: Any, error: BaseException) -> None:
        if not process.dead:
            self.fail("a greenlet died", f"{process}: {error!r} in {context!r}", error)

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.loop.spawn(self.loop.world, self._run)
            with bounds.of(self.seed, SHELL):
                self.loop.simulate()
        finally:
            self.is_over = True
            shutil.rmtree(self.home, ignore_errors=True)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            self._play()
        except Violation as failure:
            self.fail("check", str(failure), failure)
        finally:
            self.loop.is_over = True
            gevent.sleep(0)

    def _play(self) -> None:
        loop = self.loop
        for machine in self.machines.values():
            loop.after(self.random.random() * 0.2, loop.world, machine.start)
        self.clients.start()
        began_s = self.now_s
        for number, step in enumerate(self.steps):
            loop.wait(max(0.0, began_s + step.at_s - self.now_s))
            if number not in self.left_out:
                self.faults.do(number, step)
        loop.wait(max(0.0, began_s + self.options.faults_s - self.now_s))
        self.faults.heal()
        if self.is_ruined:
            loop.wait(RUINED_S)
            self.note("world", "ends in ruins")
            return
        self._await("every fault healed", self._is_whole)
        loop.wait(self.options.calm_s)
        self.clients.stop()
        self._await("all calls of clients ended", lambda: self.clients.idle)
        self._await("all replicas agree", self._agree)
        if self.options.restarts and not self.is_ruined:
            self._restart_all()
        if self.is_ruined:
            self.note("world", "ends in ruins")
            return
        self.checker.final()
        self.note("world", "ends well")

    def _restart_all(self) -> None:
        """Let every broker read its files again: one that is only good for the process that wrote it shows now."""
        power = self.random if self.random.random() < 0.5 else None
        for machine in self.machines.values():
            machine.end(again_s=self.random.random(), power=power)
        self.reached["restarted at the end"] += 1
        self._await("all brokers restarted at the end", self._is_whole)
        self._await("all replicas agree again", self._agree)

    def _await(self, what: str, is_so: Callable[[], object]) -> None:
        ends_s = self.now_s + HEALED_WITHIN_S
        while not is_so() and not self.is_ruined:
            if self.now_s > ends_s and self.is_doubtful and self.checker.has_damage():
                self.is_ruined = True  # the only copy was damaged, and clients are told so
                return
            if self.now_s > ends_s:
                raise Violation(f"liveness: not within {HEALED_WITHIN_S:.0f} s: {what}: {self.checker.state()}")
            self.loop.wait(0.05)

    def _is_whole(self) -> bool:
        """Whether each broker runs, and each partition has a leader and all of its replicas in sync."""
        return self.checker.is_whole()

    def _agree(self) -> bool:
        return self.checker.agree()


_open_log = replicas.Log.open


def _opener(segment_bytes: int) -> Any:
    """Return Log.open for segments that are smaller than a topic's settings allow."""
    return lambda directory, **named: _open_log(directory, **{**named, "segment_bytes": segment_bytes})


def _configurer(segment_bytes: int) -> Any:
    def configure(partition: Any, state: Any) -> None:
        _configure(partition, state)
        partition.log.segment_bytes = segment_bytes

    return configure


_configure = topics._configure


class _Handler(logging.Handler):
    """The log of the shell, as lines of the trace that is printed (and not part of its hash)."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        world = self._world
        if world.tell is not None:
            world.tell(f"{world.now_s:10.6f} {world.loop.current!s:>10}   . {record.getMessage()[:300]}")
            if record.exc_info:
                world.tell("".join(traceback.format_exception(*record.exc_info)))
