"""A broker's machine: its disk, and one life of a broker after the other, each a real Broker."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import apsw
from gevent.lock import BoundedSemaphore
from simulation.shell.disk import SimDisk
from simulation.shell.loop import Process
from simulation.shell.network import SimPool
from simulation.shell.plane import SimPlane

from portalmq.broker.broker import Broker
from portalmq.broker.cluster.retry_budget import RetryBudget
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition.clock import Clock
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.storage.errors import StorageError
from portalmq.control_plane.catalog import BrokerIdTaken, Catalog
from portalmq.control_plane.plane import PlaneError
from portalmq.control_plane.state import BrokerState

if TYPE_CHECKING:
    from simulation.shell.world import World

log = logging.getLogger(__name__)

START_WITHIN_S = 20.0
RESTART_S = 0.5
LOW_WATER_BYTES = 64 * 1024
# Descriptors of one broker, in runs in which it has to close files for others.
FEW_FILES = 12


class FreeSpace:
    """A DiskGuard without a ballast."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk

    def full(self, now_ms: int) -> bool:
        disk = self._disk
        return disk.limit is not None and disk.limit - disk.used < LOW_WATER_BYTES

    def release(self) -> bool:
        return False


def _alone(work: Callable[[], None]) -> Callable[[], None]:
    """Let `work` be done by one greenlet at a time: faults ask for it too, and a broker has one loop for it."""
    turn = BoundedSemaphore()

    def call() -> None:
        if turn.acquire(blocking=False):
            try:
                work()
            finally:
                turn.release()

    return call


class Life:
    """A broker from its start to its end."""

    def __init__(self, machine: Machine, disk: SimDisk, incarnation: int) -> None:
        self.machine = machine
        self.world = machine.world
        self.disk = disk
        self.number = incarnation
        self.process = Process(f"b{machine.number}.{incarnation}", machine.number)
        self.process.wall_ms = machine.wall_ms
        self.process.work_ns = machine.work_ns
        self.broker: Broker | None = None
        self.on_end: list[Callable[[], None]] = []
        self.ended = False
        disk.on_io = self._on_io

    def run(self) -> None:
        world, machine = self.world, self.machine
        try:
            self._start()
        except Exception as fault:  # noqa: BLE001 - the process ends
            world.note(self.process, "cannot start: {}", fault)
            is_known = isinstance(fault, PlaneError) or (isinstance(fault, StorageError) and machine.is_hurt)
            if not is_known:
                world.fail("a broker could not start", repr(fault), fault)
            machine.end(again_s=RESTART_S)

    def _start(self) -> None:
        world, machine, loop = self.world, self.machine, self.world.loop
        plane = SimPlane(world, self.process, world.options.session_s)
        patience = RetryBudget(START_WITHIN_S)
        patience(plane.start)
        catalog = Catalog(plane)
        patience(lambda: catalog.cluster_id("simulated"))
        if not machine.is_claimed:
            self._claim(catalog, patience)
        incarnation = patience(
            lambda: catalog.next_incarnation(machine.number, machine.store_uuid, machine.incarnation)
        )
        machine.incarnation = incarnation
        config = BrokerConfig(
            host=machine.host,
            data_dir=self.disk.root,
            session_timeout_ms=int(1_000 * world.options.session_s),
            replica_lag_ms=world.options.lag_ms,
            fetch_wait_ms=world.options.fetch_wait_ms,
            broker_id=machine.number,
        )
        process = self.process
        steady_ns, wall_ns = lambda: loop.now_ns, lambda: loop.now_ns + process.wall_ms * 1_000_000
        broker = patience(
            lambda: Broker(
                config,
                catalog,
                broker_id=machine.number,
                me=BrokerState(config.url, incarnation, machine.store_uuid),
                disk=FreeSpace(self.disk),  # type: ignore[arg-type]
                metrics=Metrics("simulated"),
                on_fatal=self._on_fatal,
                clock=Clock(steady_ns, wall_ns),
            )
        )
        if world.options.few_files:
            broker.topics._replicas.files._open_files.budget = FEW_FILES
        broker.maintenance.compact = _alone(broker.maintenance.compact)  # type: ignore[method-assign]
        broker.peers._pool = SimPool(world, machine, process)
        self.broker = broker
        if not world.options.schedules:  # its reads of the control plane would move all seeds
            broker.schedule_runner.start = lambda: None  # type: ignore[method-assign]
        broker.start(patience)
        world.note(process, "is ready")
        world.reached["started"] += 1

    def _claim(self, catalog: Catalog, patience: RetryBudget) -> None:
        """Take the id for this disk, once the broker with the former one has gone, as preflight.py does."""
        machine, loop = self.machine, self.world.loop
        until_ns = loop.now_ns + int(START_WITHIN_S * 1e9)
        while not machine.is_claimed:
            try:
                patience(lambda: catalog.claim_broker_id(machine.store_uuid, machine.number))
                machine.is_claimed = True
            except BrokerIdTaken:
                if loop.now_ns > until_ns:
                    raise
                loop.wait(0.2)

    def _on_fatal(self, fault: BaseException) -> None:
        """End as the process does: answers are still sent, then it exits."""
        if self.ended:
            return
        self.world.note(self.process, "ends: {}", fault)
        self.world.reached["ended itself"] += 1
        known = (isinstance(fault, StorageError) and self.machine.is_hurt) or isinstance(fault, PlaneError)
        if not known:
            self.world.fail("a broker ended", f"{self.process}: {fault!r}", fault)
        self.world.loop.after(0.1, self.process, self._exit)

    def _exit(self) -> None:
        if self.machine.life is self:
            self.machine.end(again_s=RESTART_S)

    def _on_io(self, kind: str, name: str) -> None:
        machine = self.machine
        left = machine.ios_to_crash
        if left is not None:
            machine.ios_to_crash = left - 1
            if left <= 0:
                machine.ios_to_crash = None
                self.world.note(self.process, "crashes at {} {}", kind, name)
                self.world.reached[f"crash at {kind}"] += 1
                machine.end(again_s=machine.crash_again_s, power=machine.crash_power)


class Machine:
    """`is_hurt`: its disk has had faults, so the end of a broker is explained."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.host = f"broker-{number}"
        self.url = f"http://{self.host}:5000"
        self.store_uuid = f"store-{number}"
        self.incarnation = 0
        self.lives = self.disks = 0
        self.life: Life | None = None
        self.wall_ms = 0
        self.work_ns = (20_000, 400_000)
        self.is_hurt = self.is_claimed = False
        self.has_lost_writes = False  # by an fsync that failed: a power cut may leave any part of them
        self.is_read_s = 0.0  # by another process, from the next start on
        self.ios_to_crash: int | None = None
        self.crash_power: Random | None = None
        self.crash_again_s = 1.0
        self._disk: SimDisk | None = None
        self._power: Random | None = None

    @property
    def broker(self) -> Broker | None:
        return None if self.life is None else self.life.broker

    def start(self) -> None:
        if self.life is not None or self.world.is_over:
            return
        if self.world.is_adopting:
            self.world.loop.after(0.2, self.world.loop.world, self.start)
            return
        self.lives += 1
        root = Path(f"b{self.number}.{self.lives}")
        disk = self._image(root) or SimDisk(root)
        if self.is_read_s:
            self._read_elsewhere(disk)
        self.life = Life(self, disk, self.lives)
        self.world.note(self.life.process, "starts")
        self.world.loop.spawn(self.life.process, self.life.run)

    def _read_elsewhere(self, disk: SimDisk) -> None:
        """Read every segment as another process does, which stands still in the middle of it."""
        held = []
        for name in sorted(disk.names):
            if name.endswith(".sqlite") and f"{name}-wal" in disk.names:
                reader = apsw.Connection(str(disk.root / name), flags=apsw.SQLITE_OPEN_READWRITE)
                with contextlib.suppress(apsw.Error):  # it is damaged
                    reader.execute("BEGIN; SELECT count(*) FROM meta").fetchall()
                    held.append(reader)
        self.world.note(f"machine {self.number}", "has {} files that are read", len(held))
        self.world.reached["read elsewhere"] += len(held)
        self.world.loop.after(self.is_read_s, self.world.loop.world, lambda: [reader.close(True) for reader in held])
        self.world.buried.append(held)
        self.is_read_s = 0.0

    def _image(self, root: Path) -> SimDisk | None:
        """Return the disk as the last life left it."""
        before, self._disk = self._disk, None
        if before is None:
            return None
        disk = before.image(root, self._power)
        disk.limit = before.limit
        return disk

    def read_disk(self) -> SimDisk | None:
        """Return the disk of a machine that is off, for somebody else to work on before the next start."""
        self.lives += 1
        self._disk, self._power = self._image(Path(f"b{self.number}.{self.lives}")), None
        return self._disk

    def replace_disk(self) -> None:
        """The next life finds an empty disk."""
        self.disks += 1
        self._disk = None
        self.store_uuid = f"store-{self.number}.{self.disks}"
        self.incarnation = 0
        self.is_claimed = False

    def set_clock(self, wrong_ms: int) -> None:
        self.wall_ms = wrong_ms
        if self.life is not None:
            self.life.process.wall_ms = wrong_ms
        self.world.checker.history.set_clocks(each.wall_ms for each in self.world.machines.values())

    def end(self, *, again_s: float | None, power: Random | None = None) -> None:
        """End the broker at once: nothing of it runs any more. Start the next one after a while."""
        life, loop = self.life, self.world.loop
        if life is None or life.ended:
            return
        life.ended = True
        self.life = None
        life.process.dead = True
        life.process.paused = False
        life.disk.is_dead = True
        self._disk, self._power = life.disk, power
        self.ios_to_crash = None
        self.world.buried.append(life)
        for ended in life.on_end:
            ended()
        self.world.note(life.process, "has ended{}", "" if power is None else ", the power is cut")
        if power is not None:
            # Now, while the unsynced writes are those of this moment.
            self._disk = life.disk
        if again_s is not None:
            loop.after(again_s, loop.world, self.start)
