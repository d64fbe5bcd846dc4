"""The control plane on ZooKeeper, through kazoo. Only this package imports kazoo.

One session, one connection at a time. kazoo's connection routine (a thread, or a greenlet in a broker) sends requests
in order and receives answers and watch events. All other routines wait for it, at most for about one session. This
package replaces the parts of kazoo that are unsafe for a cluster:

    session   kazoo reports LOST only after it reconnects, so SUSPENDED may last for ever: leases count from
              `last_answered`. Heartbeats count for it. The timeout is the one that the server granted.
    commits   kazoo sends its queued requests in whatever session comes next. Here a commit carries its session, and the
              connection drops it, unsent, in any other. So a commit that was never sent (PlaneUnavailable: nothing was
              applied) differs from one whose answer was lost (OutcomeUnknown).
    results   A failed transaction does not raise in kazoo: each result is checked.
    reads     Are repeated until the deadline, in any session, since they change nothing.
    sync      ZooKeeper's own sync waits for nothing at the leader, which tells followers to apply a transaction a
              moment before it applies it itself: a read there was stale about once in thousands.
    watch     One persistent recursive watch over the tree, set again on each connection and followed by a notification
              for "anything": no event covers the gap. kazoo 2.11 does not have that request: `connection`.
    connect   One silent server must not use up the session: each attempt gets a part of it. Later pauses between
              attempts stay short, so that a session survives a restart of its servers.
    set back  A server that was emptied or restored from an older copy rejects, without an error, clients that have seen
              more, so SUSPENDED would last for ever: `connection` ends such a session, and `set_back` becomes true.
    many      One request reads hundreds of nodes (ZooKeeper 3.6's multi-read).
    closed    With credentials a node belongs to their user alone. ZooKeeper nodes do not inherit ACLs, so each is
              created with its own, and `close_to_others` repairs the nodes of a tree that was open. Clients find the
              brokers in `/brokers/ids` without credentials: anybody may read there.
    TLS       kazoo's own trusts more than it is configured to, and can leave an answer unread: `connection`.

kazoo's callbacks run on its connection routine, where a call to ZooKeeper would wait for itself. They only record the
change; the callback worker calls the watchers.

Not used: kazoo's retry (crosses sessions), Lock, Election, Party, ChildrenWatch, DataWatch: each has a bug that loses a
change or keeps a leader whose session is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    BadVersionError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    SessionMovedError,
    ThrottledOpError,
    ZookeeperError,
)
from kazoo.protocol import serialization as jute
from kazoo.protocol.states import ZnodeStat
from kazoo.security import OPEN_ACL_UNSAFE, make_acl, make_digest_acl

from portalmq.control_plane.plane import (
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    NodeNotEmpty,
    Op,
    OutcomeUnknown,
    PlaneUnavailable,
    Set,
    VersionMismatch,
    check_commit,
    check_path,
    parent_of,
)
from portalmq.control_plane.state import BROKERS
from portalmq.control_plane.zookeeper.connection import Access, Handler, NotSentError, ReadMany, Tls
from portalmq.control_plane.zookeeper.session import UnansweredError, ZooKeeperSession

PARENT_ATTEMPTS = 3
NODES_OF_A_READ_MAX = 200

_CREATE_EPHEMERAL = 1
_ANY_VERSION = -1
_ZOOKEEPERS_OWN = "/zookeeper"


class ZooKeeper(ZooKeeperSession):
    """A `ControlPlane` on ZooKeeper 3.6 or newer.

    `hosts` is `host:port,host:port/chroot`; a missing chroot is created. `auth` is a user and a password: then all
    nodes, the chroot included, belong to that user alone. `owns_root` allows this on the root of a server, which then
    excludes everybody else. `closes=False` leaves the ACL of an existing chroot unchanged.
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
        """Raise ValueError for malformed hosts, and for credentials without a chroot to protect."""
        servers, slash, path = hosts.partition("/")
        if not all(servers.split(",")):
            raise ValueError(f"not ZooKeeper's hosts: {hosts!r}; write HOST:PORT,HOST:PORT/CHROOT")
        chroot = check_path(slash + path) if path else ""
        if auth and not chroot and not owns_root:
            raise ValueError(f"credentials protect a chroot: write {hosts}/portalmq, for instance")
        super().__init__(Access(servers, session_timeout_s, handler, auth, tls), chroot)
        self._closes = closes
        self._acl = [make_digest_acl(*auth, all=True)] if auth else OPEN_ACL_UNSAFE
        self._acl_of_brokers = [*self._acl, make_acl("world", "anyone", read=True)] if auth else OPEN_ACL_UNSAFE

    def _prepare(self) -> None:
        """Create the chroot if it is missing, close it to others, and check that it is readable."""
        if self._chroot and self._read(lambda: jute.Exists(self._chroot, None)) is None:
            deadline = self._deadline()
            for path in [*_ancestors(self._chroot), self._chroot]:
                self._create_lasting(path, self._await_connection(deadline), deadline)
        if self._access.auth and self._closes and self.is_open:
            # An operator may have created the chroot, open to all.
            self._read(lambda: jute.SetACL(self._root, self._acl, _ANY_VERSION))
        if self._chroot:
            self._read(lambda: jute.GetData(self._chroot, None))

    # --- access to the nodes ---

    @property
    def _root(self) -> str:
        return self._chroot or "/"

    def _acl_for(self, path: str) -> list[Any]:
        """Return the ACL of a node; `path` includes the chroot."""
        shown = f"{self._chroot}{BROKERS}"
        return self._acl_of_brokers if path == shown or path.startswith(f"{shown}/") else self._acl

    @property
    def is_open(self) -> bool:
        """True when other users have permissions on the topmost node."""
        acl, _ = self._read(lambda: jute.GetACL(self._root))
        return set(acl) != set(self._acl)

    def open_to_others(self, *paths: str) -> dict[str, int]:
        """Return the version of each of these nodes whose ACL differs from the one this class would set."""
        found = self._each([self._chroot + path for path in paths], jute.GetACL)
        return {
            path[len(self._chroot) :]: stat.version for path, (acl, stat) in found if not self._is_closed(path, acl)
        }

    def close_to_others(self) -> int:
        """Give every node the ACL that this class creates it with. Return how many had another.

        It works from the top down: nobody else can create a node below a closed one. Raises PlaneRefused at a node
        that belongs to another user.
        """
        assert self._access.auth, "only credentials close a tree"
        mended = 0
        level = [self._root]
        while level:
            found = self._each(level, jute.GetACL)
            wrong = [path for path, (acl, _) in found if not self._is_closed(path, acl)]
            self._each(wrong, lambda path: jute.SetACL(path, self._acl_for(path), _ANY_VERSION))
            mended += len(wrong)
            # Another user may have added a child below an open node since it was read.
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

    # --- reading ---

    def get(self, path: str) -> Node | None:
        return self.get_many([path])[0]

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        nodes: list[Node | None] = []
        for start in range(0, len(paths), NODES_OF_A_READ_MAX):
            some = paths[start : start + NODES_OF_A_READ_MAX]
            full = [self._chroot + check_path(path) for path in some]
            nodes += map(self._node, some, self._read(partial(ReadMany, full)))
        return nodes

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
        """Commit a transaction that changes nothing. Its answer means that the answering server applied all before."""
        self._read(lambda: jute.Transaction([jute.CheckVersion(self._chroot or "/", -1)]))

    def _node(self, path: str, found: tuple[bytes | None, ZnodeStat] | ZookeeperError) -> Node | None:
        if isinstance(found, NoNodeError):
            return None
        if isinstance(found, ZookeeperError):
            self._raise_refused(found)
            raise PlaneUnavailable(f"{path}: ZooKeeper answers {found!r}")
        data, stat = found
        return Node(path, data or b"", stat.version, stat.ephemeralOwner != 0, stat.ephemeralOwner)

    # --- committing ---

    def commit(self, *ops: Op) -> list[int]:
        check_commit(ops)
        deadline = self._deadline()
        before = self.session_id
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
        except (UnansweredError, ZookeeperError, RuntimeError) as fault:
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
        """Create the missing parents. They are in no transaction: one may remain alone, or exist already."""
        made_by_ops = {op.path for op in ops if isinstance(op, Create)}
        above = {path for op in ops if isinstance(op, Create) for path in _ancestors(op.path)}
        for path in sorted(above, key=lambda path: path.count("/")):
            if made_by_ops.isdisjoint([path, *_ancestors(path)]):
                self._create_lasting(self._chroot + path, session_id, deadline)

    def _create_lasting(self, full_path: str, session_id: int, deadline: float) -> None:
        """Create an empty node, unless it exists. A lost answer is harmless: nothing depends on the node yet."""
        try:
            self._ask(jute.Create(full_path, b"", self._acl_for(full_path), 0), deadline, session_id=session_id)
        except NodeExistsError:
            pass
        except NoChildrenForEphemeralsError:
            raise ValueError(f"{full_path}: an ephemeral node has no children") from None
        except (NoAuthError, AuthFailedError) as fault:
            self._raise_refused(fault)
        except (ZookeeperError, NotSentError, UnansweredError) as fault:
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


_CONFLICTS = {
    NoNodeError: NodeMissing,
    BadVersionError: VersionMismatch,
    NodeExistsError: NodeExists,
    NotEmptyError: NodeNotEmpty,
}


def _first_failure(ops: Sequence[Op], results: Sequence[Any]) -> tuple[Op, ZookeeperError] | None:
    """Return the operation that failed the transaction. ZooKeeper reports those before it as rolled back."""
    failures = [(op, result) for op, result in zip(ops, results, strict=True) if isinstance(result, ZookeeperError)]
    named = (failure for failure in failures if not isinstance(failure[1], RolledBackError))
    return next(named, failures[0] if failures else None)


def _with_parents_between(ops: Sequence[Op]) -> list[tuple[Op, bool]]:
    """Return the operations, each with True, and with False the parents that must be created between them: the parents
    below a node that the commit creates."""
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
    """Return the paths above `path`, the topmost first."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[: depth + 1]) for depth in range(len(parts))]
