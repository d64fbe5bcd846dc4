"""The rules of PROOF that replicas must hold: after each step of a core, each change of a log and of the tree, and at
the end. history.py has the rules of what clients are told.

    I1   one leader in an epoch; no replica forgets an epoch in which it acted
    I2   equal (offset, epoch), equal records        I8   no cut below the own high watermark
    I3   what was fsynced is there at the next start I10  elections are the present controller's
    I4   an ack: fsynced on min_insync_replicas      I14  the log start moves by a purge alone
    I5   the high watermark: rising, durable         I17  no replica is set aside unless another one is whole
    I6   the ISR within the maximal ISR, its floor
    I7   who joins has everything committed

A machine whose disk was replaced or damaged is `lossy` for a partition until its replica there is whole again: what it
has lost may be missing when it is opened (I3), and it may leave the ISR (I6). All else holds for it too, from what it
had when it was opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec
from simulation.shell.history import DEDUP_WINDOW_MS, History, Where
from simulation.shell.loop import Process
from simulation.shell.schedules import TICKS

from portalmq.broker.cluster.replicas import Files
from portalmq.broker.core.queue.records import Compact, Extend, Grant, Redrive
from portalmq.broker.partition.action_queue import ActionQueue
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.writer import Entry, Pending
from portalmq.broker.queues.outbox import HEADER_SOURCE_OFFSET, HEADER_SOURCE_PARTITION
from portalmq.broker.storage.batch import Batch, BatchKind
from portalmq.broker.storage.epochs import GET, EpochFile
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.state import StateFile
from portalmq.broker.storage.wal import connect_final
from portalmq.control_plane.plane import Node, Op, Set
from portalmq.control_plane.state import (
    CONTROLLER,
    CONTROLLER_EPOCH,
    PARTITIONS,
    TOPICS,
    PartitionState,
    decode,
    topic_id_of,
)

if TYPE_CHECKING:
    from simulation.shell.world import World

    from portalmq.broker.server.adoption import ReplicaFound

TOPIC = "t"
Key = tuple[str, int]  # topic id and partition


class Violation(AssertionError):
    """A rule does not hold."""


@dataclass(slots=True)
class Seen:
    """What was seen of one partition in one life of a broker."""

    watermark: int = 0
    epoch: int = -1


@dataclass(slots=True)
class Held:
    """What a machine has of a partition: fsynced up to `end`, and acted in `epoch`."""

    end: int = 0
    watermark: int = 0
    epoch: int = -1
    store: str = ""


@dataclass(slots=True)
class Known:
    """A partition, over all its replicas."""

    name: str = ""
    least: int = 1
    state: PartitionState | None = None
    watermark: int = 0
    leaders: dict[int, str] = field(default_factory=dict)  # of an epoch
    held: dict[int, Held] = field(default_factory=dict)  # by machine
    most: dict[int, int] = field(default_factory=dict)  # the greatest end that was ever fsynced, by machine
    records: dict[tuple[int, int], int] = field(default_factory=dict)  # (offset, epoch) -> checksum
    lossy: set[int] = field(default_factory=set)
    beheaded: set[int] = field(default_factory=set)  # machines where the first bytes of the last segment are damaged
    doubted: set[int] = field(default_factory=set)  # machines whose state.sqlite, or epochs.sqlite, is damaged
    damaged: dict[int, str] = field(default_factory=dict)  # the store that is damaged, by machine: found in time

    def is_damaged(self, machine: int) -> bool:
        return self.damaged.get(machine) == self.of(machine).store

    def of(self, machine: int) -> Held:
        return self.held.setdefault(machine, Held())


class Checker:
    def __init__(self, world: World) -> None:
        self.world = world
        self.history = History(world.fail, compacts=world.options.compacts)
        self.partitions: dict[Key, Known] = {}
        self.partitions_least = world.options.partitions  # that a whole cluster has
        self._without_epochs: set[int] = set()  # machines whose epochs.sqlite is damaged
        self._seen: dict[tuple[str, Key, str], Seen] = {}
        self._acted: dict[tuple[str, Path], int] = {}
        self._in_state: WeakKeyDictionary[StateFile, int] = WeakKeyDictionary()  # the epoch in a state.sqlite
        self._ids: dict[str, str] = {}  # of topics, by name
        self._deleted: set[str] = set()  # ids
        self.steps = 0
        world.zookeeper.on_changed.append(self._tree_changed)
        world.zookeeper.on_commit.append(self.committing)

    def fail(self, rule: str, why: str, *values: object) -> None:
        self.world.fail(rule, why.format(*values))

    def known(self, key: Key) -> Known:
        return self.partitions.setdefault(key, Known(doubted=set(self._without_epochs)))

    def damaged_epochs(self, machine: int) -> None:
        """A bit of a machine's epochs.sqlite has flipped: what is saved there from now on may be lost too."""
        self._without_epochs.add(machine)
        for known in self.partitions.values():
            known.doubted.add(machine)

    @property
    def states(self) -> dict[Key, PartitionState]:
        return {key: known.state for key, known in self.partitions.items() if known.state is not None}

    def key_of(self, topic: str, number: int) -> Key | None:
        """Return the key of a partition that was opened. The topic may be a new one: an adoption knows no topic that is
        on no disk yet."""
        named = [key for key, known in self.partitions.items() if known.name == topic and key[1] == number]
        return next((key for key in named if key[0] == self._ids.get(topic, key[0])), None)

    # --- the tree ----------------------------------------------------------------------------------------------------

    def committing(self, ops: Sequence[Op], nodes: dict[str, Node]) -> None:
        """I10: who raises an epoch proves in the same commit that it is the controller still."""
        guarded = any(op.path in (CONTROLLER, CONTROLLER_EPOCH) for op in ops)
        for op in ops:
            before = nodes.get(op.path)
            if not isinstance(op, Set) or not _is_partition(op.path) or before is None or guarded:
                continue
            if decode(op.data, PartitionState).leader_epoch > decode(before.data, PartitionState).leader_epoch:
                self.fail("I10", "{} has a new epoch, and nobody checked who is controller", op.path)

    def _tree_changed(self, path: str, node: Node | None) -> None:
        parts = path.split("/")
        if path.startswith(f"{TOPICS}/"):
            self._topic_changed(parts[-1], node)
        if not _is_partition(path):
            return
        key = (parts[2], int(parts[3]))
        if node is None or not node.data or key[0] in self._deleted:
            return
        known = self.known(key)
        after, before = decode(node.data, PartitionState), known.state
        known.state = after
        now = after.leader, after.leader_epoch, after.isr
        self.world.note("zookeeper", "{}/{} v{}: {} {} {}", *key, node.version, *now)
        if after.leader is not None and after.leader not in after.isr:
            self.fail("I6", "the leader {} of {} is not in the ISR {}", after.leader, key, after.isr)
        if before is not None:
            self.changed(key, before, after)
            return
        for number, store in after.store_uuids.items():
            if self.world.machines[number].store_uuid != store.partition("/")[0]:  # its disk was replaced just before
                known.lossy.add(number)
        for number in after.isr:  # of a new partition, or of one that was adopted
            if known.of(number).end < known.watermark:
                self.fail(
                    "I7", "{} is in the ISR of {} with {} of {}", number, key, known.of(number).end, known.watermark
                )

    def _topic_changed(self, name: str, node: Node | None) -> None:
        if node is not None:
            self._ids[name] = topic_id_of(node.data)
        elif not self.world.is_adopting and name in self._ids:
            self._deleted.add(self._ids.pop(name))
            for key, known in self.partitions.items():
                if key[0] in self._deleted:
                    known.state = None

    def changed(self, key: Key, before: PartitionState, after: PartitionState) -> None:
        known = self.known(key)
        if after.leader_epoch < before.leader_epoch:
            self.fail("I1", "the leader epoch of {} fell from {} to {}", key, before.leader_epoch, after.leader_epoch)
        if after.leader not in (before.leader, None) and after.leader_epoch == before.leader_epoch:
            self.fail("I1", "{} has another leader in epoch {}", key, after.leader_epoch)
        gone = {number for number in set(before.isr) - set(after.isr) - known.lossy if not known.is_damaged(number)}
        floor = min(known.least, len(after.replicas))
        if gone and len(after.isr) < floor and len(after.isr) < len(before.isr):
            self.fail("I6", "the ISR of {} shrank from {} to {}, below {}", key, before.isr, after.isr, floor)
        for joined in sorted(set(after.isr) - set(before.isr)):
            if known.of(joined).end < known.watermark:
                self.fail("I7", "{} joins {} with {} of {}", joined, key, known.of(joined).end, known.watermark)
            elif joined not in known.beheaded:  # or this joins the log that it had
                known.lossy.discard(joined)  # copied again, from a store that is whole

    # --- after each step of a core -----------------------------------------------------------------------------------

    def stepped(self, process: Process, partition: Partition) -> None:
        self.steps += 1
        if partition.topic_id in self._deleted:
            return
        replica = partition.replica
        key = (partition.topic_id, partition.number)
        known = self.known(key)
        seen = self._seen.setdefault((process.name, key, partition.store_uuid), Seen())
        watermark = replica.high_watermark
        if watermark < seen.watermark:
            self.fail("I5", "the high watermark of {} fell from {} to {}", key, seen.watermark, watermark)
        if replica.highest_epoch < seen.epoch:
            self.fail("I1", "{} forgot epoch {} of {}", process, seen.epoch, key)
        seen.watermark, seen.epoch = watermark, replica.highest_epoch
        if any(a[0] >= b[0] or a[1] >= b[1] for a, b in pairwise(replica.epochs[-3:])):
            self.fail("I8", "epochs {} of {} do not rise", replica.epochs, key)
        held = known.of(process.number or 0)
        held.watermark, held.store = max(watermark, held.watermark), partition.store_uuid
        if partition.start.offset > self.history.place((partition.topic, partition.number)).purged:
            self.fail("I14", "{} begins at {} on {}, without a purge", key, partition.start.offset, process)
        in_sync = replica.in_sync
        # Until its epoch is on disk, a leader does nothing, and a restart may forget it.
        if in_sync is not None and not process.dead and partition.action_queue.remembering is None:
            self._leads(process, partition, known, in_sync)

    def begins_to_serve(self, process: Process, partition: Partition) -> None:
        if partition.action_queue.remembering is not None:
            key, epoch = (partition.topic_id, partition.number), partition.replica.highest_epoch
            self.fail("I1", "{} begins to serve {}, and epoch {} is not on disk", process, key, epoch)

    def _leads(self, process: Process, partition: Partition, known: Known, in_sync: Any) -> None:
        key, watermark = (partition.topic_id, partition.number), partition.replica.high_watermark
        epoch = in_sync.state.leader_epoch
        known.least = in_sync.state.min_insync_replicas
        other = known.leaders.setdefault(epoch, process.name)
        if other != process.name:
            self.fail("I1", "{} and {} lead {} in epoch {}", other, process.name, key, epoch)
        if watermark > partition.log.end_offset:
            self.fail("I5", "{} commits {} of {} in its log", process, watermark, partition.log.end_offset)
        if watermark > known.watermark:
            known.watermark = watermark
            place = self.history.place((partition.topic, partition.number))
            place.watermark = max(place.watermark, watermark)
            for member in sorted(in_sync.maximal - known.lossy):
                if known.of(member).end < watermark:
                    self.fail("I5", "{} commits {} of {}, {} has {}", process, watermark, key, member, known.of(member))
        begun = in_sync.epoch_start
        # A replica alone may serve before, and has the only log.
        if begun >= 0 and (begun < watermark or len(in_sync.state.replicas) == 1):
            self.history.leads((partition.topic, partition.number), partition.replica.epochs)
        state = known.state
        if state is not None and state.leader_epoch == epoch and not set(state.isr) <= in_sync.maximal:
            self.fail("I6", "ISR {} is not within {} of its leader {}", state.isr, set(in_sync.maximal), process)

    def opened(self, process: Process, partition: Partition) -> None:
        """A replica was opened, after a restart perhaps. An adoption may bring back a deleted topic, without files."""
        if partition.topic_id in self._deleted:
            return
        key = (partition.topic_id, partition.number)
        known, number = self.known(key), process.number or 0
        known.name = partition.topic
        held, end = known.of(number), partition.log.end_offset
        self.world.note(
            process,
            "opens {}/{} of {}: log {} to {}, high watermark {}, epoch {}",
            *(partition.topic, partition.number, partition.store_uuid, partition.start.offset, end),
            *(partition.replica.high_watermark, partition.replica.highest_epoch),
        )
        known.most[number] = max(end, known.most.get(number, 0))  # opening makes it durable
        if number in known.beheaded and held.store == partition.store_uuid and end >= held.end:
            known.lossy.discard(number)  # its write-ahead log had the damaged page
        known.beheaded.discard(number)
        if number in known.lossy or held.store not in ("", partition.store_uuid):
            known.held[number] = Held(end, 0, partition.replica.highest_epoch, partition.store_uuid)
            return
        if end < held.end:
            self.fail("I3", "{} had fsynced {} to {}, and finds {}", process, key, held.end, end)
        if number in known.doubted:
            if number not in self._without_epochs:
                known.doubted.discard(number)  # what cannot be read any more is forgotten once
            held.epoch = partition.replica.highest_epoch
        if partition.replica.highest_epoch < held.epoch:
            self.fail("I1", "{} has forgotten epoch {} of {}", process, held.epoch, key)
        held.end = end

    def read_by_adoption(self, replicas: Mapping[Key, Iterable[ReplicaFound]]) -> None:
        """An adoption opened the logs, which makes them durable: what a broker had not fsynced when it ended too."""
        for key, found in replicas.items():
            for each in found:
                held = self.known(key).of(each.broker_id)
                held.end = max(each.end, held.end)

    def saved_anew(self, process: Process, state_file: StateFile) -> None:
        """A damaged state.sqlite was written again. It has the epoch that this process read or saved there; and this
        file, or the one of its broker, has the epoch that it acted in."""
        key = (state_file.identity.topic_id, state_file.identity.partition)
        self.known(key).doubted.discard(process.number or 0)
        here = _epoch_in(state_file.path)
        if here < (before := self._in_state.get(state_file, -1)):
            self.fail("I1", "{} writes epoch {} of {} over a file that had {}", process, here, key, before)
        acted = self._acted.get((process.name, state_file.path), -1)
        if acted > (found := max(here, state_file._epoch_of_broker())):
            self.fail("I1", "{} saves epoch {} of {} again, and acted in {}", process, found, key, acted)

    def in_state(self, state_file: StateFile) -> None:
        """The epoch in a state.sqlite was read or saved."""
        self._in_state[state_file] = max(self._in_state.get(state_file, -1), state_file._highest_epoch)

    def epochs_anew(self, process: Process, epochs: EpochFile) -> None:
        """A damaged epochs.sqlite was written again. It has every epoch that this process acted in."""
        self._without_epochs.discard(process.number or 0)
        for (name, path), acted in self._acted.items():
            if name == process.name and path.parents[3] == epochs.path.parent:
                key = (path.parent.parent.name.rpartition("@")[2], int(path.parent.name))
                if key[0] in self._deleted:
                    continue
                with closing(connect_final(epochs.path)) as connection:
                    found = connection.execute(GET, key).get
                if found is None or found < acted:
                    self.fail("I1", "{} saves epoch {} of {} again, and acted in {}", process, found, key, acted)

    def acts(self, process: Process, partition: Partition, epoch: int) -> None:
        """A replica has stored an epoch, to lead or to follow in it."""
        held = self.known((partition.topic_id, partition.number)).of(process.number or 0)
        held.epoch = max(held.epoch, epoch)
        path = partition.state_file.path
        self._acted[process.name, path] = max(epoch, self._acted.get((process.name, path), -1))

    def recorded(self, partition: Partition, pending: Pending, group: str, record: object) -> None:
        """A leader has folded and appended a record of a group, which may not be on its disk yet."""
        where = partition.topic, partition.number
        if isinstance(record, Redrive):
            for start, end, _ in record.ranges:
                for offset in range(start, end):
                    self.history.redrives(where, offset)
        if not isinstance(record, Grant):
            return
        if any(machine.wall_ms > 0 for machine in self.world.machines.values()):
            for start, end in record.gone:
                for offset in range(start, end):
                    self.history.outdates(where, offset)
        if record.attempt_id is None or not record.ranges:
            return
        epoch, numbers = partition.delivery[group].attempt_leases[record.attempt_id]
        for (start, end, _), number in zip(record.ranges, numbers, strict=True):
            for offset in range(start, end):
                self.history.grants(where, offset, epoch, number, pending.base_offset, self.world.loop.now_ns)

    def refused(self, partition: Partition, taken: Sequence[Entry]) -> None:
        """A leader's disk had no room for a transaction."""
        for entry in taken:
            kind = entry.batch.kind if isinstance(entry, Pending) else None
            if kind not in (BatchKind.GRANT, BatchKind.EXTEND):
                continue
            record = msgspec.msgpack.decode(entry.batch.body, type=Grant if kind == BatchKind.GRANT else Extend)
            for start, end in record.gone if isinstance(record, Grant) else ():
                for offset in range(start, end):
                    self.history.lost_outdated((partition.topic, partition.number), offset)
            for start, end, *_ in record.ranges:
                for offset in range(start, end):
                    lease = (partition.topic, partition.number), offset, entry.batch.leader_epoch, record.deadline_ms
                    if isinstance(record, Extend):
                        self.history.lost_extend(*lease, self.world.loop.now_ns)
                    else:
                        self.history.lost_grant(*lease)

    # --- changes of a log --------------------------------------------------------------------------------------------

    def appended(self, machine: int, key: Key, batches: Sequence[Batch], end: int) -> None:
        if key[0] in self._deleted:
            return  # an adoption may bring it back, without the files of its last epochs: it is checked no more
        known = self.known(key)
        known.of(machine).end = end
        known.most[machine] = max(end, known.most.get(machine, 0))
        for batch in batches:
            if batch.holes or batch.kind == BatchKind.BLANK:
                continue  # compacted, and copied so
            if batch.kind == BatchKind.COMPACT:
                place = self.history.place((known.name, key[1]))
                place.compacted = max(place.compacted, msgspec.msgpack.decode(batch.body, type=Compact).upto)
            mark = (batch.base_offset, batch.leader_epoch)
            if known.records.setdefault(mark, batch.crc) != batch.crc:
                self.fail("I2", "{}/{} of epoch {} is another record on broker {}", key, *mark, machine)

    def cut(self, machine: int, key: Key, to: int) -> None:
        """A log is about to be cut. That may fail or break off, and be found done after a restart."""
        held = self.known(key).of(machine)
        if to < held.watermark:
            self.fail("I8", "broker {} cuts {} to {}, below its high watermark {}", machine, key, to, held.watermark)
        held.end = min(held.end, to)

    def begun_anew(self, machine: int, key: Key, at: int) -> None:
        known = self.known(key)
        known.of(machine).end = at

    def set_aside(self, machine: int, key: Key) -> None:
        known = self.known(key)
        is_hurt = machine in known.lossy or known.is_damaged(machine)
        if not is_hurt and not self.world.machines[machine].has_lost_writes:
            self.fail("I14", "broker {} sets {} aside, which nothing has damaged", machine, key)
        others = [each.end for number, each in known.held.items() if number != machine and number not in known.lossy]
        if max(others, default=-1) < known.watermark:
            self.fail("I17", "broker {} sets {} aside, and no other has {}", machine, key, known.watermark)
        known.held[machine] = Held()
        known.lossy.add(machine)

    # --- what clients do ---------------------------------------------------------------------------------------------

    def acked(self, values: list[bytes], partition: int, base_offset: int) -> None:
        self.world.reached["acked"] += len(values)
        self.world.note("client", "{} is acked at {}/{}", values[0][:20].rstrip(b"."), partition, base_offset)
        key = self.key_of(TOPIC, partition)
        if key is not None:
            known, end = self.partitions[key], base_offset + len(values)
            copies = sorted(number for number, most in known.most.items() if most >= end)
            if len(copies) < min(known.least, self.world.options.replication):
                self.fail("I4", "{}/{} is acknowledged, and fsynced on {} alone", key, base_offset, copies)
        self.history.acked(values, (TOPIC, partition), base_offset, self.world.loop.now_ns)

    def some_offset(self, random: Random, partition: int) -> int | None:
        watermark = self.history.place((TOPIC, partition)).watermark
        return random.randint(0, watermark) if watermark else None

    def purging(self, partition: int, upto: int) -> None:
        place = self.history.place((TOPIC, partition))
        place.purged = max(place.purged, upto)

    @property
    def is_hurt(self) -> bool:
        """Whether a copy of anything may be damaged."""
        return any(known.lossy or any(map(known.is_damaged, known.damaged)) for known in self.partitions.values())

    def may_lose(self, machine: int) -> bool:
        """Whether no acknowledged record would be lost with this machine's disk: all are whole, and all in sync. And
        the ISR cannot shrink to this machine alone before somebody knows."""
        for known in self.partitions.values():
            state = known.state
            if known.lossy or (state is not None and set(state.isr) != set(state.replicas)):
                return False
            if state is not None and machine in state.replicas and known.least < 2:
                return False
        return True

    def lose(self, machine: int) -> None:
        """The machine has lost what it had, or may have."""
        self._without_epochs.discard(machine)
        for known in self.partitions.values():
            if known.state is not None and machine in known.state.replicas:
                known.lossy.add(machine)

    # --- the end -----------------------------------------------------------------------------------------------------

    def replicas(self) -> dict[Key, list[tuple[int, Partition]]]:
        """Return the open replicas of each partition, with the numbers of their brokers."""
        found: dict[Key, list[tuple[int, Partition]]] = {}
        for machine in self.world.machines.values():
            if machine.broker is not None:
                for partition in machine.broker.topics.partitions():
                    if not partition.closed and partition.topic_id not in self._deleted:
                        found.setdefault((partition.topic_id, partition.number), []).append((machine.number, partition))
        return found

    def is_whole(self) -> bool:
        machines = self.world.machines.values()
        if not all(machine.broker is not None and machine.broker.ready for machine in machines):
            return False
        states = self.states
        if len(states) < self.partitions_least:
            return False
        return all(state.leader and len(state.isr) == len(state.replicas) for state in states.values())

    def has_damage(self) -> bool:
        """Whether a replica, open or kept closed, is said to be damaged."""
        brokers = [machine.broker for machine in self.world.machines.values() if machine.broker is not None]
        closed = any(it.fault for broker in brokers for it in broker.topics._opener.unusable.values())
        return closed or any(each.fault for held in self.replicas().values() for _, each in held)

    def agree(self) -> bool:
        """Whether all replicas of each partition know that everything is committed, and the outboxes are empty."""
        if not self.is_whole():
            return False
        replicas = self.replicas()
        for key, state in self.states.items():
            held = [partition for _, partition in replicas.get(key, [])]
            if len(held) < len(state.replicas) or any(each.groups.outbox or each.fault for each in held):
                return False
            ends = {(each.log.end_offset, each.replica.high_watermark) for each in held}
            if len(ends) != 1 or any(end != watermark for end, watermark in ends):
                return False
        return True

    def state(self) -> str:
        lines = [f"{key}: leader {state.leader}, ISR {state.isr}" for key, state in self.states.items()]
        for (_, number), held in self.replicas().items():
            lines += [
                f"{each.topic}/{number} on {broker}: {each.replica.high_watermark} of {each.log.end_offset},"
                f" outbox {sorted(each.groups.outbox)}, {each.fault}"
                for broker, each in held
            ]
        for machine in self.world.machines.values():
            lines.append(f"broker {machine.number}: {'down' if machine.life is None else machine.life.process}")
            if machine.broker is not None and not machine.broker.ready:
                lines.append("not ready")
        return "; ".join(lines)

    def final(self) -> None:
        """Compare all logs with each other, and with what the clients were told."""
        stored: dict[Where, tuple[int, dict[int, bytes]]] = {}
        letters = list[tuple[Where, int, bytes]]()
        for (_, number), held in sorted(self.replicas().items()):
            topic = held[0][1].topic
            logs = {broker: _read_all(partition) for broker, partition in held}
            start = max(partition.start.offset for _, partition in held)
            shapes = {broker: _shape(log, start) for broker, log in logs.items()}
            first = next(iter(shapes.values()))
            if not self.world.options.compacts and any(shape != first for shape in shapes.values()):
                raise Violation(f"I2: the logs of {topic}/{number} differ: {shapes}")
            if topic == TICKS:
                self.world.clients.recurring.stored(number, next(iter(logs.values())))
                continue
            log = next(iter(logs.values()))
            self.history.windows_end |= topic != TOPIC and leaps(log)
            if topic == f"{TOPIC}.dlq":
                letters += _letters(log)
            else:
                stored[topic, number] = start, _values(log)
        self.world.clients.recurring.check()
        self.history.stored(stored, letters)


def _epoch_in(path: Path) -> int:
    """Return the highest leader epoch in a state.sqlite that was closed; -1 if there is none."""
    if not path.exists():
        return -1
    with closing(connect_final(path)) as connection:
        found = connection.execute("SELECT value FROM meta WHERE key = 'highest_leader_epoch'").get
    return -1 if found is None else int(found)


def _read_all(partition: Partition) -> list[Batch]:
    log, found = partition.log, []
    at = log.log_start_offset
    while at < log.end_offset:
        batches = log.read(at)
        if not batches:
            break
        found += batches
        at = batches[-1].end_offset
    return found


def leaps(log: Sequence[Batch]) -> bool:
    """Return whether the time by which the leaders of a log went was put ahead by a dedup window: a broker that is the
    first one goes by its own clock until it learns the right time."""
    return any(after.appended_at_ms - before.appended_at_ms >= DEDUP_WINDOW_MS for before, after in pairwise(log))


def _values(log: Sequence[Batch]) -> dict[int, bytes]:
    return {
        batch.base_offset + index: record.value
        for batch in log
        if batch.kind == BatchKind.MESSAGES
        for index, record in enumerate(batch.records)
        if record.value
    }


def _letters(log: Sequence[Batch]) -> list[tuple[Where, int, bytes]]:
    """Return the dead letters of a log: the partition and the offset that each is a copy from, and its value."""
    return [
        ((TOPIC, int(each.headers[HEADER_SOURCE_PARTITION])), int(each.headers[HEADER_SOURCE_OFFSET]), each.value)
        for batch in log
        if batch.kind == BatchKind.MESSAGES
        for each in batch.records
        if each.value
    ]


def _shape(log: list[Any], start: int) -> list[tuple[Any, ...]]:
    """Return what must be equal on all replicas, from an offset on."""
    return [
        (each.base_offset, each.leader_epoch, each.kind, each.crc if not each.holes else 0)
        for each in log
        if each.base_offset >= start
    ]


# --- observation -----------------------------------------------------------------------------------------------------


def observe(checker: Checker) -> None:
    """Show every partition and every log of this process to the checker."""
    world = checker.world

    def after(
        owner: Any, name: str, show: Callable[..., object], before: Callable[..., object] = lambda *_: None
    ) -> None:
        original = _ORIGINALS.setdefault((owner, name), getattr(owner, name))

        def call(self: Any, *values: Any, **named: Any) -> Any:
            before(world.loop.current, self, *values)
            result = original(self, *values, **named)
            if not world.loop.current.dead:
                show(world.loop.current, self, result, *values)
            return result

        setattr(owner, name, call)

    def key_of(log: Log) -> Key:
        return log.identity.topic_id, log.identity.partition

    def number(process: Process) -> int:
        return process.number or 0

    after(Partition, "step", lambda process, it, result, event: checker.stepped(process, it))
    after(Partition, "_serve", lambda process, it, result: checker.begins_to_serve(process, it))
    after(
        Partition,
        "_on_refused",
        lambda process, it, result, taken, why: checker.refused(it, taken),
    )
    after(
        Partition,
        "append_group_record",
        lambda process, it, pending, group, record: checker.recorded(it, pending, group, record),
    )
    after(Partition, "__init__", lambda process, it, result, *values: checker.opened(process, it))
    after(
        Log,
        "_append",
        lambda process, log, done, batches, **_: (
            done is not False and checker.appended(number(process), key_of(log), batches, log.end_offset)
        ),
    )
    after(
        ActionQueue,
        "_remember",
        lambda process, queue, result, action: (
            queue.remembering is not action and checker.acts(process, queue._partition, action.leader_epoch)
        ),
    )
    after(
        StateFile,
        "_start_over",
        lambda process, it, result: checker.saved_anew(process, it),
    )
    after(StateFile, "save", lambda process, it, result, *given, **more: checker.in_state(it))
    after(StateFile, "_note_epoch", lambda process, it, result, found: checker.in_state(it))
    after(EpochFile, "_replace", lambda process, it, result, epochs: checker.epochs_anew(process, it))
    after(
        Log,
        "truncate",
        lambda *_: None,
        before=lambda process, log, to: checker.cut(number(process), key_of(log), to),
    )
    after(Log, "reset", lambda process, log, result, at, *_: checker.begun_anew(number(process), key_of(log), at))
    after(
        Files,
        "set_aside",
        lambda process, it, result, topic, part: checker.set_aside(number(process), (topic.topic_id, part)),
    )


def _is_partition(path: str) -> bool:
    return path.startswith(f"{PARTITIONS}/") and path.count("/") == 3


_ORIGINALS: dict[tuple[Any, str], Any] = {}
