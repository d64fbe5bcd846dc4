"""The coordinator of the stream group, as in a broker: the core decides, and its requests go to ZooKeeper and the
leader.

A broker that a member asks looks up the coordinator. If that broker is alive, it names it. Otherwise, and now and then
out of a false suspicion, it takes over by compare-and-set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from simulation.zookeeper import Conflict, Failure, Tree

from portalmq.broker.core.replica.events import Outcome
from portalmq.broker.core.stream import events as core
from portalmq.broker.core.stream.membership import GroupMembership
from portalmq.errors import PortalMQError, Unavailable

if TYPE_CHECKING:
    from simulation.group_host import Answer
    from simulation.node import Node

TICK_MS = 250
CALL_TIMEOUT_MS = 1_500
AGAIN_MS = 100
TOPIC = "s"


def name_of(partition: tuple[str, int]) -> str:
    return f"{partition[0]}/{partition[1]}"


@dataclass(frozen=True, slots=True)
class Behind:
    """A claim was refused: the leader has seen this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """This broker does not coordinate, `broker_id` does."""

    broker_id: int


class Seeking:
    """The token of a seek: after an answer from each partition the core gets SeekDone."""

    def __init__(self, left: int) -> None:
        self.left = left


class GroupCoordinator:
    """One life of a broker."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.world = node.world
        self.core: GroupMembership | None = None
        node.every(TICK_MS, self._tick)

    # --- requests of members -----------------------------------------------------------------------------------------

    def request(self, verb: str, content: tuple[Any, ...], back: Answer) -> None:
        tree = self.node.membership.tree
        if self.core is None or self.core.resigned:
            if tree is None:
                back(Unavailable("nothing is known yet"))
                return
            held = tree.group.coordinator if tree.group is not None else None
            registered = tree.brokers.get(held[0]) if held is not None else None
            is_there = registered is not None and held is not None and registered[0].incarnation == held[1]
            suspects = not self.world.faults.stopped and self.world.chance(self.world.groups.takeover)
            if held is not None and is_there and held != self._me and not suspects:
                back(Elsewhere(held[0]))
                return
            self._begin()
        match verb:
            case "join":
                member_id, timeout_ms = content
                self._step(core.Join(back, member_id, (TOPIC,), timeout_ms))
            case "heartbeat":
                self._step(core.Heartbeat(back, *content))
            case "leave":
                self._step(core.Leave(back, *content))
            case "seek":
                self._step(core.SeekRequested(Seeking(self.world.groups.streams), TOPIC))
                back(None)

    @property
    def _me(self) -> tuple[int, int]:
        return self.node.id, self.node.incarnation

    def _begin(self) -> None:
        self.world.count("coordinator")
        self.world.note(self.node.id, "begins to coordinate")
        self.core = GroupMembership("stream", self._me)
        self._step(core.TopicsChanged({TOPIC: core.SubscribedTopic("id", self.world.groups.streams)}))
        self._read(self.core)

    def rang(self, tree: Tree) -> None:
        """ZooKeeper holds another state than before."""
        if self.core is not None and tree.group_version > self.core.version:
            self._step(core.SessionLost())

    def _tick(self) -> None:
        if self.core is not None:
            self._step(core.Tick())

    # --- actions of the core -----------------------------------------------------------------------------------------

    def _step(self, event: core.Event, of: GroupMembership | None = None) -> None:
        """Drop calls for an earlier term of this broker as coordinator."""
        if self.core is not None and of in (None, self.core):
            self._perform(self.core, self.core.step(event, self.node.now_ms))

    def _perform(self, of: GroupMembership, actions: list[core.Action]) -> None:
        for action in actions:
            if self.world.tracing:
                self.world.note(self.node.id, "group: {}", _described(action))
            match action:
                case core.Propose():
                    self._propose(of, action)
                case core.ReadState():
                    self._read(of)
                case core.ClaimPartition():
                    self._claim(of, action)
                case core.AnswerMember():
                    self._answer(of, action)
                case core.RefuseMember():
                    if not isinstance(action.token, Seeking):
                        self._send(action.token, action.error)

    def _send(self, back: object, result: object) -> None:
        assert callable(back)
        back(result)

    def _propose(self, of: GroupMembership, action: core.Propose) -> None:
        session = self.node.membership.session

        def request(found: Tree) -> Tree:
            if found.group_version != action.version:
                raise Conflict
            return replace(found, group=action.membership, group_version=action.version + 1)

        def done(answer: Tree | Failure) -> None:
            if isinstance(answer, Tree):
                self._step(core.Answered(Outcome.APPLIED, action.version + 1), of)
            else:
                outcome = Outcome.CONFLICT if answer is Failure.CONFLICT else Outcome.UNKNOWN
                self._step(core.Answered(outcome), of)

        if session is None:
            self.node.soon(AGAIN_MS, done, Failure.LOST)
        else:
            what = f"group generation {action.membership.generation}"
            self.world.zookeeper.write(session, request, done, what)

    def _read(self, of: GroupMembership) -> None:
        session = self.node.membership.session

        def done(answer: Tree | Failure) -> None:
            if isinstance(answer, Tree):
                self._step(core.Loaded(answer.group, answer.group_version), of)
            elif self.core is of:
                self.node.soon(AGAIN_MS, self._read, of)

        if session is None or session.expired:
            if self.core is of:
                self.node.soon(AGAIN_MS, self._read, of)
        else:
            self.world.zookeeper.read(session, done, synced=True)

    def _claim(self, of: GroupMembership, claim: core.ClaimPartition) -> None:
        def done(result: Any) -> None:
            event: core.Event = core.ClaimFailed(claim.partition, claim.since)
            if isinstance(result, Behind):
                event = core.ClaimRefused(claim.partition, claim.since, result.generation)
            elif isinstance(result, int):
                event = core.Claimed(claim.partition, claim.member_id, claim.since, result)
            self._step(event, of)

        self._call("stream.claim", (name_of(claim.partition), claim.member_id, claim.since), done)

    def _answer(self, of: GroupMembership, answer: core.AnswerMember) -> None:
        if isinstance(answer.token, Seeking):
            self._seek(of, answer.token, answer.generation)
            return
        for assigned in answer.assignment:
            self.world.checker.groups.named(name_of(assigned.partition), answer.member_id, assigned.since)
        self._send(answer.token, answer)

    def _seek(self, of: GroupMembership, seeking: Seeking, generation: int) -> None:
        def done(result: Any) -> None:
            seeking.left -= 1
            if seeking.left == 0:
                self._step(core.SeekDone(TOPIC), of)

        for number in range(self.world.groups.streams):
            offset = self.world.random.randint(0, self.world.checker.high_watermark)
            self._call("stream.seek", (name_of((TOPIC, number)), generation, offset), done)

    # --- calls to the leader -----------------------------------------------------------------------------------------

    def _call(self, name: str, content: tuple[Any, ...], done: Callable[[Any], None]) -> None:
        """One call, one answer, if only that there was none."""
        tree = self.node.membership.tree
        leader = tree.partition.leader if tree is not None else None
        life, is_open = self.node.life, [True]

        def answered(result: Any) -> None:
            self.node.hear(life, once, result)

        def once(result: Any) -> None:
            if is_open:
                is_open.clear()
                done(result)

        def refused() -> None:
            self.node.hear(life, once, Unavailable("refused"))

        self.node.soon(CALL_TIMEOUT_MS, once, PortalMQError("no answer"))
        if leader is not None:
            other = self.world.nodes[leader]
            self.world.network.send(self.node.id, leader, other.call, refused, "request", name, content, answered)


def _described(action: core.Action) -> str:
    match action:
        case core.Propose():
            places = " ".join(
                f"{name_of(partition)}:{place.owner}@{place.since}" + (f"<-{place.leaving}" if place.leaving else "")
                for partition, place in action.membership.owners.items()
            )
            return f"propose g{action.membership.generation} at v{action.version}: {places}"
        case core.ClaimPartition():
            return f"claim {name_of(action.partition)} for {action.member_id} in g{action.since}"
        case core.AnswerMember():
            held = " ".join(f"{name_of(each.partition)}@{each.since}+{each.offset}" for each in action.assignment)
            return f"answer {action.member_id or 'seek'} g{action.generation}: {held}"
        case core.RefuseMember():
            return f"refuse ({action.error.code})"
        case _:
            return type(action).__name__
