"""The network between brokers: calls and probes with drawn delays, links cut in one direction, late second copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from gevent.hub import Waiter
from simulation.shell.loop import Process

from portalmq import wire
from portalmq.broker.cluster.failure_detector import Probe
from portalmq.errors import PortalMQError
from portalmq.network.connection import NoAnswer, NotSent
from portalmq.network.http_answer import HttpAnswer

if TYPE_CHECKING:
    from simulation.shell.machine import Machine
    from simulation.shell.world import World


class Unknown(Exception):
    """The call may have been carried out, or may be later."""


class SimNetwork:
    """`cut` holds pairs (from, to) of machines; 0 is ZooKeeper, and None the clients."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = world.loop
        self.cut: set[tuple[Any, Any]] = set()
        options = world.options
        self.delay, self.tail, self.drop, self.repeat = options.delay_s, options.tail, options.drop, options.repeat
        self.calls = 0

    def delay_s(self) -> float:
        random = self.loop.random
        if self.tail and random.random() < self.tail:
            return random.random() * 20 * self.delay
        return self.delay * (0.2 + random.random())

    def is_open(self, process: Process, to: Any) -> bool:
        me = process.number
        return not {(me, to), (to, me)} & self.cut

    def passes(self, source: Any, target: Any) -> bool:
        return (source, target) not in self.cut and not (self.drop and self.loop.random.random() < self.drop)

    def heal(self) -> None:
        self.cut.clear()
        self.drop = self.tail = self.repeat = 0.0

    def exchange(self, source: Any, process: Process, target: Machine, serve: Callable[[Any], Any]) -> Any:
        """Call `serve(broker)` at the target and return its answer. Raises NotSent or NoAnswer; waits for ever when
        nothing tells: the caller has its own timeout."""
        loop, random = self.loop, self.loop.random
        self.calls += 1
        waiter: Waiter[Any] = Waiter()
        if process.dead:  # it runs on to its next wait
            waiter.get()
        life = target.life
        there = None if life is None else life.process

        def arrive(is_copy: bool = False) -> None:
            if not self.passes(source, target.number):
                return
            if life is None or life is not target.life or there is None or life.broker is None:
                if not is_copy:
                    answer(NotSent(f"broker {target.number} is not there"), refused=True)
                return
            loop.spawn(there, work, is_copy)

        def work(is_copy: bool) -> None:
            assert life is not None
            result = serve(life.broker)
            if not is_copy and not life.ended:  # it may have crashed in the middle, and run on to its next wait
                answer(result)

        def answer(result: Any, *, refused: bool = False) -> None:
            if refused:
                result.__cause__ = ConnectionRefusedError()
            if self.passes(target.number, source):
                loop.after(self.delay_s(), process, deliver, result)

        def deliver(result: Any) -> None:
            if not done:
                done.append(True)
                waiter.switch(result)

        def died() -> None:
            """The connection is reset when the other process ends."""
            if not done and there is not None and there.dead and self.passes(target.number, source):
                deliver(NoAnswer("the connection was reset"))

        done: list[bool] = []
        loop.after(self.delay_s(), loop.world, arrive)
        if self.repeat and random.random() < self.repeat:
            loop.after(self.delay_s() + random.random() * 8, loop.world, arrive, True)
        if life is not None:
            life.on_end.append(lambda: loop.after(self.delay_s(), process, died))
        try:
            result = waiter.get()
        finally:
            done.append(True)
        if isinstance(result, BaseException):
            raise result
        return result


class SimPool:
    """A ConnectionPool to the other brokers."""

    def __init__(self, world: World, machine: Machine, process: Process) -> None:
        self._world, self._machine, self._process = world, machine, process

    def exchange(self, address: Any, method: str, head: bytes, body: bytes, timeout_s: float) -> HttpAnswer:
        target = self._world.machine_at(address.url)
        name = head.split(b" ", 2)[1].decode().rpartition("/")[2]

        def serve(broker: Any) -> HttpAnswer:
            try:
                return HttpAnswer(200, _fields({}), broker.serve_peer(name, body, NeverGone()))
            except Exception as fault:
                error = broker.explain(fault)
                if error is None:
                    self._world.fail("a call failed", f"{name}: {fault!r}", fault)
                    raise
                return problem_of(error)

        answer: HttpAnswer = self._world.network.exchange(self._machine.number, self._process, target, serve)
        return answer

    def rest(self) -> None: ...
    def close(self) -> None: ...


class NeverGone:
    """A connection that stays."""

    def gone(self) -> bool:
        return False

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


def problem_of(error: PortalMQError) -> HttpAnswer:
    fields = {"Content-Type": wire.PROBLEM}
    if error.retry_after_s is not None:
        fields["Retry-After"] = str(max(1, round(error.retry_after_s)))
    return HttpAnswer(error.status, _fields(fields), msgspec.json.encode(error.problem()))


def _fields(given: dict[str, str]) -> Any:
    from portalmq.network.http_answer import Fields as HttpFields

    fields = HttpFields()
    for name, value in given.items():
        fields[name.lower()] = value
    return fields


def probe(world: World, process: Process, url: str) -> Probe:
    """Request /livez: the verdict after a round trip, or after a second without one."""
    loop, network = world.loop, world.network
    source, target = process.number, world.machine_at(url)
    began_ns = loop.now_ns
    loop.wait(network.delay_s())
    life = target.life
    both = network.passes(source, target.number) and network.passes(target.number, source)
    if both and life is None:
        loop.wait(network.delay_s())
        return Probe.REFUSED
    if both and life is not None and not life.process.paused:
        loop.wait(network.delay_s())
        return Probe.ANSWERED
    loop.wait(1.0)
    return Probe.UNSURE if loop.now_ns - began_ns > 1_500_000_000 else Probe.SILENT


def refuses(world: World, process: Process, url: str) -> bool:
    """Whether nothing listens there: the kernel answers for a paused process."""
    loop, network = world.loop, world.network
    source, target = process.number, world.machine_at(url)
    loop.wait(2 * network.delay_s())
    if network.passes(source, target.number) and network.passes(target.number, source):
        return target.life is None
    loop.wait(1.0)
    return False
