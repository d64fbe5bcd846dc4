"""The control plane as the rest of the house sees it: a small tree of versioned nodes, shared by all brokers.

The contract is what ZooKeeper gives, and no more, so that the one-process stand-in (`standalone`) and a real ensemble
behave alike and pass one contract suite (tests/contract). Everything above it (`catalog`, `controller`) is shared.

    node      a path ("/topics/temp_1"), some bytes, and a version: 0 when created, one more after each Set. A node that
              was deleted and made again starts at 0 once more, so a path that is reused needs a unique id in its data
              or in its path for a compare-and-set to be safe.
    commit    several operations, applied in order, all or none.
    ephemeral a node that goes when the session of its maker ends. A hint, never proof of life. It has no children.
    parents   are made implicitly: empty, persistent, version 0. They may stay when the commit they were made for fails.
    watch     a doorbell: "this may have changed, look again". It may ring late, twice, and for nothing; while the
              connection is down it is silent, and says "anything may have changed" once it is back.

Rejected: watches on single paths. They are dropped on a disconnect, coalesce, and miss a node that was deleted and
made again; whoever hears the bell reads what it needs afresh.
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
    """Base of what a control plane raises.

    PlaneError
    |-- Conflict             nothing was applied; read again and decide again
    |   |-- VersionMismatch  |-- NodeExists
    |   `-- NodeMissing      `-- NodeNotEmpty
    |-- PlaneUnavailable     nothing was applied; the plane does not answer
    |-- PlaneRefused         nothing was applied; the credentials are not those of the tree, and will not become so
    `-- OutcomeUnknown       the commit may have been applied, or may yet be: sync, read, and see
    """


class Conflict(PlaneError):
    """The tree is not as the commit expects it. Nothing was applied."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{type(self).__name__}: {path}")
        self.path = path


class VersionMismatch(Conflict):
    """The node has another version than the one named."""


class NodeExists(Conflict):
    """A node to be created is there already."""


class NodeMissing(Conflict):
    """A node to be set, deleted or checked is not there."""


class NodeNotEmpty(Conflict):
    """A node to be deleted has children."""


class PlaneUnavailable(PlaneError, Unavailable):
    """The control plane does not answer. Nothing was applied."""

    def __init__(self, detail: str) -> None:
        Unavailable.__init__(self, detail, retry_after_s=1.0)


class PlaneRefused(PlaneError, Unavailable):
    """The plane does not take our credentials, or keeps this node for others. No repeat helps. Nothing was applied."""

    def __init__(self, detail: str) -> None:
        Unavailable.__init__(self, detail, retryable=False)


class OutcomeUnknown(PlaneError, Unavailable):
    """The answer to a commit was lost: it may have been applied, or may yet be."""

    def __init__(self, detail: str) -> None:
        Unavailable.__init__(self, detail, outcome="unknown", retry_after_s=1.0)


class PlaneState(Enum):
    """How the session stands. ZooKeeper tells of LOST only after it was reached again: hold a lease of your own."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Node:
    """`owner` is the session whose end takes an ephemeral node away; 0 for a lasting one."""

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
        """The session that ephemeral nodes made now belong to; 0 without one. A new one makes them anew."""
        ...

    @property
    def session_timeout_s(self) -> float:
        """How long the session outlives silence, as the plane granted it, which may differ from what was asked."""
        ...

    @property
    def last_answered(self) -> float:
        """`clock_s()` when the last request that was answered began, heartbeats included.

        The session lasts until `session_timeout_s` after this at least, so a lease counted from here is never too long.
        """
        ...

    @property
    def set_back(self) -> bool:
        """Whether the tree is known to have lost commits: it was emptied, or restored from an older copy. Never false
        alarm, and true for good; but if many commits were made since, it may stay unknown."""
        ...

    def start(self) -> None:
        """Open the session. Raises PlaneUnavailable when there is none to be had, PlaneRefused for credentials."""
        ...

    def close(self) -> None:
        """End the session; its ephemeral nodes go. Closing twice is allowed."""
        ...

    def get(self, path: str) -> Node | None:
        """The node, or None. May be older than another broker's latest commit, unless `sync` came before."""
        ...

    def children(self, path: str) -> list[str]:
        """The names right below `path`, sorted; none when the node is missing."""
        ...

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        """As `get` for each path, in few round trips. The nodes need not be of one moment."""
        ...

    def get_children(self, path: str) -> list[Node]:
        """The nodes right below `path`, sorted by name, in few round trips; one that goes meanwhile is left out."""
        ...

    def commit(self, *ops: Op) -> list[int]:
        """Apply all operations in order, or none. Answers the version of each node after it, -1 for a Delete.

        It is sent in the session that stands when it is called, or not at all.
        Raises Conflict's subclasses for the first operation that does not fit, PlaneUnavailable, PlaneRefused, and
        OutcomeUnknown.
        """
        ...

    def sync(self) -> None:
        """What was committed anywhere before this call is seen by the reads after it."""
        ...

    def watch(self, callback: ChangeCallback) -> None:
        """Call `callback` with the path of each node that may have been made, set or deleted, by anyone.

        None means that anything may have changed, the state of the session included. Changes of a time without
        connection are told by one None after it. A node made or deleted changes the children of its parent, which is
        not named as well. A callback only leaves a note for its owner: it never calls the plane, and never blocks.
        """
        ...


def check_path(path: str) -> str:
    """`path`, when every plane can hold it. A bad one is a mistake of ours, so it raises ValueError."""
    if len(path) > PATH_CHARACTERS_MAX or not _PATH.match(path) or any(part in {".", ".."} for part in path.split("/")):
        raise ValueError(f"not a path of the control plane: {path!r}")
    return path


def check_commit(ops: tuple[Op, ...]) -> None:
    """Refuse, with ValueError, what some plane could not take: too many operations, too much data, a bad path."""
    if len(ops) > COMMIT_OPS_MAX:
        raise ValueError(f"a commit holds at most {COMMIT_OPS_MAX} operations, not {len(ops)}")
    total = 0
    deleted: set[str] = set()
    for op in ops:
        check_path(op.path)
        if isinstance(op, Create) and any(op.path.startswith(f"{path}/") for path in deleted):
            # The parent could not be made before the commit, as implicit ones are, nor would it be there after it.
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
    """The clock of `last_answered`: seconds that never jump, and that go on while the machine is suspended."""
    return steady_s()


def parent_of(path: str) -> str:
    """The path one level up; "" above the first level."""
    return path.rpartition("/")[0]
