"""ZooKeeper as brokers see it: one history of trees; each session reads at some point of it, never backwards.

A request has a delay, is carried out in the order its client sent it, and its answer has a delay. Either may get lost:
the client sees a lost connection, and the request may have been carried out, or may still be, before the next one of
the same client. A session ends after its timeout without a request, or when the seed says so; its ephemerals may
outlive it for a while. Watches fire late, twice, or not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from simulation.network import ZOOKEEPER

from portalmq.broker.core.stream.events import GroupMembers as Group
from portalmq.control_plane.state import BrokerState, ControllerState, PartitionState

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.world import World


@dataclass(frozen=True, slots=True)
class Tree:
    """The state at one moment. Ephemerals carry the number of their session."""

    partition: PartitionState
    version: int
    brokers: Mapping[int, tuple[BrokerState, int]]
    controller: tuple[ControllerState, int] | None = None
    controller_epoch: int = 0
    group: Group | None = None
    group_version: int = -1


class Conflict(Exception):
    """The tree is not as the request expects it; nothing was applied."""


class Failure(Enum):
    CONFLICT = "conflict"
    LOST = "connection lost"
    EXPIRED = "session expired"


Request = Callable[[Tree], Tree]
Answer = Callable[[Tree | Failure], None]


@dataclass(slots=True, eq=False)
class Session:
    number: int
    node: Node
    life: int
    expires_ms: int
    seen: int
    expired: bool = False
    executed_ms: int = 0
    answered_ms: int = 0


class ZooKeeper:
    def __init__(self, world: World, tree: Tree) -> None:
        self.world = world
        self.trees = [tree]
        self.times = [0]
        self.gone_until = 0
        self.stale_reads = world.options.stale_reads
        self.missed_watches = world.options.missed_watches
        self.connection_loss = world.options.connection_loss
        self.outliving_ms = world.options.outliving_ms
        self.sessions: list[Session] = []
        self.partition_settled_ms = -1  # until then writes of the partition's state are under way

    @property
    def tree(self) -> Tree:
        return self.trees[-1]

    # --- sessions ----------------------------------------------------------------------------------------------------

    def connect(self, node: Node) -> Session | None:
        """Return a new session, or None when no server answers."""
        if not self.reachable(node):
            return None
        number = len(self.sessions) + 1
        timeout = self.world.options.session_ms
        lag = self.world.random.randint(0, 3_000) if self.world.chance(self.stale_reads) else 0
        session = Session(number, node, node.life, self.world.now + timeout, self._index(lag))
        self.sessions.append(session)
        self.world.after(timeout, self._check, session)
        return session

    def reachable(self, node: Node) -> bool:
        return self.world.now >= self.gone_until and self.world.network.is_open(node.id, ZOOKEEPER)

    def heard(self, session: Session) -> bool:
        """Record a heartbeat. Return False when the session is over."""
        if not session.expired:
            session.expires_ms = max(session.expires_ms, self.world.now + self.world.options.session_ms)
        return not session.expired

    def _check(self, session: Session) -> None:
        if session.expired:
            return
        if self.world.now < self.gone_until:  # no server is up to expire it; every session gets its full timeout again
            session.expires_ms = max(session.expires_ms, self.gone_until + self.world.options.session_ms)
        if self.world.now >= session.expires_ms:
            self.expire(session)
        else:
            self.world.after(session.expires_ms - self.world.now, self._check, session)

    def expire(self, session: Session) -> None:
        self.world.note("zookeeper", "expires session {} of {}", session.number, session.node.id)
        session.expired = True
        self.world.after(self.world.random.randint(0, self.outliving_ms), self._remove_ephemerals, session.number)

    def forget(self, node: Node) -> None:
        """End all sessions of a broker and its registration, one that outlives its session too."""
        for session in [each for each in self.sessions if each.node is node]:
            session.expired = True
            self._remove_ephemerals(session.number)
        if node.id in self.tree.brokers:
            self._remove_ephemerals(self.tree.brokers[node.id][1])

    def _remove_ephemerals(self, number: int) -> None:
        brokers = {id: entry for id, entry in self.tree.brokers.items() if entry[1] != number}
        controller = self.tree.controller
        if controller is not None and controller[1] == number:
            controller = None
        if len(brokers) != len(self.tree.brokers) or controller is not self.tree.controller:
            self._stands(replace(self.tree, brokers=brokers, controller=controller))

    # --- requests ----------------------------------------------------------------------------------------------------

    def write(
        self, session: Session, request: Request, answer: Answer, what: str, *, of_partition: bool = False
    ) -> None:
        self._submit(session, lambda: self._apply(session, request, what), answer)
        if of_partition:
            self.partition_settled_ms = max(self.partition_settled_ms, session.executed_ms)

    def read(self, session: Session, answer: Answer, *, synced: bool = False) -> None:
        self._submit(session, lambda: self._read(session, synced), answer)

    def _submit(self, session: Session, execute: Callable[[], Tree | Failure], answer: Answer) -> None:
        world = self.world
        random = world.random
        if not self.reachable(session.node) or random.random() < self.connection_loss / 2:
            # The request is lost, or delayed.
            late = random.random() < 0.3
            if late:
                self._execute_at(session, random.randint(0, 1_000), execute, None)
            world.after(random.randint(0, 300), session.node.hear, session.life, answer, Failure.LOST)
        else:
            self._execute_at(session, world.network.delay(), execute, answer)

    def _execute_at(
        self, session: Session, delay: int, execute: Callable[[], Tree | Failure], answer: Answer | None
    ) -> None:
        session.executed_ms = max(session.executed_ms, self.world.now + delay) + 1
        self.world.after(session.executed_ms - self.world.now, self._execute, session, execute, answer)

    def _execute(self, session: Session, execute: Callable[[], Tree | Failure], answer: Answer | None) -> None:
        world = self.world
        if world.now < self.gone_until:
            result: Tree | Failure = Failure.LOST
        else:
            result = Failure.EXPIRED if session.expired else execute()
            self.heard(session)
        if answer is None:
            return
        lost = not self.reachable(session.node) or world.random.random() < self.connection_loss / 2
        if lost:
            result = Failure.LOST
        # A client that hears nothing for two thirds of its session's time ends the connection.
        delay = min(world.network.delay(), world.options.session_ms * 2 // 3)
        session.answered_ms = max(session.answered_ms, world.now + delay) + 1
        world.after(session.answered_ms - world.now, session.node.hear, session.life, answer, result)

    def _apply(self, session: Session, request: Request, what: str) -> Tree | Failure:
        try:
            tree = request(self.tree)
        except Conflict:
            self.world.note("zookeeper", "refuses {} of {}", what, session.node.id)
            return Failure.CONFLICT
        self.world.note("zookeeper", "applies {} of {}", what, session.node.id)
        self._stands(tree)
        session.seen = len(self.trees) - 1
        return tree

    def _read(self, session: Session, synced: bool) -> Tree:
        random = self.world.random
        lag = random.randint(0, 3_000) if self.stale_reads and random.random() < self.stale_reads else 0
        session.seen = max(session.seen, self._index(0 if synced else lag))
        return self.trees[session.seen]

    def _index(self, lag_ms: int) -> int:
        return max(0, bisect_right(self.times, self.world.now - lag_ms) - 1)

    def _stands(self, tree: Tree) -> None:
        before = self.tree
        self.trees.append(tree)
        self.times.append(self.world.now)
        if tree.partition is not before.partition:
            self.world.partitions[tree.version] = tree.partition
            self.world.checker.partition_written(before.partition, tree.partition, tree.version)
            self.world.note("zookeeper", "v{}: {}", tree.version, tree.partition)
        if tree.group is not None and tree.group is not before.group:
            self.world.checker.groups.group_written(before.group, tree.group)
        index = len(self.trees) - 1
        for session in self.sessions:
            if not session.expired and session.node.life == session.life:
                self._ring(session, index)

    def _ring(self, session: Session, index: int) -> None:
        random = self.world.random
        if random.random() < self.missed_watches or not self.reachable(session.node):
            return
        late = random.randint(0, 2_000) if random.random() < self.stale_reads else 0
        self.world.after(late + self.world.network.delay(), session.node.hear, session.life, self._rang, session, index)

    def _rang(self, session: Session, index: int) -> None:
        session.seen = max(session.seen, index)
        session.node.membership.rang()

    def set_by_operator(self, partition: PartitionState) -> None:
        self._stands(replace(self.tree, partition=partition, version=self.tree.version + 1))

    def heal(self) -> None:
        self.gone_until = 0
        self.stale_reads = self.missed_watches = self.connection_loss = 0.0
        self.outliving_ms = 0
