"""Stream groups in the control plane: their members and copies of their offsets.

    /streams/<group id>/membership           RosterState, changed only by compare-and-set of its version
    /streams/<group id>/offsets/<topic id>   CheckpointState: what every broker answers while a leader is away

They are under the group's id, not its name: versions restart at 0 when a group is deleted and created again, and a late
compare-and-set of an old coordinator must not match the new group. The log is authoritative for offsets; a checkpoint
is a copy, about a second old.

All is readable JSON up to a size limit, above which it is deflated.
"""

from __future__ import annotations

import zlib

import msgspec

from portalmq.control_plane import state
from portalmq.control_plane.plane import Check, Create, Delete, Node, NodeMissing, Op, Set
from portalmq.control_plane.tree import Tree, Versioned

STREAMS = "/streams"
PLAIN_BYTES_MAX = 16 * 1024


def membership_path(group_id: str) -> str:
    return f"{STREAMS}/{group_id}/membership"


def group_id_of(path: str) -> str | None:
    """Return the id of the group whose membership is at this path; None for another path."""
    match path.split("/"):
        case ["", "streams", group_id, "membership"]:
            return group_id
    return None


def checkpoints_path(group_id: str) -> str:
    return f"{STREAMS}/{group_id}/offsets"


def checkpoint_path(group_id: str, topic_id: str) -> str:
    return f"{STREAMS}/{group_id}/offsets/{topic_id}"


class MemberState(msgspec.Struct, frozen=True):
    """A member. `since` is the generation in which this client joined under its id."""

    id: str
    topics: tuple[str, ...]
    session_timeout_ms: int
    since: int


class RosterState(msgspec.Struct, frozen=True):
    """The members of a group and their partitions. `coordinator` is (broker id, incarnation).

    `places` has, by topic, (partition, owner, since, leaving): indexes into `members`, -1 for none. Their meaning is
    documented in broker/core/stream/membership.py.
    """

    generation: int
    coordinator: tuple[int, int]
    members: tuple[MemberState, ...] = ()
    topic_ids: dict[str, str] = {}
    places: dict[str, tuple[tuple[int, int, int, int], ...]] = {}


class CheckpointState(msgspec.Struct, frozen=True):
    """A copy of a topic's offsets at `at_ms` (Unix): by partition (committed, high watermark, messages between)."""

    topic: str
    at_ms: int
    offsets: dict[int, tuple[int, int, int]]


class StreamGroups(Tree):
    """Typed access to the nodes of stream groups. Each call reads or writes one node; nothing is cached."""

    # --- membership --------------------------------------------------------------------------------------------------

    def roster(self, group_id: str, *, sure: bool = False) -> Versioned[RosterState] | None:
        """Return the group's members; with `sure` after a sync. Raises PlaneUnavailable."""
        if sure:
            self.plane.sync()
        held = self.plane.get(membership_path(group_id))
        return Versioned(decode(held.data), held.version) if held else None

    def set_roster(self, name: str, group_id: str, roster: RosterState, version: int) -> int:
        """Compare-and-set the members (version -1: create). Return the new version. Raises Conflict, OutcomeUnknown,
        PlaneUnavailable; NodeMissing for a deleted group, even if another one has its name."""
        data = encode(roster)
        if version >= 0:
            return self.plane.commit(Set(membership_path(group_id), data, version))[0]
        group = self._group(name, group_id)
        if group is None:
            self.plane.sync()  # the read may be older than the group
            group = self._group(name, group_id)
        if group is None:
            raise NodeMissing(state.group_path(name))
        self.plane.commit(Check(group.path, group.version), Create(membership_path(group_id), data))
        return 0

    def _group(self, name: str, group_id: str) -> Node | None:
        """Return the group's own node; None when the name belongs to another group."""
        node = self.plane.get(state.group_path(name))
        if node is None or state.decode(node.data, state.GroupState).group_id != group_id:
            return None
        return node

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self, group_id: str) -> dict[str, CheckpointState]:
        """Return the checkpoints by topic id."""
        return self._all(checkpoints_path(group_id), CheckpointState)

    def checkpoint(self, group_id: str, topic_id: str) -> CheckpointState | None:
        held = self._read(checkpoint_path(group_id, topic_id), CheckpointState)
        return held.value if held is not None else None

    def save_checkpoint(self, name: str, group_id: str, topic_id: str, checkpoint: CheckpointState) -> None:
        """Save the checkpoint; the last write wins. Nothing is written for a deleted group."""
        path = checkpoint_path(group_id, topic_id)

        def save() -> None:
            held = self.plane.get(path)
            if held is not None:
                self.plane.commit(Set(path, state.encode(checkpoint), held.version))
                return
            group = self._group(name, group_id)
            if group is not None:
                self.plane.commit(Check(group.path, group.version), Create(path, state.encode(checkpoint)))

        self._retry_conflicts(f"offsets of group {name!r}", save)

    def removal(self, group_id: str) -> list[Op]:
        """Return the operations that remove the group's nodes: a part of the commit that deletes it."""
        home, offsets = f"{STREAMS}/{group_id}", checkpoints_path(group_id)
        nodes = [
            *self.plane.get_children(offsets),
            self.plane.get(offsets),
            self.plane.get(membership_path(group_id)),
            self.plane.get(home),
        ]
        return [Delete(node.path, node.version) for node in nodes if node is not None]


def encode(roster: RosterState) -> bytes:
    plain = state.encode(roster)
    return plain if len(plain) <= PLAIN_BYTES_MAX else zlib.compress(plain)


def decode(data: bytes) -> RosterState:
    """Decode a roster. Raises msgspec.DecodeError, zlib.error for malformed bytes."""
    return state.decode(data if data[:1] == b"{" else zlib.decompress(data), RosterState)
