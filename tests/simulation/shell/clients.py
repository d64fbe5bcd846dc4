"""Producers, consumers and an operator, which call the brokers' facades over the simulated network. members.py has
members of a stream group, lock holders and readers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import gevent
from simulation.shell.checker import TOPIC
from simulation.shell.history import Delivered
from simulation.shell.inquiries import Inquiries
from simulation.shell.limits import Limits
from simulation.shell.loop import Process
from simulation.shell.members import Members
from simulation.shell.network import NeverGone, Unknown
from simulation.shell.schedules import Recurring

from portalmq import wire
from portalmq.broker.core.queue.receipts import mark_in
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.commit import OutputMessage
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.batch import Record
from portalmq.compression import compressed
from portalmq.errors import InvalidRequest, PortalMQError, TopicExists, TopicNotFound, Unavailable
from portalmq.network.connection import NoAnswer, NotSent

if TYPE_CHECKING:
    from simulation.shell.machine import Machine
    from simulation.shell.world import World

GROUP = "g"
OUTPUTS = "out"
CALL_S = 5.0
VISIBILITY_MS = 2_000
EXTENDED_MS = 500
# Messages whose receipts a consumer keeps, to use them late.
KEPT = 30


class Clients:
    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = world.loop
        self.process = Process("client")
        self.stopping = self.has_begun = False
        self.active = 0
        self.members = Members(self)
        self.inquiries = Inquiries(self, GROUP)
        self.recurring = Recurring(self)

    def start(self) -> None:
        self.spawn(self._begin, Random(f"clients {self.world.seed}"))
        if self.world.options.schedules:
            self.recurring.start()

    def stop(self) -> None:
        self.stopping = True

    @property
    def idle(self) -> bool:
        return self.active == 0

    def spawn(self, work: Callable[..., None], *values: Any) -> None:
        self.active += 1
        self.loop.spawn(self.process, self._run, work, *values)

    def _run(self, work: Callable[..., None], *values: Any) -> None:
        try:
            work(*values)
        finally:
            self.active -= 1

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(
        self, random: Random, work: Callable[[Any], Any], within_s: float = CALL_S, machine: Machine | None = None
    ) -> Any:
        """Call any broker, or that of a machine. Raises PortalMQError with what it answered, Unavailable when nothing
        was sent, Unknown."""
        world = self.world
        machine = machine or random.choice(list(world.machines.values()))

        def serve(broker: Any) -> Any:
            if not broker.ready:
                return Unavailable("not ready")
            try:
                return work(broker)
            except Exception as fault:  # noqa: BLE001 - as api/problems.py does
                error = broker.explain(fault)
                if error is None:
                    world.fail("a call failed", repr(fault), fault)
                return error

        try:
            with gevent.Timeout(within_s, Unknown("no answer in time")):
                result = world.network.exchange(None, self.process, machine, serve)
        except NotSent as fault:
            raise Unavailable(str(fault)) from None
        except NoAnswer as fault:
            raise Unknown(str(fault)) from None
        return result

    def patiently(self, random: Random, work: Callable[[Any], Any]) -> Any:
        """Repeat a call until it is answered with a result, or with a refusal that a repeat does not help. Copies of it
        may be carried out at any later time."""
        while True:
            try:
                return self.call(random, work)
            except Unknown:
                pass
            except PortalMQError as error:
                if not error.retryable:
                    raise
            self.loop.wait(0.05 + random.random() * 0.3)

    def _begin(self, random: Random) -> None:
        options = self.world.options
        config: dict[str, Any] = {"cleanup": "compact"} if options.compacts else {}
        if options.min_insync is not None:
            config["min_insync_replicas"] = options.min_insync
        request = wire.CreateTopic(partitions=options.partitions, replication_factor=options.replication, config=config)
        created = None
        while created is None:
            self.loop.wait(0.05)
            try:
                created = self.patiently(random, lambda broker: broker.create_topic(TOPIC, request))
            except InvalidRequest:  # too few brokers are up
                continue
            except TopicExists:
                if not self.world.reached["adopted"]:
                    raise
                break  # its settings were lost before they were on any disk
        group: dict[str, Any] = {"start": "earliest", "max_deliveries": options.deliveries}
        history = self.world.checker.history
        if options.limits:
            history.limits, history.partitions = Limits(), self.world.checker.partitions_least
            group |= history.limits.first(Random(f"limits {self.world.seed}"))
        self.patiently(random, lambda broker: broker.put_group(GROUP, group))
        self.has_begun = True
        for number in range(options.producers):
            self.produce_to(number % options.partitions, number, Random(f"producer {self.world.seed} {number}"))
        for number in range(options.consumers):
            self.spawn(self._consume, number, Random(f"consumer {self.world.seed} {number}"))
        for number in range(options.rivals):
            self.spawn(self._rival, number, Random(f"rival {self.world.seed} {number}"))
        self.members.start()
        self.inquiries.start()

    # --- producers ---------------------------------------------------------------------------------------------------

    def produce_to(self, partition: int, number: int, random: Random) -> None:
        self.spawn(self._produce, partition, number, random)

    def _produce(self, partition: int, number: int, random: Random) -> None:
        """Append batches, one after the other; each is repeated until its end is known, if its producer is
        idempotent."""
        world, options = self.world, self.world.options
        is_idempotent = random.random() < 0.7
        identity = self.patiently(random, lambda broker: broker.new_producer(None)) if is_idempotent else None
        sequence = 0
        serial = 0
        while not self.stopping:
            self.loop.wait(options.pace_s * (0.5 + random.random()))
            count = random.choice((1, 1, 2, 5))
            (size,) = random.choices((20, 300, 3_000, 12_000), (6, 3, 1, 0.2))
            values = [f"p{number}-{serial}-{index}:".encode().ljust(size, b".") for index in range(count)]
            serial += 1
            keys = [random.choice(("d" if options.compacts else None, "a", "b", "c")) for _ in values]
            if options.compacts and random.random() < 0.1:
                values, keys = [b""], ["a"]  # a tombstone
            records = [
                Record(value, key=None if key is None else key.encode(), **self._lane(random), **self._kind(random))
                for value, key in zip(values, keys, strict=True)
            ]
            if world.checker.history.limits is not None:
                world.checker.history.limits.keys |= {each.value: each.key for each in records}
            packed = compressed(values) if options.compresses and all(values) and random.random() < 0.5 else None
            stamp = None if identity is None else wire.ProducerStamp(identity.id, identity.epoch, sequence)
            request = ProduceRequest(records, partition=partition, producer=stamp, compressed=packed or b"")
            world.reached["compressed"] += packed is not None
            if all(values):
                world.checker.history.sends(values, (TOPIC, partition), is_once=is_idempotent)
            else:
                world.checker.history.sends(values, None, is_once=False)
            done = self._append(random, request, values, partition)
            if done:
                sequence += len(values)
            elif stamp is not None:
                return  # a refusal that a repeat does not help, or the end: the sequence cannot go on

    def _kind(self, random: Random) -> dict[str, Any]:
        if not self.world.options.kinds:
            return {}
        return {"content_type": random.choice(("application/json", "text/plain", "application/x-own"))}

    def press(self, random: Random, machine: Machine, *, batches: int, size: int) -> None:
        """Send messages to a leader, each once, without waiting for the ones before."""
        leads = [key[1] for key, state in self.world.checker.states.items() if state.leader == machine.number]
        leads = [number for number in sorted(set(leads)) if number < self.world.options.partitions]
        if not self.has_begun or not leads:
            return
        for number in range(batches):
            values = [f"x{self.loop.now_ns}-{number}-{index}:".encode().ljust(size, b".") for index in range(2)]
            self.spawn(self._press, random, machine, values, random.choice(leads))

    def _press(self, random: Random, machine: Machine, values: list[bytes], partition: int) -> None:
        history = self.world.checker.history
        history.sends(values, (TOPIC, partition), is_once=False)
        request = ProduceRequest([Record(value, key=b"x") for value in values], partition=partition)
        self.loop.wait(random.random() * 0.3)
        try:
            produced = self.call(random, lambda broker: broker.produce_range(TOPIC, request), machine=machine)
        except (Unknown, PortalMQError):
            return
        self.world.checker.acked(values, partition, produced.base_offset)

    def _lane(self, random: Random) -> dict[str, Any]:
        """Return the options of a message: most have none."""
        if not self.world.options.lanes or random.random() < 0.5:
            return {}
        now_ms = self.loop.now_ns // 1_000_000
        return random.choice(
            (
                {"priority": random.choice((1, 5, 31))},
                {"deliver_at_ms": now_ms + random.randint(0, 2_000)},
                {"expires_at_ms": now_ms + random.randint(100, 5_000)},
            )
        )

    def _append(self, random: Random, request: ProduceRequest, values: list[bytes], partition: int) -> bool:
        world = self.world
        has_doubt = False
        while True:
            try:
                produced = self.call(random, lambda broker: broker.produce_range(TOPIC, request))
            except Unknown:
                has_doubt = True
            except PortalMQError as error:
                if error.outcome != "not_applied":
                    has_doubt = True
                elif 400 <= error.status < 500 and not error.retryable:
                    world.reached[f"produce {error.code}"] += 1
                    world.note("client", "{} is refused: {}", values[0][:20], error.code)
                    if not has_doubt:
                        world.checker.history.refused(values)
                    return False
            else:
                world.checker.acked(values, partition, produced.base_offset)
                return True
            if request.producer is None and has_doubt:
                world.reached["produce unknown"] += 1
                return False
            if self.stopping and random.random() < 0.01:
                return False
            self.loop.wait(0.02 + random.random() * 0.3)

    # --- consumers ---------------------------------------------------------------------------------------------------

    def _consume(self, number: int, random: Random) -> None:
        """Receive and settle. Some consumers hold messages for long, and some use old receipts often."""
        serial = 0
        holds_s = random.choice((0.01, 0.2, 1.0))
        lateness = random.choice((0.1, 0.3, 0.6))
        weights = random.choice(((10, 2, 1, 1), (10, 2, 1, 1), (3, 8, 1, 1)))
        kept: list[Delivered] = []
        wanted: wire.ReceiveRequest | None = None
        verb = ""
        while not self.stopping:
            kept = [each for each in kept if not self.world.checker.history.is_done(each)][-KEPT:]
            if kept and random.random() < lateness:
                self._act_late(random, f"z{number}", kept)
            # The same attempt may come again, whatever became of it.
            if wanted is None or random.random() > (0.4 if verb == "nack" else 0.05):
                serial += 1
                wanted = _wanted(random, f"c{number}", serial, random.choice((300, VISIBILITY_MS)))
            messages = self._receive(random, wanted)
            if not messages:
                self.loop.wait(0.05 + random.random() * 0.1)
                continue
            kept += messages
            self.loop.wait(random.random() * random.choice((0.01, holds_s)))
            if random.random() < 0.15:
                self._commit(random, f"c{number}-{serial}", messages)
            else:
                verb = self._settle(random, messages, weights)
            self.loop.wait(random.random() * (self.world.options.idle_s - 0.1))

    def _rival(self, number: int, random: Random) -> None:
        """Receive, let the lease end, receive the same messages again, and use the old receipts beside the new ones."""
        history, name, serial = self.world.checker.history, f"r{number}", 0
        while not self.stopping:
            serial += 1
            first = self._receive(random, _wanted(random, name, serial, 300))
            again: list[Delivered] = []
            for _ in range(random.choice((1, 4, 12)) if first else 0):
                self.loop.wait(0.1 + random.random() * 0.4)
                serial += 1
                second = self._receive(random, _wanted(random, name, serial, VISIBILITY_MS))
                again = [each for each in second if each[:2] in {old[:2] for old in first}]
                if again or self.stopping:
                    break
                self._settle(random, second, (1, 1, 0, 0))
            old = [each for each in first if each[:2] in {new[:2] for new in again}]
            for _ in range(3 if old else 0):
                self._act_late(random, name, old)
                self.loop.wait(random.random() * 0.3)
                if random.random() < 0.5 and not any(map(history.is_done, again)):
                    self._settle(random, again, (1, 8, 0, 2))
            self.loop.wait(0.05 + random.random() * 0.3)

    def _act_late(self, random: Random, name: str, kept: list[Delivered]) -> None:
        """Use old receipts: their leases may have gone to others."""
        history, now_ns = self.world.checker.history, self.loop.now_ns
        taken = [each for each in kept if history.is_with_another(each, now_ns)]
        kept = taken if taken and random.random() < 0.7 else kept
        messages = random.sample(kept, min(len(kept), 8))
        if random.random() < 0.4:
            self._commit(random, name, messages)
        else:
            self._settle(random, messages, (1, 4, 0, 4), late=True)

    def hoard(self, random: Random, machine: Machine) -> None:
        """Receive from a leader that is about to die, and use these receipts when others have the messages."""
        if self.has_begun:
            self.spawn(self._hoard, random, machine)

    def _hoard(self, random: Random, machine: Machine) -> None:
        history, name = self.world.checker.history, f"w{self.loop.now_ns}"
        kept: list[Delivered] = []
        life = machine.life
        for serial in range(12):
            kept += self._receive(random, _wanted(random, name, serial, 300, wait_ms=0), machine)
            self.loop.wait(random.random() * 0.1)
            if machine.life is not life:
                break
        is_rivalled = random.random() < 0.7
        for serial in range(60 if kept else 0):
            self.loop.wait(0.1)
            if is_rivalled:
                self._receive(random, _wanted(random, f"{name}r", serial, VISIBILITY_MS))
            taken = [each for each in kept if history.is_with_another(each, self.loop.now_ns)]
            if taken:
                self.world.reached["hoarded"] += 1
                self._settle(random, taken[:8], (1, 4, 0, 4), late=True)
            if self.stopping:
                return

    def _receive(self, random: Random, wanted: wire.ReceiveRequest, machine: Machine | None = None) -> list[Delivered]:
        world, history = self.world, self.world.checker.history
        began_ns = self.loop.now_ns
        try:
            messages = self.call(random, lambda broker: _receive(broker, wanted, machine is None), machine=machine)
        except (Unknown, PortalMQError):
            return []
        world.reached["delivered"] += len(messages)
        visibility_ns = 1_000_000 * (wanted.visibility_timeout_ms or 0)
        found = []
        for each in messages:
            where = each.topic, each.partition
            got = (began_ns, self.loop.now_ns, visibility_ns)
            value = each.record.value
            attempt, deadline_ms = wanted.attempt_id or "", each.lease_expires_at_ms
            message = Delivered(where, each.offset, value, each.receipt, attempt, *got, deadline_ms)
            world.note(
                "client", "{} gets {}/{}, delivery {}", message.attempt, *where, each.offset, each.delivery_count
            )
            history.delivered(message)
            found.append(message)
        return found

    def _settle(
        self, random: Random, messages: list[Delivered], weights: tuple[int, ...], *, late: bool = False
    ) -> str:
        verb = random.choices(("ack", "nack", "forget", "extend"), weights)[0]
        if verb == "forget":
            return verb
        if verb == "ack" and messages and self.world.options.all_verbs and random.random() < 0.3:
            self._finish(random, messages)
            return verb
        if verb == "nack" and self.world.options.all_verbs:
            verb = random.choice(("nack", "nack", "release", "reject"))
        receipts = [message.receipt for message in messages]
        settle = SettleRequest(verb, {"nack": random.choice((10, 1_500)), "extend": EXTENDED_MS}.get(verb))  # type: ignore[arg-type]
        history, began_ns = self.world.checker.history, self.loop.now_ns
        if verb == "extend":
            history.extends(receipts, began_ns + EXTENDED_MS * 1_000_000)
        else:
            history.releases(receipts)
        try:
            verdicts = self.call(random, lambda broker: broker.settlement.settle(GROUP, receipts, settle))
        except (Unknown, PortalMQError):
            return verb
        good = [message for message, verdict in zip(messages, verdicts, strict=True) if verdict is True]
        self.world.reached[f"{verb} late" if late else verb] += len(good)
        history.accepted([each.receipt for each in good], began_ns, self.loop.now_ns)
        if verb == "ack":
            self._done(good)
        elif verb == "extend":
            history.extended([each.receipt for each in good], began_ns, began_ns + EXTENDED_MS * 1_000_000)
        return verb

    def _finish(self, random: Random, messages: list[Delivered]) -> None:
        """Ack messages by their offsets, of whoever has them, or of their consumer alone."""
        history = self.world.checker.history
        holder = random.choice((None, messages[0].attempt.partition(":")[0]))
        places = [(each.where[1], each.offset) for each in messages]
        marks = random.choice(((), [mark_in(each.receipt) for each in messages]))
        history.ends([(each.where, each.offset) for each in messages], holder)
        try:
            verdicts = self.call(
                random, lambda broker: broker.offset_acks.finish(GROUP, TOPIC, places, marks=marks, holder=holder)
            )
        except (Unknown, PortalMQError):
            return
        good = [message for message, verdict in zip(messages, verdicts, strict=True) if verdict is True]
        self.world.reached["acked by offset"] += len(good)
        history.ended([(each.where, each.offset) for each in good], holder, self.loop.now_ns)
        self._done(good)

    def _done(self, messages: list[Delivered]) -> None:
        for each in messages:
            self.world.note("client", "{} has acked {}/{}", each.attempt, *each.where, each.offset)
        self.world.checker.history.done([each.receipt for each in messages], self.loop.now_ns)

    def _commit(self, random: Random, name: str, messages: list[Delivered]) -> None:
        """Ack some messages of one partition, and send outputs, in one commit call: repeated while its end is
        unknown."""
        world, history = self.world, self.world.checker.history
        inputs = [each for each in messages if each.where == messages[0].where]
        name = f"{name}-{len(history.calls)}"
        values = [f"o{name}-{index}".encode() for index in range(random.choice((0, 1, 3)))]
        receipts = [each.receipt for each in inputs]
        name, values = history.calls_commit(name, values, None, receipts)
        outputs = [OutputMessage(OUTPUTS, Record(value)) for value in values]
        history.releases(receipts)

        def send(broker: Any) -> Any:
            return broker.group_commits.commit_receipts(GROUP, receipts, outputs, forward=True)

        while True:
            try:
                self.call(random, send)
            except Unknown:
                pass
            except PortalMQError as error:
                if world.reached["adopted"] and isinstance(error, InvalidRequest):
                    return  # the key of the receipts was lost
                if 400 <= error.status < 500 and error.outcome == "not_applied" and not error.retryable:
                    # Final, even if an earlier try is still on its way.
                    world.reached[f"commit {error.code}"] += 1
                    world.note("client", "commit {} is refused: {}", name, error.code)
                    history.commit_refused(name)
                    self.spawn(self._again, random, send)
                    return
            else:
                world.note("client", "commit {} is answered", name)
                world.reached["commit"] += 1
                history.commit_acked(name)
                self._done(inputs)
                return
            if self.stopping or random.random() < 0.1:
                return
            self.loop.wait(0.02 + random.random() * 0.3)

    def _again(self, random: Random, send: Callable[[Any], Any]) -> None:
        """Let copies of a call arrive late, when its client has gone on."""
        for _ in range(4):
            self.loop.wait(random.random())
            with contextlib.suppress(Unknown, PortalMQError):
                self.call(random, send)

    # --- the operator ------------------------------------------------------------------------------------------------

    def purge(self, random: Random) -> None:
        partition = random.randrange(self.world.options.partitions)
        upto = self.world.checker.some_offset(random, partition)
        if upto is not None:
            self.world.checker.purging(partition, upto)
            self.spawn(self._purge, random, partition, upto)

    def _purge(self, random: Random, partition: int, upto: int) -> None:
        self.world.note("client", "purges partition {} below {}", partition, upto)
        try:
            self.call(random, lambda broker: broker.browser.purge(TOPIC, partition=partition, before_offset=upto))
        except (Unknown, PortalMQError, TopicNotFound):
            return
        self.world.reached["purged"] += 1
        for machine in self.world.machines.values() if random.random() < 0.7 else ():
            self.world.faults.retain_at(machine)  # what is below the new start


def _wanted(
    random: Random, consumer: str, serial: int, visibility_ms: int, wait_ms: int | None = None
) -> wire.ReceiveRequest:
    return wire.ReceiveRequest(
        topics=[TOPIC],
        max_messages=random.choice((1, 3, 10)),
        wait_ms=random.choice((0, 500)) if wait_ms is None else wait_ms,
        visibility_timeout_ms=visibility_ms,
        consumer=consumer,
        attempt_id=f"{consumer}:{serial}",  # a protocol without receipts knows the holder by it
    )


def _receive(broker: Any, wanted: wire.ReceiveRequest, forward: bool) -> Any:
    return broker.receive_handler.receive(GROUP, wanted, NeverGone(), forward=forward)
