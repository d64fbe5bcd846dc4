"""The invariants I1 to I10, I13 and I14, checked at each change, so that they hold after every event.

`committed` is the log as clients have seen it: the records that a leader declared to be below its high watermark. It
never loses records, except by an unclean election that an operator ordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from simulation.disk import Batch, Disk
from simulation.group_checker import GroupChecker

from portalmq.broker.core.replica.events import (
    Action,
    BrokersChanged,
    Event,
    Fetch,
    FetchReplied,
    HighWatermarkAdvanced,
    ProposeIsr,
    Replicate,
    ResetLog,
    SendFetch,
    Stamp,
    Truncate,
    Truncated,
)
from portalmq.control_plane.state import PartitionState, min_insync
from portalmq.errors import PortalMQError

if TYPE_CHECKING:
    from simulation.node import Node
    from simulation.replica_shell import ReplicaShell
    from simulation.submission import Submission
    from simulation.world import World


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A log that was durable on a disk that was lost later."""

    start: int
    ends: dict[int, int]  # end offset -> uid


class Checker:
    def __init__(self, world: World) -> None:
        self.world = world
        self.high_watermark = 0
        self.committed: list[Batch] = []
        self.committed_at: dict[int, int] = {0: 0}  # end offset -> uid
        self.acked: dict[int, tuple[int, int]] = {}  # base offset -> (uid, end), acks=all
        self.authority = 0  # an operator overruled the epochs below
        self._is_settled = True
        self._leaders: dict[int, tuple[int, int]] = {}
        self._placed: dict[tuple[int, int], int] = {}
        self._answers: dict[Stamp, int] = {}
        self._refused: set[int] = set()
        self._written: set[int] = set()
        self._lost: list[Copy] = []
        self._isr_changes: list[int] = []
        self._controller_epoch = 0
        self.committed_epoch = 0
        self.groups = GroupChecker(self)

    def fail(self, invariant: str, why: str, *details: object) -> None:
        raise Violation(f"{invariant}: {why.format(*details)}")

    # --- after each step of a core -----------------------------------------------------------------------------------

    def stepped(self, shell: ReplicaShell, event: Event, actions: list[Action]) -> None:
        replica = shell.replica
        if isinstance(event, BrokersChanged):
            shell.brokers_seen = event.brokers
        for action in actions:
            match action:
                case HighWatermarkAdvanced():
                    if replica.leading:
                        self._leader_advanced(shell, action.high_watermark)
                    else:
                        self._follower_advanced(shell, action.high_watermark)
                case Truncate() | ResetLog():
                    self._destroys(shell, event, action)
                case Replicate():
                    self._check_authority(shell, "takes", action.fetch)
                case ProposeIsr():
                    self._proposes(shell, action)
                case SendFetch():
                    shell.fetch_seen = action.fetch
        if actions:
            self._check_leading(shell)
        watermark = replica.high_watermark
        if watermark < shell.watermark_seen and not (isinstance(event, Truncated) and self.authority):
            self.fail("I5", "the high watermark of {} fell to {}", shell.node.id, watermark)
        shell.watermark_seen = watermark
        if replica.highest_epoch < shell.disk.highest_epoch:
            self.fail("I1", "{} forgot epoch {}", shell.node.id, shell.disk.highest_epoch)

    def _check_leading(self, shell: ReplicaShell) -> None:
        replica = shell.replica
        if replica.in_sync is None:
            return
        epoch = replica.in_sync.state.leader_epoch
        life = (shell.node.id, shell.node.incarnation)
        if self._leaders.setdefault(epoch, life) != life:
            self.fail("I1", "{} and {} lead in epoch {}", self._leaders[epoch], life, epoch)
        held = self.world.zookeeper.tree.partition
        if held.leader_epoch == epoch and not replica.in_sync.maximal.issuperset(held.isr):
            self.fail("I6", "ISR {} is not within {} of its leader", held.isr, set(replica.in_sync.maximal))
        epochs = replica.epochs
        if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(epochs[-3:])):
            self.fail("I8", "epochs {} of {} do not rise", epochs, shell.node.id)

    def _leader_advanced(self, shell: ReplicaShell, high_watermark: int) -> None:
        replica = shell.replica
        leading = replica.in_sync
        assert leading is not None
        epoch = leading.state.leader_epoch
        if self._is_overruled(epoch):
            return
        start = next((start for number, start in shell.disk.epochs() if number == epoch), None)
        if start is None or high_watermark <= start:
            self.fail("I5", "{} commits to {} before the start of epoch {} is", shell.node.id, high_watermark, epoch)
        held = self._held_at(leading.state.version)
        for member in leading.maximal:
            disk = self.world.nodes[member].disk
            try:
                counted = disk.replica_store if member == shell.node.id else leading.joiner(member)[1]
            except KeyError:
                self.fail("I5", "{} commits to {}, member {} never fetched", shell.node.id, high_watermark, member)
            if disk.replica_store == counted and disk.end < high_watermark:
                self.fail("I5", "{} commits to {}, member {} has {}", shell.node.id, high_watermark, member, disk.end)
        if high_watermark <= self.high_watermark:
            self._check_holds("I3", shell.disk, high_watermark, f"{shell.node.id}, leader of {epoch},")
            return
        first = shell.disk.index_from(self.high_watermark)
        fresh = [batch for batch in shell.disk.batches[first:] if batch.end <= high_watermark]
        self._check_holds("I3", shell.disk, self.high_watermark, f"{shell.node.id}, leader of {epoch},")
        if not fresh or fresh[-1].end != high_watermark:
            self.fail("I5", "{} commits to {}, which is not durable there", shell.node.id, high_watermark)
        self._check_copies(fresh[-1], min_insync(held, self.world.options.min_insync))
        self.committed_epoch = max(self.committed_epoch, epoch)
        for batch in fresh:
            self.committed.append(batch)
            self.committed_at[batch.end] = batch.uid
            if batch.mail or batch.control is not None:
                self.groups.committed(batch, epoch)
        self.high_watermark = high_watermark
        self._check_isr_is_complete()
        for node in self.world.nodes.values():
            other = node.shell.replica.in_sync if node.alive else None
            if other is not None and other.state.leader_epoch > epoch:
                self._check_holds("I3", node.disk, high_watermark, f"later leader {node.id}")

    def _follower_advanced(self, shell: ReplicaShell, high_watermark: int) -> None:
        if self._is_overruled(shell.replica.leader_epoch):
            return
        if high_watermark > self.high_watermark:
            self.fail("I5", "{} believes in high watermark {}, true is {}", shell.node.id, high_watermark,
                      self.high_watermark)  # fmt: skip
        self._check_holds("I5", shell.disk, high_watermark, f"follower {shell.node.id}")

    def _destroys(self, shell: ReplicaShell, event: Event, action: Truncate | ResetLog) -> None:
        replica = shell.replica
        if not isinstance(event, FetchReplied) or event.fetch != shell.fetch_seen:
            self.fail("I14", "{} destroys records on {}", shell.node.id, event)
            return
        self._check_authority(shell, "destroys", event.fetch)
        if isinstance(action, Truncate) and action.to_offset < replica.high_watermark and not self.authority:
            self.fail("I8", "{} truncates to {}, below {}", shell.node.id, action.to_offset, replica.high_watermark)
        if isinstance(action, ResetLog) and action.offset > self.high_watermark and not self.authority:
            self.fail("I14", "{} starts over at {}, which is not committed", shell.node.id, action.offset)

    def _check_authority(self, shell: ReplicaShell, does: str, fetch: Fetch) -> None:
        """A leader of an earlier epoch has no authority, whether it sends records or accepts them."""
        known = shell.replica.highest_epoch
        if fetch.leader_epoch != known:
            self.fail("I14", "{} {} records on the authority of epoch {}, {} is known", shell.node.id, does,
                      fetch.leader_epoch, known)  # fmt: skip

    def acts(self, shell: ReplicaShell, epoch: int) -> None:
        """A replica writes, or asks, in this epoch: its disk must have the epoch, and none above."""
        if shell.disk.highest_epoch < epoch:
            self.fail("I1", "{} acts in epoch {} before it remembers it", shell.node.id, epoch)
        if epoch < shell.disk.acted_epoch:
            self.fail("I1", "{} acts in epoch {} after {}", shell.node.id, epoch, shell.disk.acted_epoch)
        shell.disk.acted_epoch = epoch

    def quarantined(self, shell: ReplicaShell, reason: str) -> None:
        self.world.count("quarantined")
        if not self.authority:
            self.fail("I8", "{} is quarantined: {}", shell.node.id, reason)

    # --- logs --------------------------------------------------------------------------------------------------------

    def writes(self, shell: ReplicaShell, batch: Batch) -> None:
        """A leader is about to write the batches that it created."""
        epoch = batch.head.leader_epoch
        self.acts(shell, epoch)
        if batch.head.is_epoch_start and self._is_settled and epoch >= self.committed_epoch:
            self._check_holds("I3", shell.disk, self.high_watermark, f"new leader {shell.node.id} of epoch {epoch}")

    def drops(self, shell: ReplicaShell, upto: int) -> None:
        """A replica moves its log start to `upto`: never beyond the start that the committed log states."""
        said = max((batch.log_start for batch in self.committed), default=0)
        if self.authority:
            return
        if upto > said:
            self.fail("I8", "{} drops all below {}, and the log says {}", shell.node.id, upto, said)
        if shell.host is not None:
            self.groups.drops(shell.host, upto)

    def appends(self, shell: ReplicaShell, batches: list[Batch]) -> None:
        """These batches are about to become durable at the end of that disk's log."""
        disk = shell.disk
        end = disk.end
        before = disk.batches[-1] if disk.batches else None
        for batch in batches:
            if batch.base != end:
                self.fail("I8", "{} follows {} on {}", batch, end, shell.node.id)
            at = (batch.base, batch.head.leader_epoch)
            if self._placed.setdefault(at, batch.uid) != batch.uid:
                self.fail("I2", "{} on {} is not {} as elsewhere", batch, shell.node.id, self._placed[at])
            parent = before.uid if before else (None if disk.start else 0)
            if parent is not None and batch.parent not in (parent, -1):
                self.fail("I2", "before {} is {} on {}, {} elsewhere", batch, parent, shell.node.id, batch.parent)
            if batch.uid in self._refused:
                self.fail("I13", "{} on {} was refused", batch, shell.node.id)
            if batch.head.stamp is not None:
                self._check_sequence(disk, batches, batch)
            self._written.add(batch.uid)
            if batch.head.is_epoch_start and not self._is_settled and batch.head.leader_epoch >= self.authority:
                self._settle(disk.start, [*disk.batches, *batches[: batches.index(batch)]])
            before, end = batch, batch.end

    def _check_sequence(self, disk: Disk, fresh: list[Batch], batch: Batch) -> None:
        stamp = batch.head.stamp
        assert stamp is not None
        earlier = fresh[: fresh.index(batch)]
        for other in (*reversed(earlier), *reversed(disk.batches)):
            known = other.head.stamp
            if known is None or known.producer_id != stamp.producer_id:
                continue
            follows = (
                stamp.sequence == known.sequence + other.head.count
                if known.producer_epoch == stamp.producer_epoch
                else known.producer_epoch < stamp.producer_epoch and stamp.sequence == 0
            )
            if not follows:
                self.fail("I9", "{} with {} is after {} with {}", batch, stamp, other, known)
            return

    def shrank(self, node: Node) -> None:
        """A log was truncated or reset."""
        self._check_isr_is_complete()

    def disk_lost(self, disk: Disk) -> None:
        self._lost.append(Copy(disk.start, {batch.end: batch.uid for batch in disk.batches}))

    def _check_holds(self, invariant: str, disk: Disk, upto: int, who: str) -> None:
        """Everything committed below `upto` is there, unless retention dropped it from the start."""
        if disk.start >= upto or (not disk.start and not upto):
            return
        found = disk.ending_at(upto)
        if found is None or self.committed_at.get(upto) != found.uid:
            self.fail(invariant, "{} has {} where {} is committed to {} (its end is {})", who, found,
                      self.committed_at.get(upto), upto, disk.end)  # fmt: skip

    def _check_copies(self, batch: Batch, needed: int) -> None:
        disks = (node.disk for node in self.world.nodes.values())
        copies = sum((found := disk.ending_at(batch.end)) is not None and found.uid == batch.uid for disk in disks)
        copies += sum(copy.ends.get(batch.end) == batch.uid for copy in self._lost)
        if copies < needed:
            self.fail("I4", "{} is committed with {} copies, {} are needed", batch, copies, needed)

    # --- the state in ZooKeeper --------------------------------------------------------------------------------------

    def partition_written(self, before: PartitionState, after: PartitionState, version: int) -> None:
        if after.leader_epoch < before.leader_epoch:
            self.fail("I1", "the epoch fell from {} to {}", before.leader_epoch, after.leader_epoch)
        anew = after.leader != before.leader or (
            after.leader is not None and after.incarnations.get(after.leader) != before.incarnations.get(after.leader)
        )
        if anew and after.leader is not None and after.leader_epoch == before.leader_epoch:
            self.fail("I1", "{} is elected in epoch {} again", after.leader, after.leader_epoch)
        if not self._is_overruled(after.leader_epoch):
            self._check_floor(before, after)
            self._check_isr_is_complete(after)
        self._check_calm(before, after)
        leader = next((n for n in self._leading_nodes() if n.shell.replica.leader_epoch == after.leader_epoch), None)
        if leader is not None:
            maximal = leader.shell.replica.in_sync.maximal
            if not set(after.isr) <= maximal:
                self.fail("I6", "ISR {} is not within {} of leader {}", after.isr, set(maximal), leader.id)

    def _check_calm(self, before: PartitionState, after: PartitionState) -> None:
        """A replica that leaves and joins again and again overloads ZooKeeper."""
        if before.leader_epoch == after.leader_epoch and before.isr != after.isr:
            self._isr_changes.append(self.world.now)
            if len(self._isr_changes) > 10 and self._isr_changes[-10] > self.world.now - 500:
                self.fail("liveness", "the ISR flaps: {} after {}", after.isr, before.isr)

    def _leading_nodes(self) -> list[Node]:
        return [n for n in self.world.nodes.values() if n.alive and n.shell.replica.in_sync is not None]

    def _check_floor(self, before: PartitionState, after: PartitionState) -> None:
        gone = set(before.isr) - set(after.isr)
        clean = {member for member in gone if self.world.is_clean(member, before)}
        floor = min_insync(before, self.world.options.min_insync)
        if clean and len(after.isr) < floor and not self.authority:
            self.fail("I6", "ISR {} shrank to {}, below {}", before.isr, after.isr, floor)

    def _check_isr_is_complete(self, held: PartitionState | None = None) -> None:
        held = held or self.world.zookeeper.tree.partition
        if self._is_overruled(held.leader_epoch):
            return
        for member in held.isr:
            if self.world.is_clean(member, held):
                disk = self.world.nodes[member].disk
                self._check_holds("I3", disk, self.high_watermark, f"ISR member {member}")

    def _proposes(self, shell: ReplicaShell, proposal: ProposeIsr) -> None:
        for joiner, store_uuid in proposal.store_uuids.items():
            life = (proposal.incarnations[joiner], store_uuid.partition("/")[0])
            if shell.brokers_seen.get(joiner) != life:
                self.fail("I7", "{} lets {} join as {}, registered is {}", shell.node.id, joiner, life,
                          shell.brokers_seen.get(joiner))  # fmt: skip

    def isr_change(self, broker_id: int, epoch: int, proposal: ProposeIsr) -> None:
        """A leader's, or a resigning replica's, compare-and-set is about to be applied."""
        held = self.world.zookeeper.tree.partition
        if proposal.resigns:
            return
        if (held.leader, held.leader_epoch) != (broker_id, epoch):
            self.fail("I10", "{} of epoch {} writes over {}", broker_id, epoch, held)
        if broker_id not in proposal.isr:
            self.fail("I6", "leader {} proposes {} without itself", broker_id, proposal.isr)
        for joiner, store_uuid in proposal.store_uuids.items():
            disk = self.world.nodes[joiner].disk
            if disk.replica_store != store_uuid or self._is_overruled(epoch):
                continue  # lost in the meantime: it is in sync on paper, and resigns
            start = next((start for number, start in disk.epochs() if number == epoch), None)
            if start is None:
                self.fail("I7", "{} joins without the start of epoch {}", joiner, epoch)
            self._check_holds("I7", disk, self.high_watermark, f"joiner {joiner}")
            if proposal.incarnations[joiner] > self.world.nodes[joiner].incarnation:
                self.fail("I7", "{} joins as incarnation {}", joiner, proposal.incarnations[joiner])

    def elected(self, broker_id: int, epoch: int) -> None:
        """A controller's write is about to be applied."""
        if epoch < self._controller_epoch or epoch < self.world.zookeeper.tree.controller_epoch:
            self.fail("I10", "controller {} of epoch {} writes, {} is newer", broker_id, epoch, self._controller_epoch)
        self._controller_epoch = epoch

    def _held_at(self, version: int) -> PartitionState:
        return self.world.partitions[version]

    # --- answers to clients -----------------------------------------------------------------------------------------

    def answered(self, shell: ReplicaShell, submission: Submission, error: PortalMQError | None) -> None:
        if error is not None:
            if error.outcome == "not_applied" and not submission.repeats:
                if submission.uid in self._written:
                    self.fail("I13", "#{} is written, and refused with {!r}", submission.uid, error)
                self._refused.add(submission.uid)
            return
        if self._is_overruled(shell.replica.leader_epoch):
            return
        if submission.acks == "leader" and not submission.repeats:
            found = shell.disk.ending_at(submission.end)
            if found is None or found.uid != submission.uid:
                self.fail("I13", "#{} is acknowledged and not on the leader's disk", submission.uid)
            return
        uid = self.committed_at.get(submission.end)
        batch = next((b for b in reversed(self.committed) if b.end == submission.end), None)
        if uid is None or batch is None:
            self.fail("I13", "[{},{}) is acknowledged and not committed", submission.base, submission.end)
            return
        if batch.base != submission.base or (batch.uid != submission.uid and batch.head.stamp != submission.stamp):
            self.fail("I13", "#{} is acknowledged at [{},{}), where {} is", submission.uid, submission.base,
                      submission.end, batch)  # fmt: skip
        if submission.stamp is not None and self._answers.setdefault(submission.stamp, batch.base) != batch.base:
            self.fail("I9", "{} is answered {} and {}", submission.stamp, self._answers[submission.stamp], batch.base)
        self.acked[batch.base] = (uid, batch.end)

    def reads(self, node: Node, batches: list[Batch]) -> None:
        """A consumer received these."""
        if self._is_overruled(node.shell.replica.leader_epoch):
            return
        for batch in batches:
            if batch.end > self.high_watermark or self.committed_at.get(batch.end) != batch.uid:
                self.fail("I5", "{} delivers {}, which is not committed", node.id, batch)

    # --- an operator's election --------------------------------------------------------------------------------------

    def overruled(self, epoch: int) -> None:
        """From `epoch` on, the log of its first leader is the committed log; records that only other replicas have are
        given up."""
        self.authority = epoch
        self._is_settled = False

    def _is_overruled(self, epoch: int) -> bool:
        return epoch < self.authority or not self._is_settled

    def _settle(self, start: int, log: list[Batch]) -> None:
        self._is_settled = True
        ends = {batch.end: batch.uid for batch in log}
        while self.committed and self.committed[-1].end > start:
            last = self.committed[-1]
            if ends.get(last.end) == last.uid:
                break
            self.committed.pop()
            del self.committed_at[last.end]
            self.acked.pop(last.base, None)
        self.high_watermark = self.committed[-1].end if self.committed else 0
        self._answers = {stamp: base for stamp, base in self._answers.items() if base < self.high_watermark}
