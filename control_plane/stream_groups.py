"""What the control plane holds of stream groups: who is in them, and how far they were.

    /streams/<group id>/membership           RosterState, changed only by compare-and-set of its version
    /streams/<group id>/offsets/<topic id>   CheckpointState: what every broker answers when a leader is away

They stand under the group's id and not under its name: versions start at 0 again when a group is deleted and made anew,
and a late compare-and-set of an old coordinator must not fit the new group. The truth about offsets is in the logs;
a checkpoint is a copy, a second old or so.

All is JSON that a person can read, until it grows large: then it is deflated.
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
    """The id of the group whose membership stands at this path; None when it is another path."""
    match path.split("/"):
        case ["", "streams", group_id, "membership"]:
            return group_id
    return None


def checkpoints_path(group_id: str) -> str:
    return f"{STREAMS}/{group_id}/offsets"


def checkpoint_path(group_id: str, topic_id: str) -> str:
    return f"{STREAMS}/{group_id}/offsets/{topic_id}"


class MemberState(msgspec.Struct, frozen=True):
    """`since`: the generation in which this client joined under its id."""

    id: str
    topics: tuple[str, ...]
    session_timeout_ms: int
    since: int


class RosterState(msgspec.Struct, frozen=True):
    """Who is in the group, and who has what. `coordinator` is (broker id, incarnation).

    `places` are by topic, (partition, owner, since, leaving): numbers of `members`, -1 for nobody. What they mean is
    told in broker/core/stream/membership.py.
    """

    generation: int
    coordinator: tuple[int, int]
    members: tuple[MemberState, ...] = ()
    topic_ids: dict[str, str] = {}
    places: dict[str, tuple[tuple[int, int, int, int], ...]] = {}


class CheckpointState(msgspec.Struct, frozen=True):
    """By partition: (committed offset, high watermark, messages between them), as they were at `at_ms` (Unix)."""

    topic: str
    at_ms: int
    offsets: dict[int, tuple[int, int, int]]


class StreamGroups(Tree):
    """Each call reads or writes one node; nothing is kept."""

    # --- membership --------------------------------------------------------------------------------------------------

    def roster(self, group_id: str, *, sure: bool = False) -> Versioned[RosterState] | None:
        """Who is in the group; after a sync when that is to be `sure`. Raises PlaneUnavailable."""
        if sure:
            self.plane.sync()
        held = self.plane.get(membership_path(group_id))
        return Versioned(decode(held.data), held.version) if held else None

    def set_roster(self, name: str, group_id: str, roster: RosterState, version: int) -> int:
        """Compare-and-set (-1: make it); answers the new version. Raises Conflict, OutcomeUnknown, PlaneUnavailable;
        NodeMissing for a group that is gone, be there another one of its name."""
        data = encode(roster)
        if version >= 0:
            return self.plane.commit(Set(membership_path(group_id), data, version))[0]
        group = self._group(name, group_id)
        if group is None:
            self.plane.sync()  # what was read may be older than the group
            group = self._group(name, group_id)
        if group is None:
            raise NodeMissing(state.group_path(name))
        self.plane.commit(Check(group.path, group.version), Create(membership_path(group_id), data))
        return 0

    def _group(self, name: str, group_id: str) -> Node | None:
        """The group's own node, while it is this very group's."""
        node = self.plane.get(state.group_path(name))
        if node is None or state.decode(node.data, state.GroupState).group_id != group_id:
            return None
        return node

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def checkpoints(self, group_id: str) -> dict[str, CheckpointState]:
        """The checkpoints by topic id."""
        return self._all(checkpoints_path(group_id), CheckpointState)

    def save_checkpoint(self, name: str, group_id: str, topic_id: str, checkpoint: CheckpointState) -> None:
        """The latest word counts. Nothing is written for a group that is gone."""
        path = checkpoint_path(group_id, topic_id)

        def save() -> None:
            held = self.plane.get(path)
            if held is not None:
                self.plane.commit(Set(path, state.encode(checkpoint), held.version))
                return
            group = self._group(name, group_id)
            if group is not None:
                self.plane.commit(Check(group.path, group.version), Create(path, state.encode(checkpoint)))

        self._until_fitting(f"offsets of group {name!r}", save)

    def removal(self, group_id: str) -> list[Op]:
        """What takes away all that stands here of a group: a part of the commit that deletes it."""
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
    """Raises msgspec.DecodeError, zlib.error for what is none."""
    return state.decode(data if data[:1] == b"{" else zlib.decompress(data), RosterState)
