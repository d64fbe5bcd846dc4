"""One seed, one run: a heap of (time, tie, action), one source of randomness, and everything that uses them."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

from simulation import bounds, conditions
from simulation.checker import Checker, Violation
from simulation.client import Consumer, Producer
from simulation.dice import Dice
from simulation.disk import Disk
from simulation.faults import Faults
from simulation.group_clients import Operator, Pauser, QueueConsumer, Rescheduler
from simulation.group_options import GroupOptions
from simulation.network import Network
from simulation.node import Node
from simulation.options import draw
from simulation.outbox import Destination
from simulation.queue_groups import Receipt
from simulation.stream_clients import Member
from simulation.zookeeper import Tree, ZooKeeper

from portalmq.control_plane.state import BrokerState, PartitionState, min_insync

EVENTS = 1_500
HEALING_MS = 60_000
TRACE_LINES_KEPT = 100_000


class World:
    """`tracing` keeps a line of text for each event; without it nothing is formatted."""

    def __init__(self, seed: int, events: int = EVENTS, *, tracing: bool = False) -> None:
        self.random = Dice(seed)
        self.options = draw(seed, events, self.random)
        self.tracing = tracing
        self.trace: deque[str] = deque(maxlen=TRACE_LINES_KEPT)
        self._seed = seed
        self.reached: Counter[str] = Counter()
        self.now = 0
        self.events = 0
        self.acked = 0
        self.slowness = 0.05
        self.fetch_batches_max = self.options.fetch_batches_max
        self.acked_before = 0
        self.mistaken_until: dict[int, int] = {}  # brokers whose peers' connections another component refuses
        self.dying = False
        self.left_dead: Node | None = None
        self.has_lied = False
        self.healed = False
        self.healed_at = 0  # the high watermark at that time
        self._heap: list[tuple[int, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0
        self._uids = 0
        self._incarnations = 0
        self._stores = 0
        self._producer_epochs = 0
        self.ids = list(range(1, self.options.brokers + 1))
        groups = self.options.groups
        self.queue_groups = {queue.name: queue for queue in groups.queues} if groups else {}
        self.checker = Checker(self)
        self.network = Network(self)
        self.nodes = {broker_id: Node(self, broker_id, Disk(self._next_store())) for broker_id in self.ids}
        if groups is not None and groups.skewed:
            for node in self.nodes.values():
                node.wall_offset_ms = self.random.choice([-3_600_000, 0, 3_600_000])
        early = self.ids[: self.options.brokers - self.options.late_brokers]
        self.zookeeper = ZooKeeper(self, self._first_tree(early))
        self.partitions: dict[int, PartitionState] = {0: self.zookeeper.tree.partition}
        for broker_id, node in self.nodes.items():
            if broker_id in early:
                node.start()
            else:
                self.after(self.random.randint(500, 5_000), node.start)
        self.producers = [
            Producer(self, 100 + number if self.chance(0.7) else None) for number in range(self.options.producers)
        ]
        self.consumers = [Consumer(self), Consumer(self)]
        self.faults = Faults(self)
        self.kept_receipts: list[tuple[str, list[Receipt]]] = []
        self.members: list[Member] = []
        if groups is not None:
            self.destination = Destination(self)
            self.queue_consumers = [
                QueueConsumer(self, name) for name in self.queue_groups for _ in range(groups.consumers)
            ]
            self.members += [Member(self, f"m{number}") for number in range(groups.members)]
            self.operator = Operator(self)
            if groups.pauses:
                self.pausers = [Pauser(self, name) for name in self.queue_groups]
                self.rescheduler = Rescheduler(self)
        if self.options.disaster:
            self.after(self.random.randint(1_000, 6_000), self.faults.disaster)

    def _first_tree(self, early: list[int]) -> Tree:
        """The partition is made while the early brokers are there; each of them starts as its first incarnation."""
        replicas = tuple(early[: self.options.replication_factor])
        stores = {broker_id: self.nodes[broker_id].disk.store_uuid for broker_id in early}
        incarnations = {broker_id: number for number, broker_id in enumerate(early, 1)}
        partition = PartitionState(
            replicas[0],
            1,
            replicas,
            replicas,
            {broker_id: stores[broker_id] for broker_id in replicas},
            {broker_id: incarnations[broker_id] for broker_id in replicas},
        )
        brokers = {id: (BrokerState("", incarnations[id], stores[id]), 0) for id in early}
        return Tree(partition, 0, brokers)

    # --- the basics --------------------------------------------------------------------------------------------------

    def after(self, delay_ms: int, act: Callable[..., None], *content: Any) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + delay_ms, self.random.random(), self._pushed, act, content))

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def note(self, who: object, text: str, *content: object) -> None:
        if self.tracing:
            self.trace.append(f"{self.now:>7} {who!s:>9}  {text.format(*content)}")

    def count(self, what: str) -> None:
        self.reached[what] += 1

    def next_uid(self) -> int:
        self._uids += 1
        return self._uids

    def next_incarnation(self) -> int:
        self._incarnations += 1
        return self._incarnations

    def next_producer_epoch(self) -> int:
        self._producer_epochs += 1
        return self._producer_epochs

    def _next_store(self) -> str:
        self._stores += 1
        return f"s{self._stores}"

    @property
    def groups(self) -> GroupOptions:
        assert self.options.groups is not None
        return self.options.groups

    # --- shared by several -------------------------------------------------------------------------------------------

    def may_lose(self, node: Node) -> bool:
        """Return whether a clean in-sync replica is left.

        Of the recorded ISR fewer than min_insync may be lost at once: an election trusts the ephemerals of the others,
        and removes lost members down to that number. While a change is under way it may bring this one in.
        """
        held = self.zookeeper.tree.partition
        if node.alive and node.shell.isr_changing:
            return False
        members = {*held.isr} if self.is_quiet() else {*held.isr, node.id}
        clean = {member for member in members if self.is_clean(member, held)}
        if node.id in clean:
            lost = len(members) - len(clean) + 1
            if lost >= max(2, min_insync(held, self.options.min_insync)):
                return False
        return any(not self.nodes[member].disk.flipped for member in clean - {node.id})

    def is_clean(self, member: int, held: PartitionState) -> bool:
        disk = self.nodes[member].disk
        return disk.replica_store == held.store_uuids.get(member) and not disk.is_forgetful

    def replace_disk(self, node: Node) -> None:
        """Give the broker a new, empty disk. The process that used the old one has ended."""
        node.crash()
        self.checker.disk_lost(node.disk)
        node.disk = Disk(self._next_store())
        self.note(node.id, "gets a new disk, {}", node.disk.store_uuid)

    def suspected(self, by: int, suspect: int) -> None:
        held = self.zookeeper.tree.controller
        if held is not None:
            boss = self.nodes[held[0].broker_id]
            if boss.alive and not boss.paused and (boss.id == by or self.network.is_open(by, boss.id)):
                boss.membership.suspect(suspect)

    def isr_change_leaves(self, node: Node) -> None:
        self.count("isr change")
        if not self.faults.stopped and self.chance(self.options.trouble_in_isr_change):
            self.count("trouble in isr change")
            trouble = self.random.choice([self.faults.kill, self.faults.end_session, self.faults.fill_disk])
            self.after(self.random.randint(0, 30), trouble, node)

    # --- running -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now, _, _, act, content = heapq.heappop(self._heap)
        self.events += 1
        act(*content)

    def run(self) -> None:
        """Inject faults for the given number of events; then heal, and check the recovery. Raises Violation."""
        with bounds.of(self._seed):
            self._run()

    def _run(self) -> None:
        last, step = self.options.events, self.step
        while self.events < last:
            step()
        self.heal()
        deadline = self.now + HEALING_MS
        self.acked_before = self._acknowledged()
        while (missing := self.missing()) is not None:
            if self.now > deadline:
                raise Violation(f"liveness: {HEALING_MS // 1000} s after all faults: {missing}")
            for _ in range(20):
                self.step()
        if wrong := conditions.check(Random(f"conditions {self._seed}")):
            raise Violation(f"conditions: {wrong}")
        self.checker.groups.biographies.check(Random(f"biographies {self._seed}"), self.now)

    def refuses(self, broker_id: int) -> bool:
        """Return whether another process refuses its peers' connections in its place."""
        return self.now < self.mistaken_until.get(broker_id, 0)

    def heal(self) -> None:
        """End the faults as the options say."""
        self.note("world", "heals: {}", self.options.after)
        self.faults.stopped = True
        self.healed = True
        self.healed_at = self.checker.high_watermark
        self.mistaken_until.clear()
        self.network.heal(wholly=self.options.after != "rough")
        self.slowness = 0.0
        self.fetch_batches_max = 100
        if self.options.after != "rough":
            self.zookeeper.heal()
        self.zookeeper.gone_until = 0
        if self.options.after == "one dead":
            self.dying = True
            self.after(self.random.randint(0, 5_000), self._leave_one_dead)
        for node in self.nodes.values():
            node.disk.full = False
            node.disk.slow_ms = 0
            node.wall_offset_ms = 0 if self.options.groups is not None else node.wall_offset_ms
            node.resume(node.life)
            node.start()

    def _leave_one_dead(self) -> None:
        self.dying = False
        held = self.zookeeper.tree.partition
        needed = self.options.min_insync or (min(self.options.replication_factor, len(self.ids)) // 2 + 1)
        candidates = [
            node
            for node in self.nodes.values()
            if self.is_quiet()
            and self.may_lose(node)
            and min(self.options.replication_factor, len(held.replicas)) - 1 >= needed
        ]
        if candidates:
            self.left_dead = self.random.choice(candidates)
            self.left_dead.crash()
            self.count("left dead")
            self.acked_before = self._acknowledged()

    def is_quiet(self) -> bool:
        """Return whether no change of the ISR is under way: no leader waits for one, and none that a controller or a
        crashed broker sent is still to be carried out."""
        on_its_way = self.now <= self.zookeeper.partition_settled_ms
        return not on_its_way and not any(node.alive and node.shell.isr_changing for node in self.nodes.values())

    def missing(self) -> str | None:
        """Return the first deviation from the state of a world without faults; None if there is none."""
        held = self.zookeeper.tree.partition
        if self.dying:
            return "one is to die yet"
        if held.leader is None:
            return None if self._awaits_an_operator(held) else "no leader"
        node = self.nodes[held.leader]
        if not node.alive or not node.shell.replica.may_serve(self.now):
            return f"leader {node.id} does not serve"
        if self._acknowledged() <= self.acked_before:
            return "nothing is acknowledged"
        if self.options.after == "rough":
            return None
        live = {replica for replica in held.replicas if self.nodes[replica].alive}
        if not live <= set(held.isr):
            return f"{live} live, {held.isr} in sync"
        if len(held.replicas) < min(self.options.replication_factor, len(self.ids) - (self.left_dead is not None)):
            return f"only {held.replicas} have replicas"
        return self._unreadable(node) or self._unsettled(node)

    def _awaits_an_operator(self, held: PartitionState) -> bool:
        """Only one copy is guaranteed (min_insync 1), an election trusted an ephemeral and left one replica in the ISR,
        and its disk is lost, or it is left dead: clean copies elsewhere are no longer in sync."""
        back = [member for member in held.isr if self.nodes[member] is not self.left_dead]
        if any(self.is_clean(member, held) for member in back) or min_insync(held, self.options.min_insync) > 1:
            return False
        self.count("awaits an operator")
        return True

    def _acknowledged(self) -> int:
        """Return how many batches clients know to be stored. On a network that stays rough those count, too, that
        brokers have answered: an answer may come after its client has given up."""
        return self.acked + (len(self.checker.acked) if self.options.after == "rough" else 0)

    def _unsettled(self, node: Node) -> str | None:
        """Return the group work that existed when the faults ended and is unfinished."""
        if node.shell.host is None:
            return None
        return self.checker.groups.missing(node.shell.host, self.healed_at)

    def _unreadable(self, node: Node) -> str | None:
        """Check that every acknowledged record is readable, except for those that retention dropped."""
        end = self.checker.high_watermark
        if node.shell.replica.high_watermark < end:
            return f"high watermark {node.shell.replica.high_watermark} of {end}"
        for base, (uid, acked_end) in self.checker.acked.items():
            if base >= node.disk.start:
                found = node.disk.ending_at(acked_end)
                if found is None or found.uid != uid:
                    raise Violation(f"I3: acknowledged #{uid} at {base} is not readable at leader {node.id}")
        return None
