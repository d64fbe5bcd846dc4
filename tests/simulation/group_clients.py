"""Consumers of queue groups and an operator, outside the cluster. They ack and nack, vanish, return with old receipts,
repeat calls of unknown outcome, and ask the wrong broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from simulation.network import CLIENTS
from simulation.queue_groups import Receipt

from portalmq.errors import PortalMQError, StaleReceipt

if TYPE_CHECKING:
    from simulation.world import World

TIMEOUT_MS = 1_500
TRIES = 6
KEPT_RECEIPTS_MAX = 50


class NoAnswer(PortalMQError):
    """The client got no answer in time."""


class Caller:
    """One call at a time is sent to one broker; it gets exactly one answer, or NoAnswer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._knows: int | None = None

    def leader(self) -> int:
        """The leader, or the last known one."""
        if self._knows is None or not self.world.chance(0.4):
            self._knows = self.world.zookeeper.tree.partition.leader
        if self._knows is None or self.world.chance(0.05):
            return self.world.random.choice(self.world.ids)
        return self._knows

    def call(self, target: int, name: str, content: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        is_open = [True]

        def once(result: Any) -> None:
            if is_open:
                is_open.clear()
                then(result)

        def refused() -> None:
            self.world.after(20, once, NoAnswer("refused"))

        node = self.world.nodes[target]
        self.world.network.send(CLIENTS, target, node.call, refused, "request", name, content, once)
        self.world.after(TIMEOUT_MS, once, NoAnswer("in vain"))

    def call_until_known(
        self, name: str, content: tuple[Any, ...], then: Callable[[Any], None], tries: int = TRIES
    ) -> None:
        """Repeat the call while its outcome is unknown, at the current leader."""

        def answered(result: Any) -> None:
            is_unknown = isinstance(result, PortalMQError) and not isinstance(result, StaleReceipt)
            if is_unknown and tries > 1:
                pause = self.world.random.randint(1, 300)
                self.world.after(pause, self.call_until_known, name, content, then, tries - 1)
            else:
                then(result)

        self.call(self.leader(), name, content, answered)


class QueueConsumer(Caller):
    def __init__(self, world: World, group: str) -> None:
        super().__init__(world)
        self.group = group
        self.options = world.groups
        self._rest()

    def _rest(self) -> None:
        self.world.after(self.world.random.randint(1, 60), self._receive)

    def _receive(self) -> None:
        """Receive, sometimes under an attempt id, and then twice when no answer arrived."""
        random = self.world.random
        attempt = None
        if self.world.chance(self.options.attempts):
            number = self.world.next_uid()
            attempt = f"consumer {number % 3}:attempt {number}"
        visibility_ms = random.randint(1, self.options.visibility_ms)
        content = (self.group, random.randint(1, 5), visibility_ms, attempt)

        def answered(result: Any) -> None:
            if isinstance(result, NoAnswer) and attempt is not None:
                self.call(self.leader(), "queue.receive", content, self._received)
            else:
                self._received(result)

        self.call(self.leader(), "queue.receive", content, answered)

    def _received(self, result: Any) -> None:
        if isinstance(result, PortalMQError) or not result:
            self._rest()
            return
        if self.world.chance(self.options.late):
            self.world.kept_receipts.append((self.group, result))
            del self.world.kept_receipts[:-KEPT_RECEIPTS_MAX]
        most_ms = 20 if self.world.faults.stopped else self.options.visibility_ms
        self.world.after(self.world.random.randint(0, most_ms), self._work, result)

    def _work(self, receipts: list[Receipt]) -> None:
        world, options = self.world, self.options
        if world.faults.stopped:
            self._ack(receipts)
        elif world.chance(options.crash):
            self._rest()
        elif world.chance(options.nack):
            delay_ms = world.random.choice([0, 0, 200, 1_000])
            self.call(self.leader(), "queue.nack", (self.group, receipts, delay_ms), self._done)
        elif world.chance(options.extend):
            content = (self.group, receipts, world.random.randint(1, options.visibility_ms))
            late_ms = world.random.choice([0, options.visibility_ms])
            world.after(late_ms, self._extend, content)
        elif world.chance(options.commit):
            self._commit(receipts)
        elif world.chance(0.2):
            self._ack(receipts[: world.random.randint(1, len(receipts))])
        else:
            self._ack(receipts)

    def _extend(self, content: tuple[Any, ...]) -> None:
        self.call(self.leader(), "queue.extend", content, lambda result: self._work(content[1]))

    def _ack(self, receipts: list[Receipt]) -> None:
        def answered(result: Any) -> None:
            if isinstance(result, list):
                self.world.checker.groups.settled(self.group, receipts, result)
            self._rest()

        self.call_until_known("queue.ack", (self.group, receipts), answered)

    def _commit(self, receipts: list[Receipt]) -> None:
        outputs, call = self.world.random.randint(0, 2), f"call {self.world.next_uid()}"

        def answered(result: Any) -> None:
            if isinstance(result, StaleReceipt):
                self.world.checker.groups.refused(self.group, call)
            elif isinstance(result, int):
                self.world.count("commit call")
                self.world.checker.groups.settled(self.group, receipts, [True] * len(receipts), by_commit=True)
                self.world.checker.groups.has_ordered(self.group, receipts, call, outputs)
            self._rest()

        self.call_until_known("queue.commit", (self.group, receipts, call, outputs), answered)

    def _done(self, result: Any) -> None:
        self._rest()


class Rescheduler(Caller):
    """Moves scheduled messages to another time."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rest()

    def _rest(self) -> None:
        self.world.after(self.world.random.randint(50, 800), self._act)

    def _act(self) -> None:
        if not self.world.faults.stopped:
            self.call(self.leader(), "queue.reschedule", (), lambda result: self._rest())


class Pauser(Caller):
    """Pauses a group and resumes it, again and again, and repeats each call until its outcome is known. Copies of its
    calls may arrive after later ones."""

    def __init__(self, world: World, group: str) -> None:
        super().__init__(world)
        self.group = group
        self._number = 0
        self._rest()

    def _rest(self) -> None:
        self.world.after(self.world.random.randint(200, 1_500), self._pause)

    def _pause(self) -> None:
        if not self.world.faults.stopped:
            self._number += 1
            self._call(True, self._paused)

    def _paused(self) -> None:
        self.world.checker.groups.paused.add(self.group)
        self.world.after(self.world.random.randint(1, 1_500), self._resume)

    def _resume(self) -> None:
        self.world.checker.groups.paused.discard(self.group)
        self._number += 1
        self._call(False, self._rest)

    def _call(self, paused: bool, then: Callable[[], None]) -> None:
        def answered(result: Any) -> None:
            if isinstance(result, PortalMQError):
                self.world.after(100, self._call, paused, then)
            else:
                then()

        self.call_until_known("queue.pause", (self.group, self._number, paused), answered)


class Operator(Caller):
    """Redrives and drops dead letters, cancels scheduled messages, seeks; and uses old receipts as a zombie."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._rest()

    def _rest(self) -> None:
        self.world.after(self.world.random.randint(50, 800), self._act)

    def _act(self) -> None:
        world = self.world
        if world.faults.stopped:
            return
        random = world.random
        group = random.choice(list(world.queue_groups))
        verb = random.choice(["redrive", "redrive", "drop", "cancel", "seek", "snapshot", "zombie", "zombie", "zombie"])
        if verb == "zombie":
            self._use_kept()
        elif verb == "snapshot":
            self.world.faults.retain()
        elif verb == "seek":
            self.call(random.choice(world.ids), "coordinator.seek", (), lambda result: None)
        elif verb == "cancel":
            self.call(self.leader(), "queue.cancel", (), lambda result: None)
        else:
            self.call(self.leader(), f"queue.{verb}", (group,), lambda result: None)
        self._rest()

    def _use_kept(self) -> None:
        """Use receipts of any age, without knowing the state of their messages."""
        world = self.world
        if not world.kept_receipts:
            return
        world.count("zombie receipts")
        group, receipts = world.random.choice(world.kept_receipts)
        verb = world.random.choice(["ack", "ack", "nack", "extend", "commit"])

        def answered(result: Any) -> None:
            if verb == "ack" and isinstance(result, list):
                world.checker.groups.settled(group, receipts, result)

        more: tuple[Any, ...] = ()
        if verb in ("nack", "extend"):
            more = (world.random.randint(0, 500),)
        elif verb == "commit":
            more = (f"call {world.next_uid()}", 1)
        self.call(self.leader(), f"queue.{verb}", (group, receipts, *more), answered)
