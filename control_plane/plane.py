"""The control plane contract: a small tree of versioned nodes that all brokers share.

The contract promises no more than ZooKeeper does, so `standalone` (one process) and a real ensemble behave alike and
pass one contract suite (tests/contract). The modules above it (`catalog`, `controller`) run on either.

    node      A path ("/topics/temp_1"), some bytes, and a version: 0 when created, one more after each Set. A node that
              is deleted and created again starts at 0 again, so a path that is reused needs a unique id in its data
              or in its path for a compare-and-set to be safe.
    commit    Several operations, applied in order, all or none.
    ephemeral A node that is removed when the session of its creator ends. A hint, never proof of life. No children.
    parents   Created implicitly: empty, persistent, version 0. They may remain when the commit that needed them fails.
    watch     A change notification: "this may have changed, read it again". It may be late, repeated or spurious. It is
              silent while the connection is down, and then reports "anything may have changed".

Rejected: watches on single paths. They are dropped on a disconnect, coalesce, and miss a node that was deleted and
created again. A watcher reads the current state after each notification.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, assert_never

from portalmq.errors import Unavailable
from portalmq.system import steady_s

DATA_BYTES_MAX = 64 * 1024
# ZooKeeper refuses packets above 1 MB (jute.maxbuffer), a whole commit with its paths included.
PATH_CHARACTERS_MAX = 1_000
COMMIT_OPS_MAX = 100
COMMIT_BYTES_MAX = 512 * 1024

_PATH = re.compile(r"(/[^/\x00-\x1f\x7f-\x9f]+)+\Z")


class PlaneError(Exception):
    """The base class of errors of a control plane.

    PlaneError
    |-- Conflict             nothing was applied; read again and decide again
    |   |-- VersionMismatch  |-- NodeExists
    |   `-- NodeMissing      `-- NodeNotEmpty
    |-- PlaneUnavailable     nothing was applied; the plane does not answer
    |-- PlaneRefused         nothing was applied; the credentials are wrong, and a retry does not help
    `-- OutcomeUnknown       the commit may have been applied, or may be applied later: sync, then read
    """


class Conflict(PlaneError):
    """The tree differs from what the commit expects. Nothing was applied."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{type(self).__name__}: {path}")
        self.path = path


class VersionMismatch(Conflict):
    """The node has a version other than the expected one."""


class NodeExists(Conflict):
    """A node to be created exists."""


class NodeMissing(Conflict):
    """A node to be set, deleted or checked does not exist."""


class NodeNotEmpty(Conflict):
    """A node to be deleted has children."""


class PlaneUnavailable(PlaneError, Unavailable):
    """The control plane does not answer. Nothing was applied."""

    def __init__(self, detail: str) -> None:
        Unavailable.__init__(self, detail, retry_after_s=1.0)


class PlaneRefused(PlaneError, Unavailable):
    """The plane rejects the credentials, or this node belongs to another user. A retry does not help. Nothing was
    applied."""

    def __init__(self, detail: str) -> None:
        Unavailable.__init__(self, detail, retryable=False)


class OutcomeUnknown(PlaneError, Unavailable):
    """The answer to a commit was lost: it may have been applied, or may be applied later."""

    def __init__(self, detail: str) -> None:
        Unavailable.__init__(self, detail, outcome="unknown", retry_after_s=1.0)


class PlaneState(Enum):
    """The state of the session. ZooKeeper reports LOST only after a reconnect: callers need a lease of their own."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Node:
    """A node as read. `owner` is the session whose end removes an ephemeral node; 0 for a persistent one."""

    path: str
    data: bytes
    version: int
    ephemeral: bool = False
    owner: int = 0


@dataclass(frozen=True, slots=True)
class Create:
    path: str
    data: bytes = b""
    ephemeral: bool = False


@dataclass(frozen=True, slots=True)
class Set:
    path: str
    data: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Delete:
    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Check:
    path: str
    version: int


Op = Create | Set | Delete | Check
ChangeCallback = Callable[[str | None], None]


class ControlPlane(Protocol):
    @property
    def state(self) -> PlaneState: ...

    @property
    def session_id(self) -> int:
        """The session that owns ephemeral nodes created now; 0 without one. A new session creates them again."""
        ...

    @property
    def session_timeout_s(self) -> float:
        """How long the session survives silence. The plane grants it; it may differ from the requested timeout."""
        ...

    @property
    def last_answered(self) -> float:
        """`clock_s()` at the start of the last request that was answered, heartbeats included.

        The session lasts at least `session_timeout_s` from here, so a lease counted from here is never too long.
        """
        ...

    @property
    def set_back(self) -> bool:
        """True when the tree is known to have lost commits: it was emptied, or restored from an older copy. Never a
        false alarm, and permanent; but many commits since then can hide the loss."""
        ...

    def start(self) -> None:
        """Open the session. Raises PlaneUnavailable when no session can be opened, PlaneRefused for credentials."""
        ...

    def close(self) -> None:
        """End the session; its ephemeral nodes are removed. Closing twice is allowed."""
        ...

    def get(self, path: str) -> Node | None:
        """Return the node, or None. It may be older than another broker's latest commit, unless `sync` came before."""
        ...

    def children(self, path: str) -> list[str]:
        """Return the names directly below `path`, sorted; none when the node is missing."""
        ...

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """Return the result of `get` for each path, in few round trips. The nodes need not be of one moment."""
        ...

    def get_children(self, path: str) -> list[Node]:
        """Return the nodes directly below `path`, sorted by name, in few round trips. A node that is deleted during
        the call is left out."""
        ...

    def commit(self, *ops: Op) -> list[int]:
        """Apply all operations in order, or none. Return the version of each node after it, -1 for a Delete.

        The commit is sent in the session that exists at the call, or not at all.
        Raises the Conflict subclass of the first operation that fails, PlaneUnavailable, PlaneRefused, and
        OutcomeUnknown.
        """
        ...

    def sync(self) -> None:
        """Wait until reads see every commit that any broker made before this call."""
        ...

    def watch(self, callback: ChangeCallback) -> None:
        """Call `callback` with the path of each node that may have been created, set or deleted, by any broker.

        None means that anything may have changed, the state of the session included. One None after a disconnect
        covers all changes during it. A node that is created or deleted changes the children of its parent, which gets
        no call of its own. A callback records the path and returns: it never calls the plane, and never blocks.
        """
        ...


def check_path(path: str) -> str:
    """Return `path` if every plane can hold it. Raises ValueError: a bad path is a programming error."""
    if len(path) > PATH_CHARACTERS_MAX or not _PATH.match(path) or any(part in {".", ".."} for part in path.split("/")):
        raise ValueError(f"not a path of the control plane: {path!r}")
    return path


def check_commit(ops: tuple[Op, ...]) -> None:
    """Raise ValueError for a commit that some plane cannot take: too many operations, too much data, a bad path."""
    if len(ops) > COMMIT_OPS_MAX:
        raise ValueError(f"a commit holds at most {COMMIT_OPS_MAX} operations, not {len(ops)}")
    total = 0
    deleted: set[str] = set()
    for op in ops:
        check_path(op.path)
        if isinstance(op, Create) and any(op.path.startswith(f"{path}/") for path in deleted):
            # The parent would be neither there before the commit, as implicit parents are, nor after it.
            raise ValueError(f"{op.path}: a commit that deletes a node makes none below it")
        (deleted.add if isinstance(op, Delete) else deleted.discard)(op.path)
        match op:
            case Create() | Set():
                if len(op.data) > DATA_BYTES_MAX:
                    raise ValueError(f"{op.path}: a node holds at most {DATA_BYTES_MAX} bytes, not {len(op.data)}")
                total += len(op.data)
            case Delete() | Check():
                pass
            case _:
                assert_never(op)
        if not isinstance(op, Create) and op.version < 0:
            raise ValueError(f"{op.path}: a version is 0 or more, there is no wildcard")
    if total > COMMIT_BYTES_MAX:
        raise ValueError(f"a commit carries at most {COMMIT_BYTES_MAX} bytes, not {total}")


def clock_s() -> float:
    """Return the clock of `last_answered`: seconds that never jump, and that advance while the machine is suspended."""
    return steady_s()


def parent_of(path: str) -> str:
    """Return the path one level up; "" above the first level."""
    return path.rpartition("/")[0]
