"""The control plane on ZooKeeper, through kazoo. Only this package knows kazoo.

One session, one connection at a time. kazoo's connection routine (a thread, or a greenlet in a broker) sends requests
in order and hears answers and watch events; everybody else waits for it, with a bound, and never longer than about a
session. What kazoo does by itself and a cluster cannot bear is changed here:

    session   kazoo says LOST only after it reached a server again, so SUSPENDED may last for ever: `last_answered` is
              what a lease counts from. Heartbeats count for it, and the timeout is the one that the server granted.
    commits   kazoo sends what it has queued in whatever session comes next. A commit here carries the session it was
              made in, and the connection drops it, unsent, in any other. So a commit that was never sent is told from
              one whose answer was lost: PlaneUnavailable, nothing was applied; OutcomeUnknown, nobody knows.
    results   a transaction that fails does not raise in kazoo: each result is looked at.
    reads     are repeated until the bound, in any session, since they change nothing.
    sync      ZooKeeper's own one waits for nothing at the server that leads, which tells the others to do a transaction
              a moment before it has done it itself: a read there was stale once in some thousands.
    watch     one persistent recursive watch over the tree, laid anew on each connection and then followed by a ring for
              "anything": what happened in between is in no event. kazoo 2.11 does not know that request: `connection`.
    connect   one silent server must not use up the session: each attempt gets a part of it. Afterwards the pause
              between attempts stays short, so that a session outlives its servers' restart.
    set back  a server that was emptied or restored from an older copy turns away whoever has seen more, without a word,
              so SUSPENDED would last for ever: `connection` ends such a session, and `set_back` tells of it.
    many      hundreds of nodes are read by one request (ZooKeeper 3.6's multi-read), not by hundreds.
    closed    with credentials a node belongs to their user alone. ZooKeeper gives no node the ACL of the one above it,
              so each is made with its own, and `close_to_others` mends those of a tree that was open. Clients find the
              brokers in `/brokers/ids` without credentials: everybody may read there.
    TLS       kazoo's own trusts more than it is told, and can leave an answer unread: `connection`.

Callbacks of kazoo run on its connection routine, where any call to ZooKeeper would wait for itself. They leave a note;
the bells ring from the callback worker.

Not used: kazoo's retry (crosses sessions), Lock, Election, Party, ChildrenWatch, DataWatch: each has an error that
loses a change or keeps a lost leader in office.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    BadVersionError,
    ConnectionLoss,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
    UnimplementedError,
    ZookeeperError,
)
from kazoo.protocol import serialization as jute
from kazoo.protocol.states import Callback, KazooState, KeeperState, ZnodeStat
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl

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
    PlaneRefused,
    PlaneState,
    PlaneUnavailable,
    Set,
    VersionMismatch,
    check_commit,
    check_path,
    clock_s,
    parent_of,
)
from portalmq.control_plane.state import BROKERS
from portalmq.control_plane.zookeeper.connection import (
    AddWatch,
    Handler,
    NotSentError,
    ReadMany,
    SessionRequest,
    Tls,
    make_client,
)

log = logging.getLogger(__name__)

READ_MANY_MAX = 200
NOTES_MAX = 1_000
PARENT_ATTEMPTS = 3
RETRY_PAUSE_S = 0.02
WATCH_PAUSE_S = 0.5

_CREATE_EPHEMERAL = 1
_ANY_VERSION = -1
_ZOOKEEPERS_OWN = "/zookeeper"


class _UnansweredError(Exception):
    """The request left, and no answer came in time."""


# A read that meets one of these is asked again. A commit was not applied after the last three: they are refusals.
_REPEATABLE = (ConnectionLoss, SessionExpiredError, SessionMovedError, ThrottledOpError, NotSentError)


class ZooKeeper:
    """A `ControlPlane`. `hosts` is `host:port,host:port/chroot`; the chroot is made when it is missing.

    `auth` is a user and a password: then all nodes, the chroot included, are theirs alone. With `owns_root` they may
    own a server's root as well, which is then nobody else's. `closes` False leaves a chroot that is there as it is.
    ZooKeeper 3.6 or newer.
    """

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_s: float = 6.0,
        handler: Handler = "auto",
        auth: tuple[str, str] | None = None,
        tls: Tls | None = None,
        owns_root: bool = False,
        closes: bool = True,
    ) -> None:
        """Raises ValueError for hosts that are none, and for credentials without a chroot to protect."""
        self._servers, slash, chroot = hosts.partition("/")
        if not all(self._servers.split(",")):
            raise ValueError(f"not ZooKeeper's hosts: {hosts!r}; write HOST:PORT,HOST:PORT/CHROOT")
        self._chroot = check_path(slash + chroot) if chroot else ""
        if auth and not self._chroot and not owns_root:
            raise ValueError(f"credentials protect a chroot: write {hosts}/portalmq, for instance")
        self._handler = handler
        self._auth = auth
        self._tls = tls
        self._closes = closes
        self._acl = [make_digest_acl(*auth, all=True)] if auth else OPEN_ACL_UNSAFE
        self._acl_of_brokers = [*self._acl, make_acl("world", "anyone", read=True)] if auth else OPEN_ACL_UNSAFE
        self._asked_timeout_s = session_timeout_s
        self._callbacks: list[ChangeCallback] = []
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._client: Any = None
        self._state = PlaneState.LOST
        self._session_id = 0
        self._granted_timeout_s = self._asked_timeout_s
        self._last_answered = 0.0
        self._refused = ""
        self._connections = 0
        self._noted: set[str | None] = set()
        self._set_back = False

    @property
    def state(self) -> PlaneState:
        return self._state

    @property
    def session_id(self) -> int:
        return self._session_id

    @property
    def session_timeout_s(self) -> float:
        return self._granted_timeout_s

    @property
    def last_answered(self) -> float:
        return self._last_answered

    @property
    def set_back(self) -> bool:
        return self._set_back

    def watch(self, callback: ChangeCallback) -> None:
        self._callbacks.append(callback)

    # --- the session ---

    def start(self) -> None:
        assert self._client is None, "started twice"
        client = make_client(
            self._servers,
            self,
            handler=self._handler,
            session_timeout_s=self._asked_timeout_s,
            auth=self._auth,
            tls=self._tls,
        )
        client.add_listener(self._on_state)
        # Set when there is something new to know: connected, refused, or closed.
        self._news = client.handler.event_object()
        self._watching = client.handler.event_object()
        self._client = client
        try:
            deadline = clock_s() + 2 * self._asked_timeout_s
            client.start_async()
            self._await_connection(deadline)
            self._make_chroot()
            self._watching.wait(max(0.0, deadline - clock_s()))
            if not self._watching.is_set():
                self._await_connection(clock_s())
                raise PlaneUnavailable(f"ZooKeeper at {self._servers} lays no watch; is it older than 3.6?")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        client = self._client
        if client is None:
            return
        self._client = None
        try:
            client.stop()
            client.close()
        finally:
            self._forget()
            self._news.set()

    def _on_state(self, state: str) -> None:
        """Runs on the connection's routine: no call to ZooKeeper may wait here."""
        client = self._client
        if client is None:
            return  # it is being closed
        if state == KazooState.CONNECTED:
            same = self._session_id == client._session_id
            self._session_id = client._session_id
            self._connections += 1
            self._state = PlaneState.CONNECTED
            log.info("ZooKeeper session %s %s", self._session_name(), "goes on" if same else "begins")
            client.handler.spawn(self._lay_watch, self._connections)
            self._news.set()
        elif state == KazooState.SUSPENDED:
            self._state = PlaneState.SUSPENDED
            self._news.clear()
            log.warning("no connection to ZooKeeper at %s; session %s waits", self._servers, self._session_name())
            self._note(None)
        else:
            refused = client.client_state == KeeperState.AUTH_FAILED
            log.error("ZooKeeper session %s %s", self._session_name(), "is refused" if refused else "is lost")
            self._state = PlaneState.LOST
            self._session_id = 0
            self._news.clear()
            if refused:
                self._refuse("does not take the credentials: start again with those that its nodes were made with")
            self._note(None)

    def _refuse(self, why: str) -> None:
        self._refused = f"ZooKeeper at {self._servers} {why}"
        self._news.set()

    def _session_name(self) -> str:
        return f"{self._session_id & (2**64 - 1):#x}"

    def on_granted(self, timeout_s: float, began: float) -> None:
        self._granted_timeout_s = timeout_s
        self.on_answered(began)

    def on_answered(self, began: float) -> None:
        self._last_answered = max(self._last_answered, began)

    def on_set_back(self) -> None:
        self._set_back = True

    def _await_connection(self, deadline: float) -> int:
        """The session, once there is a connection. Raises PlaneUnavailable after `deadline`, PlaneRefused."""
        while True:
            if self._client is None:
                raise PlaneUnavailable(f"the session with ZooKeeper at {self._servers} is closed")
            if self._refused:
                raise PlaneRefused(self._refused)
            if self._state is PlaneState.CONNECTED:
                return self._session_id
            remaining = deadline - clock_s()
            if remaining <= 0:
                raise PlaneUnavailable(f"ZooKeeper at {self._servers} does not answer")
            self._news.wait(remaining)

    def _make_chroot(self) -> None:
        if self._chroot and self._read(lambda: jute.Exists(self._chroot, None)) is None:
            deadline = self._deadline()
            for path in [*_ancestors(self._chroot), self._chroot]:
                self._create_lasting(path, self._await_connection(deadline), deadline)
        if self._auth and self._closes and self.is_open:
            # The chroot may have been made by hand, open to all.
            self._read(lambda: jute.SetACL(self._root, self._acl, _ANY_VERSION))
        if self._chroot:
            self._read(lambda: jute.GetData(self._chroot, None))

    # --- whose the nodes are ---

    @property
    def _root(self) -> str:
        return self._chroot or "/"

    def _acl_for(self, path: str) -> list[Any]:
        """The ACL of a node, named as ZooKeeper knows it."""
        shown = f"{self._chroot}{BROKERS}"
        return self._acl_of_brokers if path == shown or path.startswith(f"{shown}/") else self._acl

    @property
    def is_open(self) -> bool:
        """Whether others than our user may do something at the topmost node."""
        acl, _ = self._read(lambda: jute.GetACL(self._root))
        return set(acl) != set(self._acl)

    def open_to_others(self, *paths: str) -> dict[str, int]:
        """Those of the nodes that are not as we would make them, and the version of each."""
        found = self._each([self._chroot + path for path in paths], jute.GetACL)
        return {
            path[len(self._chroot) :]: stat.version for path, (acl, stat) in found if not self._is_closed(path, acl)
        }

    def close_to_others(self) -> int:
        """Give every node the ACL that we would make it with; answers how many had another.

        From the top: once a node is closed, nobody else makes another one below it. Raises PlaneRefused at a node that
        another user keeps for himself.
        """
        assert self._auth, "only credentials close a tree"
        mended = 0
        level = [self._root]
        while level:
            found = self._each(level, jute.GetACL)
            wrong = [path for path, (acl, _) in found if not self._is_closed(path, acl)]
            self._each(wrong, lambda path: jute.SetACL(path, self._acl_for(path), _ANY_VERSION))
            mended += len(wrong)
            # Below one that was open another may have been made since it was looked at.
            parents = [path for path, (_, stat) in found if stat.numChildren or path in set(wrong)]
            level = [
                f"{path.rstrip('/')}/{name}"
                for path, names in self._each(parents, lambda path: jute.GetChildren(path, None))
                for name in names
                if f"{path}{name}" != _ZOOKEEPERS_OWN
            ]
        return mended

    def _is_closed(self, path: str, acl: Sequence[Any]) -> bool:
        return set(acl) == set(self._acl_for(path))

    def _each(self, paths: Sequence[str], make: Callable[[str], Any]) -> list[tuple[str, Any]]:
        """The answer for each of the nodes that are there. Many requests are on their way at a time."""
        answers = []
        for start in range(0, len(paths), READ_MANY_MAX):
            some = paths[start : start + READ_MANY_MAX]
            answers += self._each_of(some, make)
        return answers

    def _each_of(self, paths: Sequence[str], make: Callable[[str], Any]) -> list[tuple[str, Any]]:
        client = self._client
        if client is None:
            raise PlaneUnavailable(f"the session with ZooKeeper at {self._servers} is closed")
        self._await_connection(self._deadline())
        results = [client.handler.async_result() for _ in paths]
        for path, result in zip(paths, results, strict=True):
            client._call(SessionRequest(make(path), 0), result)
        deadline = self._deadline()
        answers = []
        for path, result in zip(paths, results, strict=True):
            result.wait(max(0.0, deadline - clock_s()))
            fault = result.exception if result.ready() else _UnansweredError()
            if fault is None:
                answers.append((path, result.value))
            elif not isinstance(fault, NoNodeError):  # one that is gone is no matter
                if isinstance(fault, ZookeeperError):
                    self._raise_refused(fault)
                raise PlaneUnavailable(f"{path}: ZooKeeper answers {fault!r}")
        return answers

    # --- the bell ---

    def _lay_watch(self, connection: int) -> None:
        """Watch the whole tree for as long as this connection lasts, then tell that anything may have changed."""
        # Each connection lays its own. A request given up unsent (this process may have been paused) says nothing of
        # the connection, so only its state ends the attempts, or close(): until kazoo has ended, the state stays.
        while self._client is not None and self._state is PlaneState.CONNECTED and self._connections == connection:
            try:
                self._ask(AddWatch(self._chroot or "/"), self._deadline())
            except UnimplementedError:
                self._refuse("is older than 3.6, which this needs: run a newer one")
                return
            except (NotSentError, _UnansweredError, ZookeeperError) as fault:
                log.info("no watch on ZooKeeper yet: %r", fault)
                self._pause(WATCH_PAUSE_S)
            else:
                self._watching.set()
                self._note(None)
                return

    def _note(self, path: str | None) -> None:
        """Leave word for the bells: from here nobody may be called."""
        client = self._client
        if client is None:
            return
        with self._lock:
            first = not self._noted
            if len(self._noted) < NOTES_MAX:
                self._noted.add(path)
            else:
                self._noted = {None}
        if first:
            client.handler.dispatch_callback(Callback("watch", self._ring, ()))

    def on_changed(self, path: str) -> None:
        if path.startswith(f"{self._chroot}/") and path != "/":
            self._note(path[len(self._chroot) :])

    def _ring(self) -> None:
        with self._lock:
            noted, self._noted = self._noted, set()
        for path in noted:
            for callback in self._callbacks:
                try:
                    callback(path)
                except Exception:
                    log.exception("a bell of the control plane failed")

    # --- reading ---

    def get(self, path: str) -> Node | None:
        return self.get_many([path])[0]

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        for path in paths:
            check_path(path)
        nodes: list[Node | None] = []
        for start in range(0, len(paths), READ_MANY_MAX):
            nodes += self._get_some(paths[start : start + READ_MANY_MAX])
        return nodes

    def _get_some(self, paths: Sequence[str]) -> list[Node | None]:
        found = self._read(lambda: ReadMany([self._chroot + path for path in paths]))
        return list(map(self._node, paths, found))

    def children(self, path: str) -> list[str]:
        check_path(path)
        try:
            return sorted(self._read(lambda: jute.GetChildren(self._chroot + path, None)))
        except NoNodeError:
            return []

    def get_children(self, path: str) -> list[Node]:
        found = self.get_many([f"{path}/{name}" for name in self.children(path)])
        return [node for node in found if node is not None]

    def sync(self) -> None:
        """A transaction that changes nothing: when it is answered, all before it is done at the server that answers."""
        self._read(lambda: jute.Transaction([jute.CheckVersion(self._chroot or "/", -1)]))

    def _node(self, path: str, found: tuple[bytes | None, ZnodeStat] | ZookeeperError) -> Node | None:
        if isinstance(found, NoNodeError):
            return None
        if isinstance(found, ZookeeperError):
            self._raise_refused(found)
            raise PlaneUnavailable(f"{path}: ZooKeeper answers {found!r}")
        data, stat = found
        return Node(path, data or b"", stat.version, stat.ephemeralOwner != 0, stat.ephemeralOwner)

    def _read(self, make: Callable[[], Any]) -> Any:
        """The answer to a request that may be repeated. Raises ZookeeperErrors about the node itself as they are."""
        deadline = self._deadline()
        while True:
            self._await_connection(deadline)
            try:
                return self._ask(make(), deadline)
            except _REPEATABLE:
                if clock_s() >= deadline:  # a connection that came back with the last moment leaves no time to ask
                    raise PlaneUnavailable(f"ZooKeeper at {self._servers} does not answer") from None
                self._pause(RETRY_PAUSE_S)
            except _UnansweredError:
                raise PlaneUnavailable(f"ZooKeeper at {self._servers} does not answer") from None
            except (NoAuthError, AuthFailedError) as fault:
                self._raise_refused(fault)
                raise

    # --- committing ---

    def commit(self, *ops: Op) -> list[int]:
        check_commit(ops)
        deadline = self._deadline()
        before = self._session_id
        session_id = self._await_connection(deadline)
        if before not in (0, session_id):
            raise PlaneUnavailable("the session ended before the commit was sent")
        steps = _with_parents_between(ops)
        for _ in range(PARENT_ATTEMPTS):
            results = self._commit_in(session_id, [op for op, _ in steps], deadline)
            failed = _first_failure([op for op, _ in steps], results)
            if failed is None:
                return [_version_after(op, result) for (op, asked), result in zip(steps, results, strict=True) if asked]
            op, fault = failed
            if not (isinstance(op, Create) and isinstance(fault, NoNodeError)):
                self._raise_conflict(op, fault)
            self._make_parents_above(ops, session_id, deadline)
        raise NodeMissing(parent_of(op.path))

    def _commit_in(self, session_id: int, ops: Sequence[Op], deadline: float) -> list[Any]:
        if not ops:
            return []
        request = jute.Transaction([self._request(op) for op in ops])
        try:
            results: list[Any] = self._ask(request, deadline, session_id=session_id)
        except NotSentError:
            raise PlaneUnavailable(f"ZooKeeper at {self._servers} could not be asked") from None
        except (SessionMovedError, ThrottledOpError) as fault:
            raise PlaneUnavailable(f"ZooKeeper at {self._servers} refuses for now: {fault!r}") from None
        except (NoAuthError, AuthFailedError) as fault:
            self._raise_refused(fault)
            raise
        except (_UnansweredError, ZookeeperError, RuntimeError) as fault:
            raise OutcomeUnknown(f"ZooKeeper's answer to a commit was lost: {fault!r}") from None
        if len(results) != len(ops):
            raise OutcomeUnknown(f"ZooKeeper answered {len(results)} of {len(ops)} operations")
        return results

    def _request(self, op: Op) -> Any:
        path = self._chroot + op.path
        match op:
            case Create():
                return jute.Create(path, op.data, self._acl_for(path), _CREATE_EPHEMERAL if op.ephemeral else 0)
            case Set():
                return jute.SetData(path, op.data, op.version)
            case Delete():
                return jute.Delete(path, op.version)
            case Check():
                return jute.CheckVersion(path, op.version)

    def _make_parents_above(self, ops: Sequence[Op], session_id: int, deadline: float) -> None:
        """What is made here is in no transaction: it may stay alone, or be there already, made by someone else."""
        made_by_ops = {op.path for op in ops if isinstance(op, Create)}
        above = {path for op in ops if isinstance(op, Create) for path in _ancestors(op.path)}
        for path in sorted(above, key=lambda path: path.count("/")):
            if made_by_ops.isdisjoint([path, *_ancestors(path)]):
                self._create_lasting(self._chroot + path, session_id, deadline)

    def _create_lasting(self, full_path: str, session_id: int, deadline: float) -> None:
        """An empty node, which may be there already. A lost answer is no matter: nothing was promised yet."""
        try:
            self._ask(jute.Create(full_path, b"", self._acl_for(full_path), 0), deadline, session_id=session_id)
        except NodeExistsError:
            pass
        except NoChildrenForEphemeralsError:
            raise ValueError(f"{full_path}: an ephemeral node has no children") from None
        except (NoAuthError, AuthFailedError) as fault:
            self._raise_refused(fault)
        except (ZookeeperError, NotSentError, _UnansweredError) as fault:
            raise PlaneUnavailable(f"ZooKeeper at {self._servers} did not make {full_path}: {fault!r}") from None

    def _raise_conflict(self, op: Op, fault: ZookeeperError) -> NoReturn:
        self._raise_refused(fault)
        for kind, conflict in _CONFLICTS.items():
            if isinstance(fault, kind):
                raise conflict(op.path)
        if isinstance(fault, NoChildrenForEphemeralsError):
            raise ValueError(f"{op.path}: an ephemeral node has no children")
        if isinstance(fault, BadArgumentsError):
            raise ValueError(f"not a path of the control plane: {op.path!r}")
        raise PlaneUnavailable(f"{op.path}: ZooKeeper refuses with {fault!r}")

    def _raise_refused(self, fault: ZookeeperError) -> None:
        if isinstance(fault, (NoAuthError, AuthFailedError)):
            raise PlaneRefused(self._refused or f"ZooKeeper at {self._servers} keeps {self._chroot or '/'} for others")

    # --- one request ---

    def _deadline(self) -> float:
        return clock_s() + self._granted_timeout_s

    def _pause(self, seconds: float) -> None:
        client = self._client
        if client is not None:
            client.handler.sleep_func(seconds)

    def _ask(self, inner: Any, deadline: float, *, session_id: int = 0) -> Any:
        """The answer. Raises kazoo's errors, NotSentError when it never left, _UnansweredError after the deadline."""
        client = self._client
        if client is None:
            raise NotSentError
        request = SessionRequest(inner, session_id)
        result = client.handler.async_result()
        client._call(request, result)
        result.wait(max(0.0, deadline - clock_s()))
        fault = result.exception if result.ready() else _UnansweredError()
        if fault is None:
            return result.value
        if isinstance(fault, (_UnansweredError, ConnectionLoss, SessionExpiredError)) and request.claim():
            raise NotSentError
        raise fault


_CONFLICTS = {
    NoNodeError: NodeMissing,
    BadVersionError: VersionMismatch,
    NodeExistsError: NodeExists,
    NotEmptyError: NodeNotEmpty,
}


def _first_failure(ops: Sequence[Op], results: Sequence[Any]) -> tuple[Op, ZookeeperError] | None:
    """The operation that a transaction failed at. Those before it are said to be rolled back."""
    failures = [(op, result) for op, result in zip(ops, results, strict=True) if isinstance(result, ZookeeperError)]
    named = (failure for failure in failures if not isinstance(failure[1], RolledBackError))
    return next(named, failures[0] if failures else None)


def _with_parents_between(ops: Sequence[Op]) -> list[tuple[Op, bool]]:
    """The operations, and whether they were asked for: parents below a node that they make can only be made with it."""
    steps: list[tuple[Op, bool]] = []
    made: set[str] = set()
    for op in ops:
        if isinstance(op, Create):
            for path in _ancestors(op.path):
                if path not in made and not made.isdisjoint(_ancestors(path)):
                    steps.append((Create(path), False))
                    made.add(path)
            made.add(op.path)
        elif isinstance(op, Delete):
            made.discard(op.path)
        steps.append((op, True))
    return steps


def _version_after(op: Op, result: Any) -> int:
    match op:
        case Create():
            return 0
        case Set():
            return int(result.version)
        case Delete():
            return -1
        case Check():
            return op.version


def _ancestors(path: str) -> list[str]:
    """The paths above `path`, the topmost first."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[: depth + 1]) for depth in range(len(parts))]
