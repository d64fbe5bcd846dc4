"""The faults of a run, and their end."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from simulation.shell.checker import TOPIC
from simulation.shell.machine import RESTART_S
from simulation.shell.operator import adopt
from simulation.shell.options import Step
from simulation.shell.plane import ZOOKEEPER

from portalmq.broker.storage.epochs import EPOCHS_NAME
from portalmq.broker.storage.errors import Shortage, StorageError
from portalmq.broker.storage.schema import PAGE_BYTES
from portalmq.errors import PortalMQError

if TYPE_CHECKING:
    from simulation.shell.disk import SimDisk
    from simulation.shell.machine import Machine
    from simulation.shell.world import World

    from portalmq.broker.broker import Broker

DAY_MS = 86_400_000
_SEGMENT = re.compile(r"/\d+\.sqlite$")
_STATE = re.compile(r"/state\.sqlite$")
_DAMAGED = re.compile(r"/(\d+\.sqlite|state\.sqlite|manifest\.\w+)$")


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = world.loop
        self._healed = False

    def do(self, number: int, step: Step) -> None:
        self.world.reached[step.kind] += 1
        getattr(self, f"_{step.kind}")(Random(step.seed), step)

    def _note(self, text: str, *values: object) -> None:
        self.world.note("fault", text, *values)

    def _any(self, random: Random) -> Machine:
        return random.choice(list(self.world.machines.values()))

    def _later(self, seconds: float, undo: object, *values: object) -> None:
        self.loop.after(seconds, self.loop.world, undo, *values)  # type: ignore[arg-type]

    # --- brokers -----------------------------------------------------------------------------------------------------

    def _kill(self, random: Random, step: Step) -> None:
        self._any(random).end(again_s=random.choice((0.1, 1.0, 4.0)))

    def _power(self, random: Random, step: Step) -> None:
        self._any(random).end(again_s=random.choice((0.3, 1.0, 4.0)), power=random)

    def _crash_at_io(self, random: Random, step: Step) -> None:
        machine = self._any(random)
        machine.crash_power = random if random.random() < 0.7 else None
        machine.crash_again_s = random.choice((0.1, 1.0, 4.0))
        machine.ios_to_crash = random.choice((random.randint(0, 30), random.randint(0, 300)))
        self._note("broker {} crashes after {} I/Os", machine.number, machine.ios_to_crash)

    def _kill_leader(self, random: Random, step: Step) -> None:
        power = random if random.random() < 0.5 else None
        self._leader(random).end(again_s=random.choice((0.1, 1.0, 4.0)), power=power)

    def _lose_grants(self, random: Random, step: Step) -> None:
        """Let a leader commit some messages. Then cut it off from its followers, so that clients get what no other
        broker knows of, and kill it."""
        if self._waits_for_a_leader(random, step):
            return
        clients, machine = self.world.clients, self._leader(random)
        others = [number for number in self.world.machines if number != machine.number]
        power = random if random.random() < 0.3 else None

        def cut_off() -> None:
            self._sever(random, {pair for each in others for pair in ((machine.number, each), (each, machine.number))})
            clients.hoard(random, machine)
            self._later(random.random(), lambda: machine.end(again_s=random.choice((0.1, 1.0, 4.0)), power=power))

        clients.press(random, machine, batches=random.choice((0, 5, 20)), size=20)
        self._later(random.random() * 0.4, cut_off)

    def _leader(self, random: Random) -> Machine:
        """Return the machine that leads one of the partitions, most often of those that clients use, or any."""
        states = self.world.checker.states
        leaders = sorted({state.leader for state in states.values() if state.leader})
        ours = self._leaders_up()
        if ours and random.random() < 0.7:
            return random.choice(ours)
        return self.world.machines[random.choice(leaders)] if leaders else self._any(random)

    def _leaders_up(self) -> list[Machine]:
        """Return the machines that lead what clients use, and run."""
        checker = self.world.checker
        keys = [checker.key_of(TOPIC, number) for number in range(self.world.options.partitions)]
        leaders = [checker.states[key].leader for key in keys if key in checker.states]
        found = [self.world.machines[leader] for leader in leaders if leader is not None]
        return [machine for machine in found if machine.broker is not None and machine.broker.ready]

    def _waits_for_a_leader(self, random: Random, step: Step) -> bool:
        """Whether a fault has to come later, since there is nothing yet that it could hit."""
        if self._healed or self._leaders_up() or random.random() < 0.1:
            return False
        self._later(0.2, lambda: None if self._healed else getattr(self, f"_{step.kind}")(random, step))
        return True

    def _kill_controller(self, random: Random, step: Step) -> None:
        for machine in self.world.machines.values():
            if machine.broker is not None and machine.broker.membership.is_controller:
                machine.end(again_s=random.choice((0.1, 1.0, 4.0)))
                return

    def _power_all(self, random: Random, step: Step) -> None:
        for machine in self.world.machines.values():
            machine.end(again_s=random.random() * 2, power=random)

    def _stop(self, random: Random, step: Step) -> None:
        """SIGTERM: drain, close, and start again."""
        machine = self._any(random)
        life = machine.life
        if life is None or life.broker is None or not life.broker.ready:
            return
        broker = life.broker
        self._note("{} is stopped", life.process)

        def stop() -> None:
            self._close(broker)
            self._note("{} has closed", life.process)
            self.world.reached["stopped in order"] += 1
            if machine.life is life:
                machine.end(again_s=random.choice((0.1, 1.0)))

        def patience() -> None:
            if machine.life is life:
                machine.end(again_s=0.1)

        self.loop.spawn(life.process, stop)
        self._later(20.0, patience)

    def _pause(self, random: Random, step: Step) -> None:
        machine = self._any(random)
        life = machine.life
        if life is None or life.process.paused:
            return
        seconds = random.random() * random.choice((0.5, 2.0)) * self.world.options.session_s
        self._note("{} is paused for {:.2f} s", life.process, seconds)
        life.process.paused = True
        self._later(seconds, self._resume, life)

    def _resume(self, life) -> None:  # type: ignore[no-untyped-def]
        if life.process.paused and not life.process.dead:
            self._note("{} goes on", life.process)
            self.loop.resume(life.process)

    # --- the network and ZooKeeper -----------------------------------------------------------------------------------

    def _expire(self, random: Random, step: Step) -> None:
        sessions = [each for each in self.world.zookeeper.sessions if not each.expired]
        if sessions:
            self.world.zookeeper.expire(random.choice(sessions))

    def _cut(self, random: Random, step: Step) -> None:
        numbers = [ZOOKEEPER, *self.world.machines]
        source, target = random.sample(numbers, 2)
        links = {(source, target)} | ({(target, source)} if random.random() < 0.6 else set())
        self._sever(random, links)

    def _depose(self, random: Random, machine: Machine) -> None:
        """Cut all links of a broker, that to ZooKeeper too, until another one may lead."""
        number = machine.number
        others = [each for each in [*self.world.machines, ZOOKEEPER] if each != number]
        links = {pair for each in others for pair in ((number, each), (each, number))}
        self._sever(random, links, self.world.options.session_s, random.random())

    def _isolate(self, random: Random, step: Step) -> None:
        number = self._any(random).number
        others = [each for each in [*self.world.machines, ZOOKEEPER] if each != number]
        if random.random() < 0.4:
            others.remove(ZOOKEEPER)
        self._sever(random, {pair for each in others for pair in ((number, each), (each, number))})

    def _sever(
        self, random: Random, links: set[tuple[int, int]], at_least_s: float = 0.0, more_s: float | None = None
    ) -> None:
        seconds = at_least_s + (random.random() * 3 * self.world.options.session_s if more_s is None else more_s)
        self._note("cut for {:.2f} s: {}", seconds, sorted(links))
        self.world.network.cut |= links
        self._later(seconds, self._mend, links)

    def _mend(self, links: set[tuple[int, int]]) -> None:
        self.world.network.cut -= links

    def _zookeeper_gone(self, random: Random, step: Step) -> None:
        seconds = random.random() * 2 * self.world.options.session_s
        self._note("ZooKeeper is gone for {:.2f} s", seconds)
        self.world.zookeeper.is_gone = True
        self._later(seconds, self._zookeeper_back)

    def _zookeeper_back(self) -> None:
        self.world.zookeeper.is_gone = False

    def _adopt(self, random: Random, step: Step) -> None:
        """ZooKeeper loses everything, and a file may be damaged before somebody adopts the disks. Sometimes replicas
        were behind, and all that were not are damaged."""
        checker = self.world.checker
        if self.world.is_adopting or not checker.states:
            return
        if random.random() < 0.5:
            victim = (self._leader(random) if random.random() < 0.5 else self._any(random)).number
            self._lose_control_plane(random, {victim} if random.random() < 0.8 else set())
            return
        key = random.choice(sorted(checker.states))
        state = checker.states[key]
        least = min(checker.known(key).least, len(state.replicas))
        behind = [number for number in state.replicas if number != state.leader][: len(state.replicas) - least]
        others = [*self.world.machines]
        self._sever(
            random,
            {pair for each in behind for to in others for pair in ((each, to), (to, each)) if each != to},
            at_least_s=self.world.options.lag_ms / 1000 + 2,
        )
        self._later(
            self.world.options.lag_ms / 1000 + random.random() * 2,
            lambda: self._lose_control_plane(random, set(state.replicas) - set(behind), key),
        )

    def _lose_control_plane(self, random: Random, damaged: set[int], key: tuple[str, int] | None = None) -> None:
        if self._healed or self.world.is_adopting:
            return
        self._note("ZooKeeper has lost everything")
        lives = [machine.life for machine in self.world.machines.values() if machine.life is not None]
        ready = [life for life in lives if life.broker is not None and life.broker.ready]
        stops = random.random() < 0.5  # somebody stops the brokers in order first
        for life in ready if stops else ():
            self.loop.spawn(life.process, self._close, life.broker)

        def go() -> None:
            if not self._healed and not self.world.is_adopting:
                adopt(self.world, random, set() if self.world.checker.is_hurt else damaged, key)
            for life in ready if stops else ():
                if life.machine.life is life:
                    life.machine.end(again_s=0.1)

        self._later(0.5 if stops else 0.0, go)

    def _close(self, broker: Broker) -> None:
        broker.drain()
        broker.close()

    # --- disks and clocks --------------------------------------------------------------------------------------------

    def _fsync_fails(self, random: Random, step: Step) -> None:
        machine = self._any(random)
        if machine.life is not None:
            machine.is_hurt = machine.has_lost_writes = True
            machine.life.disk.fsyncs_to_fail = random.choice((1, 1, 3))
            if random.random() < 0.5:
                machine.is_read_s = random.random() * 3
                self._later(RESTART_S + random.random() * 1.5, lambda: machine.end(again_s=0.1, power=random))
            self._note("an fsync of broker {} is going to fail", machine.number)

    def _disk_full(self, random: Random, step: Step) -> None:
        machine = self._any(random)
        if machine.life is not None:
            disk = machine.life.disk
            machine.is_hurt = True
            disk.limit = disk.used + random.choice((0, 1, 4, 16)) * random.randint(0, 16 * 1024)
            self._note("broker {} has {} bytes left", machine.number, disk.limit - disk.used)
            self._later(random.random() * 6, self._make_room, machine)

    def _full_at_roll(self, random: Random, step: Step) -> None:
        """Leave a little room at the moment in which a broker begins its next file of a log: any of its writes may be
        the first that has none. It begins it for a message, or for a compaction. Cut it off until another one leads,
        before or at that moment, or kill the leader of something, so that what was written is cut off again. Whoever
        made room may restart the broker."""
        if self._waits_for_a_leader(random, step):
            return
        machine = self._leader(random)
        if machine.life is None:
            return
        what, disk = random.random(), machine.life.disk
        left = random.choice((random.randint(0, 96 * 1024), random.randint(32, 72) * 1024, None, None))
        changes = random.randint(0, 9)
        self._note("broker {} will begin its next segment with {} bytes left", machine.number, left)

        def begins(name: str) -> None:
            machine.is_hurt = True
            if left is None:
                disk.changes_to_full = changes
            else:
                disk.limit = disk.used + left
            self.world.reached["full at a roll"] += 1
            self._later(random.random() * 3 + (3 if what < 0.3 else 0), self._make_room, machine)
            if what < 0.3:
                self._depose(random, machine)
            elif what < 0.4:
                self._later(random.random(), self._kill_leader, random, step)
            if random.random() < 0.3:
                self._later(3 + random.random() * 3, self._restart, machine)

        disk.on_segment, disk.segments_to_go = begins, random.choice((0, 0, 1, 3))
        self.world.clients.press(random, machine, batches=random.choice((3, 6, 12, 24)), size=12_000)
        if self.world.options.compacts and random.random() < 0.6:
            self._later(0.2 + random.random(), self._compact_at, machine)
        elif what >= 0.4:
            self._later(random.choice((0.0, random.random() * 0.3)), self._depose, random, machine)

    def _restart(self, machine: Machine) -> None:
        if not self._healed:
            machine.end(again_s=0.1)

    def _make_room(self, machine: Machine) -> None:
        if machine.life is not None:
            machine.life.disk.limit = None
            machine.life.disk.changes_to_full = None
        if machine._disk is not None:
            machine._disk.limit = None

    def make_room(self) -> bool:
        """Make room on every disk. Return whether one was full, or nearly."""
        disks = [machine._disk for machine in self.world.machines.values() if machine._disk is not None]
        were_full = any(disk.limit is not None or disk.changes_to_full is not None for disk in disks)
        for disk in disks:
            disk.limit = disk.changes_to_full = None
        return were_full

    def _disk_slow(self, random: Random, step: Step) -> None:
        machine = self._any(random)
        machine.work_ns = (1_000_000, random.choice((20, 200, 1_000)) * 1_000_000)
        if machine.life is not None:
            machine.life.process.work_ns = machine.work_ns
        self._later(random.random() * 3, self._fast, machine)

    def _fast(self, machine: Machine) -> None:
        machine.work_ns = (20_000, 400_000)
        if machine.life is not None:
            machine.life.process.work_ns = machine.work_ns

    def _clock(self, random: Random, step: Step) -> None:
        """Set a clock. One that is set ahead is most often of a leader whose log has just rolled, and retention runs
        before it is put right."""
        ahead = random.choice((-1, 1, 1))
        if ahead > 0 and self._waits_for_a_leader(random, step):
            return
        machine = self._leader(random) if random.random() < 0.7 else self._any(random)
        wrong_ms = ahead * random.choice((5_000, 3_600_000, DAY_MS, 8 * DAY_MS, 8 * DAY_MS))
        batches = random.choice((0, 4, 8))
        if ahead > 0 and batches:
            self.world.clients.press(random, machine, batches=batches, size=12_000)
            self._later(0.5 + random.random() / 2, self._set_clock, random, machine, wrong_ms)
        else:
            self._set_clock(random, machine, wrong_ms)

    def _set_clock(self, random: Random, machine: Machine, wrong_ms: int) -> None:
        if self._healed:
            return
        machine.set_clock(wrong_ms)
        self._note("the clock of broker {} is wrong by {} ms", machine.number, machine.wall_ms)
        for _ in range(2):
            self._later(random.random() * 2, self.retain_at, machine)

    def _replace_disk(self, random: Random, step: Step) -> None:
        """A machine comes back with an empty disk, where no record is lost with it."""
        machine = self._any(random)
        if machine.life is None or not self.world.checker.may_lose(machine.number):
            return
        if any(each.disks and each.life is None for each in self.world.machines.values()):
            return  # a new topic may still be given to the store that is gone, and to this one
        self._note("the disk of broker {} is replaced", machine.number)
        self.world.reached["disk replaced"] += 1
        self.world.checker.lose(machine.number)
        machine.end(again_s=random.choice((0.5, 3.0)))
        machine.replace_disk()

    def _flip(self, random: Random, step: Step) -> None:
        """Damage a file of a replica, where no record is lost with it: a state.sqlite has none."""
        machine = self._any(random)
        if machine.life is not None and random.random() < 0.5:
            self.damage(machine, machine.life.disk, random, _STATE)
        elif machine.life is not None and self.world.checker.may_lose(machine.number):
            self.damage(machine, machine.life.disk, random)
            if random.random() < 0.5:  # the pages in its memory are whole
                self._later(random.random(), self._restart, machine)

    def _flip_epochs(self, random: Random, step: Step) -> None:
        """Damage the file of all epochs of a broker. The process that has read it still knows them; after its end those
        that cannot be read may be forgotten, as far as no log and no state.sqlite has them."""
        machine = self._any(random)
        if machine.life is not None and machine.life.disk.flip(EPOCHS_NAME, random):
            self._note("a bit of {} on broker {} flips", EPOCHS_NAME, machine.number)
            self.world.reached["bit flipped in epochs"] += 1
            self.world.checker.damaged_epochs(machine.number)

    def damage(self, machine: Machine, disk: SimDisk, random: Random, kind: re.Pattern[str] = _DAMAGED) -> None:
        checker = self.world.checker
        names = sorted(name for name in disk.names if name.startswith("partitions/") and kind.search(name))
        if not names:
            return
        segments = [name for name in names if _SEGMENT.search(name)]
        name = random.choice(segments if segments and random.random() < 0.7 else names)
        if disk.flip(name, random, spoils_page=random.random() < 0.5):
            _, folder, number, file = name.split("/")
            key = folder.rpartition("@")[2], int(number)
            self._note("a bit of {} on broker {} flips", name, machine.number)
            self.world.reached["bit flipped in " + ("state" if file.startswith("state") else "log")] += 1
            if file.startswith("state"):
                checker.known(key).doubted.add(machine.number)
            else:
                known = checker.known(key)
                known.lossy.add(machine.number)
                known.damaged[machine.number] = known.of(machine.number).store or machine.store_uuid  # not opened yet

    def _ruin(self, random: Random, step: Step) -> None:
        """Damage all replicas of a partition alike, as a bad library does, and kill all brokers. The run cannot end
        well any more: it only shows that nothing destroys what is left."""
        world, checker = self.world, self.world.checker
        key = random.choice(sorted(checker.states) or [("", 0)])
        if checker.known(key).lossy:
            return  # a replica with a flipped bit that nobody has met yet would count as whole
        for machine in world.machines.values():
            if machine.life is not None and self.behead(machine, machine.life.disk, key, random):
                world.is_ruined = True
                world.reached["ruined"] += 1
        if world.is_ruined:
            for machine in world.machines.values():
                machine.end(again_s=0.1)

    def behead(self, machine: Machine, disk: SimDisk, key: tuple[str, int], random: Random) -> bool:
        """Damage the first bytes of the last segment of a replica: it cannot be opened. Return whether it was."""
        known = self.world.checker.known(key)
        mine = [name for name in sorted(disk.names) if f"@{key[0]}/{key[1]}/" in name and _SEGMENT.search(name)]
        if not mine or _has_first_page(disk, f"{mine[-1]}-wal"):
            return False  # the next start would write the page again
        if not disk.flip(mine[-1], random, below=16):
            return False
        self._note("{} on broker {} is damaged", mine[-1], machine.number)
        known.lossy.add(machine.number)
        known.beheaded.add(machine.number)
        return True

    # --- work that destroys ------------------------------------------------------------------------------------------

    def _retain(self, random: Random, step: Step) -> None:
        self.retain_at(self._any(random))

    def retain_at(self, machine: Machine) -> None:
        life = machine.life
        if life is not None and life.broker is not None:
            self._note("{} runs retention", life.process)
            self.loop.spawn(life.process, self._do, life.broker, life.broker.maintenance.retain)

    def _compact(self, random: Random, step: Step) -> None:
        self._compact_at(self._leader(random))

    def _compact_at(self, machine: Machine) -> None:
        self._work(machine, "compacts", lambda broker: broker.maintenance.compact())

    def _rest(self, random: Random, step: Step) -> None:
        """Save what is due, and close files that are not in use."""
        self._work(
            self._leader(random),
            "rests",
            lambda broker: (broker.maintenance.save_state(), broker.maintenance.close_idle_files()),
        )

    def _work(self, machine: Machine, what: str, work: Callable[[Broker], object]) -> None:
        life = machine.life
        if life is None or life.broker is None or not life.broker.ready:
            return
        broker = life.broker
        self._note("{} {}", life.process, what)
        self.loop.spawn(life.process, self._do, broker, lambda: work(broker))

    def _do(self, broker: Broker, work: Callable[[], object]) -> None:
        """Do what Maintenance does in time, and take its errors as it does."""
        try:
            work()
        except (PortalMQError, Shortage):
            self.world.reached["maintenance refused"] += 1
        except StorageError as fault:
            broker.storage_failed(fault)

    def _purge(self, random: Random, step: Step) -> None:
        self.world.clients.purge(random)

    # --- the end of all faults ---------------------------------------------------------------------------------------

    def heal(self) -> None:
        world = self.world
        self._healed = True
        self._note("all faults end")
        world.network.heal()
        world.zookeeper.heal()
        for machine in world.machines.values():
            machine.ios_to_crash = None
            machine.set_clock(0)
            self._fast(machine)
            self._make_room(machine)
            if machine.life is None:
                self._later(0.5, machine.start)
                continue
            machine.life.disk.fsyncs_to_fail = 0
            self._resume(machine.life)


def _has_first_page(disk: SimDisk, log: str) -> bool:
    """Return whether a write-ahead log has the first page of its file."""
    inode = disk.inode(log)
    content = b"" if inode is None else inode.live()
    return any(content[at : at + 4] == b"\0\0\0\1" for at in range(32, len(content) - 24, 24 + PAGE_BYTES))
