"""The faults, and when they stop. They stay within the guarantees of the brokers: the last clean copy of the log among
the in-sync replicas is not destroyed (except in a disaster, which an operator has to resolve)."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from simulation.disk import Disk
from simulation.network import CLIENTS, ZOOKEEPER, Place

from portalmq.control_plane import controller

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.world import World


class Faults:
    def __init__(self, world: World) -> None:
        self.world = world
        self.names = list(world.options.faults)
        self.weights = list(world.options.faults.values())
        self.stopped = False
        self._lies = Random(f"lies of {world.options.seed}")  # randomness of its own: other seeds remain the same
        self._next()

    def _next(self) -> None:
        self.world.after(self.world.random.randint(1, 2 * self.world.options.fault_every_ms), self._strike)

    def _strike(self) -> None:
        if self.stopped:
            return
        name = self.world.random.choices(self.names, self.weights)[0]
        self.world.count(name)
        getattr(self, name)()
        self._next()

    # --- processes ---------------------------------------------------------------------------------------------------

    def _some(self) -> Node:
        return self.world.nodes[self.world.random.choice(self.world.ids)]

    def _leader(self) -> Node:
        leader = self.world.zookeeper.tree.partition.leader
        return self._some() if leader is None else self.world.nodes[leader]

    def _a_while(self, most_ms: int = 5_000) -> int:
        return self.world.random.choice([10, 100, 500, 2_000, most_ms]) + self.world.random.randint(0, 100)

    def kill(self, node: Node) -> None:
        if node.alive:
            node.crash()
            self.world.after(self._a_while(), self.restart, node)

    def restart(self, node: Node) -> None:
        if not self.stopped or node is not self.world.left_dead:
            node.start()

    def crash(self) -> None:
        self.kill(self._some())

    def kill_leader(self) -> None:
        self.kill(self._leader())

    def kill_controller(self) -> None:
        held = self.world.zookeeper.tree.controller
        if held is not None:
            self.kill(self.world.nodes[held[0].broker_id])

    def crash_all(self) -> None:
        """A power cut. One disk may have lied about what it had fsynced. Its broker's registration ends at once then:
        with min_insync_replicas 1 an election that trusts it could leave the liar alone in the ISR."""
        world = self.world
        node = world.nodes[self._lies.choice(world.ids)]
        lies = bool(node.disk.batches) and world.is_quiet() and world.may_lose(node)
        for each in world.nodes.values():
            self.kill(each)
        if lies and self._lies.random() < 0.7:
            world.has_lied = True
            world.count("disk lied")
            world.zookeeper.forget(node)
            world.checker.disk_lost(node.disk)
            node.disk.forget(self._lies.randint(1, 8))
            world.note(node.id, "has forgotten what is behind {}, as {}", node.disk.end, node.store)

    def pause(self) -> None:
        self._some().pause(self._a_while(3 * self.world.options.session_ms))

    def pause_leader(self) -> None:
        self._leader().pause(self._a_while(3 * self.world.options.session_ms))

    def clock_jump(self) -> None:
        self._some().wall_offset_ms += self.world.random.choice([-3_600_000, -5_000, 5_000, 3_600_000])

    def drain(self) -> None:
        node = self._some()
        if node.alive and not node.paused:
            node.membership.drain()
            node.soon(1_000, self._stop_cleanly, node)

    def _stop_cleanly(self, node: Node) -> None:
        node.crash(cleanly=True)
        self.world.after(self._a_while(), self.restart, node)

    # --- links -------------------------------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        return [*self.world.ids, ZOOKEEPER, CLIENTS]

    def cut(self) -> None:
        source, target = self.world.random.sample(self._places(), 2)
        duration = self._a_while()
        self.world.network.cut(source, target, duration)
        if self.world.chance(0.5):
            self.world.network.cut(target, source, duration)

    def isolate(self) -> None:
        node = self._some() if self.world.chance(0.5) else self._leader()
        duration = self._a_while()
        spared = {place for place in (ZOOKEEPER, CLIENTS) if self.world.chance(0.5)}
        for other in self._places():
            if other != node.id and other not in spared:
                self.world.network.cut(node.id, other, duration)
                self.world.network.cut(other, node.id, duration)

    def mistake(self) -> None:
        """The leader is cut off from the brokers by something that refuses connections, as if it had ended: another is
        elected at once, while clients still reach the old one."""
        node, duration = self._leader(), self._a_while()
        self.world.mistaken_until[node.id] = self.world.now + duration
        for other in self.world.ids:
            if other != node.id:
                self.world.network.cut(node.id, other, duration)
                self.world.network.cut(other, node.id, duration)
                boss = self.world.nodes[other]
                if boss.alive and not boss.paused:
                    boss.membership.mistake(node.id)

    def clog(self) -> None:
        source, target = self.world.random.sample([*self.world.ids, CLIENTS], 2)
        self.world.network.clog(source, target, self._a_while())

    def swizzle(self) -> None:
        """Clog brokers one after the other, and open them in another order."""
        random = self.world.random
        for number, source in enumerate(random.sample(self.world.ids, random.randint(1, len(self.world.ids)))):
            self.world.after(number * 50, self._clog_all, source, random.randint(500, 3_000))

    def _clog_all(self, source: int, duration_ms: int) -> None:
        for target in self._places():
            if target not in (source, ZOOKEEPER):
                self.world.network.clog(source, target, duration_ms)

    # --- ZooKeeper ---------------------------------------------------------------------------------------------------

    def end_session(self, node: Node) -> None:
        if node.alive and node.membership.session is not None and not node.membership.session.expired:
            self.world.zookeeper.expire(node.membership.session)

    def expire_session(self) -> None:
        living = [session for session in self.world.zookeeper.sessions if not session.expired]
        if living:
            self.world.zookeeper.expire(self.world.random.choice(living))

    def zookeeper_gone(self) -> None:
        self.world.zookeeper.gone_until = self.world.now + self._a_while()

    def depose_controller(self) -> None:
        held = self.world.zookeeper.tree.controller
        if held is not None:
            self.world.zookeeper.expire(self.world.zookeeper.sessions[held[1] - 1])

    # --- disks -------------------------------------------------------------------------------------------------------

    def disk_full(self) -> None:
        self.fill_disk(self._some())

    def fill_disk(self, node: Node) -> None:
        disk = node.disk
        disk.full = True
        self.world.after(self._a_while(1_000), self._make_room, disk)

    def _make_room(self, disk: Disk) -> None:
        disk.full = False

    def disk_slow(self) -> None:
        disk = self._some().disk
        disk.slow_ms = self.world.random.choice([50, 300, 1_000])
        self.world.after(self._a_while(), self._speed_up, disk)

    def _speed_up(self, disk: Disk) -> None:
        disk.slow_ms = 0

    def fsync_fails(self) -> None:
        """COMMIT raises: the process ends, and its write may be there at the next start."""
        self.kill(self._some())

    def disk_replaced(self) -> None:
        node = self._some()
        if self.world.may_lose(node):
            self.world.replace_disk(node)
            self.world.after(self._a_while(), self.restart, node)

    def bit_flip(self) -> None:
        node = self._some()
        if node.disk.batches and self.world.may_lose(node):
            node.disk.flipped.add(self.world.random.choice(node.disk.batches).uid)

    # --- not faults, but work at odd times ---------------------------------------------------------------------------

    def retain(self) -> None:
        node = self._some() if self.world.chance(0.5) else self._leader()
        if node.alive and not node.paused:
            node.shell.retain()

    def zombie(self) -> None:
        if len(self.world.producers) < 8:
            self.world.random.choice(self.world.producers).fork()

    # --- a disaster, and an operator ---------------------------------------------------------------------------------

    def disaster(self) -> None:
        """All clean in-sync replicas lose their disks; an operator elects the best of the others by name."""
        world = self.world
        held = world.zookeeper.tree.partition
        for member in held.isr:
            world.replace_disk(world.nodes[member])
            world.nodes[member].start()
        self._elect_uncleanly()

    def _elect_uncleanly(self) -> None:
        world = self.world
        held = world.zookeeper.tree.partition
        living = [node for node in world.nodes.values() if node.id in held.replicas and node.alive and not node.paused]
        chosen = max(living, key=lambda node: (node.shell.replica.last_epoch, node.disk.end), default=None)
        if chosen is None:
            world.after(100, self._elect_uncleanly)
            return
        elected = controller.elect_unclean(held, chosen.id, chosen.incarnation, chosen.store)
        world.note("operator", "elects {} in epoch {}", chosen.id, elected.leader_epoch)
        world.count("disaster")
        world.checker.overruled(elected.leader_epoch)
        world.zookeeper.set_by_operator(elected)
