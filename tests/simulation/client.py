"""Producers and readers outside the cluster: they retry at any broker, give up, continue as zombies, and check what
they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.content import PLAIN, Mail
from simulation.network import CLIENTS
from simulation.submission import Submission

from portalmq.broker.core.replica.events import Stamp
from portalmq.errors import Fenced, OutOfOrderSequence, PortalMQError

if TYPE_CHECKING:
    from simulation.world import World

TIMEOUT_MS = 1_500


def mail_at(world: World, wall_ms: int) -> Mail:
    """A message of some kind, with times by the clock of the broker that accepts it."""
    random, groups = world.random, world.groups
    if world.faults.stopped:
        return PLAIN
    priority = random.choice([1, 5]) if world.chance(groups.priorities) else 0
    deliver_at_ms = wall_ms + random.choice([50, 500, 3_000]) if world.chance(groups.delayed) else None
    expires_at_ms = None
    if world.chance(groups.expiring):
        expires_at_ms = max(wall_ms, deliver_at_ms or 0) + random.choice([20, 500, 4_000])
    key = random.randint(1, 3) if world.chance(groups.keyed) else 0
    return Mail(priority, deliver_at_ms, expires_at_ms, key)


class Producer:
    """Sends one batch at a time. An idempotent one repeats a batch until it knows the outcome, or takes a new epoch and
    begins at 0."""

    def __init__(self, world: World, producer_id: int | None, epoch: int = 0, sequence: int = 0) -> None:
        self.world = world
        self.producer_id = producer_id
        self.epoch = epoch
        self.sequence = sequence
        self.acks = "leader" if world.chance(0.2) else "all"
        self.acked = 0
        self._count = 0
        self._attempt = 0
        self._target = 0
        self._rest()

    def _rest(self) -> None:
        pause_ms = 120
        if self.world.options.groups is not None:
            pause_ms = 2_000 if self.world.healed else 600
        self.world.after(self.world.random.randint(1, pause_ms), self._begin)

    def _begin(self) -> None:
        self._count = self.world.random.randint(1, self.world.options.batch_max)
        if self.producer_id is not None and self.acks == "leader":
            self.acks = "all"
        self._send()

    def _send(self) -> None:
        world = self.world
        self._attempt += 1
        leader = world.zookeeper.tree.partition.leader
        self._target = leader if leader is not None and not world.chance(0.1) else world.random.choice(world.ids)
        world.network.send(CLIENTS, self._target, self._arrive, self._target, self._attempt)
        world.after(TIMEOUT_MS, self._answered, self._attempt, -1, None, True)

    def _arrive(self, target: int, attempt: int) -> None:
        stamp = Stamp(self.producer_id, self.epoch, self.sequence) if self.producer_id is not None else None

        def answer(base: int, error: PortalMQError | None) -> None:
            self._answered(attempt, base, error, False)

        def refused() -> None:
            self.world.after(20, self._answered, attempt, -1, PortalMQError("refused"), False)

        if attempt != self._attempt and stamp is not None:
            return  # the batch it was sent for is done; duplicates in time are enough
        submission = Submission(self.world.next_uid(), self._count, stamp, self.acks, answer)
        if self.world.options.groups is not None:
            submission.mail = tuple(mail_at(self.world, self.world.nodes[target].wall_ms) for _ in range(self._count))
        self.world.nodes[target].call(refused, "submit", submission)

    def _answered(self, attempt: int, base: int, error: PortalMQError | None, timed_out: bool) -> None:
        if attempt != self._attempt:
            return
        self._attempt += 1
        if not timed_out and error is None:
            self.acked += 1
            self.world.acked += 1
            self.sequence += self._count
            self._rest()
        elif self.producer_id is None:
            self._rest()
        elif isinstance(error, Fenced | OutOfOrderSequence):
            self.epoch = self.world.next_producer_epoch()
            self.sequence = 0
            self._rest()
        else:
            self.world.after(self.world.random.randint(1, 200), self._again, self._attempt)

    def _again(self, attempt: int) -> None:
        if attempt == self._attempt:
            self._send()

    def fork(self) -> None:
        """Another instance takes over under a higher epoch; this one does not know."""
        if self.producer_id is not None:
            self.world.producers.append(Producer(self.world, self.producer_id, self.world.next_producer_epoch()))


class Consumer:
    """A reader that continues at its position, at any broker that serves."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.offset = 0
        world.after(100, self._read)

    def _read(self) -> None:
        world = self.world
        node = world.nodes[world.random.choice(world.ids)]
        if node.alive and not node.paused:
            batches = node.shell.read(self.offset)
            if batches:
                world.checker.reads(node, batches)
                self.offset = batches[-1].end
        world.after(world.random.randint(20, 400), self._read)
