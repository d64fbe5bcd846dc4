"""A simulated broker's membership in the cluster: its session, its last reading of the state, its turns as controller.

It is as thin as the broker's own: decisions are the controller's pure functions and the core's. Requests of the
partition (a compare-and-set, a synced read) are sent one at a time and in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from simulation.zookeeper import Conflict, Failure, Session, Tree

from portalmq.broker.core.replica.events import IsrAnswered, Outcome, PartitionStateChanged, ProposeIsr
from portalmq.broker.partition.partition_state import partition_state_of
from portalmq.control_plane import controller
from portalmq.control_plane.state import BrokerState, ControllerState, PartitionState, with_isr

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.replica_shell import ReplicaShell

VIGIL_MS = 500
REREAD_MS = 10_000
COLD_AGAIN_MS = 300
WAIT_FOR_ABSENT_MS = 10_000
UNANSWERED_MAX = 4  # probes of half a second each: two of a second


class Membership:
    """One life of a broker."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.world = node.world
        self.zookeeper = node.world.zookeeper
        self.session: Session | None = None
        self.registered = False
        self.draining = False
        self.tree: Tree | None = None
        self.controller_epoch: int | None = None
        self.unanswered: dict[int, int] = {}
        self.refused: set[int] = set()
        self.believed_until = 0
        self.last_live: dict[int, BrokerState] = {}
        self._brokers: Mapping[int, tuple[BrokerState, int]] | None = None  # as delivered
        self._reading = False
        self._read_again = False
        self._deciding = False
        self._cold_since: int | None = None
        self._campaigning = False
        self._requests: deque[Callable[[], None]] = deque()
        self._busy = False
        node.every(self.world.options.session_ms // 3, self.beat)
        node.every(VIGIL_MS, self.watch_over)
        node.every(REREAD_MS, self.rang)
        self.beat()

    # --- the session -------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        """Send a heartbeat. It detects an ended session, and replaces it."""
        if self.session is None:
            self.session = self.zookeeper.connect(self.node)
            if self.session is not None:
                self.believed_until = self.world.now + self.world.options.session_ms
                if self.world.chance(0.5):
                    self.rang()  # a read before the registration may be older than an earlier life's state
                self._register()
        elif self.zookeeper.reachable(self.node):
            if self.zookeeper.heard(self.session):
                self.node.lease_renewed(self.world.now)
                if not self.registered:
                    self._register()
            else:
                self._lost()
        else:
            self.believed_until = self.world.now + 2 * self.world.options.session_ms

    def _lost(self) -> None:
        self.session = None
        self.registered = False
        self.controller_epoch = None
        self._deciding = self._campaigning = self._reading = False
        self.node.session_lost()
        self.beat()

    def _register(self) -> None:
        """Replace this broker's earlier registration, by its version; then read everything again."""
        session = self.session
        assert session is not None

        def read(answer: Tree | Failure) -> None:
            if self.session is not session or self._is_failure(answer):
                return
            assert isinstance(answer, Tree)
            found = answer.brokers.get(self.node.id)
            me = BrokerState("", self.node.incarnation, self.node.disk.store_uuid, self.draining)

            def request(tree: Tree) -> Tree:
                if tree.brokers.get(self.node.id) != found:
                    raise Conflict
                return replace(tree, brokers={**tree.brokers, self.node.id: (me, session.number)})

            self.zookeeper.write(session, request, done, "registration")

        def done(answer: Tree | Failure) -> None:
            if self.session is session and not self._is_failure(answer):
                self.registered = True
                self.rang()

        self.zookeeper.read(session, read, synced=True)

    def drain(self) -> None:
        self.draining = True
        if self.session is not None:
            self._register()

    def _is_failure(self, answer: Tree | Failure) -> bool:
        if answer is Failure.EXPIRED and self.session is not None and self.session.expired:
            self._lost()
        return isinstance(answer, Failure)

    # --- reading -----------------------------------------------------------------------------------------------------

    def rang(self) -> None:
        """Something may have changed."""
        if self._reading:
            self._read_again = True
        elif self.session is not None:
            self._reading = True
            self._read_again = False
            session = self.session
            self.zookeeper.read(session, lambda answer: self._on_read(session, answer))

    def _on_read(self, session: Session, answer: Tree | Failure) -> None:
        if self.session is not session:
            return
        self._reading = False
        if self._is_failure(answer):
            self.node.soon(200, self.rang)
            return
        assert isinstance(answer, Tree)
        self._learn(answer)
        if self._read_again:
            self.rang()

    def _learn(self, tree: Tree) -> None:
        before = self.tree
        if before is not None and before.version > tree.version:  # a new session may read an older state
            tree = replace(tree, partition=before.partition, version=before.version)
        self.tree = tree
        if self._brokers is not tree.brokers:
            known, self._brokers = self._brokers or {}, tree.brokers
            for broker_id, (broker, _) in tree.brokers.items():
                if broker_id in known and known[broker_id][0] != broker:
                    self.unanswered.pop(broker_id, None)
                    self.refused.discard(broker_id)
            self.node.brokers_changed({id: (b.incarnation, b.store_uuid) for id, (b, _) in tree.brokers.items()})
        if before is None or before.version != tree.version or self.world.chance(0.05):
            self.node.on_state(partition_state_of(tree.partition, tree.version, self.world.options.min_insync))
        if self.world.chance(self.world.options.stale_words):
            older = partition_state_of(tree.partition, tree.version, self.world.options.min_insync)
            self.node.soon(self.world.random.randint(1, 500), self._deliver_late, older)
        if self.world.options.groups is not None:
            self.node.coordinator.rang(tree)
        self._campaign()
        self._decide()

    def _deliver_late(self, state: PartitionStateChanged) -> None:
        """Deliver a state that was read earlier, after newer ones were delivered."""
        self.world.count("state delivered late")
        self.node.on_state(state)

    def tell_again(self) -> None:
        if self.tree is not None:
            self.node.on_state(
                partition_state_of(self.tree.partition, self.tree.version, self.world.options.min_insync)
            )

    # --- the partition's requests ------------------------------------------------------------------------------------

    def change_isr(self, shell: ReplicaShell, proposal: ProposeIsr) -> None:
        self._enqueue(lambda: self._change_isr(shell, proposal))

    def reread(self, shell: ReplicaShell, number: int) -> None:
        self._enqueue(lambda: self._reread(shell, number))

    def _enqueue(self, request: Callable[[], None]) -> None:
        self._requests.append(request)
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._requests)
        if self._busy:
            self._requests.popleft()()

    def _change_isr(self, shell: ReplicaShell, proposal: ProposeIsr) -> None:
        configured = self.world.options.min_insync
        tree = self.tree
        me = self.node.id

        def answered(outcome: Outcome, now: Tree | None = None) -> None:
            state = partition_state_of(now.partition, now.version, configured) if now is not None else None
            shell.tell_if_current(IsrAnswered(proposal.version, outcome, state))
            self._next()

        if self.session is None or tree is None or tree.version != proposal.version:
            self.node.soon(1, answered, Outcome.UNKNOWN if self.session is None else Outcome.CONFLICT)
            return
        resigning = me if proposal.resigns else None
        wanted = with_isr(
            tree.partition, proposal.isr, proposal.store_uuids, proposal.incarnations, resigning=resigning
        )
        epoch = tree.partition.leader_epoch

        def request(found: Tree) -> Tree:
            self.check_version(found, proposal.version)
            self.world.checker.isr_change(me, epoch, proposal)
            return replace(found, partition=wanted, version=found.version + 1)

        def done(answer: Tree | Failure) -> None:
            self._is_failure(answer)
            if isinstance(answer, Tree):
                self._hold(answer)
                answered(Outcome.APPLIED, answer)
            else:
                answered(Outcome.CONFLICT if answer is Failure.CONFLICT else Outcome.UNKNOWN)

        self.world.isr_change_leaves(self.node)
        self.zookeeper.write(self.session, request, done, f"isr {sorted(proposal.isr)}", of_partition=True)

    def _reread(self, shell: ReplicaShell, number: int) -> None:
        if self.session is None:
            self.node.soon(100, self._next)
            return

        def done(answer: Tree | Failure) -> None:
            if not self._is_failure(answer):
                assert isinstance(answer, Tree)
                self._hold(answer)
                shell.tell_if_current(
                    partition_state_of(answer.partition, answer.version, self.world.options.min_insync, refresh=number)
                )
            self._next()

        self.zookeeper.read(self.session, done, synced=True)

    def _hold(self, answer: Tree) -> None:
        if self.tree is None or answer.version >= self.tree.version:
            self.tree = replace(self.tree or answer, partition=answer.partition, version=answer.version)

    # --- being controller --------------------------------------------------------------------------------------------

    def _campaign(self) -> None:
        tree = self.tree
        if tree is None or not self.registered:
            return
        if tree.controller is not None and self.session is not None:
            # An election whose answer was lost is found here.
            is_mine = tree.controller[1] == self.session.number
            self.controller_epoch = tree.controller[0].epoch if is_mine else None
        if tree.controller is None and not self._campaigning and not self.draining:
            self._campaigning = True
            self.node.soon(self.world.random.randint(0, 500), self._stand)

    def _stand(self) -> None:
        tree, session = self.tree, self.session
        self._campaigning = False
        if session is None or tree is None or tree.controller is not None:
            return
        epoch = tree.controller_epoch + 1
        me = ControllerState(self.node.id, self.node.incarnation, epoch)

        def request(found: Tree) -> Tree:
            if found.controller is not None or found.controller_epoch != epoch - 1:
                raise Conflict
            return replace(found, controller=(me, session.number), controller_epoch=epoch)

        def done(answer: Tree | Failure) -> None:
            if not self._is_failure(answer) and self.session is session:
                self.controller_epoch = epoch
                self.world.note(self.node.id, "is controller of epoch {}", epoch)
                self.unanswered.clear()
                self.refused.clear()
            self.rang()

        self.zookeeper.write(session, request, done, "controller election")

    def _decide(self) -> None:
        """Return the next partition state for a controller that may have been replaced long ago."""
        tree, epoch, session = self.tree, self.controller_epoch, self.session
        if tree is None or epoch is None or session is None or self._deciding:
            return
        live = {id: broker for id, (broker, _) in tree.brokers.items()}
        if self.world.now < self.believed_until:
            live = {**self.last_live, **live}  # absence proves nothing yet
        self.last_live = live
        live = {id: broker for id, broker in live.items() if not self.judged_dead(id)}
        held = tree.partition
        missing = self.world.options.replication_factor - len(held.replicas)
        added = [id for id in sorted(live) if id not in held.replicas][: max(0, missing)]
        log_ends = None
        # In a run in which no disk loses synced records, elections must work without the log ends.
        if self.world.has_lied and controller.is_cold(held, live):
            log_ends = self._log_ends(held, live)
            if log_ends is None:
                self.node.soon(COLD_AGAIN_MS, self._decide)
                return
        else:
            self._cold_since = None
        least = self.world.options.min_insync
        wanted = controller.decide(held, live, configured_min_insync=least, added=added, log_ends=log_ends)
        if wanted is None:
            return
        version = tree.version
        self._deciding = True

        def request(found: Tree) -> Tree:
            self.check_controller(found, epoch)
            self.check_version(found, version)
            self.world.checker.elected(self.node.id, epoch)
            return replace(found, partition=wanted, version=version + 1)

        def done(answer: Tree | Failure) -> None:
            self._deciding = False
            self._is_failure(answer)
            self.rang()

        self.zookeeper.write(session, request, done, f"election {_short(wanted)}", of_partition=True)

    def _log_ends(self, held: PartitionState, live: Mapping[int, BrokerState]) -> dict[int, controller.LogEnd] | None:
        """Return the log ends of the reachable ISR members; None while the call waits for others. The guarantees
        exclude members whose disk lost synced records."""
        world, log_ends = self.world, dict[int, controller.LogEnd]()
        for member in held.isr:
            node = world.nodes[member]
            reached = member == self.node.id or (
                world.network.is_open(self.node.id, member) and world.network.is_open(member, self.node.id)
            )
            if member in live and node.alive and not node.paused and reached:
                replica = node.shell.replica
                is_whole = node.store == held.store_uuids.get(member)
                log_ends[member] = (replica.last_epoch, replica.durable_end) if is_whole else None
        if self._cold_since is None:
            self._cold_since = world.now
        in_time = world.now - self._cold_since < WAIT_FOR_ABSENT_MS
        forgotten = all(world.nodes[member].disk.is_forgetful for member, end in log_ends.items() if end is not None)
        if len(log_ends) < len(held.isr) and (in_time or forgotten):
            return None
        world.count("cold election")
        return log_ends

    def check_version(self, found: Tree, version: int) -> None:
        if found.version != version:
            raise Conflict

    def check_controller(self, found: Tree, epoch: int) -> None:
        if found.controller_epoch != epoch:
            raise Conflict

    # --- watching each other -----------------------------------------------------------------------------------------

    def judged_dead(self, broker_id: int) -> bool:
        return broker_id in self.refused or self.unanswered.get(broker_id, 0) >= UNANSWERED_MAX

    def watch_over(self) -> None:
        """The controller probes all, the others the controller."""
        tree = self.tree
        if tree is None:
            return
        if self.controller_epoch is not None:
            for broker_id in tree.brokers:
                self._probe(broker_id)
            self._decide()
        elif tree.controller is not None:
            other = tree.controller[0].broker_id
            self._probe(other)
            if self.judged_dead(other):
                self._depose(tree.controller)

    def suspect(self, broker_id: int) -> None:
        """Another broker saw this broker refuse connections, or not answer."""
        if self.controller_epoch is not None:
            self._probe(broker_id)
            if self.judged_dead(broker_id):
                self._decide()

    def mistake(self, broker_id: int) -> None:
        """A component on the way refuses connections in that broker's place."""
        if self.controller_epoch is not None:
            self.refused.add(broker_id)
            self._decide()

    def _probe(self, broker_id: int) -> None:
        if broker_id == self.node.id:
            return
        other = self.world.nodes[broker_id]
        is_open = self.world.network.is_open(self.node.id, broker_id)
        if (is_open and not other.alive) or self.world.refuses(broker_id):
            self.refused.add(broker_id)
        elif is_open and not other.paused and not self.world.chance(self.world.slowness):
            self.unanswered.pop(broker_id, None)
            self.refused.discard(broker_id)
        else:
            self.unanswered[broker_id] = self.unanswered.get(broker_id, 0) + 1

    def _depose(self, held: tuple[ControllerState, int]) -> None:
        if self.session is None:
            return
        self.unanswered.clear()
        self.refused.clear()

        def request(found: Tree) -> Tree:
            if found.controller != held:
                raise Conflict
            return replace(found, controller=None)

        self.zookeeper.write(self.session, request, lambda answer: None, "deposition")


def _short(held: PartitionState) -> str:
    return f"leader {held.leader} epoch {held.leader_epoch} isr {list(held.isr)} replicas {list(held.replicas)}"
