"""The invariants of PROOF that the shell must hold, after each step of a partition and at the end.

I1, I5, I6, I8 after each step of a core; I2, I3, I9, I13 on what clients were told, and on the logs at the end; I12 on
deliveries after an ack; I14 on log starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING, Any

from simulation.shell.loop import Process

from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.batch import BatchKind
from portalmq.control_plane.plane import Node
from portalmq.control_plane.state import PARTITIONS, PartitionState, decode

if TYPE_CHECKING:
    from simulation.shell.world import World


TOPIC = "t"


class Violation(AssertionError):
    """A rule does not hold."""


@dataclass
class Sent:
    partition: int
    is_idempotent: bool
    refused: bool = False
    offset: int | None = None
    acked_s: float = 0.0


@dataclass
class Seen:
    """What was seen of one partition in one life of a broker."""

    watermark: int = 0
    epoch: int = -1


@dataclass
class Place:
    """A partition, over all its replicas."""

    values: dict[int, bytes] = field(default_factory=dict)  # what clients saw at an offset
    purged: int = 0
    watermark: int = 0


class Checker:
    def __init__(self, world: World) -> None:
        self.world = world
        self.states: dict[tuple[str, int], PartitionState] = {}
        self.places: dict[int, Place] = {number: Place() for number in range(world.options.partitions)}
        self._sent: dict[bytes, Sent] = {}
        self._leaders: dict[tuple[str, int, int], tuple[int | None, str]] = {}
        self._seen: dict[tuple[str, str, int, str], Seen] = {}
        self._acted: dict[tuple[int | None, str, int, str], int] = {}
        self._acked: dict[tuple[int, int], tuple[int, str]] = {}  # (partition, offset) -> when the ack was answered
        self.steps = 0
        world.zookeeper.on_changed.append(self._tree_changed)
        _hook(self)

    def fail(self, rule: str, why: str, *values: object) -> None:
        self.world.fail(rule, why.format(*values))

    # --- the tree ----------------------------------------------------------------------------------------------------

    def _tree_changed(self, path: str, node: Node | None) -> None:
        parts = path.split("/")
        if not path.startswith(PARTITIONS) or len(parts) != 4 or node is None or not node.data:
            return
        key = (parts[2], int(parts[3]))
        after, before = decode(node.data, PartitionState), self.states.get(key)
        self.states[key] = after
        self.world.note(
            "zookeeper", "{}/{} v{}: {} {} {}", *key, node.version, after.leader, after.leader_epoch, after.isr
        )
        if before is not None and after.leader_epoch < before.leader_epoch:
            self.fail("I1", "the leader epoch of {} fell from {} to {}", key, before.leader_epoch, after.leader_epoch)
        if before is not None and after.leader != before.leader and after.leader_epoch == before.leader_epoch:
            if after.leader is not None:
                self.fail("I1", "{} has another leader in epoch {}", key, after.leader_epoch)

    # --- after each step of a core -----------------------------------------------------------------------------------

    def stepped(self, process: Process, partition: Partition) -> None:
        self.steps += 1
        replica = partition.replica
        key = (process.name, partition.topic_id, partition.number, partition.store_uuid)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = Seen()
        watermark = replica.high_watermark
        if watermark < seen.watermark:
            self.fail("I5", "the high watermark of {} fell from {} to {}", key, seen.watermark, watermark)
        seen.watermark = watermark
        if replica.highest_epoch < seen.epoch:
            self.fail("I1", "{} forgot epoch {}", key, seen.epoch)
        seen.epoch = replica.highest_epoch
        in_sync = replica.in_sync
        if in_sync is None:
            return
        epoch = in_sync.state.leader_epoch
        held = self._leaders.setdefault((partition.topic_id, partition.number, epoch), (process.number, process.name))
        if held[1] != process.name:
            self.fail("I1", "{} and {} lead in epoch {}", held[1], process.name, epoch)
        if watermark > partition.log.end_offset:
            self.fail("I5", "{} commits to {}, its log ends at {}", key, watermark, partition.log.end_offset)
        if partition.topic == TOPIC:
            place = self.places[partition.number]
            place.watermark = max(place.watermark, watermark)
        state = self.states.get((partition.topic_id, partition.number))
        if state is not None and state.leader_epoch == epoch and not set(state.isr) <= in_sync.maximal:
            self.fail("I6", "ISR {} is not within {} of its leader {}", state.isr, set(in_sync.maximal), process)
        if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(replica.epochs[-3:])):
            self.fail("I8", "epochs {} of {} do not rise", replica.epochs, key)

    def opened(self, process: Process, partition: Partition) -> None:
        """A replica was opened, after a restart perhaps."""
        key = (process.number, partition.topic_id, partition.number, partition.store_uuid)
        self._acted.setdefault(key, -1)
        if partition.replica.highest_epoch < self._acted[key]:
            self.fail("I1", "{} has forgotten epoch {} of partition {}", process, self._acted[key], partition.number)
        self.world.note(
            process,
            "opens {}/{} of {}: log {} to {}, high watermark {}, epoch {}",
            partition.topic,
            partition.number,
            partition.store_uuid,
            partition.start.offset,
            partition.log.end_offset,
            partition.replica.high_watermark,
            partition.replica.highest_epoch,
        )

    def acts(self, process: Process, partition: Partition, epoch: int) -> None:
        """A replica leads, or fetches, in an epoch: it has stored it."""
        key = (process.number, partition.topic_id, partition.number, partition.store_uuid)
        self._acted[key] = max(self._acted.get(key, -1), epoch)

    # --- what clients do ---------------------------------------------------------------------------------------------

    def sent(self, values: list[bytes], partition: int, *, is_idempotent: bool) -> None:
        for value in values:
            self._sent[value] = Sent(partition, is_idempotent)

    def refused(self, values: list[bytes]) -> None:
        for value in values:
            self._sent[value].refused = True

    def acked(self, values: list[bytes], partition: int, base_offset: int) -> None:
        self.world.reached["acked"] += len(values)
        self.world.note("client", "{} is acked at {}/{}", values[0][:20].rstrip(b"."), partition, base_offset)
        for offset, value in enumerate(values, base_offset):
            self._sent[value].offset = offset
            self._sent[value].acked_s = self.world.now_s
            self._reads(partition, offset, value)

    def _reads(self, partition: int, offset: int, value: bytes) -> None:
        known = self.places[partition].values.setdefault(offset, value)
        if known != value:
            self.fail("I2", "{}/{} is {} and was {}", partition, offset, value[:20], known[:20])

    def delivered(self, message: Any, began_ns: int) -> None:
        self.world.note("client", "gets {}/{}, delivery {} receipt {} begun {}", message.partition, message.offset, message.deliveries if hasattr(message,"deliveries") else "", message.receipt[-30:], began_ns)
        if message.topic != TOPIC:
            return
        self._reads(message.partition, message.offset, message.record.value)
        if message.record.value not in self._sent:
            self.fail("I13", "{}/{} has {}, which nobody sent", message.partition, message.offset, message.record.value)
        acked = self._acked.get((message.partition, message.offset))
        if acked is not None and acked[0] < began_ns:
            self.fail("I12", "{}/{} is delivered again after its ack", message.partition, message.offset)

    def settled(self, message: Any) -> None:
        self.world.note("client", "acked {}/{} receipt {}", message.partition, message.offset, message.receipt[-30:])
        self._acked.setdefault((message.partition, message.offset), (self.world.loop.now_ns, message.receipt))
        self.world.reached["acks"] += 1

    def some_offset(self, random: Random, partition: int) -> int | None:
        watermark = self.places[partition].watermark
        return random.randint(0, watermark) if watermark else None

    def purging(self, partition: int, upto: int) -> None:
        self.places[partition].purged = max(self.places[partition].purged, upto)

    # --- the end -----------------------------------------------------------------------------------------------------

    def replicas(self) -> dict[tuple[str, int], list[tuple[int, Partition]]]:
        """Return the open replicas of each partition, with the numbers of their brokers."""
        found: dict[tuple[str, int], list[tuple[int, Partition]]] = {}
        for machine in self.world.machines.values():
            if machine.broker is not None:
                for partition in machine.broker.topics.partitions():
                    if not partition.closed:
                        found.setdefault((partition.topic_id, partition.number), []).append((machine.number, partition))
        return found

    def is_whole(self) -> bool:
        machines = self.world.machines.values()
        if not all(machine.broker is not None and machine.broker.ready for machine in machines):
            return False
        if len(self.states) < len(self.places):
            return False
        return all(state.leader and len(state.isr) == len(state.replicas) for state in self.states.values())

    def agree(self) -> bool:
        """Whether all replicas of each partition know that everything is committed."""
        if not self.is_whole():
            return False
        replicas = self.replicas()
        for key, state in self.states.items():
            held = [partition for _, partition in replicas.get(key, [])]
            if len(held) < len(state.replicas):
                return False
            ends = {(each.log.end_offset, each.replica.high_watermark) for each in held}
            if len(ends) != 1 or any(end != watermark for end, watermark in ends):
                return False
        return True

    def state(self) -> str:
        lines = [f"{key[1]}: leader {state.leader}, ISR {state.isr}" for key, state in self.states.items()]
        for (_, number), held in self.replicas().items():
            lines += [
                f"{number} on {broker}: end {each.log.end_offset}, committed {each.replica.high_watermark}, {each.fault}"
                for broker, each in held
            ]
        for machine in self.world.machines.values():
            lines.append(f"broker {machine.number}: {'down' if machine.life is None else machine.life.process}")
            if machine.broker is not None and not machine.broker.ready:
                lines.append("not ready")
        return "; ".join(lines)

    def final(self) -> None:
        """Compare all logs with each other, and with what the clients were told."""
        for (_, number), held in sorted(self.replicas().items()):
            logs = {broker: partition.log.read(partition.log.log_start_offset) for broker, partition in held}
            start = max(partition.start.offset for _, partition in held)
            shape = {
                broker: [(each.base_offset, each.leader_epoch, each.kind, each.crc if not each.holes else 0) for each in log
                         if each.base_offset >= start]
                for broker, log in logs.items()
            }  # fmt: skip
            first = next(iter(shape.values()))
            if not self.world.options.compacts and any(each != first for each in shape.values()):
                raise Violation(f"I2: the logs of partition {number} differ: {shape}")
            if held[0][1].topic == TOPIC:
                self._compare(number, start, logs)

    def _compare(self, number: int, start: int, logs: dict[int, list[Any]]) -> None:
        place = self.places[number]
        if start > place.purged:
            raise Violation(f"I14: partition {number} begins at {start}, and was purged below {place.purged}")
        stored: dict[bytes, list[int]] = {}
        for batch in next(iter(logs.values())):
            if batch.kind == BatchKind.MESSAGES:
                for index, record in enumerate(batch.records):
                    if record.value:
                        stored.setdefault(record.value, []).append(batch.base_offset + index)
        for value, offsets in stored.items():
            sent = self._sent.get(value)
            if sent is None:
                raise Violation(f"I13: {number}/{offsets} has {value[:20]!r}, which nobody sent")
            if sent.refused:
                raise Violation(f"I15: {value[:20]!r} was refused, and is at {number}/{offsets}")
            if sent.is_idempotent and len(offsets) > 1:
                raise Violation(f"I9: {value[:20]!r} is at {number}/{offsets}")
            for offset in offsets:
                self._reads(number, offset, value)
        if self.world.options.compacts:
            return
        for value, sent in self._sent.items():
            is_kept = sent.offset is not None and sent.offset >= max(start, place.purged)
            if sent.partition == number and is_kept and sent.offset not in stored.get(value, ()):
                raise Violation(
                    f"I3: {value[:20]!r} was acked at {number}/{sent.offset} after {sent.acked_s:.3f} s, and is lost;"
                    f" stored at {stored.get(value)}"
                )


def _hook(checker: Checker) -> None:
    """Observe every partition of the run."""
    world = checker.world
    step, init = _STEP, _INIT

    def stepped(self: Partition, event: Any) -> None:
        step(self, event)
        if not world.loop.current.dead:
            checker.stepped(world.loop.current, self)

    def initialised(self: Partition, *values: Any, **named: Any) -> None:
        init(self, *values, **named)
        checker.opened(world.loop.current, self)

    Partition.step = stepped  # type: ignore[method-assign]
    Partition.__init__ = initialised  # type: ignore[method-assign]


_STEP = Partition.step
_INIT = Partition.__init__
