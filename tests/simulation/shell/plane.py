"""ZooKeeper as the control plane of a run: one history of trees, sessions, and a client for each life of a broker.

A request takes time there and back; either way may get lost, and then a commit may have been applied, or is applied
later. A session ends after its timeout without a heartbeat, or when the run says so; its ephemerals may outlive it. A
read may be older than another broker's commit, but never older than what this session has seen. Watches come late, or
twice, or not at all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, assert_never

from gevent.event import Event
from gevent.hub import Waiter
from simulation.shell.loop import Process

from portalmq.control_plane.plane import (
    ChangeCallback,
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    NodeNotEmpty,
    Op,
    OutcomeUnknown,
    PlaneError,
    PlaneState,
    PlaneUnavailable,
    Set,
    VersionMismatch,
    check_commit,
    check_path,
    clock_s,
    parent_of,
)

if TYPE_CHECKING:
    from simulation.shell.world import World

Nodes = dict[str, Node]
ZOOKEEPER = 0


def applied(nodes: Nodes, ops: Sequence[Op], session: int) -> tuple[Nodes, list[int], list[str]]:
    """Return the tree after a commit, the versions, and the paths that changed."""
    after = dict(nodes)
    versions: list[int] = []
    paths: list[str] = []
    for op in ops:
        held = after.get(op.path)
        if not isinstance(op, Create):
            if held is None:
                raise NodeMissing(op.path)
            if held.version != op.version:
                raise VersionMismatch(op.path)
        match op:
            case Create(path, data, ephemeral):
                if held is not None:
                    raise NodeExists(path)
                parent = parent_of(path)
                while parent and parent not in after:
                    after[parent] = Node(parent, b"", 0)
                    paths.append(parent)
                    parent = parent_of(parent)
                after[path] = Node(path, data, 0, ephemeral, session if ephemeral else 0)
                versions.append(0)
            case Set(path, data, version):
                assert held is not None
                after[path] = Node(path, data, version + 1, held.ephemeral, held.owner)
                versions.append(version + 1)
            case Delete(path):
                if any(each.startswith(f"{path}/") for each in after):
                    raise NodeNotEmpty(path)
                del after[path]
                versions.append(-1)
            case Check():
                versions.append(op.version)
                continue
            case _:
                assert_never(op)
        paths.append(op.path)
    return after, versions, paths


class Session:
    def __init__(self, number: int, client: SimPlane, expires_ns: int, seen: int) -> None:
        self.number = number
        self.client = client
        self.expires_ns = expires_ns
        self.seen = seen
        self.expired = False
        self.missed: list[str] = []


class ZooKeeper:
    """The ensemble."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = world.loop
        self.trees: list[Nodes] = [{}]
        self.times: list[int] = [0]
        self.sessions: list[Session] = []
        self.is_gone = False
        options = world.options
        self.loss, self.staleness, self.missed = options.plane_loss, options.stale_reads, options.missed
        self.outliving_s = options.outliving_s
        self.on_changed: list[Callable[[str, Node | None], None]] = []
        self.on_commit: list[Callable[[Sequence[Op], Nodes], None]] = []

    @property
    def nodes(self) -> Nodes:
        return self.trees[-1]

    def reachable(self, process: Process) -> bool:
        return not self.is_gone and self.world.network.is_open(process, ZOOKEEPER)

    def begin(self, client: SimPlane) -> Session:
        timeout_ns = int(client.session_timeout_s * 1e9)
        session = Session(len(self.sessions) + 1, client, self.loop.now_ns + timeout_ns, len(self.trees) - 1)
        self.sessions.append(session)
        self.loop.after(client.session_timeout_s, self.loop.world, self._check, session)
        return session

    def heard(self, session: Session) -> None:
        session.expires_ns = max(session.expires_ns, self.loop.now_ns + int(session.client.session_timeout_s * 1e9))

    def _check(self, session: Session) -> None:
        if session.expired:
            return
        if self.is_gone:
            self.heard(session)
        left_s = (session.expires_ns - self.loop.now_ns) / 1e9
        if left_s <= 0:
            self.expire(session)
        else:
            self.loop.after(left_s + 0.001, self.loop.world, self._check, session)

    def expire(self, session: Session) -> None:
        if session.expired:
            return
        self.world.note("zookeeper", "session {} of {} ends", session.number, session.client.process)
        session.expired = True
        self.loop.after(self.loop.random.random() * self.outliving_s, self.loop.world, self._remove, session.number)

    def _remove(self, number: int) -> None:
        gone = [path for path, node in self.nodes.items() if node.owner == number]
        if gone:
            self._stands({path: node for path, node in self.nodes.items() if node.owner != number}, gone)

    def commit(self, session: Session, ops: Sequence[Op]) -> list[int]:
        after, versions, paths = applied(self.nodes, ops, session.number)
        for committing in self.on_commit:
            committing(ops, self.nodes)
        if paths:
            self._stands(after, paths)
            session.seen = len(self.trees) - 1
        return versions

    def view(self, session: Session, *, synced: bool = False) -> Nodes:
        random = self.loop.random
        lag_s = random.random() * 2 if not synced and random.random() < self.staleness else 0.0
        index = bisect_right(self.times, self.loop.now_ns - int(lag_s * 1e9)) - 1
        session.seen = max(session.seen, index)
        return self.trees[session.seen]

    def _stands(self, nodes: Nodes, paths: list[str]) -> None:
        self.trees.append(nodes)
        self.times.append(self.loop.now_ns)
        for path in paths:
            for changed in self.on_changed:
                changed(path, nodes.get(path))
        random = self.loop.random
        index = len(self.trees) - 1
        for session in self.sessions:
            process = session.client.process
            if session.expired or process.dead:
                continue
            if not self.reachable(process) or random.random() < self.missed:
                session.missed += paths
                continue
            late_s = random.random() * 1.5 if random.random() < self.staleness else self.world.network.delay_s()
            self.loop.after(late_s, process, session.client.rang, session, index, list(dict.fromkeys(paths)))

    def lose_everything(self) -> None:
        """Begin again without content, as an ensemble whose disks are gone."""
        for session in self.sessions:
            session.expired = True
            session.seen = 0
        self.trees, self.times = [{}], [0]

    def heal(self) -> None:
        """End all faults. In most runs the watches that did not come come now; in the others a broker has to read
        everything again, which it does every half a minute."""
        self.is_gone = False
        self.loss = self.staleness = self.missed = self.outliving_s = 0.0
        if self.loop.random.random() < 0.9:
            for session in self.sessions:
                if not session.expired and not session.client.process.dead:
                    missed = list(dict.fromkeys(session.missed))
                    session.client.rang_later(session, len(self.trees) - 1, missed)


class SimPlane:
    """A ControlPlane of one life of a broker."""

    set_back = False

    def __init__(self, world: World, process: Process, session_timeout_s: float) -> None:
        self.world = world
        self.loop = world.loop
        self.process = process
        self.session_timeout_s = session_timeout_s
        self.state = PlaneState.LOST
        self.last_answered = 0.0
        self._session: Session | None = None
        self._callbacks: list[ChangeCallback] = []
        self._connected = Event()
        self._closed = False
        self._heard_s = 0.0

    @property
    def session_id(self) -> int:
        return 0 if self._session is None or self.state is PlaneState.LOST else self._session.number

    # --- the session -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.loop.spawn(self.process, self._keep)
        if not self._connected.wait(2 * self.session_timeout_s):
            raise PlaneUnavailable("ZooKeeper does not answer")

    def close(self) -> None:
        self._closed = True
        self.state = PlaneState.LOST
        if self._session is not None:
            self.world.zookeeper.expire(self._session)

    def _keep(self) -> None:
        """Send heartbeats, and connect again."""
        zookeeper, loop = self.world.zookeeper, self.loop
        while not self._closed:
            began_s = clock_s()
            if self._exchange(lambda: True):
                session = self._session
                if session is None or session.expired:
                    if session is not None:
                        self.state = PlaneState.LOST
                        self._connected.clear()
                        self._ring(None)
                        loop.wait(0.001 + loop.random.random() * 0.02)
                    self._session = zookeeper.begin(self)
                    self.last_answered = began_s
                else:
                    zookeeper.heard(session)
                    self.last_answered = max(self.last_answered, began_s)
                self._heard_s = began_s
                if self.state is not PlaneState.CONNECTED:
                    self.state = PlaneState.CONNECTED
                    self._connected.set()
                    self._ring(None)
                loop.wait(self.session_timeout_s / 4)
                continue
            if self.state is PlaneState.CONNECTED:
                self.state = PlaneState.SUSPENDED
                self._connected.clear()
                self._ring(None)
            loop.wait(0.05 + loop.random.random() * 0.1)

    def _exchange(self, execute: Callable[[], Any]) -> Any:
        """Make one round trip; None when it is lost."""
        zookeeper, network, loop = self.world.zookeeper, self.world.network, self.loop
        loop.wait(network.delay_s())
        if not zookeeper.reachable(self.process):
            loop.wait(loop.random.random() * 0.3)
            return None
        result = execute()
        loop.wait(network.delay_s())
        return result if zookeeper.reachable(self.process) else None

    def _ring(self, path: str | None) -> None:
        for callback in self._callbacks:
            callback(path)

    def rang(self, session: Session, index: int, paths: list[str]) -> None:
        if session is self._session and not session.expired:
            session.seen = max(session.seen, index)
            for path in paths:
                self._ring(path)
                if self.loop.random.random() < 0.02:
                    self._ring(path)

    def rang_later(self, session: Session, index: int, paths: list[str]) -> None:
        self.loop.after(self.world.network.delay_s(), self.process, self.rang, session, index, paths)

    def watch(self, callback: ChangeCallback) -> None:
        self._callbacks.append(callback)

    # --- requests ----------------------------------------------------------------------------------------------------

    def _ask(self, execute: Callable[[Session], Any], *, commits: bool = False) -> Any:
        """Carry out a request at the ensemble. Raises PlaneUnavailable, OutcomeUnknown."""
        zookeeper, network, loop, random = self.world.zookeeper, self.world.network, self.loop, self.loop.random
        deadline_s = clock_s() + self.session_timeout_s
        before = self.session_id
        while True:
            if self._closed or not self._connected.wait(max(0.0, deadline_s - clock_s())):
                raise PlaneUnavailable("ZooKeeper does not answer")
            if self.process.dead:  # it runs on to its next wait
                Waiter().get()
            session = self._session
            assert session is not None
            if commits and before not in (0, session.number):
                raise PlaneUnavailable("the session ended before the commit was sent")
            began_s = clock_s()
            waiter: Waiter[Any] = Waiter()
            is_lost = random.random() < zookeeper.loss
            arrives = not is_lost or random.random() < 0.5
            late_s = random.random() * 0.5 if is_lost else 0.0

            def arrive(session: Session = session, waiter: Waiter[Any] = waiter, is_lost: bool = is_lost) -> None:
                result: Any = None
                if not zookeeper.is_gone and not session.expired:
                    try:
                        result = (True, execute(session))
                    except PlaneError as error:
                        result = (False, error)
                    zookeeper.heard(session)
                if not is_lost:
                    loop.after(network.delay_s(), self.process, waiter.switch, result)

            if arrives and zookeeper.reachable(self.process):
                # Carried out even if the broker dies, or is paused, on the way.
                loop.after(network.delay_s() + late_s, loop.world, arrive)
            if is_lost or not zookeeper.reachable(self.process):
                loop.after(random.random() * 0.3, self.process, waiter.switch, None)
            result = waiter.get()
            if result is not None and zookeeper.reachable(self.process):
                self.last_answered = max(self.last_answered, began_s)
                if result[0]:
                    return result[1]
                raise result[1]
            if commits:
                raise OutcomeUnknown("the answer to a commit was lost")
            if clock_s() >= deadline_s:
                raise PlaneUnavailable("ZooKeeper does not answer")
            loop.wait(0.05)

    def get(self, path: str) -> Node | None:
        return self.get_many([path])[0]

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        for path in paths:
            check_path(path)

        def read(session: Session) -> list[Node | None]:
            nodes = self.world.zookeeper.view(session)
            return [nodes.get(path) for path in paths]

        found: list[Node | None] = self._ask(read)
        return found

    def children(self, path: str) -> list[str]:
        check_path(path)
        return [node.path.rpartition("/")[2] for node in self.get_children(path)]

    def get_children(self, path: str) -> list[Node]:
        def read(session: Session) -> list[Node]:
            nodes = self.world.zookeeper.view(session)
            return [node for each, node in nodes.items() if parent_of(each) == path]

        return sorted(self._ask(read), key=lambda node: node.path)

    def commit(self, *ops: Op) -> list[int]:
        check_commit(ops)
        versions: list[int] = self._ask(lambda session: self.world.zookeeper.commit(session, ops), commits=True)
        return versions

    def sync(self) -> None:
        self._ask(lambda session: self.world.zookeeper.view(session, synced=True))
